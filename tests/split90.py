"""Check one kernel of the split backward of warpgroups, with `delta` before it, and look for faults in its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from flashsmith.check import Verdict, check
from flashsmith.compile import Binary, compile_source
from flashsmith.emulator import EmulatorError, missing_wgmma_fences, parse
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import LaunchError
from flashsmith.inputs import Inputs
from flashsmith.render import Source, render
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import RowTile, Tile

from .emulator.conftest import compile_cuda

Fields = Mapping[str, Any]


def problem_of(fields: Fields) -> Problem:
    """bf16 and two query heads of one key head, unless said otherwise."""
    return Problem(**{"dtype": "bf16", "Hq": 2, "Hk": 1, **fields})


@cache
def compiled(kernel: KernelName, problem: Problem, tile: Tile) -> Binary:
    """Its machine code for the H100."""
    return compile_source(render(KernelSpec.of(kernel, problem, tile, 90)))


def verdict_of(binary: Binary, problem: Problem, *, late: bool, inputs: Inputs | None = None) -> Verdict:
    """What it makes, beside float64; every access to shared memory must be ordered."""
    delta = compiled("delta", problem, RowTile())
    engine = EmulatedEngine(check_races=True, late=late)
    return check(problem, "backward", {"delta": delta, binary.spec.kernel: binary}, engine, inputs)


def unfenced(binary: Binary) -> tuple[str, ...]:
    """Products whose registers were written since the last fence."""
    return missing_wgmma_fences(parse(binary.ptx).kernels[binary.spec.kernel])


def replaced(text: str, changes: list[tuple[str, str]]) -> str:
    """`text` with each old text, which stands in it once, replaced."""
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the text"
        text = text.replace(old, new)
    return text


def wrong(source: Source, text: str, problem: Problem, inputs: Inputs | None = None) -> bool:
    """Whether the PTX of `text`, or one of both timings, shows a fault. ptxas, which may refuse some, is not asked."""
    binary = replace(compile_source(source), ptx=compile_cuda(text, "compute_90a"))
    return bool(unfenced(binary)) or any(_fails(binary, problem, late, inputs) for late in (True, False))


def _fails(binary: Binary, problem: Problem, late: bool, inputs: Inputs | None) -> bool:
    try:
        return not verdict_of(binary, problem, late=late, inputs=inputs).ok
    except (EmulatorError, LaunchError):
        return True

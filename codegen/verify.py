"""Verify one kernel with the rest of its pass on small, awkward shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .check import check
from .compile import Binary, compile_source
from .engines.engine import Engine
from .forms import launches_with, pass_of
from .render import render
from .spec.defaults import default_tile
from .spec.gpu import Gpu
from .spec.kernel import CONVERTS, KernelName, KernelSpec
from .spec.problem import Problem
from .spec.tile import Tile

CUT = 3  # parts of the keys, in a pass that has parts

# (Nq, Nk): tails on both sides; less than a tile. The emulator takes a second for each.
SHAPES = ((129, 200), (70, 70))
# And, where they cost nothing: rows that see no key when causal, one row against many, many tiles with tails.
MORE_SHAPES = (*SHAPES, (333, 190), (1, 577), (577, 1100))


def why_wrong(
    binary: Binary,
    problem: Problem,
    gpu: Gpu,
    engine: Callable[[], Engine],
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> str:
    """Run a kernel, and default tiles for the rest of its pass, against float64; `engine` makes one for each shape.

    "" if it is right, else the tensors that are not, and the races found. Raises LaunchError.
    """
    spec = binary.spec
    kernels = launches_with(spec.kernel, problem)
    binaries = {name: binary if name == spec.kernel else companion(name, spec, problem, gpu) for name in kernels}
    for Nq, Nk in shapes:
        B = 1 if problem.lengths == "uniform" else 3  # of different lengths, one with nothing
        small = replace(problem, B=B, Hq=2, Hk=1, Nq=Nq, Nk=Nk)
        verdict = check(small, pass_of(spec.kernel), binaries, engine(), parts=CUT)
        if not verdict.ok:
            return f"Nq={Nq}, Nk={Nk}: {verdict.reason}"
    return ""


def companion(kernel: KernelName, spec: KernelSpec, problem: Problem, gpu: Gpu) -> Binary:
    """A kernel that runs beside `spec` in its pass: convert has the tile of fused, the others the default."""
    shared = CONVERTS.get(kernel) == spec.kernel
    return of_tile(kernel, problem, spec.tile if shared else default_tile(kernel, problem, gpu), gpu)


def of_tile(kernel: KernelName, problem: Problem, tile: Tile, gpu: Gpu) -> Binary:
    """A kernel's machine code."""
    return compile_source(render(KernelSpec.of(kernel, problem, tile, gpu.sm)))

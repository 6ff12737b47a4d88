"""Every kernel against float64 over the whole matrix of problems, and small faults that a check must find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flashsmith.check import check, make_inputs
from flashsmith.compile import Binary, compile_source
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.render import render
from flashsmith.spec.kernel import KernelName
from flashsmith.spec.problem import Dtype, Pass, Problem
from flashsmith.spec.tile import ALL_HEADS, GROUPED, HEAD_BY_HEAD

from .attend import binaries

LENGTHS = ((1, 1), (5, 2), (65, 65), (200, 333), (257, 129))
MODES: dict[str, tuple[Pass, bool]] = {
    "forward": ("forward", False), "backward": ("backward", False), "deterministic": ("backward", True),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("d", [40, 64, 72, 96, 128, 192, 256])
def test_matrix(d: int, dtype: Dtype, causal: bool, mode: str) -> None:
    """Heads 6 over 2, every tail and both signs of Nk - Nq; within twice the error of plain attention, no race."""
    which, deterministic = MODES[mode]
    kernels = binaries(dtype, d, causal, which, deterministic)
    for Nq, Nk in LENGTHS:
        problem = Problem(dtype=dtype, d=d, causal=causal, Hq=6, Hk=2, Nq=Nq, Nk=Nk)
        verdict = check(problem, which, kernels, EmulatedEngine(check_races=True))
        assert verdict.ok, f"Nq={Nq} Nk={Nk}: {verdict.reason}"


@pytest.mark.parametrize("d", [8, 16, 24, 248])
@pytest.mark.parametrize("mode", MODES)
def test_the_ends_of_the_range(d: int, mode: str) -> None:
    which, deterministic = MODES[mode]
    problem = Problem(dtype="bf16", d=d, causal=True, Hq=2, Hk=1, Nq=70, Nk=90)
    verdict = check(problem, which, binaries("bf16", d, True, which, deterministic), EmulatedEngine(check_races=True))
    assert verdict.ok, verdict.reason


def with_tile(kernels: dict[KernelName, Binary], kernel: KernelName, **fields: Any) -> dict[KernelName, Binary]:
    """The kernels of a pass, with fields of the tile of one replaced; convert has the tile of fused."""
    of_tile = {kernel, "convert"} if kernel == "fused" else {kernel}
    specs = {name: binary.spec for name, binary in kernels.items()}
    changed = {
        name: replace(spec, tile=replace(spec.tile, **fields)) for name, spec in specs.items() if name in of_tile
    }
    return {**kernels, **{name: compile_source(render(spec)) for name, spec in changed.items()}}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("d", "dtype", "lazy"), [(64, "bf16", True), (64, "fp16", False), (72, "bf16", False), (128, "bf16", True),
                             (256, "fp16", False)],
)  # fmt: skip
def test_keys_from_first_to_last(d: int, dtype: Dtype, lazy: bool, causal: bool) -> None:
    """Each tile is copied with a look at its end; with a mask the last ones are masked, and may be seen by nobody."""
    kernels = with_tile(binaries(dtype, d, causal, "forward"), "forward", ascending=True, lazy=lazy)
    for Nq, Nk in LENGTHS:
        problem = Problem(dtype=dtype, d=d, causal=causal, Hq=6, Hk=2, Nq=Nq, Nk=Nk)
        verdict = check(problem, "forward", kernels, EmulatedEngine(check_races=True))
        assert verdict.ok, f"Nq={Nq} Nk={Nk}: {verdict.reason}"


@pytest.mark.parametrize(
    ("kernel", "order"),
    [("forward", HEAD_BY_HEAD), ("forward", ALL_HEADS), ("fused", GROUPED), ("fused", ALL_HEADS), ("dkdv", GROUPED),
     ("dkdv", ALL_HEADS), ("dq", GROUPED), ("dq", ALL_HEADS)],
)  # fmt: skip
def test_orders_of_the_blocks(kernel: KernelName, order: int) -> None:
    which, deterministic = MODES["deterministic" if kernel in ("dkdv", "dq") else "forward" if kernel == "forward" else
                                 "backward"]  # fmt: skip
    kernels = with_tile(binaries("bf16", 64, True, which, deterministic), kernel, order=order)
    for Nq, Nk in ((65, 65), (200, 333), (257, 129)):
        problem = Problem(dtype="bf16", d=64, causal=True, B=2, Hq=6, Hk=2, Nq=Nq, Nk=Nk)
        verdict = check(problem, which, kernels, EmulatedEngine(check_races=True))
        assert verdict.ok, f"Nq={Nq} Nk={Nk}: {verdict.reason}"


def test_batches_and_other_scales() -> None:
    problem = Problem(dtype="fp16", d=64, B=3, Hq=2, Hk=2, Nq=33, Nk=47, scale=0.31)
    for which in ("forward", "backward"):
        verdict = check(problem, which, binaries("fp16", 64, False, which), EmulatedEngine(check_races=True))  # type: ignore[arg-type]
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("skewed", [False, True], ids=["normal", "one key 30 times larger"])
@pytest.mark.parametrize("d", [64, 128])
def test_errors_stay_beside_those_of_plain_attention(d: int, skewed: bool) -> None:
    """BUG-06, with a distribution that strains the softmax."""
    problem = Problem(dtype="bf16", d=d, Hq=2, Hk=2, Nq=128)
    inputs = make_inputs(problem, seed=5)
    if skewed:
        from flashsmith.spec.dtype import round_to, widen

        k = widen(inputs.k, "bf16")
        k[:, :, 17] *= 30
        inputs = replace(inputs, k=round_to(k, "bf16"))
    for which in ("forward", "backward"):
        verdict = check(problem, which, binaries("bf16", d, False, which), EmulatedEngine(), inputs)  # type: ignore[arg-type]
        assert verdict.ok, verdict.reason

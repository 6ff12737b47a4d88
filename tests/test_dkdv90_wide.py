"""dK and dV of wide heads by warpgroups against float64, and what ptxas makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from flashsmith.check import check
from flashsmith.compile import Binary, compile_source
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import CompileError
from flashsmith.inputs import make_inputs
from flashsmith.render import render
from flashsmith.sass import disassemble
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.dtype import round_to, widen
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import SPLIT90_WIDE, KernelSpec, split90
from flashsmith.spec.tile import ALL_HEADS, HEAD_BY_HEAD, WarpgroupWideTile
from flashsmith.spec.warpgroup_wide_shape import column_blocks

from .split90 import Fields, compiled, problem_of, unfenced, verdict_of
from .test_render import tidy

# The problem and the tile. There are more tiles of queries than buffers, of two query heads or of one.
CASES: dict[str, tuple[Fields, Fields]] = {
    "d256": ({"d": 256, "Nq": 130, "Nk": 100}, {"Bc": 64}),
    "d256 causal, rows without a key": ({"d": 256, "Nq": 150, "Nk": 90, "causal": True}, {"Bc": 48}),
    "d256 causal, one buffer of dO": (
        {"d": 256, "Nq": 100, "Nk": 170, "causal": True},
        {"Bc": 80, "dO_stages": 1, "overlap": False, "order": HEAD_BY_HEAD},
    ),
    "d256, one buffer": (
        {"d": 256, "Nq": 130, "Nk": 70, "Hq": 1}, {"Bc": 64, "stages": 1, "dO_stages": 1, "overlap": False},
    ),
    "d192": ({"d": 192, "Nq": 130, "Nk": 100, "Hq": 1}, {"Bc": 96, "consumers": 3}),
    "d192 causal, two heads": (
        {"d": 192, "Nq": 70, "Nk": 130, "causal": True, "Hq": 4, "Hk": 2},
        {"Bc": 96, "consumers": 3, "order": ALL_HEADS},
    ),
    "d192 dv128 fp16": (
        {"d": 192, "dv": 128, "dtype": "fp16", "Nq": 130, "Nk": 60}, {"Bc": 96, "consumers": 3},
    ),
    "d192 by two": ({"d": 192, "Nq": 200, "Nk": 70, "Hq": 1}, {"Bc": 80}),
    "d136 dv8 causal, a batch of two": (
        {"d": 136, "dv": 8, "Nq": 70, "Nk": 70, "causal": True, "B": 2, "Hk": 2}, {"Bc": 48, "consumers": 3},
    ),
    "d72 dv256": ({"d": 72, "dv": 256, "Nq": 130, "Nk": 60, "Hq": 1}, {"Bc": 64}),
    "d256, one row and key": ({"d": 256, "Nq": 1, "Nk": 1, "Hq": 1}, {"Bc": 16}),
}  # fmt: skip

GOLDEN: dict[str, tuple[Fields, Fields]] = {
    "dkdv90_wide_d256_causal_h100": ({"d": 256, "causal": True}, {"Bc": 64}),
}
TIMINGS = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
H100 = find_gpu("h100-sxm")


def binary_of(problem: Fields, tile: Fields) -> Binary:
    return compiled("dkdv90_wide", problem_of(problem), WarpgroupWideTile(**tile))


def spec_of(problem: Fields, tile: Fields) -> KernelSpec:
    return KernelSpec.of("dkdv90_wide", problem_of(problem), WarpgroupWideTile(**tile), 90)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.cu", render(spec_of(*GOLDEN[name])).text)


@pytest.mark.parametrize("case", {**CASES, **GOLDEN}.values(), ids=[*CASES, *GOLDEN])
def test_the_text_is_tidy(case: tuple[Fields, Fields]) -> None:
    tidy(spec_of(*case))


@TIMINGS
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, late: bool) -> None:
    """Whether copies and products happen at once or at the last moment; all accesses ordered, all wgmma fenced."""
    problem, tile = CASES[name]
    binary = binary_of(problem, tile)
    verdict = verdict_of(binary, problem_of(problem), late=late)
    assert [line.tensor for line in verdict.lines] == ["dK", "dV"]
    assert verdict.ok, verdict.reason
    assert not unfenced(binary)
    assert binary.spill_bytes == 0


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_huge_scores(size: float) -> None:
    """Rows whose max delta keeps apart from l: the max has weight 1 all the same. Half of the rows are not huge."""
    fields = {"d": 192, "Nq": 70, "Nk": 90, "Hq": 1}
    problem = problem_of(fields)
    x = make_inputs(problem)
    q = widen(x.q, "bf16")
    q[:, :, ::2] *= size
    x = replace(x, q=round_to(q, "bf16"))
    verdict = verdict_of(binary_of(fields, {"Bc": 48, "consumers": 3}), problem, late=True, inputs=x)
    assert verdict.ok, verdict.reason


def test_the_whole_backward_of_a_wide_head() -> None:
    """delta, dkdv90_wide and dq90, as a problem of more than 128 columns is served."""
    problem = problem_of({"d": 192, "dv": 136, "Nq": 70, "Nk": 100, "Hq": 1, "causal": True})
    assert split90(problem) == SPLIT90_WIDE
    binaries = {name: compiled(name, problem, default_tile(name, problem, H100)) for name in SPLIT90_WIDE}
    verdict = check(problem, "backward", binaries, EmulatedEngine(check_races=True))
    assert [line.tensor for line in verdict.lines] == ["dQ", "dK", "dV"]
    assert verdict.ok, verdict.reason


# ------------------------------------------------------------------------------------------------- machine code


@pytest.mark.parametrize(
    ("problem", "tile", "most"),
    [
        ({"d": 256}, {"Bc": 64}, 8.5),
        ({"d": 256}, {"Bc": 80, "dO_stages": 1, "overlap": False}, 7.6),
        ({"d": 192}, {"Bc": 96, "consumers": 3}, 10.8),
    ],
    ids=["d256", "d256, no overlap", "d192"],
)
def test_instructions_for_each_wgmma(problem: Fields, tile: Fields, most: float) -> None:
    """Of the unmasked loop."""
    binary = binary_of(problem, tile)
    function = disassemble(binary.cubin).functions["dkdv90_wide"]
    opcodes = [instruction.base for instruction in function.short_trace.loop]
    spec = binary.spec
    assert isinstance(spec.tile, WarpgroupWideTile)
    sums = column_blocks(spec.d, spec.tile) + column_blocks(spec.dv, spec.tile)
    products = spec.d // 16 + spec.dv // 16 + 64 // 16 * sums
    assert opcodes.count("HGMMA") == products
    assert len(opcodes) <= most * products
    assert binary.spill_bytes == 0 and not any(loop.spill_instructions for loop in function.loops)


def test_arithmetic_runs_under_the_products() -> None:
    """All exponentials between the waits for S and dP, all of dS before that for the sums: ptxas might move them."""
    function = disassemble(binary_of({"d": 256}, {"Bc": 64}).cubin).functions["dkdv90_wide"]
    opcodes = [i.base + i.opcode for i in function.short_trace.loop]
    waits = [n for n, opcode in enumerate(opcodes) if "DEPBAR" in opcode]
    assert len(waits) == 3
    assert sum("MUFU" in opcode for opcode in opcodes[waits[0] : waits[1]]) == 16
    assert sum(opcode.startswith(("FADD", "FMUL")) for opcode in opcodes[waits[1] : waits[2]]) == 32


@pytest.mark.parametrize(("d", "dv"), [(136, None), (192, None), (192, 128), (256, None), (128, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_default_tiles_spill_nothing(d: int, dv: int | None, causal: bool) -> None:
    problem = problem_of({"d": d, "dv": dv, "causal": causal})
    tile = default_tile("dkdv90_wide", problem, H100)
    assert compiled("dkdv90_wide", problem, tile).spill_bytes == 0


def test_products_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(CompileError, match="C7512"):
        compile_source(render(spec_of({"d": 192, "dv": 128}, {"Bc": 112})))

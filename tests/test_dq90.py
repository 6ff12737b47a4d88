"""dQ of warpgroups against float64, and what ptxas makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from flashsmith.compile import Binary, compile_source
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import CompileError
from flashsmith.inputs import make_inputs
from flashsmith.render import render
from flashsmith.run import Forward, run_backward
from flashsmith.sass import disassemble
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.dtype import round_to, widen
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.tile import ALL_HEADS, HEAD_BY_HEAD, RowTile, WarpgroupQueryTile

from .split90 import Fields, compiled, problem_of, unfenced, verdict_of
from .test_render import tidy

# The problem and the tile; Br = 128 unless said otherwise. There are more tiles of keys than buffers.
CASES: dict[str, tuple[Fields, Fields]] = {
    "d64": ({"d": 64, "Nq": 130, "Nk": 300, "Hk": 2}, {"Bc": 64}),
    "d64 causal, three consumers and buffers": (
        {"d": 64, "Nq": 200, "Nk": 333, "causal": True, "Hq": 1},
        {"Br": 192, "Bc": 64, "stages": 3, "order": ALL_HEADS},
    ),
    "d64 causal, one consumer": (
        {"d": 64, "Nq": 70, "Nk": 300, "causal": True}, {"Br": 64, "Bc": 64, "order": HEAD_BY_HEAD},
    ),
    "d72 fp16 causal, rows without a key": (
        {"d": 72, "dtype": "fp16", "Nq": 300, "Nk": 200, "causal": True}, {"Bc": 48},
    ),
    "d8, one row and key": ({"d": 8, "Nq": 1, "Nk": 1}, {"Bc": 32}),
    "d128, a batch of two": ({"d": 128, "Nq": 70, "Nk": 300, "B": 2}, {"Bc": 80}),
    "d128 causal": ({"d": 128, "Nq": 200, "Nk": 333, "causal": True, "Hq": 1}, {"Bc": 112}),
    "d128 causal, no overlap, one buffer": (
        {"d": 128, "Nq": 70, "Nk": 200, "causal": True}, {"Bc": 80, "stages": 1, "v_stages": 1, "overlap": False},
    ),
    "d192 dv128": ({"d": 192, "dv": 128, "Nq": 70, "Nk": 200}, {"Bc": 64}),
    "d64 dv128 causal": ({"d": 64, "dv": 128, "Nq": 70, "Nk": 200, "causal": True}, {"Bc": 64}),
    "d256 causal": ({"d": 256, "Nq": 70, "Nk": 200, "causal": True, "Hq": 1}, {"Bc": 64, "v_stages": 1}),
    "d256 fp16, narrow tiles": ({"d": 256, "dtype": "fp16", "Nq": 70, "Nk": 140, "Hq": 1}, {"Bc": 48}),
}  # fmt: skip

GOLDEN: dict[str, tuple[Fields, Fields]] = {
    "dq90_d128_causal_h100": ({"d": 128, "causal": True}, {"Bc": 112}),
}
TIMINGS = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


def tile_of(fields: Fields) -> WarpgroupQueryTile:
    return WarpgroupQueryTile(**{"Br": 128, **fields})


def binary_of(problem: Fields, tile: Fields) -> Binary:
    return compiled("dq90", problem_of(problem), tile_of(tile))


def spec_of(problem: Fields, tile: Fields) -> KernelSpec:
    return KernelSpec.of("dq90", problem_of(problem), tile_of(tile), 90)


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
    assert [line.tensor for line in verdict.lines] == ["dQ"]
    assert verdict.ok, verdict.reason
    assert not unfenced(binary)
    assert binary.spill_bytes == 0


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_huge_scores(size: float) -> None:
    """Rows whose max delta keeps apart from l: the max has weight 1 all the same. Half of the rows are not huge."""
    fields = {"d": 64, "Nq": 70, "Nk": 150}
    problem = problem_of(fields)
    x = make_inputs(problem)
    q = widen(x.q, "bf16")
    q[:, :, ::2] *= size
    x = replace(x, q=round_to(q, "bf16"))
    verdict = verdict_of(binary_of(fields, {"Bc": 64}), problem, late=True, inputs=x)
    assert verdict.ok, verdict.reason


def test_the_same_bits_in_every_run_and_layout() -> None:
    """dQ of rows of all heads side by side, written there by TMA, is that of contiguous tensors."""
    fields = {"d": 64, "Nq": 70, "Nk": 100}
    problem = problem_of(fields)
    x = make_inputs(problem)
    kernels = {"delta": compiled("delta", problem, RowTile()), "dq90": binary_of(fields, {"Bc": 64})}
    got = []
    for bnhd in (False, True):
        engine = EmulatedEngine()
        q, k, v, dO = (engine.tensor(a) for a in (x.q, x.k, x.v, x.dO))
        rows = engine.tensor(widen(x.q, "bf16")[..., 0].astype("f4"))
        ones = engine.tensor((1 + 0 * widen(x.q, "bf16")[..., 0]).astype("f4"))
        saved = Forward(q, rows, ones)
        gradients = run_backward(engine, kernels, q, k, v, saved, dO, 0.125, bnhd=bnhd)
        assert gradients.dQ is not None and gradients.dK is None
        got.append(engine.read(gradients.dQ))
    assert (got[0] == got[1]).all()


# ------------------------------------------------------------------------------------------------- machine code


@pytest.mark.parametrize(
    ("problem", "tile", "most"),
    [
        ({"d": 64}, {"Bc": 128}, 24.5),
        ({"d": 128}, {"Bc": 112}, 17.0),
        ({"d": 192, "dv": 128}, {"Bc": 80}, 13.5),
        ({"d": 256}, {"Bc": 64, "v_stages": 1}, 11.0),
    ],
    ids=["d64", "d128", "d192 dv128", "d256"],
)
def test_instructions_for_each_wgmma(problem: Fields, tile: Fields, most: float) -> None:
    """Of the unmasked loop."""
    binary = binary_of(problem, tile)
    function = disassemble(binary.cubin).functions["dq90"]
    opcodes = [instruction.base for instruction in function.short_trace.loop]
    products = binary.spec.d // 16 + binary.spec.dv // 16 + binary.spec.tile.Bc // 16  # type: ignore[union-attr]
    assert opcodes.count("HGMMA") == products
    assert len(opcodes) <= most * products
    assert binary.spill_bytes == 0 and not any(loop.spill_instructions for loop in function.loops)


def test_arithmetic_runs_under_the_products() -> None:
    """All exponentials between the waits for S and dP, nearly all of dS before that for dQ: ptxas might move them."""
    function = disassemble(binary_of({"d": 128}, {"Bc": 112}).cubin).functions["dq90"]
    opcodes = [i.base + i.opcode for i in function.short_trace.loop]
    waits = [n for n, opcode in enumerate(opcodes) if "DEPBAR" in opcode]
    assert len(waits) == 3
    assert sum("MUFU" in opcode for opcode in opcodes[waits[0] : waits[1]]) == 56
    assert sum(opcode.startswith(("FADD", "FMUL")) for opcode in opcodes[waits[1] : waits[2]]) >= 100  # of 112


@pytest.mark.parametrize("d", [64, 72, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_default_tiles_spill_nothing(d: int, causal: bool) -> None:
    problem = problem_of({"d": d, "causal": causal})
    tile = default_tile("dq90", problem, find_gpu("h100-sxm"))
    assert compiled("dq90", problem, tile).spill_bytes == 0


def test_products_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(CompileError, match="C7512"):
        compile_source(render(spec_of({"d": 128}, {"Bc": 128})))

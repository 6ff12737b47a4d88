"""The forward of warpgroups against float64, what ptxas makes of it, and faults that the emulator must find in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from flashsmith.check import check
from flashsmith.compile import Binary, compile_source
from flashsmith.emulator import missing_wgmma_fences, parse
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.engines.engine import Tensor
from flashsmith.errors import CompileError
from flashsmith.inputs import make_inputs
from flashsmith.measure import launcher
from flashsmith.render import Source, render
from flashsmith.run import run_forward
from flashsmith.sass import disassemble
from flashsmith.spec.dtype import round_to, widen
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import ALL_HEADS, WarpgroupTile

from .test_render import tidy

Fields = Mapping[str, Any]
TIMINGS = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])

# The problem and the tile; Br = 128 unless said otherwise.
CASES: dict[str, tuple[Fields, Fields]] = {
    "d64": ({"d": 64, "Nq": 130, "Nk": 150}, {"Bc": 64}),
    "d64 causal, three consumers and buffers": (
        {"d": 64, "Nq": 200, "Nk": 300, "causal": True}, {"Br": 192, "Bc": 64, "stages": 3, "order": ALL_HEADS},
    ),
    "d64 causal, one consumer and buffer": (
        {"d": 64, "Nq": 70, "Nk": 300, "causal": True}, {"Br": 64, "Bc": 64, "stages": 1},
    ),
    "d72 fp16 causal, rows without a key": (
        {"d": 72, "dtype": "fp16", "Nq": 257, "Nk": 129, "causal": True}, {"Bc": 112},
    ),
    "d8, one row and key": ({"d": 8, "Nq": 1, "Nk": 1}, {"Bc": 32}),
    "d128 pingpong": ({"d": 128, "Nq": 130, "Nk": 400, "Hq": 3, "Hk": 1}, {"Bc": 112, "pingpong": True}),
    "d128 causal pingpong of three": (
        {"d": 128, "Nq": 200, "Nk": 250, "causal": True, "Hq": 1, "Hk": 1}, {"Br": 192, "Bc": 80, "pingpong": True},
    ),
    "d128 causal": ({"d": 128, "Nq": 200, "Nk": 333, "causal": True, "B": 2}, {"Bc": 96}),
    "d128, no early wait": ({"d": 128, "Nq": 70, "Nk": 300}, {"Bc": 80, "early_k_wait": False}),
    "d128 causal, no overlap, pingpong": (
        {"d": 128, "Nq": 70, "Nk": 200, "causal": True}, {"Bc": 80, "overlap": False, "pingpong": True},
    ),
    "d192 dv128": ({"d": 192, "dv": 128, "Nq": 70, "Nk": 200}, {"Bc": 80}),
    "d64 dv128 causal": ({"d": 64, "dv": 128, "Nq": 70, "Nk": 200, "causal": True}, {"Bc": 80}),
    "d64, P in shared memory, pingpong of three": (
        {"d": 64, "Nq": 200, "Nk": 450}, {"Br": 192, "Bc": 192, "p_smem": True, "pingpong": True},
    ),
    "d96 fp16 causal, P in shared memory": (
        {"d": 96, "dtype": "fp16", "Nq": 200, "Nk": 250, "causal": True}, {"Bc": 80, "p_smem": True},
    ),
    "d128, P in shared memory, no overlap": (
        {"d": 128, "Nq": 70, "Nk": 200}, {"Br": 64, "Bc": 48, "p_smem": True, "overlap": False, "stages": 1},
    ),
    "d80, columns left over": ({"d": 80, "dv": 48, "Nq": 70, "Nk": 200}, {"Bc": 80}),
    "d64 causal, the rows of a warpgroup before all keys of a tile": (
        {"d": 64, "Nq": 260, "Nk": 260, "causal": True, "Hq": 3}, {"Br": 192, "Bc": 32, "pingpong": True},
    ),
    "d128, pairs of blocks and an odd tile": (
        {"d": 128, "Nq": 300, "Nk": 400, "Hq": 2}, {"Bc": 80, "pingpong": True, "cluster": 2},
    ),
    "d192 dv128, pairs with one buffer": (
        {"d": 192, "dv": 128, "Nq": 130, "Nk": 200, "B": 2}, {"Bc": 80, "stages": 1, "cluster": 2},
    ),
    "d64 fp16, pairs, P in shared memory, pingpong of three": (
        {"d": 64, "dtype": "fp16", "Nq": 200, "Nk": 450, "Hk": 2},
        {"Br": 192, "Bc": 112, "stages": 3, "p_smem": True, "pingpong": True, "cluster": 2},
    ),
    "d72, pairs of one consumer, no overlap, few rows and keys": (
        {"d": 72, "Nq": 3, "Nk": 5}, {"Br": 64, "Bc": 32, "overlap": False, "cluster": 2},
    ),
    "d256 fp16 causal": ({"d": 256, "dtype": "fp16", "Nq": 70, "Nk": 170, "causal": True}, {"Bc": 64}),
}  # fmt: skip

GOLDEN: dict[str, tuple[Fields, Fields]] = {
    "forward90_d128_h100": ({"d": 128}, {"Bc": 176}),
    "forward90_d128_pairs_h100": ({"d": 128}, {"Bc": 176, "pingpong": True, "cluster": 2}),
    "forward90_d72_fp16_causal_pingpong_h100": (
        {"d": 72, "dtype": "fp16", "causal": True}, {"Bc": 128, "pingpong": True},
    ),
    "forward90_d64_p_smem_h100": ({"d": 64}, {"Br": 192, "Bc": 192, "p_smem": True, "pingpong": True}),
    "forward90_d64_one_consumer_no_overlap_h100": (
        {"d": 64}, {"Br": 64, "Bc": 64, "overlap": False, "early_k_wait": False},
    ),
}  # fmt: skip


def problem_of(fields: Fields) -> Problem:
    return Problem(**{"dtype": "bf16", "Hq": 2, "Hk": 1, **fields})


def spec_of(problem: Fields, tile: Fields) -> KernelSpec:
    return KernelSpec.of("forward90", problem_of(problem), WarpgroupTile(**{"Br": 128, **tile}), 90)


@cache
def compiled(text: str, spec: KernelSpec) -> Binary:
    return compile_source(Source(spec, text))


def binary_of(problem: Fields, tile: Fields) -> Binary:
    source = render(spec_of(problem, tile))
    return compiled(source.text, source.spec)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.cu", render(spec_of(*GOLDEN[name])).text)


@pytest.mark.parametrize("case", {**CASES, **GOLDEN}.values(), ids=[*CASES, *GOLDEN])
def test_the_text_is_tidy(case: tuple[Fields, Fields]) -> None:
    tidy(spec_of(*case))


@TIMINGS
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, late: bool) -> None:
    """Whether copies and products happen at once or at the last moment; all accesses ordered, all wgmma fenced.

    Two blocks share the tiles, so that rings, parities and turns pass from one to the next.
    """
    problem, tile = CASES[name]
    binary, engine = binary_of(problem, tile), EmulatedEngine(check_races=True, late=late, sms=2)
    verdict = check(problem_of(problem), "forward", {"forward90": binary}, engine)
    assert verdict.ok, verdict.reason
    assert not missing_wgmma_fences(parse(binary.ptx).kernels["forward90"])
    assert binary.spill_bytes == 0


def test_registers_are_shared_out() -> None:
    """Of 65536 registers, 240 for a thread that computes and 24 for one that copies."""
    problem, tile = CASES["d128 pingpong"]
    engine = EmulatedEngine()
    check(problem_of(problem), "forward", {"forward90": binary_of(problem, tile)}, engine)
    shares = engine.reports[0][1].register_shares
    assert shares == {0: 240, 1: 240, 2: 24}
    assert 128 * sum(shares.values()) <= 65536


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_huge_scores(size: float) -> None:
    """Scores whose exponents cannot be rounded to fp32: the max has weight 1 all the same."""
    fields = {"d": 64, "Nq": 70, "Nk": 150}
    problem = problem_of(fields)
    x = make_inputs(problem)
    x = replace(x, q=round_to(widen(x.q, "bf16") * size, "bf16"))
    verdict = check(problem, "forward", {"forward90": binary_of(fields, {"Bc": 64})}, EmulatedEngine(), x)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("sms", [1, 3, 4, 132])
def test_any_number_of_blocks_gives_the_same_bits(sms: int, cluster: int) -> None:
    """Six tiles, of different lengths with a mask; one block or pair walks over them all, or each tile has its own."""
    problem = {"d": 64, "Nq": 150, "Nk": 150, "causal": cluster == 1, "Hq": 2}
    binary, x = binary_of(problem, {"Br": 64, "Bc": 32, "cluster": cluster}), make_inputs(problem_of(problem))
    results = []
    for engine in (EmulatedEngine(sms=sms), EmulatedEngine(sms=2)):
        q, k, v = (engine.tensor(each) for each in (x.q, x.k, x.v))
        out = run_forward(engine, {"forward90": binary}, q, k, v, 0.125)
        results.append([engine.read(each) for each in (out.O, out.m, out.l)])
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))


def test_a_launch_that_is_repeated_is_the_whole_forward() -> None:
    """As a measurement packs it once: tensor maps, blocks and tiles."""
    fields = {"d": 64, "Nq": 70, "Nk": 70}
    problem, engine = problem_of(fields), EmulatedEngine(sms=2)
    x = make_inputs(problem)
    q, k, v = (engine.tensor(each) for each in (x.q, x.k, x.v))
    binary = binary_of(fields, {"Br": 64, "Bc": 32})
    want = run_forward(engine, {"forward90": binary}, q, k, v, problem.softmax_scale)
    O, m, l = (engine.empty(each.shape, each.dtype) for each in (want.O, want.m, want.l))
    launch = launcher(engine, binary, problem, {"Q": q, "K": k, "V": v, "O": O, "m": m, "l": l}, lambda tensor: None)
    launch()
    launch()
    assert all(np.array_equal(engine.read(a), engine.read(b)) for a, b in ((O, want.O), (m, want.m), (l, want.l)))


# ------------------------------------------------------------------------------------------------- machine code


@pytest.mark.parametrize(
    ("d", "Br", "Bc", "p_smem", "most"),
    [(128, 128, 176, False, 31.3), (128, 128, 128, False, 31.3), (64, 128, 176, False, 38.0),
     (64, 192, 192, True, 41.0), (128, 192, 128, True, 34.0), (96, 192, 128, True, 37.0)],
)  # fmt: skip
def test_instructions_for_each_wgmma(d: int, Br: int, Bc: int, p_smem: bool, most: float) -> None:
    """Of the unmasked loop; FlashAttention-3 has 31.3 at d = 128 with tiles of 128 x 176."""
    binary = binary_of({"d": d}, {"Br": Br, "Bc": Bc, "p_smem": p_smem})
    function = disassemble(binary.cubin).functions["forward90"]
    opcodes = [instruction.base for instruction in function.short_trace.loop]
    products = d // 16 + Bc // 16
    assert opcodes.count("HGMMA") == products
    assert len(opcodes) <= most * products
    assert binary.spill_bytes == 0 and not any(loop.spill_instructions for loop in function.loops)


@pytest.mark.parametrize(("early", "above"), [(True, 90), (False, 20)])
def test_a_border_of_blocks_keeps_the_softmax_under_the_product(early: bool, above: int) -> None:
    """Exponentials between the waits for S and for O: all with the wait for K between them, else hardly any."""
    binary = binary_of({"d": 128}, {"Bc": 176, "early_k_wait": early})
    opcodes = [i.base + i.opcode for i in disassemble(binary.cubin).functions["forward90"].short_trace.loop]
    waits = [n for n, opcode in enumerate(opcodes) if "DEPBAR" in opcode]
    exponentials = sum("MUFU" in opcode for opcode in opcodes[waits[0] : waits[1]])
    assert len(waits) == 2
    assert exponentials == above if early else exponentials <= above


@pytest.mark.parametrize(("d", "Bc"), [(128, 176), (256, 80)])
def test_pairs_cost_the_loop_hardly_an_instruction(d: int, Bc: int) -> None:
    """Two lanes tell two blocks in one instruction, and where the other block's barrier lies is one more."""
    loops = []
    for cluster in (1, 2):
        binary = binary_of({"d": d}, {"Bc": Bc, "pingpong": True, "cluster": cluster})
        function = disassemble(binary.cubin).functions["forward90"]
        assert binary.spill_bytes == 0 and not any(loop.spill_instructions for loop in function.loops)
        loops.append([instruction.base for instruction in function.short_trace.loop])
    alone, pair = loops
    assert len(alone) <= len(pair) <= len(alone) + 4
    assert all(alone.count(name) == pair.count(name) for name in ("HGMMA", "SYNCS", "MUFU", "WARPGROUP", "MEMBAR"))


def test_pairs_read_keys_once() -> None:
    """Of K and V half of the bytes come from global memory, and all of them to shared memory."""
    fields, reports = {"d": 64, "Nq": 256, "Nk": 256, "Hq": 1}, []
    for cluster in (1, 2):
        engine = EmulatedEngine()
        tile = {"Br": 64, "Bc": 64, "cluster": cluster}
        assert check(problem_of(fields), "forward", {"forward90": binary_of(fields, tile)}, engine).ok
        reports.append(engine.reports[0][1])
    alone, pair = reports
    rows = 256 * 64 * 2  # bytes of Q, of K and of V; four blocks read K and V
    assert alone.global_read_bytes == rows + 4 * 2 * rows and pair.global_read_bytes == rows + 2 * 2 * rows
    assert alone.async_copied_bytes == pair.async_copied_bytes == rows + 4 * 2 * rows


def test_products_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(CompileError, match="C7512"):
        compile_source(render(spec_of({"d": 128}, {"Bc": 208, "stages": 1})))


# ------------------------------------------------------------------------------------------------- tensors


def attend(q: Tensor, k: Tensor, v: Tensor, engine: EmulatedEngine) -> np.ndarray[Any, Any]:
    binary = binary_of({"d": 64}, {"Bc": 64})
    return engine.read(run_forward(engine, {"forward90": binary}, q, k, v, 0.125).O)


def test_strides_that_tma_cannot_take_are_copied() -> None:
    """Rows of 136 bytes, heads that lie in one place and rows in reverse give what contiguous tensors give."""
    rng = np.random.default_rng(7)
    bits = round_to(rng.standard_normal((1, 2, 100, 68)), "bf16")
    engine = EmulatedEngine()
    odd = bits[..., :64]
    shared = np.broadcast_to(odd[:, :1], odd.shape)
    reverse = np.ascontiguousarray(odd)[:, :, ::-1]
    got = attend(engine.tensor(odd), engine.tensor(shared), engine.tensor(reverse), engine)
    want = attend(*(engine.tensor(np.ascontiguousarray(x)) for x in (odd, shared, reverse)), engine)
    assert np.array_equal(got, want)


def test_rows_of_all_heads_side_by_side_are_read_in_place() -> None:
    """[B, N, H, d] as it comes from a projection: the address in the maps is that of the tensor."""
    rng = np.random.default_rng(8)
    bits = round_to(rng.standard_normal((1, 100, 2, 64)), "bf16")
    engine = EmulatedEngine()
    copies: list[Tensor] = []
    contiguous = engine.contiguous
    engine.contiguous = lambda tensor: copies.append(tensor) or contiguous(tensor)  # type: ignore[method-assign]
    x = engine.tensor(bits.transpose(0, 2, 1, 3))
    got = attend(x, x, x, engine)
    dense = engine.tensor(np.ascontiguousarray(bits.transpose(0, 2, 1, 3)))
    assert np.array_equal(got, attend(dense, dense, dense, engine))
    assert not copies

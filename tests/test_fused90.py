"""The backward of warpgroups against float64, what ptxas makes of it, and inputs at the ends of what floats hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from flashsmith.check import Verdict, check
from flashsmith.compile import Binary, compile_source
from flashsmith.emulator import missing_wgmma_fences, parse
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.engines.engine import Tensor
from flashsmith.errors import CompileError
from flashsmith.inputs import Inputs, make_inputs
from flashsmith.render import Source, render
from flashsmith.run import Forward, Gradients, run_backward
from flashsmith.sass import disassemble
from flashsmith.spec.dtype import round_to, widen
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import ALL_HEADS, HEAD_BY_HEAD, RowTile, WarpgroupKeyTile

from .test_cli import run
from .test_render import tidy

Fields = Mapping[str, Any]
TIMINGS = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
FUSED90: tuple[KernelName, ...] = ("delta", "fused90", "convert90")
DKDV90: tuple[KernelName, ...] = ("delta", "dkdv90")

# The problem and the tile; of fused90.
CASES: dict[str, tuple[Fields, Fields]] = {
    "d128": ({"d": 128, "Nq": 200, "Nk": 333, "Hq": 1}, {"Br": 80}),
    "d128 causal, rows without a key": ({"d": 128, "Nq": 300, "Nk": 200, "causal": True}, {"Br": 64}),
    "d128 fp16 causal, one buffer of dS, all heads": (
        {"d": 128, "dtype": "fp16", "Nq": 130, "Nk": 100, "causal": True, "B": 2},
        {"Br": 80, "dS_stages": 1, "order": ALL_HEADS},
    ),
    "d128, a tile past the statistics of its head": (
        {"d": 128, "Nq": 128, "Nk": 100, "Hq": 4, "Hk": 2}, {"Br": 80},
    ),
    "d128, sums from registers": ({"d": 128, "Nq": 170, "Nk": 150}, {"Br": 80, "bulk_sums": False}),
    "d72 causal, sums from registers": (
        {"d": 72, "Nq": 150, "Nk": 100, "causal": True, "Hq": 3}, {"Br": 64, "dS_stages": 1, "bulk_sums": False},
    ),
    "d48, sums from registers": ({"d": 48, "Nq": 100, "Nk": 100, "Hq": 1}, {"Br": 64, "bulk_sums": False}),
    "d128, one buffer of all": ({"d": 128, "Nq": 130, "Nk": 130}, {"Br": 64, "stages": 1, "dS_stages": 1}),
    "d64, a group of three": ({"d": 64, "Nq": 130, "Nk": 150, "Hq": 3}, {"Br": 128}),
    "d64 fp16 causal, head by head": (
        {"d": 64, "dtype": "fp16", "Nq": 200, "Nk": 333, "causal": True}, {"Br": 128, "order": HEAD_BY_HEAD},
    ),
    "d64 causal, three buffers": ({"d": 64, "Nq": 257, "Nk": 129, "causal": True}, {"Br": 64, "stages": 3}),
    "d72 fp16": ({"d": 72, "dtype": "fp16", "Nq": 130, "Nk": 130}, {"Br": 80}),
    "d40 causal": ({"d": 40, "Nq": 100, "Nk": 140, "causal": True}, {"Br": 96}),
    "d8, one row and key": ({"d": 8, "Nq": 1, "Nk": 1}, {"Br": 128}),
    "d64 dv128 causal": ({"d": 64, "dv": 128, "Nq": 130, "Nk": 130, "causal": True}, {"Br": 96}),
    "d128 dv64": ({"d": 128, "dv": 64, "Nq": 130, "Nk": 130}, {"Br": 112, "stages": 1}),
    "d96 dv104 causal, sinks": (
        {"d": 96, "dv": 104, "Nq": 150, "Nk": 140, "causal": True, "Hk": 2, "sinks": True}, {"Br": 64},
    ),
}  # fmt: skip

DKDV_CASES: dict[str, tuple[Fields, Fields]] = {
    "d128": ({"d": 128, "Nq": 200, "Nk": 333, "Hq": 1}, {"Br": 80}),
    "d128 causal": ({"d": 128, "Nq": 200, "Nk": 150, "causal": True}, {"Br": 80, "order": ALL_HEADS}),
    "d64 fp16 causal": ({"d": 64, "dtype": "fp16", "Nq": 130, "Nk": 150, "causal": True, "B": 2}, {"Br": 128}),
    "d72 dv40, one buffer": ({"d": 72, "dv": 40, "Nq": 128, "Nk": 100, "Hq": 3}, {"Br": 112, "stages": 1}),
}  # fmt: skip

GOLDEN: dict[str, tuple[KernelName, Fields, Fields]] = {
    "fused90_d128_h100": ("fused90", {"d": 128}, {"Br": 80}),
    "fused90_d64_fp16_causal_h100": ("fused90", {"d": 64, "dtype": "fp16", "causal": True}, {"Br": 128}),
    "fused90_d72_dv96_h100": ("fused90", {"d": 72, "dv": 96}, {"Br": 64, "dS_stages": 1}),
    "fused90_d128_from_registers_h100": ("fused90", {"d": 128}, {"Br": 80, "bulk_sums": False}),
    "convert90_d128_h100": ("convert90", {"d": 128}, {"Br": 80}),
    "dkdv90_d128_causal_h100": ("dkdv90", {"d": 128, "causal": True}, {"Br": 80}),
}


def problem_of(fields: Fields) -> Problem:
    return Problem(**{"dtype": "bf16", "Hq": 2, "Hk": 1, **fields})


def spec_of(kernel: KernelName, problem: Fields, tile: Fields) -> KernelSpec:
    own = RowTile() if kernel == "delta" else WarpgroupKeyTile(**tile)
    return KernelSpec.of(kernel, problem_of(problem), own, 90)


@cache
def compiled(text: str, spec: KernelSpec) -> Binary:
    return compile_source(Source(spec, text))


def binary_of(kernel: KernelName, problem: Fields, tile: Fields) -> Binary:
    source = render(spec_of(kernel, problem, tile))
    return compiled(source.text, source.spec)


def binaries_of(kernels: tuple[KernelName, ...], problem: Fields, tile: Fields) -> dict[KernelName, Binary]:
    return {kernel: binary_of(kernel, problem, tile) for kernel in kernels}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.cu", render(spec_of(*GOLDEN[name])).text)


@pytest.mark.parametrize(
    "case",
    [*GOLDEN.values(), *(("fused90", *x) for x in CASES.values()), *(("convert90", *x) for x in CASES.values()),
     *(("dkdv90", *x) for x in DKDV_CASES.values())],
    ids=lambda case: "_".join(map(str, case)),
)  # fmt: skip
def test_the_text_is_tidy(case: tuple[KernelName, Fields, Fields]) -> None:
    tidy(spec_of(*case))


@TIMINGS
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, late: bool) -> None:
    """Whether copies and products happen at once or at the last moment; all accesses ordered, all wgmma fenced."""
    _right(FUSED90, *CASES[name], late)


@TIMINGS
@pytest.mark.parametrize("name", DKDV_CASES)
def test_dkdv90_against_float64(name: str, late: bool) -> None:
    _right(DKDV90, *DKDV_CASES[name], late)


def _right(kernels: tuple[KernelName, ...], problem: Fields, tile: Fields, late: bool) -> None:
    binaries, engine = binaries_of(kernels, problem, tile), EmulatedEngine(check_races=True, late=late)
    verdict = check(problem_of(problem), "backward", binaries, engine)
    assert verdict.ok, verdict.reason
    for kernel in kernels[1:]:
        assert not missing_wgmma_fences(parse(binaries[kernel].ptx).kernels[kernel])
        assert binaries[kernel].spill_bytes == 0


def test_registers_are_shared_out() -> None:
    """Of 65536 registers, 240 for a thread that computes and 24 for one that copies."""
    problem, tile = CASES["d8, one row and key"]
    engine = EmulatedEngine()
    check(problem_of(problem), "backward", binaries_of(FUSED90, problem, tile), engine)
    shares = engine.reports[1][1].register_shares
    assert shares == {0: 240, 1: 240, 2: 24}
    assert 128 * sum(shares.values()) <= 65536


# ------------------------------------------------------------------------------------------------- huge and low scores


def _with_scores(change: Callable[[Inputs], Inputs], **fields: Any) -> tuple[Verdict, Inputs]:
    problem = {"d": 64, "Nq": 70, "Nk": 150, "Hq": 1, **fields}
    x = change(make_inputs(problem_of(problem)))
    binaries = binaries_of(FUSED90, problem, {"Br": 64})
    return check(problem_of(problem), "backward", binaries, EmulatedEngine(check_races=True), x), x


def _scaled(size: float, step: int) -> Callable[[Inputs], Inputs]:
    def scaled(x: Inputs) -> Inputs:
        q = widen(x.q, "bf16").copy()
        q[:, :, ::step] *= size
        return replace(x, q=round_to(q, "bf16"))

    return scaled


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "step"), [(1e2, 1), (1e4, 1), (3e4, 7)])
def test_huge_scores(size: float, step: int, causal: bool) -> None:
    """Scores whose exponents cannot be rounded to fp32, in all rows or in some of a tile."""
    verdict, _ = _with_scores(_scaled(size, step), causal=causal)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_keys_past_the_end_of_low_scores(dtype: str) -> None:
    """A key that there is not scores 0: where all others score -1440, or -24 in fp16, its weight would be infinite."""

    def low(x: Inputs) -> Inputs:
        size, q, k = (0.01, 30.0, -6.0) if dtype == "bf16" else (0.01, 1.0, -3.0)
        q, k = (widen(a, dtype) * size + shift for a, shift in ((x.q, q), (x.k, k)))  # type: ignore[arg-type]
        return replace(x, q=round_to(q, dtype), k=round_to(k, dtype))  # type: ignore[arg-type]

    verdict, _ = _with_scores(low, dtype=dtype)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("Nq", "Nk"), [(1, 1), (65, 65), (3, 65)])
def test_all_scores_are_equal_and_huge(Nq: int, Nk: int) -> None:
    """133120^2 * 64 / 8, where one unit in the last place is 16384: P is 1 / Nk all the same."""
    problem, tile, engine = {"d": 64}, {"Br": 128}, EmulatedEngine()
    q, k = (np.full((1, 1, N, 64), 133120.0) for N in (Nq, Nk))
    ones = np.ones((1, 1, Nq, 64))
    forward = Forward(
        engine.tensor(round_to(q, "bf16")),
        engine.tensor(np.full((1, 1, Nq), np.float32(133120.0**2 * 8))),
        engine.tensor(np.full((1, 1, Nq), np.float32(Nk))),
    )
    q, k, dO = (engine.tensor(round_to(x, "bf16")) for x in (q, k, ones))
    out = run_backward(engine, binaries_of(FUSED90, problem, tile), q, k, k, forward, dO, 0.125)
    dV, dK, dQ = (widen(engine.read(x), "bf16") for x in _made(out))
    np.testing.assert_allclose(dV, Nq / Nk, rtol=2e-2)
    assert not dK.any() and not dQ.any()


def _made(out: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    assert out.dV is not None and out.dK is not None and out.dQ is not None
    return out.dV, out.dK, out.dQ


# ------------------------------------------------------------------------------------------------- machine code


@pytest.mark.parametrize(
    ("kernel", "problem", "tile", "products", "most"),
    [
        ("fused90", {"d": 128}, {"Br": 80}, 34, 13.6),
        ("fused90", {"d": 128}, {"Br": 64}, 32, 13.1),
        ("fused90", {"d": 128, "causal": True}, {"Br": 80}, 34, 14.7),
        ("fused90", {"d": 128, "causal": True}, {"Br": 64}, 32, 14.2),
        ("fused90", {"d": 64}, {"Br": 128}, 32, 18.1),
        ("fused90", {"d": 64, "causal": True}, {"Br": 128}, 32, 18.6),
        ("dkdv90", {"d": 128}, {"Br": 80}, 26, 13.9),
    ],
)
def test_instructions_for_each_wgmma(
    kernel: KernelName, problem: Fields, tile: Fields, products: int, most: float
) -> None:
    """Of the unmasked loop. FlashAttention-3 has 15.0 at d = 128 with tiles of 80 x 128, and 27 of its 40 exponentials
    wait for dP; here all run under its product."""
    binary = binary_of(kernel, problem, tile)
    function = disassemble(binary.cubin).functions[kernel]
    loop = [instruction.opcode for instruction in function.short_trace.loop]
    assert sum(opcode.startswith("HGMMA") for opcode in loop) == products
    assert len(loop) <= most * products
    waits = [n for n, opcode in enumerate(loop) if opcode.startswith("WARPGROUP.DEPBAR")]
    exponentials = sum(opcode.startswith("MUFU.EX2") for opcode in loop[waits[0] : waits[1]])
    assert exponentials == tile["Br"] // 2
    assert binary.spill_bytes == 0 and not any(part.spill_instructions for part in function.loops)


def test_products_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(CompileError, match="C7512"):
        compile_source(render(spec_of("fused90", {"d": 128}, {"Br": 96, "stages": 1})))


# ------------------------------------------------------------------------------------------------- tensors


def test_heads_side_by_side_are_read_and_written_in_place() -> None:
    """[B, N, H, d] as it comes from a projection: the same bits as of contiguous tensors, and no copy."""
    rng, engine = np.random.default_rng(8), EmulatedEngine()
    problem, tile = {"d": 64, "Hk": 2}, {"Br": 64}
    bits = [round_to(rng.standard_normal((1, 70, 2, 64)), "bf16").transpose(0, 2, 1, 3) for _ in range(5)]
    rows = (engine.tensor(np.ones((1, 2, 70), np.float32)), engine.tensor(np.full((1, 2, 70), 70, np.float32)))
    copies: list[Tensor] = []
    contiguous = engine.contiguous
    engine.contiguous = lambda tensor: copies.append(tensor) or contiguous(tensor)  # type: ignore[method-assign]

    def gradients(tensors: list[Tensor], bnhd: bool) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, O, dO = tensors
        binaries = binaries_of(FUSED90, problem, tile)
        return _made(run_backward(engine, binaries, q, k, v, Forward(O, *rows), dO, 0.125, bnhd=bnhd))

    got = gradients([engine.tensor(x) for x in bits], True)
    want = gradients([engine.tensor(np.ascontiguousarray(x)) for x in bits], False)
    assert got[0].strides == (70 * 128, 64, 128, 1)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(engine.read(a), engine.read(b))
    assert not copies


@pytest.mark.parametrize("kernels", [FUSED90, DKDV90], ids=["fused90", "dkdv90"])
def test_dk_and_dv_are_the_same_bits_whatever_the_order_of_events(kernels: tuple[KernelName, ...]) -> None:
    """Nobody else adds to them."""
    problem, tile = {"d": 64, "Nq": 130, "Nk": 150}, {"Br": 64}
    x = make_inputs(problem_of(problem))
    found = []
    for late in (False, True):
        engine = EmulatedEngine(late=late)
        q, k, v, dO = (engine.tensor(a) for a in (x.q, x.k, x.v, x.dO))
        rows = (engine.tensor(np.full((1, 2, 130), n, np.float32)) for n in (4.0, 9.0))
        out = run_backward(engine, binaries_of(kernels, problem, tile), q, k, v, Forward(dO, *rows), dO, 0.125)
        assert out.dK is not None and out.dV is not None and (out.dQ is None) == (kernels == DKDV90)
        found.append([engine.read(out.dK), engine.read(out.dV)])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


# ------------------------------------------------------------------------------------------------- command line


def test_the_backward_of_warpgroups_is_checked_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--gpu", "h100-sxm", "--d", "64", "--nq", "70", "--heads", "1")
    status, out, _ = run(capsys, "check", "backward", "--kernel", "fused90", *asked, "--tile", "Br=64")
    assert status == 0 and all(f"{name}_bf16_d64_sm90_Br64_Bc128" in out for name in ("fused90", "convert90"))
    status, out, _ = run(capsys, "check", "backward", "--kernel", "dkdv90", *asked)
    assert status == 0 and "dkdv90_bf16_d64_sm90_Br128_Bc128" in out
    status, _, err = run(capsys, "render", "fused90", "--gpu", "a100", "--d", "64")
    assert status != 0 and "no fused90 tile fits a100" in err and "sm_90a" in err
    status, _, err = run(capsys, "render", "fused90", "--gpu", "h100-sxm", "--d", "192")
    assert status != 0 and "up to 128 columns. Use fused." in err

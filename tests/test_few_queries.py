"""Few queries against many keys, on the emulator: the forward by parts, and heads packed into one tile."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from flashsmith.check import check, make_inputs
from flashsmith.compile import Binary, compile_source
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.reference import attention
from flashsmith.render import render
from flashsmith.run import run_forward
from flashsmith.spec.dtype import EPSILON, round_to, widen
from flashsmith.spec.forward_defaults import of_partial, packs, short_forward
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import FORWARD, PARTS, KernelName, KernelSpec
from flashsmith.spec.problem import Dtype, Problem
from flashsmith.spec.tile import ForwardTile, RowTile

A100 = find_gpu("a100")
ONE_WARP = ForwardTile(Br=16, Bc=64, warps=1)
FOUR_WARPS = ForwardTile(Br=64, Bc=48, warps=4, q_steps=1, lazy=True)
PACKED = replace(ONE_WARP, packed=True)
PACKED_FOUR = replace(FOUR_WARPS, packed=True)


@cache
def binaries(dtype: Dtype, d: int, causal: bool, tile: ForwardTile, by_parts: bool) -> dict[KernelName, Binary]:
    found: dict[KernelName, Binary] = {}
    for kernel in PARTS if by_parts else FORWARD:
        its_tile = RowTile() if kernel == "combine" else tile
        spec = KernelSpec(kernel=kernel, dtype=dtype, d=d, causal=causal, tile=its_tile, sm=80)
        found[kernel] = compile_source(render(spec))
    return found


CASES: dict[str, tuple[ForwardTile, int, Problem]] = {  # the tile, parts (0: whole) and the problem
    "one query, few tiles": (ONE_WARP, 2, Problem(dtype="bf16", d=64, B=2, Hq=2, Nq=1, Nk=65)),
    "one query, one key, more parts than tiles": (ONE_WARP, 3, Problem(dtype="bf16", d=64, Hq=2, Nq=1, Nk=1)),
    "one query, causal, fp16": (ONE_WARP, 5, Problem(dtype="fp16", d=128, causal=True, Hq=4, Hk=1, Nq=1, Nk=700)),
    "parts of unequal lengths": (FOUR_WARPS, 4, Problem(dtype="bf16", d=64, B=2, Hq=2, Nq=64, Nk=700)),
    "causal, two tiles of rows": (ONE_WARP, 3, Problem(dtype="bf16", d=64, causal=True, B=2, Hq=2, Nq=23, Nk=260)),
    "rows that see nothing": (FOUR_WARPS, 3, Problem(dtype="fp16", d=64, causal=True, Hq=2, Hk=1, Nq=64, Nk=20)),
    "many parts": (ONE_WARP, 40, Problem(dtype="bf16", d=8, Hq=1, Nq=7, Nk=2600)),
    "half a step": (FOUR_WARPS, 3, Problem(dtype="bf16", d=72, causal=True, Hq=2, Nq=7, Nk=333)),
    "wide": (replace(ONE_WARP, Bc=32), 3, Problem(dtype="fp16", d=256, Hq=2, Nq=7, Nk=333)),
    "packed, one query": (PACKED, 0, Problem(dtype="bf16", d=64, B=2, Hq=7, Hk=1, Nq=1, Nk=65)),
    "packed, causal": (PACKED_FOUR, 0, Problem(dtype="fp16", d=64, causal=True, Hq=8, Hk=2, Nq=7, Nk=130)),
    "packed, rows that see nothing": (PACKED, 0, Problem(dtype="bf16", d=72, causal=True, Hq=7, Hk=1, Nq=7, Nk=4)),
    "packed, a query in two tiles": (PACKED, 0, Problem(dtype="bf16", d=64, causal=True, Hq=12, Hk=2, Nq=9, Nk=70)),
    "packed, groups of one": (PACKED, 0, Problem(dtype="bf16", d=64, causal=True, Hq=2, Hk=2, Nq=7, Nk=65)),
    "packed, ascending": (
        replace(PACKED, ascending=True), 0, Problem(dtype="bf16", d=64, causal=True, Hq=4, Hk=1, Nq=7, Nk=130),
    ),
    "packed by parts": (PACKED_FOUR, 3, Problem(dtype="bf16", d=128, causal=True, B=2, Hq=8, Hk=2, Nq=7, Nk=333)),
    "packed by parts, a query in two tiles": (
        PACKED, 4, Problem(dtype="fp16", d=64, causal=True, B=2, Hq=7, Hk=1, Nq=7, Nk=200),
    ),
    "packed by parts, wide": (
        replace(PACKED, Bc=32), 2, Problem(dtype="bf16", d=256, causal=True, Hq=4, Hk=1, Nq=1, Nk=70),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    """Within twice the error of plain attention, no race, nothing read that was not written."""
    tile, parts, problem = CASES[name]
    kernels = binaries(problem.dtype, problem.d, problem.causal, tile, parts > 0)
    verdict = check(problem, "forward", kernels, EmulatedEngine(check_races=True), parts=max(1, parts))
    assert verdict.ok and len(verdict.kernels) == len(kernels), verdict.reason


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: ForwardTile, parts: int, *, causal: bool = False,
    dtype: Dtype = "bf16",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """O in float64, m and l of arrays [B, H, N, d]: numbers, or the bits of the dtype with their strides."""
    engine, d = EmulatedEngine(check_races=True), q.shape[-1]
    tensors = [engine.tensor(x if x.dtype == np.uint16 else round_to(x, dtype)) for x in (q, k, v)]
    kernels = binaries(dtype, d, causal, tile, parts > 0)
    out = run_forward(engine, kernels, *tensors, d**-0.5, parts=max(1, parts))
    assert not any(report.race_count for _, report in engine.reports)
    return widen(engine.read(out.O), dtype), engine.read(out.m), engine.read(out.l)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("tile", "parts"), [(ONE_WARP, 1), (ONE_WARP, 3), (PACKED, 0), (PACKED, 4)])
def test_it_leaves_what_a_whole_forward_leaves(tile: ForwardTile, parts: int, causal: bool) -> None:
    """The same m to the bit, l and O within roundings: the backward cannot tell who wrote them."""
    problem = Problem(dtype="bf16", d=64, causal=causal, B=2, Hq=4, Hk=2, Nq=5, Nk=200)
    x = make_inputs(problem)
    O, m, l = forward(x.q, x.k, x.v, ONE_WARP, 0, causal=causal)
    got_O, got_m, got_l = forward(x.q, x.k, x.v, tile, parts, causal=causal)
    np.testing.assert_array_equal(got_m, m)
    np.testing.assert_allclose(got_l, l, rtol=2e-6)
    np.testing.assert_allclose(got_O, O, rtol=0, atol=2 * EPSILON["bf16"] * np.abs(O).max())


@pytest.mark.parametrize(("tile", "parts"), [(ONE_WARP, 3), (PACKED, 0), (PACKED, 3)])
def test_a_part_of_other_magnitude(tile: ForwardTile, parts: int) -> None:
    """Scores of the keys of one part lie 3000 above those of the others, in another part in each head."""
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal(shape) for shape in ((1, 4, 3, 64), (1, 2, 200, 64), (1, 2, 200, 64)))
    q[..., 0] = 16
    k[0, 0, 10:14, 0] = k[0, 1, 150:153, 0] = 1500
    O, m, l = forward(q, k, v, tile, parts)
    want = attention(*(widen(round_to(x, "bf16"), "bf16") for x in (q, k, v, q)), scale=0.125, causal=False)
    np.testing.assert_allclose(O, want.O, rtol=0, atol=4 * EPSILON["bf16"] * np.abs(want.O).max())
    np.testing.assert_allclose(m + np.log(l), want.lse, rtol=1e-6)


@pytest.mark.parametrize(("tile", "parts"), [(ONE_WARP, 3), (PACKED, 0), (PACKED, 3)])
@pytest.mark.parametrize("value", [133120.0, -133120.0])
def test_huge_scores(value: float, tile: ForwardTile, parts: int) -> None:
    """All scores are 133120^2 * 64 / 8, or the negative of it."""
    q, k = np.full((1, 4, 2, 64), value), np.full((1, 2, 150, 64), 133120.0)
    O, m, l = forward(q, k, k, tile, parts)
    np.testing.assert_array_equal(O, 133120.0)
    np.testing.assert_array_equal(l, 150)
    np.testing.assert_allclose(m, value * 133120.0 * 8, rtol=1e-6)


def test_nan_is_not_a_row_without_keys() -> None:
    q, k, v = (np.ones(shape) for shape in ((1, 4, 2, 64), (1, 2, 150, 64), (1, 2, 150, 64)))
    q[0, 3, 1, 5] = np.nan
    for tile, parts in ((ONE_WARP, 3), (PACKED, 3)):
        O, _, _ = forward(q, k, v, tile, parts)
        assert np.isnan(O[0, 3, 1]).all() and np.isnan(O).sum() == 64


@pytest.mark.parametrize(("tile", "parts"), [(ONE_WARP, 3), (PACKED, 0), (PACKED, 3)])
def test_strides_do_not_matter_and_nothing_behind_the_tensors_is_read(tile: ForwardTile, parts: int) -> None:
    """Sequence-major views into buffers full of NaN, rows that cp.async cannot reach: the bits of compact tensors."""
    problem = Problem(dtype="bf16", d=72, causal=True, B=2, Hq=4, Hk=2, Nq=7, Nk=133)
    x = make_inputs(problem)
    want = forward(x.q, x.k, x.v, tile, parts, causal=True)
    for columns in (16, 4):
        views = []
        for compact in (x.q, x.k, x.v):
            B, H, N, d = compact.shape
            buffer = np.full((B, N + 3, H, d + columns), 0x7FC1, np.uint16)
            buffer[:, :N, :, :d] = compact.transpose(0, 2, 1, 3)
            views.append(buffer[:, :N, :, :d].transpose(0, 2, 1, 3))
        got = forward(*views, tile, parts, causal=True)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_parts_write_o_m_and_l_once_each() -> None:
    """4 d + 8 bytes a row and part; combine 2 d + 8 bytes a row, and it adds nothing atomically."""
    problem = Problem(dtype="bf16", d=64, Hq=2, Nq=7, Nk=200)
    engine, x = EmulatedEngine(), make_inputs(problem)
    kernels = binaries("bf16", 64, False, ONE_WARP, True)
    run_forward(engine, kernels, *(engine.tensor(a) for a in (x.q, x.k, x.v)), 0.125, parts=3)
    written = {name: report.global_written_bytes for name, report in engine.reports}
    assert written == {"partial": 14 * 3 * (4 * 64 + 8), "combine": 14 * (2 * 64 + 8)}
    assert not any(word in kernels["combine"].ptx for word in ("atom.", "red.global"))


@pytest.mark.parametrize(
    ("Nq", "group", "Br", "packed"),
    [(1, 1, 16, False), (17, 1, 32, False), (64, 1, 64, False), (1, 8, 16, True), (7, 4, 32, True), (64, 8, 64, False),
     (40, 8, 64, True), (2, 64, 64, True)],
)  # fmt: skip
def test_the_rows_decide_the_tile(Nq: int, group: int, Br: int, packed: bool) -> None:
    """The least rows that hold the queries; heads are packed where that leaves fewer tiles."""
    problem = Problem(dtype="bf16", d=128, Hq=2 * group, Hk=2, Nq=Nq, Nk=4096)
    tile = short_forward(problem, A100)
    assert tile is not None and (tile.Br, tile.packed, packs(problem)) == (Br, packed, packed)
    assert short_forward(replace(problem, Nq=65), A100) is None
    assert of_partial(replace(tile, ascending=True)) == tile


@pytest.mark.parametrize(
    ("d", "gpu"), [(8, "a100"), (64, "rtx4090"), (72, "h100-sxm"), (128, "a100"), (128, "h100-sxm"), (256, "rtx4090")]
)
def test_tiles_of_few_rows_spill_nothing(d: int, gpu: str) -> None:
    target = find_gpu(gpu)
    problem = Problem(dtype="bf16", d=d, causal=True, Hq=8, Hk=2, Nq=9, Nk=4096)
    tile = short_forward(problem, target)
    assert tile is not None and tile.packed
    binary = compile_source(render(KernelSpec.of("partial", problem, tile, target.sm)))
    assert binary.spill_bytes == 0

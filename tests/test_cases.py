"""Failures that users of this field have reported, each as a test of the right answer."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.check import check
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import BadProblem
from flashsmith.reference import attention
from flashsmith.spec.dtype import EPSILON, round_to, widen
from flashsmith.spec.problem import Dtype, Problem

from .attend import attend, binaries

BACKWARDS = pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "split"])


def normal(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape) for shape in shapes]


def close(got: np.ndarray, want: np.ndarray, dtype: Dtype = "bf16", slack: float = 4) -> None:
    """Within a few roundings of the dtype, relative to the largest value."""
    np.testing.assert_allclose(got, want, rtol=0, atol=slack * EPSILON[dtype] * max(1.0, float(np.abs(want).max())))


# BUG-01: causal with more queries than keys: rows that see nothing


@BACKWARDS
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rows_that_see_no_key(dtype: Dtype, deterministic: bool) -> None:
    v = np.zeros((1, 1, 2, 64))
    v[..., :4] = [[1, 2, 3, 4], [5, 6, 7, 8]]
    got = attend(
        np.zeros((1, 1, 5, 64)), np.ones((1, 1, 2, 64)), v, dtype=dtype, causal=True, deterministic=deterministic
    )
    np.testing.assert_array_equal(got.O[0, 0, :, :4], [[0] * 4] * 3 + [[1, 2, 3, 4], [3, 4, 5, 6]])
    np.testing.assert_allclose(got.lse[0, 0], [-np.inf] * 3 + [0, np.log(2)], rtol=1e-6)
    np.testing.assert_array_equal(got.l[0, 0, :3], 0)
    np.testing.assert_array_equal(got.dV[0, 0, :, 0], [1.5, 0.5])
    assert not got.dQ.any() and not got.dK.any()


@BACKWARDS
@pytest.mark.parametrize(("Nq", "Nk"), [(256, 3), (130, 1)])
def test_far_more_queries_than_keys(Nq: int, Nk: int, deterministic: bool) -> None:
    """Whole blocks of rows see nothing; outputs start as NaN and must be written all the same."""
    q, k, v, dO = (3 * x for x in normal(1, (1, 2, Nq, 64), (1, 2, Nk, 64), (1, 2, Nk, 64), (1, 2, Nq, 64)))
    got = attend(q, k, v, dO, causal=True, deterministic=deterministic)
    assert got.finite() and not got.O[:, :, : Nq - Nk].any() and not got.dQ[:, :, : Nq - Nk].any()
    if Nk == 1:  # one visible key: P = 1, so dS = 0
        close(got.dV[:, :, 0], widen(round_to(dO, "bf16"), "bf16")[:, :, -1], slack=1)
        assert np.abs(got.dQ).max() < 1e-3 and np.abs(got.dK).max() < 1e-3


# BUG-02: very negative scores are scores


@BACKWARDS
@pytest.mark.parametrize("Nk", [8, 300])
def test_very_negative_scores(Nk: int, deterministic: bool) -> None:
    (v,) = normal(2, (1, 1, Nk, 128))
    q, k = np.full((1, 1, 4, 128), 30.0), np.full((1, 1, Nk, 128), -720.0)
    got = attend(q, k, v, deterministic=deterministic)
    close(got.O, np.broadcast_to(widen(round_to(v, "bf16"), "bf16").mean(2, keepdims=True), got.O.shape), slack=1)
    score = -30 * 720 * 128 / np.sqrt(128)
    np.testing.assert_allclose(got.lse, score + np.log(Nk), rtol=1e-6)
    close(got.dV, np.full(got.dV.shape, 4 / Nk), slack=2)
    assert got.finite()


# BUG-03: huge but finite inputs


@BACKWARDS
@pytest.mark.parametrize(("Nq", "Nk"), [(1, 1), (65, 65), (3, 65)])
def test_huge_scores(Nq: int, Nk: int, deterministic: bool) -> None:
    """All scores are 133120^2 * 64 / 8, where one unit in the last place is 16384."""
    q, k = np.full((1, 1, Nq, 64), 133120.0), np.full((1, 1, Nk, 64), 133120.0)
    got = attend(q, k, k, deterministic=deterministic)
    np.testing.assert_array_equal(got.O, 133120.0)
    close(got.dV, np.full(got.dV.shape, Nq / Nk), slack=1)
    assert not got.dQ.any() and not got.dK.any()


@BACKWARDS
def test_some_rows_are_huge(deterministic: bool) -> None:
    """Rows of every size share a tile: each is as right as it is alone."""
    q, k, v, dO = normal(3, (1, 1, 70, 64), (1, 1, 90, 64), (1, 1, 90, 64), (1, 1, 70, 64))
    q[0, 0, ::7] *= 3e4
    got = attend(q, k, v, dO, deterministic=deterministic)
    want = attention(*(widen(round_to(x, "bf16"), "bf16") for x in (q, k, v, dO)), scale=0.125, causal=False)
    close(got.O, want.O)
    close(got.dV, want.dV, slack=8)
    small = np.arange(70) % 7 != 0
    close(got.dQ[:, :, small], want.dQ[:, :, small], slack=8)


# BUG-04: the mask's diagonal ends at the bottom right


@BACKWARDS
@pytest.mark.parametrize(("Nq", "Nk"), [(2, 5), (1, 7), (5, 2), (129, 257), (64, 1000)])
def test_the_masks_corner(Nq: int, Nk: int, deterministic: bool) -> None:
    """q = 0 makes P uniform over what a row sees; with v_j = j a row's mean tells how far it sees."""
    v = np.zeros((1, 1, Nk, 64))
    v[0, 0, :, 0] = np.arange(Nk) / 8  # exact in bf16 up to 256; the mean is compared in its own rounding
    v = widen(round_to(v, "bf16"), "bf16")
    got = attend(np.zeros((1, 1, Nq, 64)), np.ones((1, 1, Nk, 64)), v, causal=True, deterministic=deterministic)
    dV = np.zeros(Nk)
    for i in range(Nq):
        sees = [j for j in range(Nk) if j <= i + Nk - Nq]
        want = v[0, 0, sees, 0].mean() if sees else 0
        assert abs(got.O[0, 0, i, 0] - want) <= EPSILON["bf16"] * abs(want) * 2, i
        dV[sees] += 1 / max(1, len(sees))
    close(got.dV[0, 0, :, 5], dV, slack=2)


# BUG-05: nothing past the end of a tensor is read


@BACKWARDS
@pytest.mark.parametrize(("Nq", "Nk"), [(1, 9), (9, 1), (12, 12), (63, 65), (65, 63), (130, 200)])
def test_what_lies_behind_the_tensors_does_not_leak(Nq: int, Nk: int, deterministic: bool) -> None:
    """Views into buffers full of NaN give the bits of compact tensors. Shared memory starts as NaN as well."""
    shapes = [(2, 2, Nq, 72), (2, 2, Nk, 72), (2, 2, Nk, 72), (2, 2, Nq, 72)]
    clean = [round_to(x, "bf16") for x in normal(5, *shapes)]
    views = []
    for x in clean:
        B, H, N, d = x.shape
        buffer = np.full((B, H, N + 128, d + 16), 0x7FC1, np.uint16)
        buffer[:, :, :N, :d] = x
        views.append(buffer[:, :, :N, :d])
    compact = attend(*clean, causal=True, deterministic=deterministic)
    among_nan = attend(*views, causal=True, deterministic=deterministic)
    assert compact.finite()
    for name in ("O", "m", "l", "dK", "dV") + (("dQ",) if deterministic else ()):
        np.testing.assert_array_equal(getattr(among_nan, name), getattr(compact, name), err_msg=name)
    close(among_nan.dQ, compact.dQ)


# BUG-06: the bound has teeth


@pytest.mark.parametrize(("fault", "tensor"), [(1.02, "dQ"), (0.98, "dK")])
def test_two_percent_off_is_wrong(fault: float, tensor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient scaled by 1.02 must fail its check."""
    problem = Problem(dtype="bf16", d=64, Hq=2, Hk=2, Nq=128)
    engine = EmulatedEngine()
    read = engine.read

    def spoiled(x: object) -> np.ndarray:
        array = read(x)  # type: ignore[arg-type]
        return round_to(widen(array, "bf16") * fault, "bf16") if array.dtype == np.uint16 else array

    monkeypatch.setattr(engine, "read", spoiled)
    verdict = check(problem, "backward", binaries("bf16", 64, False, "backward"), engine)
    assert not verdict.ok and tensor in {line.tensor for line in verdict.lines if not line.ok}


# BUG-07: NaN in, NaN out


def test_nan_is_not_a_masked_row() -> None:
    q, k, v = normal(7, (1, 1, 40, 64), (1, 1, 40, 64), (1, 1, 40, 64))
    clean = attend(q, k, v, causal=True)
    q[0, 0, 3, 5] = np.nan
    got = attend(q, k, v, causal=True)
    assert np.isnan(got.O[0, 0, 3]).all()
    np.testing.assert_array_equal(np.delete(got.O, 3, axis=2), np.delete(clean.O, 3, axis=2))


def test_a_nan_key_reaches_every_row_that_sees_it() -> None:
    q, k, v = normal(7, (1, 1, 40, 64), (1, 1, 40, 64), (1, 1, 40, 64))
    clean = attend(q, k, v, causal=True)
    k[0, 0, 20, 1] = np.nan
    got = attend(q, k, v, causal=True)
    assert np.isnan(got.O[0, 0, 20:]).all()
    np.testing.assert_array_equal(got.O[0, 0, :20], clean.O[0, 0, :20])


# BUG-09, 10, 11: strides


@BACKWARDS
def test_layouts_do_not_matter(deterministic: bool) -> None:
    """Slices of a fused QKV buffer, sequence-major tensors, rows that cp.async cannot reach, a broadcast dO."""
    B, H, N, d = 2, 3, 50, 64
    qkv = round_to(np.random.default_rng(9).standard_normal((B, N, 3, H, d)), "bf16")
    q, k, v = (qkv[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    before = qkv.copy()
    ones = round_to(1.0, "bf16")
    dO = np.broadcast_to(ones, (B, H, N, d))
    want = attend(*(np.ascontiguousarray(x) for x in (q, k, v, dO)), causal=True, deterministic=deterministic)
    odd = np.zeros((B, H, N, d + 4), np.uint16)  # rows of 136 bytes
    odd[..., :d] = k
    every_second = np.zeros((B, H, N, 2 * d), np.uint16)
    every_second[..., ::2] = v
    variants = [(q, k, v, dO), (q, odd[..., :d], v, dO), (q, k, every_second[..., ::2], np.ascontiguousarray(dO))]
    for variant in variants:
        got = attend(*variant, causal=True, deterministic=deterministic)
        for name in ("O", "dK", "dV"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
        close(got.dQ, want.dQ, slack=1)
    np.testing.assert_array_equal(qkv, before)


# BUG-12: empty dimensions


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_no_keys_and_no_queries(causal: bool) -> None:
    q, empty = np.ones((2, 2, 5, 64)), np.ones((2, 2, 0, 64))
    got = attend(q, empty, empty, causal=causal)
    assert not got.O.any() and np.isneginf(got.lse).all() and not got.dQ.any() and got.dK.shape == empty.shape
    got = attend(empty, q, q, causal=causal)
    assert got.O.shape == empty.shape and not got.dK.any() and not got.dV.any()


# BUG-13: every column counts, and the scale is that of d


@pytest.mark.parametrize("d", [8, 16, 40, 64, 72, 80, 96, 128, 160, 192, 256])
def test_a_needle_in_the_last_column(d: int) -> None:
    """Only the last column of q and k_0 is not zero (6): P_0 = 1 / (1 + exp(-36 / sqrt(d))), 0.98583 for d = 72."""
    q, k, v = np.zeros((1, 1, 1, d)), np.zeros((1, 1, 2, d)), np.zeros((1, 1, 2, d))
    q[..., -1] = k[0, 0, 0, -1] = 6
    v[0, 0, 0] = 1
    got = attend(q, k, v, dtype="fp16")
    p = 1 / (1 + np.exp(-36 / np.sqrt(d)))
    assert d != 72 or abs(p - 0.98583) < 5e-6
    np.testing.assert_allclose(got.O, p, atol=6e-4)
    np.testing.assert_allclose(got.lse, np.log1p(np.exp(36 / np.sqrt(d))), rtol=1e-6)


def test_other_head_dims_are_refused_before_anything_is_compiled() -> None:
    for d in (0, 4, 12, 100, 264, 512):
        with pytest.raises(BadProblem, match=r"multiple of 8 from 8 to 256"):
            Problem(dtype="bf16", d=d)


# BUG-14: query heads find their key/value head, forward and backward


@BACKWARDS
@pytest.mark.parametrize(("Hq", "Hk"), [(6, 2), (8, 1), (9, 3), (4, 4)])
def test_heads_that_share_keys(Hq: int, Hk: int, deterministic: bool) -> None:
    N = 20
    v = np.broadcast_to(np.arange(1, Hk + 1)[None, :, None, None], (1, Hk, N, 64))
    (q,) = normal(14, (1, Hq, N, 64))
    got = attend(q, np.zeros((1, Hk, N, 64)), v, deterministic=deterministic)
    for h in range(Hq):
        np.testing.assert_array_equal(got.O[0, h], h // (Hq // Hk) + 1)
    close(got.dV, np.full(got.dV.shape, Hq / Hk), slack=2)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BadProblem, match="6 query heads over 4"):
        Problem(dtype="bf16", d=64, Hq=6, Hk=4)


# What the design promises: nothing grows as N x N


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("Nq", "Nk"), [(64, 64), (100, 300), (257, 129), (512, 512)])
def test_a_forward_writes_exactly_o_m_and_l(Nq: int, Nk: int, causal: bool) -> None:
    """Counted, not computed: 2 d + 8 bytes a row, whatever the number of keys. Standard attention adds 2 Nk."""
    q, k, v = normal(20, (1, 2, Nq, 64), (1, 2, Nk, 64), (1, 2, Nk, 64))
    got = attend(q, k, v, causal=causal)
    (report,) = (report for name, report in got.engine.reports if name == "forward")
    assert report.global_written_bytes == 2 * Nq * (64 * 2 + 4 + 4)


def test_a_forward_reads_q_k_and_v_once_a_query_tile() -> None:
    """Of rows that exist, and nothing else: 128 bytes each at d = 64."""
    q, k, v = normal(23, (1, 2, 100, 64), (1, 2, 300, 64), (1, 2, 300, 64))
    got = attend(q, k, v)
    (report,) = (report for name, report in got.engine.reports if name == "forward")
    assert report.global_read_bytes == 2 * (100 + 2 * 300) * 128


@pytest.mark.parametrize("N", [128, 256, 512])
def test_a_backward_writes_nothing_that_grows_as_n_times_n(N: int) -> None:
    """Split: dQ, dK, dV and three statistics for each row, rows counted in whole 128."""
    q, k, v = normal(21, (1, 1, N, 64), (1, 1, N, 64), (1, 1, N, 64))
    got = attend(q, k, v, deterministic=True)
    written = {name: report.global_written_bytes for name, report in got.engine.reports}
    assert written == {
        "forward": N * (128 + 8), "delta": N * 12, "dkdv": 2 * N * 128, "dq": N * 128,
    }  # fmt: skip


def test_the_split_backward_is_the_same_from_run_to_run() -> None:
    inputs = normal(22, (1, 4, 100, 64), (1, 2, 100, 64), (1, 2, 100, 64), (1, 4, 100, 64))
    first, second = (attend(*inputs, causal=True, deterministic=True) for _ in range(2))
    for name in ("dQ", "dK", "dV"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert not any(report.atomic_bytes for _, report in first.engine.reports)

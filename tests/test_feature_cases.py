"""Failures that users have reported, in the kernels that features make: each with the right answer."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.spec.dtype import round_to, widen

from .attend import attend
from .test_cases import BACKWARDS, close, normal

NAN = 0x7FC0  # the bits of a bf16


# BUG-01 and BUG-12: sequences of no query, of no key, of one


@BACKWARDS
def test_empty_sequences_among_others(deterministic: bool) -> None:
    """Outputs start as NaN: what no key is seen by is 0, and gradients of keys that no query sees are 0."""
    rows, keys = [3, 0, 70, 1, 0], [0, 65, 70, 1, 0]
    q, k, v, dO = normal(1, (1, 2, 74, 64), (1, 2, 136, 64), (1, 2, 136, 64), (1, 2, 74, 64))
    got = attend(q, k, v, dO, causal=True, deterministic=deterministic, lengths=(rows, keys))
    assert got.finite()
    assert not got.O[:, :, :3].any() and not got.dQ[:, :, :3].any()  # no key
    assert np.isneginf(got.lse[:, :, :3]).all()
    assert not got.dK[:, :, :65].any() and not got.dV[:, :, :65].any()  # no query
    close(got.O[:, :, 73], widen(round_to(v, "bf16"), "bf16")[:, :, 135], slack=1)  # one of each
    close(got.dV[:, :, 135], widen(round_to(dO, "bf16"), "bf16")[:, :, 73], slack=1)
    alone = attend(
        q[:, :, 3:73], k[:, :, 65:135], v[:, :, 65:135], dO[:, :, 3:73], causal=True, deterministic=deterministic
    )
    np.testing.assert_array_equal(got.O[:, :, 3:73], alone.O)
    close(got.dQ[:, :, 3:73], alone.dQ)


@BACKWARDS
def test_a_batch_of_nothing(deterministic: bool) -> None:
    nothing = np.zeros((1, 2, 0, 64))
    got = attend(nothing, nothing, nothing, deterministic=deterministic, lengths=([0, 0], [0, 0]))
    assert got.O.shape == got.dQ.shape == got.dK.shape == (1, 2, 0, 64)


# BUG-04: the corner of the mask, from its written definition


@BACKWARDS
@pytest.mark.parametrize(("Nq", "Nk"), [(2, 5), (5, 2), (129, 257), (100, 40)])
@pytest.mark.parametrize("window", [(None, 0), (3, 0), (70, 2), (0, 5)])
def test_the_corner_at_the_top_left(window: tuple[int | None, int], Nq: int, Nk: int, deterministic: bool) -> None:
    """With q = 0 the weights of a row are equal: O is the mean of the keys' numbers that it sees."""
    left, right = window
    v = np.zeros((1, 1, Nk, 64))
    v[0, 0, :, 0] = np.arange(Nk)
    q, k = np.zeros((1, 1, Nq, 64)), np.ones((1, 1, Nk, 64))
    got = attend(q, k, v, dtype="fp16", deterministic=deterministic, features={"window": window, "anchor": "top-left"})
    dV = np.zeros(Nk)
    for i in range(Nq):
        seen = [j for j in range(Nk) if j <= i + right and (left is None or j >= i - left)]
        want = sum(seen) / len(seen) if seen else 0.0
        np.testing.assert_allclose(got.O[0, 0, i, 0], want, rtol=2e-3, atol=1e-3)
        np.testing.assert_allclose(got.lse[0, 0, i], np.log(len(seen)) if seen else -np.inf, rtol=1e-5, atol=1e-6)
        dV[seen] += 1 / len(seen) if seen else 0
    np.testing.assert_allclose(got.dV[0, 0, :, 0], dV, rtol=4e-3, atol=4e-3)


# BUG-05: what lies behind a sequence is another sequence, or padding


@BACKWARDS
def test_a_neighbours_nan_does_not_leak(deterministic: bool) -> None:
    """Sequences of lengths that are no multiple of a tile, between two of NaN."""
    rows, keys = [5, 63, 9], [9, 65, 130]
    bits = [round_to(x, "bf16") for x in normal(3, (1, 2, 77, 64), (1, 2, 204, 64), (1, 2, 204, 64), (1, 2, 77, 64))]
    own = (slice(5, 68), slice(9, 74))
    clean = attend(*bits, causal=True, deterministic=deterministic, lengths=(rows, keys))
    for x, part in zip(bits, (own[0], own[1], own[1], own[0]), strict=True):
        kept = x[:, :, part].copy()
        x[...] = NAN
        x[:, :, part] = kept
    got = attend(*bits, causal=True, deterministic=deterministic, lengths=(rows, keys))
    for name, part in (("O", own[0]), ("dK", own[1]), ("dV", own[1])):
        np.testing.assert_array_equal(getattr(got, name)[:, :, part], getattr(clean, name)[:, :, part], name)
    close(got.dQ[:, :, own[0]], clean.dQ[:, :, own[0]])
    assert np.isfinite(got.dQ[:, :, own[0]]).all()


@BACKWARDS
def test_padding_of_nan_does_not_leak(deterministic: bool) -> None:
    bits = [round_to(x, "bf16") for x in normal(4, (3, 2, 70, 64), (3, 2, 130, 64), (3, 2, 130, 64), (3, 2, 70, 64))]
    lens = [130, 1, 77]
    clean = attend(*bits, deterministic=deterministic, k_lens=lens)
    for b, end in enumerate(lens):
        bits[1][b, :, end:] = bits[2][b, :, end:] = NAN
    got = attend(*bits, deterministic=deterministic, k_lens=lens)
    np.testing.assert_array_equal(got.O, clean.O)
    np.testing.assert_array_equal(got.dV, clean.dV)
    assert got.finite() and not got.dK[1, :, 1:].any() and not got.dV[1, :, 1:].any()


# BUG-14: V of another head dimension


@BACKWARDS
@pytest.mark.parametrize(("d", "dv"), [(64, 128), (128, 64), (40, 72)])
def test_values_of_another_width(d: int, dv: int, deterministic: bool) -> None:
    """V of K/V head h is h + 1, k = 0: O of query head h is floor(h / 3) + 1, dV = Nq / Nk times the group."""
    v = np.broadcast_to(np.arange(1.0, 3.0)[None, :, None, None], (1, 2, 48, dv))
    (q,) = normal(5, (1, 6, 48, d))
    got = attend(q, np.zeros((1, 2, 48, d)), v, deterministic=deterministic)
    np.testing.assert_allclose(got.O, np.broadcast_to(np.repeat([1.0, 2.0], 3)[None, :, None, None], got.O.shape))
    assert got.dV.shape == (1, 2, 48, dv) and got.dK.shape == (1, 2, 48, d)
    close(got.dV, np.full(got.dV.shape, 3.0), slack=1)
    assert np.abs(got.dQ).max() < 1e-3 and np.abs(got.dK).max() < 0.05

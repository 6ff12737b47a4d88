"""The float64 reference against finite differences and PyTorch: everything else is judged by it."""

import numpy as np
import pytest
import torch
from flashsmith.reference import attention, visible


def inputs(Nq: int, Nk: int, Hq: int = 4, Hk: int = 2, d: int = 8) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(3)
    shapes = [(2, Hq, Nq, d), (2, Hk, Nk, d), (2, Hk, Nk, d), (2, Hq, Nq, d)]
    return tuple(random.standard_normal(shape) + 0.5 for shape in shapes)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("Nq", "Nk"), [(5, 5), (3, 9), (1, 4)])
def test_agrees_with_pytorch_in_float64(Nq: int, Nk: int, causal: bool) -> None:
    q, k, v, dO = inputs(Nq, Nk)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    mask = torch.from_numpy(np.tril(np.ones((Nq, Nk), bool), Nk - Nq)) if causal else None
    O = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=0.3, enable_gqa=True)
    gradients = torch.autograd.grad(O, tensors, torch.from_numpy(dO))
    got = attention(q, k, v, dO, scale=0.3, causal=causal)
    np.testing.assert_allclose(got.O, O.detach().numpy(), atol=1e-12)
    for mine, theirs in zip((got.dQ, got.dK, got.dV), gradients, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-12)


def test_delta_spans_the_whole_row() -> None:
    """dS rows sum to zero only if delta is the sum over all keys, not over one tile of them."""
    q, k, v, dO = inputs(4, 6)
    step, base = 1e-6, attention(q, k, v, dO, scale=1.0, causal=False)
    moved = q.copy()
    moved[0, 1, 2, 3] += step
    change = ((attention(moved, k, v, dO, scale=1.0, causal=False).O - base.O) * dO).sum() / step
    assert change == pytest.approx(base.dQ[0, 1, 2, 3], rel=1e-4)


def test_rows_that_see_no_key() -> None:
    """Nq = 5 over Nk = 2: rows 0-2 see nothing; the values are those of the written definition."""
    q, k = np.zeros((1, 1, 5, 4)), np.ones((1, 1, 2, 4))
    v = np.array([[1.0, 2, 3, 4], [5, 6, 7, 8]])[None, None]
    got = attention(q, k, v, np.ones((1, 1, 5, 4)), scale=0.5, causal=True)
    np.testing.assert_array_equal(got.O[0, 0], [[0] * 4] * 3 + [v[0, 0, 0], v[0, 0].mean(0)])
    np.testing.assert_array_equal(got.lse[0, 0], [-np.inf] * 3 + [0, np.log(2)])
    np.testing.assert_array_equal(got.dV[0, 0], [[1.5] * 4, [0.5] * 4])
    assert not got.dQ.any() and not got.dK.any()


def test_the_masks_diagonal_ends_at_the_bottom_right() -> None:
    np.testing.assert_array_equal(visible(2, 5, True), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(visible(3, 2, True), [[0, 0], [1, 0], [1, 1]])

"""Evaluation on arrays of NumPy and of torch: shapes, types, clamping, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flashsmith.errors import UsageError
from flashsmith.score_mod import ALIBI, BIAS, evaluate, parse, softcap

B, H, NQ, NK = 2, 3, 4, 5


def attention(library=np, dtype=np.float64, **tensors) -> dict:
    """The arguments for scores [B, H, Nq, Nk] = 0, 1, 2, ..."""
    places = {"b": np.arange(B)[:, None, None, None], "h": np.arange(H)[:, None, None]}
    places |= {"i": np.arange(NQ)[:, None], "j": np.arange(NK)}
    score = np.arange(B * H * NQ * NK).reshape(B, H, NQ, NK)
    if library is torch:
        places = {name: torch.from_numpy(value) for name, value in places.items()}
        score = torch.from_numpy(score)
        return {"score": score.to(dtype), **places, "Nq": NQ, "Nk": NK, "tensors": tensors}
    return {"score": score.astype(dtype), **places, "Nq": NQ, "Nk": NK, "tensors": tensors}


def test_alibi_written_out():
    """-slope |i + Nk - Nq - j|, in loops."""
    slope = np.array([0.5, 0.25, 1.0])
    given = attention(slope=slope)
    wanted = given["score"].copy()
    for h in range(H):
        for i in range(NQ):
            for j in range(NK):
                wanted[:, h, i, j] -= slope[h] * abs(i + NK - NQ - j)
    np.testing.assert_array_equal(evaluate(parse(ALIBI), **given), wanted)


def test_a_bias_is_broadcast_and_clamped():
    bias = np.random.default_rng(0).normal(size=(1, H, NQ, NK - 2))
    given = attention(bias=bias)
    padded = np.concatenate([bias, bias[..., -1:], bias[..., -1:]], -1)  # keys past the end read the last
    np.testing.assert_array_equal(evaluate(parse(BIAS), **given), given["score"] + padded)


def test_negative_indexes_are_clamped_not_wrapped():
    table = np.array([10.0, 20.0, 30.0])
    values = evaluate(parse("t[i - j] - 0 * score"), **attention(t=table))
    assert values[0, 0, 0].tolist() == [10.0] * 5 and values[0, 0, 3].tolist() == [30.0, 30.0, 20.0, 10.0, 10.0]


@pytest.mark.parametrize("formula", [ALIBI, BIAS, softcap(7), "score if i >= j else -inf", "i // 3 - j % 2", "-3.5"])
def test_torch_as_numpy(formula):
    """Of score's shape whatever occurs in the formula; float32 tensors enter a float64 score."""
    rng = np.random.default_rng(1)
    tensors = {"slope": rng.normal(size=H).astype("f4"), "bias": rng.normal(size=(B, H, NQ, NK)).astype("f4")}
    wanted = evaluate(parse(formula), **attention(**tensors))
    given = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    actual = evaluate(parse(formula), **attention(torch, torch.float64, **given))
    assert actual.dtype == torch.float64 and tuple(actual.shape) == wanted.shape == (B, H, NQ, NK)
    np.testing.assert_allclose(actual.numpy(), wanted, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_is_that_of_the_score(dtype):
    slope = torch.ones(H, dtype=torch.float64)
    assert evaluate(parse(ALIBI), **attention(torch, dtype, slope=slope)).dtype == dtype


def test_gradients_reach_score_and_tensors():
    slope = torch.ones(H, dtype=torch.float64, requires_grad=True)
    given = attention(torch, torch.float64, slope=slope)
    given["score"].requires_grad_()
    evaluate(parse(ALIBI), **given).sum().backward()
    distances = sum(abs(i + NK - NQ - j) for i in range(NQ) for j in range(NK))
    assert slope.grad.tolist() == [-B * distances] * H and (given["score"].grad == 1).all()


def test_floor_makes_an_index_of_anything():
    """Not a number is 0; what is beyond an int stays within 2^30, so that a sum can follow."""
    given = {**attention(t=np.array([1.0, 2.0, 3.0])), "b": 0, "h": 0, "i": 0, "j": 0}
    given["score"] = np.array([np.nan, np.inf, -np.inf, 1.7, -0.2])
    assert evaluate(parse("t[floor(score)]"), **given).tolist() == [1, 3, 1, 2, 1]
    assert evaluate(parse("t[floor(score) + 1000000000]"), **given).tolist() == [3, 3, 1, 3, 3]
    assert evaluate(parse("floor(score) * 2"), **given)[1:].tolist() == [np.inf, -np.inf, 2, -2]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "reads tensor slope, which is not given; given are none"),
        ({"other": np.ones(3)}, "given are \\['other'\\]"),
        ({"slope": np.ones((1, 3))}, "reads 1 indexes of tensor slope; its shape \\(1, 3\\)"),
        ({"slope": np.ones(0)}, "none 0"),
    ],
    ids=["missing", "misnamed", "dimensions", "empty"],
)
def test_tensors_that_do_not_fit(tensors, words):
    with pytest.raises(UsageError, match=words):
        evaluate(parse(ALIBI), **attention(**tensors))

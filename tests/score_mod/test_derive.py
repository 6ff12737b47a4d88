"""Derivatives against central differences in float64, against PyTorch's autograd, and as they are spelt."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from flashsmith.score_mod import ALIBI, Expression, compose, evaluate, parse

from .formulas import SHAPES, random_formula, random_values

STEP = 1e-6


def central(expression: Expression, values: dict, change) -> np.ndarray:
    """The central difference of the value under `change(values, step)`, NaN where it crosses a kink.

    The two one-sided differences agree to O(STEP) where the formula is smooth.
    """
    up, here, down = (evaluate(expression, **change(values, step)) for step in (STEP, 0, -STEP))
    smooth = np.abs(up - 2 * here + down) < 1e-8 * (1 + np.abs(here))
    return np.where(smooth, (up - down) / (2 * STEP), np.nan)


def assert_agree(derived: np.ndarray, differences: np.ndarray, what: str) -> int:
    """Derivatives where a difference could be taken; returns how many."""
    smooth = ~np.isnan(differences)
    wrong = np.abs(derived - differences) > 1e-6 * (1 + np.abs(differences))
    assert not (wrong & smooth).any(), f"{what}: {derived[wrong & smooth][:3]} for {differences[wrong & smooth][:3]}"
    return int(smooth.sum())


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_derivatives_against_differences(first):
    """Of 25 random formulas, d/d score and d/d every entry that is read."""
    compared = 0
    for seed in range(first, first + 25):
        text = random_formula(random.Random(seed))
        expression, values = parse(text), random_values(seed)

        def move_score(values, step):
            return {**values, "score": values["score"] + step}

        compared += assert_agree(evaluate(expression.slope, **values), central(expression, values, move_score), text)
        for name in expression.tensors:

            def move_tensor(values, step, name=name):
                moved = {**values["tensors"], name: values["tensors"][name] + step}
                return {**values, "tensors": moved}

            # all entries of a tensor move: the sum of its derivatives
            derived = np.zeros(values["score"].shape)
            for gradient in expression.gradients:
                if gradient.tensor == name:
                    derived = derived + evaluate(gradient.derivative, **values)
            compared += assert_agree(derived, central(expression, values, move_tensor), f"{name} in {text}")
    assert compared > 25 * 64


def test_each_entry_has_its_own_derivative():
    """Two entries of a tensor, one of them twice: each once, in the order of reading."""
    expression = parse("w[h] * score + w[h + 1] * w[h]")
    found = [(g.tensor, *map(str, g.index), str(g.derivative)) for g in expression.gradients]
    assert found == [("w", "h", "score + w[h + 1]"), ("w", "h + 1", "w[h]")]


def test_gradients_against_autograd():
    """torch, through the very evaluation: where there is no tie the two agree, tensors too."""
    for seed in range(40):
        text = random_formula(random.Random(1000 + seed))
        expression, values = parse(text), random_values(seed)
        score = torch.tensor(values["score"], requires_grad=True)
        tensors = {k: torch.tensor(v, requires_grad=True) for k, v in values["tensors"].items()}
        integers = {k: torch.tensor(values[k]) for k in "bhij"}
        value = evaluate(expression, score=score, **integers, Nq=values["Nq"], Nk=values["Nk"], tensors=tensors)
        np.testing.assert_allclose(value.detach().numpy(), evaluate(expression, **values), rtol=1e-12, atol=1e-12)
        value.sum().backward()
        slope = 0 if score.grad is None else score.grad.numpy()
        np.testing.assert_allclose(
            np.broadcast_to(slope, 64), evaluate(expression.slope, **values), 1e-9, 1e-9, err_msg=text
        )
        for name, shape in SHAPES.items():
            sums = np.zeros(shape)
            for gradient in expression.gradients:
                if gradient.tensor == name:
                    index = [evaluate(at, **values) for at in gradient.index]
                    index = [np.clip(at, 0, n - 1).astype(int) for at, n in zip(index, shape, strict=True)]
                    np.add.at(sums, tuple(index), evaluate(gradient.derivative, **values))
            grad = tensors[name].grad
            np.testing.assert_allclose(sums, 0 if grad is None else grad.numpy(), 1e-9, 1e-9, err_msg=text)


SLOPES = {
    ALIBI: "1",
    "30 * tanh(score / 30)": "1 - tanh(score / 30) * tanh(score / 30)",
    "0.1 * score * 10": "1",
    "score if i - j < 128 else -inf": "1 if i - j < 128 else 0",
    "score * exp(w[h] * abs(i - j)) + table[min(i - j, 63)]": "exp(w[h] * abs(i - j))",
    "abs(score)": "sign(score)",
    "score ** 3": "3 * score ** 2",
    "score ** 1.5": "1.5 * score ** 0.5",
    "1 / score": "-(1 / (score * score))",
    "floor(score) + sign(score)": "0",
    "t[floor(score)]": "0",
    "log(w[h]) - bias[i]": "0",
    "min(score, 50)": "1 if score <= 50 else 0",
    "score - 3 * score": "-2",
    "score * (3 / 3)": "1",
    "score / 0": "1 / 0.0",
}


@pytest.mark.parametrize("formula", SLOPES)
def test_slopes_are_short(formula):
    expression = parse(formula)
    assert expression.slope.text == SLOPES[formula]
    assert expression.slope.is_one == (SLOPES[formula] == "1") and expression.slope.is_zero == (SLOPES[formula] == "0")


def test_at_a_tie():
    """abs has slope 0; of min and max the first argument has the slope."""
    here = {"score": np.array([2.0]), "b": 0, "h": 0, "i": 0, "j": 0, "Nq": 1, "Nk": 1}
    for formula, slope in (("min(score, 2)", 1), ("min(2, score)", 0), ("max(score, 2)", 1), ("max(2, score)", 0)):
        assert evaluate(parse(formula).slope, **here).item() == slope
    assert evaluate(parse("abs(score - 2)").slope, **here).item() == 0


def test_a_branch_that_is_not_taken_adds_nothing():
    """Autograd gives NaN here: 0 times the infinite slope of log at 0."""
    expression = parse("log(score) if score > 0 else 0.5 * score")
    here = {"score": np.array([0.0, -1.0, 2.0]), "b": 0, "h": 0, "i": 0, "j": 0, "Nq": 1, "Nk": 1}
    assert evaluate(expression.slope, **here).tolist() == [0.5, 0.5, 0.5]


def test_huge_literals_do_not_stop_it():
    whole = compose(["(1e38 * score) ** 32", "(1e38 * score) ** 32"])
    assert "inf" in whole.slope.text or np.isinf(evaluate(whole.slope, **random_values(0))).all()


def test_what_a_derivative_depends_on():
    expression = parse("score * exp(w[h] * abs(i - j))")
    assert expression.slope.depends_on("w", "i", "j", "h") and not expression.slope.depends_on("score")
    (gradient,) = expression.gradients
    assert gradient.derivative.depends_on("score") and gradient.index[0].text == "h"

"""Make random formulas and the values that they are tried on."""

from __future__ import annotations

import random

import numpy as np

TENSORS = {"slope": 1, "bias": 4, "w": 2}
SHAPES = {"slope": (3,), "bias": (2, 1, 6, 4), "w": (5, 7)}  # smaller than what is asked for: indexes are clamped
LENGTHS = {"Nq": 9, "Nk": 7}


def random_formula(rng: random.Random, depth: int = 3) -> str:
    """A formula that is defined for every score and has no huge values; it always contains the score."""
    return f"{_real(rng, depth)} {rng.choice('+-*')} ({_around_score(rng, depth)})"


def _around_score(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return "score"
    inner = _around_score(rng, depth - 1)
    other = _real(rng, depth - 1)
    return rng.choice(
        [
            f"tanh({inner} / 3)",
            f"sigmoid({inner})",
            f"exp(tanh({inner}))",
            f"{rng.choice([2, 0.5])} * ({inner}) + {other}",
            f"({inner}) * ({other})",
            f"({other}) / (2 + abs({inner}))",
            f"sin({inner}) - cos({other})",
            f"min({inner}, {other})",
            f"max({other}, {inner})",
            f"abs({inner})",
            f"sqrt(1 + ({inner}) ** 2)",
            f"log(2 + abs({inner}))",
            f"(1 + abs({inner})) ** {rng.choice([-1.5, -1, 0.5, 1.5])}",
            f"(({inner}) if {_truth(rng, depth - 1)} else ({other}))",
            f"sign({inner}) * ({other})",
        ]
    )


def _real(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["score", "0.75", "2", "pi", _read(rng, 0), _whole(rng, 0)])
    if rng.random() < 0.3:
        return _read(rng, depth - 1)
    if rng.random() < 0.3:
        return f"({_whole(rng, depth - 1)})"
    if rng.random() < 0.3:
        return f"({_real(rng, depth - 1)} {rng.choice('+-*')} {_real(rng, depth - 1)})"
    return _around_score(rng, depth - 1)


def _read(rng: random.Random, depth: int) -> str:
    name = rng.choice(sorted(TENSORS))
    return f"{name}[{', '.join(_whole(rng, depth) for _ in range(TENSORS[name]))}]"


def _whole(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["b", "h", "i", "j", "Nq", "Nk", "1", "3"])
    a, b = _whole(rng, depth - 1), _whole(rng, depth - 1)
    return rng.choice(
        [
            f"({a} + {b})",
            f"({a} - {b})",
            f"2 * {a}",
            f"-{a}",
            f"min({a}, {b})",
            f"max({a}, {b})",
            f"abs({a} - {b})",
            f"({a} - {b}) // {rng.choice(['4', '3', 'Nq'])}",
            f"({a} - {b}) % {rng.choice(['8', '5', 'Nk'])}",
            f"({a} if {_truth(rng, depth - 1)} else {b})",
            f"sign({a} - {b})",
        ]
    )


def _truth(rng: random.Random, depth: int) -> str:
    a, b = _whole(rng, depth), _whole(rng, depth)
    relation = f"{a} {rng.choice(['<', '<=', '>', '>=', '==', '!='])} {b}"
    return rng.choice([relation, f"not {relation}", f"{relation} and h < 2", f"j < 5 or {relation}"])


def random_values(seed: int, count: int = 64) -> dict[str, object]:
    """Scores at random places of an attention, and tensors of SHAPES, as arguments of evaluate."""
    rng = np.random.default_rng(seed)
    return {
        "score": rng.normal(0, 2, count),
        "b": rng.integers(0, 2, count),
        "h": rng.integers(0, 4, count),
        "i": rng.integers(0, LENGTHS["Nq"], count),
        "j": rng.integers(0, LENGTHS["Nk"], count),
        **LENGTHS,
        "tensors": {name: rng.normal(0.3, 1, shape) for name, shape in SHAPES.items()},
    }

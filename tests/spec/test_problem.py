"""What is served and what is refused, with the limit and the way out in the message."""

import math

import pytest
from flashsmith.errors import BadProblem
from flashsmith.spec.problem import Problem


def test_defaults_follow_the_queries() -> None:
    problem = Problem(dtype="bf16", d=64, Hq=8, Nq=300)
    assert (problem.kv_heads, problem.keys) == (8, 300)
    assert problem.softmax_scale == 1 / math.sqrt(64)


@pytest.mark.parametrize(
    ("fields", "needles"),
    [
        ({"dtype": "fp8", "d": 64}, ["fp8", "bf16", "fp16", "fp32"]),
        ({"dtype": "bf16", "d": 12}, ["d=12", "multiple of 8", "16"]),
        ({"dtype": "bf16", "d": 264}, ["d=264", "256"]),
        ({"dtype": "bf16", "d": 0}, ["d=0", "8"]),
        ({"dtype": "bf16", "d": 64, "Hq": 6, "Hk": 4}, ["6 query heads", "4 key/value heads", "multiple"]),
        ({"dtype": "bf16", "d": 64, "Nq": -1}, ["Nq=-1"]),
        ({"dtype": "bf16", "d": 64, "scale": 0.0}, ["scale=0.0", "positive"]),
        ({"dtype": "bf16", "d": 64, "scale": math.nan}, ["scale=nan"]),
    ],
    ids=["dtype", "d-not-8", "d-large", "d-zero", "heads", "negative", "scale-zero", "scale-nan"],
)
def test_refusals(fields: dict[str, object], needles: list[str]) -> None:
    with pytest.raises(BadProblem) as error:
        Problem(**fields)  # type: ignore[arg-type]
    assert all(needle in str(error.value) for needle in needles)


def test_flops_follow_the_papers_convention() -> None:
    """FlashAttention-2, section 4.1: 4 N^2 d a head forward, half when causal, 2.5 times that backward."""
    problem = Problem(dtype="bf16", d=128, B=2, Hq=16, Nq=8192)
    assert problem.flops("forward") == 4 * 2 * 16 * 8192 * 8192 * 128
    assert problem.flops("backward") == 2.5 * problem.flops("forward")
    causal = Problem(dtype="bf16", d=128, causal=True, B=2, Hq=16, Nq=8192)
    assert causal.flops("forward") == problem.flops("forward") / 2


def test_lengths_are_those_that_are_known() -> None:
    with pytest.raises(BadProblem, match=r"lengths 'varlen' is not known; use one of uniform, padded, packed"):
        Problem(dtype="bf16", d=64, lengths="varlen")  # type: ignore[arg-type]


def test_a_window_with_a_right_side_ends_at_a_diagonal() -> None:
    windows = {(None, None): False, (7, None): False, (None, 0): True, (None, 3): True, (7, 3): True}
    assert {window: Problem(dtype="bf16", d=64, window=window).ends for window in windows} == windows
    assert Problem(dtype="bf16", d=64, causal=True).ends

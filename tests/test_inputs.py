"""Inputs of a check: lengths, tables and sinks that a fault in a feature would show on."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.inputs import given_of, make_inputs, table_sizes
from flashsmith.reference import attention
from flashsmith.spec.dtype import widen
from flashsmith.spec.features import ScoreMod, Table
from flashsmith.spec.problem import Problem


def test_packed_lengths() -> None:
    """One sequence is the longest, one has no row, one no key, and one has other numbers of rows and keys."""
    for seed in range(5):
        x = make_inputs(Problem(dtype="bf16", d=8, B=4, Hq=2, Nq=33, Nk=70, lengths="packed"), seed)
        assert x.cu_q is not None and x.cu_k is not None
        rows, keys = np.diff(x.cu_q), np.diff(x.cu_k)
        assert rows.max() == 33 and keys.max() == 70 and 0 in rows and 0 in keys
        assert not ((rows == 0) & (keys == 0)).any() and ((rows != keys) & (rows > 0) & (keys > 0)).any()
        assert x.q.shape == (1, 2, rows.sum(), 8) and x.v.shape == (1, 2, keys.sum(), 8)
        assert x.cu_q.dtype == np.int32


def test_padded_lengths() -> None:
    x = make_inputs(Problem(dtype="bf16", d=8, B=3, Hq=2, Nq=33, Nk=70, lengths="padded"))
    assert x.k_lens is not None and x.k_lens.max() == 70 and 0 in x.k_lens and x.k.shape == (3, 2, 70, 8)
    alone = make_inputs(Problem(dtype="bf16", d=8, B=1, Hq=2, Nq=33, Nk=70, lengths="padded"))
    assert alone.k_lens is not None and 0 < alone.k_lens[0] < 70


def test_features_leave_the_other_inputs_as_they_are() -> None:
    """What a plain problem draws is what it drew before it had features."""
    plain = make_inputs(Problem(dtype="fp16", d=8, Hq=2, Nq=5, Nk=6))
    more = make_inputs(Problem(dtype="fp16", d=8, Hq=2, Nq=5, Nk=6, sinks=True, dropout=0.5))
    for name in ("q", "k", "v", "dO"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(more, name))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("score + bias[b, h, i, j]", {"bias": (2, 4, 5, 7)}),
        ("score - slope[h] * (i - j)", {"slope": (4,)}),
        ("score + rel[min(abs(i - j), 3)] + rel[2]", {"rel": (4,)}),
        ("score * w[i // 2] + t[b, j - i]", {"w": (3,), "t": (2, 7)}),
    ],
)
def test_tables_are_as_large_as_their_indexes(text: str, sizes: dict[str, tuple[int, ...]]) -> None:
    tables = tuple(Table(name=name, rank=len(size), dtype="bf16") for name, size in sizes.items())
    problem = Problem(dtype="bf16", d=8, B=2, Hq=4, Nq=5, Nk=7, score_mod=ScoreMod(text=text, tables=tables))
    assert table_sizes(problem) == sizes
    drawn = make_inputs(problem).tables
    assert {name: table.shape for name, table in drawn.items()} == sizes
    assert all(table.dtype == np.uint16 for table in drawn.values())


def test_a_sink_has_a_share_that_matters() -> None:
    problem = Problem(dtype="bf16", d=64, Hq=8, Nq=40, Nk=200, sinks=True)
    x = make_inputs(problem)
    q, k, v, dO = (widen(bits, "bf16") for bits in (x.q, x.k, x.v, x.dO))
    with_sinks, without = (
        attention(q, k, v, dO, scale=problem.softmax_scale, causal=False, **given)
        for given in ({"given": given_of(problem, x)}, {})
    )
    share = 1 - np.exp(without.lse - with_sinks.lse)
    assert 0.05 < np.median(share) < 0.95


def test_another_seed_draws_others() -> None:
    mod = ScoreMod(text="score + w[h]", tables=(Table(name="w"),))
    problem = Problem(dtype="bf16", d=8, Hq=2, Nq=5, sinks=True, dropout=0.5, score_mod=mod)
    one, again, other = (make_inputs(problem, seed) for seed in (0, 0, 1))
    for name in ("q", "k", "v", "dO", "sinks", "rng"):
        assert np.array_equal(getattr(one, name), getattr(again, name)), name
        assert not np.array_equal(getattr(one, name), getattr(other, name)), name
    assert not np.array_equal(one.tables["w"], other.tables["w"])

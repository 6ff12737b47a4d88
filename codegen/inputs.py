"""Draw the inputs of a check, and hand what features add to them to the reference and to the kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .engines.engine import Engine, Tensor
from .given import Given, Ints, places_of
from .run import Extras, keep_below
from .score_mod import Expression, evaluate, parse
from .score_mod.tree import Read, walk
from .spec.dtype import Bits, round_to, widen
from .spec.problem import Problem


@dataclass(frozen=True, slots=True)
class Inputs:
    """q [B, Hq, Nq, d]; k [B, Hk, Nk, d]; v [B, Hk, Nk, dv]; dO [B, Hq, Nq, dv], as the bits of the dtype.

    Packed sequences lie one after the other: B = 1, and as many rows as they have together. The rest is what features
    read; see run.Extras.
    """

    q: Bits
    k: Bits
    v: Bits
    dO: Bits
    cu_q: Ints | None = None
    cu_k: Ints | None = None
    k_lens: Ints | None = None
    sinks: NDArray[np.float32] | None = None
    rng: NDArray[np.int64] | None = None
    tables: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # float32, or the bits of a 16-bit float


def make_inputs(problem: Problem, seed: int = 0) -> Inputs:
    """Normal numbers shifted by 1/2: with a mean of zero, sums cancel and a relative error means nothing.

    Of two sequences or more that differ in length one is as long as the problem says; of three or more one has no query
    row and another no key.
    """
    random, of_features = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    B, Nq, Nk = problem.B, problem.Nq, problem.keys
    cu_q = cu_k = k_lens = None
    if problem.lengths == "packed":
        cu_q, cu_k = (_cumulated(_lengths(of_features, B, N, empty)) for N, empty in ((Nq, 1), (Nk, 0)))
        B, Nq, Nk = 1, int(cu_q[-1]), int(cu_k[-1])
    elif problem.lengths == "padded":
        k_lens = _lengths(of_features, B, Nk, 0)
    shapes = (
        (B, problem.Hq, Nq, problem.d),
        (B, problem.kv_heads, Nk, problem.d),
        (B, problem.kv_heads, Nk, problem.value_dim),
        (B, problem.Hq, Nq, problem.value_dim),
    )
    q, k, v, dO = (round_to(random.standard_normal(shape) + 0.5, problem.dtype) for shape in shapes)
    return Inputs(
        q, k, v, dO, cu_q, cu_k, k_lens,
        sinks=_sinks(of_features, problem) if problem.sinks else None,
        rng=of_features.integers(-(2**62), 2**62, 2) if problem.dropout else None,
        tables=_tables(of_features, problem),
    )  # fmt: skip


def _lengths(random: np.random.Generator, B: int, longest: int, empty: int) -> Ints:
    """Of two sequences or more the last is the longest; of three or more, the one of number `empty` has nothing."""
    lengths = random.integers(min(1, longest), longest + 1, B, dtype=np.int32)
    if B >= 2:
        lengths[-1] = longest
    if B >= 3:
        lengths[empty] = 0
    return lengths


def _cumulated(lengths: Ints) -> Ints:
    """Where each sequence begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _sinks(random: np.random.Generator, problem: Problem) -> NDArray[np.float32]:
    """About as large as all scores of a row together, so that a sink's share is near a half."""
    mean = problem.softmax_scale * problem.d / 4
    return (random.standard_normal(problem.Hq) + mean + math.log(max(1, problem.keys))).astype(np.float32)


def _tables(random: np.random.Generator, problem: Problem, *, every: bool = True) -> dict[str, Bits]:
    """Normal numbers of deviation 1/4, which scores outweigh and errors do not; for `every` see table_sizes."""
    tables, sizes = problem.score_mod.tables if problem.score_mod else (), table_sizes(problem, every=every)
    return {table.name: round_to(0.25 * random.standard_normal(sizes[table.name]), table.dtype) for table in tables}


def full_extras(problem: Problem, engine: Engine) -> Extras:
    """What kernels are timed with: every sequence as long as the longest, and tables of noise."""
    random = np.random.default_rng(0)
    left, right = problem.bounds

    def starts(N: int) -> Tensor:
        return engine.tensor((np.arange(problem.B + 1) * N).astype(np.int32))

    packed, grads = problem.lengths == "packed", problem.score_mod.grads if problem.score_mod else ()
    noise = _tables(random, problem, every=False)
    return Extras(
        left=left or 0, right=right or 0, max_q=problem.Nq, max_k=problem.keys,
        cu_q=starts(problem.Nq) if packed else None, cu_k=starts(problem.keys) if packed else None,
        k_lens=engine.tensor(np.full(problem.B, problem.keys, np.int32)) if problem.lengths == "padded" else None,
        sinks=engine.zeros((problem.Hq,), np.float32) if problem.sinks else None,
        rng=engine.zeros((2,), np.int64) if problem.dropout else None, keep_below=keep_below(problem.dropout),
        tables={name: engine.tensor(table) for name, table in noise.items()},
        grads={table.name: engine.zeros(noise[table.name].shape, np.float32) for table in grads},
    )  # fmt: skip


SAMPLED = 64  # queries, and keys, whose indexes are looked at where all of them are too many


def table_sizes(problem: Problem, *, every: bool = True) -> dict[str, tuple[int, ...]]:
    """Shapes of score_mod's tables: as large as the largest index that a pair of this problem asks for.

    If not `every` pair, those of SAMPLED queries and keys, the first and the last among them: an index past the end
    is read as the last.
    """
    if problem.score_mod is None:
        return {}
    batch, shape = np.arange(problem.B), (problem.Hq, problem.Nq, problem.keys)
    places = places_of(batch, *shape)
    if not every:
        i, j = (np.linspace(0, max(0, N - 1), min(SAMPLED, N)).astype(int) for N in shape[1:])
        places |= {"i": i[:, None], "j": j}
    anything = np.broadcast_to(0.0, np.broadcast_shapes(*map(np.shape, places.values())))  # an index knows no score
    sizes: dict[str, tuple[int, ...]] = {}
    for read in (node for node in walk(parse(problem.score_mod.text).tree) if isinstance(node, Read)):
        indexes = (np.asarray(evaluate(Expression(index), score=anything, **places)) for index in read.index)
        needed = tuple(1 + int(index.max(initial=0)) for index in indexes)
        sizes[read.tensor] = tuple(map(max, needed, sizes.get(read.tensor, needed)))
    return sizes


def given_of(problem: Problem, x: Inputs) -> Given:
    """What features add to q, k and v, for the reference and for plain attention."""
    tables = {table.name: table.dtype for table in problem.score_mod.tables} if problem.score_mod else {}
    return Given(
        window=problem.window, top_left=problem.anchor == "top-left", k_lens=x.k_lens, cu_q=x.cu_q, cu_k=x.cu_k,
        score_mod=problem.score_mod, tables={name: widen(x.tables[name], dtype) for name, dtype in tables.items()},
        sinks=None if x.sinks is None else x.sinks.astype(np.float64),
        rng=(0, 0) if x.rng is None else (int(x.rng[0]), int(x.rng[1])), keep_below=keep_below(problem.dropout),
    )  # fmt: skip


def extras_of(problem: Problem, x: Inputs, engine: Engine) -> Extras:
    """The same for the kernels, on their engine; gradients of tables begin with 0."""

    def tensor(array: NDArray[Any] | None) -> Tensor | None:
        return None if array is None else engine.tensor(array)

    left, right = problem.bounds
    asked = problem.score_mod.grads if problem.score_mod else ()
    return Extras(
        left=left or 0, right=right or 0, cu_q=tensor(x.cu_q), cu_k=tensor(x.cu_k), max_q=_longest(x.cu_q),
        max_k=_longest(x.cu_k), k_lens=tensor(x.k_lens), sinks=tensor(x.sinks), rng=tensor(x.rng),
        keep_below=keep_below(problem.dropout),
        tables={name: engine.tensor(table) for name, table in x.tables.items()},
        grads={table.name: engine.zeros(x.tables[table.name].shape, np.float32) for table in asked},
    )  # fmt: skip


def _longest(cu: Ints | None) -> int:
    return 0 if cu is None else int(np.diff(cu).max(initial=0))

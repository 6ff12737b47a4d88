"""The float64 reference against finite differences and PyTorch: everything else is judged by it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from flashsmith.given import PLAIN, Given, visible
from flashsmith.philox import keep_mask
from flashsmith.reference import Result, attention
from flashsmith.spec.features import ScoreMod, Table


def inputs(
    Nq: int, Nk: int, Hq: int = 4, Hk: int = 2, d: int = 8, dv: int | None = None, B: int = 2
) -> tuple[np.ndarray, ...]:
    random, dv = np.random.default_rng(3), dv or d
    shapes = [(B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), (B, Hq, Nq, dv)]
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


@dataclass
class Case:
    """A feature as the reference is given it, and what it means for one score, written out."""

    given: Given = PLAIN
    causal: bool = False
    Nq: int = 5
    Nk: int = 7
    dv: int = 4
    hidden: Callable[[int, int, int], bool] = lambda b, p, j: False  # sequence, the query's key, key
    score: Callable[..., float] = lambda s, b, h, i, j: s
    kept: Callable[..., float] = lambda b, h, i, j: 1.0
    inputs: tuple[np.ndarray, ...] = field(init=False)

    def __post_init__(self) -> None:
        packed = self.given.cu_q is not None
        Nq, Nk = (self.given.cu_q[-1], self.given.cu_k[-1]) if packed else (self.Nq, self.Nk)  # type: ignore[index]
        self.inputs = inputs(Nq, Nk, d=6, dv=self.dv, B=1 if packed else 2)

    def sequences(self) -> list[tuple[int, int, slice, slice]]:
        """Number, place in the batch, rows, keys."""
        if self.given.cu_q is None:
            return [(b, b, slice(0, self.Nq), slice(0, self.Nk)) for b in range(2)]
        return [(b, 0, rows, keys) for b, rows, keys in self.given.sequences()]


def mod(text: str, **tables: np.ndarray) -> Given:
    named = tuple(Table(name=name, rank=table.ndim, grad=True) for name, table in tables.items())
    return Given(score_mod=ScoreMod(text=text, tables=named), tables=tables)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape)


SLOPE, BIAS, WEIGHT = normal(4), normal(2, 4, 5, 7), normal(3)
SINKS = np.array([0.5, -1.0, 2.0, -np.inf])
KEPT = keep_mask(11, 2, 3, 4, 8, 8, 40000)
HALF = {"rng": (11, 2), "keep_below": 40000}
PACKED = {"cu_q": np.array([0, 2, 2, 7]), "cu_k": np.array([0, 4, 7, 7])}  # two have no row, or no key


def dropped(b: int, h: int, i: int, j: int) -> float:
    return float(KEPT[b, h, i, j]) * 65536 / 40000


CASES = {
    "plain": Case(),
    "causal": Case(causal=True),
    "causal, more queries": Case(causal=True, Nq=7, Nk=5),
    "left": Case(replace(PLAIN, window=(1, None)), hidden=lambda b, p, j: j < p - 1),
    "window": Case(replace(PLAIN, window=(2, 1)), hidden=lambda b, p, j: not p - 2 <= j <= p + 1),
    "causal window": Case(replace(PLAIN, window=(0, None)), causal=True, hidden=lambda b, p, j: j < p),
    "window past the keys": Case(replace(PLAIN, window=(1, 1)), Nq=7, Nk=3, hidden=lambda b, p, j: abs(p - j) > 1),
    "top-left": Case(Given(top_left=True), causal=True),
    "top-left window": Case(Given(top_left=True, window=(1, 2)), Nq=8, hidden=lambda b, p, j: not p - 1 <= j <= p + 2),
    "padded": Case(Given(k_lens=np.array([3, 0])), hidden=lambda b, p, j: j >= (3, 0)[b]),
    "padded, causal": Case(Given(k_lens=np.array([6, 2])), causal=True, hidden=lambda b, p, j: j >= (6, 2)[b]),
    "packed": Case(Given(**PACKED)),
    "packed, causal": Case(Given(**{**PACKED, "cu_k": np.array([0, 4, 4, 7])}), causal=True),
    "packed, window, top-left": Case(
        Given(**{**PACKED, "cu_k": np.array([0, 4, 4, 7])}, top_left=True, window=(1, 1)),
        hidden=lambda b, p, j: abs(p - j) > 1,
    ),
    "wide values": Case(dv=9),
    "sinks": Case(Given(sinks=SINKS)),
    "sinks of rows without keys": Case(Given(sinks=SINKS), causal=True, Nq=7, Nk=4),
    "dropout": Case(Given(**HALF), kept=dropped),
    "dropout of packed": Case(Given(**PACKED, **HALF), kept=dropped),
    "alibi": Case(
        mod("score - slope[h] * abs(i + Nk - Nq - j)", slope=SLOPE), causal=True,
        score=lambda s, b, h, i, j: s - SLOPE[h] * abs(i + 2 - j),
    ),
    "bias": Case(mod("score + bias[b, h, i, j]", bias=BIAS), score=lambda s, b, h, i, j: s + BIAS[b, h, i, j]),
    "softcap": Case(mod("2.0 * tanh(score / 2.0)"), score=lambda s, b, h, i, j: 2 * math.tanh(s / 2)),
    "score_mod as a mask": Case(
        mod("score if (i - j) % 3 != 0 else -inf"), score=lambda s, b, h, i, j: s if (i - j) % 3 else -math.inf
    ),
    "indexes past the table": Case(
        mod("score * exp(weight[j - i])", weight=WEIGHT),
        score=lambda s, b, h, i, j: s * math.exp(WEIGHT[min(max(j - i, 0), 2)]),
    ),
    "numbers of packed sequences": Case(
        replace(mod("score * weight[b] + weight[h] * (Nk - j)", weight=WEIGHT), **PACKED),
        score=lambda s, b, h, i, j: s * WEIGHT[b] + WEIGHT[min(h, 2)] * ((4, 3, 0)[b] - j),
    ),
    "everything": Case(
        replace(mod("tanh(score) + slope[h] * (i - j)", slope=SLOPE), **PACKED, **HALF, sinks=SINKS, window=(3, 2)),
        score=lambda s, b, h, i, j: math.tanh(s) + SLOPE[h] * (i - j), kept=dropped, dv=3,
        hidden=lambda b, p, j: not p - 3 <= j <= p + 2,
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@EVERY
def test_forward_row_by_row(case: Case) -> None:
    """One query of one head at a time, its keys collected by the written rule."""
    q, k, v, dO = case.inputs
    got = attention(q, k, v, dO, scale=0.7, causal=case.causal, given=case.given)
    for b, place, rows, keys in case.sequences():
        Nq, Nk = rows.stop - rows.start, keys.stop - keys.start
        for h in range(4):
            sink = -math.inf if case.given.sinks is None else case.given.sinks[h]
            K, V = k[place, h // 2, keys], v[place, h // 2, keys]
            for i in range(Nq):
                p = i if case.given.top_left else i + Nk - Nq
                seen = [j for j in range(Nk) if not case.hidden(b, p, j) and not (case.causal and j > p)]
                scores = {j: case.score(0.7 * q[place, h, rows][i] @ K[j], b, h, i, j) for j in seen}
                m = max([sink, *scores.values()])
                weights = {j: math.exp(s - m) for j, s in scores.items() if s > -math.inf}
                l = sum(weights.values()) + (math.exp(sink - m) if sink > -math.inf else 0)
                O = sum((case.kept(b, h, i, j) * w / l * V[j] for j, w in weights.items()), np.zeros(case.dv))
                row = (place, h, rows.start + i)
                np.testing.assert_allclose(got.O[row], O, rtol=1e-12, atol=1e-12)
                np.testing.assert_allclose((got.m[row], got.l[row]), (m, l), rtol=1e-12)


def loss(case: Case, x: dict[str, np.ndarray], dO: np.ndarray, dlse: np.ndarray) -> float:
    """Whose gradients are dQ, dK, ...: sum of dO o O and dlse o lse, over rows that see something."""
    given = replace(case.given, tables={name: x[f"table {name}"] for name in case.given.tables})
    given = given if given.sinks is None else replace(given, sinks=x["sinks"])
    result = attention(x["q"], x["k"], x["v"], dO, scale=0.7, causal=case.causal, given=given)
    return float((dO * result.O).sum() + (dlse * np.where(result.l > 0, result.lse, 0)).sum())


@EVERY
def test_gradients_are_those_of_finite_differences(case: Case) -> None:
    """Of each input along two random directions, which a single wrong entry changes."""
    q, k, v, dO = case.inputs
    dlse = normal(*q.shape[:3])
    got = attention(q, k, v, dO, scale=0.7, causal=case.causal, given=case.given, dlse=dlse)
    x = {"q": q, "k": k, "v": v, **{f"table {name}": table for name, table in case.given.tables.items()}}
    if case.given.sinks is not None:
        x["sinks"] = case.given.sinks
    of = {"q": got.dQ, "k": got.dK, "v": got.dV, "sinks": got.dsinks}
    of |= {f"table {name}": gradient for name, gradient in got.dtables.items()}
    assert set(of) - {"sinks"} == set(x) - {"sinks"}
    random, step = np.random.default_rng(7), 1e-5
    for name, values in x.items():
        for _ in range(2):
            along = random.standard_normal(values.shape)
            there, back = (loss(case, {**x, name: values + sign * step * along}, dO, dlse) for sign in (1, -1))
            gradient = of[name]
            assert gradient is not None and gradient.shape == values.shape
            want = (there - back) / (2 * step)
            assert (gradient * along).sum() == pytest.approx(want, rel=1e-6, abs=1e-8), name


def test_only_gradients_that_are_asked_for() -> None:
    given = mod("score + slope[h] * bias[b, h, i, j]", slope=SLOPE, bias=BIAS)
    tables = (Table(name="slope", grad=True), Table(name="bias", rank=4))
    quiet = replace(given, score_mod=ScoreMod(text="score + slope[h] * bias[b, h, i, j]", tables=tables))
    q, k, v, dO = inputs(5, 7)
    got = attention(q, k, v, dO, scale=1.0, causal=False, given=quiet)
    assert list(got.dtables) == ["slope"]


def test_keys_past_their_sequence_move_no_diagonal() -> None:
    """The last two of seven keys are not seen; the others are seen as before."""
    q, k, v, dO = inputs(5, 7)
    got = attention(q, k, v, dO, scale=1.0, causal=True, given=Given(k_lens=np.array([5, 5])))
    short = attention(q, k[:, :, :5], v[:, :, :5], dO, scale=1.0, causal=False,
                      given=Given(window=(None, 2)))  # fmt: skip
    np.testing.assert_array_equal(got.O, short.O)
    assert not got.dK[:, :, 5:].any() and not got.dV[:, :, 5:].any()


def test_packed_sequences_are_attentions_of_their_own() -> None:
    q, k, v, dO = inputs(7, 7, B=1)
    cu_q, cu_k = np.array([0, 2, 2, 7]), np.array([0, 4, 7, 7])
    whole = attention(q, k, v, dO, scale=1.0, causal=True, given=Given(cu_q=cu_q, cu_k=cu_k))
    assert whole.O.shape == q.shape and whole.m.shape == (1, 4, 7)
    first = attention(q[:, :, :2], k[:, :, :4], v[:, :, :4], dO[:, :, :2], scale=1.0, causal=True)
    for name in ("O", "m", "dQ"):
        np.testing.assert_array_equal(getattr(whole, name)[:, :, :2], getattr(first, name))
    np.testing.assert_array_equal(whole.dK[:, :, :4], first.dK)
    assert not whole.dK[:, :, 4:].any() and not whole.O[:, :, 2:].any() and np.isneginf(whole.m[:, :, 2:]).all()


def test_no_sequence_at_all() -> None:
    q, k, v, dO = inputs(0, 0, B=1)
    got = attention(q, k, v, dO, scale=1.0, causal=False, given=Given(cu_q=np.array([0]), cu_k=np.array([0])))
    assert isinstance(got, Result) and got.O.shape == (1, 4, 0, 8)

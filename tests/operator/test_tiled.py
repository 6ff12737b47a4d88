"""The tiled loop in PyTorch: right, whatever the tiles, and its memory grows as N."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flashsmith import reference
from flashsmith.check import FACTOR, FLOOR
from flashsmith.given import Given
from flashsmith.inputs import given_of, make_inputs
from flashsmith.operator.added import Added
from flashsmith.operator.scores import Call, ScoreTile
from flashsmith.operator.tiled import tiled_backward, tiled_forward
from flashsmith.philox import keep_mask
from flashsmith.plain import plain_attention
from flashsmith.spec.dtype import EPSILON, round_to, widen
from flashsmith.spec.problem import Dtype, Problem
from torch.utils._python_dispatch import TorchDispatchMode

from ..features import FEATURES

NAMES = ("O", "m", "l", "dQ", "dK", "dV")
SHAPES = pytest.mark.parametrize(
    ("Nq", "Nk", "Hq", "Hk", "causal"),
    [(1, 1, 1, 1, True), (37, 53, 6, 2, True), (53, 37, 9, 3, True), (50, 50, 4, 4, True), (41, 65, 8, 1, False)],
    ids=["one", "more keys", "more queries", "square", "full"],
)


def normal(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape) + 0.5 for shape in shapes]


def tiled(q: Any, k: Any, v: Any, dO: Any, *, causal: bool, scale: float = 0.3, **options: Any) -> dict[str, Any]:
    """All outputs by name, in float64."""
    q, k, v, dO = (torch.as_tensor(x) for x in (q, k, v, dO))
    tiles = {"Br": 16, "Bc": 24} | {name: options.pop(name) for name in ("Br", "Bc") if name in options}
    O, m, l = tiled_forward(q, k, v, scale, causal, **tiles)
    got = tiled_backward(dO, options.pop("dlse", None), q, k, v, O, m, l, scale, causal, **tiles, **options)
    made = zip(NAMES, (O, m, l, got.dQ, got.dK, got.dV), strict=True)
    return {name: None if x is None else x.double().numpy() for name, x in made}


@SHAPES
def test_every_output_is_that_of_the_reference(Nq: int, Nk: int, Hq: int, Hk: int, causal: bool) -> None:
    """Lengths that no tile divides, and query heads that share keys; in float64, so that a swapped index shows."""
    q, k, v, dO = normal((2, Hq, Nq, 16), (2, Hk, Nk, 16), (2, Hk, Nk, 16), (2, Hq, Nq, 16))
    want = reference.attention(q, k, v, dO, scale=0.3, causal=causal)
    for name, got in tiled(q, k, v, dO, causal=causal).items():
        np.testing.assert_allclose(got, getattr(want, name), rtol=1e-12, atol=1e-12, err_msg=name)


def with_features(problem: Problem) -> tuple[list[np.ndarray], Given, Added]:
    """q, k, v, dO and dlse in float64, and what is added to them, for the reference and for the loop."""
    x = make_inputs(problem)
    given = given_of(problem, x)
    arrays = [widen(bits, problem.dtype) for bits in (x.q, x.k, x.v, x.dO)]
    optional = {name: getattr(x, name) for name in ("k_lens", "cu_q", "cu_k", "rng")}
    added = Added(
        window=problem.window, top_left=given.top_left, score_mod=problem.score_mod, keep_below=given.keep_below,
        tables={name: torch.from_numpy(table) for name, table in given.tables.items()},
        sinks=None if given.sinks is None else torch.from_numpy(given.sinks),
        **{name: None if array is None else torch.from_numpy(array) for name, array in optional.items()},
    )  # fmt: skip
    return [*arrays, *normal(arrays[0].shape[:3])], given, added


@pytest.mark.parametrize(("Br", "Bc"), [(9, 14), (128, 128)])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_that_of_the_reference(feature: str, Br: int, Bc: int) -> None:
    """All outputs and gradients, also of sinks and tables, whatever the tiles; of three sequences one is empty."""
    problem = replace(Problem(dtype="fp32", d=16, B=3, Hq=4, Hk=2, Nq=37, Nk=45), **FEATURES[feature])
    (q, k, v, dO, dlse), given, added = with_features(problem)
    want = reference.attention(q, k, v, dO, scale=0.3, causal=problem.causal, given=given, dlse=dlse)
    Q, K, V, dO_, dlse_ = map(torch.from_numpy, (q, k, v, dO, dlse))
    O, m, l = tiled_forward(Q, K, V, 0.3, problem.causal, added, Br=Br, Bc=Bc)
    got = tiled_backward(dO_, dlse_, Q, K, V, O, m, l, 0.3, problem.causal, added, Br=Br, Bc=Bc)
    outputs = {"O": O, "m": m, "l": l, "dQ": got.dQ, "dK": got.dK, "dV": got.dV, "dsinks": got.dsinks}
    for name, tensor in outputs.items():
        if getattr(want, name) is None:
            assert tensor is None
        else:
            np.testing.assert_allclose(tensor, getattr(want, name), rtol=1e-10, atol=1e-10, err_msg=name)
    assert got.dtables.keys() == want.dtables.keys()
    for name, values in want.dtables.items():
        np.testing.assert_allclose(got.dtables[name], values, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("needs", [(False, False, False), (True, False, False), (False, False, True)])
def test_tables_have_gradients_whatever_else_is_needed(needs: tuple[bool, bool, bool]) -> None:
    problem = replace(Problem(dtype="fp32", d=16, B=2, Hq=2, Nq=20), **FEATURES["alibi"])
    (q, k, v, dO, _), _, added = with_features(problem)
    Q, K, V, dO_ = map(torch.from_numpy, (q, k, v, dO))
    saved = tiled_forward(Q, K, V, 0.3, True, added)
    made = [tiled_backward(dO_, None, Q, K, V, *saved, 0.3, True, added, needs=n) for n in (needs, (True,) * 3)]
    assert [x is None for x in (made[0].dQ, made[0].dK, made[0].dV)] == [not need for need in needs]
    torch.testing.assert_close(made[0].dtables, made[1].dtables)


def test_random_bits_are_those_of_the_definition() -> None:
    """Tiles that begin and end anywhere, of heads that share keys; a seed and an offset of more than 32 bits."""
    seed, offset = -(2**50) + 77, 2**40 + 5
    want = torch.from_numpy(keep_mask(seed, offset, 2, 6, 50, 90, 40000))
    added = Added(rng=torch.tensor([seed, offset]), keep_below=40000)
    call = Call.of(torch.zeros(2, 6, 50, 8), torch.zeros(2, 3, 90, 8), 1.0, False, added)
    for i, rows, j, keys in ((0, 50, 0, 90), (3, 9, 31, 2), (15, 2, 64, 26), (49, 1, 0, 1), (16, 16, 32, 32)):
        got = call.scores(i, rows, j, keys, torch.device("cpu")).kept
        of_heads = want[:, :, i : i + rows, j : j + keys]
        assert torch.equal(got.reshape(of_heads.shape), of_heads), (i, j)


@pytest.mark.parametrize(
    ("causal", "added", "most"),
    [(True, Added(window=(64, None)), 3 * 16), (False, Added(k_lens=torch.tensor([50])), 16)],
    ids=["window", "padded"],
)
def test_tiles_that_nobody_sees_are_not_made(
    causal: bool, added: Added, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 x 16: at most three for each tile of rows or of keys under a window of 64, and one under 50 keys."""
    made: list[tuple[range, range]] = []
    modified = ScoreTile.modified

    def count(self: ScoreTile, taken: torch.Tensor) -> torch.Tensor:
        made.append((self.rows, self.keys))
        return modified(self, taken)

    monkeypatch.setattr(ScoreTile, "modified", count)
    q, k, v, dO = (torch.from_numpy(x) for x in normal(*[(1, 1, 1024, 8)] * 4))
    saved = tiled_forward(q, k, v, 0.3, causal, added, Br=64, Bc=64)
    assert 16 <= len(made) <= most
    made.clear()
    tiled_backward(dO, None, q, k, v, *saved, 0.3, causal, added, Br=64, Bc=64)
    assert 16 <= len(made) <= most


@pytest.mark.parametrize(("Br", "Bc"), [(1, 1), (7, 50), (64, 3), (128, 128)])
def test_tiles_do_not_matter(Br: int, Bc: int) -> None:
    inputs = normal((1, 2, 50, 8), (1, 1, 60, 8), (1, 1, 60, 8), (1, 2, 50, 8))
    want = tiled(*inputs, causal=True)
    for name, got in tiled(*inputs, causal=True, Br=Br, Bc=Bc).items():
        np.testing.assert_allclose(got, want[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_inputs_stay_within_the_bound_of_the_kernels(dtype: Dtype) -> None:
    bits = [round_to(x, dtype) for x in normal((1, 4, 150, 64), (1, 2, 200, 64), (1, 2, 200, 64), (1, 4, 150, 64))]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    got = tiled(*(torch.from_numpy(widen(x, dtype)).to(kind) for x in bits), causal=True, scale=0.125, Br=64, Bc=48)
    exact = reference.attention(*(widen(x, dtype) for x in bits), scale=0.125, causal=True)
    plain = plain_attention(*bits, dtype=dtype, scale=0.125, causal=True)
    for name in ("O", "dQ", "dK", "dV"):
        want = getattr(exact, name)
        allowed = FACTOR * np.abs(getattr(plain, name) - want).max() + FLOOR + EPSILON[dtype] * np.abs(want).max()
        assert np.abs(got[name] - want).max() <= allowed, name


def test_the_gradient_of_lse() -> None:
    """dS = P o (dP - delta + dlse), beside the derivative that PyTorch finds of logsumexp."""
    q, k, v, dO = (torch.from_numpy(x) for x in normal(*[(1, 2, 30, 8)] * 4))
    dlse = torch.from_numpy(normal((1, 2, 30))[0])
    got = tiled(q, k, v, dO, causal=False, dlse=dlse)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    S = 0.3 * q @ k.mT
    want = torch.autograd.grad((S.softmax(-1) @ v, S.logsumexp(-1)), (q, k, v), (dO, dlse))
    for name, x in zip(("dQ", "dK", "dV"), want, strict=True):
        np.testing.assert_allclose(got[name], x.numpy(), rtol=1e-12, atol=1e-12, err_msg=name)


def test_gradients_nobody_needs_are_not_made() -> None:
    inputs = normal(*[(1, 1, 20, 8)] * 4)
    want = tiled(*inputs, causal=True)
    for needs in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        got = tiled(*inputs, causal=True, needs=needs)
        for name, need in zip(("dQ", "dK", "dV"), needs, strict=True):
            assert (got[name] is None) != need
            if need:
                np.testing.assert_array_equal(got[name], want[name])


def test_rows_that_see_no_key() -> None:
    """Five queries, two keys."""
    v = torch.zeros(1, 1, 2, 8)
    v[..., :4] = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    got = tiled(torch.zeros(1, 1, 5, 8), torch.ones(1, 1, 2, 8), v, torch.ones(1, 1, 5, 8), causal=True)
    np.testing.assert_array_equal(got["O"][0, 0, :, :4], [[0] * 4] * 3 + [[1, 2, 3, 4], [3, 4, 5, 6]])
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(got["m"][0, 0] + np.log(got["l"][0, 0]), [-np.inf] * 3 + [0, np.log(2)], rtol=1e-6)
    np.testing.assert_array_equal(got["dV"][0, 0, :, 0], [1.5, 0.5])
    assert not got["dQ"].any() and not got["dK"].any()


@pytest.mark.parametrize("fill", [(30.0, -720.0), (133120.0, 133120.0)], ids=["very negative", "huge"])
def test_scores_of_any_size(fill: tuple[float, float]) -> None:
    """All keys alike, so O is the mean of V."""
    q, k = torch.full((1, 1, 4, 64), fill[0]), torch.full((1, 1, 300, 64), fill[1])
    v = torch.from_numpy(normal((1, 1, 300, 64))[0]).float()
    got = tiled(q, k, v, torch.ones(1, 1, 4, 64), causal=False)
    np.testing.assert_allclose(got["O"], np.broadcast_to(v.mean(2, keepdim=True), got["O"].shape), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["dV"], 4 / 300, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in got.values())


def test_nan_reaches_the_rows_that_see_it_and_no_other() -> None:
    """Rows before the key with the NaN are bit-identical to a clean run."""
    q, k, v, dO = normal(*[(1, 1, 40, 8)] * 4)
    clean = tiled(q, k, v, dO, causal=True)["O"]
    k[0, 0, 20, 1] = np.nan
    got = tiled(q, k, v, dO, causal=True)["O"]
    assert np.isnan(got[0, 0, 20:]).all()
    np.testing.assert_array_equal(got[0, 0, :20], clean[0, 0, :20])


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that one operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("feature", ["causal", "everything", "everything padded"])
@pytest.mark.parametrize("N", [512, 1024])
def test_nothing_grows_as_n_times_n(N: int, feature: str) -> None:
    """No tensor is larger than the inputs, or than a tile of scores."""
    problem = replace(Problem(dtype="fp32", d=32, Hq=1, Nq=N), **{**FEATURES[feature], "Nk": N, "dv": 32})
    (q, k, v, dO, dlse), _, added = with_features(problem)
    Q, K, V, dO_, dlse_ = (torch.from_numpy(x).float() for x in (q, k, v, dO, dlse))
    with LargestTensor() as largest:
        saved = tiled_forward(Q, K, V, 0.3, problem.causal, added, Br=128, Bc=128)
        tiled_backward(dO_, dlse_, Q, K, V, *saved, 0.3, problem.causal, added, Br=128, Bc=128)
    assert largest.elements <= max(N * 32, 128 * 128)

"""Features of attention() and attention_varlen(): beside plain PyTorch, on the tiled loop and on the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flashsmith as fs
import numpy as np
import pytest
import torch
from flashsmith.operator import features, kernels, library
from flashsmith.philox import keep_mask
from flashsmith.run import keep_below
from torch import Tensor

from .test_warm import Recording, addressed, gpu

__all__ = ["gpu"]  # a fixture

BF16, F64 = torch.bfloat16, torch.float64
INF = float("inf")
NOISE = 0.03  # of the largest value: a few roundings of bf16, in P and dS as well
B, HQ, HK, NQ, NK, D, DV = 2, 4, 2, 21, 28, 16, 24


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype).requires_grad_()


def qkv(dv: int = D, dtype: torch.dtype = F64, rows: int = NQ, keys: int = NK) -> list[Tensor]:
    shapes = ((B, HQ, rows, D), (B, HK, keys, D), (B, HK, keys, dv))
    return [normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


RNG = torch.tensor([-(2**40) + 5, 2**35 + 1])


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Any = None, anchor: str = "bottom-right",
    key_lengths: Tensor | None = None, softcap: float | None = None, alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, rng: Tensor | None = None,
    score: Callable[..., Tensor] | None = None, first: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O and lse in float64, with whole matrices; `score` is a score_mod, `first` the number of the first sequence."""
    group, Nq, Nk = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, 1) for x in (k, v))
    b, h = torch.arange(first, first + q.shape[0])[:, None, None, None], torch.arange(q.shape[1])[:, None, None]
    i, j = torch.arange(Nq)[:, None], torch.arange(Nk)
    S = q @ k.mT / math.sqrt(q.shape[3])
    if softcap is not None:
        S = softcap * torch.tanh(S / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.double().reshape(-1, q.shape[1], 1, 1)
        S = S - (slopes if len(slopes) == 1 else slopes[b[:, 0, 0, 0]]) * (i + Nk - Nq - j).abs()
    if bias is not None:
        bias = bias.double()
        S = S + (bias if bias.dim() < 4 or len(bias) == 1 else bias[b[:, 0, 0, 0]])[..., :Nq, :Nk]
    if score is not None:
        S = score(S, b, h, i, j)
    p = i + Nk - Nq if anchor == "bottom-right" else i
    left, right = (None if side == -1 else side for side in window or (None, None))
    right = 0 if causal else right
    hidden = torch.zeros(Nq, Nk, dtype=torch.bool)
    hidden |= j < p - (Nq + Nk if left is None else left)
    hidden |= j > p + (Nq + Nk if right is None else right)
    if key_lengths is not None:
        hidden = hidden | (j >= key_lengths[:, None, None, None])
    S = S.masked_fill(hidden, -INF)
    whole = S if sinks is None else torch.cat((S, sinks.double()[:, None, None].expand(*S.shape[:3], 1)), -1)
    lse = whole.logsumexp(-1) if whole.shape[-1] else torch.full(S.shape[:3], -INF, dtype=F64)
    P = torch.exp(S - torch.where(lse == -INF, 0, lse)[..., None])
    if rng is not None:
        heads = (first + q.shape[0], q.shape[1])
        below = keep_below(dropout_p)
        kept = keep_mask(int(rng[0]), int(rng[1]), *heads, Nq, Nk, below)[first:]
        P = torch.where(torch.from_numpy(kept), P / (below / 2**16), 0)
    return P @ v, lse


W = normal(9, seed=7)

# The options of a call, and what the formula of a score_mod is in Python.
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"window": (5, 3)},
    "left window": {"window": (4, -1), "causal": True},
    "right window": {"window": (None, 2)},
    "top left": {"causal": True, "anchor": "top-left"},
    "window at the top left": {"window": (3, 1), "anchor": "top-left"},
    "key_lengths": {"key_lengths": ints(28, 11), "causal": True},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": normal(HQ, seed=3), "causal": True},
    "alibi of each sequence": {"alibi_slopes": normal(B, HQ, seed=3)},
    "bias": {"bias": normal(B, HQ, NQ, NK, seed=4)},
    "bias of two dimensions": {"bias": normal(NQ, NK, seed=4)},
    "bias of three dimensions": {"bias": normal(HQ, 1, NK, seed=4)},
    "bias of keys": {"bias": normal(B, 1, 1, NK, seed=4), "causal": True},
    "sinks": {"sinks": normal(HQ, seed=5), "window": (2, 0)},
    "dropout": {"dropout_p": 0.3, "rng": RNG},
    "score_mod": {
        "score_mod": "score * w[h] + w[i % 5 + 4]", "tables": {"w": W},
        "score": lambda s, b, h, i, j: s * W[h] + W[i % 5 + 4],
    },
    "mask_mod": {
        "score_mod": "score if (i - j) % 3 != 1 and i != 2 else -inf",
        "score": lambda s, b, h, i, j: torch.where(((i - j) % 3 != 1) & (i != 2), s, -INF),
    },
    "in order": {
        "softcap": 0.9, "alibi_slopes": normal(HQ, seed=3), "bias": normal(NQ, NK, seed=4),
        "score_mod": "score * w[h]", "tables": {"w": W}, "score": lambda s, b, h, i, j: s * W[h],
    },
    "everything": {
        "window": (9, 2), "key_lengths": ints(28, 20), "softcap": 2.0, "alibi_slopes": normal(HQ, seed=3),
        "bias": normal(1, HQ, NQ, 1, seed=4), "sinks": normal(HQ, seed=5), "dropout_p": 0.2, "rng": RNG,
    },
}  # fmt: skip


def asking(options: dict[str, Any]) -> list[Tensor]:
    """The tensors of the features that have gradients."""
    tensors = [*options.values(), *options.get("tables", {}).values()]
    return [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]


def told(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What attention is told, and what plain is."""
    ours = {name: value for name, value in options.items() if name != "score"}
    return ours, {name: value for name, value in options.items() if name not in ("score_mod", "tables")}


def outputs(made: tuple[Tensor, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """O, lse, and the gradients of all inputs, by both."""
    O, lse = made
    dO = normal(*O.shape, seed=8).detach().to(O.dtype)
    dlse = normal(*lse.shape, seed=9).detach().to(lse.dtype)
    seen = torch.where(lse == -INF, 0, lse)
    return [O, lse, *torch.autograd.grad((O, seen), inputs, (dO, dlse))]


def near(got: list[Tensor], want: list[Tensor], noise: float) -> None:
    """Within `noise` of the largest value of each tensor; -inf where it is."""
    for n, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape, n
        finite = y.double().nan_to_num(neginf=-1e9)
        largest = finite[y.isfinite()].abs().max() if y.isfinite().any() else torch.tensor(1.0)
        assert (x.double().nan_to_num(nan=1e9, neginf=-1e9) - finite).abs().max() <= noise * (largest + 1e-3), n


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_plain_attention(case: str) -> None:
    """In float64, by the tiled loop; v is wider than q and k."""
    inputs, (ours, theirs) = [*qkv(DV), *asking(CASES[case])], told(CASES[case])
    made = fs.attention(*inputs[:3], return_lse=True, **ours)
    near(outputs(made, inputs), outputs(plain(*inputs[:3], **theirs), inputs), 1e-9)


ON_KERNELS = {
    "none": "bhnd",
    "window at the top left": "bhnd", "key_lengths": "bnhd", "sinks": "bhnd", "score_mod": "bhnd", "in order": "bhnd",
    "everything": "bnhd",
}  # fmt: skip


def narrow(x: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A tensor of numbers as a leaf of another dtype; anything else as it is."""
    return x.detach().to(dtype).requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


@pytest.mark.parametrize("case", ON_KERNELS)
def test_the_kernels_do_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, on the emulator; tables in float32, but bias in bf16. v is wider than q and k."""
    monkeypatch.setenv("FLASHSMITH_ENGINE", "emulator")
    q, k, v = qkv(DV, BF16)
    ours, theirs = told(CASES[case])
    ours = {name: narrow(x, BF16 if name == "bias" else torch.float32) for name, x in ours.items()}
    if "tables" in ours:
        ours["tables"] = {name: narrow(x) for name, x in ours["tables"].items()}
    layout = ON_KERNELS[case]
    turned = [x.transpose(1, 2).contiguous() if layout == "bnhd" else x for x in (q, k, v)]
    O, lse = fs.attention(*turned, layout=layout, return_lse=True, **ours)  # type: ignore[call-overload]
    assert O.is_contiguous() and O.dtype == BF16
    O = O.transpose(1, 2) if layout == "bnhd" else O
    got = outputs((O, lse), [q, k, v, *asking(ours)])
    near(got, outputs(plain(q, k, v, **theirs), [q, k, v, *asking(CASES[case])]), NOISE)
    assert [x.dtype for x in got[2:]] == [x.dtype for x in (q, k, v, *asking(ours))]


# Packed sequences


ROWS, KEYS = (0, 7, 21, 5), (4, 0, 28, 9)


def packed(dtype: torch.dtype = F64) -> tuple[list[Tensor], tuple[Tensor, Tensor, int, int]]:
    """q [33, 4, 16], k [41, 2, 16], v [41, 2, 24]; cu_seqlens and max_seqlens."""
    shapes = ((sum(ROWS), HQ, D), (sum(KEYS), HK, D), (sum(KEYS), HK, DV))
    tensors = [normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]
    cu_q, cu_k = (ints(*np.cumsum((0, *lengths))) for lengths in (ROWS, KEYS))
    return tensors, (cu_q, cu_k, max(ROWS), max(KEYS))


def one_by_one(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """plain, sequence by sequence: O as attention_varlen has it, and lse [Hq, all queries]."""
    parts = zip(q.split(ROWS), k.split(KEYS), v.split(KEYS), strict=True)
    made = [plain(*(x.transpose(0, 1)[None] for x in part), first=b, **options) for b, part in enumerate(parts)]
    return torch.cat([O[0].transpose(0, 1) for O, _ in made]), torch.cat([lse[0] for _, lse in made], 1)


PACKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "everything": {
        "window": (6, 4), "softcap": 2.0, "alibi_slopes": normal(4, HQ, seed=3), "bias": normal(4, 1, NQ, NK, seed=4),
        "sinks": normal(HQ, seed=5), "dropout_p": 0.2, "rng": RNG,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences_are_attentions_of_their_own(case: str) -> None:
    """One has no query and one no key; a sequence's number counts, and rows and keys begin anew."""
    (q, k, v), lengths = packed()
    made = fs.attention_varlen(q, k, v, *lengths, return_lse=True, **PACKED[case])
    assert made[0].is_contiguous()
    inputs = [q, k, v, *asking(PACKED[case])]
    near(outputs(made, inputs), outputs(one_by_one(q, k, v, **PACKED[case]), inputs), 1e-9)


def test_packed_sequences_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_ENGINE", "emulator")
    (q, k, v), lengths = packed(BF16)
    ours = {name: narrow(x) for name, x in PACKED["everything"].items()}
    got = outputs(fs.attention_varlen(q, k, v, *lengths, return_lse=True, **ours), [q, k, v, *asking(ours)])
    theirs = [q, k, v, *asking(PACKED["everything"])]
    near(got, outputs(one_by_one(q, k, v, **PACKED["everything"]), theirs), NOISE)


def test_no_sequences_at_all() -> None:
    q, cu = torch.zeros(0, 4, 16, requires_grad=True), ints(0)
    O = fs.attention_varlen(q, q, q, cu, cu, 0, 0)
    (dQ,) = torch.autograd.grad(O.sum(), q)
    assert O.shape == dQ.shape == (0, 4, 16)


# Dropout


def test_dropout_follows_pytorchs_generator() -> None:
    """The same seed, the same weights; the next call, others; and in the mean nothing is lost."""
    q, k, v = qkv(keys=200)
    v = torch.ones_like(v)
    torch.manual_seed(5)
    first, second = (fs.attention(q, k, v, dropout_p=0.25) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(fs.attention(q, k, v, dropout_p=0.25), first) and not torch.equal(first, second)
    assert abs(first.mean() - 1) < 0.02


@pytest.mark.parametrize("engine", ["torch", "emulator"])
def test_the_backward_drops_what_the_forward_has_dropped(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O is linear in v, so dV is a column sum of the weights that O was made of."""
    monkeypatch.setenv("FLASHSMITH_ENGINE", engine)
    q, k, _ = qkv(dtype=BF16, keys=16)
    v = torch.eye(16).expand(B, HK, 16, 16).to(BF16).requires_grad_()
    O = fs.attention(q, k, v, dropout_p=0.5)
    (dV,) = torch.autograd.grad(O, v, torch.ones_like(O))
    weights = O.float().sum(2).reshape(B, HK, 2, 16).sum(2)
    assert (O == 0).float().mean() > 0.3
    torch.testing.assert_close(dV.float()[..., 0], weights, rtol=0.02, atol=0.02)


# Rows that see nothing, lengths of nothing (BUG-01, BUG-12), layouts (BUG-10, BUG-11)


@pytest.mark.parametrize("engine", ["torch", "emulator"])
def test_rows_that_see_no_key(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five queries at keys 0 to 4, two keys, none in the second sequence; a bias hides both from row 1."""
    monkeypatch.setenv("FLASHSMITH_ENGINE", engine)
    q = torch.zeros(2, 1, 5, 8, dtype=BF16, requires_grad=True)
    k = torch.ones(2, 1, 2, 8, dtype=BF16, requires_grad=True)
    v = torch.tensor([[1.0] * 8, [5.0] * 8]).expand(2, 1, 2, 8).to(BF16).requires_grad_()
    bias = torch.zeros(5, 2)
    bias[1] = -INF
    bias.requires_grad_()
    O, lse = fs.attention(q, k, v, window=(1, 0), anchor="top-left", key_lengths=ints(2, 0), bias=bias, return_lse=True)
    assert O[0, 0, :, 0].tolist() == [1, 0, 5, 0, 0] and not O[1].any()
    assert lse[0, 0].tolist() == [0, -INF, 0, -INF, -INF] and lse[1].isneginf().all()
    dQ, dK, dV, dbias = torch.autograd.grad(O, (q, k, v, bias), torch.ones_like(O))
    assert not dQ.any() and not dK.any() and not dbias.any()
    assert dV[0, 0, :, 0].tolist() == [1, 1] and not dV[1].any()


@pytest.mark.parametrize("engine", ["torch", "emulator"])
@pytest.mark.parametrize(("rows", "keys"), [(5, 0), (0, 5)])
def test_empty_dimensions(rows: int, keys: int, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without keys has its sink alone."""
    monkeypatch.setenv("FLASHSMITH_ENGINE", engine)
    sinks, bias = torch.tensor([1.0, 2, 3, 4], requires_grad=True), torch.zeros(rows, keys, requires_grad=True)
    inputs = [*qkv(dtype=BF16, rows=rows, keys=keys), sinks, bias]
    O, lse = fs.attention(*inputs[:3], window=(3, 0), sinks=sinks, bias=bias, return_lse=True)
    assert O.shape == (B, HQ, rows, D) and not O.any()
    torch.testing.assert_close(lse, sinks.detach()[:, None].expand(B, HQ, rows))
    for x, gradient in zip(inputs, torch.autograd.grad(O, inputs, torch.ones_like(O)), strict=True):
        assert gradient.shape == x.shape and not gradient.any()


@pytest.mark.parametrize("engine", ["torch", "emulator"])
def test_layouts_of_tables_and_of_do_do_not_matter(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed bias, one that is expanded, every second slope, a dO that is one number."""
    monkeypatch.setenv("FLASHSMITH_ENGINE", engine)
    q, k, v = qkv(dtype=BF16)
    bias, slopes = normal(NQ, NK, dtype=torch.float32), normal(HQ, dtype=torch.float32)
    turned = bias.detach().mT.contiguous().mT.requires_grad_()
    every_second = torch.stack((slopes.detach(), slopes.detach()), 1).flatten()[::2].requires_grad_()
    found = []
    for table, slope in ((bias, slopes), (turned, every_second), (bias.expand(B, HQ, NQ, NK), slopes)):
        O = fs.attention(q, k, v, bias=table, alibi_slopes=slope)
        leaf = bias if table is not turned else turned
        found.append([O, *torch.autograd.grad(O.sum(), [q, k, v, leaf, slope])])
    for other in found[1:]:
        near(other, found[0], 1e-3)
    assert found[1][4].is_contiguous()


# Autograd, autocast, torch.compile (BUG-18 to BUG-20)


@pytest.mark.parametrize("engine", ["torch", "emulator"])
def test_gradients_of_tables_and_sinks_alone(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the kernels that they take: those that own keys for a table, delta for sinks."""
    monkeypatch.setenv("FLASHSMITH_ENGINE", engine)
    ran: list[tuple[str, ...]] = []
    run_backward = kernels.run_backward

    def record(engine: Any, binaries: Any, *inputs: Any, **options: Any) -> Any:
        ran.append(tuple(binaries))
        return run_backward(engine, binaries, *inputs, **options)

    monkeypatch.setattr(kernels, "run_backward", record)
    q, k, v = qkv(dtype=BF16)
    slopes, sinks = normal(HQ, dtype=torch.float32), normal(HQ, seed=1, dtype=torch.float32)
    want = torch.autograd.grad(fs.attention(q, k, v, alibi_slopes=slopes, sinks=sinks).sum(), (slopes, sinks, q))
    q, k, v = (x.detach() for x in (q, k, v))
    (dslopes,) = torch.autograd.grad(fs.attention(q, k, v, alibi_slopes=slopes, sinks=sinks).sum(), slopes)
    (dsinks,) = torch.autograd.grad(fs.attention(q, k, v, alibi_slopes=slopes.detach(), sinks=sinks).sum(), sinks)
    near([dslopes, dsinks], list(want[:2]), 1e-4)
    assert ran[1:] == ([("delta", "dkdv"), ("delta",)] if engine == "emulator" else [])


def test_nothing_is_saved_without_grad_and_a_second_derivative_is_refused() -> None:
    q, k, v = qkv()
    bias = normal(NQ, NK)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        with torch.no_grad():
            assert fs.attention(q, k, v, bias=bias).grad_fn is None
        assert not saved
        O = fs.attention(q, k, v, bias=bias)
    assert len(saved) == 7  # O, m, l, q, k, v and bias
    (dbias,) = torch.autograd.grad(O.sum(), bias, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dbias.sum(), k)


def test_autocast_casts_q_k_and_v_alone() -> None:
    """Gradients come back in the dtype of each input."""
    q, k, v = qkv(dtype=torch.float32)
    bias, sinks = normal(NQ, NK, dtype=torch.float32), normal(HQ, dtype=BF16)
    with torch.autocast("cpu", dtype=BF16):
        O, lse = fs.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
    want = fs.attention(*(x.detach().to(BF16) for x in (q, k, v)), bias=bias, sinks=sinks)
    assert O.dtype == BF16 and lse.dtype == torch.float32 and torch.equal(O, want)
    inputs = [q, k, v, bias, sinks]
    assert [x.dtype for x in torch.autograd.grad(O.sum(), inputs)] == [x.dtype for x in inputs]


@pytest.mark.parametrize("bnhd", [False, True], ids=["bhnd", "bnhd"])
def test_the_ops_pass_opcheck(bnhd: bool) -> None:
    """Schema, autograd registration, and fake shapes, dtypes and strides beside real ones."""
    q, k, v = qkv(DV, torch.float32)
    bias, sinks = normal(NK, NQ, dtype=BF16).detach().mT.requires_grad_(), normal(HQ, dtype=torch.float32)
    text = features.spelled(False, None, None, (("additive_bias", 2),), ("sinks", "rng", "table_additive_bias"))
    forward, extras = library.featured_forward, [sinks, RNG, bias]
    options = ([3, -1], [0, 0], 0.25, None, True, bnhd, False)
    torch.library.opcheck(forward, (q, k, v, extras, text, *options))
    q, k, v, *extras = (x.detach() for x in (q, k, v, *extras))
    O, m, l = forward(q, k, v, extras, text, *options)
    for needs in ([True] * 4 + [False, True], [False, True] + [False] * 4):
        inputs = (torch.ones_like(O), torch.ones_like(l), q, k, v, O, m, l, extras, text, *options, needs)
        torch.library.opcheck(library.featured_backward, inputs)


def test_compiled_without_a_break_and_once_for_all_lengths_and_windows() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, w: Tensor, left: int) -> tuple[Tensor, Tensor]:
        return fs.attention(
            2 * q, k, v, window=(left, 0), bias=bias, dropout_p=0.2, softcap=3.0, score_mod="score * w[h]",
            tables={"w": w}, return_lse=True,
        )  # fmt: skip

    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    for rows, left in ((21, 5), (33, 7)):
        inputs = [*qkv(rows=rows, keys=rows + 3), normal(rows, rows + 3), normal(HQ)]
        made = []
        for call in (run, compiled):
            torch.manual_seed(1)
            made.append(outputs(call(*inputs, left), inputs))
        near(made[1], made[0], 1e-12)
    assert len(graphs) == 1


def test_numbers_may_change_from_call_to_call_of_compiled_code() -> None:
    torch._dynamo.reset()
    (q, _, _) = qkv()

    def run(scale: float, dropped: float, cap: float) -> Tensor:
        return fs.attention(q, q, q, scale=scale, dropout_p=dropped, softcap=cap, rng=RNG)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for numbers in ((0.3, 0.2, 3.0), (0.4, 0.2, 3.0), (0.4, 0.3, 4.0)):
        assert torch.equal(compiled(*numbers), run(*numbers))


def test_packed_sequences_compile_once() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    def run(x: Tensor, cu: Tensor, longest: int) -> Tensor:
        return fs.attention_varlen(x, x, x, cu, cu, longest, longest, causal=True)

    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    for lengths in ((3, 8, 4), (6, 2, 9)):
        x, cu = normal(sum(lengths), HQ, D), ints(*np.cumsum((0, *lengths)))
        assert torch.equal(compiled(x, cu, max(lengths)), run(x, cu, max(lengths)))
    assert len(graphs) == 1


# A warm call (BUG-16: on PyTorch's stream, which the recording driver is asked for at each launch)


def test_a_warm_call_has_the_addresses_of_its_own_tensors(gpu: Recording) -> None:
    """Of tables and sinks as well, wherever they lie; and gradients of tables that begin with 0."""
    seen = []
    for seed in range(3):
        q, k, v = (normal(*x.shape, seed=seed, dtype=BF16) for x in qkv())
        slopes, sinks = (normal(HQ + 1, seed=seed + n, dtype=torch.float32) for n in (3, 6))
        slopes, sinks = slopes.detach()[1:].requires_grad_(), sinks.detach()[1:].requires_grad_()
        gpu.calls.clear()
        O = fs.attention(q, k, v, causal=True, alibi_slopes=slopes, sinks=sinks, dropout_p=0.1, rng=RNG)
        names = {"q": q, "k": k, "v": v, "O": O, "slopes": slopes, "rng": RNG, "sinks": sinks}
        torch.autograd.grad(O.float().sum(), (q, k, v, slopes, sinks))
        seen.append([addressed(call, names) for call in gpu.calls])
        assert len(kernels._replays) == 2
    assert seen[0] == seen[1] == seen[2]
    assert [call[0] for call in seen[0]] == ["forward", "delta", "fused", "convert"]


def test_packed_batches_whose_longest_differ_a_little_are_one_launch(gpu: Recording) -> None:
    """Their number of rows and of sequences being the same."""
    x = torch.zeros(600, 2, 64, dtype=BF16)
    for longest, ways in ((310, 1), (350, 1), (384, 1), (385, 2)):
        cu = ints(0, longest, 600)
        fs.attention_varlen(x, x, x, cu, cu, longest, longest)
        assert len(kernels._replays) == ways
    grids = [call[1] for call in gpu.calls]
    assert grids[0] == grids[1] == grids[2] < grids[3]


# What is refused

Q, K, V = (x.detach() for x in qkv(dtype=torch.float32))
MASK = torch.ones(NQ, NK, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"window": 5}, ValueError, r"window=5: it is \(left, right\)"),
        ({"window": (5, -2)}, ValueError, r"window=\(5, -2\): a side is 0 keys or more"),
        ({"window": (0.5, 1)}, TypeError, "float"),
        ({"anchor": "centre"}, ValueError, "anchor 'centre' is not known; use one of bottom-right, top-left"),
        ({"key_lengths": torch.tensor([1, 2])}, TypeError, "key_lengths is torch.int64; torch.int32 .* Call .int"),
        ({"key_lengths": ints(1, 2, 3)}, ValueError, r"key_lengths has shape \(3,\); \[B\] = \(2,\) is needed"),
        ({"key_lengths": ints(1, 40)}, ValueError, r"key_lengths is \[1, 40\]: each is 0 or more and at most Nk=28"),
        ({"softcap": 0.0}, ValueError, "a cap is positive"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes has shape \(3,\); \[Hq\] = \(4,\) or \[B, Hq\]"),
        ({"alibi_slopes": torch.ones(4).double()}, TypeError, "alibi_slopes is torch.float64 and q torch.float32"),
        ({"bias": torch.ones(3, NK)}, ValueError, r"bias has shape \(3, 28\), which does not broadcast"),
        ({"bias": torch.ones(1, B, HQ, NQ, NK)}, ValueError, "does not broadcast"),
        ({"bias": MASK}, TypeError, "bias is torch.bool; .* Of a mask, torch.where"),
        ({"bias": [1.0]}, TypeError, "bias is list, not a torch.Tensor"),
        ({"bias": MASK.float().to_sparse()}, TypeError, "bias has layout torch.sparse_coo"),
        ({"sinks": torch.ones(2)}, ValueError, r"sinks has shape \(2,\); \[Hq\] = \(4,\) is needed"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p=1.0: a share of the weights, 0 or more and less than 1"),
        ({"dropout_p": 0.1, "rng": RNG.int()}, TypeError, "rng is torch.int32; torch.int64 is needed"),
        ({"dropout_p": 0.1, "rng": RNG[:1]}, ValueError, r"rng has shape \(1,\); \[2\], seed and offset = \(2,\)"),
        ({"score_mod": "score + + *"}, ValueError, r"(?s)score_mod: this is no expression.*\^"),
        ({"score_mod": lambda score: score}, TypeError, "score_mod is function; it is written as a text"),
        ({"score_mod": "score + w[h]"}, ValueError, "score_mod reads w, which is not in tables; given: none"),
        ({"score_mod": "score + w[h]", "tables": {"w": MASK.float()}}, ValueError, "with 1 indexes, and .* has 2"),
        ({"tables": {"w": torch.ones(4)}}, ValueError, r"tables\['w'\] is not read by score_mod"),
        ({"score_mod": "score + w[h]", "tables": {"w": torch.ones(0)}}, ValueError, r"tables\['w'\] has shape \(0,\)"),
        ({"score_mod": "score + bias[h]", "bias": MASK.float()}, ValueError, "reads bias, which is not in tables"),
        (
            {"score_mod": "score + alibi_slopes[h]", "tables": {"alibi_slopes": torch.ones(4)}},
            ValueError, "the name is that of an argument of its own",
        ),
    ],
)  # fmt: skip
def test_features_that_are_not_served(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fs.attention(Q, K, V, **options)


def test_a_table_may_be_named_as_others_are() -> None:
    """`slope` and `bias` are the user's to name: with them comes no ALiBi and no bias that was not asked for."""
    q, k, v = qkv()
    slope, bias = normal(HQ, seed=3), normal(NK, seed=4)
    O = fs.attention(q, k, v, score_mod="score + slope[h] * bias[j]", tables={"slope": slope, "bias": bias})
    both = fs.attention(q, k, v, bias=slope[:, None, None] * bias)
    torch.testing.assert_close(O, both)
    for got, want in zip(*(torch.autograd.grad(x.sum(), (slope, bias)) for x in (O, both)), strict=True):
        torch.testing.assert_close(got, want)


def test_tensors_on_another_device_are_refused() -> None:
    """There is one real device here, so the other is a name that the tensor gives."""

    class Elsewhere(Tensor):
        device = torch.device("cuda:1")

    with pytest.raises(ValueError, match="bias is on cuda:1 and q on cpu"):
        fs.attention(Q, K, V, bias=MASK.float().as_subclass(Elsewhere))


def test_rows_that_a_formula_cannot_count_are_refused() -> None:
    """An expanded row, so that nothing has to be that long."""
    q = torch.zeros(1, 1, 1, 8)
    k = q.expand(1, 1, 2**24 + 1, 8)
    with pytest.raises(ValueError, match=r"Nk=16777217: score_mod and alibi_slopes .* to 16777216. Split the sequence"):
        fs.attention(q, k, k, alibi_slopes=torch.ones(1))


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"cu_seqlens_q": ints(0, 0, 7, 28, 32)}, ValueError, "cu_seqlens_q is .*ends with the 33 rows"),
        ({"cu_seqlens_k": ints(1, 4, 4, 32, 41)}, ValueError, "cu_seqlens_k is .*: it begins with 0"),
        ({"cu_seqlens_q": ints(0, 8, 7, 28, 33)}, ValueError, "cu_seqlens_q is .*never falls"),
        ({"cu_seqlens_q": torch.tensor([0, 33])}, TypeError, "cu_seqlens_q is torch.int64; torch.int32 .* Call .int"),
        ({"cu_seqlens_q": ints(0, 21, 33)}, ValueError, "cu_seqlens_q has 3 entries and cu_seqlens_k 5"),
        ({"cu_seqlens_q": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, r"cu_seqlens_q has shape \(2, 2\)"),
        ({"max_seqlen_k": 20}, ValueError, "max_seqlen_k=20, and cu_seqlens_k has a sequence of 28 rows"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q=-1"),
        ({"q": torch.ones(1, 33, 4, 16, dtype=F64)}, ValueError, r"q has shape .*: 3 dimensions are needed"),
    ],
)  # fmt: skip
def test_packed_sequences_that_are_not_served(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    (q, k, v), lengths = packed()
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    with pytest.raises(error, match=words):
        fs.attention_varlen(**{"q": q, "k": k, "v": v, **dict(zip(names, lengths, strict=True)), **changed})


def test_a_deterministic_gradient_of_a_table_is_refused_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_ENGINE", "emulator")
    q, k, v = qkv(dtype=BF16)
    slopes = torch.ones(HQ, requires_grad=True)
    O = fs.attention(q, k, v, alibi_slopes=slopes, deterministic=True)
    with pytest.raises(ValueError, match="deterministic: the gradient of alibi_slopes is added up by atomics"):
        O.sum().backward()

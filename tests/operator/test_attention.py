"""attention() as a training script meets it: values, autograd, torch.compile, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import flashsmith as fs
import numpy as np
import pytest
import torch
from flashsmith import reference
from flashsmith.operator import dispatch, library
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BF16 = torch.bfloat16


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


def qkv(N: int = 40, dtype: torch.dtype = torch.float64, grad: bool = True) -> list[Tensor]:
    """q [2, 4, N, 16], k and v [2, 2, N + 5, 16]."""
    return normal((2, 4, N, 16), (2, 2, N + 5, 16), (2, 2, N + 5, 16), dtype=dtype, grad=grad)


def gradients(O: Tensor, inputs: list[Tensor], dO: Tensor | None = None) -> list[Tensor]:
    return list(torch.autograd.grad(O, inputs, torch.ones_like(O) if dO is None else dO))


# Values


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_values_and_gradients_are_those_of_the_reference(layout: Any, causal: bool) -> None:
    q, k, v = qkv()
    (dO,) = normal(q.shape, grad=False)
    want = reference.attention(*(x.detach().numpy() for x in (q, k, v, dO)), scale=0.25, causal=causal)
    turn = (lambda x: x.transpose(1, 2)) if layout == "bnhd" else (lambda x: x)
    O, lse = fs.attention(turn(q), turn(k), turn(v), causal=causal, layout=layout, return_lse=True)
    assert O.is_contiguous()
    found = [turn(O), lse, *gradients(turn(O), [q, k, v], dO)]
    for x, name in zip(found, ("O", "lse", "dQ", "dK", "dV"), strict=True):
        np.testing.assert_allclose(x.detach().numpy(), getattr(want, name), rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_o_and_lse_are_differentiable_where_rows_see_nothing_too() -> None:
    """Against finite differences: 9 queries, 6 keys, so that 3 rows see none."""
    q, k, v = normal((1, 4, 9, 8), (1, 2, 6, 8), (1, 2, 6, 8))

    def seen(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        O, lse = fs.attention(*inputs, causal=True, return_lse=True)
        return O, lse[:, :, 3:]

    assert torch.autograd.gradcheck(seen, (q, k, v), fast_mode=True)
    _, lse = fs.attention(q, k, v, causal=True, return_lse=True)
    assert lse[:, :, :3].isneginf().all()
    with torch.autograd.detect_anomaly(check_nan=True):
        dQ, dK = gradients(lse, [q, k])
    assert dQ.isfinite().all() and dK.isfinite().all() and not dQ[:, :, :3].any()


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32, torch.float64], ids=str)
def test_outputs_have_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    O, lse = fs.attention(q, k, v, return_lse=True)
    assert O.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert {x.dtype for x in gradients(O, [q, k, v])} == {dtype}


@pytest.mark.parametrize(
    "scale", [np.float64(0.3), torch.tensor(0.3, dtype=torch.float64), 0.3], ids=["np", "0-d", "py"]
)
def test_a_scale_of_any_kind_of_number(scale: Any) -> None:
    """It travels as a float, whatever it was."""
    q, k, v = qkv(grad=False)
    torch.testing.assert_close(fs.attention(q, k, v, scale=scale), fs.attention(0.3 * 4 * q, k, v))


def test_layouts_of_q_k_v_and_do_do_not_matter() -> None:
    """A fused QKV buffer, a last stride of 2, a dO that is expanded or transposed."""
    fused = torch.randn(2, 30, 3, 4, 16, dtype=torch.float64)
    q, k, v = (fused[:, :, n].transpose(1, 2).requires_grad_() for n in range(3))
    wide = torch.zeros(2, 4, 30, 32, dtype=torch.float64)
    wide[..., ::2] = v.detach()
    before = fused.clone()
    clean = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    (dO,) = normal(q.shape, grad=False)
    every_second = torch.stack((dO, dO), -1).flatten(-2)[..., ::2]
    seq_major = dO.transpose(1, 2).contiguous().transpose(1, 2)
    O = fs.attention(*clean, causal=True)
    want = gradients(O, clean, dO)
    strided = [q, k, wide[..., ::2].requires_grad_()]
    for upstream in (dO, seq_major, every_second):
        got = fs.attention(*strided, causal=True)
        for x, y in zip((got, *gradients(got, strided, upstream)), (O, *want), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    ones = gradients(fs.attention(*strided, causal=True).sum(), strided)
    for x, y in zip(ones, gradients(fs.attention(*clean, causal=True), clean), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert torch.equal(fused, before)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("B", "Hq", "Hk", "Nq", "Nk"),
    [(2, 2, 2, 5, 0), (2, 2, 2, 0, 5), (0, 2, 2, 5, 5), (2, 0, 0, 5, 5)],
    ids=["no keys", "no queries", "no batch", "no heads"],
)
def test_empty_dimensions(B: int, Hq: int, Hk: int, Nq: int, Nk: int, causal: bool) -> None:
    """No key gives zeros, no query gives zero gradients, nothing gives nothing."""
    inputs = normal((B, Hq, Nq, 16), (B, Hk, Nk, 16), (B, Hk, Nk, 16))
    O, lse = fs.attention(*inputs, causal=causal, return_lse=True)
    assert O.shape == inputs[0].shape and not O.any() and lse.isneginf().all()
    for x, gradient in zip(inputs, gradients(O, inputs), strict=True):
        assert gradient.shape == x.shape and not gradient.any()


# Autograd (BUG-20)


def test_gradients_exist_for_those_that_ask() -> None:
    """Every subset of q, k, v, and the values of the full run."""
    full = qkv()
    want = gradients(fs.attention(*full, causal=True), full)
    for asking in itertools.product((False, True), repeat=3):
        inputs = [x.detach().requires_grad_(ask) for x, ask in zip(full, asking, strict=True)]
        O = fs.attention(*inputs, causal=True)
        assert O.requires_grad == any(asking)
        if any(asking):
            O.backward(torch.ones_like(O))
        for x, ask, y in zip(inputs, asking, want, strict=True):
            assert (x.grad is not None) == ask and (not ask or torch.equal(x.grad, y))


def test_two_backwards_double_the_gradient_exactly() -> None:
    q, k, v = qkv(dtype=torch.float32)
    O = fs.attention(q, k, v)
    O.sum().backward(retain_graph=True)
    once = [x.grad.clone() for x in (q, k, v)]
    O.sum().backward()
    assert all(torch.equal(x.grad, 2 * y) for x, y in zip((q, k, v), once, strict=True))


def test_a_second_derivative_is_refused() -> None:
    q, k, v = qkv(8)
    (dQ,) = torch.autograd.grad(fs.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dQ.sum(), k)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_forward_mode_derivative_is_refused() -> None:
    """PyTorch itself would answer 0."""
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(NotImplementedError, match="k carries a tangent"):
        torch.func.jvp(lambda k: fs.attention(q, k, q), (q,), (q,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="q carries a tangent"):
        fs.attention(torch.autograd.forward_ad.make_dual(q, q), q, q)


def test_nothing_is_saved_without_grad() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        with torch.no_grad():
            assert fs.attention(*qkv()).grad_fn is None
        fs.attention(*qkv(grad=False))
        assert not saved
        fs.attention(*qkv())
    assert len(saved) == 6  # q, k, v, O, m, l


@pytest.mark.parametrize("changed", ["q", "k", "v", "O"])
def test_a_change_of_saved_tensors_is_detected(changed: str) -> None:
    inputs = [x * 1 for x in qkv(8)]
    O = fs.attention(*inputs)
    loss = O.sum()
    with torch.no_grad():
        {**dict(zip("qkv", inputs, strict=True)), "O": O}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_checkpointing_and_tensors_saved_on_the_cpu() -> None:
    inputs = qkv()
    want = gradients(fs.attention(*inputs, causal=True), inputs)

    def run(*x: Tensor) -> Tensor:
        return fs.attention(*x, causal=True)

    assert all(map(torch.equal, gradients(checkpoint(run, *inputs, use_reentrant=False), inputs), want))
    with torch.autograd.graph.save_on_cpu():
        O = run(*inputs)
    assert all(map(torch.equal, gradients(O, inputs), want))


# Autocast (BUG-19)


def test_autocast_casts_and_gradients_come_back_in_the_dtype_of_each_input() -> None:
    q, k, v = qkv(dtype=torch.float32)
    half = v.detach().to(BF16).requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        O = fs.attention(q, k, half)
    same = [x.detach().to(BF16).requires_grad_() for x in (q, k, half)]
    want = fs.attention(*same)
    assert O.dtype == BF16 and torch.equal(O, want)
    for x, y, of in zip(gradients(O, [q, k, half]), gradients(want, same), (q, k, half), strict=True):
        assert x.dtype == of.dtype and torch.equal(x.to(BF16), y)


def test_autocast_changes_no_precision_inside() -> None:
    same = qkv(dtype=BF16)
    want = fs.attention(*same)
    with torch.autocast("cpu", dtype=BF16):
        got = fs.attention(*same)
        inside = gradients(got, same)
    assert torch.equal(got, want) and all(map(torch.equal, inside, gradients(want, same)))


# torch.compile (BUG-18)


def variants() -> dict[str, list[Tensor]]:
    seq_major = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(20)]
    sliced = [x.detach().repeat(1, 1, 1, 2)[..., 8:24].requires_grad_() for x in qkv(20)]
    return {
        "contiguous": qkv(20),
        "sequence-major": seq_major,
        "sliced": sliced,
        "one row": qkv(1),
        "bf16": qkv(9, BF16),
    }


@pytest.mark.parametrize("bnhd", [False, True], ids=["bhnd", "bnhd"])
@pytest.mark.parametrize("name", variants())
def test_the_ops_pass_opcheck(name: str, bnhd: bool) -> None:
    """Schema, autograd registration, and fake shapes, dtypes and strides beside real ones."""
    q, k, v = variants()[name]
    torch.library.opcheck(library.plain_forward, (q, k, v, None, True, bnhd, False))
    q, k, v = (x.detach() for x in (q, k, v))
    O, m, l = library.plain_forward(q, k, v, None, True, bnhd, False)
    for needs in ((True, True, True), (False, True, False)):
        inputs = (torch.ones_like(O), torch.ones_like(l), q, k, v, O, m, l, None, True, bnhd, False, *needs)
        torch.library.opcheck(library.plain_backward, inputs)


def test_compiled_without_a_break_and_once_for_all_lengths() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fs.attention(q * 2, k, v, causal=True, return_lse=True)

    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    for N in (65, 33, 80, 7):
        inputs = qkv(N, torch.float32)
        (O, lse), (O_c, lse_c) = run(*inputs), compiled(*inputs)
        assert torch.equal(O, O_c) and torch.equal(lse, lse_c)
        want, got = gradients(O.sum() + lse.sum(), inputs), gradients(O_c.sum() + lse_c.sum(), inputs)
        assert all(map(torch.equal, got, want)), N
    assert len(graphs) == 1


def test_compiled_under_autocast() -> None:
    torch._dynamo.reset()
    inputs = qkv(12, torch.float32)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return fs.attention(q, k, v)

    got = torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs)
    assert got.dtype == BF16 and torch.equal(got, run(*inputs))


# Determinism


@pytest.mark.parametrize(
    ("given", "switch", "expected"), [(None, False, False), (None, True, True), (False, True, False)]
)
def test_deterministic_follows_pytorchs_switch_unless_given(
    given: bool | None, switch: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    backward = dispatch.backward

    def record(*args: Any, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return backward(*args, **options)

    monkeypatch.setattr(dispatch, "backward", record)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(switch)
        fs.attention(*qkv(4), deterministic=given).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked == [expected]


# What is refused

Q, K, V = qkv(6, torch.float32, grad=False)


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ((Q.numpy(), K, V), TypeError, "q is ndarray"),
        ((Q, K.to("meta"), V), TypeError, "k is on the meta device"),
        ((Q, K, V.to_sparse()), TypeError, "v has layout torch.sparse_coo"),
        ((Q[0], K, V), ValueError, r"q has shape \(4, 6, 16\): 4 dimensions"),
        ((Q, K.to(BF16), V.double()), TypeError, "q is torch.float32, k is torch.bfloat16, v is torch.float64"),
        ((Q.int(), K.int(), V.int()), TypeError, "q is torch.int32.*serves torch.bfloat16"),
        ((Q[:1], K, V), ValueError, "k has B=2 and q has B=1"),
        ((Q, K[..., :8], V), ValueError, "k has d=8 and q has d=16"),
        ((Q, K, V[..., :4]), ValueError, "dv=4 is not served.*multiple of 8 from 8 to 256; pad to 8"),
        ((Q, K, V[:, :, :3]), ValueError, "v has Nk=3 and k has Nk=11"),
        ((Q, K, V[:, :1]), ValueError, "v has Hk=1 and k has Hk=2"),
        ((Q[:, :3], K, V), fs.FlashsmithError, "3 query heads over 2 key/value heads"),
        ((Q[..., :12], K[..., :12], V[..., :12]), ValueError, "d=12 is not served.*multiple of 8 from 8 to 256"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_served(inputs: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fs.attention(*inputs)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"layout": "nbhd"}, "'nbhd'"), ({"scale": 0.0}, "scale=0.0"), ({"scale": float("nan")}, "scale=nan")],
)
def test_options_that_are_not_served(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fs.attention(Q, K, V, **options)


def test_tensors_on_several_devices_are_refused() -> None:
    """There is one real device here, so the other is a name that the tensor gives."""

    class Elsewhere(Tensor):
        device = torch.device("cuda:1")

    with pytest.raises(ValueError, match="q is on cpu, k on cuda:1, v on cpu"):
        fs.attention(Q, K.as_subclass(Elsewhere), V)


def test_engines_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_ENGINE", "gpu")
    with pytest.raises(ValueError, match="FLASHSMITH_ENGINE='gpu' is not known; use one of cuda, emulator, torch"):
        fs.attention(Q, K, V)
    monkeypatch.setenv("FLASHSMITH_ENGINE", "cuda")
    with pytest.raises(ValueError, match="takes cuda tensors; these are on cpu"):
        fs.attention(Q, K, V)

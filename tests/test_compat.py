"""flash-attn's and PyTorch's calls, beside what they compute and what they refuse."""

from __future__ import annotations

import inspect
from typing import Any

import flashsmith as fs
import numpy as np
import pytest
import torch
from flashsmith import compat, reference
from flashsmith.compat import flash_attn_func, sdpa
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def same(got: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    """Equal outputs and gradients, whatever the upstream gradient."""
    dO = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(1))
    gradients = (torch.autograd.grad(O, inputs, dO, retain_graph=True) for O in (got, want))
    for x, y in ((got, want), *zip(*gradients, strict=True)):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_flash_attn_func_is_sequence_major_and_aligned_to_the_bottom_right(causal: bool) -> None:
    q, k, v = normal((2, 7, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16))
    O = flash_attn_func(q, k, v, 0.0, 0.3, causal)  # flash-attn's order
    turned = [x.detach().transpose(1, 2).numpy() for x in (q, k, v, q)]
    want = reference.attention(*turned, scale=0.3, causal=causal).O
    np.testing.assert_allclose(O.detach().transpose(1, 2).numpy(), want, rtol=1e-12, atol=1e-12)
    assert O.is_contiguous()


def written_out(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of scale 0.3, capped at 2, slopes beside them, a causal window of 3 keys more; sequence-major."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    away = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    S = 2 * torch.tanh(0.3 * q @ k.mT / 2) - slopes[:, None, None] * away.abs()
    S = S.masked_fill((away < 0) | (away > 3), -torch.inf)
    return (S.softmax(-1) @ v).transpose(1, 2), S.logsumexp(-1)


ASKED: dict[str, Any] = {
    "softmax_scale": 0.3, "causal": True, "window_size": (3, -1), "softcap": 2.0, "return_attn_probs": True,
}  # fmt: skip


def test_flash_attn_func_and_what_lies_packed_for_it() -> None:
    """Window, softcap and slopes; the same from kv and from qkv in one tensor."""
    q, k, v, slopes = inputs = normal((2, 7, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16), (4,))
    O, lse, weights = flash_attn_func(q, k, v, alibi_slopes=slopes, **ASKED)
    want, lse_want = written_out(*inputs)
    assert weights is None
    torch.testing.assert_close(lse, lse_want)
    same(O, want, inputs)
    kv = torch.stack((k, v), 2)
    same(compat.flash_attn_kvpacked_func(q, kv, alibi_slopes=slopes, **ASKED)[0], want, inputs)
    qkv = torch.stack((q, *(x.repeat_interleave(2, 2) for x in (k, v))), 2)
    same(compat.flash_attn_qkvpacked_func(qkv, alibi_slopes=slopes, **ASKED)[0], want, inputs)


def test_flash_attn_varlen_func_and_what_lies_packed_for_it() -> None:
    """Two sequences of 5 and 7 words, one after the other."""
    q, k, v, slopes = inputs = normal((12, 4, 16), (12, 2, 16), (12, 2, 16), (4,))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    parts = zip(*(x[None].split((5, 7), 1) for x in (q, k, v)), strict=True)
    made = [written_out(*part, slopes) for part in parts]
    want, lse_want = torch.cat([O[0] for O, _ in made]), torch.cat([lse[0] for _, lse in made], 1)
    O, lse, _ = compat.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, alibi_slopes=slopes, **ASKED)
    torch.testing.assert_close(lse, lse_want)
    same(O, want, inputs)
    kv = torch.stack((k, v), 1)
    same(compat.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 7, 7, alibi_slopes=slopes, **ASKED)[0], want, inputs)
    qkv = torch.stack((q, *(x.repeat_interleave(2, 1) for x in (k, v))), 1)
    same(compat.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, alibi_slopes=slopes, **ASKED)[0], want, inputs)


def test_flash_attn_func_drops_weights_as_attention_does() -> None:
    q, k, v = normal((2, 7, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    torch.manual_seed(3)
    got = flash_attn_func(q, k, v, 0.25)
    torch.manual_seed(3)
    assert torch.equal(got, fs.attention(q, k, v, dropout_p=0.25, layout="bnhd"))
    assert not torch.equal(got, flash_attn_func(q, k, v))


def test_what_flash_attn_is_not_given_here() -> None:
    q, cu = torch.randn(8, 4, 16), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: block_table=a tensor of shape"):
        compat.flash_attn_varlen_func(q, q, q, cu, cu, 8, 8, block_table=cu)
    with pytest.raises(ValueError, match=r"kv has shape \(1, 8, 3, 4, 16\): \[B, N, 2, heads, d\] is needed"):
        compat.flash_attn_kvpacked_func(q[None], torch.randn(1, 8, 3, 4, 16))


TAIL = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("flash_attn_func", f"q k v {TAIL}"),
        ("flash_attn_kvpacked_func", f"q kv {TAIL}"),
        ("flash_attn_qkvpacked_func", f"qkv {TAIL}"),
        ("flash_attn_varlen_func", f"q k v {LENGTHS} {TAIL} block_table"),
        ("flash_attn_varlen_kvpacked_func", f"q kv {LENGTHS} {TAIL}"),
        ("flash_attn_varlen_qkvpacked_func", f"qkv cu_seqlens max_seqlen {TAIL}"),
    ],
)
def test_the_arguments_are_flash_attns_in_their_order(name: str, arguments: str) -> None:
    assert list(inspect.signature(getattr(compat, name)).parameters) == arguments.split()


def test_the_arguments_are_pytorchs_in_their_order() -> None:
    theirs = (scaled_dot_product_attention.__doc__ or "").split("(", 1)[1].split(") ->", 1)[0]
    names = [word.split("=")[0].split(":")[0].strip() for word in theirs.replace("*,", "").split(",")]
    assert list(inspect.signature(sdpa).parameters) == [name for name in names if name]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("Nq", "Nk"), [(9, 9), (5, 12), (12, 5), (1, 7), (7, 1)])
def test_sdpa_is_pytorchs(Nq: int, Nk: int, causal: bool) -> None:
    """The causal mask begins at the top left, also where lengths differ."""
    inputs = normal((2, 4, Nq, 16), (2, 4, Nk, 16), (2, 4, Nk, 16))
    same(sdpa(*inputs, is_causal=causal), scaled_dot_product_attention(*inputs, is_causal=causal), inputs)


def test_sdpa_with_heads_that_share_keys_a_scale_and_three_dimensions() -> None:
    inputs = normal((2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    same(
        sdpa(*inputs, scale=0.1, enable_gqa=True),
        scaled_dot_product_attention(*inputs, scale=0.1, enable_gqa=True),
        inputs,
    )
    inputs = normal((2, 9, 16), (2, 6, 16), (2, 6, 16))
    same(sdpa(*inputs, is_causal=True), scaled_dot_product_attention(*inputs, is_causal=True), inputs)


@pytest.mark.parametrize("shape", [(9, 12), (1, 12), (4, 1, 12), (2, 1, 1, 12), (2, 4, 9, 12), (1, 4, 9, 1)], ids=str)
@pytest.mark.parametrize("of_truths", [False, True], ids=["numbers", "truths"])
def test_sdpa_with_a_mask(shape: tuple[int, ...], of_truths: bool) -> None:
    """Of numbers it has a gradient. A row that sees nothing gives 0, with PyTorch as well."""
    inputs = normal((2, 4, 9, 16), (2, 4, 12, 16), (2, 4, 12, 16))
    if of_truths:
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
        mask[..., 0, :] &= shape[-2] == 1
    else:
        (mask,) = normal(shape)
        inputs = [*inputs, mask]
    same(sdpa(*inputs[:3], mask), scaled_dot_product_attention(*inputs[:3], mask), inputs)


def test_sdpa_with_a_mask_of_each_sequence_and_no_heads() -> None:
    inputs = normal((2, 9, 16), (2, 12, 16), (2, 12, 16), (2, 9, 12))
    same(sdpa(*inputs), scaled_dot_product_attention(*inputs), inputs)


def test_sdpa_drops_weights_as_attention_does() -> None:
    q = torch.randn(1, 4, 8, 16)
    torch.manual_seed(3)
    got = sdpa(q, q, q, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(got, fs.attention(q, q, q, dropout_p=0.5)) and not torch.equal(got, fs.attention(q, q, q))


def test_sdpa_names_what_it_does_not_serve() -> None:
    q = torch.randn(1, 4, 8, 16)
    with pytest.raises(ValueError, match=r"bias has shape \(3, 8\), which does not broadcast"):
        sdpa(q, q, q, torch.ones(3, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="query has 4 heads and key has 2: they must be equal unless enable_gqa"):
        sdpa(q, q[:, :2], q[:, :2])
    with pytest.raises(ValueError, match="query has 4 dimensions, key 3"):
        sdpa(q, q[0], q[0])
    with pytest.raises(TypeError, match="key is list"):
        sdpa(q, [1], q)  # type: ignore[arg-type]


def test_compat_is_found_from_the_package() -> None:
    assert fs.compat.sdpa is sdpa

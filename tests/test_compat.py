"""flash-attn's and PyTorch's calls, beside what they compute and what they refuse."""

from __future__ import annotations

import inspect
from typing import Any

import flashsmith as fs
import numpy as np
import pytest
import torch
from flashsmith import reference
from flashsmith.compat import flash_attn_func, sdpa
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def same(got: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    """Equal outputs and gradients, whatever the upstream gradient."""
    dO = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(1))
    pairs = zip(torch.autograd.grad(got, inputs, dO), torch.autograd.grad(want, inputs, dO), strict=True)
    for x, y in ((got, want), *pairs):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_flash_attn_func_is_sequence_major_and_aligned_to_the_bottom_right(causal: bool) -> None:
    q, k, v = normal((2, 7, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16))
    O = flash_attn_func(q, k, v, 0.0, 0.3, causal)  # flash-attn's order
    turned = [x.detach().transpose(1, 2).numpy() for x in (q, k, v, q)]
    want = reference.attention(*turned, scale=0.3, causal=causal).O
    np.testing.assert_allclose(O.detach().transpose(1, 2).numpy(), want, rtol=1e-12, atol=1e-12)
    assert O.is_contiguous()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("dropout_p", 0.1),
        ("window_size", (128, 0)),
        ("softcap", 30.0),
        ("alibi_slopes", torch.ones(4)),
        ("return_attn_probs", True),
    ],
)
def test_flash_attn_func_names_what_it_does_not_serve(argument: str, value: Any) -> None:
    q = torch.randn(1, 8, 4, 16)
    with pytest.raises(NotImplementedError, match=f"flash_attn_func: {argument}="):
        flash_attn_func(q, q, q, **{argument: value})


def test_the_arguments_are_theirs_in_their_order() -> None:
    assert list(inspect.signature(flash_attn_func).parameters) == [
        "q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
        "deterministic", "return_attn_probs",
    ]  # fmt: skip
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


def test_sdpa_names_what_it_does_not_serve() -> None:
    q = torch.randn(1, 4, 8, 16)
    with pytest.raises(NotImplementedError, match=r"sdpa: attn_mask=a tensor of shape \(8, 8\) is not served"):
        sdpa(q, q, q, torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"sdpa: dropout_p=0.5"):
        sdpa(q, q, q, dropout_p=0.5)
    with pytest.raises(ValueError, match="query has 4 heads and key has 2: they must be equal unless enable_gqa"):
        sdpa(q, q[:, :2], q[:, :2])
    with pytest.raises(ValueError, match="query has 4 dimensions, key 3"):
        sdpa(q, q[0], q[0])
    with pytest.raises(TypeError, match="key is list"):
        sdpa(q, [1], q)  # type: ignore[arg-type]


def test_compat_is_found_from_the_package() -> None:
    assert fs.compat.sdpa is sdpa

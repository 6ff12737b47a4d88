"""Register attention with Hugging Face transformers, where a model asks for it by name.

A model asks transformers for its mask first and hands the mask to attention later. No mask is made where the kernels
need none: causal, windowed and bidirectional attention become None, and padding beside them a row of truths for each
sequence [B, Nk]. Packed sequences, chunks, caches of fixed size and a model's own patterns become whole masks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .compat import additive, refuse
from .operator.op import attention

NAME = "fsmith"  # without `flash`: transformers takes any name with it for a build of the flash-attn package


def register_transformers() -> str:
    """Make attn_implementation="fsmith" known to transformers, and return that name. Calling it again is harmless.

        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=fs.register_transformers())

    Raises ImportError where transformers is missing or older than 5.6, which asks for masks in another way.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("register_transformers needs transformers 5.6 or later: pip install transformers") from error
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, needed_mask)
    return NAME


_UNSAID: Any = object()  # the layer does not know of windows


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = _UNSAID,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, Hq, Nq, d], key and value [B, Hk, Nk, d] -> O [B, Nq, Hq, d], no weights.

    Its causal mask is aligned to the bottom right, so that the last query sees every key of a cache. `attention_mask`
    [B, Nk] hides keys beside it; [B, 1 or Hq, Nq, Nk], truths or numbers to add, takes the place of it and of the
    window. s_aux [Hq] are sinks; position_bias [1 or B, Hq, Nq, Nk] is added.
    """
    refuse(NAME, "head_mask", others.get("head_mask"), others.get("head_mask") is None)
    refuse(NAME, "output_attentions", True, not others.get("output_attentions"))
    bias, window = position_bias, None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is not None:
        mask = additive(attention_mask, query.dtype)
        mask = mask[:, None, None] if mask.dim() == 2 else mask
        bias = mask if bias is None else mask + bias
    if attention_mask is not None and attention_mask.dim() == 4:
        causal = False
    elif causal:
        window = _window(module, key.shape[2], sliding_window)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    O = attention(
        q, k, v, causal=causal, scale=scaling, layout="bnhd", window=window, softcap=softcap, sinks=s_aux, bias=bias,
        dropout_p=dropout,
    )  # fmt: skip
    return O, None


def _window(module: torch.nn.Module, Nk: int, sliding_window: int | None) -> tuple[int, int] | None:
    """The window of a layer, if it hides anything; transformers counts a query's own key.

    Raises NotImplementedError for a model that has one and does not tell its layers: no mask was made for it.
    """
    if sliding_window is _UNSAID:
        configured = getattr(getattr(module, "config", None), "sliding_window", None)
        if configured is None or Nk <= configured:
            return None
        raise NotImplementedError(
            f"{NAME}: sliding_window={configured} is in the model's configuration, and its layers do not hand it on; "
            "use attn_implementation='sdpa'."
        )
    return None if sliding_window is None or Nk <= sliding_window else (sliding_window - 1, 0)


def needed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **options: Any,
) -> Tensor | None:
    """What transformers asks for the mask of a model: None, padding [B, Nk], or all of it [B, 1, Nq, Nk].

    While compiling nobody can look whether attention_mask marks padding, and it is taken to: pass none if not.
    """
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )

    # One skip is allowed for a mask that is causal, windowed or in chunks, and for nothing else beside it.
    local = local_size is not None and bool(options.get("allow_is_causal_skip", True))
    whole = local and kv_offset == 0 and kv_length <= (local_size or 0)
    windowed = local and getattr(options.get("config"), "attention_chunk_size", None) is None
    causal = mask_function in (None, causal_mask_function) or windowed or whole
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if mask_function is bidirectional_mask_function or (causal and aligned):
        padding: Tensor | None = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is None or not (torch.compiler.is_compiling() or not bool(padding.all())):
            return None
        return padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    function = causal_mask_function if mask_function is None else mask_function
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        cast("int", q_offset),
        kv_offset,
        function,
        attention_mask,
        local_size,
        **options,
    )

"""Register attention with Hugging Face transformers, where a model asks for it by name.

A model asks transformers for its mask first and hands the mask to attention later. No mask is made here: a mask that is
plainly causal, or none at all, becomes None, and everything else is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .compat import refuse
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
    AttentionMaskInterface.register(NAME, no_mask)
    return NAME


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, Hq, Nq, d], key and value [B, Hk, Nk, d] -> O [B, Nq, Hq, d], no weights.

    Its causal mask is aligned to the bottom right, so that the last query sees every key of a cache.
    """
    refuse(NAME, "attention_mask", attention_mask, attention_mask is None)
    refuse(NAME, "dropout", dropout, dropout == 0)
    refuse(NAME, "sliding_window", sliding_window, sliding_window is None or key.shape[2] <= sliding_window)
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        refuse(NAME, name, features.get(name), features.get(name) is None)
    refuse(NAME, "output_attentions", True, not features.get("output_attentions"))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, causal=bool(causal), scale=scaling, layout="bnhd"), None


def no_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **options: Any,
) -> None:
    """What transformers asks for the mask of a model: None, once it is sure that none is needed.

    Raises NotImplementedError for padding, packed sequences, windows shorter than the keys, and caches of fixed size.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if attention_mask is not None:
        _refuse_padding(attention_mask)
    fits = local_size is not None and kv_length <= local_size and bool(options.get("allow_is_causal_skip", True))
    if mask_function not in (None, causal_mask_function, bidirectional_mask_function) and not fits:
        raise NotImplementedError(
            f"{NAME}: the model's mask_function is neither causal nor empty (packed sequences, a sliding window "
            "shorter than the keys, chunks or a custom pattern), which is not served; use attn_implementation='sdpa'. "
            "While compiling, transformers takes any batch without attention_mask and cache for packed: pass ones."
        )
    if mask_function is not bidirectional_mask_function and (
        isinstance(q_offset, Tensor) or kv_offset or q_offset + q_length != kv_length
    ):
        raise NotImplementedError(
            f"{NAME}: past_key_values holds {kv_length} keys for queries {q_offset} to {q_offset + q_length - 1}: "
            "a cache of fixed size is not served; use a DynamicCache."
        )


def _refuse_padding(attention_mask: Tensor) -> None:
    """Raise NotImplementedError unless the mask is all ones; compiled code cannot ask, and fails when it runs."""
    message = (
        f"{NAME}: attention_mask marks padding, which is not served; pass sequences of equal length and "
        "attention_mask=None, or use attn_implementation='sdpa'."
    )
    if torch.compiler.is_compiling():
        torch._assert_async(attention_mask.all(), message)
    elif not bool(attention_mask.all()):
        raise NotImplementedError(message)

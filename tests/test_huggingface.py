"""A tiny, randomly initialised model of transformers: what it computes, and the masks that are refused."""

from __future__ import annotations

import copy
from typing import Any

import flashsmith as fs
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def model(attention: str, kind: str = "Llama", **options: Any) -> Any:
    """The same random weights, whichever attention."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=attention)


@pytest.fixture(scope="module")
def ours() -> Any:
    return model(fs.register_transformers())


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(2, 64, (2, 37), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_logits_and_gradients_are_those_of_sdpa(ours: Any, ids: torch.Tensor, dtype: torch.dtype, noise: float) -> None:
    """Relative to the largest value of each tensor."""
    pair = [copy.deepcopy(ours).to(dtype), model("sdpa").to(dtype)]
    assert [m.config._attn_implementation for m in pair] == ["fsmith", "sdpa"]
    outputs = [m(ids, labels=ids) for m in pair]
    for out in outputs:
        out.loss.backward()
    gradients = ([p.grad for p in m.parameters()] for m in pair)
    for got, want in ((outputs[0].logits, outputs[1].logits), *zip(*gradients, strict=True)):
        assert (got - want).abs().max() <= noise * want.abs().max()


def test_it_is_our_attention_that_runs(ours: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashsmith import huggingface

    seen: list[Any] = []
    attention = huggingface.attention
    monkeypatch.setattr(huggingface, "attention", lambda *x, **o: seen.append(o["causal"]) or attention(*x, **o))
    ours(ids)
    assert seen == [True, True]  # two layers


def test_generation_with_a_growing_cache(ours: Any, ids: torch.Tensor) -> None:
    """One query against n keys, the last of which it sees: the mask's diagonal ends at the bottom right."""
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    assert torch.equal(ours.generate(ids[:, :9], **options), model("sdpa").generate(ids[:, :9], **options))


def test_masks_that_are_not_served_are_refused_by_name(ours: Any, ids: torch.Tensor) -> None:
    padding = torch.ones(2, 37)
    assert ours(ids, attention_mask=padding).logits.shape == (2, 37, 64)
    padding[0, :3] = 0
    with pytest.raises(NotImplementedError, match="attention_mask marks padding"):
        ours(ids, attention_mask=padding)
    with pytest.raises(NotImplementedError, match=r"attention_mask=a tensor of shape \(2, 1, 37, 37\)"):
        ours(ids, attention_mask=torch.zeros(2, 1, 37, 37))
    packed = torch.cat((torch.arange(20), torch.arange(17)))[None]
    with pytest.raises(NotImplementedError, match="packed sequences"):
        ours(ids, position_ids=packed, use_cache=False)
    with pytest.raises(NotImplementedError, match=r"past_key_values holds .* keys for queries 0 to 8"):
        ours.generate(ids[:, :9], max_new_tokens=4, cache_implementation="static", attention_mask=torch.ones(2, 9))


def test_compiled_without_a_break(ours: Any, ids: torch.Tensor) -> None:
    """The mask of ones is checked by the compiled code itself."""
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    mask = torch.ones(2, 37)
    got = compiled(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got, ours(ids).logits)
    mask[0, :3] = 0
    with pytest.raises(RuntimeError, match="attention_mask marks padding"):
        compiled(ids, attention_mask=mask, use_cache=False)


def test_a_sliding_window_is_served_only_where_it_hides_nothing(ids: torch.Tensor) -> None:
    name = fs.register_transformers()
    wide = model(name, "Mistral", sliding_window=64)(ids).logits
    torch.testing.assert_close(wide, model("sdpa", "Mistral", sliding_window=64)(ids).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="sliding window"):
        model(name, "Mistral", sliding_window=16)(ids)


@pytest.mark.parametrize("feature", [{"softcap": 30.0}, {"dropout": 0.1}, {"s_aux": torch.ones(4)}], ids=str)
def test_features_that_are_not_served_are_refused_by_name(feature: dict[str, Any]) -> None:
    from flashsmith.huggingface import attend

    q = torch.randn(1, 4, 8, 16)
    with pytest.raises(NotImplementedError, match=f"fsmith: {next(iter(feature))}="):
        attend(torch.nn.Module(), q, q, q, None, **feature)

"""Tiny, randomly initialised models of transformers: what they compute, and the masks that are made for them."""

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
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options))
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


def padded(ids: torch.Tensor) -> torch.Tensor:
    """The first sequence begins five words late."""
    mask = torch.ones(ids.shape, dtype=torch.long)
    mask[0, :5] = 0
    return mask


OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "padding": ("Llama", "sdpa", {}),
    "sliding window": ("Mistral", "sdpa", {"sliding_window": 16}),
    "softcap": ("Gemma2", "eager", {"sliding_window": 8, "head_dim": 16, "attn_logit_softcapping": 2.0}),
    "sinks": (
        "GptOss", "eager",
        {"sliding_window": 8, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("with_padding", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("case", OTHERS)
def test_other_models_have_the_logits_of_transformers_own_attention(
    case: str, with_padding: bool, ids: torch.Tensor
) -> None:
    kind, theirs, options = OTHERS[case]
    mask = padded(ids) if with_padding else None
    got, want = (
        model(name, kind, **options)(ids, attention_mask=mask).logits for name in (fs.register_transformers(), theirs)
    )
    real = slice(None) if mask is None else mask.bool()  # what stands in the place of padding is nobody's
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-5)


def test_the_gradient_of_sinks(ids: torch.Tensor) -> None:
    kind, theirs, options = OTHERS["sinks"]
    found = []
    for name in (fs.register_transformers(), theirs):
        m = model(name, kind, **options)
        m(ids, labels=ids).loss.backward()
        found.append(m.model.layers[0].self_attn.sinks.grad)
    assert found[1].abs().max() > 1e-6
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-8)


def test_no_mask_is_made_that_the_kernels_do_not_need(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is two numbers, padding a row of truths for each sequence, packed sequences a whole mask."""
    from flashsmith import huggingface

    seen: list[Any] = []
    attention = huggingface.attention

    def record(*x: Any, **options: Any) -> Any:
        bias = options["bias"]
        seen.append((options["causal"], options["window"], None if bias is None else tuple(bias.shape)))
        return attention(*x, **options)

    monkeypatch.setattr(huggingface, "attention", record)
    windowed = model(fs.register_transformers(), "Mistral", sliding_window=16, num_hidden_layers=1)
    windowed(ids)
    windowed(ids, attention_mask=torch.ones(2, 37))
    windowed(ids, attention_mask=padded(ids))
    windowed(ids[:, :9])
    windowed(ids, position_ids=torch.cat((torch.arange(20), torch.arange(17)))[None], use_cache=False)
    assert seen == [
        (True, (15, 0), None), (True, (15, 0), None), (True, (15, 0), (2, 1, 1, 37)), (True, None, None),
        (False, None, (2, 1, 37, 37)),
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "cache"), [("Llama", "static"), ("Mistral", "static"), ("Mistral", "dynamic")])
def test_generation_behind_padding(kind: str, cache: str, ids: torch.Tensor) -> None:
    """A cache grows, or has keys that nobody may see yet; the window is shorter than what is written."""
    options = {"sliding_window": 6} if kind == "Mistral" else {}
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "attention_mask": padded(ids[:, :9])}
    asked |= {"cache_implementation": "static"} if cache == "static" else {}
    got, want = (model(name, kind, **options).generate(ids[:, :9], **asked) for name in ("fsmith", "sdpa"))
    assert torch.equal(got, want)


def test_packed_sequences_and_masks_of_the_callers_own(ours: Any, ids: torch.Tensor) -> None:
    packed = torch.cat((torch.arange(20), torch.arange(17)))[None]
    whole = torch.ones(37, 37, dtype=torch.bool).tril(-3) | torch.eye(37, dtype=torch.bool)
    for asked in ({"position_ids": packed, "use_cache": False}, {"attention_mask": whole.expand(2, 1, 37, 37)}):
        torch.testing.assert_close(ours(ids, **asked).logits, model("sdpa")(ids, **asked).logits, rtol=1e-4, atol=1e-5)


def test_a_window_that_layers_do_not_know_of_is_refused(ids: torch.Tensor) -> None:
    options = {
        "sliding_window": 8, "use_sliding_window": True, "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }  # fmt: skip
    with pytest.raises(NotImplementedError, match="sliding_window=8 is in the model's configuration"):
        model(fs.register_transformers(), "Qwen2Moe", **options)(ids)


def test_compiled_without_a_break(ours: Any, ids: torch.Tensor) -> None:
    """Nobody can look at the mask then, so it is served whatever it hides."""
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for mask in (torch.ones(2, 37), padded(ids).float()):
        got = compiled(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(got, ours(ids, attention_mask=mask).logits)


def test_dropout_and_a_bias_of_positions() -> None:
    from flashsmith.huggingface import attend

    q, bias = torch.randn(1, 4, 8, 16), torch.randn(1, 4, 8, 8)
    torch.manual_seed(0)
    O, weights = attend(torch.nn.Module(), q, q, q, None, dropout=0.5, position_bias=bias)
    torch.manual_seed(0)
    want = fs.attention(q, q, q, causal=True, dropout_p=0.5, bias=bias)
    assert weights is None and torch.equal(O, want.transpose(1, 2))


@pytest.mark.parametrize("feature", [{"head_mask": torch.ones(4)}, {"output_attentions": True}], ids=str)
def test_features_that_are_not_served_are_refused_by_name(feature: dict[str, Any]) -> None:
    from flashsmith.huggingface import attend

    q = torch.randn(1, 4, 8, 16)
    with pytest.raises(NotImplementedError, match=f"fsmith: {next(iter(feature))}="):
        attend(torch.nn.Module(), q, q, q, None, **feature)

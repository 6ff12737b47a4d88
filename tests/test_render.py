"""The generated text: reviewed as golden files, stable to the byte, and CUDA that people can read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from flashsmith.render import render
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KERNELS, TILE_OF, KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import ALL_HEADS, GROUPED, HEAD_BY_HEAD

from .features import FEATURES

CASES: dict[str, tuple[KernelName, str, dict[str, object]]] = {
    "forward_d128_causal_a100": ("forward", "a100", {"d": 128, "causal": True}),
    "forward_d64_a100": ("forward", "a100", {"d": 64}),
    "forward_d64_fp32_a100": ("forward", "a100", {"d": 64, "dtype": "fp32"}),
    "dkdv_d128_fp32_a100": ("dkdv", "a100", {"d": 128, "dtype": "fp32"}),
    "forward_d72_fp16_rtx4090": ("forward", "rtx4090", {"d": 72, "dtype": "fp16"}),
    "forward_d256_causal_h100": ("forward", "h100-sxm", {"d": 256, "causal": True}),
    "forward_d128_causal_packed_a100": ("forward", "a100", {"d": 128, "causal": True, "Hq": 32, "Hk": 8, "Nq": 7}),
    "partial_d128_causal_h100": ("partial", "h100-sxm", {"d": 128, "causal": True, "Nq": 16, "Nk": 65536}),
    "combine_d128": ("combine", "a100", {"d": 128}),
    "delta_d128": ("delta", "a100", {"d": 128}),
    "delta_d40_fp16": ("delta", "a100", {"d": 40, "dtype": "fp16"}),
    "fused_d128_causal_a100": ("fused", "a100", {"d": 128, "causal": True}),
    "fused_d64_h100": ("fused", "h100-sxm", {"d": 64}),
    "fused_d72_causal_fp16_rtx4090": ("fused", "rtx4090", {"d": 72, "causal": True, "dtype": "fp16"}),
    "convert_d128_a100": ("convert", "a100", {"d": 128}),
    "convert_d64_h100": ("convert", "h100-sxm", {"d": 64}),
    "dkdv_d128_a100": ("dkdv", "a100", {"d": 128}),
    "dq_d128_causal_a100": ("dq", "a100", {"d": 128, "causal": True}),
    "dq_d96_rtx4090": ("dq", "rtx4090", {"d": 96}),
    "forward_d128_causal_ascending_a100": ("forward", "a100", {"d": 128, "causal": True, "ascending": True}),
    "forward_d64_causal_head_by_head_rtx4090": ("forward", "rtx4090", {"d": 64, "causal": True, "order": HEAD_BY_HEAD}),
    "forward_d64_fp16_t4": ("forward", "t4", {"d": 64, "dtype": "fp16"}),
    "fused_d64_fp16_t4": ("fused", "t4", {"d": 64, "dtype": "fp16"}),
    "fused_d64_causal_grouped_h100": ("fused", "h100-sxm", {"d": 64, "causal": True, "order": GROUPED}),
    "dkdv_d128_causal_all_heads_a100": ("dkdv", "a100", {"d": 128, "causal": True, "order": ALL_HEADS}),
    "dq_d64_causal_all_heads_a100": ("dq", "a100", {"d": 64, "causal": True, "order": ALL_HEADS}),
    "forward_d128_window_packed_sinks_a100": (
        "forward", "a100", {"d": 128, "window": (1024, 0), "lengths": "packed", "sinks": True},
    ),
    "forward_d192_dv128_causal_h100": ("forward", "h100-sxm", {"d": 192, "dv": 128, "causal": True}),
    "fused_d64_dropout_a100": ("fused", "a100", {"d": 64, "dropout": 0.1}),
    "dkdv_d64_padded_alibi_gradient_a100": ("dkdv", "a100", {"d": 64, "lengths": "padded", **FEATURES["alibi"]}),
    "dq_d128_window_softcap_a100": ("dq", "a100", {"d": 128, "window": (512, 64), **FEATURES["softcap"]}),
    "delta_d128_packed_sinks_dropout": (
        "delta", "a100", {"d": 128, "lengths": "packed", "sinks": True, "dropout": 0.1},
    ),
}  # fmt: skip


def spec_of(kernel: KernelName, gpu: str, fields: dict[str, object]) -> KernelSpec:
    """The default kernel for the fields of a problem; those of a tile replace its own."""
    of_tile = {name: value for name, value in fields.items() if name in TILE_OF[kernel].short}
    of_problem = {name: value for name, value in fields.items() if name not in of_tile}
    problem, target = Problem(**{"dtype": "bf16", **of_problem}), find_gpu(gpu)  # type: ignore[arg-type]
    tile = replace(default_tile(kernel, problem, target), **of_tile)  # type: ignore[arg-type]
    return KernelSpec.of(kernel, problem, tile, target.sm)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.cu", render(spec_of(*CASES[name])).text)


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_tidy(name: str) -> None:
    tidy(spec_of(*CASES[name]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("feature", FEATURES)
def test_the_text_of_every_feature_is_tidy(feature: str, kernel: KernelName) -> None:
    if kernel not in ("partial", "combine"):  # they have none
        tidy(spec_of(kernel, "a100", {"d": 64, **FEATURES[feature]}))


def tidy(spec: KernelSpec) -> None:
    """Key first, no include, no template left over, no blank pairs, no trailing space, lines that fit a screen."""
    text = render(spec).text
    assert text.startswith(f"// {spec.key}\n") and text.endswith("}\n")
    assert "#include" not in text and "{{" not in text and "{%" not in text and "\t" not in text
    assert not re.search(r"\n\n\n", text) and not re.search(r"[ ]+\n", text)
    assert max(len(line) for line in text.splitlines() if "score_mod::" not in line) <= 140  # a user's may be longer


@pytest.mark.parametrize("name", CASES)
def test_every_barrier_names_its_hazard(name: str) -> None:
    """A barrier without a reason is a barrier that somebody will remove."""
    lines = render(spec_of(*CASES[name])).text.splitlines()
    for number, line in enumerate(lines):
        if "__syncthreads();" in line:
            assert "//" in line or lines[number - 1].strip().startswith("//"), line


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_spec_gives_the_same_bytes(kernel: KernelName) -> None:
    spec = spec_of(kernel, "a100", {"d": 128})
    assert render(spec).text == render(spec).text
    assert render(spec).text.count(f" {kernel}(") == 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_product_of_an_index_and_a_stride_is_32_bit(kernel: KernelName) -> None:
    """Strides are 64-bit members, so a product with one is 64-bit; none is narrowed (BUG-09)."""
    text = render(spec_of(kernel, "a100", {"d": 128})).text
    assert "i64 batch, head, row;" in text
    stride = r"\b(?:Q|K|V|O|dO|dQ|dK|dV)\.(?:row|head|batch)\b"
    assert not re.search(rf"static_cast<(?:int|u32)>\([^)]*{stride}", text)
    assert not re.search(rf"\b(?:int|u32) \w+ = [^;]*{stride}", text)

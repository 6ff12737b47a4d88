"""Rounding is to nearest, ties to even."""

import numpy as np
import pytest
import torch
from flashsmith.spec.dtype import EPSILON, round_to, widen
from flashsmith.spec.problem import Dtype

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_agrees_with_pytorch(dtype: Dtype) -> None:
    """Random numbers of every size, ties, infinities and numbers that overflow."""
    random = np.random.default_rng(0)
    values = random.standard_normal(4096).astype(np.float32) * 10.0 ** random.integers(-9, 9, 4096)
    ties = (np.arange(1, 2000, dtype=np.uint32) << 15).view(np.float32)
    values = np.concatenate(
        [values.astype(np.float32), ties, np.float32([np.inf, -np.inf, 1e38, 65519.0, 65520.0, 0.0, -0.0])]
    )
    want = torch.from_numpy(values).to(TORCH[dtype]).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(round_to(values, dtype), want)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_widening_is_exact_and_nan_stays(dtype: Dtype) -> None:
    bits = round_to([1.0, -3.5, np.nan, np.inf, 2.0**-14], dtype)
    np.testing.assert_array_equal(widen(bits, dtype), [1.0, -3.5, np.nan, np.inf, 2.0**-14])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_epsilon_is_the_largest_relative_error(dtype: Dtype) -> None:
    values = np.linspace(1, 2, 100001)
    errors = np.abs(widen(round_to(values, dtype), dtype) - values) / values
    assert 0.98 * EPSILON[dtype] < errors.max() <= EPSILON[dtype]

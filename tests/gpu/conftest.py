"""What needs a GPU is skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """The device that the tests run on."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or a PyTorch without CUDA")
    return torch.device("cuda", torch.cuda.current_device())

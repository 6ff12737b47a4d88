"""Hand PyTorch's tensors to an engine and take its results back as PyTorch's tensors."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from .emulated import EmulatedEngine
from .engine import Engine, Tensor


class TorchEngine(Protocol):
    """An engine, and the way of PyTorch's tensors into and out of it."""

    engine: Engine
    gpu: str  # whose kernels it runs; `auto` for the GPU that is present

    def given(self, x: torch.Tensor) -> Tensor:
        """`x` with its strides, within reach of the engine's kernels; 16-bit floats as their bits."""
        ...

    def taken(self, x: Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A result of the engine's as a tensor of `dtype`."""
        ...


class EmulatedTensors:
    """CPU tensors on the emulator: copied into its memory and out of it. FLASHSMITH_GPU names the GPU, else a100."""

    def __init__(self) -> None:
        self.engine: Engine = EmulatedEngine()
        self.gpu = os.environ.get("FLASHSMITH_GPU") or "a100"

    def given(self, x: torch.Tensor) -> Tensor:
        bits = x.detach().view(torch.uint16) if x.element_size() == 2 else x.detach()
        return self.engine.tensor(bits.numpy())

    def taken(self, x: Tensor, dtype: torch.dtype) -> torch.Tensor:
        values = torch.from_numpy(self.engine.read(x))
        return values.view(dtype) if dtype.itemsize == 2 else values


def torch_engine(device: torch.device) -> TorchEngine:
    """The engine that runs kernels on tensors of `device`. Raises NotImplementedError where there is none."""
    if device.type == "cpu":
        return EmulatedTensors()
    raise NotImplementedError(
        f"no engine launches kernels on {device} yet; FLASHSMITH_ENGINE=torch runs the same algorithm in PyTorch."
    )

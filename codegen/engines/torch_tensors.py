"""Hand PyTorch's tensors to an engine and take its results back as PyTorch's tensors."""

from __future__ import annotations

import os
import threading
from typing import Protocol

import torch

from ..errors import UsageError
from ..spec.gpu import identify, served_gpu
from .cuda import CudaEngine, cuda_engine
from .driver import Driver
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


class CudaTensors:
    """CUDA tensors on their own device: nothing is copied. FLASHSMITH_GPU may name another GPU of its sm."""

    def __init__(self, engine: CudaEngine) -> None:
        self.cuda = engine
        self.engine: Engine = engine
        self.gpu = _known_as(engine.driver)

    def given(self, x: torch.Tensor) -> Tensor:
        return self.cuda.given(x)

    def taken(self, x: Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.cuda.torch(x).view(dtype)


_on_cuda: dict[int, CudaTensors] = {}  # one engine a device, and so one module a device
_making = threading.Lock()


def torch_engine(device: torch.device) -> TorchEngine:
    """The engine that runs kernels on tensors of `device`. Raises UsageError where there is none."""
    if device.type == "cpu":
        return EmulatedTensors()
    if device.type != "cuda":
        raise UsageError(f"no kernels run on {device}; FLASHSMITH_ENGINE=torch runs the same algorithm in PyTorch.")
    index = torch.cuda.current_device() if device.index is None else device.index
    with _making:
        if index not in _on_cuda:
            _on_cuda[index] = CudaTensors(cuda_engine(index))
        return _on_cuda[index]


def _known_as(driver: Driver) -> str:
    """The key of the GPU whose kernels serve a device. Raises UnknownGpu, or UsageError if FLASHSMITH_GPU misfits."""
    name = os.environ.get("FLASHSMITH_GPU")
    gpu = served_gpu(name or identify(driver.name, sms=driver.sms, sm=driver.sm).key)
    if gpu.sm != driver.sm:
        raise UsageError(f"FLASHSMITH_GPU={name} is sm_{gpu.sm}, and {driver.name} is sm_{driver.sm}.")
    return gpu.key


def _after_fork() -> None:
    """A child inherits handles that mean nothing to it, and maybe a lock that nobody will open."""
    global _making
    _making = threading.Lock()
    _on_cuda.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

"""Ask CUDA for the few things that the engine needs: CuPy calls the driver, PyTorch says which stream and which memory.

Nothing of CUDA is touched by importing this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch

from ..errors import LaunchError, UnknownGpu, UsageError
from ..spec.gpu import Gpu, identify

Handle = int  # of a function that is loaded; valid on one device


class Driver(Protocol):
    """One device as the engine sees it. Tests stand a recorder in its place."""

    index: int  # of the device
    memory: torch.device  # where PyTorch puts the tensors that its kernels reach

    @property
    def name(self) -> str:
        """As NVIDIA sells it."""
        ...

    @property
    def sm(self) -> int:
        """Compute capability times ten."""
        ...

    @property
    def sms(self) -> int:
        """Multiprocessors."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Make the device current, for PyTorch and for the driver, and put back what was."""
        ...

    def stream(self) -> int:
        """PyTorch's current stream on the device."""
        ...

    def capturing(self) -> bool:
        """Whether that stream is being captured into a CUDA graph."""
        ...

    def load(self, cubin: bytes, name: str) -> Handle:
        """The function `name` of machine code. Raises LaunchError."""
        ...

    def allow_smem(self, function: Handle, smem_bytes: int) -> None:
        """Let launches of `function` ask for that much dynamic shared memory. Raises LaunchError."""
        ...

    def launch(self, function: Handle, grid: int, block: int, smem: int, stream: int, parameters: int) -> None:
        """One launch; `parameters` is the address of an array of pointers to the arguments. Raises LaunchError."""
        ...

    def synchronize(self) -> None:
        """Wait for all work on the device. Raises LaunchError if any of it failed."""
        ...


class CudaDriver:
    """The real thing. Made for a device that is there; see `cuda_device`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.memory = torch.device("cuda", index)
        self._properties = torch.cuda.get_device_properties(index)

    @property
    def name(self) -> str:
        return str(self._properties.name)

    @property
    def sm(self) -> int:
        return int(10 * self._properties.major + self._properties.minor)

    @property
    def sms(self) -> int:
        return int(self._properties.multi_processor_count)

    @contextmanager
    def current(self) -> Iterator[None]:
        from cupy.cuda import runtime

        with torch.cuda.device(self.index):
            # PyTorch skips the call when its device is right already, and a thread that never called the runtime has no
            # context then. The guard around this restores the device without waking any other.
            runtime.setDevice(self.index)
            yield

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def load(self, cubin: bytes, name: str) -> Handle:
        from cupy.cuda import driver

        try:  # never unloaded: an unload inside a graph capture would break it
            return int(driver.moduleGetFunction(driver.moduleLoadData(cubin), name))
        except driver.CUDADriverError as error:
            raise LaunchError(f"{self.name} does not load {name}: {error}") from error

    def allow_smem(self, function: Handle, smem_bytes: int) -> None:
        from cupy.cuda import driver

        try:
            driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)
        except driver.CUDADriverError as error:
            raise LaunchError(f"{self.name} does not give a block {smem_bytes} B of shared memory: {error}") from error

    def launch(self, function: Handle, grid: int, block: int, smem: int, stream: int, parameters: int) -> None:
        from cupy.cuda import driver

        try:
            driver.launchKernel(function, grid, 1, 1, block, 1, 1, smem, stream, parameters, 0)
        except driver.CUDADriverError as error:
            raise LaunchError(f"{self.name}: {error}") from error

    def synchronize(self) -> None:
        try:
            torch.cuda.synchronize(self.index)
        except RuntimeError as error:  # what PyTorch makes of every CUDA error
            raise LaunchError(f"{self.name}: {str(error).splitlines()[0]}") from error


def cuda_device(index: int | None = None) -> CudaDriver:
    """The device of that index, else PyTorch's current one. Raises UsageError where PyTorch has none."""
    reason = why_no_cuda() or ("" if torch.cuda.is_available() else "no CUDA device is here, or no driver answers.")
    if reason:
        raise UsageError(f"{reason} The emulator needs none.")
    return CudaDriver(torch.cuda.current_device() if index is None else index)


def why_no_cuda() -> str:
    """Why this PyTorch can hold no tensors for the engine; "" if it can where there is a device."""
    if torch.version.cuda is not None:
        return ""
    return (
        f"PyTorch {torch.__version__} is built without CUDA, and it holds the kernels' tensors: install a CUDA build."
    )


def find_device(gpu: Gpu) -> int | None:
    """The index of the first device present that is a `gpu`; None if there is none. Makes no context."""
    return next(iter(find_devices(gpu)), None)


def find_devices(gpu: Gpu) -> list[int]:
    """The indices of all devices present that are a `gpu`. Makes no context."""
    from cupy.cuda import runtime

    found: list[int] = []
    try:
        for index in range(runtime.getDeviceCount()):
            seen = runtime.getDeviceProperties(index)
            with suppress(UnknownGpu):
                name, sm = seen["name"].decode(), 10 * seen["major"] + seen["minor"]
                if identify(name, sms=seen["multiProcessorCount"], sm=sm).key == gpu.key:
                    found.append(index)
    except runtime.CUDARuntimeError:  # no driver
        return []
    return found

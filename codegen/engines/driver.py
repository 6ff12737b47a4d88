"""Ask CUDA for the few things that the engine needs: CuPy calls the driver, PyTorch says which stream and which memory.

Nothing of CUDA is touched by importing this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from ..errors import LaunchError, UsageError

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
    if torch.version.cuda is None:
        raise UsageError(
            f"PyTorch {torch.__version__} is built without CUDA, and it holds the CUDA engine's tensors. "
            "Install a CUDA build of torch."
        )
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device is here, or its driver does not answer; --engine emulator needs none.")
    return CudaDriver(torch.cuda.current_device() if index is None else index)


def device_names() -> tuple[str, ...]:
    """NVIDIA's names of the devices present, by index; none where there is no driver. Makes no context."""
    from cupy.cuda import runtime

    try:
        count = runtime.getDeviceCount()
        return tuple(runtime.getDeviceProperties(index)["name"].decode() for index in range(count))
    except runtime.CUDARuntimeError:
        return ()

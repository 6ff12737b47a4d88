"""Run kernels on a CUDA device: PyTorch owns the memory and the stream, the driver loads and launches."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from ..compile import Binary
from ..errors import LaunchError, UsageError
from ..spec.kernel import ARG_BYTES, Arg
from .driver import Driver, Handle, cuda_device
from .engine import Tensor, Value
from .tensor_map import Boxes, encode

# 16-bit floats are held as their bits; PyTorch computes with int16 everywhere, with uint16 hardly anywhere.
TORCH: dict[str, torch.dtype] = {
    "uint16": torch.int16, "float32": torch.float32, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip
NUMPY = {kind: name for name, kind in TORCH.items()}
FORMAT = {
    "int": "<i", "float": "<f", "float*": "<Q", "const float*": "<Q", "const int*": "<Q", "const i64*": "<Q",
}  # fmt: skip
ALIGN = 128  # bytes of an argument, from which the driver copies it: it changes tensor maps in place, if they lie so


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A kernel loaded on one device."""

    function: Handle
    key: str
    signature: tuple[Arg, ...]


class CudaEngine:
    """An Engine on one device: all of it on PyTorch's current stream there, whatever device is current.

    `poison` fills new tensors with NaN, so that what a kernel does not write is seen to be missing.
    """

    name = "cuda"

    def __init__(self, driver: Driver, *, poison: bool = False) -> None:
        self.driver = driver
        self.poison = poison
        self._kernels: dict[tuple[bytes, str], CudaKernel] = {}
        self._loading = threading.Lock()

    @property
    def sms(self) -> int:
        return self.driver.sms

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """A copy with the array's strides; made contiguous if one of them is negative, which PyTorch has not."""
        array = np.ascontiguousarray(array) if min(array.strides, default=0) < 0 else array
        strides = tuple(s // array.itemsize for s in array.strides)
        host = torch.from_numpy(np.array(_span(array)))
        flat = _bits(host).to(self.driver.memory)
        return Tensor(flat.data_ptr(), array.shape, strides, array.dtype, flat)

    def given(self, x: torch.Tensor) -> Tensor:
        """A tensor that lies on the device already, with its strides. Raises UsageError if it lies elsewhere."""
        if x.device != self.driver.memory:
            raise UsageError(f"a tensor is on {x.device}, and the kernel runs on {self.driver.memory}.")
        bits = _bits(x.detach())
        return Tensor(bits.data_ptr(), tuple(bits.shape), bits.stride(), np.dtype(NUMPY[bits.dtype]), bits)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        out = torch.empty(shape, dtype=TORCH[np.dtype(dtype).name], device=self.driver.memory)
        if self.poison:
            out.view(torch.int16).fill_(-1)  # all bits set: NaN in every float format
        return self.given(out)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        return self.given(torch.zeros(shape, dtype=TORCH[np.dtype(dtype).name], device=self.driver.memory))

    def contiguous(self, tensor: Tensor) -> Tensor:
        return self.given(self.torch(tensor).clone(memory_format=torch.contiguous_format))

    def read(self, tensor: Tensor) -> NDArray[Any]:
        """The elements, once all work on the device is done. Raises LaunchError if any of it failed."""
        self.driver.synchronize()
        return self.torch(tensor).cpu().numpy().view(tensor.dtype)

    def torch(self, tensor: Tensor) -> torch.Tensor:
        """The tensor as PyTorch sees it, 16-bit floats as int16; the same memory."""
        owner = tensor.owner
        if not isinstance(owner, torch.Tensor):
            raise LaunchError("a tensor of another engine was given to the CUDA engine.")
        first = owner.storage_offset() + (tensor.address - owner.data_ptr()) // tensor.dtype.itemsize
        return torch.as_strided(owner, tensor.shape, tensor.strides, first)

    def tensor_map(self, boxes: Boxes) -> bytes:
        return encode(boxes)

    def load(self, binary: Binary) -> CudaKernel:
        """The kernel on this device: loaded by the first to ask, kept for the life of the process.

        Raises LaunchError for machine code of another kind of GPU, and inside the capture of a CUDA graph.
        """
        place = (binary.cubin, binary.spec.kernel)
        found = self._kernels.get(place)
        if found is None:
            with self._loading:
                found = self._kernels.get(place) or self._load(binary)
                self._kernels[place] = found
        return found

    def _load(self, binary: Binary) -> CudaKernel:
        spec, sm = binary.spec, self.driver.sm
        if spec.sm // 10 != sm // 10 or spec.sm > sm:
            raise LaunchError(f"{spec.key} is machine code for sm_{spec.sm}; {self.driver.name} is sm_{sm}.")
        with self.driver.current():
            if self.driver.capturing():
                raise LaunchError(
                    f"{spec.key} is not loaded yet, and loading would break the CUDA graph that is being captured. "
                    "Run the call once before the capture, with the same shapes."
                )
            function = self.driver.load(binary.cubin, spec.kernel)
            # Always, not only past 48 KiB: static shared memory counts against that limit as well.
            self.driver.allow_smem(function, binary.smem_bytes)
        return CudaKernel(function, spec.key, spec.signature)

    def launch(self, kernel: CudaKernel, *, grid: int, block: int, smem: int, args: Sequence[Value]) -> None:
        """One launch on PyTorch's current stream; what cannot be launched raises LaunchError at once.

        A fault inside the kernel shows at the next synchronisation, as every CUDA error does.
        """
        parameters, buffer = packed(kernel, args)
        with self.driver.current():
            try:
                self.driver.launch(
                    kernel.function, grid, block, smem, self.driver.stream(), ctypes.addressof(parameters)
                )  # fmt: skip
            except LaunchError as error:
                raise LaunchError(f"{kernel.key}, {grid} blocks of {block} threads, {smem} B: {error}") from error
        del buffer  # the driver has copied it


def packed(kernel: CudaKernel, args: Sequence[Value]) -> tuple[ctypes.Array[Any], ctypes.Array[Any]]:
    """An array of pointers to the arguments, and the buffer that they point into; each as wide as its type.

    Raises LaunchError for a value that does not fit its parameter.
    """
    if len(args) != len(kernel.signature):
        raise LaunchError(f"{kernel.key} takes {len(kernel.signature)} arguments; {len(args)} were given.")
    widest = -(-max(ARG_BYTES.values()) // ALIGN) * ALIGN
    buffer = ctypes.create_string_buffer(widest * (len(args) + 1))
    base = -(-ctypes.addressof(buffer) // ALIGN) * ALIGN
    pointers = (ctypes.c_void_p * len(args))()
    for n, (arg, value) in enumerate(zip(kernel.signature, args, strict=True)):
        data = _encoded(kernel.key, arg, value)
        pointers[n] = base + n * widest
        ctypes.memmove(base + n * widest, data, len(data))
    return pointers, buffer


def _encoded(key: str, arg: Arg, value: Value) -> bytes:
    form = FORMAT.get(arg.type)
    try:
        data = value if form is None else struct.pack(form, value)
    except struct.error as error:
        raise LaunchError(f"{key}: {arg.name}={value!r} is no {arg.type}: {error}.") from error
    if not isinstance(data, bytes) or len(data) != ARG_BYTES[arg.type]:
        raise LaunchError(f"{key}: {arg.name} is a {arg.type} of {ARG_BYTES[arg.type]} B; {value!r} was given.")
    return data


def cuda_engine(index: int | None = None, *, poison: bool = False) -> CudaEngine:
    """An engine on that device, by default PyTorch's current one. Raises UsageError where there is none."""
    return CudaEngine(cuda_device(index), poison=poison)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """16-bit floats as their bits."""
    return x.view(torch.int16) if x.element_size() == 2 else x


def _span(array: NDArray[Any]) -> NDArray[Any]:
    """The memory from an array's first to its last element, flat."""
    if array.size == 0:
        return np.empty(1, array.dtype)
    last = sum((n - 1) * s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, (last + 1,), (array.itemsize,), writeable=False)

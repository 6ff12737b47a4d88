"""Run kernels on the CPU: the PTX that NVRTC made, executed by the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..compile import Binary
from ..emulator import GlobalMemory, Kernel, Report, encode_tensor_map, launch, parse
from ..errors import LaunchError
from ..spec.problem import Dtype
from .engine import Tensor, Value
from .tensor_map import SWIZZLE, Boxes

_ELEMENTS: dict[Dtype, str] = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}


class EmulatedEngine:
    """An Engine on the emulator. `reports` holds one Report a launch: what it counted and the races it found.

    What is asynchronous happens at the last moment that a kernel's waits allow, or, unless `late`, at the first. `sms`:
    the multiprocessors that kernels are told of, those of an H100; nothing runs on them.
    """

    name = "emulator"

    def __init__(self, *, check_races: bool = False, late: bool = True, sms: int = 132) -> None:
        self.memory = GlobalMemory()
        self.late, self.sms = late, sms
        self.check_races = check_races
        self.reports: list[tuple[str, Report]] = []

    def tensor(self, array: NDArray[Any]) -> Tensor:
        span, first = _span(array)
        base = self.memory.upload(span)
        strides = tuple(s // array.itemsize for s in array.strides)
        return Tensor(base + first * array.itemsize, array.shape, strides, array.dtype)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        return _contiguous(self.memory.empty(shape, np.dtype(dtype)), shape, np.dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        return self.tensor(np.zeros(shape, dtype))

    def contiguous(self, tensor: Tensor) -> Tensor:
        return self.tensor(np.ascontiguousarray(self.read(tensor)))

    def read(self, tensor: Tensor) -> NDArray[Any]:
        if 0 in tensor.shape:
            return np.empty(tensor.shape, tensor.dtype)
        steps = [(n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        size = tensor.dtype.itemsize
        flat = self.memory.read(tensor.address + low * size, (high - low + 1,), tensor.dtype)
        strides = [s * size for s in tensor.strides]
        return np.lib.stride_tricks.as_strided(flat[-low:], tensor.shape, strides).copy()

    def tensor_map(self, boxes: Boxes) -> bytes:
        element = _ELEMENTS[boxes.dtype]
        try:
            return encode_tensor_map(boxes.address, boxes.shape, boxes.strides, boxes.box, element, SWIZZLE)
        except ValueError as error:
            raise LaunchError(f"no tensor map for {boxes}: {error}") from error

    def load(self, binary: Binary) -> Kernel:
        return _kernel(binary.ptx, binary.spec.kernel)

    def launch(self, kernel: Kernel, *, grid: int, block: int, smem: int, args: Sequence[Value]) -> None:
        report = launch(
            kernel, grid, block, args, memory=self.memory, shared_bytes=smem, check_races=self.check_races,
            late=self.late,
        )  # fmt: skip
        self.reports.append((kernel.name, report))


@lru_cache(maxsize=128)
def _kernel(ptx: str, name: str) -> Kernel:
    """Parsing and lowering cost more than a small launch, so they are done once a text, for the latest texts."""
    return parse(ptx).kernels[name]


def _contiguous(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    strides = tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))
    return Tensor(address, shape, strides, dtype)


def _span(array: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """The memory between an array's lowest and highest element, flat, and the index of its first element in it."""
    if array.size == 0:
        return np.empty(1, array.dtype), 0
    steps = [(n - 1) * s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True)]
    low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
    lowest = array[tuple(slice(None, None, -1 if s < 0 else 1) for s in array.strides)]  # from the lowest address
    flat = np.lib.stride_tricks.as_strided(lowest, (high - low + 1,), (array.itemsize,))
    return flat, -low

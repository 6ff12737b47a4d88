"""Repeat a call of the kernels whose shapes were seen before: allocate, put addresses in place, launch.

The first call of a shape runs through `run.py` on a Recorder, which notes what was allocated and launched. A later call
with the same shapes, strides and scale differs from it in addresses only, so nothing is looked up, computed or packed
again: a few microseconds of Python instead of some fifty.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import DTypeLike, NDArray

from ..compile import Binary
from ..engines.cuda import TORCH, CudaEngine, CudaKernel, packed
from ..engines.engine import Tensor, Value
from ..engines.tensor_map import Boxes, move
from ..spec.kernel import TENSOR_MAP

ALIGN = 16  # bytes that rows must start on to be read in place, as they were when they were recorded


class Recorder:
    """A CUDA engine that notes its allocations and launches. `simple`: there was nothing else."""

    name = "cuda"

    def __init__(self, engine: CudaEngine) -> None:
        self.engine = engine
        self.simple = True
        self.made: list[tuple[Tensor, bool]] = []  # and whether it is zeroed
        self.mapped: dict[Value, int] = {}  # of each tensor map, the address of its tensor
        self.launches: list[tuple[CudaKernel, int, int, int, tuple[Value, ...]]] = []

    @property
    def sms(self) -> int:
        return self.engine.sms

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        self.made.append((self.engine.empty(shape, dtype), False))
        return self.made[-1][0]

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        self.made.append((self.engine.zeros(shape, dtype), True))
        return self.made[-1][0]

    def tensor(self, array: NDArray[Any]) -> Tensor:
        self.simple = False
        return self.engine.tensor(array)

    def contiguous(self, tensor: Tensor) -> Tensor:
        self.simple = False
        return self.engine.contiguous(tensor)

    def read(self, tensor: Tensor) -> NDArray[Any]:
        self.simple = False
        return self.engine.read(tensor)

    def tensor_map(self, boxes: Boxes) -> bytes:
        data = self.engine.tensor_map(boxes)
        self.mapped[data] = boxes.address
        return data

    def load(self, binary: Binary) -> CudaKernel:
        return self.engine.load(binary)

    def launch(self, kernel: CudaKernel, *, grid: int, block: int, smem: int, args: Sequence[Value]) -> None:
        self.launches.append((kernel, grid, block, smem, tuple(args)))
        self.engine.launch(kernel, grid=grid, block=block, smem=smem, args=args)


@dataclass(frozen=True, slots=True)
class _Launch:
    """One launch whose arguments are packed but for the addresses of its tensors."""

    function: int
    grid: int
    block: int
    smem: int
    parameters: int  # address of the array of pointers to the arguments
    addresses: tuple[tuple[ctypes.c_uint64, int], ...]  # a place in the arguments, and which tensor's address it takes
    maps: tuple[tuple[int, int], ...]  # where a tensor map lies in the arguments, and of which tensor
    memory: object  # what `parameters` points into


@dataclass(slots=True)
class Replay:
    """A recorded call, ready to be made again on other tensors of the same shapes and strides."""

    engine: CudaEngine
    launches: tuple[_Launch, ...]
    made: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]  # shape, dtype and whether it is zeroed
    results: tuple[tuple[int, bool] | None, ...]  # which of `made`; as it is, or [B, H, N, d] over [B, N, H, d]
    views: tuple[int, ...]  # the inputs whose rows are read by 16 bytes or by TMA
    lock: threading.Lock = field(default_factory=threading.Lock)  # arguments are in one place for all threads

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...] | None:
        """The results, in the order of their recording; None if one of `views` does not start on 16 bytes."""
        addresses = [x.data_ptr() for x in inputs]
        for which in self.views:
            if addresses[which] % ALIGN:
                return None
        driver, like = self.engine.driver, inputs[0]
        made = [like.new_zeros(s, dtype=t) if z else like.new_empty(s, dtype=t) for s, t, z in self.made]
        addresses += [x.data_ptr() for x in made]
        with self.lock, driver.current():  # the driver copies the arguments before it returns
            stream = driver.stream()
            for launch in self.launches:
                for place, which in launch.addresses:
                    place.value = addresses[which]
                for at, which in launch.maps:
                    move(at, addresses[which])
                driver.launch(launch.function, launch.grid, launch.block, launch.smem, stream, launch.parameters)
        results = self.results
        return tuple([r if r is None else made[r[0]] if r[1] else made[r[0]].transpose(1, 2) for r in results])


def replay_of(
    recorder: Recorder, inputs: Mapping[str, Tensor], results: Sequence[Tensor | None], dtype: torch.dtype
) -> Replay | None:
    """The recorded call as a Replay; None if it did more than allocate and launch, or read an input that it copied.

    None too if it made a tensor of no elements: the address of all of them is 0, so that they cannot be told apart.

    `inputs` by the names that kernels know them by, in the order in which a replay is given them; `dtype` is theirs.
    """
    order = {name: n for n, name in enumerate(inputs)}
    by_rows = {
        arg.tensor
        for kernel, *_ in recorder.launches
        for arg in kernel.signature
        if arg.type in ("View<const T>", TENSOR_MAP)
    }
    views = tuple(order[name] for name in inputs if name in by_rows)
    if not recorder.simple or not recorder.launches or not all(x.aligned for n, x in inputs.items() if n in by_rows):
        return None
    if not all(tensor.address for tensor, _ in recorder.made):
        return None
    address = {tensor.address: len(order) + n for n, (tensor, _) in enumerate(recorder.made)}
    launches = []
    for kernel, grid, block, smem, args in recorder.launches:
        pointers, buffer = packed(kernel, args)
        places, maps = [], []
        for n, arg in enumerate(kernel.signature):
            if arg.type in ("int", "float", "Walk"):
                continue
            if arg.type == TENSOR_MAP:
                moved = order[arg.tensor] if arg.tensor in order else address[recorder.mapped[args[n]]]
                maps.append((pointers[n] or 0, moved))
                continue
            place = ctypes.c_uint64.from_address(pointers[n] or 0)  # a View begins with its address
            if not place.value:  # null: an optional tensor that is not there
                continue
            # By name first: q and k may be one tensor in this call and two in the next.
            places.append((place, order[arg.name] if arg.name in order else address[place.value]))
        parameters = ctypes.addressof(pointers)
        launches.append(
            _Launch(kernel.function, grid, block, smem, parameters, tuple(places), tuple(maps), (pointers, buffer))
        )
    made = tuple(
        (tensor.shape, dtype if tensor.dtype.itemsize == 2 else TORCH[tensor.dtype.name], zeroed)
        for tensor, zeroed in recorder.made
    )
    found = tuple(None if x is None else _place(x, recorder, address[x.address] - len(order)) for x in results)
    return Replay(recorder.engine, tuple(launches), made, found, views)


def _place(result: Tensor, recorder: Recorder, index: int) -> tuple[int, bool]:
    made = recorder.made[index][0]
    return index, (made.shape, made.strides) == (result.shape, result.strides)

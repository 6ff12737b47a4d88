"""Encode the tensor maps that TMA instructions read: what a driver keeps secret, kept here in a layout of our own.

The checks are those that the driver documents for cuTensorMapEncodeTiled without interleaving.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .swizzle import SPANS

Array: TypeAlias = "NDArray[Any]"

ELEMENT_BYTES = {"u8": 1, "f16": 2, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}
_TYPES = tuple(ELEMENT_BYTES)
_MAGIC = b"tiledmap"
_LAYOUT = struct.Struct("<8sQBBBx4x5Q4Q5H")
MAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor in global memory and the box that one instruction copies; dimensions are listed innermost first.

    `shape` and `box` count elements, `strides` are the bytes of dimensions 1 and up, dimension 0 is contiguous.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def box_bytes(self) -> int:
        """Bytes that a box takes in shared memory."""
        return math.prod(self.box) * self.element_bytes

    def pieces(self, corner: Sequence[int]) -> tuple[int, Array, Array]:
        """The box at a corner, in pieces: their bytes, their global addresses, and which of them lie in the tensor.

        Pieces are listed as they lie in shared memory before swizzling. They have 16 bytes where the edges of the
        tensor and the corner allow it, else the size of an element.
        """
        size = self.element_bytes
        # the box may stick out of the tensor within 16 bytes, or begin between multiples of them
        piece = 16 if not (corner[0] * size % 16 or self.shape[0] * size % 16) else size
        place = _grid(self.box, piece // size)
        index = place + np.array(corner, "i8")[:, None]
        inside = ((index >= 0) & (index < np.array(self.shape, "i8")[:, None])).all(0)
        strides = np.array((size, *self.strides), "i8")
        return piece, self.address + strides @ index, inside


@lru_cache(maxsize=64)
def _grid(box: tuple[int, ...], step: int) -> Array:
    """Indices [rank, pieces] of every `step`-th element of a box, the innermost running fastest."""
    return np.indices(box[::-1]).reshape(len(box), -1)[::-1, ::step]


def encode_tensor_map(
    address: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], dtype: str, swizzle: int = 0
) -> bytes:
    """The 128 bytes of a kernel argument that describe a tensor to the emulator; ValueError says what is not allowed.

    >>> read_tensor_map(encode_tensor_map(0x1000, (64, 9), (128,), (64, 8), "bf16", 128)).box_bytes
    1024
    """
    rank = len(shape)
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"elements of type {dtype}; known are {', '.join(_TYPES)}")
    if swizzle not in SPANS:
        raise ValueError(f"a swizzle of {swizzle} bytes; it must be one of {SPANS}")
    if not 1 <= rank <= 5 or len(box) != rank or len(strides) != rank - 1:
        raise ValueError(f"{rank} dimensions, {len(strides)} strides, box of {len(box)}: 1 to 5, one less, as many")
    if address % 16:
        raise ValueError(f"the tensor starts at {address:#x}; it must start at a multiple of 16 bytes")
    for axis, (extent, width) in enumerate(zip(shape, box, strict=True)):
        if not 1 <= extent <= 1 << 32:
            raise ValueError(f"dimension {axis} has {extent} elements; it must have 1 to 2^32")
        if not 1 <= width <= 256:
            raise ValueError(f"the box has {width} elements along dimension {axis}; it must have 1 to 256")
    for axis, stride in enumerate(strides, 1):
        if stride % 16 or not 0 <= stride < 1 << 40:
            raise ValueError(f"the stride of dimension {axis} is {stride} bytes; a multiple of 16 below 2^40 is needed")
    inner = box[0] * ELEMENT_BYTES[dtype]
    if inner % 16 or (swizzle and inner > swizzle):
        limit = f" and at most the {swizzle} of the swizzle" if swizzle else ""
        raise ValueError(f"the box is {inner} bytes wide; that must be a multiple of 16{limit}")
    five = [*shape, 1, 1, 1, 1][:5], [*strides, 0, 0, 0, 0][:4], [*box, 1, 1, 1, 1][:5]
    code = _TYPES.index(dtype), swizzle
    packed = _LAYOUT.pack(_MAGIC, address, rank, *code, *five[0], *five[1], *five[2])
    return packed.ljust(MAP_BYTES, b"\0")


@lru_cache(maxsize=256)
def read_tensor_map(data: bytes) -> TensorMap | None:
    """The map that was encoded, None if these bytes are none."""
    magic, address, rank, code, swizzle, *numbers = _LAYOUT.unpack_from(data)
    if magic != _MAGIC:
        return None
    return TensorMap(
        address=address,
        dtype=_TYPES[code],
        shape=tuple(numbers[:rank]),
        strides=tuple(numbers[5 : 4 + rank]),
        box=tuple(numbers[9 : 9 + rank]),
        swizzle=swizzle,
    )

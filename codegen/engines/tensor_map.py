"""Cut a tensor into the boxes that TMA copies, and have the driver encode them as the kernel argument it reads."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from ..errors import LaunchError
from ..spec.kernel import ARG_BYTES, TENSOR_MAP
from ..spec.problem import Dtype
from ..spec.warpgroup_shape import PANEL, PANEL_ROW
from .engine import Tensor

SWIZZLE = PANEL_ROW  # bytes
MAP_BYTES = ARG_BYTES[TENSOR_MAP]
MAX_STRIDE = 1 << 40  # bytes

# CUtensorMapDataType, and what is constant here: no interleaving, a swizzle of 128 bytes, L2 sectors of 256 bytes are
# fetched as a whole, zeros for what lies outside the tensor (cuda.h).
_TYPES: dict[Dtype, int] = {"fp16": 6, "fp32": 7, "bf16": 9}
_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_256B, _FILL_ZEROS = 0, 3, 3, 0
_ALIGNMENT = 128  # of the structure: 64 before CUDA 13


@dataclass(frozen=True, slots=True)
class Boxes:
    """A tensor [batch, head, row, column] and the boxes of rows that are copied at once; listed innermost first."""

    address: int
    dtype: Dtype
    shape: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, of dimensions 1 and up
    box: tuple[int, ...]  # elements


def why_no_boxes(tensor: Tensor) -> str | None:
    """What of a tensor [batch, head, row, column] TMA cannot take, as a sentence; None if it takes all."""
    if 0 in tensor.shape:
        return "it is empty. Kernels without tensor maps take it."
    if not tensor.aligned:
        return "its rows are not contiguous, or do not start on 16 bytes."
    size = tensor.dtype.itemsize
    for n, stride in zip(tensor.shape[:-1], tensor.strides[:-1], strict=True):
        if n > 1 and not 0 < stride * size < MAX_STRIDE:
            return f"a stride of {stride * size} bytes; more than 0 and less than 2^40 are needed."
    return None


def boxes_of(tensor: Tensor, dtype: Dtype, rows: int) -> Boxes:
    """Boxes of `rows` rows and 64 columns. Raises LaunchError for a tensor that TMA cannot take."""
    reason = why_no_boxes(tensor)
    if reason:
        raise LaunchError(f"a tensor {list(tensor.shape)} has no boxes: {reason}")
    size = tensor.dtype.itemsize
    # Nobody steps along a dimension of one, whose stride may be anything.
    outer = [
        stride * size if n > 1 else PANEL * size
        for n, stride in zip(tensor.shape[:-1], tensor.strides[:-1], strict=True)
    ]
    return Boxes(tensor.address, dtype, tensor.shape[::-1], tuple(outer[::-1]), (PANEL, rows, 1, 1))


@lru_cache(maxsize=4096)
def encode(boxes: Boxes) -> bytes:
    """The 128 bytes of the kernel argument, by the driver that is loaded. Raises LaunchError where it refuses."""
    return encode_with(_driver(), boxes)


def move(place: int, address: int) -> None:
    """Give the map that lies at `place`, a multiple of 64, another tensor of the same shape, strides and dtype.

    `address` is a multiple of 16. Raises LaunchError where the driver refuses.
    """
    move_with(_driver(), place, address)


def move_with(driver: Any, place: int, address: int) -> None:
    """The same by a library that has cuTensorMapReplaceAddress."""
    error = driver.cuTensorMapReplaceAddress(ctypes.c_void_p(place), ctypes.c_void_p(address))
    if error:
        raise LaunchError(f"cuTensorMapReplaceAddress: error {error} of the driver for address {address:#x}.")


def encode_with(driver: Any, boxes: Boxes) -> bytes:
    """The same by a library that has cuTensorMapEncodeTiled. The structure's layout is the driver's secret."""
    rank = len(boxes.shape)
    memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    error = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(address), ctypes.c_int(_TYPES[boxes.dtype]), ctypes.c_uint32(rank),
        ctypes.c_void_p(boxes.address), (ctypes.c_uint64 * rank)(*boxes.shape),
        (ctypes.c_uint64 * (rank - 1))(*boxes.strides), (ctypes.c_uint32 * rank)(*boxes.box),
        (ctypes.c_uint32 * rank)(*[1] * rank), ctypes.c_int(_INTERLEAVE_NONE), ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_L2_256B), ctypes.c_int(_FILL_ZEROS),
    )  # fmt: skip
    if error:
        raise LaunchError(f"cuTensorMapEncodeTiled: error {error} of the driver for {boxes}.")
    return ctypes.string_at(address, MAP_BYTES)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")

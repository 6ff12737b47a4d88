"""Tensor maps: which tensors have them, and that the driver is asked for what the emulator is told."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from flashsmith.emulator import encode_tensor_map, read_tensor_map
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.engines.engine import Tensor
from flashsmith.engines.tensor_map import Boxes, boxes_of, encode_with, move_with, why_no_boxes
from flashsmith.errors import LaunchError

U16 = np.dtype(np.uint16)
TYPES = {9: "bf16", 6: "f16"}  # CUtensorMapDataType


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], address: int = 0x1000) -> Tensor:
    return Tensor(address, shape, strides, U16)


class StandIn:
    """A driver with the two calls, and the emulator's layout for the driver's secret one."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def cuTensorMapEncodeTiled(
        self, target: Any, kind: Any, rank: Any, address: Any, shape: Any, strides: Any, box: Any, steps: Any,
        interleave: Any, swizzle: Any, promotion: Any, fill: Any,
    ) -> int:  # fmt: skip
        assert target.value % 128 == 0 and len(shape) == len(box) == len(steps) == rank.value
        assert list(steps) == [1] * rank.value and (interleave.value, swizzle.value, fill.value) == (0, 3, 0)
        data = encode_tensor_map(address.value, shape, strides, box, TYPES[kind.value], 128)
        ctypes.memmove(target.value, data, len(data))
        return self.error

    def cuTensorMapReplaceAddress(self, target: Any, address: Any) -> int:
        assert target.value % 64 == 0
        old = read_tensor_map(ctypes.string_at(target.value, 128))
        assert old is not None
        data = encode_tensor_map(address.value, old.shape, old.strides, old.box, old.dtype, old.swizzle)
        ctypes.memmove(target.value, data, len(data))
        return self.error


def test_boxes_list_dimensions_from_the_inside() -> None:
    boxes = boxes_of(tensor((2, 6, 200, 72), (6 * 200 * 80, 200 * 80, 80, 1)), "bf16", 128)
    assert boxes == Boxes(0x1000, "bf16", (72, 200, 6, 2), (160, 32000, 192000), (64, 128, 1, 1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_driver_is_asked_for_what_the_emulator_is_told(dtype: Any) -> None:
    boxes = boxes_of(tensor((2, 6, 200, 64), (200 * 384, 64, 384, 1)), dtype, 80)
    data = encode_with(StandIn(), boxes)
    assert data == EmulatedEngine().tensor_map(boxes) and len(data) == 128
    seen = read_tensor_map(data)
    assert seen is not None and seen.box_bytes == 80 * 128 and seen.strides == (768, 128, 153600)


def test_a_map_moves_to_another_tensor_of_its_shape() -> None:
    """In place, and to what encoding it anew would have made."""
    shape, strides = (2, 6, 200, 64), (200 * 384, 64, 384, 1)
    first, then = (boxes_of(tensor(shape, strides, address), "bf16", 80) for address in (0x1000, 0x7F0000))
    memory = ctypes.create_string_buffer(encode_with(StandIn(), first), 128 + 64)
    place = -(-ctypes.addressof(memory) // 64) * 64
    ctypes.memmove(place, encode_with(StandIn(), first), 128)
    move_with(StandIn(), place, then.address)
    assert ctypes.string_at(place, 128) == encode_with(StandIn(), then)
    with pytest.raises(LaunchError, match="error 1 of the driver for address 0x10"):
        move_with(StandIn(error=1), place, 0x10)


def test_a_refusal_names_the_tensor() -> None:
    boxes = boxes_of(tensor((1, 1, 8, 64), (512, 512, 64, 1)), "bf16", 8)
    with pytest.raises(LaunchError, match=r"error 1 of the driver for Boxes\(address=4096"):
        encode_with(StandIn(error=1), boxes)


def test_no_driver_takes_more_than_the_emulator() -> None:
    with pytest.raises(LaunchError, match="must have 1 to 256"):
        EmulatedEngine().tensor_map(Boxes(16, "bf16", (64, 8, 1, 1), (128, 1024, 1024), (64, 512, 1, 1)))


@pytest.mark.parametrize(
    ("strides", "address", "reason"),
    [
        ((51200, 12800, 64, 1), 0x1000, None),
        ((51200, 12800, 64, 1), 0x1008, "16 bytes"),
        ((51200, 12800, 68, 1), 0x1000, "16 bytes"),
        ((51200, 12800, 64, 2), 0x1000, "contiguous"),
        ((51200, 0, 64, 1), 0x1000, "a stride of 0 bytes"),
        ((51200, 12800, -64, 1), 0x1000, "a stride of -128 bytes"),
        ((2**39, 12800, 64, 1), 0x1000, "less than 2\\^40"),
    ],
)
def test_what_tma_cannot_take(strides: tuple[int, ...], address: int, reason: str | None) -> None:
    x = tensor((2, 4, 200, 64), strides, address)
    said = why_no_boxes(x)
    if reason is None:
        assert said is None
        return
    assert said
    with pytest.raises(LaunchError, match=reason):
        boxes_of(x, "bf16", 64)


def test_a_dimension_of_one_has_any_stride() -> None:
    boxes = boxes_of(tensor((1, 1, 1, 64), (7, 0, -3, 1)), "bf16", 64)
    assert all(stride > 0 and stride % 16 == 0 for stride in boxes.strides)

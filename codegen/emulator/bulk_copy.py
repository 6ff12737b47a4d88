"""Issue bulk copies: find the bytes that each thread's cp.async.bulk names, and check them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .access import Access
from .addresses import OFFSET_MASK, PARAM_WINDOW
from .cluster_addresses import blocks_of_mask, check_alive
from .errors import EmulatorError, Misaligned, OutOfBounds
from .mbarriers import mbarrier_places
from .memory import BASE
from .swizzle import swizzled
from .tensor_map import MAP_BYTES, TensorMap, read_tensor_map
from .transfers import Transfer

Array: TypeAlias = "NDArray[Any]"

_TILE_ALIGNMENT = 128  # of a box in shared memory
_LINE_ALIGNMENT = 16  # of both ends and of the size of a copy without a tensor map


def load_tile(
    access: Access, tensor: Array, corner: Sequence[Array], target: Array, barrier: Array, mask: Array | None,
    lanes: Array | None, at: int,
) -> None:  # fmt: skip
    """cp.async.bulk.tensor from global to shared memory: elements outside the tensor become zero."""
    offset = _without_rank(access, target)
    copy_of = lambda lane: _tile(access, tensor, corner, offset, False, lane, at)  # noqa: E731
    _load(access, target, barrier, mask, lanes, at, copy_of)


def store_tile(
    access: Access, tensor: Array, corner: Sequence[Array], source: Array, adds: bool, lanes: Array | None, at: int
) -> None:
    """cp.async.bulk.tensor and cp.reduce.async.bulk.tensor from shared to global memory, cut at the tensor's edges."""
    _store(access, lanes, lambda lane: _tile(access, tensor, corner, source, adds, lane, at))


def load_line(
    access: Access, target: Array, source: Array, size: Array, barrier: Array, mask: Array | None,
    lanes: Array | None, at: int,
) -> None:  # fmt: skip
    """cp.async.bulk from global to shared memory."""
    offset = _without_rank(access, target)
    copy_of = lambda lane: _line(access, offset, source, size, False, lane, at)  # noqa: E731
    _load(access, target, barrier, mask, lanes, at, copy_of)


def store_line(
    access: Access, target: Array, source: Array, size: Array, adds: bool, lanes: Array | None, at: int
) -> None:
    """cp.async.bulk and cp.reduce.async.bulk from shared to global memory."""
    _store(access, lanes, lambda lane: _line(access, source, target, size, adds, lane, at))


def commit_bulk(access: Access, lanes: Array | None) -> None:
    """cp.async.bulk.commit_group."""
    access.batch.transfers.commit(access.threads(lanes))


def wait_for_bulk(access: Access, pending: int, lanes: Array | None) -> None:
    """cp.async.bulk.wait_group, with .read or without."""
    access.batch.transfers.wait(access.threads(lanes), pending)


def prefetch_map(access: Access, tensor: Array, lanes: Array | None, at: int) -> None:
    """prefetch.tensormap: nothing is cached here, but a map must be there."""
    for lane in access.active(lanes).tolist():
        _map_at(access, _of_lane(tensor, lane), lane, at)


# ---- issue


def _load(
    access: Access, target: Array, barrier: Array, mask: Array | None, lanes: Array | None, at: int,
    copy_of: Callable[[int], Transfer],
) -> None:  # fmt: skip
    """Issue the loads of the active lanes; all their barriers must exist before any begins.

    A multicast is a load to each block that its mask names, at the same offset as the target, and tells the mbarrier of
    that block at the same offset as the one that it names. It is read from global memory once.
    """
    places = mbarrier_places(access, barrier, lanes, at, in_cluster=True)
    targets = access.blocks_named(target, lanes)
    for lane, place, block in zip(access.active(lanes).tolist(), places.tolist(), targets.tolist(), strict=True):
        transfer = copy_of(lane)
        _count_load(access, transfer)
        stride = access.batch.shared_stride
        told = 8 * place // stride
        if mask is None and told != block:
            _fail(access, EmulatorError, lane, at, "the target and the mbarrier lie in different blocks")
        blocks = [block] if mask is None else blocks_of_mask(access, _of_lane(mask, lane), lane, at)
        for to in blocks:
            own = int(access.batch.block_of[transfer.thread])
            one = replace(transfer, shared=transfer.shared + (to - own) * stride, block=to)
            one.mbarrier = place + (to - told) * stride // 8
            if to != told:
                _check_told(access, one, lane)
            access.counters.async_copied_bytes += one.size * one.shared.size
            access.batch.transfers.load(one)


def _check_told(access: Access, transfer: Transfer, lane: int) -> None:
    """The mbarrier of another block that a multicast tells must be there, and so must the block."""
    lanes = np.array([lane])
    check_alive(access, np.array([transfer.block]), lanes, transfer.at)
    if not access.batch.mbarriers.exists(np.array([transfer.mbarrier]))[0]:
        where, rank = 8 * transfer.mbarrier % access.batch.shared_stride, transfer.block % access.batch.cluster_blocks
        text = f"no mbarrier was initialised at shared address {where:#x} of block {rank} of the cluster"
        _fail(access, EmulatorError, lane, transfer.at, text)


def _store(access: Access, lanes: Array | None, copy_of: Callable[[int], Transfer]) -> None:
    """Issue the stores and reductions of the active lanes."""
    for lane in access.active(lanes).tolist():
        transfer = copy_of(lane)
        _count_store(access, transfer)
        access.batch.transfers.store(transfer)


# ---- what a copy moves


def _without_rank(access: Access, address: Array) -> Array:
    """Offsets of addresses that may be those of another block of the cluster."""
    if access.batch.cluster_blocks == 1:
        return address
    offset: Array = address & address.dtype.type(OFFSET_MASK)
    return offset


def _of_lane(values: Array, lane: int) -> int:
    return int(values[lane] if values.ndim else values)


def _tile(
    access: Access, tensor: Array, corner: Sequence[Array], shared: Array, adds: bool, lane: int, at: int
) -> Transfer:
    map_ = _map_at(access, _of_lane(tensor, lane), lane, at)
    if adds and map_.dtype != "f32":
        _fail(access, EmulatorError, lane, at, f"sums of {map_.dtype} are not implemented")
    if len(corner) != len(map_.shape):
        _fail(
            access, EmulatorError, lane, at, f"{len(corner)} coordinates for a tensor of {len(map_.shape)} dimensions"
        )
    size, outside, inside = map_.pieces([_of_lane(value, lane) for value in corner])
    start = _of_lane(shared, lane)
    if start % _TILE_ALIGNMENT:
        _fail(access, Misaligned, lane, at, f"shared address {start:#x} is no multiple of {_TILE_ALIGNMENT}")
    _check_shared(access, start, map_.box_bytes, lane, at)
    offsets = swizzled(start + size * np.arange(outside.size), map_.swizzle)
    return _transfer(access, size, offsets, outside, inside, adds, lane, at)


def _line(access: Access, shared: Array, outside: Array, size: Array, adds: bool, lane: int, at: int) -> Transfer:
    start, address, count = _of_lane(shared, lane), _of_lane(outside, lane), _of_lane(size, lane)
    if start % _LINE_ALIGNMENT or address % _LINE_ALIGNMENT or count % _LINE_ALIGNMENT:
        text = f"shared address {start:#x}, global address {address:#x} and size {count} must be multiples of 16"
        _fail(access, Misaligned, lane, at, text)
    _check_shared(access, start, count, lane, at)
    steps = np.arange(0, count, 16)
    return _transfer(access, 16, start + steps, address + steps, np.ones(steps.size, bool), adds, lane, at)


def _transfer(
    access: Access, size: int, shared: Array, outside: Array, inside: Array, adds: bool, lane: int, at: int
) -> Transfer:
    thread, batch = access.low + lane, access.batch
    base = int(batch.shared_base[thread])
    offsets = outside - BASE
    _, found = batch.memory.find(offsets[inside], size)
    if not found.all():
        where = int(outside[inside][~found][0])
        _fail(access, OutOfBounds, lane, at, f"address {where:#x} ({size} bytes) is {batch.memory.describe(where)}")
    return Transfer(thread, at, size, shared + base, offsets, inside, int(batch.block_of[thread]), adds=adds)


def _map_at(access: Access, address: int, lane: int, at: int) -> TensorMap:
    batch = access.batch
    if address % 64:
        _fail(access, Misaligned, lane, at, f"the tensor map at {address:#x} is not at a multiple of 64 bytes")
    if address >= PARAM_WINDOW:
        data = bytes(batch.params[address - PARAM_WINDOW :][:MAP_BYTES])
    else:
        data = batch.memory.read(address, MAP_BYTES, "u1").tobytes()
    map_ = read_tensor_map(data) if len(data) == MAP_BYTES else None
    if map_ is None:
        _fail(access, EmulatorError, lane, at, f"there is no tensor map at {address:#x}; encode_tensor_map makes them")
    return map_


def _check_shared(access: Access, start: int, size: int, lane: int, at: int) -> None:
    limit = access.batch.shared_bytes
    if start < 0 or start + size > limit:
        text = f"address {start:#x} ({size} bytes) is outside the {limit} bytes of shared memory"
        _fail(access, OutOfBounds, lane, at, text)


def _fail(access: Access, error: type[Exception], lane: int, at: int, text: str) -> NoReturn:
    access.fail(error, at, np.array([lane]), 0, text)


def _count_load(access: Access, transfer: Transfer) -> None:
    access.counters.global_read_bytes += transfer.size * int(transfer.inside.sum())


def _count_store(access: Access, transfer: Transfer) -> None:
    written = transfer.outside[transfer.inside]
    index, _ = access.memory.find(written, transfer.size)
    access.counters.add_written(index, transfer.size, written.size)
    access.counters.global_written_bytes += transfer.size * written.size
    if transfer.adds:
        access.counters.atomic_bytes += transfer.size * written.size

"""Multiply matrices by whole warpgroups: wgmma products are issued, committed in groups, and awaited.

From issue to the wait that covers it the sums of a product are poison in the registers. A batch that is late computes
at that wait, reading shared memory and the registers of A as they are then; an early one computes when the group is
committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .access import Access
from .errors import DivergentBarrier, EmulatorError, OutOfBounds
from .matrix_descriptor import chunk_addresses, descriptor_is_plain
from .tensor import WIDEN

if TYPE_CHECKING:
    from .batch import Batch
    from .ordering import OrderDetector

Array: TypeAlias = "NDArray[Any]"

_ITEM = np.dtype("c16")  # 16 bytes: 8 numbers of an operand, or what four lanes hold of a register
_ROWS = 64
_WARPGROUP = 128
_LANDED = -1


class Operands(NamedTuple):
    """What a wgmma instruction says: names of D, and of A or none; layouts; the type of A and B."""

    D: tuple[str, ...]
    A: tuple[str, ...]
    transposed: tuple[bool, bool]
    kind: str


@dataclass(slots=True, eq=False)
class _Product:
    """One instruction of several warpgroups; `adds` says for each whether the sums continue."""

    operands: Operands
    warpgroups: Array
    group: Array
    a: Array
    b: Array
    adds: Array
    at: int

    def part(self, keep: Array) -> _Product:
        """That of some of the warpgroups."""
        arrays = (self.warpgroups[keep], self.group[keep], self.a[keep], self.b[keep], self.adds[keep])
        return _Product(self.operands, *arrays, self.at)

    def continues(self, other: _Product) -> bool:
        """Whether this adds to the same sums of the same warpgroups: then the two are one longer product."""
        return (
            self.operands.D == other.operands.D
            and bool(self.operands.A) == bool(other.operands.A)
            and self.operands.transposed == other.operands.transposed
            and self.operands.kind == other.operands.kind
            and bool(self.adds.all())
            and np.array_equal(self.warpgroups, other.warpgroups)
        )


@dataclass(slots=True, eq=False)
class _Sums:
    """Sums in flight [registers, threads], and for each warpgroup the group of the last product that adds to them."""

    values: Array
    group: Array


class GroupProducts:
    """wgmma of a batch. Warpgroups are numbered as they lie in it."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._group = np.zeros(-(-batch.threads // _WARPGROUP), "i4")
        self._issued: list[_Product] = []
        self._sums: dict[tuple[str, ...], _Sums] = {}

    def start(self) -> None:
        """Begin with new blocks."""
        self._group.fill(0)
        self._issued.clear()
        self._sums.clear()

    def issue(self, operands: Operands, warpgroups: Array, a: Array, b: Array, adds: Array, at: int) -> None:
        """Take the sums out of the registers, unless an earlier product already has, and queue the product."""
        sums = self._sums.get(operands.D)
        if sums is None:
            values = np.zeros((len(operands.D), self._batch.threads), "f4")
            sums = self._sums[operands.D] = _Sums(values, np.full(self._group.size, _LANDED, "i4"))
        fresh = sums.group[warpgroups] == _LANDED
        if fresh.any():
            lanes = _lanes(warpgroups[fresh])
            for row, name in zip(sums.values, operands.D, strict=True):
                register = self._batch.register(name).view("f4")
                row[lanes] = register[lanes]
                register[lanes] = np.nan
        group = self._group[warpgroups]
        sums.group[warpgroups] = group
        self._issued.append(_Product(operands, warpgroups, group, a, b, adds, at))
        if self._batch.order is not None:
            self._show(self._batch.order, self._issued[-1])

    def _show(self, order: OrderDetector, product: _Product) -> None:
        """Tell the race detector what is read."""
        batch, operands = self._batch, product.operands
        addresses = [chunk_addresses(product.b, 2 * len(operands.D), operands.transposed[1])]
        if not operands.A:
            addresses.append(chunk_addresses(product.a, _ROWS, operands.transposed[0]))
        for k, warpgroup in enumerate(product.warpgroups.tolist()):
            base = int(batch.shared_base[warpgroup * _WARPGROUP])
            offsets = np.concatenate([part[k].reshape(-1) for part in addresses]) + base
            order.product(warpgroup, offsets, int(product.group[k]), product.at)

    def commit(self, warpgroups: Array) -> None:
        """Close the current groups."""
        if not self._batch.late:
            self._run(warpgroups, self._group + 1)
        self._group[warpgroups] += 1

    def wait(self, warpgroups: Array, pending: int) -> None:
        """All products but those of the last `pending` groups are done and their sums in the registers."""
        limit = self._group - pending
        self._run(warpgroups, limit)
        if self._batch.order is not None:
            active = set(warpgroups.tolist())
            self._batch.order.finished(
                lambda owner, group: owner[0] == "warpgroup" and owner[1] in active and group < limit[owner[1]]
            )
        for names, sums in self._sums.items():
            group = sums.group[warpgroups]
            ready = warpgroups[(group != _LANDED) & (group < limit[warpgroups])]
            if not ready.size:
                continue
            lanes = _lanes(ready)
            for row, name in zip(sums.values, names, strict=True):
                self._batch.register(name).view("f4")[lanes] = row[lanes]
            sums.group[ready] = _LANDED

    def finish(self) -> None:
        """All threads have exited."""
        if any((sums.group != _LANDED).any() for sums in self._sums.values()):
            raise EmulatorError(f"{self._batch.program.name} ended with a wgmma that nobody has waited for")

    def _run(self, warpgroups: Array, limit: Array) -> None:
        """Compute what is queued of these warpgroups in groups below their limits."""
        kept: list[_Product] = []
        chain: list[_Product] = []
        for product in self._issued:
            ready = (product.group < limit[product.warpgroups]) & np.isin(product.warpgroups, warpgroups)
            if not ready.all():
                kept.append(product.part(~ready))
            if not ready.any():
                continue
            now = product if ready.all() else product.part(ready)
            if chain and not now.continues(chain[-1]):
                self._compute(chain)
                chain = []
            chain.append(now)
        if chain:
            self._compute(chain)
        self._issued = kept

    # ---- one product

    def _compute(self, chain: Sequence[_Product]) -> None:
        """A chain of products as one with a longer k."""
        first = chain[0]
        operands, columns = first.operands, 2 * len(first.operands.D)
        right = self._right([(p.warpgroups, p.b, p.at) for p in chain], columns, operands)
        if operands.A:
            left = self._left_of_registers(chain)
        else:
            left = self._left([(p.warpgroups, p.a, p.at) for p in chain], operands)
        product = np.matmul(left, right)
        # [warpgroup, warp, half, g, h, block] of items -> [block, half, h, warpgroup, warp, g]: a row for each register
        items = product.view(_ITEM).reshape(-1, 4, 2, 8, 2, columns // 8).transpose(5, 2, 4, 0, 1, 3)
        sums = np.ascontiguousarray(items).view("f4").reshape(len(operands.D), -1)
        values, lanes = self._sums[operands.D].values, _lanes(first.warpgroups)
        if first.adds.all():
            values[:, lanes] += sums
        elif not first.adds.any():
            values[:, lanes] = sums
        else:
            adds = np.repeat(first.adds, _WARPGROUP)
            values[:, lanes] = np.where(adds, values[:, lanes], 0) + sums

    def _chunks(self, warpgroups: Array, descriptors: Array, extent: int, transposed: bool, at: int) -> Array:
        batch = self._batch
        address = chunk_addresses(descriptors, extent, transposed)
        if int(address.min()) < 0 or int(address.max()) + 16 > batch.shared_bytes:
            raise OutOfBounds(
                f"{batch.program.instructions[at]}: the descriptor names addresses {int(address.min()):#x} to "
                f"{int(address.max()) + 16:#x}; the block has {batch.shared_bytes} bytes of shared memory"
            )
        address += batch.shared_base[warpgroups * _WARPGROUP][:, None, None]
        chunks: Array = batch.shared_views[16].take(address >> 4)
        return chunks

    def _right(self, parts: Sequence[tuple[Array, Array, int]], columns: int, operands: Operands) -> Array:
        """B [warpgroups, k, columns]; column 8b + 2t + h goes to place (h, b, t), so that sums come out as items."""
        widen, transposed = WIDEN[operands.kind], operands.transposed[1]
        tiles = [self._chunks(where, tile, columns, transposed, at) for where, tile, at in parts]
        count = len(tiles[0])
        if transposed:
            halves = np.stack(tiles, 1).view("u2").reshape(count, -1, columns // 8, 4, 2).transpose(0, 1, 4, 2, 3)
            return widen(np.ascontiguousarray(halves).reshape(-1)).reshape(count, -1, columns)
        rows = np.stack(tiles, 2).reshape(count, columns // 8, 4, 2, -1).transpose(0, 3, 1, 2, 4)
        wide = widen(np.ascontiguousarray(rows).view("u2").reshape(-1)).reshape(count, columns, -1)
        return wide.swapaxes(1, 2)

    def _left(self, parts: Sequence[tuple[Array, Array, int]], operands: Operands) -> Array:
        """A [warpgroups, 64, k] from shared memory."""
        widen, transposed = WIDEN[operands.kind], operands.transposed[0]
        tiles = [self._chunks(where, tile, _ROWS, transposed, at) for where, tile, at in parts]
        count = len(tiles[0])
        if transposed:
            return widen(np.stack(tiles, 1).view("u2").reshape(-1)).reshape(count, -1, _ROWS).swapaxes(1, 2)
        return widen(np.stack(tiles, 2).view("u2").reshape(-1)).reshape(count, _ROWS, -1)

    def _left_of_registers(self, chain: Sequence[_Product]) -> Array:
        """A [warpgroups, 64, k] from four registers a product: rows g and g + 8, then the same of columns 8 to 15."""
        lanes = _lanes(chain[0].warpgroups)
        registers = [self._batch.register(name)[lanes] for product in chain for name in product.operands.A]
        # [step, column half, row half, warpgroup, warp, g] of items -> rows in order, k in order
        items = np.concatenate(registers).view(_ITEM).reshape(len(chain), 2, 2, -1, 4, 8).transpose(3, 4, 2, 5, 0, 1)
        count = chain[0].warpgroups.size
        return WIDEN[chain[0].operands.kind](np.ascontiguousarray(items).view("u2").reshape(-1)).reshape(
            count, _ROWS, -1
        )


def _lanes(warpgroups: Array) -> slice | Array:
    """Threads of these warpgroups: a slice if they lie side by side."""
    first, last = int(warpgroups[0]), int(warpgroups[-1])
    if last - first + 1 == warpgroups.size:
        return slice(_WARPGROUP * first, _WARPGROUP * (last + 1))
    return (_WARPGROUP * warpgroups[:, None] + np.arange(_WARPGROUP)).reshape(-1)


# ---- what generated code calls


def issue_product(
    access: Access, operands: Operands, a: Array | None, b: Array, adds: Array, mask: Array | None, at: int
) -> None:
    """wgmma.mma_async."""
    warpgroups = _warpgroups(access, mask, at)
    if not warpgroups.size:
        return
    lanes = warpgroups * _WARPGROUP - access.low
    first, second = (np.broadcast_to(x if x is not None else b, access.n)[lanes].astype("u8") for x in (a, b))
    if not (descriptor_is_plain(second) and (a is None or descriptor_is_plain(first))):
        text = "descriptors with a base offset, or that differ in their swizzle, are not implemented"
        raise EmulatorError(f"{access.batch.program.instructions[at]}: {text}")
    access.batch.products.issue(operands, warpgroups, first, second, np.broadcast_to(adds, access.n)[lanes], at)


def commit_products(access: Access, mask: Array | None, at: int) -> None:
    """wgmma.commit_group."""
    access.batch.products.commit(_warpgroups(access, mask, at))


def wait_for_products(access: Access, pending: int, mask: Array | None, at: int) -> None:
    """wgmma.wait_group."""
    access.batch.products.wait(_warpgroups(access, mask, at), pending)


def _warpgroups(access: Access, mask: Array | None, at: int) -> Array:
    """The warpgroups that are active, which must be whole."""
    first, last = access.low // _WARPGROUP, -(-access.high // _WARPGROUP)
    whole = first * _WARPGROUP == access.low and last * _WARPGROUP == access.high
    if mask is None and whole:
        return np.arange(first, last)
    active = np.zeros((last - first) * _WARPGROUP, bool)
    start = access.low - first * _WARPGROUP
    active[start : start + access.n] = True if mask is None else mask
    by_group = active.reshape(-1, _WARPGROUP)
    part = by_group.any(1) & ~by_group.all(1)
    if part.any():
        thread = first * _WARPGROUP + int(np.flatnonzero(active)[0])
        where = access.batch.describe_thread(thread)
        text = "only a part of the warpgroup executes it together"
        raise DivergentBarrier(f"{access.batch.program.instructions[at]}\n  {where}: {text}")
    return np.flatnonzero(by_group.all(1)) + first

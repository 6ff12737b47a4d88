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
from .group_tiles import ROWS, WARPGROUP, left_operand, left_operand_of_registers, registers_of, right_operand
from .matrix_descriptor import chunk_addresses, descriptor_is_plain, starts_off_pattern
from .tensor import WIDEN

if TYPE_CHECKING:
    from .batch import Batch
    from .ordering import OrderDetector

Array: TypeAlias = "NDArray[Any]"

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
        self._group = np.zeros(-(-batch.threads // WARPGROUP), "i4")
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
        operands = product.operands
        offsets = [self._offsets(product, product.b, 2 * len(operands.D), operands.transposed[1])]
        if not operands.A:
            offsets.append(self._offsets(product, product.a, ROWS, operands.transposed[0]))
        for k, warpgroup in enumerate(product.warpgroups.tolist()):
            touched = np.concatenate([part[k].reshape(-1) for part in offsets])
            order.product(warpgroup, touched, int(product.group[k]), product.at)

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

    def _compute(self, chain: Sequence[_Product]) -> None:
        """A chain of products as one with a longer k."""
        first = chain[0]
        operands, lanes = first.operands, _lanes(first.warpgroups)
        columns, widen = 2 * len(operands.D), WIDEN[operands.kind]
        a_transposed, b_transposed = operands.transposed
        right = right_operand([self._chunks(p, p.b, columns, b_transposed) for p in chain], b_transposed, widen)
        if operands.A:
            registers = [self._batch.register(name)[lanes] for product in chain for name in product.operands.A]
            left = left_operand_of_registers(registers, widen)
        else:
            left = left_operand([self._chunks(p, p.a, ROWS, a_transposed) for p in chain], a_transposed, widen)
        sums = registers_of(np.matmul(left, right))
        values = self._sums[operands.D].values
        if first.adds.all():
            values[:, lanes] += sums
        elif not first.adds.any():
            values[:, lanes] = sums
        else:
            adds = np.repeat(first.adds, WARPGROUP)
            values[:, lanes] = np.where(adds, values[:, lanes], 0) + sums

    def _chunks(self, product: _Product, descriptors: Array, extent: int, transposed: bool) -> Array:
        """The 16-byte chunks of an operand, as they lie."""
        offsets = self._offsets(product, descriptors, extent, transposed)
        chunks: Array = self._batch.shared_views[16].take(offsets >> 4)
        return chunks

    def _offsets(self, product: _Product, descriptors: Array, extent: int, transposed: bool) -> Array:
        """Where the chunks of an operand lie in the shared memory of the batch."""
        batch = self._batch
        address = chunk_addresses(descriptors, extent, transposed)
        if int(address.max()) + 16 > batch.shared_bytes:
            raise OutOfBounds(
                f"{batch.program.instructions[product.at]}: the descriptor names addresses {int(address.min()):#x} to "
                f"{int(address.max()) + 16:#x}; the block has {batch.shared_bytes} bytes of shared memory"
            )
        offsets: Array = address + batch.shared_base[product.warpgroups * WARPGROUP][:, None, None]
        return offsets


def _lanes(warpgroups: Array) -> slice | Array:
    """Threads of these warpgroups: a slice if they lie side by side."""
    first, last = int(warpgroups[0]), int(warpgroups[-1])
    if last - first + 1 == warpgroups.size:
        return slice(WARPGROUP * first, WARPGROUP * (last + 1))
    return (WARPGROUP * warpgroups[:, None] + np.arange(WARPGROUP)).reshape(-1)


# ---- what generated code calls


def issue_product(
    access: Access, operands: Operands, a: Array | None, b: Array, adds: Array, mask: Array | None, at: int
) -> None:
    """wgmma.mma_async."""
    warpgroups = _warpgroups(access, mask, at)
    if not warpgroups.size:
        return
    lanes = warpgroups * WARPGROUP - access.low
    first, second = (np.broadcast_to(x if x is not None else b, access.n)[lanes].astype("u8") for x in (a, b))
    if not (descriptor_is_plain(second) and (a is None or descriptor_is_plain(first))):
        text = "descriptors with a base offset, or that differ in their swizzle, are not implemented"
        raise EmulatorError(f"{access.batch.program.instructions[at]}: {text}")
    if starts_off_pattern(second) or (a is not None and starts_off_pattern(first)):
        text = "a matrix starts where its swizzle does not, and its descriptor has no base offset"
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
    first, last = access.low // WARPGROUP, -(-access.high // WARPGROUP)
    whole = first * WARPGROUP == access.low and last * WARPGROUP == access.high
    if mask is None and whole:
        return np.arange(first, last)
    active = np.zeros((last - first) * WARPGROUP, bool)
    start = access.low - first * WARPGROUP
    active[start : start + access.n] = True if mask is None else mask
    by_group = active.reshape(-1, WARPGROUP)
    part = by_group.any(1) & ~by_group.all(1)
    if part.any():
        bad = int(part.argmax())
        thread = (first + bad) * WARPGROUP + int(by_group[bad].argmax())
        where = access.batch.describe_thread(thread)
        text = "only a part of the warpgroup executes it together"
        raise DivergentBarrier(f"{access.batch.program.instructions[at]}\n  {where}: {text}")
    return np.flatnonzero(by_group.all(1)) + first

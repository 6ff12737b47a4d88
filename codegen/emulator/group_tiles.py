"""Arrange the operands and the sums of wgmma between chunks of shared memory, registers and plain matrices.

Numbers of a step of k = 16 are gathered for all warpgroups and steps at once, so that a chain of products is one.
Fragments are those of mma.sync, four warps one below the other: see tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
Widen: TypeAlias = "Callable[[Array], Array]"

ROWS = 64
"""Rows of A and of the sums."""

WARPGROUP = 128
"""Threads that execute wgmma and setmaxnreg together."""

_ITEM = np.dtype("c16")  # 16 bytes: 8 numbers of an operand, or what four lanes hold of a register


def right_operand(tiles: Sequence[Array], transposed: bool, widen: Widen) -> Array:
    """B [warpgroups, k, columns]; column 8b + 2t + h goes to place (h, b, t), so that sums come out as items.

    Tiles hold chunks as `chunk_addresses` lists them: [warpgroups, columns, 2], transposed [warpgroups, 16, columns/8].
    """
    count = len(tiles[0])
    if transposed:
        columns = 8 * tiles[0].shape[2]
        halves = np.stack(tiles, 1).view("u2").reshape(count, -1, columns // 8, 4, 2).transpose(0, 1, 4, 2, 3)
        return widen(np.ascontiguousarray(halves).reshape(-1)).reshape(count, -1, columns)
    columns = tiles[0].shape[1]
    rows = np.stack(tiles, 2).reshape(count, columns // 8, 4, 2, -1).transpose(0, 3, 1, 2, 4)
    return widen(np.ascontiguousarray(rows).view("u2").reshape(-1)).reshape(count, columns, -1).swapaxes(1, 2)


def left_operand(tiles: Sequence[Array], transposed: bool, widen: Widen) -> Array:
    """A [warpgroups, 64, k] from shared memory."""
    count = len(tiles[0])
    if transposed:
        return widen(np.stack(tiles, 1).view("u2").reshape(-1)).reshape(count, -1, ROWS).swapaxes(1, 2)
    return widen(np.stack(tiles, 2).view("u2").reshape(-1)).reshape(count, ROWS, -1)


def left_operand_of_registers(registers: Sequence[Array], widen: Widen) -> Array:
    """A [warpgroups, 64, k] from four registers a step: rows g and g + 8, then the same of columns 8 to 15."""
    # [step, column half, row half, warpgroup, warp, g] of items -> rows in order, k in order
    items = np.concatenate(registers).view(_ITEM).reshape(len(registers) // 4, 2, 2, -1, 4, 8)
    ordered = np.ascontiguousarray(items.transpose(3, 4, 2, 5, 0, 1))
    return widen(ordered.view("u2").reshape(-1)).reshape(len(ordered), ROWS, -1)


def registers_of(product: Array) -> Array:
    """Sums [warpgroups, 64, columns], columns in the order of `right_operand`, as [registers, threads]."""
    columns = product.shape[2]
    # [warpgroup, warp, half, g, h, block] of items -> [block, half, h, warpgroup, warp, g]: a row for each register
    items = product.view(_ITEM).reshape(-1, 4, 2, 8, 2, columns // 8).transpose(5, 2, 4, 0, 1, 3)
    return np.ascontiguousarray(items).view("f4").reshape(columns // 2, -1)

"""Move 8x8 matrices of 16-bit numbers between shared memory and the registers of a warp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .access import Access
from .warp_checks import check_whole_warps

Array: TypeAlias = "NDArray[Any]"

_ITEM = np.dtype("c16")  # 16 bytes: a row of a matrix, and what four lanes hold of it


def load_matrices(
    access: Access, address: Array, targets: Sequence[Array], transposed: bool, mask: Array | None, at: int
) -> None:
    """ldmatrix: lanes 8m .. 8m+7 of each warp give the addresses of the rows of matrix m."""
    check_whole_warps(access, mask, at)
    count = len(targets)
    lanes = _row_lanes(access, count, mask)
    offset = access.in_shared(address, 16, lanes, at, 16)
    if access.batch.detector is not None:
        access.batch.detector.read(offset, 16, access.threads(lanes), at)
    rows = access.batch.shared_views[16].take(offset >> 4).reshape(-1, count, 8)
    if mask is not None:
        every = np.zeros((access.n // 32, count, 8), _ITEM)
        every[mask.reshape(-1, 32)[:, 0]] = rows
        rows = every
    distribute_rows(rows, targets, transposed)


def store_matrices(
    access: Access, address: Array, sources: Sequence[Array], transposed: bool, mask: Array | None, at: int
) -> None:
    """stmatrix."""
    check_whole_warps(access, mask, at)
    lanes = _row_lanes(access, len(sources), mask)
    offset = access.in_shared(address, 16, lanes, at, 16)
    rows = collect_rows(sources, access.n, transposed)
    if mask is not None:
        rows = rows[mask.reshape(-1, 32)[:, 0]]
    if access.batch.detector is not None:
        access.batch.detector.write(offset, 16, access.threads(lanes), at, rows)
    access.batch.writes += 1
    access.batch.shared_views[16][offset >> 4] = rows.reshape(-1)


def _row_lanes(access: Access, matrices: int, mask: Array | None) -> Array | None:
    """Lanes whose addresses count: 8 for each matrix, of the active warps."""
    if mask is None and matrices == 4:
        return None
    lanes = access.all.reshape(-1, 32)
    if mask is not None:
        lanes = lanes[mask.reshape(-1, 32)[:, 0]]
    return lanes[:, : 8 * matrices].reshape(-1)


def distribute_rows(rows: Array, targets: Sequence[Array], transposed: bool) -> None:
    """Rows [warps, matrices, 8] to the lanes of one register a matrix.

    Lane 4g+t gets elements 2t and 2t+1 of row g; transposed, those of column g.
    """
    warps, matrices = rows.shape[:2]
    if transposed:
        halves = rows.view("u2").reshape(warps, matrices, 4, 2, 8)
        for m, target in enumerate(targets):
            np.copyto(target.view("u2").reshape(warps, 8, 4, 2), halves[:, m].transpose(0, 3, 1, 2))
        return
    for m, target in enumerate(targets):
        np.copyto(target.view(_ITEM).reshape(warps, 8), rows[:, m])


def collect_rows(sources: Sequence[Array], n: int, transposed: bool) -> Array:
    """The rows [warps, matrices, 8] that the lanes of one register a matrix hold."""
    warps = n // 32
    rows = np.empty((warps, len(sources), 8), _ITEM)
    for m, source in enumerate(sources):
        register = np.ascontiguousarray(np.broadcast_to(source, n))
        if transposed:
            cells = register.view("u2").reshape(warps, 8, 4, 2).transpose(0, 2, 3, 1)
            rows[:, m] = np.ascontiguousarray(cells).view(_ITEM).reshape(warps, 8)
        else:
            rows[:, m] = register.view(_ITEM).reshape(warps, 8)
    return rows


def transpose_matrix(source: Array, out: Array) -> None:
    """movmatrix: the matrix that a warp holds, transposed."""
    distribute_rows(collect_rows([source], out.shape[0], False), [out], True)

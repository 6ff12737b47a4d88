"""Multiply matrices that are spread over the registers of a warp.

Fragments of mma.sync, for lane 4g+t of a warp: an A register holds row g (or g+8), columns 2t and 2t+1 of an 8-column
step; a B register holds column g, rows 2t and 2t+1; the four sums are (row g, columns 2t, 2t+1) and (row g+8, ...).
Four lanes of a row are 16 bytes in a row of a register array, so matrices are gathered as 16-byte items, with the k
index in an order that A and B share and the columns of B reordered so that sums come out as 16-byte items again.

TF32 is the same with a step of four columns: an item holds four numbers of 32 bits, of which the tensor core reads the
upper 19 (sign, 8 bits of exponent, 10 of mantissa) and ignores the others, whatever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .halves import F16_TO_F32

Array: TypeAlias = "NDArray[Any]"

_ITEM = np.dtype("c16")
_CHUNK_BYTES = 1 << 21  # of widened B: larger intermediate arrays fall out of the cache
_SIXTEEN = np.array(16, "u4")
_KEEP = np.array(0x8FFFE000 - (1 << 32), "i4")
_SHIFT = np.array(13, "i4")
_SCALE = np.float32(2.0**112)
_READ_OF_TF32 = np.array(0xFFFFE000, "u4")


def _widen_bf16(bits: Array) -> Array:
    wide = bits.view("u2").astype("u4")
    return np.left_shift(wide, _SIXTEEN, wide).view("f4")


def _widen_f16(bits: Array) -> Array:
    """fp16 to float32: shifted to the place of the float32 exponent, then scaled by 2^112."""
    halves = bits.view("i2")
    if halves.max() >= 0x7C00 or bits.view("u2").max() >= 0xFC00:  # infinities and NaN do not survive the scaling
        return F16_TO_F32.take(bits.view("u2"))
    wide = halves.astype("i4")
    np.left_shift(wide, _SHIFT, wide)
    np.bitwise_and(wide, _KEEP, wide)
    floats = wide.view("f4")
    return np.multiply(floats, _SCALE, floats)


def _cut_to_tf32(bits: Array) -> Array:
    return np.bitwise_and(bits, _READ_OF_TF32).view("f4")


WIDEN = {"f16": _widen_f16, "bf16": _widen_bf16, "tf32": _cut_to_tf32}


def _gather(registers: Sequence[Array]) -> Array:
    return np.concatenate(registers)


def multiply_matrices(
    A: Sequence[Array], B: Sequence[Array], C: Sequence[Array], D: Sequence[Array], inputs: str
) -> None:
    """D = C + A B for several column blocks of B; `inputs` is the type of A and B: f16, bf16 or tf32.

    A: 2 registers for each step of k (rows 0-7, 8-15); B: for each block of 8 columns one register a step;
    C and D: four registers for each block.
    """
    steps = len(A) // 2
    blocks = len(B) // steps
    n = A[0].shape[0]
    warps = n // 32
    chunk = max(1, _CHUNK_BYTES // (blocks * steps * 256))
    if warps <= chunk:
        _multiply(_gather(A), _gather(B), C, D, inputs, (warps, steps, blocks))
        return
    for start in range(0, warps, chunk):
        lanes = slice(32 * start, 32 * min(start + chunk, warps))
        size = (min(start + chunk, warps) - start, steps, blocks)
        a, b = (_gather([register[lanes] for register in part]) for part in (A, B))
        c = [register[lanes] if register.ndim else register for register in C]
        _multiply(a, b, c, [register[lanes] for register in D], inputs, size)


def _multiply(
    a: Array, b: Array, C: Sequence[Array], D: Sequence[Array], inputs: str, size: tuple[int, int, int]
) -> None:
    warps, steps, blocks = size
    widen = WIDEN[inputs]
    # [step, half, warp, g] of items -> [warp, half, g, step]: rows of 8 * steps numbers, 4 * steps of tf32
    items = a.view(_ITEM).reshape(steps, 2, warps, 8).transpose(2, 1, 3, 0)
    left = widen(np.ascontiguousarray(items).view("u4").reshape(-1)).reshape(warps, 16, -1)
    # column g = 2t + h of a block -> place (h, block, t), so that four values of t lie side by side in the product
    items = b.view(_ITEM).reshape(blocks, steps, warps, 4, 2).transpose(2, 4, 0, 3, 1)
    right = widen(np.ascontiguousarray(items).view("u4").reshape(-1)).reshape(warps, 8 * blocks, -1)
    product = np.matmul(left, right.swapaxes(1, 2))
    # [warp, half, g, h, block] of items -> [block, half, h, warp, g]: one row for each register of sums
    items = product.view(_ITEM).reshape(warps, 2, 8, 2, blocks).transpose(4, 1, 3, 0, 2)
    sums = np.ascontiguousarray(items).view("f4").reshape(4 * blocks, 32 * warps)
    for c, row, d in zip(C, sums, D, strict=True):
        np.add(c, row, d)


def multiply_matrices_f16(
    A: Sequence[Array], B: Sequence[Array], C: Sequence[Array], D: Sequence[Array], inputs: str
) -> None:
    """The same with fp16 sums, two in a register: added in float32 and rounded once."""
    n = D[0].shape[0]
    wide = []
    for register in C:
        pairs = F16_TO_F32.take(np.ascontiguousarray(np.broadcast_to(register, n)).view("u2")).reshape(n, 2)
        wide += [np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])]
    sums = [np.empty(n, "f4") for _ in wide]
    multiply_matrices(A, B, wide, sums, inputs)
    for k, register in enumerate(D):
        pair = register.view("u2").reshape(n, 2)
        for h in range(2):
            pair[:, h] = sums[2 * k + h].astype("f2").view("u2")

"""Draw the random bits of dropout from a counter: Philox4x32-7 (Salmon et al., Parallel Random Numbers, SC 2011).

A weight's bits depend on the seed, the offset and where it stands, and on nothing that a kernel's tile decides, so that
the backward finds the weights that the forward has dropped, and a kernel those of any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = tuple[Any, Any, Any, Any]  # each of 32 bits: in int64, of NumPy or of PyTorch, that broadcast

ROUNDS = 7  # the fewest that pass BigCrush: table 2 of the paper
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round: the golden ratio and sqrt(3) - 1
KEEP_ALL = 2**16  # of a weight's 16 bits
LOW = 0xFFFFFFFF  # the low word of 64 bits


def philox4x32(counter: Words, key: tuple[Any, Any]) -> Words:
    """Four random words for each counter. All are int64 that hold 32 bits; a product wraps, and its bits are right.

    >>> [hex(word) for word in philox4x32((np.int64(0),) * 4, (np.int64(0),) * 2)]
    ['0x5f6fb709', '0xd893f64', '0x4f121f81', '0x4f730a48']
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low0, high0 = _product(x0, MULTIPLIERS[0])
        low1, high1 = _product(x2, MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = k0 + WEYL[0] & LOW, k1 + WEYL[1] & LOW
    return x0, x1, x2, x3


def _product(x: Any, multiplier: int) -> tuple[Any, Any]:
    """The low and the high word of a product of two words."""
    with np.errstate(over="ignore"):
        product = x * multiplier
    return product & LOW, product >> 32 & LOW


def row_block(i: Any) -> Any:
    """x of row i, see words_at."""
    return i // 16 * 8 + i % 8


def key_block(j: Any) -> Any:
    """y of key j."""
    return j // 32 * 8 + j % 8


def words_at(x: Any, y: Any, head: Any, seed: Any, offset: Any) -> Words:
    """The four words of block (x, y) of head b * Hq + h: 16 bits for each of 2 rows x 4 keys.

    A block's rows are 8 apart, and so are its keys: those that one thread of a kernel holds. Key j takes word
    j // 8 % 4; row i takes its low half, or the high one if i // 8 is odd.
    """
    return philox4x32((x, y, head, offset & LOW), (seed & LOW, seed >> 32 & LOW))


def kept(i: Any, j: Any, head: Any, seed: int, offset: int, keep_below: int) -> NDArray[np.bool_]:
    """Whether the weight of row i and key j is kept: whether its 16 bits are less than `keep_below`.

    i, j and head = b * Hq + h: int64 that broadcast; b, i and j count within the batch and the sequence.
    """
    i, j, head = (np.asarray(x, np.int64) for x in (i, j, head))
    word = np.choose(j // 8 % 4, words_at(row_block(i), key_block(j), head, np.int64(seed), np.int64(offset)))
    return np.asarray((word >> 16 * (i // 8 % 2) & 0xFFFF) < keep_below)


def keep_mask(seed: int, offset: int, B: int, Hq: int, Nq: int, Nk: int, keep_below: int) -> NDArray[np.bool_]:
    """[B, Hq, Nq, Nk]: the weights that dropout keeps, Z.

    >>> keep_mask(7, 0, 1, 1, 2, 8, 32768)[0, 0].astype(int).tolist()
    [[1, 0, 0, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 0, 0, 1]]
    """
    head = np.arange(B * Hq).reshape(B, Hq, 1, 1)
    return kept(np.arange(Nq)[:, None], np.arange(Nk), head, seed, offset, keep_below)

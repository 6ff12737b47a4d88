"""The random bits of dropout: those of the published generator, each where the kernels look for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flashsmith.philox import keep_mask, philox4x32

# The known answers of philox4x32-7 in Random123 (kat_vectors): counter and key, words.
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KNOWN = pytest.mark.parametrize(
    ("given", "want"),
    [
        ((0,) * 6, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 6, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ],
    ids=["zeros", "ones", "pi"],
)


@KNOWN
def test_known_answers(given: tuple[int, ...], want: tuple[int, ...]) -> None:
    """On NumPy's and on PyTorch's integers of 64 bits, whose products wrap."""
    for library in (np.array, torch.tensor):
        c0, c1, c2, c3, k0, k1 = (library([word]) for word in given)
        assert tuple(int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == want


def plainly(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-7 in integers without limit, as the paper's figure 2 draws a round."""
    for _ in range(7):
        high, low = divmod(0xD2511F53 * counter[0], 2**32)
        high2, low2 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high2 ^ counter[1] ^ key[0], low2, high ^ counter[3] ^ key[1], low]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def test_each_weight_takes_the_bits_of_its_place() -> None:
    """Written out for single weights, with a seed and an offset of more than 32 bits."""
    seed, offset, Hq, Nq, Nk = -(2**40) + 12345, 2**33 + 7, 3, 70, 90
    mask = keep_mask(seed, offset, 2, Hq, Nq, Nk, 40000)
    random = np.random.default_rng(1)
    for b, h, i, j in zip(*(random.integers(0, n, 200).tolist() for n in (2, Hq, Nq, Nk)), strict=True):
        counter = [i // 16 * 8 + i % 8, j // 32 * 8 + j % 8, b * Hq + h, 7]
        word = plainly(counter, [seed % 2**32, (seed >> 32) % 2**32])[j // 8 % 4]
        bits = word >> 16 if i // 8 % 2 else word & 0xFFFF
        assert mask[b, h, i, j] == (bits < 40000), (b, h, i, j)


def test_no_two_rows_and_no_two_keys_draw_the_same() -> None:
    """Of two heads of 64 rows and 128 keys."""
    mask = keep_mask(1, 2, 1, 2, 64, 128, 32768)[0]
    rows = {row.tobytes() for head in mask for row in head}
    keys = {key.tobytes() for head in mask for key in head.T}
    assert (len(rows), len(keys)) == (2 * 64, 2 * 128)


def test_as_many_are_kept_as_asked() -> None:
    """512 x 512 weights: the share kept is within five standard deviations."""
    for keep_below in (1, 6554, 32768, 58982, 65536):
        share, want = keep_mask(3, 4, 1, 1, 512, 512, keep_below).mean(), keep_below / 65536
        assert abs(share - want) <= 5 * np.sqrt(want * (1 - want)) / 512

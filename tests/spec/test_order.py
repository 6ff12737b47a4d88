"""The order of a launch: the text and Python agree on it, every tile is done once, and longer loops start earlier."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from flashsmith.compile import compile_source
from flashsmith.emulator import GlobalMemory, launch, parse
from flashsmith.render import Source, render
from flashsmith.run import Sizes, grid
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.limits import why_illegal
from flashsmith.spec.order import cached_keys, cached_queries, deal, heads_together, launch_order
from flashsmith.spec.problem import Dtype, Problem
from flashsmith.spec.tile import ALL_HEADS, GROUPED, HEAD_BY_HEAD, KeyBlockTile, Order, RowTile, WarpgroupTile
from flashsmith.work import masked_share, tiles_per_block

A100 = find_gpu("a100")
ORDERED: tuple[KernelName, ...] = ("forward", "fused", "dkdv", "dq")
ORDERS = {"head by head": HEAD_BY_HEAD, "grouped": GROUPED, "all heads": ALL_HEADS}
CALLS = [
    Sizes(B=1, Hq=1, Hk=1, Nq=1, Nk=1),
    Sizes(B=2, Hq=7, Hk=7, Nq=300, Nk=300),  # groups of 2 or 3 heads, and some left over
    Sizes(B=3, Hq=6, Hk=2, Nq=300, Nk=700),
    Sizes(B=1, Hq=12, Hk=4, Nq=700, Nk=300),
]

# Writes down what `place` says to each block; the structures name the first row, the head and the batch in this order.
PLACES = """
extern "C" __global__ void places(int* out, int Hq, int Hk, int Nq, int Nk)
{{
    const auto [row, head, batch] = place(blockIdx.x, {sizes});
    out[3 * blockIdx.x] = row, out[3 * blockIdx.x + 1] = head, out[3 * blockIdx.x + 2] = batch;
}}
"""


def spec_of(kernel: KernelName, order: int, causal: bool = True) -> KernelSpec:
    problem = Problem(dtype="bf16", d=64, causal=causal)
    tile: Any = replace(default_tile(kernel, problem, A100), order=order)  # type: ignore[call-arg]
    return KernelSpec.of(kernel, problem, tile, 80)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an L2 cache that holds 1000 keys, or queries, of d = 64."""
    monkeypatch.setattr("flashsmith.spec.order._half_l2", lambda spec: 256_000)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("kernel", ORDERED)
def test_the_text_does_what_python_says(kernel: KernelName, order: int) -> None:
    spec = spec_of(kernel, order)
    text, (before, _, call) = render(spec).text, render(spec).text.partition("place(block_index(), ")
    head = before[: before.index('extern "C"')] + PLACES.format(sizes=call.partition(")")[0])
    kernels = parse(compile_source(Source(spec, head)).ptx).kernels
    assert text.count("place(block_index(), ") >= 2  # at the start and at the end of a block
    for sizes in CALLS:
        size, H, N = (spec.tile.Bc, sizes.Hk, sizes.Nk) if isinstance(spec.tile, KeyBlockTile) else (
            spec.tile.Br, sizes.Hq, sizes.Nq)  # type: ignore[union-attr] # fmt: skip
        together = heads_together(spec, sizes.Hq, sizes.Hk, sizes.Nq, sizes.Nk)
        want = [
            (tile * size, head % H, head // H)
            for head, tile in launch_order(spec, sizes.B * H, together, -(-N // size))
        ]
        memory, blocks = GlobalMemory(), grid(spec, sizes)
        out = memory.empty((blocks, 3), np.int32)
        launch(kernels["places"], blocks, 1, [out, sizes.Hq, sizes.Hk, sizes.Nq, sizes.Nk], memory)
        assert [tuple(row) for row in memory.read(out, (blocks, 3), np.int32).tolist()] == want
        assert len(set(want)) == blocks


# Writes down which tiles each block works on, and what `place` says of them.
DEALT = """
extern "C" __global__ void places(int* out, int Hq, int Hk, int Nq, int Nk, int tiles)
{
    for (int round = 0; dealt(round) < tiles; ++round) {
        const auto [row, head, batch] = place(dealt(round), Hq, Hk, Nq, Nk, tiles);
        int* const to = out + 4 * (round * gridDim.x + blockIdx.x);
        to[0] = row, to[1] = head, to[2] = batch, to[3] = dealt(round);
    }
}
"""


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_tiles_are_dealt_out_as_python_says(order: Order) -> None:
    """Each to one block, whatever their number."""
    tile = WarpgroupTile(Br=64, Bc=64, order=order)
    spec = KernelSpec.of("forward90", Problem(dtype="bf16", d=64, causal=True), tile, 90)
    head = render(spec).text.partition('extern "C"')[0] + DEALT
    kernels = parse(compile_source(Source(spec, head)).ptx).kernels
    for sizes, blocks in product(CALLS, (1, 2, 5)):
        together = heads_together(spec, sizes.Hq, sizes.Hk, sizes.Nq, sizes.Nk)
        tiles = launch_order(spec, sizes.B * sizes.Hq, together, -(-sizes.Nq // 64))
        assert len(tiles) == grid(spec, sizes)
        memory, rounds = GlobalMemory(), -(-len(tiles) // blocks)
        out = memory.upload(np.full((rounds, blocks, 4), -1, np.int32))
        args = [out, sizes.Hq, sizes.Hk, sizes.Nq, sizes.Nk, len(tiles)]
        launch(kernels["places"], blocks, 1, args, memory)
        got = memory.read(out, (rounds, blocks, 4), np.int32)
        for block, numbers in enumerate(deal(len(tiles), blocks)):
            want = [(tiles[n][1] * 64, tiles[n][0] % sizes.Hq, tiles[n][0] // sizes.Hq, n) for n in numbers]
            assert [tuple(row) for row in got[:, block].tolist() if row[3] >= 0] == want
        assert sorted(n for numbers in deal(len(tiles), blocks) for n in numbers) == list(range(len(tiles)))


def test_blocks_are_dealt_nearly_the_same_work() -> None:
    """Of a causal problem whose longest tiles come first; dealt out forwards alone, the first block has most."""
    lengths = sorted(list(range(1, 33)) * 12, reverse=True)
    shares = [sum(lengths[n] for n in numbers) for numbers in deal(len(lengths), 44)]
    forwards = [sum(lengths[first::44]) for first in range(44)]
    assert max(shares) - min(shares) <= 4 and max(forwards) - min(forwards) > 20


def test_heads_that_share_the_cache_are_counted_by_what_they_read() -> None:
    """forward and dq read K and V, dkdv Q and dO of all query heads of a key head, fused adds up dQ as well."""
    together = {kernel: heads_together(spec_of(kernel, GROUPED), 4, 2, Nq=100, Nk=200) for kernel in ORDERED}
    assert together == {"forward": 5 * 2, "dq": 5 * 2, "dkdv": 5, "fused": 2}
    assert heads_together(spec_of("dq", GROUPED), 4, 2, Nq=9999, Nk=9999) == 2  # those of one key head, at least


@pytest.mark.parametrize("kernel", ORDERED)
def test_an_order_changes_when_a_tile_is_walked_over_and_nothing_else(kernel: KernelName) -> None:
    sizes = Sizes(B=2, Hq=4, Hk=4, Nq=230, Nk=230)  # groups of 4 heads, or of 2, out of 8
    one_head = tiles_per_block(spec_of(kernel, HEAD_BY_HEAD), sizes)
    mixed = tiles_per_block(spec_of(kernel, ALL_HEADS), sizes)
    grouped = tiles_per_block(spec_of(kernel, GROUPED), sizes)
    heads = grid(spec_of(kernel, GROUPED), sizes) // len(one_head)
    assert sorted(one_head * heads) == sorted(mixed) == sorted(grouped)
    assert list(one_head) == sorted(one_head, reverse=True) and list(mixed) == sorted(mixed, reverse=True)
    assert grouped not in (mixed, one_head * heads) and len(set(one_head)) > 1
    assert len({masked_share(spec_of(kernel, order), sizes) for order in ORDERS.values()}) == 1


@pytest.mark.parametrize("kernel", ORDERED)
def test_without_a_mask_there_is_one_order(kernel: KernelName) -> None:
    usual = GROUPED if kernel == "forward" else HEAD_BY_HEAD
    for order in ORDERS.values():
        reason = why_illegal(spec_of(kernel, order, causal=False), A100)
        assert (reason is None) == (order == usual)
        assert reason is None or all(part in reason for part in (f"order={order}", f"order={usual}", "mask"))
        assert why_illegal(spec_of(kernel, order), A100) is None
    assert "order=3" in (why_illegal(spec_of(kernel, 3), A100) or "")


def test_kernels_without_a_mask_of_their_own_take_any_tile() -> None:
    """convert has the tile of fused, whatever its order; delta has none."""
    assert why_illegal(spec_of("convert", ALL_HEADS), A100) is None
    delta = KernelSpec(kernel="delta", dtype="bf16", d=64, causal=False, tile=RowTile(), sm=80)
    assert why_illegal(delta, A100) is None


@pytest.mark.parametrize(
    ("dtype", "d", "dv", "row"), [("bf16", 128, None, 512), ("fp32", 64, None, 512), ("fp16", 192, 128, 640)]
)
def test_half_of_the_l2_cache_holds_so_many_rows(dtype: Dtype, d: int, dv: int | None, row: int) -> None:
    """A key is a row of K and one of V, in bytes of their type and of their own lengths."""
    problem = Problem(dtype=dtype, d=d, dv=dv, causal=True)
    spec = KernelSpec.of("forward", problem, default_tile("forward", problem, find_gpu("a100")), 80)
    assert cached_keys(spec) == cached_queries(spec) == 256_000 // row

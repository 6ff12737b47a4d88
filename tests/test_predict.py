"""The work of a launch is counted by arithmetic; times come out for every kernel, and in a sensible order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashsmith.compile import Binary, compile_source
from flashsmith.given import visible
from flashsmith.load import load_pass
from flashsmith.predict import board_of, predict, predict_pass, sizes_of, work_of
from flashsmith.render import render
from flashsmith.run import grid
from flashsmith.sass import disassemble, predict_time
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import GPUS, find_gpu
from flashsmith.spec.kernel import HOPPER, KernelName, KernelSpec
from flashsmith.spec.order import head_by_head
from flashsmith.spec.problem import Pass, Problem
from flashsmith.spec.tile import ForwardTile, RowTile, WarpgroupTile
from flashsmith.work import first_bytes, loaded_bytes, masked_share, moved_bytes, reduced_bytes, tiles_per_block

A100, H200 = find_gpu("a100"), find_gpu("h200")


def spec_of(kernel: KernelName, problem: Problem) -> KernelSpec:
    gpu = H200 if kernel in HOPPER else A100
    return KernelSpec.of(kernel, problem, default_tile(kernel, problem, gpu), gpu.sm)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("Nq", "Nk"), [(1000, 1000), (129, 1300), (1300, 129), (1, 1)])
@pytest.mark.parametrize("kernel", ["forward", "dq", "fused", "dkdv", "forward90"])
def test_tiles_of_a_block_are_those_that_see_something(kernel: KernelName, Nq: int, Nk: int, causal: bool) -> None:
    """Counted from the mask: a walk runs from the edge of the tensor to the last tile that has a visible pair."""
    problem = Problem(dtype="bf16", d=64, causal=causal, Hq=4, Hk=2, Nq=Nq, Nk=Nk)
    spec = spec_of(kernel, problem)
    tile, mask = spec.tile, visible(Nq, Nk, causal)
    rows, keys = -(-Nq // tile.Br), -(-Nk // tile.Bc)  # type: ignore[union-attr]
    whole = np.zeros((rows * tile.Br, keys * tile.Bc), bool)  # type: ignore[union-attr]
    whole[:Nq, :Nk] = mask
    whole[Nq:] = whole[Nq - 1]  # rows past the end are masked by nobody: they are not stored
    pairs = whole.reshape(rows, tile.Br, keys, tile.Bc).transpose(0, 2, 1, 3)  # type: ignore[union-attr]
    seen = pairs.any((2, 3))
    got = tiles_per_block(spec, sizes_of(problem))
    mixed = causal and not head_by_head(spec)  # tile by tile of heads that share the L2 cache
    by_rows = kernel in ("forward", "dq", "forward90")
    if by_rows:
        want = [int(np.nonzero(row)[0].max(initial=-1)) + 1 for row in seen]
        heads = 4 if mixed else 1
        assert sorted(got) == sorted(want * heads) and (not causal or list(got) == sorted(got, reverse=True))
    else:
        want = [2 * (rows - int(np.nonzero(column)[0].min(initial=rows))) for column in seen.T]
        assert list(got) == list(np.repeat(want, 2 if mixed else 1))
    assert grid(spec, sizes_of(problem)) % len(got) == 0
    walked = np.zeros_like(seen)
    for i in range(rows):
        for j in range(keys):
            walked[i, j] = seen[i, j:].any() if by_rows else seen[: i + 1, j].any()
    masked = walked & ~pairs.all((2, 3))
    assert masked_share(spec, sizes_of(problem)) == pytest.approx(masked.sum() / max(1, walked.sum()), abs=0.02)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("Nq", "Nk", "parts", "Br"), [(7, 700, 3, 16), (40, 130, 2, 64), (23, 20, 4, 16), (1, 64, 1, 16)]
)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_parts_walk_over_each_tile_once(Nq: int, Nk: int, parts: int, Br: int, packed: bool, causal: bool) -> None:
    """Counted from the mask, for the rows of a block: query by query, of all heads of a group if they are packed."""
    problem = Problem(dtype="bf16", d=64, causal=causal, B=2, Hq=6, Hk=2, Nq=Nq, Nk=Nk)
    tile = ForwardTile(Br=Br, Bc=48, warps=1, packed=packed)
    spec, sizes = KernelSpec.of("partial", problem, tile, 80), sizes_of(problem, parts)
    mask = visible(Nq, Nk, causal).repeat(3 if packed else 1, axis=0)
    seen, masked = [], 0
    for rows in reversed([mask[i : i + Br] for i in range(0, len(mask), Br)]):
        tiles = [rows[:, j : j + 48] for j in range(0, Nk, 48)]
        whole = [tile.all() and tile.shape[1] == 48 for tile in tiles]
        last = max((j for j, tile in enumerate(tiles) if tile.any()), default=-1)
        seen.append(last + 1)
        masked += whole[: last + 1].count(False)
    got, heads = tiles_per_block(spec, sizes), 2 * (2 if packed else 6)
    assert len(got) == grid(spec, sizes) == parts * heads * len(seen)
    by_part = np.array(got).reshape(parts, heads, len(seen))
    np.testing.assert_array_equal(by_part.sum(0), np.broadcast_to(seen, (heads, len(seen))))
    assert (by_part <= -(-np.array(seen) // parts)).all()
    assert masked_share(spec, sizes) == pytest.approx(masked / max(1, sum(seen)))
    assert moved_bytes(spec, sizes) > moved_bytes(KernelSpec.of("combine", problem, RowTile(), 80), sizes) / 2


def test_few_queries_wait_for_the_memory() -> None:
    """One query of 64 heads and sequences: K and V are read once, at the memory's rate, and that is said."""
    problem = Problem(dtype="bf16", d=64, B=64, Hq=16, Nq=1, Nk=4096)
    found = predict(compile_source(render(spec_of("forward", problem))), problem, A100)
    assert found.seconds == pytest.approx(64 * 16 * 4096 * 64 * 4 / (0.85 * 2039e9), rel=0.01)
    assert found.bound_by.startswith("memory bandwidth")


def test_executed_flops_without_a_mask_are_the_credited_ones() -> None:
    """Lengths that the tiles divide, d a multiple of 16: nothing is wasted; the split backward executes 7 / 5."""
    problem = Problem(dtype="bf16", d=128, B=2, Hq=4, Nq=2048)
    sizes = sizes_of(problem)
    assert work_of(spec_of("fused", problem), sizes).tensor_flops == problem.flops("backward")
    split = sum(work_of(spec_of(kernel, problem), sizes).tensor_flops for kernel in ("dkdv", "dq"))  # type: ignore[arg-type]
    assert split == pytest.approx(problem.flops("backward") * 7 / 5, rel=0.05)


@pytest.fixture(scope="module")
def kernels() -> dict[Pass, dict[KernelName, Binary]]:
    problem = Problem(dtype="bf16", d=64)
    return {which: {name: loaded.binary for name, loaded in load_pass(problem, which, A100).items()} for which in
            ("forward", "backward")}  # type: ignore[misc] # fmt: skip


def test_a_prediction_says_what_bounds_it(kernels: dict[Pass, dict[KernelName, Binary]]) -> None:
    problem = Problem(dtype="bf16", d=64, B=2, Nq=8192)
    prediction = predict(kernels["forward"]["forward"], problem, A100)
    assert 150 < prediction.tflops < A100.peak_tflops
    assert 0 < prediction.pipes["tensor"] < 1 and "tensor cores" in prediction.bound_by
    assert prediction.spills_in_loop == 0


def test_time_grows_with_the_work(kernels: dict[Pass, dict[KernelName, Binary]]) -> None:
    short, long = (Problem(dtype="bf16", d=64, Nq=n) for n in (4096, 8192))
    times = [sum(p.seconds for p in predict_pass(kernels["backward"], problem, A100)) for problem in (short, long)]
    assert 3.2 < times[1] / times[0] < 4.4


def test_helpers_are_as_fast_as_memory(kernels: dict[Pass, dict[KernelName, Binary]]) -> None:
    problem = Problem(dtype="bf16", d=64, B=2, Nq=8192)
    prediction = predict(kernels["backward"]["convert"], problem, A100)
    floats = 2 * 16 * 8192 * 64
    assert prediction.seconds >= (floats * 4 + floats * 2) / (A100.hbm_gbs * 1e9)
    assert prediction.tflops == 0


@pytest.mark.parametrize("key", [key for key, gpu in GPUS.items() if gpu.served])
def test_every_served_gpu_has_a_prediction(key: str) -> None:
    gpu = GPUS[key]
    problem = Problem(dtype="fp16", d=64, causal=True, Hq=32, Nq=4096)
    tile = default_tile("forward", problem, gpu)
    binary = compile_source(render(KernelSpec.of("forward", problem, tile, gpu.sm)))
    prediction = predict(binary, problem, gpu)
    assert 0.3 * gpu.peak_tflops < prediction.tflops < gpu.peak_tflops


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("kernel", "products"), [("forward", 4), ("fused", 10)])
def test_the_loop_holds_whole_tiles_and_runs_as_often_as_the_flops_say(
    kernel: KernelName, products: int, d: int
) -> None:
    """u tiles an iteration: u * 4 Br Bc d / (4096 warps) HMMA forward, u * 10 ... fused; as many tiles as N has."""
    problem = Problem(dtype="bf16", d=d, B=2, Nq=8192)
    spec = spec_of(kernel, problem)
    function = disassemble(compile_source(render(spec)).cubin).functions[kernel]
    Br, Bc = spec.tile.Br, spec.tile.Bc  # type: ignore[union-attr]
    a_tile = products * Br * Bc * d // (4096 * spec.tile.warps)
    hmma = [sum(i.base == "HMMA" for i in part) for part in function.trace]
    unrolled, rest = divmod(hmma[1], a_tile)
    assert unrolled >= 1 and rest == 0
    time = predict_time(function, board_of(A100), work_of(spec, sizes_of(problem)))
    tiles = -(-problem.keys // Bc) if kernel == "forward" else problem.Nq // Br
    assert time.iterations * unrolled == pytest.approx(tiles - (hmma[0] + hmma[2]) / a_tile)


def test_the_same_kernel_on_a_slower_board_is_slower(kernels: dict[Pass, dict[KernelName, Binary]]) -> None:
    problem = Problem(dtype="bf16", d=64, B=2, Nq=8192)
    half = replace(A100, sms=54)
    ratio = [predict(kernels["forward"]["forward"], problem, gpu).seconds for gpu in (half, A100)]
    assert 1.8 < ratio[0] / ratio[1] < 2.2


# ---- kernels of warpgroups ---------------------------------------------------------------------------------------

W = Problem(dtype="bf16", d=128, B=2, Nq=8192)


def of_warpgroups(problem: Problem, tile: WarpgroupTile) -> Binary:
    return compile_source(render(KernelSpec.of("forward90", problem, tile, 90)))


def test_work_of_a_kernel_of_warpgroups() -> None:
    """Tiles, FLOPs and bytes by hand; masks are a loop of their own, and the blocks stay."""
    spec, sizes = KernelSpec.of("forward90", W, WarpgroupTile(Br=128, Bc=176), 90), sizes_of(W)
    work = work_of(spec, sizes)
    tiles, walked = 8192 // 128 * 16 * 2, -(-8192 // 176)
    assert (work.blocks, work.warps, work.producer_warps, work.persistent) == (tiles, 12, 4, True)
    assert work.tensor_flops == 4.0 * 128 * 176 * 128 * tiles * walked
    assert work.loaded_bytes == loaded_bytes(spec, tiles * walked) == tiles * walked * 2 * 176 * 128 * 2
    assert work.first_bytes == first_bytes(spec) == (128 + 176) * 128 * 2 and work.reduced_bytes == 0
    assert work.hbm_bytes == moved_bytes(spec, sizes) == moved_bytes(spec_of("forward", W), sizes)
    pair = work_of(KernelSpec.of("forward90", W, WarpgroupTile(Br=128, Bc=176, cluster=2), 90), sizes)
    assert pair.loaded_bytes == pair.multicast_bytes == work.loaded_bytes / 2 and work.multicast_bytes == 0
    assert pair.first_bytes == (128 + 88) * 128 * 2 and pair.blocks == work.blocks
    causal = KernelSpec.of("forward90", replace(W, causal=True), WarpgroupTile(Br=128, Bc=128), 90)
    work = work_of(causal, sizes)
    assert work.rare_share == 0 and work.twin_share == pytest.approx(64 / (64 * 65 / 2))
    other = work_of(spec_of("forward", W), sizes)
    assert (other.loaded_bytes, other.first_bytes, other.twin_share, other.persistent) == (0, 0, 0, False)
    assert reduced_bytes(spec_of("fused", W), 100) == 0  # its sums go through registers


@pytest.mark.parametrize("d", [64, 72, 128])
def test_the_loop_of_warpgroups_runs_as_often_as_the_flops_say(d: int) -> None:
    """All tiles but what stands outside the loop: the first S = Q K^T and the last O += P V, a tile together."""
    problem = replace(W, d=d)
    binary = of_warpgroups(problem, WarpgroupTile(Br=128, Bc=64, pingpong=True))
    function = disassemble(binary.cubin).functions["forward90"]
    time = predict_time(function, board_of(H200), work_of(binary.spec, sizes_of(problem)))
    assert time.iterations == pytest.approx(8192 / 64 - 1)


def test_schedules_of_warpgroups_are_told_apart() -> None:
    """Turns, products under the softmax, and exponentials above the wait for them: each is faster than without."""
    best = WarpgroupTile(Br=128, Bc=128, pingpong=True)
    tiles = (best, replace(best, pingpong=False), replace(best, overlap=False), replace(best, early_k_wait=False))
    times = [predict(of_warpgroups(W, tile), W, H200) for tile in tiles]
    assert all(other.seconds > 1.02 * times[0].seconds for other in times[1:])
    assert 0.5 * H200.wgmma_tflops < times[0].tflops < 0.9 * H200.wgmma_tflops
    assert times[2].bound_by.startswith("the order of the warpgroups' work")


def test_a_masked_launch_pays_for_its_masks() -> None:
    problem = Problem(dtype="bf16", d=128, causal=True, B=2, Nq=1024)
    binary = of_warpgroups(problem, WarpgroupTile(Br=128, Bc=128, pingpong=True))
    function = disassemble(binary.cubin).functions["forward90"]
    assert len(function.twin) > len(function.short_trace.loop) + 100
    work = work_of(binary.spec, sizes_of(problem))
    board = replace(board_of(H200), l2_bytes_per_clock_sm=64.0)  # L2 does not hide what a mask costs
    with_masks, without = (
        predict_time(function, board, replace(work, twin_share=share)).seconds for share in (work.twin_share, 0.0)
    )
    assert 1.005 * without < with_masks < 1.1 * without
    assert predict(binary, problem, H200, rare_always=True).seconds > with_masks

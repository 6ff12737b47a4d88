"""Shared memory by arithmetic equals what the text lays out and the launch asks for; every refusal has both numbers."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from flashsmith.errors import UsageError
from flashsmith.render import render
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import GPUS, Gpu, find_gpu
from flashsmith.spec.kernel import KERNELS, TILE_OF, KernelName, KernelSpec
from flashsmith.spec.limits import blocks_per_sm, buffers, smem_bytes, why_illegal
from flashsmith.spec.problem import Problem
from flashsmith.spec.space import choices, legal_tiles
from flashsmith.spec.tile import ForwardTile

A100, RTX4090 = find_gpu("a100"), find_gpu("rtx4090")


def sample(kernel: KernelName, d: int, gpu: Gpu, count: int) -> list[KernelSpec]:
    """Legal tiles from all over a kernel's space."""
    problem = Problem(dtype="bf16", d=d)
    tiles = random.Random(d).sample(legal_tiles(kernel, problem, gpu), count)
    return [KernelSpec.of(kernel, problem, tile, gpu.sm) for tile in tiles]


@pytest.mark.parametrize("d", [40, 64, 128, 256])
@pytest.mark.parametrize("kernel", ["forward", "fused", "dkdv", "dq"])
def test_bytes_are_those_of_the_text(kernel: KernelName, d: int) -> None:
    """The text places each buffer after the one before, and its banner gives the sum that the launch asks for."""
    for spec in sample(kernel, d, A100, 8):
        source = render(spec)
        placed = {name: int(offset) for name, offset in re.findall(r"constexpr int (\w+_smem) = (\d+);", source.text)}
        assert placed == {buffer.name: buffer.offset for buffer in buffers(spec)}
        (total,) = re.findall(r"// +(\d+)  in all, dynamic", source.text)
        assert int(total) == smem_bytes(spec) == source.smem_bytes
        ends = {b.offset + b.bytes for b in buffers(spec)} | {0}
        assert set(placed.values()) <= ends and max(ends) == smem_bytes(spec)


@pytest.mark.parametrize("kilobytes", [64, 99, 163, 227])
def test_no_tile_above_the_limit_is_legal(kilobytes: int) -> None:
    """Over a kernel's space, for every size of shared memory that parts have (BUG-26)."""
    gpu = replace(A100, smem_sm_kb=kilobytes + 1)
    for kernel in ("forward", "fused", "dq"):
        specs = sample(kernel, 64, gpu, 20)
        assert max(smem_bytes(spec) for spec in specs) <= kilobytes * 1024


def test_large_heads_fit_the_small_parts() -> None:
    """d = 256 forward and d = 192 backward at 99 KB (BUG-26)."""
    for kernel, d in (("forward", 256), ("fused", 192), ("dkdv", 256), ("dq", 256)):
        problem = Problem(dtype="bf16", d=d)
        spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, RTX4090), 89)  # type: ignore[arg-type]
        assert smem_bytes(spec) <= 99 * 1024


@pytest.mark.parametrize("kernel", ["forward", "fused", "dkdv", "dq"])
def test_every_refusal_has_a_reason_with_numbers(kernel: KernelName) -> None:
    import itertools

    problem = Problem(dtype="bf16", d=128)
    values = choices(kernel, problem, RTX4090)
    reasons = set()
    for combination in itertools.islice(itertools.product(*values.values()), 0, None, 7):
        tile = TILE_OF[kernel](**dict(zip(values, combination, strict=True)))
        reason = why_illegal(KernelSpec.of(kernel, problem, tile, 89), RTX4090)
        if reason is not None:
            reasons.add(re.sub(r"\d+", "#", reason))
            assert len(re.findall(r"\d+", reason)) >= 2 and reason.endswith("."), reason
    assert len(reasons) >= 2


@pytest.mark.parametrize(
    ("tile", "needles"),
    [
        (ForwardTile(Br=128, Bc=176, warps=4), ["101376", "Bc"]),
        (ForwardTile(Br=100, Bc=64, warps=4), ["100"]),
        (ForwardTile(Br=128, Bc=24, warps=4), ["24", "16"]),
        (ForwardTile(Br=128, Bc=64, warps=17), ["17", "16"]),
        (ForwardTile(Br=128, Bc=64, warps=4, q_steps=9), ["9", "8"]),
        (ForwardTile(Br=128, Bc=64, warps=4, min_blocks=4), ["4"]),
        (ForwardTile(Br=0, Bc=64, warps=4), ["0"]),
        (ForwardTile(Br=128, Bc=0, warps=4), ["0"]),
        (ForwardTile(Br=128, Bc=64, warps=0), ["0"]),
        (ForwardTile(Br=128, Bc=64, warps=4, min_blocks=0), ["0"]),
    ],
    ids=["memory", "Br", "Bc", "warps", "q_steps", "min_blocks", "Br-0", "Bc-0", "warps-0", "min_blocks-0"],
)
def test_refusals_of_forward(tile: ForwardTile, needles: list[str]) -> None:
    reason = why_illegal(KernelSpec(kernel="forward", dtype="bf16", d=128, causal=False, tile=tile, sm=89), RTX4090)
    assert reason is not None and all(needle in reason for needle in needles), reason


@pytest.mark.parametrize("kernel", KERNELS)
def test_zero_and_absurd_fields_are_refused_not_crashed_on(kernel: KernelName) -> None:
    """Whatever the command line may say, the answer is a sentence."""
    problem = Problem(dtype="bf16", d=64)
    tile = default_tile(kernel, problem, A100)
    for name, kind in ((f, type(getattr(tile, f))) for f in tile.short):
        for value in (0, 1, 3, 7, 1000) if kind is int else ():
            try:
                spec = KernelSpec.of(kernel, problem, replace(tile, **{name: value}), 80)
            except UsageError:
                continue
            reason = why_illegal(spec, A100)
            if reason is None:
                assert smem_bytes(spec) <= A100.smem_block_bytes and spec.threads <= 1024


def test_blocks_per_sm_by_what_is_scarce() -> None:
    spec = KernelSpec(
        kernel="forward", dtype="bf16", d=128, causal=False, tile=ForwardTile(Br=128, Bc=64, warps=4), sm=80
    )  # fmt: skip
    assert smem_bytes(spec) == 69632
    assert blocks_per_sm(spec, A100, registers=128) == 2  # 164 KB / 69 KB
    assert blocks_per_sm(spec, A100, registers=255) == 2  # 8 warps of 256 registers a lane
    assert blocks_per_sm(spec, RTX4090, registers=128) == 1
    assert blocks_per_sm(replace(spec, tile=ForwardTile(Br=128, Bc=64, warps=8)), A100, registers=255) == 1


def test_a_block_of_every_part_has_one_of_four_sizes() -> None:
    assert {gpu.smem_block_bytes // 1024 for gpu in GPUS.values()} == {64, 99, 163, 227}

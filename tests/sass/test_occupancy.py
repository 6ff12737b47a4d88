"""Blocks of a multiprocessor, and how a launch fills them."""

import pytest
from flashsmith.sass import DoesNotFit, MissingWork, Work, blocks_per_sm
from flashsmith.sass.launch import list_schedule, relative_work, waves_cycles

from .boards import A100, KB, RTX4090


@pytest.mark.parametrize(
    ("registers", "warps", "smem_bytes", "board", "blocks"),
    [
        (255, 4, 48 * KB, A100, 2),  # registers: 2 warps a sub-partition
        (168, 4, 16 * KB, A100, 3),
        (128, 8, 16 * KB, A100, 2),
        (129, 8, 16 * KB, A100, 1),  # allocated in eights: 136
        (40, 4, 82 * KB, A100, 1),  # shared memory: 82 + 1 KB reserved, twice, exceed 164
        (40, 4, 81 * KB, A100, 2),
        (32, 4, 1024, A100, 16),  # threads
        (32, 4, 1024, RTX4090, 12),
        (16, 1, 0, A100, 32),  # blocks
        (255, 4, 48 * KB, RTX4090, 2),
        (255, 4, 50 * KB, RTX4090, 1),
    ],
)
def test_blocks_per_sm(registers, warps, smem_bytes, board, blocks):
    assert blocks_per_sm(registers, 0, Work(1000, warps, smem_bytes), board) == blocks


def test_static_shared_memory_counts():
    assert blocks_per_sm(40, 41 * KB, Work(1000, 4, 41 * KB), A100) == 1


@pytest.mark.parametrize(
    ("registers", "warps", "smem_bytes", "names"), [(255, 12, 0, "255 registers"), (32, 4, 200 * KB, "shared memory")]
)
def test_the_limit_is_named(registers, warps, smem_bytes, names):
    with pytest.raises(DoesNotFit, match=names):
        blocks_per_sm(registers, 0, Work(1000, warps, smem_bytes), A100)


def test_waves_and_tail():
    def alone_is_faster(among):
        return {1: 60.0, 2: 100.0}[among]

    assert waves_cycles(blocks=400, sms=100, resident=2, block_cycles=alone_is_faster) == 200
    assert waves_cycles(blocks=450, sms=100, resident=2, block_cycles=alone_is_faster) == 260
    assert waves_cycles(blocks=550, sms=100, resident=2, block_cycles=alone_is_faster) == 300


def test_longest_first_wins():
    jobs = [float(k) for k in range(1, 41)]
    assert list_schedule(reversed(jobs), 8) < list_schedule(jobs, 8)
    assert list_schedule(jobs, 1) == sum(jobs)


def test_relative_work_repeats_a_pattern():
    pattern, repeats = relative_work(Work(6, 4, unequal=(3, 1)))
    assert pattern == [1.5, 0.5] and repeats == 3


@pytest.mark.parametrize("unequal", [(1, 2, 3, 4), (0, 0)], ids=["length", "zero"])
def test_bad_patterns_are_refused(unequal):
    with pytest.raises(MissingWork):
        relative_work(Work(6, 4, unequal=unequal))

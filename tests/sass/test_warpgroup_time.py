"""Times of warpgroups: products and ordinary work, how much of it the schedule lets overlap, and whole launches."""

from dataclasses import replace

import pytest
from flashsmith.sass import Function, Work, predict_time
from flashsmith.sass.launch import shared_out
from flashsmith.sass.warpgroup import read_course
from flashsmith.sass.warpgroup_time import CONCURRENCY, L2_SHARE, LOADS, NOTHING, PRODUCT_LATENCY, Copied, step_time

from .boards import H100
from .listings import listed
from .test_warpgroup import BARE, STEP

PRODUCTS = 4 * 128 * 176 * 128 / 4096  # cycles of the tensor cores for two warpgroups
EXPONENTIALS = 2 * 90 * 8


def of(step, warpgroups=2, copied=NOTHING, turns=True, board=H100):
    return step_time(read_course(step, board), warpgroups, board, copied, turns=turns)


def test_a_step_is_products_and_what_does_not_overlap():
    time = of(STEP)
    assert time.products == PRODUCTS and time.busy["special"] == EXPONENTIALS
    # Beside products: all under one's own, but what goes before; and half of the products' time under another's.
    expected = time.products + time.ordinary + 2 * PRODUCT_LATENCY - CONCURRENCY * time.beside
    assert time.cycles == pytest.approx(expected)
    assert EXPONENTIALS < time.ordinary < EXPONENTIALS + 200
    assert PRODUCTS / 2 < time.beside <= 2 * time.ordinary


def test_the_order_of_the_code_counts():
    """Exponentials behind the wait for P V have no product of their warpgroup beside them, and without turns none."""
    assert of(BARE).cycles > of(STEP).cycles + 0.2 * EXPONENTIALS
    assert of(STEP, turns=False).cycles > of(STEP).cycles + 0.2 * EXPONENTIALS
    alone = of(BARE, turns=False)
    assert alone.cycles == pytest.approx(alone.products + alone.ordinary, rel=0.03)


def test_one_warpgroup_has_no_other():
    assert of(STEP, warpgroups=1, turns=True).cycles == of(STEP, warpgroups=1, turns=False).cycles


def test_no_step_is_shorter_than_a_pipe_is_busy():
    tile = 2 * 176 * 128 * 2
    slow = replace(H100, l2_bytes_per_clock_sm=8.0)
    time = of(STEP, copied=Copied(loaded=tile), board=slow)
    assert time.cycles == time.busy["l2"] == pytest.approx(tile / 8 / L2_SHARE)
    assert of(STEP, copied=Copied(reduced=1e6)).cycles == pytest.approx(1e6 / H100.path.reduction_bytes_per_clock)


def test_what_another_block_loads_costs_shared_memory_alone():
    """L2 delivers half of a tile to each of two blocks, and both write all of it."""
    tile = 2 * 176 * 128 * 2
    alone, pair = (of(STEP, copied=copied) for copied in (Copied(tile), Copied(loaded=tile / 2, multicast=tile / 2)))
    own = of(STEP).busy["l2"]
    assert pair.busy["l2"] - own == pytest.approx((alone.busy["l2"] - own) / 2)
    assert pair.busy["shared"] == alone.busy["shared"] > of(STEP).busy["shared"]


def test_shared_memory_may_hold_the_products_up():
    """Operands, and what TMA writes and reads, at 128 bytes a clock."""
    bytes_of = 2 * (8 * (64 + 176) + 11 * 128) * 32
    copied = Copied(loaded=176 * 128 * 2, reduced=1e5, multicast=176 * 128 * 2)
    time = of(STEP, copied=copied, board=replace(H100, wgmma_flops_per_clock_sm=1e6))
    assert time.products == time.busy["shared"] == pytest.approx((bytes_of + sum(copied)) / 128)


# ---- a kernel with roles, one loop with masks and one without ---------------------------------------------------

HGMMA = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
KERNEL = [
    "S2R R0, SR_TID.X", "@P0 BRA `(.L_producer)", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0",
    ".L_masked:", HGMMA, "WARPGROUP.DEPBAR.LE gsb0, 0x0", *["FSEL R1, R2, R3, P0"] * 200, *["MUFU.EX2 R0, R1"] * 16,
    "@P1 BRA `(.L_masked)",
    ".L_again:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", "@!P0 BRA `(.L_again)",
    ".L_main:", HGMMA, "WARPGROUP.DEPBAR.LE gsb0, 0x0", *["MUFU.EX2 R0, R1"] * 16, "@P1 BRA `(.L_main)",
    "STG.E [R2], R4", "EXIT",
    ".L_producer:", "UTMALDG.4D [UR8], [UR4]", "@P1 BRA `(.L_producer)", "EXIT",
]  # fmt: skip
FLOPS = 2.0 * 128 * 128 * 16  # of a step of two warpgroups


def kernel():
    instructions, labels = listed(KERNEL)
    return Function("kernel", instructions, labels, 168, 0, 0)


def work(blocks=132, steps=100, **more):
    return Work(blocks, 12, 200_000, FLOPS * steps * blocks, rare_share=0.0, **more)


def test_the_producer_computes_nothing():
    """Four of twelve warps: by their number, or because the code gives registers away."""
    time = predict_time(kernel(), H100, work())
    assert time.iterations == pytest.approx(100 - 1)  # one is masked, on the way in
    assert predict_time(kernel(), H100, work(producer_warps=4)).seconds == time.seconds
    assert predict_time(kernel(), H100, work(producer_warps=0)).seconds != time.seconds


def test_masked_steps_have_a_loop_of_their_own():
    assert len(kernel().twin) == 200 + 16 + 3 and len(kernel().short_trace.loop) == 16 + 3
    plain, half, masked = (predict_time(kernel(), H100, work(twin_share=s)) for s in (0.0, 0.5, 1.0))
    extra = masked.cycles_per_iteration - plain.cycles_per_iteration
    assert extra == pytest.approx(2 * 200 * 2 - 2 * 16 * 8)  # the busier pipe of two warps: integer, special functions
    assert half.cycles_per_iteration == pytest.approx(plain.cycles_per_iteration + extra / 2)


def test_a_second_look_at_a_barrier_is_on_no_path():
    assert not any(i.base == "SYNCS" for i in kernel().short_trace.prologue[-3:-2])
    assert sum(i.base == "SYNCS" for part in kernel().short_trace for i in part) == 1


def test_persistent_blocks_load_the_next_tile_under_the_end_of_one():
    bytes_of = 60_000.0
    alone, staying = (
        predict_time(kernel(), H100, work(blocks=264, first_bytes=bytes_of, persistent=p)) for p in (False, True)
    )
    assert staying.seconds < alone.seconds
    loads = LOADS * H100.l2_latency + bytes_of / (0.85 * 3350 / 1.755 / 132)
    assert alone.overhead_cycles > loads
    one = [predict_time(kernel(), H100, work(blocks=132, first_bytes=bytes_of, persistent=p)) for p in (False, True)]
    assert one[0].cycles == pytest.approx(one[1].cycles)  # a single tile has no next one


def test_tiles_are_dealt_the_longest_first_and_to_and_fro():
    assert shared_out([3.0, 1.0, 2.0, 2.0], blocks=2) == 4.0
    assert shared_out([5.0, 4.0, 3.0, 2.0, 1.0], blocks=2) == 8.0
    pattern = tuple(range(1, 67))
    flops = FLOPS * sum(pattern) * 2
    launch = Work(132, 12, 200_000, flops, unequal=pattern, rare_share=0.0, persistent=True)
    few = replace(H100, sms=66)
    shared = predict_time(kernel(), few, launch)
    alike = predict_time(kernel(), few, replace(launch, unequal=None))
    assert shared.cycles == pytest.approx(alike.cycles, rel=0.02)


def test_what_bounds_a_step_is_said():
    sentence = predict_time(kernel(), H100, work()).bound_by
    assert "order of the warpgroups' work" in sentence and "are not hidden" in sentence


def test_few_blocks_have_the_rate_of_l2_to_themselves():
    """As much as the port of an SM takes, twice and more what each gets when all ask."""
    more = {"loaded_bytes": 132 * 100 * 1e5, "first_bytes": 1e5}
    all_ask = predict_time(kernel(), H100, work(**more))
    few = predict_time(kernel(), H100, work(blocks=13, **{**more, "loaded_bytes": 13 * 100 * 1e5}))
    assert all_ask.cycles_per_iteration == pytest.approx(1e5 / (L2_SHARE * H100.l2_bytes_per_clock_sm))
    assert few.cycles_per_iteration == pytest.approx(1e5 / 64)
    assert few.overhead_cycles < all_ask.overhead_cycles - 5000

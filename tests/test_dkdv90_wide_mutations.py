"""Faults in dK and dV of wide heads that the emulator must find: what is left out, too early, or in another place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flashsmith.inputs import make_inputs
from flashsmith.render import Source, render
from flashsmith.spec.dtype import round_to, widen
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import WarpgroupWideTile

from .split90 import replaced, wrong


def source_of(problem: Problem, tile: WarpgroupWideTile) -> Source:
    return render(KernelSpec.of("dkdv90_wide", problem, tile, 90))


# Four tiles of two query heads and two buffers, so that the rings go round; a ragged end of the keys and of the rows.
PROBLEM = Problem(dtype="bf16", d=136, Nq=70, Nk=90, Hq=2, Hk=1)
SOURCE = source_of(PROBLEM, WarpgroupWideTile(Bc=96, consumers=3))
# Without overlap, with a buffer of dO less than of Q.
PLAIN = source_of(PROBLEM, WarpgroupWideTile(Bc=96, consumers=3, dO_stages=1, overlap=False))
# Two blocks of columns for each of two warpgroups, five chunks of keys, and one buffer of all.
TWO_PROBLEM = replace(PROBLEM, d=200, Hq=1)
TWO = source_of(TWO_PROBLEM, WarpgroupWideTile(Bc=80, stages=1, dO_stages=1, overlap=False))
CAUSAL_PROBLEM = replace(PROBLEM, causal=True, Nq=200, Nk=190, Hq=1)
CAUSAL = source_of(CAUSAL_PROBLEM, WarpgroupWideTile(Bc=48, consumers=3))

RELEASES = "            release(Q_empty, Q_behind);\n            release(dO_empty, dO_behind);\n"
LAST_WAIT = "            wgmma_wait<0>();\n            pin(dK_rmem);"

# What is changed in the text; every old text stands in it once.
MUTANTS: dict[str, list[tuple[str, str]]] = {
    "no wait for Q": [("mbarrier_wait(smem + Q_full + 8 * Q_ring.stage, Q_ring.parity);", "")],
    "no wait for dO": [("mbarrier_wait(smem + dO_full + 8 * dO_ring.stage, dO_ring.parity);", "")],
    "no wait for K and V": [("mbarrier_wait(smem + KV_full, 0);\n    pin(dK_rmem);", "pin(dK_rmem);")],
    "the producer waits for no empty Q": [("mbarrier_wait(smem + Q_empty + 8 * Q_ring.stage, Q_ring.parity);", "")],
    "Q and dO are released before they are read": [(RELEASES, ""), (LAST_WAIT, RELEASES + LAST_WAIT)],
    "S is not waited for": [("wgmma_wait<follows.value ? 3 : 1>();", "")],
    "dP is not waited for": [("wgmma_wait<follows.value ? 2 : 0>();", "")],
    "dK is not waited for": [(LAST_WAIT, LAST_WAIT.replace("<0>", "<1>"))],
    "the last dK is not waited for": [("multiply_scores(Q_behind.stage, dO_behind.stage);\n    wgmma_wait<0>();",
                                       "multiply_scores(Q_behind.stage, dO_behind.stage);\n    wgmma_wait<1>();")],
    "P and dS are overwritten while others read them": [("all_consumers();  // they", "// they")],
    "P and dS of others are not waited for": [("all_consumers();  // P and dS", "// P and dS")],
    "no proxy fence behind P and dS": [("fence_proxy_async();\n        all_consumers();", "all_consumers();")],
    "no proxy fence before dK and dV are stored": [("    fence_proxy_async();\n    barrier", "    barrier")],
    "no barrier before dK and dV are stored": [("barrier_sync<128>(2 + warpgroup);  // this", "// this")],
    "no fence before the products": [("wgmma_fence();  // for the sums", "// for the sums")],
    "the statistics' bytes are not announced": [("(full, Q_tile + stats_bytes)", "(full, Q_tile)")],
    "V's bytes are not announced": [("K_tile + V_tile)", "K_tile)")],
    "16 bytes too many are announced": [("(full, dO_tile)", "(full, dO_tile + 16)")],
    "the rings' parity never flips": [("parity ^= 1;", "")],
    "the producer begins with parity 0": [("Ring<Q_stages> Q_ring = {0, 1};", "Ring<Q_stages> Q_ring = {0, 0};")],
    "every lane releases": [("if (lane == 0) mbarrier_arrive", "mbarrier_arrive")],
    "mbarriers are used before they are set up": [("__syncthreads();  // the mbarriers", "// the mbarriers")],
    "the statistics of the first tile serve all": [("stats_head + i0 * 3", "stats_head")],
    "the statistics of the first head serve all": [("(static_cast<i64>(here.batch) * Hq + head)", "here.head")],
    "a query head too few": [("heads > 0; --heads", "heads > 1; --heads")],
    "panels of P at the wrong distance": [("descriptor(smem + P_smem, Q_panel)", "descriptor(smem + P_smem, 1024)")],
    "panels of dS at the wrong distance": [("descriptor(smem + dS_smem, Q_panel)", "descriptor(smem + dS_smem, 1024)")],
    "rows at the wrong distance": [("(1024 >> 4) << 32", "(512 >> 4) << 32")],
    "no swizzle": [("| 1ull << 62", "")],
    "a step of columns is too short": [("x % 4 * 32) / 16, B + (x / 4", "x % 4 * 16) / 16, B + (x / 4")],
    "panels of K at the wrong distance": [("B + (x / 4 * KV_panel", "B + (x / 4 * Q_panel")],
    "a step of queries of Q is too short": [("* Q_panel + y * 16 * 128)", "* Q_panel + y * 8 * 128)")],
    "a step of queries of P is too short": [("B + y * 16 * 128 / 16", "B + y * 8 * 128 / 16")],
    "all warpgroups sum the columns of the first": [("own_panel = warpgroup * (Q_panel / 16)", "own_panel = 0")],
    "all warpgroups read the first keys of K": [
        ("K_smem + warpgroup * own_keys * 128, KV_panel)", "K_smem, KV_panel)")
    ],
    "P is stored without the swizzle": [("((c % 8 ^ row % 8) << 4)", "(c % 8 << 4)")],
    "P of all warpgroups in one place": [("c = warpgroup * (own_keys / 8) + n", "c = n")],
    "dS in the place of P": [("put_scores(smem + dS_smem, dS", "put_scores(smem + P_smem, dS")],
    "delta is not taken off": [("(dP[0][n][c] + minus_delta_of)", "dP[0][n][c]")],
    "delta of the other row": [("of = ld_shared(of_stage + 32 * h)", "of = ld_shared(of_stage)")],
    "lse of the other row": [("scale_log2, minus_lse[e / 2])", "scale_log2, minus_lse[1 - e / 2])")],
    "dK is not scaled": [("dK_rmem[b], scale)", "dK_rmem[b], 1.f)")],
    "dK is stored without the swizzle": [("lane / 8 % 2 ^ row % 8", "lane / 8 % 2")],
    "halves of 16 columns swapped": [("{pair(n, 0), pair(n, 1), pair(n + 1, 0), pair(n + 1, 1)}",
                                      "{pair(n, 1), pair(n, 0), pair(n + 1, 1), pair(n + 1, 0)}")],
    "dV of the first panel is stored everywhere": [("V_smem + c * KV_panel, 64 * c, there", "V_smem, 64 * c, there")],
}  # fmt: skip

# With as many buffers of dO as of Q, its barriers would say nothing that those of Q have not said.
PLAIN_MUTANTS: dict[str, list[tuple[str, str]]] = {
    "the producer waits for no empty dO": [("mbarrier_wait(smem + dO_empty + 8 * dO_ring.stage, dO_ring.parity);", "")],
    "dO is released before it is read": [
        ("wgmma_wait<1>();\n        pin(dV_rmem);\n        release(dO_empty, dO_ring);",
         "release(dO_empty, dO_ring);\n        wgmma_wait<1>();\n        pin(dV_rmem);")
    ],
    "Q is released before dK has read it": [
        ("wgmma_wait<0>();\n        pin(dK_rmem);\n        release(Q_empty, Q_ring);",
         "release(Q_empty, Q_ring);\n        wgmma_wait<0>();\n        pin(dK_rmem);")
    ],
    "P and dS are overwritten while others read them": [("all_consumers();  // they", "// they")],
    "P and dS of others are not waited for": [("all_consumers();  // P and dS", "// P and dS")],
    "no fence before the products": [("wgmma_fence();  // for the sums", "// for the sums")],
    "dV is not waited for": [("wgmma_wait<1>();\n        pin(dV_rmem);", "pin(dV_rmem);")],
}  # fmt: skip

TWO_MUTANTS: dict[str, list[tuple[str, str]]] = {
    "one warpgroup empties Q": [("Q_empty + 8 * s, 4 * consumers", "Q_empty + 8 * s, 4")],
    "one warpgroup empties dO": [("dO_empty + 8 * s, 4 * consumers", "dO_empty + 8 * s, 4")],
    "both blocks are of the same columns": [("b * consumers * Q_panel", "0")],
    "the second block is the neighbour": [("b * consumers * Q_panel", "b * Q_panel")],
    "the last chunk of keys is left out": [("stmatrix_x2(chunk(last), R[last][0], R[last][1]);", "")],
    "the second block is not stored": [("c < K_panels; c += consumers)", "c < consumers; c += consumers)")],
}  # fmt: skip

CAUSAL_MUTANTS: dict[str, list[tuple[str, str]]] = {
    "a masked tile too few": [("(warpgroup + 1) * own_keys - 1) step", "warpgroup * own_keys - 1) step")],
    "the diagonal is off by one": [("diagonal = Nk - Nq;", "diagonal = Nk - Nq + 1;")],
    "a key more is seen": [("> room + e / 2 * 8", "> room + 1 + e / 2 * 8")],
    "rows of a thread are one": [("> room + e / 2 * 8", "> room")],
    "keys of all warpgroups are the first's": [("here.key - warpgroup * own_keys - lane", "here.key - lane")],
    "a tile too few": [("max(0, (here.key - diagonal) / Br * Br)", "max(0, (here.key - diagonal + Br - 1) / Br * Br)")],
    "the rows do not step": [("i0 += Br;\n    };", "};")],
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str) -> None:
    """By a fault of the emulator, an unordered access, the check of fences, or a wrong result."""
    assert wrong(SOURCE, replaced(SOURCE.text, MUTANTS[name]), PROBLEM)


@pytest.mark.parametrize("name", PLAIN_MUTANTS)
def test_a_fault_without_overlap_is_found(name: str) -> None:
    assert wrong(PLAIN, replaced(PLAIN.text, PLAIN_MUTANTS[name]), PROBLEM)


@pytest.mark.parametrize("name", TWO_MUTANTS)
def test_a_fault_in_two_blocks_of_columns_is_found(name: str) -> None:
    assert wrong(TWO, replaced(TWO.text, TWO_MUTANTS[name]), TWO_PROBLEM)


@pytest.mark.parametrize("name", CAUSAL_MUTANTS)
def test_a_fault_under_the_mask_is_found(name: str) -> None:
    assert wrong(CAUSAL, replaced(CAUSAL.text, CAUSAL_MUTANTS[name]), CAUSAL_PROBLEM)


def test_a_huge_max_that_is_not_taken_off_is_found() -> None:
    x = make_inputs(PROBLEM)
    huge = replace(x, q=round_to(widen(x.q, "bf16") * 1e4, "bf16"))
    assert not wrong(SOURCE, SOURCE.text, PROBLEM, huge)
    left = replaced(SOURCE.text, [(", m[e / 2]);  // not fused", ", 0.f);  // not fused")])
    assert wrong(SOURCE, left, PROBLEM, huge)


def test_without_a_fault_nothing_is_found() -> None:
    assert not wrong(SOURCE, SOURCE.text, PROBLEM)
    assert not wrong(PLAIN, PLAIN.text, PROBLEM)
    assert not wrong(TWO, TWO.text, TWO_PROBLEM)
    assert not wrong(CAUSAL, CAUSAL.text, CAUSAL_PROBLEM)

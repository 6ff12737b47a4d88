"""Faults in the forward of warpgroups that the emulator must find: what is left out, too early, or in another place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flashsmith.check import check
from flashsmith.compile import Binary, compile_source
from flashsmith.emulator import EmulatorError, missing_wgmma_fences, parse
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import LaunchError
from flashsmith.render import Source, render
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import WarpgroupTile

from .emulator.conftest import compile_cuda

# Three tiles of query rows for two blocks, so that one goes on to a second; each of five tiles of K and V in two
# buffers, so that the rings go round and end elsewhere than they began; a ragged end of the keys and of the rows.
PROBLEM = Problem(dtype="bf16", d=128, Nq=270, Nk=290, Hq=1, Hk=1)
CAUSAL = Problem(dtype="bf16", d=64, Nq=130, Nk=150, Hq=1, Hk=1, causal=True)
SOURCE = render(KernelSpec.of("forward90", PROBLEM, WarpgroupTile(Br=128, Bc=64, pingpong=True), 90))
CAUSAL_SOURCE = render(KernelSpec.of("forward90", CAUSAL, WarpgroupTile(Br=128, Bc=32), 90))

Edits = list[tuple[str, str]]
LAST_WAIT = "wgmma_wait<0>();\n            pin(O_rmem);\n            pin(S);"
NOW = """round_weights(P, S);
        for (int y = 0; y < Bc / 16; ++y)
            for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(P[y][e]) :: "memory");
"""
RELEASE_K = "pin(S);\n            release(K_empty, K_ring);"
RELEASE_V = "release(V_empty, V_ring);\n            round_weights"
LAST_PV = "wgmma_wait<0>();\n        pin(O_rmem);\n        release(V_empty, V_ring);"
RELEASE_Q = "if (j == 0) release_Q();\n            weigh"
V_DESC = "V_desc = descriptor(smem + V_smem, "
LOOP = "for (int round = 0; dealt(round) < tiles; ++round) {\n        const Place here = tile_of(round);\n        int j"

# What is changed in the text; every old text stands in it once. Not here, because no result and no order of accesses
# depends on it: that rounds are dealt out backwards as well (tests/spec/test_order.py looks at the work of blocks), and
# that a tile's last V is released after it is read, for before the producer fills that buffer it waits for a K that is
# released later.
MUTANTS: dict[str, Edits] = {
    # full and empty buffers
    "no wait for K in the loop": [("if (j > 0) wait_K();", "")],
    "no wait for V in the loop": [("wait_V();\n            multiply_PV", "multiply_PV")],
    "no wait for Q": [("mbarrier_wait(smem + Q_full, round % 2);", "")],
    "the producer waits for no empty K": [("mbarrier_wait(smem + K_empty + 8 * K_ring.stage, K_ring.parity);", "")],
    "the producer waits for no empty V": [("mbarrier_wait(smem + V_empty + 8 * V_ring.stage, V_ring.parity);", "")],
    "the producer waits for no empty Q": [("mbarrier_wait(smem + Q_empty, round % 2 ^ 1);", "")],
    "K is released before it is read": [
        ("wgmma_wait<1>();", "release(K_empty, K_ring); wgmma_wait<1>();"), (RELEASE_K, "pin(S);"),
    ],
    "V is released before it is read": [
        (LAST_WAIT, "release(V_empty, V_ring);" + LAST_WAIT), (RELEASE_V, "round_weights"),
    ],
    "Q is released before it is read": [
        ("wgmma_wait<1>();", "if (j == 0) release_Q(); wgmma_wait<1>();"), (RELEASE_Q, "weigh"),
    ],
    "Q is released a tile too early": [(RELEASE_Q, RELEASE_Q.replace("j == 0", "j == 1"))],
    "Q is not released": [(RELEASE_Q, "weigh")],
    "the last V is not released": [(LAST_PV, LAST_PV.replace("release(V_empty, V_ring);", ""))],
    "16 bytes too many are announced": [("(full, K_tile)", "(full, K_tile + 16)")],
    "half of the bytes are announced": [("(full, V_tile)", "(full, V_tile / 2)")],
    "half of Q is announced": [("K_panels * Q_panel);", "Q_panel);")],
    "one warpgroup empties a buffer": [("K_empty + 8 * s, 4 * consumers", "K_empty + 8 * s, 4")],
    "one warpgroup empties Q": [("Q_empty, 4 * consumers", "Q_empty, 4")],
    "a buffer awaits one arrival too many": [("V_empty + 8 * s, 4 * consumers", "V_empty + 8 * s, 4 * consumers + 1")],
    "Q awaits one arrival too many": [("Q_empty, 4 * consumers", "Q_empty, 4 * consumers + 1")],
    "every lane releases": [("if (lane == 0) mbarrier_arrive(smem + empty", "mbarrier_arrive(smem + empty")],
    "every lane releases Q": [("if (lane == 0) mbarrier_arrive(smem + Q_empty", "mbarrier_arrive(smem + Q_empty")],
    "V comes in another order": [("load_V(j);", "load_V(j - 1);")],
    "mbarriers are used before they are set up": [("__syncthreads();  // the mbarriers", "// the mbarriers")],
    # parities, and what passes from tile to tile
    "the rings' parity never flips": [("parity ^= 1;", "")],
    "the producer begins with parity 0": [("K_ring = {0, 1}", "K_ring = {0, 0}")],
    "the consumers begin with parity 1": [("K_ring = {0, 0}", "K_ring = {0, 1}")],
    "the parity of Q does not flip for the consumers": [("Q_full, round % 2", "Q_full, 0")],
    "the parity of Q does not flip for the producer": [("round % 2 ^ 1", "1")],
    "the consumers begin each tile at the first buffer": [(LOOP, LOOP.replace("int j", "K_ring = {0, 0}; int j"))],
    "the parity of V flips between tiles": [(LOOP, LOOP.replace("int j", "V_ring.parity ^= 1; int j"))],
    "the producer begins each tile at the first buffer": [("load_K(Tc - 1);", "K_ring = {0, 1}; load_K(Tc - 1);")],
    "the first turn is given with each tile": [
        (LOOP, LOOP.replace("int j", "if (warpgroup == consumers - 1) next_turn(); int j")),
    ],
    "a turn is taken at the end of a tile": [(LAST_PV, "my_turn();" + LAST_PV)],
    "a tile is left out between rounds": [("return round * gridDim.x +", "return round * (gridDim.x + 1) +")],
    "a tile is left out and another is done twice": [("gridDim.x - 1 - block", "gridDim.x - block")],
    "O goes to the place of the next tile": [("there = tile_of(round)", "there = tile_of(round + 1)")],
    # turns
    "the first turn is not given": [("if (warpgroup == consumers - 1) next_turn();", "")],
    "the turn is passed to oneself": [("(warpgroup + 1) % consumers", "warpgroup")],
    "turns of three warpgroups": [("barrier_sync<256>", "barrier_sync<384>")],
    # products
    "O and V are not waited for": [(LAST_WAIT, LAST_WAIT.replace("<0>", "<1>"))],
    "S is not waited for": [("wgmma_wait<1>();", "")],
    "the last O is not waited for": [(LAST_PV, LAST_PV.replace("<0>", "<1>"))],
    "P is overwritten while it is read": [
        (RELEASE_V + "(P, S);", "release(V_empty, V_ring);"), (LAST_WAIT, NOW + LAST_WAIT),
    ],
    "O is rescaled while it is summed": [(LAST_WAIT, "multiply_rows(O_rmem, alpha); pin(O_rmem);" + LAST_WAIT)],
    "no fence before the products of the loop": [("my_turn();\n            wgmma_fence();", "my_turn();")],
    "panels of V at the wrong distance": [(V_DESC + "KV_panel)", V_DESC + "1024)")],
    "rows at the wrong distance": [("(1024 >> 4) << 32", "(512 >> 4) << 32")],
    "steps of K twice as long": [("KV_panel + x % 4 * 32) / 16, x > 0", "KV_panel + x % 4 * 64) / 16, x > 0")],
    "no swizzle": [("| 1ull << 62", "")],
    "panels begin anywhere": [("+ 1023) & ~1023u", "+ 128)")],
    # softmax and the way out
    "no mask of the end": [("if (incomplete()) mask(S, last - j * Bc);", "")],
    "the last key is masked": [("if (8 * n + c > room)", "if (8 * n + c >= room)")],
    "l is not rescaled": [("l[0][h] *= alpha[0][h];", "")],
    "neighbours keep what they should exchange": [("odd ? x[e] : x[e + 1], 1", "odd ? x[e + 1] : x[e], 1")],
    "the upper lanes keep what they should exchange": [("upper ? x[e] : x[e + 2], 2", "upper ? x[e + 2] : x[e], 2")],
    "rows that there are not are written": [("O_rmem, h, i < Nq)", "O_rmem, h, true)")],
}  # fmt: skip
CAUSAL_MUTANTS: dict[str, Edits] = {
    "the first rows are masked as late as the last": [("last + warpgroup * 64", "last + 64")],
    "the last tile is not masked": [("if (incomplete()) mask(S, last - j * Bc);", "")],
    "rows are counted from their warpgroup": [("if (masked.value) mask(S, last", "if (masked.value) mask(S, own_last")],
    "the walk begins a tile too late": [("min(here.i0 + Br, Nq) + Nk - Nq", "here.i0 + 64 + Nk - Nq")],
    "the longest tiles are dealt to nobody": [("tile = Tr - 1 - ", "tile = Tr - 2 - ")],
}
# P in shared memory, in two panels.
SMEM = Problem(dtype="bf16", d=64, Nq=130, Nk=150, Hq=1, Hk=1)
SMEM_SOURCE = render(KernelSpec.of("forward90", SMEM, WarpgroupTile(Br=128, Bc=80, p_smem=True), 90))
P_BARRIERS = [f"barrier_sync<128>(8 + warpgroup);  // {what}" for what in ("the warpgroup's", "all four")]
SMEM_MUTANTS: dict[str, Edits] = {
    "no barrier before P is overwritten": [(P_BARRIERS[0], "//")],
    "no barrier before P is read": [(P_BARRIERS[1], "//")],
    "no proxy fence before P is read": [("        fence_proxy_async();\n", "")],
    "P is overwritten while it is read": [
        (RELEASE_V.replace("round_weights", "put_weights(S);"), "release(V_empty, V_ring);"),
        (LAST_WAIT, "put_weights(S);" + LAST_WAIT),
    ],
    "all warpgroups write to the rows of one": [("P_smem + warpgroup * 64 * 128", "P_smem")],
    "all warps write to the rows of one": [("thread % 128 / 32 * 16 + thread % 16", "thread % 16")],
    "P is stored without the swizzle": [("(chunk ^ row % 8) << 4", "chunk << 4")],
    "panels of P at the wrong distance": [("P_rows + y / 4 * Q_panel", "P_rows + y / 4 * 8192")],
    "steps of P twice as long": [("P + (y / 4 * Q_panel + y % 4 * 32)", "P + (y / 4 * Q_panel + y % 4 * 64)")],
}  # fmt: skip


# Pairs of blocks: three tiles of a head make two pairs, and two heads four for the one cluster. Not here, because
# nothing depends on it: which of the two halves a block loads, and the fence after mbarriers are made, for meeting at
# the start publishes them too.
PAIRS = Problem(dtype="bf16", d=64, Nq=150, Nk=290, Hq=2, Hk=2)
PAIRS_SOURCE = render(KernelSpec.of("forward90", PAIRS, WarpgroupTile(Br=64, Bc=64, cluster=2), 90))
ROWS_OF_K = "K_map, full, 64 * c, j * Bc + own_row"
TELL = "mbarrier_arrive_at(lane, smem"
PAIRS_MUTANTS: dict[str, Edits] = {
    "the other block is not told": [(TELL, TELL.replace("lane", "block_index() % 2"))],
    "the own block is not told": [(TELL, TELL.replace("lane", "1 - block_index() % 2"))],
    "only one block is told": [("if (lane < 2) mbar", "if (lane < 1) mbar")],
    "a buffer is empty for one block": [("K_empty + 8 * s, 2 * 4 * consumers", "K_empty + 8 * s, 4 * consumers")],
    "the producer waits for no empty K": [("mbarrier_wait(smem + K_empty + 8 * K_ring.stage, K_ring.parity);", "")],
    "the producer waits for no empty V": [("mbarrier_wait(smem + V_empty + 8 * V_ring.stage, V_ring.parity);", "")],
    "K is loaded for one block": [("both = 3", "both = 1")],
    "each block loads its half for itself": [("both = 3", "both = 1 << block_index() % 2")],
    "each block loads its half for the other": [("both = 3", "both = 2 >> block_index() % 2")],
    "a block that there is not is loaded for": [("both = 3", "both = 7")],
    "half of the bytes are announced": [("(full, K_tile)", "(full, K_tile / 2)")],
    "twice the bytes are announced": [("(full, V_tile)", "(full, 2 * V_tile)")],
    "both load the same half": [("block_index() % 2 * (Bc / 2)", "0")],
    "the halves of K are swapped": [(ROWS_OF_K, ROWS_OF_K.replace("own_row", "Bc / 2 - own_row"))],
    "the halves of V are one": [("V_map, full, 64 * c, j * Bc + own_row", "V_map, full, 64 * c, j * Bc")],
    "only the threads of a block meet at the start": [
        ("cluster_sync();  // the mbarriers", "__syncthreads();  // the mbarriers"),
    ],
    "nobody meets at the end": [("cluster_sync();  // no block ends", "// no block ends")],
    "a pair has tiles of two heads": [("(Nq + 2 * Br - 1) / (2 * Br) * 2", "(Nq + Br - 1) / Br")],
    "a pair has one tile": [("+ block_index() % 2;", ";")],
    "the pairs of a round overlap": [("2 * (round * pairs + pair)", "round * pairs + pair")],
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str) -> None:
    """By a fault of the emulator, an unordered access, the check of fences, or a wrong result."""
    assert wrong(PROBLEM, SOURCE, MUTANTS[name])


@pytest.mark.parametrize("name", CAUSAL_MUTANTS)
def test_a_fault_of_the_mask_is_found(name: str) -> None:
    assert wrong(CAUSAL, CAUSAL_SOURCE, CAUSAL_MUTANTS[name])


@pytest.mark.parametrize("name", SMEM_MUTANTS)
def test_a_fault_of_P_in_shared_memory_is_found(name: str) -> None:
    assert wrong(SMEM, SMEM_SOURCE, SMEM_MUTANTS[name])


@pytest.mark.parametrize("name", PAIRS_MUTANTS)
def test_a_fault_of_pairs_is_found(name: str) -> None:
    assert wrong(PAIRS, PAIRS_SOURCE, PAIRS_MUTANTS[name])


@pytest.mark.parametrize(
    ("problem", "source"),
    [(PROBLEM, SOURCE), (CAUSAL, CAUSAL_SOURCE), (SMEM, SMEM_SOURCE), (PAIRS, PAIRS_SOURCE)],
)
def test_without_a_fault_nothing_is_found(problem: Problem, source: Source) -> None:
    assert not wrong(problem, source, [])


def wrong(problem: Problem, source: Source, edits: Edits) -> bool:
    """Whether the PTX itself, or one of both timings, shows a fault. ptxas, which may refuse some, is not asked."""
    text = source.text
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the text"
        text = text.replace(old, new)
    binary = replace(compile_source(source), ptx=compile_cuda(text, "compute_90a"))
    unfenced = missing_wgmma_fences(parse(binary.ptx).kernels["forward90"])
    return bool(unfenced) or any(_fails(problem, binary, late) for late in (True, False))


def _fails(problem: Problem, binary: Binary, late: bool) -> bool:
    engine = EmulatedEngine(check_races=True, late=late, sms=2)
    try:
        return not check(problem, "forward", {"forward90": binary}, engine).ok
    except (EmulatorError, LaunchError):
        return True

"""Faults in the forward of warpgroups that the emulator must find: what is left out, too early, or in another place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flashsmith.check import check
from flashsmith.compile import Binary, compile_source
from flashsmith.emulator import EmulatorError, missing_wgmma_fences, parse
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import LaunchError
from flashsmith.render import render
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import WarpgroupTile

from .emulator.conftest import compile_cuda

# Four tiles of K and V and two buffers of each, so that the rings go round; a ragged end of the keys and of the rows.
PROBLEM = Problem(dtype="bf16", d=128, Nq=130, Nk=400, Hq=1, Hk=1)
SOURCE = render(KernelSpec.of("forward90", PROBLEM, WarpgroupTile(Br=128, Bc=112, pingpong=True), 90))

LAST_WAIT = "wgmma_wait<0>();\n        pin(O_rmem);\n        pin(S);"
NOW = """round_weights(P, S);
        for (int y = 0; y < Bc / 16; ++y)
            for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(P[y][e]) :: "memory");
"""
V_DESC = "V_desc = descriptor(smem + V_smem, "
Q_BARRIER, O_BARRIER = ("barrier_sync<128>(8 + warpgroup);  // the " + what for what in ("warpgroup's", "rows have"))

# What is changed in the text; every old text stands in it once.
MUTANTS: dict[str, list[tuple[str, str]]] = {
    "no wait for K in the loop": [("if (j > 0) wait_K();", "")],
    "no wait for V in the loop": [("wait_V();\n        multiply_PV", "multiply_PV")],
    "no wait for Q": [("mbarrier_wait(smem + Q_full, 0);", "")],
    "the producer waits for no empty buffer": [
        ("mbarrier_wait(smem + K_empty + 8 * K_ring.stage, K_ring.parity);", "")
    ],
    "K is released before it is read": [
        ("wgmma_wait<1>();", "release(K_empty, K_ring); wgmma_wait<1>();"),
        ("pin(S);\n        release(K_empty, K_ring);", "pin(S);"),
    ],
    "O and V are not waited for": [(LAST_WAIT, LAST_WAIT.replace("<0>", "<1>"))],
    "S is not waited for": [("wgmma_wait<1>();", "")],
    "P is overwritten while it is read": [
        ("release(V_empty, V_ring);\n        round_weights(P, S);", "release(V_empty, V_ring);"),
        (LAST_WAIT, NOW + LAST_WAIT),
    ],
    "O is rescaled while it is summed": [(LAST_WAIT, "multiply_rows(O_rmem, alpha); pin(O_rmem);" + LAST_WAIT)],
    "16 bytes too many are announced": [("(full, K_tile)", "(full, K_tile + 16)")],
    "half of the bytes are announced": [("(full, V_tile)", "(full, V_tile / 2)")],
    "the rings' parity never flips": [("parity ^= 1;", "")],
    "the producer begins with parity 0": [("K_ring = {0, 1}", "K_ring = {0, 0}")],
    "one warpgroup empties a buffer": [("K_empty + 8 * s, 4 * consumers", "K_empty + 8 * s, 4")],
    "every lane releases": [("if (lane == 0) mbarrier_arrive", "mbarrier_arrive")],
    "V comes in another order": [("load_V(j);", "load_V(j - 1);")],
    "the first turn is not given": [("if (warpgroup == consumers - 1) next_turn();", "")],
    "the turn is passed to oneself": [("(warpgroup + 1) % consumers", "warpgroup")],
    "no barrier before Q is overwritten": [(Q_BARRIER, "//")],
    "no barrier before O is stored": [(O_BARRIER, "//")],
    "no proxy fence before O is stored": [("    fence_proxy_async();\n", "")],
    "mbarriers are used before they are set up": [("__syncthreads();  // the mbarriers", "// the mbarriers")],
    "no fence before the products of the loop": [("my_turn();\n        wgmma_fence();", "my_turn();")],
    "panels of V at the wrong distance": [(V_DESC + "KV_panel)", V_DESC + "1024)")],
    "rows at the wrong distance": [("(1024 >> 4) << 32", "(512 >> 4) << 32")],
    "no swizzle": [("| 1ull << 62", "")],
    "no mask of the end": [("mask(S, last - j * Bc);\n    weigh", "weigh")],
    "the last key is masked": [("if (8 * n + c > room)", "if (8 * n + c >= room)")],
    "l is not rescaled": [("l[0][h] *= alpha[0][h];", "")],
    "O is stored without the swizzle": [("(c % 8 ^ row % 8) << 4", "c % 8 << 4")],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str) -> None:
    """By a fault of the emulator, an unordered access, the check of fences, or a wrong result."""
    text = SOURCE.text
    for old, new in MUTANTS[name]:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the text"
        text = text.replace(old, new)
    assert _wrong(text)


def test_without_a_fault_nothing_is_found() -> None:
    assert not _wrong(SOURCE.text)


def _wrong(text: str) -> bool:
    """Whether the PTX itself, or one of both timings, shows a fault. ptxas, which may refuse some, is not asked."""
    binary = replace(compile_source(SOURCE), ptx=compile_cuda(text, "compute_90a"))
    unfenced = missing_wgmma_fences(parse(binary.ptx).kernels["forward90"])
    return bool(unfenced) or any(_fails(binary, late) for late in (True, False))


def _fails(binary: Binary, late: bool) -> bool:
    engine = EmulatedEngine(check_races=True, late=late)
    try:
        return not check(PROBLEM, "forward", {"forward90": binary}, engine).ok
    except (EmulatorError, LaunchError):
        return True

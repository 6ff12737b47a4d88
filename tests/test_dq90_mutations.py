"""Faults in dQ of warpgroups that the emulator must find: what is left out, too early, or in another place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashsmith.inputs import make_inputs
from flashsmith.render import render
from flashsmith.spec.dtype import round_to, widen
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import WarpgroupQueryTile

from .split90 import replaced, wrong

# Four tiles of K and V and two buffers of each, so that the rings go round; a ragged end of the keys and of the rows.
PROBLEM = Problem(dtype="bf16", d=128, Nq=130, Nk=230, Hq=1, Hk=1)
SOURCE = render(KernelSpec.of("dq90", PROBLEM, WarpgroupQueryTile(Br=128, Bc=64), 90))
V_SOURCE = render(KernelSpec.of("dq90", PROBLEM, WarpgroupQueryTile(Br=128, Bc=64, stages=3, v_stages=1), 90))
CAUSAL = replace(PROBLEM, causal=True)
CAUSAL_SOURCE = render(KernelSpec.of("dq90", CAUSAL, WarpgroupQueryTile(Br=128, Bc=64), 90))

IN_LOOP = "K_desc + K_ring.stage * (K_tile / 16));\n        K_ring.advance();\n        wait_V();"
NOW = """round(dS, dP);
        for (int y = 0; y < Bc / 16; ++y)
            for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(dS[y][e]) :: "memory");
"""
LAST_WAIT = "wgmma_wait<0>();\n        pin(dQ_rmem);"
RELEASE_V = "pin(dP);\n        release(V_empty, V_ring);"
Q_BARRIER, dQ_BARRIER = (f"barrier_sync<128>(1 + warpgroup);  // the {what}" for what in ("warpgroup's", "rows have"))

# What is changed in the text; every old text stands in it once.
MUTANTS: dict[str, list[tuple[str, str]]] = {
    "no wait for K in the loop": [("hide_descriptors();\n        wait_K();", "hide_descriptors();")],
    "no wait for V in the loop": [(IN_LOOP, IN_LOOP.replace("wait_V();", ""))],
    "no wait for Q and dO": [("mbarrier_wait(smem + Q_full, 0);\n    wait_K();", "wait_K();")],
    "the producer waits for no empty K": [("mbarrier_wait(smem + K_empty + 8 * K_ring.stage, K_ring.parity);", "")],
    "K is released when S has read it, before dQ does": [
        ("wgmma_wait<1>();  // dP", "release(K_empty, dQ_ring);\n        wgmma_wait<1>();  // dP"),
        ("release(K_empty, dQ_ring);\n        round", "round"),
    ],
    "S is not waited for": [("wgmma_wait<2>();", "")],
    "dP is not waited for": [("wgmma_wait<1>();  // dP", "// dP")],
    "dQ and K are not waited for": [(LAST_WAIT, LAST_WAIT.replace("<0>", "<1>"))],
    "the last dQ is not waited for": [("wgmma_wait<0>();\n    pin(dQ_rmem);", "")],
    "dS is overwritten while it is read": [
        ("release(K_empty, dQ_ring);\n        round(dS, dP);", "release(K_empty, dQ_ring);"),
        (LAST_WAIT, NOW + LAST_WAIT),
    ],
    "no fence before the products of the loop": [("wait_K();\n        wgmma_fence();", "wait_K();")],
    "no fence before the first product": [("wait_K();\n    wgmma_fence();", "wait_K();")],
    "no fence before the last product": [("    wgmma_fence();\n    multiply_dS", "    multiply_dS")],
    "16 bytes too many are announced": [("(full, K_tile)", "(full, K_tile + 16)")],
    "dO's bytes are not announced": [("(K_panels + V_panels) * Q_panel", "K_panels * Q_panel")],
    "the rings' parity never flips": [("parity ^= 1;", "")],
    "the producer begins with parity 0": [("K_ring = {0, 1}", "K_ring = {0, 0}")],
    "one warpgroup empties K": [("K_empty + 8 * s, 4 * consumers", "K_empty + 8 * s, 4")],
    "one warpgroup empties V": [("V_empty + 8 * s, 4 * consumers", "V_empty + 8 * s, 4")],
    "every lane releases": [("if (lane == 0) mbarrier_arrive", "mbarrier_arrive")],
    "V comes in another order": [("load_V(j);", "load_V(Tc - 1 - j);")],
    "V comes before K": [("load_K(j);\n            load_V(j);", "load_V(j - 1);\n            load_K(j);")],
    "no barrier before Q is overwritten": [(Q_BARRIER, "//")],
    "no barrier before dQ is stored": [(dQ_BARRIER, "//")],
    "no proxy fence before dQ is stored": [("    fence_proxy_async();\n", "")],
    "mbarriers are used before they are set up": [("__syncthreads();  // the mbarriers", "// the mbarriers")],
    "K of the next tile makes dQ": [
        ("multiply_dS(dQ_rmem, dS, K_desc + dQ_ring.stage * (K_tile / 16));\n        wgmma_wait<2>",
         "multiply_dS(dQ_rmem, dS, K_desc + (dQ_ring.stage ^ 1) * (K_tile / 16));\n        wgmma_wait<2>")
    ],
    "panels of K at the wrong distance": [("descriptor(smem + K_smem, KV_panel)", "descriptor(smem + K_smem, 1024)")],
    "rows at the wrong distance": [("(1024 >> 4) << 32", "(512 >> 4) << 32")],
    "no swizzle": [("| 1ull << 62", "")],
    "a step of columns is too short": [("x % 4 * 32) / 16, B + (x / 4", "x % 4 * 16) / 16, B + (x / 4")],
    "panels of Q at the wrong distance": [("A + (x / 4 * Q_panel", "A + (x / 4 * KV_panel")],
    "a step of keys is too short": [("K + y * 16 * 128 / 16", "K + y * 8 * 128 / 16")],
    "both warpgroups read the rows of the first": [("dO_smem + warpgroup * 64 * 128, Q_panel)", "dO_smem, Q_panel)")],
    "the last key is masked": [("if (8 * n + c > room)", "if (8 * n + c >= room)")],
    "delta is not taken off": [("* (dP[0][n][e] + minus_delta[e / 2])", "* dP[0][n][e]")],
    "delta of the other row": [("minus_delta[e / 2])", "minus_delta[1 - e / 2])")],
    "lse of the other row": [("scale_log2, minus_lse[e / 2])", "scale_log2, minus_lse[1 - e / 2])")],
    "dQ is not scaled": [("dQ_rmem, scale);", "dQ_rmem, 1.f);")],
    "dQ is stored without the swizzle": [("(c % 8 ^ row % 8) << 4", "c % 8 << 4")],
    "dQ of the first warpgroup is stored twice": [
        ("c * Q_panel + warpgroup * 64 * 128, 64 * c", "c * Q_panel, 64 * c")
    ],
}  # fmt: skip

# Of three buffers of K and one of V. With as many of V, its barriers would say nothing that those of K have not said:
# the producer has waited for K of the same tile before, and whoever had left that buffer had read V as well.
V_MUTANTS: dict[str, list[tuple[str, str]]] = {
    "the producer waits for no empty V": [("mbarrier_wait(smem + V_empty + 8 * V_ring.stage, V_ring.parity);", "")],
    "V is released before it is read": [
        ("wgmma_wait<1>();  // dP", "release(V_empty, V_ring);\n        wgmma_wait<1>();  // dP"),
        (f"is there\n        {RELEASE_V}", "is there\n        pin(dP);"),
    ],
}

CAUSAL_MUTANTS: dict[str, list[tuple[str, str]]] = {
    "the diagonal is not masked in the loop": [
        ("while (j >= 0 && (j + 1) * Bc - 1 > last + 64 * warpgroup) step(Bool<true>());", "")
    ],
    "a masked tile too few": [("(j + 1) * Bc - 1 > last + 64 * warpgroup", "j * Bc - 1 > last + 64 * warpgroup")],
    "the mask begins a warpgroup lower": [("> last + 64 * warpgroup", "> last + 64 * (warpgroup + 1)")],
    "the diagonal is off by one": [("last = here.query + Nk - Nq;", "last = here.query + Nk - Nq + 1;")],
    "a row less is seen": [("room = last + row -", "room = last + row - 1 -")],
    "a tile too few": [("min(here.query + Br, Nq) + Nk - Nq,", "here.query + Nk - Nq,")],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str) -> None:
    """By a fault of the emulator, an unordered access, the check of fences, or a wrong result."""
    assert wrong(SOURCE, replaced(SOURCE.text, MUTANTS[name]), PROBLEM)


@pytest.mark.parametrize("name", V_MUTANTS)
def test_a_fault_around_v_is_found(name: str) -> None:
    assert wrong(V_SOURCE, replaced(V_SOURCE.text, V_MUTANTS[name]), PROBLEM)


def test_keys_past_the_end_are_masked_for_the_sake_of_infinities() -> None:
    """Where all scores are low, a key of zeros would have an infinite weight, and K = 0 would make NaN of it."""
    x = make_inputs(PROBLEM)
    low = replace(x, q=np.full_like(x.q, 0x4100), k=np.full_like(x.k, 0xC100))  # 8 and -8: scores of -724
    assert not wrong(SOURCE, SOURCE.text, PROBLEM, low)
    unmasked = replaced(SOURCE.text, [("weigh(Bool<true>());", "weigh(Bool<false>());")])
    assert wrong(SOURCE, unmasked, PROBLEM, low)


@pytest.mark.parametrize("name", CAUSAL_MUTANTS)
def test_a_fault_under_the_mask_is_found(name: str) -> None:
    assert wrong(CAUSAL_SOURCE, replaced(CAUSAL_SOURCE.text, CAUSAL_MUTANTS[name]), CAUSAL)


def test_a_huge_max_that_is_not_taken_off_is_found() -> None:
    x = make_inputs(PROBLEM)
    huge = replace(x, q=round_to(widen(x.q, "bf16") * 1e4, "bf16"))
    assert not wrong(SOURCE, SOURCE.text, PROBLEM, huge)
    left = replaced(SOURCE.text, [(", m[e / 2]);  // not fused", ", 0.f);  // not fused")])
    assert wrong(SOURCE, left, PROBLEM, huge)


def test_without_a_fault_nothing_is_found() -> None:
    assert not wrong(SOURCE, SOURCE.text, PROBLEM)
    assert not wrong(CAUSAL_SOURCE, CAUSAL_SOURCE.text, CAUSAL)

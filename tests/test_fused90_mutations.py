"""Faults in the backward of warpgroups that the emulator must find: what is left out, too early, or out of place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
from flashsmith.check import check
from flashsmith.compile import Binary, compile_source
from flashsmith.emulator import EmulatorError, missing_wgmma_fences, parse
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import LaunchError
from flashsmith.inputs import Inputs, make_inputs
from flashsmith.render import Source, render
from flashsmith.spec.dtype import round_to, widen
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import RowTile, WarpgroupKeyTile

from .emulator.conftest import compile_cuda

KERNELS: tuple[KernelName, ...] = ("delta", "fused90", "convert90")


def _scores(scale: float, shift: float) -> Callable[[Inputs], Inputs]:
    """Queries that are about `shift` and keys that are about -6."""

    def change(x: Inputs) -> Inputs:
        q, k = widen(x.q, "bf16") * scale + shift, widen(x.k, "bf16") - 6
        return replace(x, q=round_to(q, "bf16"), k=round_to(k, "bf16"))

    return change


class Case(NamedTuple):
    problem: Problem
    tile: WarpgroupKeyTile
    change: Callable[[Inputs], Inputs] = lambda x: x


def _some_huge(x: Inputs) -> Inputs:
    """Every fourth query, from the second on, scores beyond what exponents hold."""
    q = widen(x.q, "bf16").copy()
    q[:, :, 1::4] *= 3e4
    return replace(x, q=round_to(q, "bf16"))


# Six tiles of Q and dO, three of each of two heads, so that rings of two go round and heads change; ragged ends.
GROUP = Problem(dtype="bf16", d=128, Nq=70, Nk=100, Hq=2, Hk=1)
CASES = {
    "plain": Case(GROUP, WarpgroupKeyTile(Br=32)),
    "one buffer of dS": Case(GROUP, WarpgroupKeyTile(Br=32, dS_stages=1)),
    "causal": Case(replace(GROUP, d=64, Nq=100, Nk=160, causal=True), WarpgroupKeyTile(Br=32)),
    "a tile past the statistics": Case(
        replace(GROUP, d=72, Nq=128, Nk=64), WarpgroupKeyTile(Br=80), _scores(0.01, 12)
    ),
    "low scores": Case(replace(GROUP, d=64, Nq=64, Hq=1), WarpgroupKeyTile(Br=64), _scores(0.01, 30)),
    "huge scores": Case(replace(GROUP, d=64, Nq=64, Nk=128, Hq=1), WarpgroupKeyTile(Br=64), _some_huge),
}  # fmt: skip

DS_THERE = "barrier_sync<256>(1);  // both warpgroups' dS is there, and the last sums of dQ have been read"
DQ_THERE = "barrier_sync<128>(2 + warpgroup);  // this warpgroup's part of dQ is there"
DONE = "wgmma_wait<0>();\n        pin(dK_rmem);\n"
RELEASE = "        if (lane == 0) mbarrier_arrive(smem + empty + 8 * ring.stage);  // each warp for itself\n"
WAIT_Q, WAIT_DO = (f"        mbarrier_wait(smem + {x}_full + 8 * ring.stage, ring.parity);\n" for x in ("Q", "dO"))

# The case and what is changed in the text of fused90; every old text stands in it once.
MUTANTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "no barrier after dS is stored": ("plain", [(DS_THERE, "//")]),
    "one buffer of dS and no second barrier": (
        "one buffer of dS", [("barrier_sync<256>(1);  // both are done with dS", "")],
    ),
    "the buffer of dS does not change": ("plain", [("dS_stage ^= dS_tile;", "")]),
    "Q and dO are released before dK is summed": ("plain", [(DONE + RELEASE, RELEASE + "        " + DONE)]),
    "dQ is overwritten while it is read": ("plain", [("if (thread == 0) bulk_add_wait();", "")]),
    "no proxy fence after dS is stored": ("plain", [("fence_proxy_async();\n        " + DS_THERE, DS_THERE)]),
    "no proxy fence before dQ is added": ("plain", [("fence_proxy_async();\n        " + DQ_THERE, DQ_THERE)]),
    "no barrier before dQ is added": ("plain", [(DQ_THERE, "//")]),
    "no barrier before K is overwritten": (
        "plain", [("barrier_sync<256>(1);  // both warpgroups are done with K and V", "//")],
    ),
    "no barrier before dK is stored": ("plain", [("barrier_sync<128>(2 + warpgroup);  // the rows", "// the rows")]),
    "no proxy fence before dK is stored": ("plain", [("    fence_proxy_async();\n    barrier", "    barrier")]),
    "dQ is not waited for": ("plain", [("wgmma_wait<1>();  // all but dK", "wgmma_wait<2>();")]),
    "dK is not waited for": ("plain", [(DONE, DONE.replace("<0>", "<1>"))]),
    "S is not waited for": ("plain", [("wgmma_wait<1>();  // S is there", "")]),
    "dP is not waited for": ("plain", [("wgmma_wait<0>();\n        pin(dP);", "wgmma_wait<1>(); pin(dP);")]),
    "dS is not transposed": ("plain", [("m8n8.x4.trans.shared.b16 [%0], {", "m8n8.x4.shared.b16 [%0], {")]),
    "lse and delta swapped": (
        "plain",
        [("ld_shared_v2(minus_delta_of, stats_lane + stats_stage + minus_delta +",
          "ld_shared_v2(minus_delta_of, stats_lane + stats_stage +")],
    ),
    "no wait for Q": ("plain", [(WAIT_Q + "        pin", "        pin")]),
    "no wait for dO": ("plain", [(WAIT_DO, "")]),
    "the producer waits for no empty buffer": (
        "plain", [("mbarrier_wait(smem + empty + 8 * ring.stage, ring.parity);", "")],
    ),
    "16 bytes too many are announced": ("plain", [("(full, dO_tile)", "(full, dO_tile + 16)")]),
    "statistics are not announced": ("plain", [("(full, Q_tile + bytes)", "(full, Q_tile)")]),
    "K is not announced": ("plain", [("mbarrier_expect(smem + Q_full, K_tile);", "")]),
    "V is not announced": ("plain", [("mbarrier_expect(smem + dO_full, V_tile);", "")]),
    "the parity never flips": ("plain", [("parity ^= 1;", "")]),
    "the producer begins with parity 0": ("plain", [("Ring ring = {0, 1};", "Ring ring = {0, 0};")]),
    "one warpgroup empties a buffer": ("plain", [("empty + 8 * s, 4 * consumers", "empty + 8 * s, 4")]),
    "every lane releases": ("plain", [("if (lane == 0) mbarrier_arrive", "mbarrier_arrive")]),
    "mbarriers are used before they are set up": (
        "plain", [("__syncthreads();  // the mbarriers", "// the mbarriers")],
    ),
    "no fence before the products of S and dP": (
        "plain", [("wgmma_fence();\n        multiply_columns", "multiply_columns")],
    ),
    "no fence before the product of dV": ("plain", [("wgmma_fence();\n        multiply_rows(dV", "multiply_rows(dV")]),
    "panels of Q at the wrong distance": (
        "plain", [("descriptor(smem + Q_smem, Q_panel)", "descriptor(smem + Q_smem, 1024)")],
    ),
    "a warpgroup takes the other's columns of K": (
        "plain", [("K_smem + warpgroup * KV_panel", "K_smem + (1 - warpgroup) * KV_panel")],
    ),
    "a warpgroup adds to the other's columns of dQ": (
        "plain", [("+ warpgroup * (dQ_piece / 4);", "+ (1 - warpgroup) * (dQ_piece / 4);")],
    ),
    "dS is stored without the swizzle": ("plain", [("(dS_chunk ^ dS_row % 8) << 4", "dS_chunk << 4")]),
    "dK is stored without the swizzle": ("plain", [("(c % 8 ^ row % 8) << 4", "c % 8 << 4")]),
    "dK is not scaled": ("plain", [("dK_rmem, scale)", "dK_rmem, 1.f)")]),
    "the sums of dQ do not move on": ("plain", [("        dQ_tile += Br * columns;\n", "")]),
    "the second head of a group is left out": (
        "plain", [("head_q + group; ++head", "head_q + 1; ++head"), ("int left = group * ", "int left = ")],
    ),
    "the query's own key is masked": ("causal", [("> last_seen + 8 * n", ">= last_seen + 8 * n")]),
    "the diagonal begins at the top left": ("causal", [("diagonal = Nk - Nq;", "diagonal = 0;")]),
    "the mask ends a tile too early": (
        "causal", [("i0 + diagonal < first_key + 63", "i0 + diagonal + Br < first_key + 63")],
    ),
    "the first tile of a head is skipped": (
        "causal", [("max(0, (here.key - diagonal) / Br)", "max(0, (here.key - diagonal) / Br + 1)")],
    ),
    "the sums of dQ begin with the first tile": ("causal", [("dQ_tile += first_tile * (Br * columns);", "")]),
    "statistics past those of a head are read": (
        "a tile past the statistics", [("min(Br, stats_rows - i0) * 12;", "stats_bytes;")],
    ),
    "statistics past those of a head are what lay there": (
        "a tile past the statistics", [("put_no_rows(stats_tile, bytes);", "")],
    ),
    "keys past the end have a weight": ("low scores", [(" || keys < Bc", "")]),
    "one key past the end has a weight": ("low scores", [("e / 2 * 8 >= keys_left", "e / 2 * 8 > keys_left")]),
    "m is not taken off": ("huge scores", [("(m[0] | m[1] | m[2] | m[3]) != 0", "false")]),
    "one row in four is looked at for its m": ("huge scores", [("(m[0] | m[1] | m[2] | m[3]) != 0", "m[0] != 0")]),
}  # fmt: skip

# What no run can tell from the text as it is, and why.
EQUIVALENT: dict[str, tuple[str, list[tuple[str, str]]]] = {
    # Since the fence before the product of dV nothing has touched the registers of these products. It costs nothing.
    "no fence before the products of dQ and dK": ("plain", [("wgmma_fence();\n        multiply_dS", "multiply_dS")]),
    # Two writes of one place, of which the emulator knows the order. On a GPU the second is TMA's, and may come first.
    "statistics past those of a head are not fenced": (
        "a tile past the statistics", [("                    fence_proxy_async();", "")],
    ),
}  # fmt: skip


@cache
def binaries_of(name: str) -> dict[KernelName, Binary]:
    case = CASES[name]
    tiles = {"delta": RowTile(), "fused90": case.tile, "convert90": case.tile}
    return {x: compile_source(render(KernelSpec.of(x, case.problem, tiles[x], 90))) for x in KERNELS}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str) -> None:
    """By a fault of the emulator, an unordered access, the check of fences, or a wrong result."""
    case, edits = MUTANTS[name]
    assert _wrong(case, _changed(case, edits))


@pytest.mark.parametrize("name", EQUIVALENT)
def test_what_changes_nothing_is_not_taken_for_a_fault(name: str) -> None:
    case, edits = EQUIVALENT[name]
    assert not _wrong(case, _changed(case, edits))


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_nothing_is_found(case: str) -> None:
    assert not _wrong(case, binaries_of(case)["fused90"].source.text)


def _changed(case: str, edits: list[tuple[str, str]]) -> str:
    text = binaries_of(case)["fused90"].source.text
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the text"
        text = text.replace(old, new)
    return text


def _wrong(case: str, text: str) -> bool:
    """Whether the PTX itself, or one of both timings, shows a fault. ptxas, which may refuse some, is not asked."""
    binaries = binaries_of(case)
    own = binaries["fused90"]
    changed = replace(own, source=Source(own.spec, text), ptx=compile_cuda(text, "compute_90a"))
    unfenced = missing_wgmma_fences(parse(changed.ptx).kernels["fused90"])
    return bool(unfenced) or any(_fails(case, {**binaries, "fused90": changed}, late) for late in (True, False))


def _fails(case: str, binaries: dict[KernelName, Binary], late: bool) -> bool:
    problem, engine = CASES[case].problem, EmulatedEngine(check_races=True, late=late)
    inputs = CASES[case].change(make_inputs(problem))
    try:
        return not check(problem, "backward", binaries, engine, inputs).ok
    except (EmulatorError, LaunchError):
        return True

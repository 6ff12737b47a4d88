"""Faults in what features add to the backward of warpgroups, each of which a check must find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest
from flashsmith.check import check
from flashsmith.compile import Binary
from flashsmith.emulator import EmulatorError, missing_wgmma_fences, parse
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import LaunchError
from flashsmith.inputs import make_inputs
from flashsmith.spec.features import Lengths, ScoreMod, Table
from flashsmith.spec.kernel import KernelName
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import RowTile, Tile, WarpgroupKeyTile, WarpgroupQueryTile, WarpgroupWideTile

from .emulator.conftest import compile_cuda
from .split90 import replaced
from .test_backward90_features import binary_of, leaks

Edits = list[tuple[str, str]]


class Case(NamedTuple):
    kernel: KernelName  # whose text is changed
    tile: Tile
    problem: Problem


CAPPED = ScoreMod(text="9.0 * tanh(score / 9.0) + 0.01 * slope[h] * (j - i)", tables=(Table(name="slope", grad=True),))
PLAIN = Problem(dtype="bf16", d=64, Nq=130, Nk=230, Hq=2, Hk=1)
CASES = {
    "window": Case("fused90", WarpgroupKeyTile(Br=32), replace(PLAIN, Nq=290, Nk=290, window=(100, 10))),
    "packed": Case(
        "fused90", WarpgroupKeyTile(Br=32), replace(PLAIN, B=4, Nq=100, Nk=150, lengths="packed", dropout=0.3)
    ),
    "padded": Case(
        "dkdv90", WarpgroupKeyTile(Br=32),
        replace(PLAIN, B=3, Nq=70, Nk=150, lengths="padded", causal=True, score_mod=CAPPED),
    ),
    "wide": Case(
        "dkdv90_wide", WarpgroupWideTile(Bc=80),
        replace(
            PLAIN, d=72, B=3, Nq=100, Nk=150, lengths="packed", window=(30, 20), dropout=0.3, score_mod=CAPPED
        ),
    ),
    "queries": Case(
        "dq90", WarpgroupQueryTile(Br=128, Bc=48),
        replace(PLAIN, B=3, Nq=150, lengths="packed", window=(50, 10), dropout=0.3, score_mod=CAPPED),
    ),
}  # fmt: skip

# The case and what is changed in its text; every old text stands in it once.
MUTANTS: dict[str, tuple[str, Edits]] = {
    "the walk begins a tile too late": (
        "window", [("max(0, here.key - diagonal) / Br;", "max(0, here.key - diagonal) / Br + 1;")],
    ),
    "the walk ends a tile too early": ("window", [("Bc - 1 - farthest + Br) / Br", "Bc - 1 - farthest) / Br")]),
    "the producer knows no window": ("window", [("i0 < end_tile * Br; i0 += Br, ring", "i0 < Nq; i0 += Br, ring")]),
    "the near end is not masked": ("window", [("i0 + diagonal < first_key + 63 || ", "")]),
    "the far end is not masked": ("window", [(" || i0 + Br - 1 + farthest > first_key", "")]),
    "the near end is masked for the first key alone": ("window", [("first_key + 63 ||", "first_key ||")]),
    "the far end is masked for the first query alone": ("window", [("i0 + Br - 1 + farthest", "i0 + farthest")]),
    "a window of one key less": ("window", [("e / 2 * 8 < first_seen", "e / 2 * 8 <= first_seen")]),
    "dQ begins with the first tile of the head": ("window", [("* Tr + first_tile) * (Br", "* Tr) * (Br")]),
    "dQ of the next head begins too early": ("window", [("Tr - end_tile + first_tile)", "Tr - end_tile)")]),

    "blocks past the end of a sequence": ("packed", [("if (here.key >= Nk) return;", "")]),
    "Q of another sequence": ("packed", [("Q_map, full, 64 * c, sequence.q0 + i0", "Q_map, full, 64 * c, i0")]),
    "dO of another sequence": ("packed", [("dO_map, full, 64 * c, sequence.q0 + i0", "dO_map, full, 64 * c, i0")]),
    "K of another sequence": ("packed", [("Q_full, 64 * c, sequence.k0 + here", "Q_full, 64 * c, here")]),
    "V of another sequence": ("packed", [("dO_full, 64 * c, sequence.k0 + here", "dO_full, 64 * c, here")]),
    "statistics of another sequence": ("packed", [("sequence.q0 / 128 + here.batch", "sequence.q0 / 128")]),
    "dQ of another sequence": ("packed", [("sequence.q0 / Br + here.batch", "sequence.q0 / Br")]),
    "dK to another sequence": ("packed", [("dK.data += its.k0 * dK.row;", "")]),
    "dV past the end of its sequence": ("packed", [("count = min(64, its.Nk - key)", "count = 64")]),
    "dK is stored before it is there": (
        "packed", [("barrier_sync<128>(2 + warpgroup);  // the rows have been written\n", "\n")],
    ),
    "no barrier after queries are cleared": (
        "packed", [("            barrier_sync<256>(4);  // all consumers", "            // all consumers")],
    ),
    "no proxy fence after queries are cleared": (
        "packed",
        [("            fence_proxy_async();\n            barrier_sync<256>(4)", "            barrier_sync<256>(4)")],
    ),
    "queries are cleared that there are": (
        "packed", [("ring.stage * Q_tile, Nq - i0)", "ring.stage * Q_tile, Nq - i0 - 1)")],
    ),
    "queries are cleared before they have come": (
        "packed",
        [
            (
                "            mbarrier_wait(smem + dO_full + 8 * ring.stage, ring.parity);\n            clear",
                "            clear",
            ),
        ],
    ),
    "the same random numbers in every sequence": ("packed", [("matrix = here.batch * Hq + head_q", "matrix = head_q")]),
    "the same random numbers in every head": ("packed", [("++matrix;", "")]),
    "random numbers of other queries": ("packed", [("random, i0 / 2 + lane % 4 * 2", "random, lane % 4 * 2")]),
    "random numbers of other keys": ("packed", [("first_key + warp * 16);", "first_key);")]),
    "weights that are dropped count in dV": ("packed", [("return p < 0.f ? 0.f : p;", "return fabsf(p);")]),
    "weights that are dropped have no delta": ("packed", [("p < 0.f ? minus_delta_of[e % 2]", "p < 0.f ? 0.f")]),
    "what is kept counts no more in dV": ("packed", [("dV_rmem, 1.f / keep", "dV_rmem, 1.f")]),
    "what is kept counts no more in dK": ("packed", [("scale / keep", "scale")]),

    "padding is seen": (
        "padded", [("const int Nk = max(0, min(k_lens[here.batch], max_Nk));", "const int Nk = max_Nk;")],
    ),
    "padding moves the diagonal": ("padded", [("diagonal = max_Nk - Nq", "diagonal = Nk - Nq")]),
    "padding has a gradient": ("padded", [("min(64, Nk_again - key)", "64")]),
    "padding has a say in the gradient of a table": ("padded", [("key < Nk ? s : 0.f", "s")]),
    "no slope of score_mod": ("padded", [("s = s * slopes[0][n][e];", "")]),
    "the slope before the gradient of a table": (
        "padded", [("dS_of_mod = key < Nk ? s ", "dS_of_mod = key < Nk ? s * slopes[0][n][e] ")],
    ),
    "the gradient of the first head": ("padded", [("++head;", "")]),
    "the gradient of one warp": ("padded", [("if (lane == 0) atomicAdd", "if (lane == 0 && warp == 0) atomicAdd")]),
    "dK without the scale": ("padded", [("dK_rmem, score_scale", "dK_rmem, 1.f")]),

    "wide: the walk begins a tile too late": ("wide", [("diagonal) / Br * Br;", "diagonal) / Br * Br + Br;")]),
    "wide: the walk ends too early": ("wide", [("here.key + Bc - farthest)", "here.key - farthest)")]),
    "wide: the near end is not masked": ("wide", [("i0 + diagonal < first_key + own_keys - 1 || ", "")]),
    "wide: the far end is not masked": ("wide", [(" || i0 + Br - 1 + farthest > first_key", "")]),
    "wide: the first tile is not masked": (
        "wide", [("step(Bool<true>(), Bool<false>())", "step(Bool<false>(), Bool<false>())")],
    ),
    "wide: random numbers of the other warpgroup's keys": (
        "wide", [("here.key + warpgroup * own_keys);", "here.key);")],
    ),
    "wide: weights that are dropped count in dV": ("wide", [("        round_kept(P, S);", "        round(P, S);")]),
    "wide: the same random numbers in every head": ("wide", [("++matrix;", "")]),
    "wide: score_mod of other keys": (
        "wide",
        [
            (
                "warpgroup * own_keys + lane % 4 * 2;\n            const float key0_float = key0;\n            #pragma",
                "lane % 4 * 2;\n            const float key0_float = key0;\n            #pragma",
            ),
        ],
    ),
    "wide: dV past the end of its sequence": ("wide", [("min(Bc, its.Nk - there.key)", "Bc")]),

    "dq: the walk ends a tile too early": (
        "queries", [("max(0, here.query + farthest) / Bc", "max(0, here.query + farthest) / Bc + 1")],
    ),
    "dq: the producer knows no window": (
        "queries", [("for (int j = Tc - 1; j >= first; --j)", "for (int j = Tc - 1; j >= 0; --j)")],
    ),
    "dq: the far end is not masked": ("queries", [(" || j * Bc < own_first", "")]),
    "dq: the near end is not masked": ("queries", [("(j + 1) * Bc - 1 > own_last || ", "")]),
    "dq: statistics of another sequence": ("queries", [("q0 / 128 + at.batch)", "q0 / 128)")]),
    "dq: Q of another sequence": (
        "queries",
        [
            (
                "Q_full, 64 * c, sequence.q0 + here.query, here.head, 0);\n        for",
                "Q_full, 64 * c, here.query, here.head, 0);\n        for",
            ),
        ],
    ),
    "dq: dQ past the end of its sequence": ("queries", [("min(64, its.Nq - query)", "64")]),
    "dq: dQ to another sequence": ("queries", [("dQ.data += its.q0 * dQ.row;", "")]),
    "dq: no slope": ("queries", [("s = s * slopes[0][n][e];", "")]),
    "dq: random numbers of another tile": ("queries", [("+ lane / 4, j * Bc);", "+ lane / 4, (j + 1) * Bc);")]),
    "dq: dropout in the loop alone": (
        "queries", [("    draw_tile();\n    wgmma_wait<1>();\n", "    wgmma_wait<1>();\n")],
    ),
    "dq: no barrier after keys are cleared": (
        "queries", [("        barrier_sync<128 * consumers>(1 + consumers);", "")],
    ),
}  # fmt: skip

# Rows that must be cleared, which shows where NaN stands behind a sequence: kernel, tile, lengths and the call.
LEAKS: dict[str, tuple[KernelName, Tile, Lengths, str]] = {
    "fused90: queries of Q": ("fused90", WarpgroupKeyTile(Br=32), "packed", "clear_rows<K_panels, Br>("),
    "fused90: queries of dO": ("fused90", WarpgroupKeyTile(Br=32), "packed", "clear_rows<V_panels, Br>("),
    "fused90: keys of K": ("fused90", WarpgroupKeyTile(Br=32), "padded", "clear_rows<K_panels, Bc>("),
    "fused90: keys of V": ("fused90", WarpgroupKeyTile(Br=32), "padded", "clear_rows<V_panels, Bc>("),
    "wide: queries of dO": ("dkdv90_wide", WarpgroupWideTile(Bc=64), "packed", "clear_rows<V_panels, Br>("),
    "dq90: keys of K": ("dq90", WarpgroupQueryTile(Br=64, Bc=48), "packed", "clear_rows<K_panels, Bc>("),
    "dq90: keys of V": ("dq90", WarpgroupQueryTile(Br=64, Bc=48), "padded", "clear_rows<V_panels, Bc>("),
}


def binaries_of(case: Case) -> dict[KernelName, Binary]:
    behind: tuple[KernelName, ...] = ("convert90",) if case.kernel == "fused90" else ()
    tiles: dict[KernelName, Tile] = {"delta": RowTile(), case.kernel: case.tile, **dict.fromkeys(behind, case.tile)}
    return {kernel: binary_of(kernel, case.problem, tile) for kernel, tile in tiles.items()}


def _changed(case: Case, edits: Edits) -> dict[KernelName, Binary]:
    """ptxas, which may refuse some, is not asked."""
    binaries = binaries_of(case)
    own = binaries[case.kernel]
    text = replaced(own.source.text, edits)
    return {**binaries, case.kernel: replace(own, ptx=compile_cuda(text, "compute_90a"))}


def _wrong(case: Case, binaries: Mapping[KernelName, Binary]) -> bool:
    """Whether the PTX itself, or one of both timings, shows a fault."""
    unfenced = missing_wgmma_fences(parse(binaries[case.kernel].ptx).kernels[case.kernel])
    return bool(unfenced) or any(_fails(case.problem, binaries, late) for late in (True, False))


def _fails(problem: Problem, binaries: Mapping[KernelName, Binary], late: bool) -> bool:
    engine = EmulatedEngine(check_races=True, late=late)
    try:
        problem = _of_what_runs(problem, binaries)
        return not check(problem, "backward", binaries, engine, make_inputs(problem)).ok
    except (EmulatorError, LaunchError):
        return True


def _of_what_runs(problem: Problem, binaries: Mapping[KernelName, Binary]) -> Problem:
    """dq90 makes no gradients of tables."""
    mod = problem.score_mod
    if mod is None or "dq90" not in binaries:
        return problem
    return replace(problem, score_mod=replace(mod, tables=tuple(replace(table, grad=False) for table in mod.tables)))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str) -> None:
    case, edits = MUTANTS[name]
    assert _wrong(CASES[case], _changed(CASES[case], edits))


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_nothing_is_found(case: str) -> None:
    assert not _wrong(CASES[case], binaries_of(CASES[case]))


@pytest.mark.parametrize("name", LEAKS)
def test_rows_that_are_not_cleared_are_found(name: str) -> None:
    kernel, tile, lengths, call = LEAKS[name]
    problem = Problem(dtype="bf16", d=64, dv=72, B=4, Hq=2, Hk=1, Nq=75, Nk=130, lengths=lengths)
    assert leaks(lengths, _changed(Case(kernel, tile, problem), [(call, f"if (false) {call}")]), problem)

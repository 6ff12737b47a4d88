"""Faults in what features add to the forward of warpgroups, each of which a check must find."""

from __future__ import annotations

import pytest
from flashsmith.render import render
from flashsmith.spec.features import ScoreMod
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import WarpgroupTile

from .test_forward90_mutations import Edits, wrong

PROBLEMS = {
    "window": Problem(dtype="bf16", d=64, Nq=130, Nk=230, Hq=2, Hk=1, window=(50, 10)),
    "packed": Problem(dtype="bf16", d=64, B=4, Nq=140, Nk=130, Hq=1, Hk=1, lengths="packed", dropout=0.3, sinks=True),
    "padded": Problem(
        dtype="bf16", d=64, B=3, Nq=70, Nk=130, Hq=1, Hk=1, lengths="padded", causal=True,
        score_mod=ScoreMod(text="score + 0.01 * (i - j) * (h + b)"),
    ),
}  # fmt: skip
SOURCES = {
    name: render(KernelSpec.of("forward90", problem, WarpgroupTile(Br=128, Bc=48), 90))
    for name, problem in PROBLEMS.items()
}

MUTANTS: dict[str, dict[str, Edits]] = {
    "window": {
        "the walk ends a tile too early": [
            ("max(0, here.i0 + farthest) / Bc", "(max(0, here.i0 + farthest) / Bc + 1)"),
        ],
        "the walk ends at the last row's window": [("max(0, here.i0 + farthest)", "max(0, here.i0 + 64 + farthest)")],
        "the producer knows no window": [("first = first_tile(here, Tc);", "first = 0;")],
        "the consumers know no window": [("const int first = first_tile(here, j + 1);", "const int first = 0;")],
        "the far end is not masked": [(" || j * Bc < own_first", "")],
        "the near end is not masked": [("(j + 1) * Bc - 1 > own_last || ", "")],
        "the far end is masked for the first rows alone": [("warpgroup * 64 + 63 + farthest", "farthest")],
        "the near end is masked for the last rows alone": [
            ("here.i0 + warpgroup * 64 + diagonal", "here.i0 + 127 + diagonal"),
        ],
        "a window of one key less": [("8 * n + c < before", "8 * n + c <= before")],
        "the loop masks nothing": [("            if (incomplete()) mask", "            if (false) mask")],
        "Q is released where there is no window": [
            ("            if (j == first) release_Q", "            if (j == 0) release_Q"),
        ],
    },
    "packed": {
        "no barrier after rows are cleared": [
            ("barrier_sync<128 * consumers>(12);  // all consumers", "// all consumers"),
        ],
        "a barrier of one warpgroup after rows are cleared": [
            ("barrier_sync<128 * consumers>(12)", "barrier_sync<128>(12 + warpgroup)"),
        ],
        "no proxy fence after rows are cleared": [("            fence_proxy_async();\n", "")],
        "rows are cleared that there are": [("max(0, Nk - j * Bc)", "max(0, Nk - j * Bc - 1)")],
        "rows are cleared before they have come": [("wait_V();\n            clear_rows", "clear_rows")],
        "Q of another sequence": [("here.its.q0 + here.i0", "here.i0")],
        "K of another sequence": [("K_map, full, 64 * c, here.its.k0 + j * Bc", "K_map, full, 64 * c, j * Bc")],
        "V of another sequence": [("V_map, full, 64 * c, here.its.k0 + j * Bc", "V_map, full, 64 * c, j * Bc")],
        "O to another sequence": [("there.q_head, there.its.q0 + i, 0)", "there.q_head, i, 0)")],
        "O past the end of its sequence": [("O_rmem, h, i < there.its.Nq", "O_rmem, h, true")],
        "the producer walks over tiles that are none": [("if (here.i0 >= here.its.Nq) continue;", "")],
        "the parity of Q counts rounds": [("Q_full, Q_parity", "Q_full, round % 2")],
        "the keys of the longest": [("Nk = here.its.Nk;\n        if", "Nk = max_Nk;\n        if")],
        "the same random numbers in every sequence": [("here.batch * Hq + here.q_head)", "here.q_head)")],
        "l counts what is kept": [
            (
                "weigh(S, m_rmem, l_rmem, alpha, scale_log2);\n        drop",
                "drop(S, random, random_row, j); weigh(S, m_rmem, l_rmem, alpha, scale_log2);\n        //",
            ),
        ],
        "dropout in the loop alone": [("scale_log2);\n        drop(S, random, random_row, j);", "scale_log2);")],
        "dropout of another tile": [
            ("            drop(S, random, random_row, j)", "            drop(S, random, random_row, j + 1)"),
        ],
        "the sum has no sink": [("sum = fmaf(sum, share, ex2(", "sum = fmaf(sum, share, 0.f * ex2(")],
    },
    "padded": {
        "padding is seen": [("max(0, min(k_lens[here.batch], max_Nk))", "max_Nk")],
        "padding moves the diagonal": [("diagonal = max_Nk - Nq", "diagonal = k_lens[0] - Nq")],
        "no score_mod before the first softmax": [("        modify();\n        if", "        if")],
        "no score_mod in the loop": [("            modify();\n", "")],
    },
}  # fmt: skip


@pytest.mark.parametrize(("which", "name"), [(which, name) for which, faults in MUTANTS.items() for name in faults])
def test_a_fault_is_found(which: str, name: str) -> None:
    assert wrong(PROBLEMS[which], SOURCES[which], MUTANTS[which][name])


@pytest.mark.parametrize("which", PROBLEMS)
def test_without_a_fault_nothing_is_found(which: str) -> None:
    assert not wrong(PROBLEMS[which], SOURCES[which], [])

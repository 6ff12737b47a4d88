"""Small faults in what features put into a kernel, each of which must turn its check red."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from flashsmith.check import check
from flashsmith.compile import compile_source
from flashsmith.emulator import EmulatorError
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.inputs import make_inputs
from flashsmith.render import Source, render
from flashsmith.spec.kernel import FORWARD, FUSED, SPLIT, KernelName, KernelSpec
from flashsmith.spec.problem import Pass, Problem

from .features import ALIBI, MODS
from .test_mutations import TILES

PROBLEM = Problem(dtype="bf16", d=64, B=3, Hq=4, Hk=2, Nq=100, Nk=150)
WINDOW = {"window": (40, 9)}
SHIFTED = {"window": (None, 9), "Nk": 70}
FAR = {"window": (None, 80), "Nk": 70}
TOP_LEFT = {"causal": True, "anchor": "top-left", "Nk": 70}
PACKED = {"lengths": "packed", "causal": True}
PADDED = {"lengths": "padded", "causal": True}
DROPOUT = {"dropout": 0.4, "B": 2}
SINKS = {"sinks": True, "causal": True, "Nk": 70}
WIDE = {"dv": 96, "B": 1}
SLOPES = {"score_mod": ALIBI, "B": 2}
BIAS = {"score_mod": MODS["bias"], "B": 2}
CAP = {"score_mod": MODS["softcap"], "B": 1}
KEPT = {"score_mod": MODS["table twice"], "B": 1, "Nq": 60, "Nk": 60}


@dataclass(frozen=True)
class Fault:
    """One change of a kernel's text, and the tensors that show it."""

    kernel: KernelName
    fields: dict[str, Any]
    old: str
    new: str
    shows: str


FAULTS = {
    "a key too many to the left": Fault("forward", WINDOW, "+ farthest - j * Bc)", "+ farthest - 1 - j * Bc)", "O l"),
    "the far end not masked": Fault("forward", WINDOW, "|| j * Bc < last_first", "", "O l"),
    "a tile of the far end left out": Fault(
        "forward", WINDOW, "here.i0 + farthest) / Bc", "here.i0 + farthest) / Bc + 1", "O l",
    ),
    "a key too many to the right": Fault("forward", WINDOW, "Nk - Nq + right", "Nk - Nq + right + 1", "O m l"),
    "keys past the end seen": Fault("forward", SHIFTED, "min(last + row, end)", "last + row", "O l"),
    "rows of the block past the keys": Fault(
        "forward", FAR, "min(here.i0 + diagonal, Nk - 1)", "here.i0 + diagonal", "O l",
    ),
    "one key too many cleared": Fault("fused", FAR, ">= keys_left)", ">= keys_left - 1)", "dQ dK"),
    "rows past the window, fused": Fault("fused", WINDOW, "number < first_seen + query", "false", "dQ dK dV"),
    "the last tile of the window left out": Fault("dkdv", WINDOW, "- farthest + Br) / Br", "- farthest) / Br", "dK dV"),
    "the window's first key, dq": Fault("dq", WINDOW, "i * 8 + e < before", "i * 8 + e <= before", "dQ"),
    "the far end not special, dq": Fault("dq", WINDOW, "if (j * Bc < last_first) return true;", "", "dQ"),
    "sums of the head before": Fault("fused", WINDOW, "(Tr - end_tile + first_tile)", "(Tr - end_tile)", "dQ"),
    "the other corner": Fault("forward", TOP_LEFT, "diagonal = 0;", "diagonal = Nk - Nq;", "O m l"),
    "the other corner, fused": Fault("fused", TOP_LEFT, "diagonal = 0;", "diagonal = Nk - Nq;", "dQ dK dV"),
    "the first sequence's keys": Fault("forward", PACKED, "K.data += sequence.k0 * K.row;", "", "O m l"),
    "the first sequence's rows": Fault("forward", PACKED, "O.data += its.q0 * O.row;", "", "O"),
    "statistics of another sequence": Fault("forward", PACKED, "* all_q + its.q0 + i", "* all_q + i", "m l"),
    "statistics of another sequence, dq": Fault("dq", PACKED, "+ at.batch) *", ") *", "dQ"),
    "sums of another sequence": Fault("convert", PACKED, "+ sequence.q0 / Br + batch)", "+ sequence.q0 / Br)", "dQ"),
    "dlse of another sequence": Fault("delta", PACKED, "* all_q + sequence.q0 + row", "* all_q + row", "dQ dK dV"),
    "a longer sequence": Fault("forward", PADDED, "min(k_lens[here.batch], max_Nk)", "max_Nk", "O m l"),
    "padding moves the diagonal": Fault("forward", PADDED, "diagonal = max_Nk - Nq", "diagonal = Nk - Nq", "O m l"),
    "dropped weights kept": Fault("forward", DROPOUT, "kept(random, word0, h) ? p0 : 0.f", "p0", "O"),
    "kept weights not made larger": Fault("forward", DROPOUT, "rcp(sum * keep)", "rcp(sum)", "O"),
    "six rounds": Fault("forward", DROPOUT, "round < 7", "round < 6", "O"),
    "random numbers of another head": Fault("fused", DROPOUT, "++random.matrix;", "", "dQ dK dV"),
    "the other half of 32 keys": Fault(
        "dkdv", DROPOUT, "second ? words[p][2 + eighth]", "!second ? words[p][2 + eighth]", "dK dV",
    ),
    "delta of dropped weights left out": Fault(
        "fused", DROPOUT, "p < 0.f ? minus_deltas[e % 2] : s", "p < 0.f ? 0.f : s", "dQ dK",
    ),
    "dropped weights in dV": Fault(
        "fused", DROPOUT, "X[e / 4][e % 4] < 0.f ? 0.f", "X[e / 4][e % 4] < 0.f ? -X[e / 4][e % 4]", "dV",
    ),
    "delta not kept": Fault("delta", DROPOUT, "minus_delta *= keep;", "", "dQ dK"),
    "dV not made larger": Fault("dkdv", DROPOUT, "of_dV = 1 / keep", "of_dV = 1", "dV"),
    "the sink's share of l": Fault("forward", SINKS, "sum = fmaf(sum, share,", "sum = fmaf(sum, 1.f,", "O l"),
    "a sink of another head": Fault("forward", SINKS, "sinks[there.q_head]", "sinks[0]", "O l"),
    "the gradient of sinks upside down": Fault(
        "delta", SINKS, "- log2_l) * minus_delta", "- log2_l) * -minus_delta", "dsinks",
    ),
    "rows of V as those of K": Fault("forward", WIDE, "y * 16 * V_tile::row", "y * 16 * row_bytes", "O"),
    "columns of dV left out": Fault("fused", WIDE, "n < own_values", "n < own_values - 1", "dV"),
    "dP over d columns": Fault("fused", WIDE, "x < values / 16", "x < columns / 16", "dQ dK"),
    "slopes of another head": Fault("fused", SLOPES, "            ++head;\n", "", "dQ dK dV dtable_slope"),
    "the gradient of slopes, one lane's": Fault(
        "fused", SLOPES, "distance > 0; distance /= 2) sum0", "distance > 99; distance /= 2) sum0", "dtable_slope",
    ),
    "keys past the end in the gradient": Fault(
        "fused", BIAS, "dS = key < Nk ? s : 0.f;", "dS = key < Nk - 1 ? s : 0.f;", "dtable_bias",
    ),
    "the bias of the row before": Fault("forward", BIAS, "query, key)", "query - 1, key)", "O m l"),
    "the slope left out": Fault("dkdv", CAP, "s = s * slopes[t][i / 2][i % 2][e];", "", "dK"),
    "the slope left out, dq": Fault("dq", CAP, "s = s * slopes[t][i / 2][i % 2][e];", "", "dQ"),
    "scores that were overwritten": Fault(
        "fused", KEPT, "score = scores[t][i / 2][i % 2][e];", "score = S[t][i / 2][i % 2][e];", "dtable_w",
    ),
    "the score before its scale": Fault("forward", CAP, "S[t][n][e] * score_scale;", "S[t][n][e];", "O m l"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    problem = replace(PROBLEM, **fault.fields)
    kernels = next(names for names in (FORWARD, FUSED, SPLIT) if fault.kernel in names)
    sources = {kernel: render(KernelSpec.of(kernel, problem, TILES[kernel], 80)) for kernel in kernels}
    text = sources[fault.kernel].text
    assert fault.old in text, f"{fault.old!r} is no longer in the text of {fault.kernel}"
    sources[fault.kernel] = Source(sources[fault.kernel].spec, text.replace(fault.old, fault.new))
    binaries = {kernel: compile_source(source) for kernel, source in sources.items()}
    which: Pass = "forward" if kernels == FORWARD else "backward"
    try:
        verdict = check(problem, which, binaries, EmulatedEngine(check_races=True), make_inputs(problem, 2))
    except EmulatorError:
        return  # the emulator saw an access that must not be
    wrong = {line.tensor.split()[0] for line in verdict.lines if not line.ok}
    assert wrong & set(fault.shows.split()), f"not found: {verdict.lines}"

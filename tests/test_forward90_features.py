"""The forward of warpgroups with features against float64: each one, both timings, and what ptxas makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashsmith.check import check
from flashsmith.compile import compile_source
from flashsmith.emulator import missing_wgmma_fences, parse
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.inputs import extras_of, make_inputs
from flashsmith.render import render
from flashsmith.run import run_forward
from flashsmith.sass import disassemble
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.dtype import widen
from flashsmith.spec.features import ScoreMod, Table
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import WarpgroupTile

from .features import FEATURES
from .test_forward90 import TIMINGS
from .test_render import tidy

BASE = Problem(dtype="bf16", d=40, B=3, Hq=4, Hk=2, Nq=75, Nk=130)
TILES = (
    WarpgroupTile(Br=64, Bc=32),
    WarpgroupTile(Br=128, Bc=48, pingpong=True, stages=1),
    WarpgroupTile(Br=64, Bc=32, overlap=False, early_k_wait=False, stages=3),
    WarpgroupTile(Br=128, Bc=80, p_smem=True),
)  # fmt: skip
NAN = 0x7FC0  # the bits of a bf16
SERVED = [name for name in FEATURES if name not in ("plain", "causal")]


def spec_of(problem: Problem, tile: WarpgroupTile) -> KernelSpec:
    return KernelSpec.of("forward90", problem, tile, 90)


@pytest.mark.parametrize("feature", SERVED)
def test_features(feature: str) -> None:
    """Five blocks share the tiles; all accesses are ordered, and all wgmma fenced. Timings take turns."""
    problem, late = replace(BASE, **FEATURES[feature]), SERVED.index(feature) % 2 == 1
    spec = spec_of(problem, TILES[SERVED.index(feature) % len(TILES)])
    binary, engine = compile_source(render(spec)), EmulatedEngine(check_races=True, late=late, sms=5)
    verdict = check(problem, "forward", {"forward90": binary}, engine, make_inputs(problem, 1))
    assert verdict.ok, verdict.reason
    assert not missing_wgmma_fences(parse(binary.ptx).kernels["forward90"])
    assert binary.spill_bytes == 0


@TIMINGS
def test_pairs_of_blocks_with_features(late: bool) -> None:
    """What hides no key, all at once."""
    features = {"dropout": 0.2, "sinks": True, "score_mod": ScoreMod(text="1.5 * tanh(score / 1.5) + 0.01 * (i - j)")}
    problem = replace(BASE, **features)
    spec = spec_of(problem, WarpgroupTile(Br=64, Bc=48, cluster=2))
    binary, engine = compile_source(render(spec)), EmulatedEngine(check_races=True, late=late, sms=5)
    verdict = check(problem, "forward", {"forward90": binary}, engine, make_inputs(problem, 1))
    assert verdict.ok, verdict.reason
    assert binary.spill_bytes == 0


@pytest.mark.parametrize("feature", SERVED)
def test_the_text_is_tidy(feature: str) -> None:
    for tile in TILES:
        tidy(spec_of(replace(BASE, **FEATURES[feature]), tile))


@pytest.mark.parametrize("name", ["window", "packed_sinks_dropout"])
def test_golden(name: str, golden: Any) -> None:
    fields: dict[str, Any] = {
        "window": {"window": (64, 0), "score_mod": ScoreMod(text="30.0 * tanh(score / 30.0)")},
        "packed_sinks_dropout": {"lengths": "packed", "causal": True, "sinks": True, "dropout": 0.1},
    }[name]
    problem = Problem(dtype="bf16", d=128, **fields)
    golden(f"forward90_d128_{name}_h100.cu", render(spec_of(problem, WarpgroupTile(Br=128, Bc=128))).text)


@pytest.mark.parametrize("feature", ["left", "window", "a window past the keys", "a window at the top left"])
def test_tiles_that_no_query_sees_are_not_walked_over(feature: str) -> None:
    """The products that the emulator counts are those of the tiles with a key that some row of the block sees."""
    problem = replace(BASE, **{**FEATURES[feature], "d": 16, "B": 1, "Nq": 400, "Nk": 300})
    spec = spec_of(problem, WarpgroupTile(Br=64, Bc=32))
    engine, x = EmulatedEngine(), make_inputs(problem)
    q, k, v = (engine.tensor(bits) for bits in (x.q, x.k, x.v))
    run_forward(
        engine, {"forward90": compile_source(render(spec))}, q, k, v, 1.0, extras=extras_of(problem, x, engine)
    )  # fmt: skip
    left, right = problem.window[0], 0 if problem.causal else problem.window[1]
    corner = 0 if problem.anchor == "top-left" else 300 - 400
    walked, of_a_tile = 0, 2 * 64 * 32 * (16 + 16)  # of S and of O
    for i0 in range(0, 400, 64):
        last_row = min(i0 + 64, 400) - 1
        seen = min(last_row + corner + right, 299) if right is not None else 299
        end = max(-(-(seen + 1) // 32), 1)
        begin = 0 if left is None else min(max(0, i0 + corner - left) // 32, end - 1)
        walked += end - begin
    assert walked < 7 * 10
    assert sum(report.tensor_flops for _, report in engine.reports) == of_a_tile * walked * problem.Hq


@pytest.mark.parametrize(
    ("fields", "Bc", "most"),
    [({"causal": True, "window": (512, 0)}, 128, 31.0), ({"causal": True, "anchor": "top-left", "Nk": 640}, 128, 30.5),
     ({"sinks": True}, 176, 31.3), ({"score_mod": ScoreMod(text="30.0 * tanh(score / 30.0)")}, 112, 60.0)],
    ids=["window", "top-left", "sinks", "softcap"],
)  # fmt: skip
def test_the_loop_keeps_its_products_asynchronous(fields: dict[str, Any], Bc: int, most: float) -> None:
    """A mask behind a branch in the loop serialises nothing (that would be refused) and spills nothing."""
    problem = Problem(dtype="bf16", d=128, **fields)
    binary = compile_source(render(spec_of(problem, WarpgroupTile(Br=128, Bc=Bc, pingpong=True))))
    opcodes = [i.base for i in disassemble(binary.cubin).functions["forward90"].short_trace.loop]
    products = 8 + Bc // 16
    assert opcodes.count("HGMMA") == products and len(opcodes) <= most * products
    assert binary.spill_bytes == 0


BIAS = ScoreMod(text="score + bias[b, h, i, j]", tables=(Table(name="bias", rank=4),))
CAP = ScoreMod(text="30.0 * tanh(score / 30.0)")


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    "fields",
    [{"dropout": 0.1}, {"score_mod": CAP}, {"score_mod": BIAS}, {"score_mod": BIAS, "dropout": 0.1},
     {"lengths": "packed", "window": (64, 3), "dropout": 0.1, "sinks": True, "score_mod": CAP}],
    ids=["dropout", "softcap", "bias", "bias and dropout", "many"],
)  # fmt: skip
def test_default_tiles_leave_registers_for_features(fields: dict[str, Any], d: int) -> None:
    """Nothing is spilled, and nothing serialised, which would be refused."""
    problem, gpu = Problem(dtype="bf16", d=d, **fields), find_gpu("h100-sxm")
    tile = default_tile("forward90", problem, gpu)
    assert isinstance(tile, WarpgroupTile)
    assert compile_source(render(spec_of(problem, tile))).spill_bytes == 0


@pytest.mark.parametrize("lengths", ["padded", "packed"])
def test_a_neighbours_nan_does_not_leak(lengths: Any) -> None:
    """What lies behind a sequence is padding or another sequence: no bit of it counts, whatever it is."""
    problem = replace(BASE, lengths=lengths, B=4, d=64, dv=72)
    binary, x = compile_source(render(spec_of(problem, WarpgroupTile(Br=128, Bc=48)))), make_inputs(problem, 2)
    keys = np.ones(x.k.shape[0] * x.k.shape[2], bool).reshape(x.k.shape[0], -1)  # of which O is looked at
    rows = np.ones(x.q.shape[0] * x.q.shape[2], bool).reshape(x.q.shape[0], -1)
    if lengths == "padded":
        keys = np.arange(problem.keys) < np.asarray(x.k_lens)[:, None]
    else:
        assert x.cu_q is not None and x.cu_k is not None
        longest = slice(2, 3)  # the sequence before the last
        keys[:] = rows[:] = False
        for mask, ends in ((keys, x.cu_k), (rows, x.cu_q)):
            mask[0, ends[longest][0] : ends[3]] = True
    results = []
    for other in (0x3F80, NAN):
        engine = EmulatedEngine(check_races=True, sms=2)
        k, v = (np.where(keys[:, None, :, None], each, np.uint16(other)).astype(np.uint16) for each in (x.k, x.v))
        tensors = [engine.tensor(each) for each in (x.q, k, v)]
        out = run_forward(engine, {"forward90": binary}, *tensors, 0.125, extras=extras_of(problem, x, engine))
        O = engine.read(out.O).transpose(0, 2, 1, 3)[rows]
        assert O.size and np.isfinite(widen(O, "bf16")).all()
        results.append(O)
    assert np.array_equal(*results)

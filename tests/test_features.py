"""Kernels with features against float64, on the emulator: each feature in each kernel, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashsmith.check import check
from flashsmith.compile import compile_source
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import BadProblem, NoTunedKernel
from flashsmith.inputs import extras_of, make_inputs
from flashsmith.load import backward_form, forward_form, load_best, load_pass, source_sha256
from flashsmith.modify import modification
from flashsmith.predict import sizes_of
from flashsmith.render import render
from flashsmith.run import Forward, run_backward, run_forward
from flashsmith.score_mod import BadScoreMod
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.features import PLAIN, Features, ScoreMod, Table
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import FORWARD, FUSED, SPLIT, KernelName, KernelSpec
from flashsmith.spec.limits import why_illegal
from flashsmith.spec.problem import Problem
from flashsmith.spec.record import read_records, write_record
from flashsmith.spec.tile import ForwardTile, KeyBlockTile, QueryBlockTile, Tile
from flashsmith.work import skipped_tiles, tile_flops, tiles_per_block

from .features import FEATURES
from .records import record_of

A100 = find_gpu("a100")
BASE = Problem(dtype="bf16", d=40, B=3, Hq=4, Hk=2, Nq=75, Nk=130)
PASSES = {"forward": FORWARD, "fused": FUSED, "split": SPLIT}

# Small tiles, so that short sequences take several; in one set warps share keys, in the other they do not.
TILES: tuple[dict[KernelName, Tile], ...] = (
    {
        "forward": ForwardTile(Br=32, Bc=16, warps=2, lazy=True),
        "fused": KeyBlockTile(Br=32, Bc=32, warps=2, stages=1),
        "dkdv": KeyBlockTile(Br=32, Bc=32, warps=2, slice=16, stages=2, weave=False),
        "dq": QueryBlockTile(Br=32, Bc=32, warps=2, stages=1),
    },
    {
        "forward": ForwardTile(Br=64, Bc=32, warps=2, q_steps=2),
        "fused": KeyBlockTile(Br=32, Bc=64, warps=8, row_split=2, stages=2, v_regs=True),
        "dkdv": KeyBlockTile(Br=64, Bc=32, warps=4, row_split=2),
        "dq": QueryBlockTile(Br=64, Bc=48, warps=4, slice=16, stages=2, q_regs=True, weave=False),
    },
)  # fmt: skip


def reason(problem: Problem, kernels: tuple[KernelName, ...], tiles: dict[KernelName, Tile], sm: int = 80) -> str:
    """What a check finds."""
    specs = {}
    for name in kernels:
        tile = tiles["fused"] if name == "convert" else tiles.get(name) or default_tile(name, problem, A100)
        specs[name] = KernelSpec.of(name, problem, tile, sm)
    binaries = {name: compile_source(render(spec)) for name, spec in specs.items()}
    which: Any = "forward" if kernels == FORWARD else "backward"
    return check(problem, which, binaries, EmulatedEngine(check_races=True), make_inputs(problem, 1)).reason


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, which: str) -> None:
    tiles = TILES[list(FEATURES).index(feature) % len(TILES)]
    assert not reason(replace(BASE, **FEATURES[feature]), PASSES[which], tiles)


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize(
    ("d", "dv", "dtype"),
    [(192, 128, "bf16"), (64, 128, "fp16"), (128, 64, "bf16"), (8, 256, "fp16"), (136, 72, "bf16")],
)
def test_values_of_another_head_dimension(d: int, dv: int, dtype: Any, which: str) -> None:
    problem = replace(BASE, d=d, dv=dv, dtype=dtype, B=1, causal=True)
    tiles = {name: default_tile(name, problem, A100) for name in PASSES[which]}
    assert not reason(problem, PASSES[which], tiles)


@pytest.mark.parametrize("feature", ["padded window", "packed dropout", "everything", "capped bias"])
@pytest.mark.parametrize("which", PASSES)
def test_features_with_the_tiles_that_serve(feature: str, which: str) -> None:
    """Of an H100, whose reductions are vectors; d = 128."""
    capped = ScoreMod(
        text="30.0 * tanh((score + bias[b, h, i, j]) / 30.0)",
        tables=(Table(name="bias", rank=4, dtype="bf16", grad=True),),
    )
    fields = FEATURES.get(feature) or {"score_mod": capped, "causal": True}
    gpu = find_gpu("h100-sxm")
    problem = replace(BASE, d=128, Nq=140, **fields)
    problem = replace(problem, dv=None)
    tiles = {name: load_best(problem, name, gpu).tile for name in PASSES[which] if name != "convert"}
    assert not reason(problem, PASSES[which], tiles, gpu.sm)


@pytest.mark.parametrize("kernel", ["forward", "fused", "dkdv", "dq"])
@pytest.mark.parametrize(
    "feature", ["left", "window", "a window past the keys", "top-left", "a window at the top left"]
)
def test_tiles_that_no_query_sees_are_skipped_and_counted(feature: str, kernel: KernelName) -> None:
    """The tensor products that the emulator counts are those of the tiles that are walked over."""
    problem = replace(BASE, **{**FEATURES[feature], "d": 16, "B": 1, "Nq": 400, "Nk": 300})
    spec = KernelSpec.of(kernel, problem, TILES[0][kernel], 80)
    flops = counted_flops(spec, problem)
    sizes, tiles = sizes_of(problem), tiles_per_block(spec, sizes_of(problem))
    in_a_head = blocks_of_a_head(spec, problem)
    walked = sum(tiles) * in_a_head // len(tiles)
    heads = problem.kv_heads if isinstance(spec.tile, KeyBlockTile) else problem.Hq
    assert flops == tile_flops(spec) * walked * heads
    skipped, every = skipped_tiles(spec, sizes)
    assert skipped == every - walked > 0


def counted_flops(spec: KernelSpec, problem: Problem) -> int:
    """FLOPs of the tensor products in one launch on the emulator."""
    engine, x = EmulatedEngine(), make_inputs(problem)
    q, k, v, dO = (engine.tensor(bits) for bits in (x.q, x.k, x.v, x.dO))
    binaries, extras = {spec.kernel: compile_source(render(spec))}, extras_of(problem, x, engine)
    if spec.kernel == "forward":
        run_forward(engine, binaries, q, k, v, 1.0, extras=extras)
    else:
        delta = KernelSpec.of("delta", problem, default_tile("delta", problem, A100), 80)
        rows = engine.zeros(sizes_of(problem).rows, np.float32)
        run_backward(
            engine, {"delta": compile_source(render(delta)), **binaries}, q, k, v, Forward(dO, rows, rows), dO, 1.0,
            extras=extras,
        )  # fmt: skip
    return next(report.tensor_flops for name, report in engine.reports if name == spec.kernel)


def blocks_of_a_head(spec: KernelSpec, problem: Problem) -> int:
    tile = spec.tile
    if isinstance(tile, KeyBlockTile):
        return -(-problem.keys // tile.Bc)
    return -(-problem.Nq // tile.Br)  # type: ignore[union-attr]


def test_the_mask_of_dropout_depends_on_no_tile() -> None:
    """Forward, fused and dq draw the same weights, whatever their tiles: else gradients would be of another mask."""
    problem = replace(BASE, dropout=0.5, causal=True, B=1)
    for tiles in TILES:
        for kernels in PASSES.values():
            assert not reason(problem, kernels, tiles)


def test_a_feature_that_is_off_leaves_no_trace() -> None:
    for kernel in ("forward", "delta", "fused", "convert", "dkdv", "dq"):
        tile = default_tile(kernel, BASE, A100)  # type: ignore[arg-type]
        spec = KernelSpec.of(kernel, BASE, tile, 80)  # type: ignore[arg-type]
        assert spec.plain and spec.signature == replace(spec, features=Features()).signature
        text = render(spec).text
        for word in ("cu_q", "k_lens", "sinks", "rng", "score_mod", "int dv", "farthest"):
            assert word not in text, (kernel, word)


def test_kernels_know_only_the_features_that_concern_them() -> None:
    everything = replace(BASE, **FEATURES["everything"]).features
    assert everything.of("convert") == Features(lengths="packed")
    assert everything.of("delta") == Features(lengths="packed", sinks=True, dropout=True)
    assert not everything.of("dq").sinks and not everything.of("fused").sinks
    mod = everything.of("dq").score_mod
    assert mod is not None and not mod.grads  # the gradients of tables are made where keys are owned
    assert replace(BASE, sinks=True).features.of("fused") == PLAIN


def test_one_kernel_serves_one_mask_however_it_is_asked_for() -> None:
    causal = replace(BASE, causal=True)
    assert replace(BASE, window=(None, 0)) == causal
    assert replace(causal, window=(None, 7)) == causal  # causal ends the window
    assert replace(BASE, anchor="top-left") == BASE  # without a bound no corner matters
    assert replace(causal, Nq=50, Nk=50, anchor="top-left").anchor == "bottom-right"
    assert replace(causal, Nq=50, Nk=50, anchor="top-left", lengths="packed").anchor == "top-left"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"window": (-1, 0)}, "window: -1 keys to the left"),
        ({"window": (0, -2)}, "window: -2 keys to the right"),
        ({"anchor": "middle"}, "anchor 'middle' is not known"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"d": 576, "dv": 512}, "d=576 is not served"),
        ({"dv": 512}, "dv=512 is not served"),
        ({"dv": 100}, "dv=100 is not served: the head dimension must be a multiple of 8 from 8 to 256; pad to 104"),
    ],
)
def test_refusals(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadProblem, match=said.replace("(", r"\(")):
        replace(BASE, **fields)


def test_a_gradient_that_atomics_add_up_is_not_deterministic() -> None:
    problem = replace(BASE, **FEATURES["bias"])
    with pytest.raises(BadProblem, match="the gradient of bias is added up by atomics"):
        backward_form(problem, A100, deterministic=True)
    assert backward_form(replace(BASE, dropout=0.1), A100, deterministic=True).form == "split"


def test_features_run_whole() -> None:
    few = Problem(dtype="bf16", d=128, Hq=32, Hk=8, Nq=1, Nk=65536)
    assert forward_form(few, A100).form == "parts"
    assert forward_form(replace(few, sinks=True), A100).form == "whole"
    with pytest.raises(BadProblem, match="partial serves plain and causal attention"):
        load_best(replace(few, sinks=True), "partial", A100)
    tile = default_tile("forward", replace(few, sinks=True), A100)
    assert isinstance(tile, ForwardTile) and not tile.packed
    packed = KernelSpec.of("forward", replace(few, sinks=True), replace(tile, packed=True), 80)
    assert "packed=1" in str(why_illegal(packed, A100))
    up = KernelSpec.of("forward", replace(BASE, window=(5, 0)), ForwardTile(Br=64, Bc=32, warps=4, ascending=True), 80)
    assert "ascending=1" in str(why_illegal(up, A100))


def test_a_window_is_served_by_the_tile_of_the_kernel_without(tmp_path: Path) -> None:
    plain = Problem(dtype="bf16", d=64, causal=True, Nq=1024)
    tile = ForwardTile(Br=64, Bc=32, warps=4)
    write_record(tmp_path, record_of("forward", 1.0, causal=True, tile=tile))
    loaded = load_best(replace(plain, window=(128, None)), "forward", A100, tmp_path)
    assert (loaded.rung, loaded.tile, loaded.spec.features) == ("without features", tile, Features(left=True))
    assert load_best(replace(plain, dropout=0.1), "forward", A100, tmp_path).rung == "default"  # it takes registers


def test_a_record_knows_its_features(tmp_path: Path) -> None:
    problem = Problem(dtype="bf16", d=64, Nq=1024, B=2, **{**FEATURES["everything"], "dv": 32})
    tile = ForwardTile(Br=64, Bc=32, warps=4)
    spec = KernelSpec.of("forward", problem, tile, 80)
    record = replace(
        record_of("forward", 1.0, tile=tile, causal=spec.causal), dv=32, features=spec.features,
        source_sha256=source_sha256(spec),
    )  # fmt: skip
    path = write_record(tmp_path, record)
    assert read_records(path) == (record,)
    loaded = load_best(problem, "forward", A100, tmp_path)
    assert (loaded.rung, loaded.spec) == ("record", spec)
    for other in (replace(problem, dropout=0.0), replace(problem, dv=None), replace(problem, sinks=False)):
        assert load_best(other, "forward", A100, tmp_path).rung != "record"


@pytest.mark.parametrize("gpu", ["a100", "rtx4090", "h100-sxm"])
def test_every_feature_has_a_tile(gpu: str) -> None:
    target = find_gpu(gpu)
    for fields in FEATURES.values():
        for d in (64, 128, 256):
            problem = Problem(dtype="bf16", d=d, **{**fields, "dv": None})
            for which in ("forward", "backward"):
                for deterministic in (False, True):
                    if deterministic and problem.score_mod and problem.score_mod.grads:
                        continue
                    try:
                        load_pass(problem, which, target, deterministic=deterministic)  # type: ignore[arg-type]
                    except NoTunedKernel as error:
                        pytest.fail(f"{problem.text}: {error}")


def test_a_table_of_a_head_is_added_up_before_it_is_added() -> None:
    problem = replace(BASE, **FEATURES["alibi"])
    mod = modification(KernelSpec.of("fused", problem, TILES[0]["fused"], 80))
    assert mod is not None and [entry.of_head for entry in mod.sums] == [True]
    mod = modification(KernelSpec.of("fused", replace(BASE, **FEATURES["bias"]), TILES[0]["fused"], 80))
    assert mod is not None and [entry.of_head for entry in mod.sums] == [False]


def test_what_a_user_writes_reaches_the_compiler_by_way_of_a_tree() -> None:
    """A text that is no formula is refused before there is a source."""
    for text in ('score; asm("trap;")', "score + __nanosleep(9)", "score); }", "system['x']", "(lambda: score)()"):
        problem = replace(BASE, score_mod=ScoreMod(text=text))
        with pytest.raises(BadScoreMod):
            render(KernelSpec.of("forward", problem, TILES[0]["forward"], 80))

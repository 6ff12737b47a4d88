"""The backward of warpgroups with features against float64: each one, both timings, and what ptxas makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from flashsmith.check import check
from flashsmith.compile import Binary, compile_source
from flashsmith.emulator import missing_wgmma_fences, parse
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.inputs import extras_of, make_inputs
from flashsmith.render import render
from flashsmith.run import Forward, run_backward
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.dtype import widen
from flashsmith.spec.feature_shape import warpgroup_feature_registers
from flashsmith.spec.features import ScoreMod, Table
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import FUSED90, SPLIT90, SPLIT90_WIDE, KernelName, KernelSpec
from flashsmith.spec.problem import Pass, Problem
from flashsmith.spec.tile import RowTile, Tile, WarpgroupKeyTile, WarpgroupQueryTile, WarpgroupTile, WarpgroupWideTile

from .features import FEATURES
from .test_render import tidy

Tiles = Mapping[KernelName, Tile]
NAN = 0x7FC0  # the bits of a bf16
BASE = Problem(dtype="bf16", d=40, B=3, Hq=4, Hk=2, Nq=75, Nk=130)
SERVED = [name for name in FEATURES if name not in ("plain", "causal")]


def _tiles(keys: WarpgroupKeyTile, wide: WarpgroupWideTile, queries: WarpgroupQueryTile) -> Tiles:
    return {
        "delta": RowTile(), "fused90": keys, "convert90": keys, "dkdv90": replace(keys, dS_stages=2),
        "dkdv90_wide": wide, "dq90": queries,
    }  # fmt: skip


TILES = (
    _tiles(WarpgroupKeyTile(Br=64), WarpgroupWideTile(Bc=64), WarpgroupQueryTile(Br=64, Bc=32)),
    _tiles(
        WarpgroupKeyTile(Br=32, stages=1, dS_stages=1),
        WarpgroupWideTile(Bc=48, consumers=3, stages=1, overlap=False),
        WarpgroupQueryTile(Br=128, Bc=48, v_stages=1),
    ),
    _tiles(
        WarpgroupKeyTile(Br=96),
        WarpgroupWideTile(Bc=80, dO_stages=1, overlap=False),
        WarpgroupQueryTile(Br=64, Bc=80, stages=1, overlap=False),
    ),
)
PASSES = {"fused90": FUSED90, "split90": SPLIT90, "split90 of wide heads": SPLIT90_WIDE}


@cache
def binary_of(kernel: KernelName, problem: Problem, tile: Tile) -> Binary:
    return compile_source(render(KernelSpec.of(kernel, problem, tile, 90)))


def binaries_of(kernels: tuple[KernelName, ...], problem: Problem, tiles: Tiles) -> dict[KernelName, Binary]:
    return {kernel: binary_of(kernel, problem, tiles[kernel]) for kernel in kernels}


@pytest.mark.parametrize("kernels", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("feature", SERVED)
def test_features(feature: str, kernels: tuple[KernelName, ...]) -> None:
    """All accesses are ordered, and all wgmma fenced; what needs no registers spills nothing. Timings take turns."""
    problem = replace(BASE, **FEATURES[feature])
    number = SERVED.index(feature) + list(PASSES.values()).index(kernels)
    tiles, late = TILES[number % len(TILES)], number % 2 == 1
    binaries = binaries_of(kernels, problem, tiles)
    verdict = check(
        problem, "backward", binaries, EmulatedEngine(check_races=True, late=late), make_inputs(problem, 1)
    )  # fmt: skip
    assert verdict.ok, verdict.reason
    for kernel in kernels[1:]:
        assert not missing_wgmma_fences(parse(binaries[kernel].ptx).kernels[kernel])
        assert binaries[kernel].spill_bytes == 0 or warpgroup_feature_registers(binaries[kernel].spec)


@pytest.mark.parametrize("kernels", [("forward90",), *PASSES.values()], ids=["forward90", *PASSES])
def test_sinks_without_a_key(kernels: tuple[KernelName, ...]) -> None:
    """There is no row of K or V that a tensor map could describe."""
    problem = Problem(dtype="bf16", d=64, Hq=2, Nq=17, Nk=0, sinks=True)
    binaries = binaries_of(kernels, problem, {**TILES[0], "forward90": WarpgroupTile(Br=64, Bc=32)})
    which: Pass = "forward" if kernels == ("forward90",) else "backward"
    verdict = check(problem, which, binaries, EmulatedEngine(check_races=True))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("feature", SERVED)
def test_the_text_is_tidy(feature: str) -> None:
    for tiles in TILES:
        for kernel in ("fused90", "convert90", "dkdv90", "dkdv90_wide", "dq90"):
            tidy(KernelSpec.of(kernel, replace(BASE, **FEATURES[feature]), tiles[kernel], 90))


@pytest.mark.parametrize("feature", ["left", "window", "a window past the keys", "a window at the top left"])
@pytest.mark.parametrize("kernel", ["fused90", "dkdv90", "dkdv90_wide", "dq90"])
def test_tiles_that_no_pair_is_seen_of_are_not_walked_over(kernel: KernelName, feature: str) -> None:
    """The products that the emulator counts are those of the tiles in which some query of the block sees a key."""
    problem = replace(BASE, **{**FEATURES[feature], "d": 64, "B": 1, "Nq": 400, "Nk": 300})
    tiles = _tiles(WarpgroupKeyTile(Br=32), WarpgroupWideTile(Bc=64), WarpgroupQueryTile(Br=64, Bc=32))
    Br, Bc = tiles[kernel].Br, tiles[kernel].Bc  # type: ignore[union-attr]
    left, right = problem.window[0], 0 if problem.causal else problem.window[1]
    corner = 0 if problem.anchor == "top-left" else 300 - 400
    keys = 300 if kernel == "dq90" else 300 + -300 % Bc  # those past the end may keep a tile in a walk
    i, j = np.arange(400)[:, None], np.arange(keys)[None]
    seen = np.ones((400, keys), bool)
    if right is not None:
        seen &= j <= i + corner + right
    if left is not None:
        seen &= j >= i + corner - left
    seen = np.pad(seen, ((0, -400 % Br), (0, -keys % Bc)))
    walked = np.asarray(seen.reshape(len(seen) // Br, Br, -1, Bc).any(axis=(1, 3)))
    if kernel == "dq90":
        walked[~walked.any(axis=1), 0] = True  # there is always one, of which all keys are masked
    assert 0 < walked.sum() < walked.size * 0.7
    of_a_tile = {"fused90": 5, "dkdv90": 4, "dkdv90_wide": 4, "dq90": 3}[kernel] * 2 * Br * Bc * 64
    assert _flops(kernel, problem, tiles) == of_a_tile * walked.sum() * problem.Hq


def _flops(kernel: KernelName, problem: Problem, tiles: Tiles) -> float:
    engine, x = EmulatedEngine(), make_inputs(problem)
    binaries = binaries_of(("delta", kernel), problem, tiles)
    q, k, v, dO = (engine.tensor(bits) for bits in (x.q, x.k, x.v, x.dO))
    rows = [engine.tensor(np.ones(x.q.shape[:3], np.float32)) for _ in range(2)]
    run_backward(engine, binaries, q, k, v, Forward(dO, *rows), dO, 1.0, extras=extras_of(problem, x, engine))
    return sum(report.tensor_flops for _, report in engine.reports)


def leaks(lengths: Any, binaries: Mapping[KernelName, Binary], problem: Problem) -> bool:
    """Whether NaN behind a sequence, where padding is or another sequence, changes a bit of its gradients."""
    x = make_inputs(problem, 2)
    keys = np.ones(x.k.shape[0] * x.k.shape[2], bool).reshape(x.k.shape[0], -1)  # whose gradients are looked at
    rows = np.ones(x.q.shape[0] * x.q.shape[2], bool).reshape(x.q.shape[0], -1)
    if lengths == "padded":
        keys = np.arange(problem.keys) < np.asarray(x.k_lens)[:, None]
    else:
        assert x.cu_q is not None and x.cu_k is not None
        keys[:] = rows[:] = False
        for mask, ends in ((keys, x.cu_k), (rows, x.cu_q)):
            mask[0, ends[2] : ends[3]] = True
    results = []
    for other in (0x3F80, NAN):
        engine = EmulatedEngine(check_races=True)

        def tensor(bits: Any, mask: Any, other: int = other, engine: EmulatedEngine = engine) -> Any:
            return engine.tensor(np.where(mask[:, None, :, None], bits, np.uint16(other)).astype(np.uint16))

        q, k, v, dO = tensor(x.q, rows), tensor(x.k, keys), tensor(x.v, keys), tensor(x.dO, rows)
        sums = (engine.tensor(np.full(x.q.shape[:3], n, np.float32)) for n in (3.0, 40.0))
        extras = extras_of(problem, x, engine)
        out = run_backward(engine, binaries, q, k, v, Forward(dO, *sums), dO, 0.125, extras=extras)
        for gradient, mask in ((out.dQ, rows), (out.dK, keys), (out.dV, keys)):
            if gradient is not None:
                results.append(engine.read(gradient).transpose(0, 2, 1, 3)[mask])
    assert all(own.size for own in results) and np.isfinite(widen(results[0], "bf16")).all()
    half = len(results) // 2
    return not all(np.array_equal(a, b) for a, b in zip(results[:half], results[half:], strict=True))


@pytest.mark.parametrize("kernels", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("lengths", ["padded", "packed"])
def test_a_neighbours_nan_does_not_leak(lengths: Any, kernels: tuple[KernelName, ...]) -> None:
    """What lies behind a sequence is padding or another sequence: no bit of it counts, whatever it is."""
    problem = replace(BASE, lengths=lengths, B=4, d=64, dv=72)
    assert not leaks(lengths, binaries_of(kernels, problem, TILES[0]), problem)


CAP = ScoreMod(text="30.0 * tanh(score / 30.0)")
BIAS = ScoreMod(text="score + bias[b, h, i, j]", tables=(Table(name="bias", rank=4, grad=True),))
MANY: dict[str, Any] = {"lengths": "packed", "window": (64, 3), "dropout": 0.1, "sinks": True, "score_mod": CAP}


@pytest.mark.parametrize(("kernel", "d"), [("fused90", 64), ("fused90", 128), ("dkdv90", 128), ("dkdv90_wide", 192),
                                           ("dq90", 64), ("dq90", 128), ("dq90", 256)])  # fmt: skip
@pytest.mark.parametrize(
    "fields",
    [{"causal": True, "window": (512, 0)}, {"causal": True, "lengths": "packed"}, {"dropout": 0.1},
     {"score_mod": CAP}, {"score_mod": BIAS}, MANY],
    ids=["window", "packed", "dropout", "softcap", "bias", "many"],
)  # fmt: skip
def test_default_tiles_leave_registers_for_features(fields: dict[str, Any], kernel: KernelName, d: int) -> None:
    """Nothing is spilled, and nothing serialised, which would be refused. Masks and lengths take none."""
    problem, gpu = Problem(dtype="bf16", d=d, **fields), find_gpu("h100-sxm")
    tile = default_tile(kernel, problem, gpu)
    assert binary_of(kernel, problem, tile).spill_bytes == 0
    if not {"dropout", "score_mod"} & {*fields}:
        assert tile == default_tile(kernel, Problem(dtype="bf16", d=d, causal=True), gpu)


GOLDEN: dict[str, tuple[KernelName, dict[str, Any], Tile]] = {
    "fused90_d128_window_softcap_h100": ("fused90", {"window": (64, 0), "score_mod": CAP}, WarpgroupKeyTile(Br=64)),
    "convert90_d128_packed_h100": ("convert90", {"lengths": "packed"}, WarpgroupKeyTile(Br=80)),
    "dkdv90_wide_d192_padded_bias_h100": (
        "dkdv90_wide", {"d": 192, "lengths": "padded", "causal": True, "score_mod": BIAS},
        WarpgroupWideTile(Bc=96, consumers=3),
    ),
    "dq90_d128_packed_window_dropout_h100": (
        "dq90", {"lengths": "packed", "window": (64, 0), "dropout": 0.1}, WarpgroupQueryTile(Br=128, Bc=96),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, golden: Any) -> None:
    kernel, fields, tile = GOLDEN[name]
    golden(f"{name}.cu", render(KernelSpec.of(kernel, Problem(**{"dtype": "bf16", "d": 128, **fields}), tile, 90)).text)

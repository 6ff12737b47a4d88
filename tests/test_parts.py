"""Into how many parts keys are cut: by arithmetic, and as good as what predictions would choose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flashsmith.compile import compile_source
from flashsmith.explain import explain
from flashsmith.forms import Choice
from flashsmith.load import forward_form, load_pass
from flashsmith.parts import choose_parts
from flashsmith.predict import predict_pass
from flashsmith.render import render
from flashsmith.sass.board import HBM_SHARE
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import Gpu, find_gpu
from flashsmith.spec.kernel import FORWARD, PARTS, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import Tile

A100 = find_gpu("a100")
DECODE = Problem(dtype="bf16", d=128, Nq=1, Nk=8192)
NEAR = 0.05  # of the best predicted time


def choice(problem: Problem, gpu: Gpu = A100, tile: Tile | None = None) -> Choice:
    tile = tile or default_tile("partial", problem, gpu)
    return choose_parts(KernelSpec.of("partial", problem, tile, gpu.sm), problem, gpu)


def seconds(problem: Problem, parts: int, gpu: Gpu, tile: Tile | None = None) -> float:
    """Of a forward by so many parts, whole if it is one, by the predictions of its kernels."""
    specs = [
        KernelSpec.of(
            kernel, problem, tile if tile and kernel != "combine" else default_tile(kernel, problem, gpu), gpu.sm
        )
        for kernel in (FORWARD if parts == 1 else PARTS)
    ]
    binaries = {spec.kernel: compile_source(render(spec)) for spec in specs}
    return sum(p.seconds for p in predict_pass(binaries, problem, gpu, parts=parts))


@pytest.mark.parametrize(("B", "Nk"), [(1, 1024), (1, 65536), (8, 8192)])
@pytest.mark.parametrize("Nq", [1, 64])
@pytest.mark.parametrize("gpu", ["a100", "h100-sxm", "rtx4090"])
def test_predictions_would_choose_no_better(gpu: str, Nq: int, B: int, Nk: int) -> None:
    """No number of parts is faster than the memory; where that is out of reach, others are tried."""
    target, problem = find_gpu(gpu), replace(DECODE, B=B, Nq=Nq, Nk=Nk)
    found = choice(problem, target)
    chosen = seconds(problem, found.parts, target)
    keys = 2 * 2.0 * B * problem.Hq * Nk * problem.d / (HBM_SHARE * target.hbm_gbs * 1e9)
    if chosen > (1 + NEAR) * keys:
        assert chosen <= (1 + NEAR) * min(seconds(problem, parts, target) for parts in (1, 4, 6, 13, 16)), found


@pytest.mark.parametrize(
    "problem",
    [
        replace(DECODE, Nq=8192),
        replace(DECODE, B=64, Nk=1024),
        replace(DECODE, Nk=64),
        replace(DECODE, Nk=0),
        replace(DECODE, Nq=0),
        replace(DECODE, Nq=64, Nk=8, causal=True),
    ],
    ids=["many queries", "a large batch", "one tile of keys", "no keys", "no queries", "hardly a visible key"],
)
def test_what_fills_the_gpu_or_has_nothing_to_cut_stays_whole(problem: Problem) -> None:
    found = choice(problem)
    assert (found.form, found.parts, found.kernels) == ("whole", 1, FORWARD) and found.reason.startswith("whole: ")


def test_parts_say_why_they_serve(tmp_path: Path) -> None:
    """16 blocks for 108 SMs; and a kernel asked for by name says in which form it would run."""
    found = forward_form(DECODE, A100, tmp_path)
    blocks = 16 * found.parts
    assert found.form == "parts" and found.kernels == PARTS and blocks >= 108
    assert f"{blocks} blocks on 108 SMs instead of 16" in found.reason
    assert list(load_pass(DECODE, "forward", A100, folder=tmp_path)) == list(PARTS)
    explained = explain(DECODE, "partial", A100, tmp_path)
    assert explained.form == found and explained.contenders[0].prediction is not None
    assert explain(DECODE, "combine", A100, tmp_path).looked == ()


def test_long_prompts_are_parted_too() -> None:
    """512 rows of 8 heads are 32 blocks of 128 rows."""
    prefill = replace(DECODE, Hq=8, Hk=8, Nq=512, Nk=65536, causal=True)
    assert choice(prefill).parts > 2 and choice(replace(prefill, B=16)).form == "whole"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("gpu", "N"), [("a100", 512), ("h100-sxm", 1024)])
def test_parts_are_not_dearer_than_their_sums(gpu: str, N: int, causal: bool) -> None:
    """128 or 64 blocks leave places, but O of each part has to be written and read again."""
    target, problem = find_gpu(gpu), replace(DECODE, Nq=N, Nk=N, causal=causal)
    found = choice(problem, target)
    assert seconds(problem, found.parts, target) <= (1 + NEAR) * seconds(problem, 1, target)


@pytest.mark.parametrize(("Nq", "Br"), [(1, 16), (16, 16), (40, 64)])
@pytest.mark.parametrize(("gpu", "ratio"), [("a100", 0.8), ("rtx4090", 1.01)])
def test_packed_heads_are_faster(gpu: str, ratio: float, Nq: int, Br: int) -> None:
    """Than one head a tile, by parts where that is best; an L2 cache that is fast beside the memory hides the rest."""
    target, problem = find_gpu(gpu), replace(DECODE, Hq=32, Hk=8, Nq=Nq, Nk=16384)
    apart = replace(default_tile("forward", problem, target), Br=Br, warps=Br // 16, packed=False)  # type: ignore[call-arg]
    by_head = seconds(problem, choice(problem, target, apart).parts, target, apart)
    assert seconds(problem, choice(problem, target).parts, target) < ratio * by_head


def test_no_part_is_planned_without_a_tile() -> None:
    for Nk in range(1, 3000, 131):
        problem = replace(DECODE, Nk=Nk)
        tile = default_tile("partial", problem, A100)
        assert choice(problem).parts <= -(-Nk // tile.Bc)  # type: ignore[union-attr]

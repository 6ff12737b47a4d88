"""Which tiles a search may choose from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flashsmith.render import render
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import TILE_OF, KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.space import choices, legal_tiles, tile_of
from flashsmith.spec.tile import ALL_HEADS, GROUPED, HEAD_BY_HEAD

GPU = find_gpu("a100")
PROBLEM = Problem(dtype="bf16", d=64, Nq=2048)
SEARCHED: tuple[KernelName, ...] = ("forward", "fused", "dkdv", "dq")
OF_WARPGROUPS: tuple[KernelName, ...] = ("forward90", "fused90", "dkdv90", "dkdv90_wide", "dq90")
HOPPER = find_gpu("h100-sxm")


@pytest.mark.parametrize("kernel", [*SEARCHED, *OF_WARPGROUPS])
def test_every_field_is_searched(kernel: KernelName) -> None:
    gpu = HOPPER if kernel in OF_WARPGROUPS else GPU
    problem = replace(PROBLEM, d=192) if kernel == "dkdv90_wide" else PROBLEM
    assert set(choices(kernel, problem, gpu)) == set(TILE_OF[kernel].__dataclass_fields__) - {"short"}


@pytest.mark.parametrize("kernel", OF_WARPGROUPS)
def test_every_tile_of_warpgroups_has_a_text_of_its_own(kernel: KernelName) -> None:
    """With the mask and without; what only a GPU can judge is tried there alone."""
    for causal in (False, True):
        problem = replace(PROBLEM, d=192 if kernel == "dkdv90_wide" else 128, causal=causal)
        tiles = legal_tiles(kernel, problem, HOPPER, measured=True)
        texts = {render(KernelSpec.of(kernel, problem, tile, HOPPER.sm)).text for tile in tiles}
        assert len(tiles) == len(texts) >= 8
        assert set(legal_tiles(kernel, problem, HOPPER)) <= set(tiles)


@pytest.mark.parametrize("kernel", SEARCHED)
def test_every_tile_has_a_text_of_its_own(kernel: KernelName) -> None:
    """Two tiles of one text would be timed twice."""
    small = find_gpu("rtx4090")
    problem = Problem(dtype="bf16", d=192, causal=True)
    tiles = legal_tiles(kernel, problem, small, measured=True)
    texts = {render(KernelSpec.of(kernel, problem, tile, small.sm)).text for tile in tiles}
    assert len(tiles) == len(texts) > 20


@pytest.mark.parametrize("kernel", SEARCHED)
def test_what_only_a_gpu_can_judge_is_tried_on_a_gpu(kernel: KernelName) -> None:
    """A prediction does not see the L2 cache: it tries no order that mixes all heads, and one direction."""
    masked = replace(PROBLEM, causal=True)
    predicted, measured = (choices(kernel, masked, GPU, measured=gpu) for gpu in (False, True))
    assert ALL_HEADS not in predicted["order"] and GROUPED in predicted["order"]
    assert measured["order"] == [HEAD_BY_HEAD, GROUPED, ALL_HEADS]
    assert len(choices(kernel, PROBLEM, GPU, measured=True)["order"]) == 1  # one text without a mask
    if kernel == "forward":
        assert predicted["ascending"] == [0] and measured["ascending"] == [0, 1]
    assert set(legal_tiles(kernel, masked, GPU)) < set(legal_tiles(kernel, masked, GPU, measured=True))


def test_few_queries_have_tiles_of_few_rows() -> None:
    """Heads are packed where a group has fewer tiles together, and nowhere else."""
    decode = replace(PROBLEM, Nq=1, Nk=8192, Hq=16, Hk=2)
    assert choices("forward", decode, GPU)["Br"] == [16, 32, 64] and choices("forward", decode, GPU)["packed"] == [0, 1]
    for problem in (PROBLEM, replace(decode, Hk=16), replace(decode, Nq=64), replace(decode, Nq=65)):
        assert choices("forward", problem, GPU)["packed"] == [0]
    tiles = legal_tiles("forward", decode, GPU)
    texts = {render(KernelSpec.of("forward", decode, tile, GPU.sm)).text for tile in tiles}
    assert len(tiles) == len(texts) and {tile.packed for tile in tiles} == {False, True}  # type: ignore[union-attr]


def test_flags_may_be_numbers() -> None:
    values = {"Br": 64, "Bc": 32, "warps": 4, "lazy": 1}
    assert tile_of("forward", values).lazy is True  # type: ignore[union-attr]


@pytest.mark.parametrize("fields", [{"causal": True}, {"window": (None, 64)}, {"window": (64, 64)}])
def test_orders_are_tried_where_blocks_differ_in_length(fields: dict[str, Any]) -> None:
    problem = Problem(dtype="bf16", d=64, **fields)
    assert choices("forward", problem, find_gpu("a100"), measured=True)["order"] == [HEAD_BY_HEAD, GROUPED, ALL_HEADS]

"""Tiles of dq90: what fits an SM of the H100, and what is said of what does not."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from flashsmith.errors import BadProblem, NoTunedKernel
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.limits import buffers, smem_bytes, why_illegal
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import WarpgroupQueryTile

H100 = find_gpu("h100-sxm")


def spec_of(d: int = 128, dv: int | None = None, sm: int = 90, **tile: Any) -> KernelSpec:
    problem = Problem(dtype="bf16", d=d, dv=dv)
    return KernelSpec.of("dq90", problem, WarpgroupQueryTile(**{"Br": 128, "Bc": 64, **tile}), sm)


@pytest.mark.parametrize(
    ("d", "tile"),
    [(64, {"Bc": 144}), (128, {"Bc": 112}), (128, {"Bc": 144, "overlap": False, "v_stages": 1}),
     (192, {"Bc": 80}), (256, {"Bc": 48}), (256, {"Bc": 64, "v_stages": 1}), (128, {"Br": 192, "Bc": 48}),
     (256, {"Bc": 80, "stages": 1, "v_stages": 1, "overlap": False}), (128, {"Br": 64, "Bc": 112, "stages": 3})],
)  # fmt: skip
def test_tiles_that_fit(d: int, tile: dict[str, int]) -> None:
    assert why_illegal(spec_of(d, **tile), H100) is None


@pytest.mark.parametrize(
    ("d", "tile", "reason"),
    [
        (128, {"Bc": 128}, r"d / 2 \+ Bc / 2 \+ Bc / 2 \+ Bc / 4 = 224 registers .* 2 warpgroups .* 212"),
        (128, {"Br": 192}, r"= 144 registers .* 3 warpgroups .* 128. Use a smaller Bc or Br"),
        (128, {"Bc": 160, "overlap": False}, r"dQ, S, dP take d / 2 \+ Bc / 2 \+ Bc / 2 = 224 registers"),
        (256, {"Bc": 64}, r"needs 263\d{3} B of shared memory; h100-sxm gives a block 232448 B"),
        (128, {"stages": 1}, r"overlap=1: .* stages=1. Use 2, or overlap=0"),
        (128, {"Br": 96}, r"Br=96: must be 64 for each of 1 to 3 warpgroups"),
        (128, {"Bc": 72}, r"Bc=72: must be a multiple of 16 up to 256"),
        (128, {"v_stages": 0}, r"v_stages=0: must be 1 or more"),
        (128, {"order": 0}, r"order=0: without a mask"),
    ],
)
def test_tiles_that_do_not(d: int, tile: dict[str, Any], reason: str) -> None:
    said = why_illegal(spec_of(d, **tile), H100)
    assert said and re.search(reason, said), said


@pytest.mark.parametrize(("d", "Bc", "v_stages"), [(64, 128, 2), (128, 112, 2), (192, 80, 2), (256, 64, 1)])
def test_default_tiles(d: int, Bc: int, v_stages: int) -> None:
    """The widest that registers and shared memory allow."""
    tile = default_tile("dq90", Problem(dtype="bf16", d=d), H100)
    assert tile == WarpgroupQueryTile(Br=128, Bc=Bc, v_stages=v_stages)


def test_every_head_dimension_has_a_default_tile() -> None:
    for d, dv in product(range(8, 257, 8), (None, 8, 256)):
        default_tile("dq90", Problem(dtype="fp16", d=d, dv=dv), H100)


def test_other_parts_have_none() -> None:
    with pytest.raises(NoTunedKernel, match=r"no dq90 tile fits a100 .* sm_90a, and this part is sm_80. Use dq"):
        default_tile("dq90", Problem(dtype="bf16", d=64), find_gpu("a100"))


def test_what_it_does_not_serve() -> None:
    """fp32, which wgmma does not multiply as three of TF32."""
    with pytest.raises(BadProblem, match=r"dq90 serves 16 bits; fp32 runs in dq\."):
        KernelSpec.of("dq90", Problem(dtype="fp32", d=64), WarpgroupQueryTile(Br=128, Bc=64), 90)


@pytest.mark.parametrize(
    ("fields", "Bc"), [({"window": (64, 0)}, 112), ({"dropout": 0.1}, 96), ({"lengths": "packed"}, 112)]
)
def test_a_default_tile_leaves_registers_for_features(fields: dict[str, Any], Bc: int) -> None:
    tile = default_tile("dq90", Problem(dtype="bf16", d=128, **fields), find_gpu("h100-sxm"))
    assert isinstance(tile, WarpgroupQueryTile) and tile.Bc == Bc


@pytest.mark.parametrize(("d", "dv"), [(128, None), (72, None), (64, 128), (192, 128)])
def test_buffers_of_panels_start_on_1024_bytes(d: int, dv: int | None) -> None:
    """The swizzle is of the address, so that every panel starts where the pattern does."""
    spec = spec_of(d, dv, Bc=48)
    found = {buffer.name: buffer for buffer in buffers(spec)}
    assert all(found[name].offset % 1024 == 0 for name in ("Q_smem", "dO_smem", "K_smem", "V_smem"))
    assert smem_bytes(spec) == found["slack"].offset + 1024

"""Tiles of dkdv90_wide: what fits an SM of the H100, and what is said of what does not."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from flashsmith.errors import NoTunedKernel
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import SPLIT90, SPLIT90_WIDE, KernelSpec, split90
from flashsmith.spec.limits import buffers, smem_bytes, why_illegal
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import WarpgroupWideTile

H100 = find_gpu("h100-sxm")


def spec_of(d: int = 256, dv: int | None = None, sm: int = 90, **tile: Any) -> KernelSpec:
    problem = Problem(dtype="bf16", d=d, dv=dv)
    return KernelSpec.of("dkdv90_wide", problem, WarpgroupWideTile(**{"Bc": 64, **tile}), sm)


@pytest.mark.parametrize(
    ("d", "tile"),
    [(256, {}), (256, {"Bc": 80, "dO_stages": 1, "overlap": False}), (192, {"Bc": 96, "consumers": 3}),
     (192, {"Bc": 80}), (256, {"Bc": 48, "consumers": 3}), (136, {"Bc": 96, "consumers": 3})],
)  # fmt: skip
def test_tiles_that_fit(d: int, tile: dict[str, int]) -> None:
    assert why_illegal(spec_of(d, **tile), H100) is None


@pytest.mark.parametrize(
    ("d", "tile", "reason"),
    [
        (256, {"Bc": 96}, r"dK, dV, S and dP take 240 registers .* 2 warpgroups .* leave them 212"),
        (256, {"Bc": 96, "consumers": 3}, r"take 224 registers .* 3 warpgroups .* 128"),
        (256, {"Bc": 80}, r"needs 248\d{3} B of shared memory; h100-sxm gives a block 232448 B"),
        (256, {"Bc": 72}, r"Bc=72: must be a multiple of 16 up to 128 where 2 warpgroups share keys"),
        (192, {"Bc": 80, "consumers": 3}, r"Bc=80: must be a multiple of 48 up to 128 where 3 warpgroups share keys"),
        (256, {"consumers": 1}, r"consumers=1: 2 or 3 warpgroups compute"),
        (256, {"dO_stages": 1}, r"overlap=1: .* stages=2, dO_stages=1. Use 2, or overlap=0"),
        (256, {"stages": 3}, r"stages=3: a buffer more than 2 is never waited for"),
        (256, {"dO_stages": 0}, r"dO_stages=0: must be 1 or more"),
        (256, {"order": 0}, r"order=0: without a mask"),
    ],
)
def test_tiles_that_do_not(d: int, tile: dict[str, Any], reason: str) -> None:
    said = why_illegal(spec_of(d, **tile), H100)
    assert said and re.search(reason, said), said


@pytest.mark.parametrize(
    ("d", "dv", "consumers", "Bc"), [(192, None, 3, 96), (192, 128, 3, 96), (256, None, 2, 64), (256, 128, 2, 96)]
)
def test_default_tiles(d: int, dv: int | None, consumers: int, Bc: int) -> None:
    """The most keys that registers and shared memory allow."""
    tile = default_tile("dkdv90_wide", Problem(dtype="bf16", d=d, dv=dv), H100)
    assert tile == WarpgroupWideTile(Bc=Bc, consumers=consumers)


def test_every_wide_head_has_a_default_tile() -> None:
    for d, dv in product(range(8, 257, 8), (None, 8, 256)):
        problem = Problem(dtype="fp16", d=d, dv=dv)
        wide = max(d, problem.value_dim) > 128
        assert split90(problem) == (SPLIT90_WIDE if wide else SPLIT90)
        if wide:
            default_tile("dkdv90_wide", problem, H100)


def test_other_parts_have_none() -> None:
    with pytest.raises(NoTunedKernel, match=r"no dkdv90_wide tile fits a100 .* this part is sm_80. Use dkdv"):
        default_tile("dkdv90_wide", Problem(dtype="bf16", d=256), find_gpu("a100"))


@pytest.mark.parametrize(("d", "dv"), [(256, None), (136, 8), (64, 256), (192, 128)])
def test_buffers_of_panels_start_on_1024_bytes(d: int, dv: int | None) -> None:
    """The swizzle is of the address, so that every panel starts where the pattern does."""
    spec = spec_of(d, dv, Bc=48)
    found = {buffer.name: buffer for buffer in buffers(spec)}
    panels = ("K_smem", "V_smem", "Q_smem", "dO_smem", "P_smem", "dS_smem")
    assert all(found[name].offset % 1024 == 0 for name in panels)
    assert found["stats_smem"].offset % 16 == 0  # of a bulk copy
    assert smem_bytes(spec) == found["slack"].offset + 1024

"""Tiles of warpgroups that own keys: what fits an SM of the H100, and what is said of what does not."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from flashsmith.errors import BadProblem, NoTunedKernel
from flashsmith.run import Sizes, dq_accumulator_floats, grid
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.features import ScoreMod
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import CONVERTS, KernelName, KernelSpec
from flashsmith.spec.limits import buffers, smem_bytes, why_illegal
from flashsmith.spec.order import launch_order
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import ALL_HEADS, WarpgroupKeyTile

H100 = find_gpu("h100-sxm")


def spec_of(
    kernel: KernelName = "fused90", d: int = 128, dv: int | None = None, sm: int = 90, causal: bool = False, **tile: Any
) -> KernelSpec:
    problem = Problem(dtype="bf16", d=d, dv=dv, causal=causal)
    return KernelSpec.of(kernel, problem, WarpgroupKeyTile(**{"Br": 64, **tile}), sm)


@pytest.mark.parametrize(
    ("d", "dv", "tile"),
    [(128, 128, {"Br": 80}), (128, 128, {"Br": 64}), (64, 64, {"Br": 128}), (64, 128, {"Br": 96}),
     (128, 64, {"Br": 112, "stages": 1}), (96, 96, {"Br": 112, "stages": 1}), (8, 8, {"Br": 32})],
)  # fmt: skip
def test_tiles_that_fit(d: int, dv: int, tile: dict[str, int]) -> None:
    """Those of FlashAttention-3 and the largest that ptxas compiles without spills."""
    assert why_illegal(spec_of(d=d, dv=dv, **tile), H100) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"Br": 96, "stages": 1},
            r"d / 2 \+ dv / 2 \+ Br = 224 registers of a thread, and there are 208 .* smaller Br",
        ),
        ({"d": 64, "dv": 128, "Br": 128}, r"= 224 registers"),
        ({"Br": 80, "stages": 3}, r"needs 274\d{3} B of shared memory; h100-sxm gives a block 232448 B"),
        ({"d": 64, "Br": 80}, r"Br=80: must be a multiple of 32 up to 128 where d=64"),
        ({"Br": 72}, r"Br=72: must be a multiple of 16 up to 128 where d=128"),
        ({"d": 64, "Br": 160}, r"Br=160: must be a multiple of 32 up to 128"),
        ({"Bc": 64}, r"Bc=64: must be 128, 64 keys for each of two warpgroups"),
        ({"dS_stages": 3}, r"dS_stages=3: nobody waits for more than 2"),
        ({"dS_stages": 0}, r"dS_stages=0: must be 1 or more"),
        ({"stages": 0}, r"stages=0: must be 1 or more"),
        ({"kernel": "dkdv90", "dS_stages": 1}, r"dkdv90 has no dS in shared memory"),
        ({"kernel": "dkdv90", "bulk_sums": False}, r"dkdv90 adds up no dQ"),
        ({"d": 136}, r"d=136, dv=136: fused90 serves heads of up to 128 columns. Use fused\."),
        ({"d": 64, "dv": 192}, r"d=64, dv=192: fused90 serves heads"),
        ({"sm": 80}, r"fused90 needs wgmma and TMA of sm_90a, and this part is sm_80. Use fused\."),
        ({"order": 0}, r"order=0: without a mask"),
    ],
)
def test_tiles_that_do_not(fields: dict[str, Any], reason: str) -> None:
    said = why_illegal(spec_of(**fields), H100)
    assert said and re.search(reason, said), said


@pytest.mark.parametrize(
    ("d", "causal", "Br"),
    [(64, False, 128), (64, True, 128), (96, False, 80), (128, False, 80), (128, True, 64), (8, False, 128)],
)
def test_default_tiles(d: int, causal: bool, Br: int) -> None:
    """Those of FlashAttention-3 at d = 64 and 128."""
    problem = Problem(dtype="bf16", d=d, causal=causal)
    for kernel in ("fused90", "convert90"):
        assert default_tile(kernel, problem, H100) == WarpgroupKeyTile(Br=Br)


def test_every_head_dimension_has_a_default() -> None:
    kernels: tuple[KernelName, ...] = ("fused90", "convert90", "dkdv90")
    for kernel, d, dv in product(kernels, range(8, 129, 8), (8, 64, 104, 128)):
        problem = Problem(dtype="fp16", d=d, dv=dv, causal=d % 16 == 0)
        spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, H100), 90)
        assert why_illegal(spec, H100) is None


def test_elsewhere_there_is_none() -> None:
    with pytest.raises(NoTunedKernel, match=r"no fused90 tile fits a100 .* sm_90a, and this part is sm_80"):
        default_tile("fused90", Problem(dtype="bf16", d=64), find_gpu("a100"))
    with pytest.raises(NoTunedKernel, match=r"no dkdv90 tile fits h100-sxm .* up to 128 columns. Use dkdv"):
        default_tile("dkdv90", Problem(dtype="bf16", d=192), H100)


def test_what_it_does_not_serve() -> None:
    """fp32, which wgmma does not multiply as three of TF32. convert90 has no use for more than where rows lie."""
    for kernel in ("fused90", "dkdv90"):
        with pytest.raises(BadProblem, match=f"{kernel} serves 16 bits; fp32 runs in {kernel.removesuffix('90')}"):
            KernelSpec.of(kernel, Problem(dtype="fp32", d=64), WarpgroupKeyTile(Br=64), 90)
    problem = Problem(dtype="bf16", d=64, dropout=0.1, lengths="packed", window=(9, 0))
    assert KernelSpec.of("convert90", problem, WarpgroupKeyTile(Br=64), 90).features.words == ("packed",)


@pytest.mark.parametrize(
    ("kernel", "fields", "Br"),
    [("fused90", {"dropout": 0.1}, 48), ("fused90", {"window": (8, 9)}, 80), ("dkdv90", {"lengths": "packed"}, 80),
     ("dkdv90", {"score_mod": ScoreMod(text="30.0 * tanh(score / 30.0)")}, 64)],
)  # fmt: skip
def test_a_default_tile_leaves_registers_for_features(kernel: KernelName, fields: dict[str, Any], Br: int) -> None:
    """As tests/test_backward90_features.py sees in machine code; masks and lengths need none."""
    assert default_tile(kernel, Problem(dtype="bf16", d=128, **fields), H100) == WarpgroupKeyTile(Br=Br)


def test_buffers_of_the_largest_tile() -> None:
    """The tile of FlashAttention-3 at d = 128, 80 bytes less than there are."""
    spec = spec_of(Br=80)
    assert {buffer.name: buffer.bytes for buffer in buffers(spec)} == {
        "K_smem": 32768, "V_smem": 32768, "Q_smem": 40960, "dO_smem": 40960, "dS_smem": 40960, "dQ_smem": 40960,
        "stats_smem": 1920, "barriers": 48, "slack": 1024,
    }  # fmt: skip
    assert smem_bytes(spec) == 232368 <= H100.smem_block_bytes
    assert {"dS_smem", "dQ_smem"}.isdisjoint(buffer.name for buffer in buffers(spec_of("dkdv90", Br=80)))


def test_every_panel_begins_where_the_swizzle_does() -> None:
    for kernel, d, dv, Br in product(("fused90", "dkdv90"), (8, 64, 72, 128), (40, 128), (32, 64)):
        spec = spec_of(kernel, d=d, dv=dv, Br=Br)  # type: ignore[arg-type]
        offsets = {buffer.name: buffer.offset for buffer in buffers(spec)}
        panels = {"K_smem", "V_smem", "Q_smem", "dO_smem", "dS_smem"}
        assert all(offsets[name] % 1024 == 0 for name in panels & offsets.keys())
        assert all(offsets[name] % 16 == 0 for name in offsets)


def test_launches() -> None:
    """A block for each tile of keys, and of convert90 one for each tile of queries, whose sums fill the accumulator."""
    sizes = Sizes(B=2, Hq=6, Hk=3, Nq=200, Nk=300)
    assert [grid(spec_of(kernel, Br=80), sizes) for kernel in ("fused90", "dkdv90", "convert90")] == [18, 18, 36]
    assert CONVERTS["convert90"] == "fused90"
    assert dq_accumulator_floats(spec_of(Br=80, d=72), sizes) == 12 * 3 * 80 * 80


def test_the_longest_loops_come_first() -> None:
    """Early keys are seen by most queries."""
    spec = spec_of(causal=True, order=ALL_HEADS)
    assert launch_order(spec, heads=2, group=1, tiles=2) == [(0, 0), (1, 0), (0, 1), (1, 1)]

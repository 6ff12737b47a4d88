"""Tiles of warpgroups: what fits an SM of the H100, and what is said of what does not."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from flashsmith.errors import BadProblem, NoTunedKernel
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.features import ScoreMod
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import WARPGROUP_FEATURES, KernelSpec
from flashsmith.spec.limits import buffers, smem_bytes, why_illegal
from flashsmith.spec.problem import Problem
from flashsmith.spec.space import choices
from flashsmith.spec.tile import WarpgroupTile
from flashsmith.spec.warpgroup_shape import SHARES

H100 = find_gpu("h100-sxm")


def spec_of(d: int = 128, dv: int | None = None, sm: int = 90, **tile: Any) -> KernelSpec:
    problem = Problem(dtype="bf16", d=d, dv=dv)
    return KernelSpec.of("forward90", problem, WarpgroupTile(**{"Br": 128, "Bc": 128, **tile}), sm)


@pytest.mark.parametrize(
    ("d", "tile"),
    [(128, {"Bc": 176}), (128, {"Bc": 192}), (64, {"Bc": 240}), (128, {"Br": 192, "Bc": 80}),
     (64, {"Br": 192, "Bc": 128}), (256, {"Bc": 80}), (128, {"Br": 64, "Bc": 192}), (72, {"Bc": 128}),
     (64, {"Br": 192, "Bc": 192, "p_smem": True}), (96, {"Br": 192, "Bc": 128, "p_smem": True}),
     (128, {"Br": 192, "Bc": 128, "p_smem": True})],
)  # fmt: skip
def test_tiles_that_fit(d: int, tile: dict[str, int]) -> None:
    """Those of FlashAttention-3 and the widest that ptxas compiles without spills."""
    assert why_illegal(spec_of(d, **tile), H100) is None


@pytest.mark.parametrize(
    ("d", "tile", "reason"),
    [
        (128, {"Bc": 208, "stages": 1}, r"dv / 2 \+ Bc / 2 \+ Bc / 4 = 220 registers .* 2 warpgroups .* 212"),
        (128, {"Br": 192, "Bc": 96}, r"= 136 registers .* 3 warpgroups .* 128"),
        (
            64,
            {"Br": 192, "Bc": 208, "p_smem": True},
            r"dv / 2 \+ Bc / 2 = 136 registers .* 128. Use a smaller Bc or Br\.$",
        ),
        (64, {"Br": 192, "Bc": 144}, r"= 140 registers .* 128. Use a smaller Bc or Br, or p_smem=1\."),
        (256, {"Bc": 96}, r"needs 263\d{3} B of shared memory; h100-sxm gives a block 232448 B"),
        (128, {"Br": 96}, r"Br=96: must be 64 for each of 1 to 3 warpgroups"),
        (128, {"Br": 256}, r"warps=20: a block has 1 to 16 warps"),
        (128, {"Br": 0}, r"Br=0: must be 1 or more"),
        (128, {"Bc": 72}, r"Bc=72: must be a multiple of 16 up to 256"),
        (64, {"Bc": 272}, r"Bc=272"),
        (128, {"Br": 64, "pingpong": True}, r"pingpong=1: Br=64 has one warpgroup .* Use pingpong=0"),
        (128, {"cluster": 3}, r"cluster=3: K and V are loaded by 1 block, or by 2 for each other"),
        (128, {"cluster": 0}, r"cluster=0"),
        (128, {"stages": 0}, r"stages=0: must be 1 or more"),
        (128, {"order": 0}, r"order=0: without a mask"),
    ],
)
def test_tiles_that_do_not(d: int, tile: dict[str, Any], reason: str) -> None:
    said = why_illegal(spec_of(d, **tile), H100)
    assert said and re.search(reason, said), said


@pytest.mark.parametrize(
    ("d", "causal", "Bc"),
    [(72, True, 128), (128, False, 176), (128, True, 128), (192, False, 112), (256, False, 80), (256, True, 80)],
)
def test_default_tiles(d: int, causal: bool, Bc: int) -> None:
    """The widest that shared memory and registers allow; at d = 128 and 256 that of FlashAttention-3."""
    tile = default_tile("forward90", Problem(dtype="bf16", d=d, causal=causal), H100)
    assert tile == WarpgroupTile(Br=128, Bc=Bc, pingpong=True, cluster=2 if d >= 128 and not causal else 1)


@pytest.mark.parametrize(
    "fields",
    [{"causal": True}, {"window": (64, None)}, {"window": (None, 0)}, {"lengths": "packed"}, {"lengths": "padded"}],
)
def test_pairs_of_blocks_see_every_key(fields: dict[str, Any]) -> None:
    """Elsewhere no default has them, no search tries them, and the rule says what to do."""
    problem = Problem(dtype="bf16", d=128, **fields)
    assert default_tile("forward90", problem, H100).cluster == 1  # type: ignore[union-attr]
    assert choices("forward90", problem, H100)["cluster"] == [1]
    tile = WarpgroupTile(Br=128, Bc=128, cluster=2)
    said = why_illegal(KernelSpec.of("forward90", problem, tile, 90), H100)
    assert said and re.search(r"cluster=2: .* sees? every key\. Use cluster=1", said), said


def test_pairs_of_blocks_with_other_features() -> None:
    """What changes no key's visibility is served, the boxes of K and V are halves; the default leaves it registers."""
    problem = Problem(dtype="bf16", d=128, dropout=0.1, sinks=True, score_mod=ScoreMod(text="2 * tanh(score / 2)"))
    assert choices("forward90", problem, H100)["cluster"] == [1, 2]
    assert default_tile("forward90", problem, H100).cluster == 1  # type: ignore[union-attr]
    tile = default_tile("forward90", Problem(dtype="bf16", d=128), H100)
    spec = KernelSpec.of("forward90", problem, tile, 90)
    assert tile.cluster == 2 and why_illegal(spec, H100) is None  # type: ignore[union-attr]
    notes = {arg.name: arg.note for arg in spec.signature}
    assert "Bc / 2 rows" in notes["K_map"] and "Bc / 2 rows" in notes["V_map"] and "Br rows" in notes["Q_map"]


@pytest.mark.parametrize(("d", "dv", "causal"), [(64, None, False), (64, None, True), (40, 64, False)])
def test_small_heads_have_three_warpgroups(d: int, dv: int | None, causal: bool) -> None:
    """That of FlashAttention-3 at d = 64, and it is legal."""
    problem = Problem(dtype="bf16", d=d, dv=dv, causal=causal)
    tile = default_tile("forward90", problem, H100)
    assert tile == WarpgroupTile(Br=192, Bc=128, pingpong=True)
    assert why_illegal(KernelSpec.of("forward90", problem, tile, 90), H100) is None


def test_every_head_dimension_has_a_default_tile() -> None:
    for d, dv in product(range(8, 257, 8), (None, 8, 256)):
        default_tile("forward90", Problem(dtype="fp16", d=d, dv=dv), H100)


def test_other_parts_have_no_default_tile() -> None:
    with pytest.raises(NoTunedKernel, match=r"no forward90 tile fits a100 .* sm_90a, and this part is sm_80"):
        default_tile("forward90", Problem(dtype="bf16", d=64), find_gpu("a100"))


def test_other_parts_have_no_wgmma() -> None:
    said = why_illegal(spec_of(sm=100), find_gpu("b200"))
    assert said and "sm_90a" in said and "sm_100" in said


def test_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32, which wgmma does not multiply as three of TF32; a feature that a kernel has not is named."""
    with pytest.raises(BadProblem, match="forward90 serves 16 bits; fp32 runs in forward"):
        KernelSpec.of("forward90", Problem(dtype="fp32", d=64), WarpgroupTile(Br=128, Bc=64), 90)
    problem = Problem(dtype="bf16", d=64, dropout=0.1, lengths="packed", window=(9, 0))
    KernelSpec.of("forward90", problem, WarpgroupTile(Br=128, Bc=64), 90)
    monkeypatch.setitem(WARPGROUP_FEATURES, "forward90", frozenset({"left", "shifted"}))
    with pytest.raises(BadProblem, match="forward90 does not serve dropout, packed; such attention runs in forward"):
        KernelSpec.of("forward90", problem, WarpgroupTile(Br=128, Bc=64), 90)


@pytest.mark.parametrize(("d", "dv"), [(128, None), (72, None), (64, 128), (192, 128)])
def test_buffers_of_panels_start_on_1024_bytes(d: int, dv: int | None) -> None:
    """The swizzle is of the address, so that every panel starts where the pattern does."""
    spec = spec_of(d, dv, Bc=80)
    found = {buffer.name: buffer for buffer in buffers(spec)}
    assert all(found[name].offset % 1024 == 0 for name in ("Q_smem", "K_smem", "V_smem"))
    assert found["Q_smem"].bytes >= 128 * 2 * spec.d and found["V_smem"].bytes >= 2 * 80 * 2 * spec.dv
    assert smem_bytes(spec) == found["slack"].offset + 1024


def test_shares_of_registers_fit() -> None:
    for consumers, (producer, consumer) in SHARES.items():
        assert 128 * (producer + consumers * consumer) <= 65536


def test_the_target_is_sm_90a() -> None:
    assert spec_of().target == "sm_90a"

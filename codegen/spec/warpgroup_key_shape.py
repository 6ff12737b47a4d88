"""Say how the kernels of warpgroups that own keys are shaped: barriers, registers, and which rule a tile breaks."""

from __future__ import annotations

from .kernel import STATS_ROWS, KernelSpec
from .tile import WarpgroupKeyTile
from .warpgroup_shape import PANEL, ROWS

KEYS = 2 * ROWS  # of a block: two warpgroups compute
WIDEST = 128  # columns: of wider heads dK and dV leave no registers for S and dP
MOST_ROWS = 128  # of a tile, for which each lane of a warp looks at the statistics of four
MAX_DS_STAGES = 2

# Registers of a consumer's thread that dK, dV, S and dP in fp32 may take together: the most with which NVRTC 13.5 keeps
# the products asynchronous.
HELD = 208


def barriers(tile: WarpgroupKeyTile) -> int:
    """mbarriers of a block: of each stage one for a full buffer of Q, one for one of dO, and one for both empty."""
    return 3 * tile.stages


def held_registers(spec: KernelSpec, tile: WarpgroupKeyTile) -> int:
    """Registers of a thread that dK, dV, S and dP in fp32 take; P, dS and dQ come in the place of S and dP."""
    return spec.d // 2 + spec.dv // 2 + tile.Br


def dQ_splits_rows(spec: KernelSpec) -> bool:
    """Whether the warpgroups share the rows of dQ, and not its columns: one panel has columns for one of them."""
    return spec.d <= PANEL


def why_bad_warpgroup_keys(spec: KernelSpec, tile: WarpgroupKeyTile) -> str | None:
    """The rule that a WarpgroupKeyTile breaks, as a sentence with both numbers; None if it breaks none."""
    other = spec.kernel.removesuffix("90")
    if spec.sm != 90:
        return f"{spec.kernel} needs wgmma and TMA of sm_90a, and this part is sm_{spec.sm}. Use {other}."
    if max(spec.d, spec.dv) > WIDEST:
        return f"d={spec.d}, dv={spec.dv}: {spec.kernel} serves heads of up to {WIDEST} columns. Use {other}."
    if tile.Bc != KEYS:
        return f"Bc={tile.Bc}: must be {KEYS}, {ROWS} keys for each of two warpgroups."
    step = 2 * STATS_ROWS if dQ_splits_rows(spec) and spec.kernel != "dkdv90" else STATS_ROWS
    if tile.Br % step or not step <= tile.Br <= MOST_ROWS:
        return f"Br={tile.Br}: must be a multiple of {step} up to {MOST_ROWS} where d={spec.d}."
    if tile.dS_stages > MAX_DS_STAGES:
        return f"dS_stages={tile.dS_stages}: nobody waits for more than {MAX_DS_STAGES} buffers. Use {MAX_DS_STAGES}."
    if spec.kernel == "dkdv90" and tile.dS_stages != MAX_DS_STAGES:
        return f"dS_stages={tile.dS_stages}: dkdv90 has no dS in shared memory. Leave dS_stages={MAX_DS_STAGES}."
    if spec.kernel == "dkdv90" and not tile.bulk_sums:
        return "bulk_sums=0: dkdv90 adds up no dQ. Leave bulk_sums=1."
    need = held_registers(spec, tile)
    if need > HELD:
        return (
            f"dK, dV, S and dP take d / 2 + dv / 2 + Br = {need} registers of a thread, and there are {HELD} for them. "
            "Use a smaller Br."
        )
    return None

"""Say how `dq90` is shaped: its barriers, the registers of its tiles, and which rule a tile breaks."""

from __future__ import annotations

from .kernel import KernelSpec
from .tile import WarpgroupQueryTile
from .warpgroup_shape import HELD, MAX_BOX, MAX_CONSUMERS, ROWS


def barriers(tile: WarpgroupQueryTile) -> int:
    """mbarriers of a block: one of Q and dO, and of each buffer of K and of V one for full and one for empty."""
    return 1 + 2 * tile.stages + 2 * tile.v_stages


def held_registers(spec: KernelSpec, tile: WarpgroupQueryTile) -> int:
    """Registers of a thread that dQ, S and dP in fp32 take and, where it is multiplied under the next S, dS in 16 bits.

    HELD, as in the forward: up to it NVRTC 13.5 spills nothing at d = 64, 72, 96, 128, 160, 192 and 256, causal.
    """
    return spec.d // 2 + tile.Bc // 2 + tile.Bc // 2 + (tile.Bc // 4 if tile.overlap else 0)


def why_bad_warpgroup_query(spec: KernelSpec, tile: WarpgroupQueryTile) -> str | None:
    """The rule that a WarpgroupQueryTile breaks, as a sentence with both numbers; None if it breaks none."""
    if spec.sm != 90:
        return f"{spec.kernel} needs wgmma and TMA of sm_90a, and this part is sm_{spec.sm}. Use dq."
    if tile.Br % ROWS or not 1 <= tile.consumers <= MAX_CONSUMERS:
        return f"Br={tile.Br}: must be {ROWS} for each of 1 to {MAX_CONSUMERS} warpgroups that compute."
    if tile.Bc % 16 or not 16 <= tile.Bc <= MAX_BOX:
        return f"Bc={tile.Bc}: must be a multiple of 16 up to {MAX_BOX}."
    if tile.overlap and tile.stages == 1:
        return "overlap=1: K of a tile is read until the next has been multiplied, and stages=1. Use 2, or overlap=0."
    need, given = held_registers(spec, tile), HELD[tile.consumers]
    if need > given:
        parts = "d / 2 + Bc / 2 + Bc / 2" + (" + Bc / 4" if tile.overlap else "")
        return (
            f"dQ, S, dP{' and dS' if tile.overlap else ''} take {parts} = {need} registers of a thread, and "
            f"{tile.consumers} warpgroups that compute leave them {given}. Use a smaller Bc"
            f"{'' if tile.consumers < MAX_CONSUMERS else ' or Br'}."
        )
    return None

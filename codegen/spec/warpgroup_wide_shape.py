"""Say how `dkdv90_wide` is shaped: shares of columns and keys, barriers, registers, and which rule a tile breaks."""

from __future__ import annotations

from .kernel import KernelSpec
from .tile import WarpgroupWideTile
from .warpgroup_shape import HELD, MAX_CONSUMERS, panels

MOST_KEYS = 128
MAX_STAGES = 2  # a third buffer would never be waited for


def barriers(tile: WarpgroupWideTile) -> int:
    """mbarriers of a block: one of K and V, and of each buffer of Q and of dO one for full and one for empty."""
    return 1 + 2 * tile.stages + 2 * tile.dO_stages


def column_blocks(columns: int, tile: WarpgroupWideTile) -> int:
    """Blocks of 64 columns that a warpgroup owns at most: of all blocks it has every so many-th.

    >>> column_blocks(192, WarpgroupWideTile(Bc=96, consumers=3)), column_blocks(256, WarpgroupWideTile(Bc=64))
    (1, 2)
    """
    return -(-panels(columns) // tile.consumers)


def held_registers(spec: KernelSpec, tile: WarpgroupWideTile) -> int:
    """Registers of a thread that dK, dV, S and dP take in fp32; P and dS come in the place of S and dP."""
    blocks = column_blocks(spec.d, tile) + column_blocks(spec.dv, tile)
    return blocks * tile.Bc // 2 + tile.Bc // tile.consumers


def why_bad_warpgroup_wide(spec: KernelSpec, tile: WarpgroupWideTile) -> str | None:
    """The rule that a WarpgroupWideTile breaks, as a sentence with both numbers; None if it breaks none."""
    if spec.sm != 90:
        return f"{spec.kernel} needs wgmma and TMA of sm_90a, and this part is sm_{spec.sm}. Use dkdv."
    if not 2 <= tile.consumers <= MAX_CONSUMERS:
        return f"consumers={tile.consumers}: 2 or {MAX_CONSUMERS} warpgroups compute."
    step = 16 * tile.consumers if tile.consumers % 2 else 8 * tile.consumers
    if tile.Bc % step or not step <= tile.Bc <= MOST_KEYS:
        shared = f"{tile.consumers} warpgroups share keys"
        return f"Bc={tile.Bc}: must be a multiple of {step} up to {MOST_KEYS} where {shared}."
    for name in ("stages", "dO_stages"):
        stages = getattr(tile, name)
        if stages > MAX_STAGES:
            return f"{name}={stages}: a buffer more than {MAX_STAGES} is never waited for. Use {MAX_STAGES}."
    if tile.overlap and min(tile.stages, tile.dO_stages) == 1:
        return (
            f"overlap=1: Q and dO of a tile are read until the next has been multiplied, and stages={tile.stages}, "
            f"dO_stages={tile.dO_stages}. Use 2, or overlap=0."
        )
    need, given = held_registers(spec, tile), HELD[tile.consumers]
    if need > given:
        return (
            f"dK, dV, S and dP take {need} registers of a thread, and {tile.consumers} warpgroups that compute "
            f"leave them {given}. Use a smaller Bc."
        )
    return None

"""Say how the kernels of warpgroups are shaped: panels, barriers and registers, and which rule a tile breaks."""

from __future__ import annotations

from .kernel import KernelSpec
from .tile import WarpgroupTile

ROWS = 64  # of a warpgroup: the height of a wgmma
PANEL = 64  # columns of 16-bit numbers in a row of 128 bytes, the span of the widest swizzle
PANEL_ROW = 128  # bytes
ALIGNMENT = 1024  # bytes: the swizzle repeats after eight rows
BARRIER = 8  # bytes of an mbarrier
MAX_CONSUMERS = 3
MAX_BOX = 256  # rows that one TMA instruction copies

# Registers of a thread, of the producer and of a consumer, once the warpgroups have shared them out. The sum is at most
# 65536, which is 128 * (producer + consumers * consumer). A lone consumer has 255 from the start.
SHARES: dict[int, tuple[int, int]] = {2: (24, 240), 3: (32, 160)}

# Registers of a consumer's thread that O, S and P may take together: the most with which NVRTC 13.5 keeps the products
# asynchronous at d = 64, 128 and 256, or of a lone consumer spills nothing. Of two consumers, 212 at d = 256 spill.
HELD: dict[int, int] = {1: 220, 2: 212, 3: 128}


def panels(columns: int) -> int:
    """Panels of 64 columns that hold so many.

    >>> panels(128), panels(72)
    (2, 2)
    """
    return -(-columns // PANEL)


def panel_bytes(rows: int, columns: int) -> int:
    """Bytes of rows of shared memory in panels."""
    return panels(columns) * rows * PANEL_ROW


def barriers(tile: WarpgroupTile) -> int:
    """mbarriers of a block: of Q, and of each buffer of K and of V, one for full and one for empty."""
    return 2 + 4 * tile.stages


def held_registers(spec: KernelSpec, tile: WarpgroupTile) -> int:
    """Registers of a thread that O, S in fp32 and, unless it lies in shared memory, P in 16 bits take."""
    return spec.dv // 2 + tile.Bc // 2 + (0 if tile.p_smem else tile.Bc // 4)


def unmasked(spec: KernelSpec) -> bool:
    """Whether every query of a sequence sees every key, and all sequences are of one length."""
    return not (spec.causal or spec.features.left) and spec.features.lengths == "uniform"


def why_bad_warpgroup(spec: KernelSpec, tile: WarpgroupTile) -> str | None:
    """The rule that a WarpgroupTile breaks, as a sentence with both numbers; None if it breaks none."""
    if spec.sm != 90:
        return f"{spec.kernel} needs wgmma and TMA of sm_90a, and this part is sm_{spec.sm}. Use forward."
    if tile.Br % ROWS or not 1 <= tile.consumers <= MAX_CONSUMERS:
        return f"Br={tile.Br}: must be {ROWS} for each of 1 to {MAX_CONSUMERS} warpgroups that compute."
    if tile.Bc % 16 or not 16 <= tile.Bc <= MAX_BOX:
        return f"Bc={tile.Bc}: must be a multiple of 16 up to {MAX_BOX}."
    if tile.pingpong and tile.consumers == 1:
        return f"pingpong=1: Br={tile.Br} has one warpgroup that computes, and turns need two. Use pingpong=0."
    if tile.cluster not in (1, 2):
        return f"cluster={tile.cluster}: K and V are loaded by 1 block, or by 2 for each other."
    if tile.cluster == 2 and not unmasked(spec):
        return "cluster=2: two blocks share K and V where both see every key. Use cluster=1 with a mask or lengths."
    need, given = held_registers(spec, tile), HELD[tile.consumers]
    if need > given:
        sums = "O and S take dv / 2 + Bc / 2" if tile.p_smem else "O, S and P take dv / 2 + Bc / 2 + Bc / 4"
        more = "" if tile.p_smem else ", or p_smem=1"
        return (
            f"{sums} = {need} registers of a thread, and {tile.consumers} warpgroups that compute leave them {given}. "
            f"Use a smaller Bc{'' if tile.consumers < MAX_CONSUMERS else ' or Br'}{more}."
        )
    return None

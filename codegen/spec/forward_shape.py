"""Derive how the warps of a forward block share its tile, and which tiles they cannot share."""

from __future__ import annotations

from .gpu import GPUS
from .kernel import KernelSpec
from .tile import ForwardTile

MMA_ROWS = 16  # rows of an mma, and columns or keys of one of its steps
MAX_WARP_ROWS = 48  # query rows of a warp: three mma tiles; more leave no registers for S

# Registers a thread beside O, S and the Q that is kept: fragments in flight, m, l, addresses. Of early kernels, tiles
# that needed up to 225 with it had no spills; around 235 it depends on ptxas.
_OTHER_REGISTERS = 41


def cached_keys(spec: KernelSpec) -> int:
    """Keys whose K and V fill half of the L2 cache, of the part with that `sm` whose cache is smallest."""
    l2_mb = min((gpu.l2_mb for gpu in GPUS.values() if gpu.sm == spec.sm), default=4)
    return int(l2_mb * 2**20) // 2 // (2 * 2 * spec.d)


def launch_order(spec: KernelSpec, heads: int, group: int, Tr: int) -> list[tuple[int, int]]:
    """(query head of all, query tile) of each block, as `place` in the text: with a mask the longest tiles come first.

    >>> from .tile import ForwardTile
    >>> tile = ForwardTile(Br=64, Bc=64, warps=4)
    >>> spec = KernelSpec(kernel="forward", dtype="bf16", d=64, causal=True, tile=tile, sm=80)
    >>> launch_order(spec, heads=3, group=1, Tr=2)
    [(0, 1), (0, 0), (1, 1), (1, 0), (2, 1), (2, 0)]
    >>> launch_order(spec, heads=3, group=2, Tr=2)
    [(0, 1), (1, 1), (2, 1), (0, 0), (1, 0), (2, 0)]
    """
    if not spec.causal:
        return [(head, i) for head in range(heads) for i in range(Tr)]
    first_heads = range(0, heads - heads % min(group, heads), min(group, heads))
    ends = (*first_heads[1:], heads)  # the last group takes the rest as well
    groups = (range(first, end) for first, end in zip(first_heads, ends, strict=True))
    return [(head, i) for members in groups for i in reversed(range(Tr)) for head in members]


def heads_together(spec: KernelSpec, Hq: int, Hk: int, Nk: int) -> int:
    """Query heads whose K and V share the L2 cache: their blocks are launched tile by tile rather than head by head."""
    return max(1, cached_keys(spec) // Nk) * (Hq // Hk)


def why_bad_forward(spec: KernelSpec, tile: ForwardTile) -> str | None:
    """The rule that a ForwardTile breaks, as a sentence with both numbers; None if it breaks none."""
    steps = spec.d // MMA_ROWS
    rows, rest = divmod(tile.Br, tile.warps)
    if rest or not 0 < rows <= MAX_WARP_ROWS or rows % MMA_ROWS:
        return f"Br={tile.Br} over {tile.warps} warps: each needs {MMA_ROWS}, 32 or {MAX_WARP_ROWS} query rows."
    if tile.Bc < MMA_ROWS or tile.Bc % MMA_ROWS:
        return f"Bc={tile.Bc}: must be a multiple of {MMA_ROWS}."
    if not 0 <= tile.q_steps <= steps:
        return f"q_steps={tile.q_steps}: d={spec.d} has 0 to {steps} steps of {MMA_ROWS} columns."
    return None


def forward_registers(spec: KernelSpec, tile: ForwardTile) -> int:
    """Registers that a thread needs, roughly: a 16 x n fp32 accumulator takes n / 2, a 16 x 16 operand 4."""
    m_tiles = tile.Br // tile.warps // MMA_ROWS
    return m_tiles * (spec.d // 2 + tile.Bc // 2 + 4 * tile.q_steps) + _OTHER_REGISTERS

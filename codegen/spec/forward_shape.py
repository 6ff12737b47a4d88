"""Derive how the warps of a forward block share its tile, and which tiles they cannot share."""

from __future__ import annotations

from .kernel import KernelSpec
from .staging import staged_registers
from .tile import ForwardTile

MMA_ROWS = 16  # rows of an mma
MAX_WARP_ROWS = 48  # query rows of a warp: three mma tiles; more leave no registers for S

# Registers a thread beside O, S and the Q that is kept: fragments in flight, m, l, addresses. Of early kernels, tiles
# that needed up to 225 with it had no spills; around 235 it depends on ptxas.
_OTHER_REGISTERS = 41
_FP32_REGISTERS = 32  # further ones, for the two parts of operands


def why_bad_forward(spec: KernelSpec, tile: ForwardTile) -> str | None:
    """The rule that a ForwardTile breaks, as a sentence with both numbers; None if it breaks none."""
    steps = spec.d // spec.depth
    rows, rest = divmod(tile.Br, tile.warps)
    if rest or not 0 < rows <= MAX_WARP_ROWS or rows % MMA_ROWS:
        return f"Br={tile.Br} over {tile.warps} warps: each needs {MMA_ROWS}, 32 or {MAX_WARP_ROWS} query rows."
    if tile.Bc < MMA_ROWS or tile.Bc % MMA_ROWS:
        return f"Bc={tile.Bc}: must be a multiple of {MMA_ROWS}."
    if not 0 <= tile.q_steps <= steps:
        return f"q_steps={tile.q_steps}: d={spec.d} has 0 to {steps} steps of {spec.depth} columns."
    if spec.kernel == "partial" and tile.ascending:
        return "ascending=1: partial walks over its keys from the last to the first. Leave ascending=0."
    return None


def forward_registers(spec: KernelSpec, tile: ForwardTile) -> int:
    """Registers that a thread needs, roughly: a 16 x n fp32 accumulator takes n / 2, a 16 x 16 operand 4."""
    m_tiles = tile.Br // tile.warps // MMA_ROWS
    on_the_way = staged_registers(spec, tile.Bc, spec.d)  # the next tile of K or V
    others = _OTHER_REGISTERS + (_FP32_REGISTERS if spec.fp32 else 0)
    return m_tiles * (spec.dv // 2 + tile.Bc // 2 + 4 * tile.q_steps) + on_the_way + others

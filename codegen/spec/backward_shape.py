"""Derive how the warps of a backward block share its tiles, and which tiles they cannot share."""

from __future__ import annotations

from .kernel import PAD_ROWS, STATS, STATS_ROWS, KernelSpec
from .staging import staged_registers
from .tile import KeyBlockTile, QueryBlockTile

BLOCK = 16  # rows and columns of the block that one ldmatrix.x4 reads and two mma take
PANEL = 64  # columns of a swizzled panel: 128 bytes, all banks
WIDEST_SWIZZLED = 192  # columns, of a kernel that owns keys
ROW_GROUP = 8  # rows after which the swizzle repeats
HUGE_LOG2 = 2.0**13  # |m log2(e)| from which fp32 cannot hold m + ln l well enough

# Registers a thread beside accumulators and kept fragments: fragments in flight, addresses, counters. Of early kernels,
# tiles that needed up to 255 with it had no spills, and those above had many.
_OTHER_REGISTERS = 30
_STATISTICS_REGISTERS = 4  # a block of 16 query rows, whose statistics dq holds


def padded_columns(spec: KernelSpec) -> int:
    """Columns of Q and K in products: d in whole 16-column blocks, in whole panels where warps share columns.

    The columns from d on are zero.
    """
    return _in_whole_blocks(spec, spec.d)


def value_columns(spec: KernelSpec) -> int:
    """Columns of V and dO in products, from dv as padded_columns from d."""
    return _in_whole_blocks(spec, spec.dv)


def row_columns(spec: KernelSpec) -> int:
    """Columns of a row in shared memory: those of the wider tensors, so that all rows lie alike."""
    return max(padded_columns(spec), value_columns(spec))


def _in_whole_blocks(spec: KernelSpec, columns: int) -> int:
    row_split = spec.tile.row_split if isinstance(spec.tile, KeyBlockTile) else 1
    unit = BLOCK * row_split if row_split == 1 or spec.fp32 else PANEL
    return -(-columns // unit) * unit


def swizzled(tile: KeyBlockTile | QueryBlockTile, width: int, chunk: int = 8) -> bool:
    """Whether rows of `width` columns lie in XOR-swizzled panels; else they are padded to an odd number of chunks.

    Swizzled rows lose no byte. Padded ones need fewer registers for addresses: the widest of a key block would spill.
    Those of fp32, `chunk` 4, are padded: their lanes read words of many rows as well, not whole chunks alone.
    """
    return chunk == 8 and width % PANEL == 0 and (width <= WIDEST_SWIZZLED or isinstance(tile, QueryBlockTile))


def layout(tile: KeyBlockTile | QueryBlockTile, width: int, chunk: int = 8) -> str:
    """The type in the text that lays out rows of `width` columns.

    >>> layout(KeyBlockTile(Br=64, Bc=64, warps=8), 128), layout(KeyBlockTile(Br=64, Bc=64, warps=8), 256)
    ('SwizzledTile', 'PaddedTile')
    """
    return "SwizzledTile" if swizzled(tile, width, chunk) else "PaddedTile"


def has_dS_smem(spec: KernelSpec) -> bool:
    """Whether dS^T goes through shared memory: for dQ, or for the warps that share keys."""
    tile = spec.tile
    return isinstance(tile, KeyBlockTile) and (spec.kernel == "fused" or tile.row_split > 1)


def layouts(spec: KernelSpec) -> frozenset[str]:
    """The layouts that a kernel's text needs."""
    tile = spec.tile
    if not isinstance(tile, KeyBlockTile | QueryBlockTile):
        return frozenset()
    inner = [tile.Br] if isinstance(tile, KeyBlockTile) and has_dS_smem(spec) else []
    return frozenset(layout(tile, width, spec.chunk) for width in (row_columns(spec), *inner))


def slice_columns(tile: KeyBlockTile | QueryBlockTile) -> int:
    """Columns of S^T (queries) or S (keys) that a warp treats at once."""
    own = tile.Bc if isinstance(tile, QueryBlockTile) else tile.Br // tile.row_split
    return tile.slice or own


def dQ_split(spec: KernelSpec) -> tuple[int, int] | None:
    """Warps along Br and along the columns of the product dQ = dS K; None if no split gives whole blocks.

    A warp loads its rows of dS and its columns of K once per key block, so the split with the fewest of both wins.
    """
    tile = spec.tile
    if not isinstance(tile, KeyBlockTile):
        return None
    width = padded_columns(spec)
    splits = [
        (tile.Br // down + width // across, down, across)
        for down in range(1, tile.warps + 1)
        for across in (tile.warps // down,)
        if down * across == tile.warps
        and tile.Br % (BLOCK * down) == 0
        and width % (BLOCK * across) == 0
        and (across in (1, 2, 4) or not swizzled(tile, row_columns(spec), spec.chunk))
    ]
    return min(splits)[1:] if splits else None


def red_width(sm: int) -> int:
    """Floats that one reduction to global memory adds: `red` takes vectors from sm_90 on."""
    return 4 if sm >= 90 else 1


def delta_lanes(d: int) -> int:
    """Lanes that sum one row of dO o O, 16 bytes each: a power of two, so that shuffles can halve it."""
    return max(4, 1 << (d // 8 - 1).bit_length())


def stats_bytes(rows: int) -> int:
    """Bytes of the statistics of `rows` query rows."""
    return 4 * STATS * rows


def why_bad_delta(warps: int) -> str | None:
    """The rule that a block of `delta` with `warps` warps breaks; None if it breaks none."""
    if warps & (warps - 1):
        return f"warps={warps}: the warps of delta share {PAD_ROWS} rows, so their number is a power of two."
    return None


def why_bad_key_block(spec: KernelSpec, tile: KeyBlockTile) -> str | None:
    """The rule that the shares of a KeyBlockTile break, as a sentence with both numbers; None if they break none."""
    width, step = padded_columns(spec), slice_columns(tile)
    if tile.Br % STATS_ROWS or PAD_ROWS % tile.Br:
        return f"Br={tile.Br}: must be a multiple of {STATS_ROWS} that divides {PAD_ROWS}, as statistics are stored."
    if spec.fp32 and spec.kernel != "dkdv":
        return f"{spec.kernel}: not written for fp32, whose dS no ldmatrix can transpose. Use the split backward."
    if tile.row_split not in (1, 2, 4) or tile.warps % tile.row_split:
        return f"row_split={tile.row_split}: must be 1, 2 or 4 and divide warps={tile.warps}."
    if tile.Br % (BLOCK * tile.row_split):
        return f"Br={tile.Br} over row_split={tile.row_split}: each warp needs a multiple of {BLOCK} queries."
    if step % BLOCK or tile.Br // tile.row_split % step:
        own = tile.Br // tile.row_split
        return f"slice={tile.slice}: must be 0 or a multiple of {BLOCK} that divides the {own} queries of a warp."
    key_warps = tile.warps // tile.row_split
    if tile.Bc < BLOCK * key_warps or tile.Bc % (BLOCK * key_warps):
        return f"Bc={tile.Bc} over {key_warps} warps along the keys: each needs a multiple of {BLOCK} keys."
    if tile.v_regs and tile.stages * 2 * tile.Br < tile.Bc:
        rows = tile.stages * 2 * tile.Br
        return f"v_regs: V's Bc={tile.Bc} rows pass through the {rows} rows of Q and dO. Use a larger Br."
    if spec.kernel != "dkdv" and dQ_split(spec) is None:
        return (
            f"Br={tile.Br} and {width} columns: {tile.warps} warps cannot share the "
            f"{tile.Br // BLOCK} x {width // BLOCK} blocks of dQ evenly. Use fewer warps or a larger Br."
        )
    if stats_bytes(tile.Br) > 16 * spec.threads:
        return (
            f"warps={tile.warps}: too few to copy {stats_bytes(tile.Br)} B of statistics of Br={tile.Br} rows at once."
        )
    return _why_bad_copy(spec, tile.stages, swizzled(tile, row_columns(spec), spec.chunk)) or _why_many_registers(
        spec, tile.min_blocks, _key_block_registers(spec, tile)
    )


def why_bad_query_block(spec: KernelSpec, tile: QueryBlockTile) -> str | None:
    """The rule that the shares of a QueryBlockTile break, as a sentence with both numbers; None if they break none."""
    step = slice_columns(tile)
    if tile.Br < BLOCK * tile.warps or tile.Br % (BLOCK * tile.warps):
        return f"Br={tile.Br} over {tile.warps} warps: each needs a multiple of {BLOCK} query rows."
    if tile.Bc < BLOCK or tile.Bc % BLOCK:
        return f"Bc={tile.Bc}: must be a multiple of {BLOCK}."
    if step % BLOCK or tile.Bc % step:
        return f"slice={tile.slice}: must be 0 or a multiple of {BLOCK} that divides Bc={tile.Bc}."
    return _why_bad_copy(spec, tile.stages, swizzled(tile, row_columns(spec), spec.chunk)) or _why_many_registers(
        spec, tile.min_blocks, _query_block_registers(spec, tile)
    )


def _why_bad_copy(spec: KernelSpec, stages: int, rows_swizzled: bool) -> str | None:
    if stages not in (1, 2):
        return f"stages={stages}: must be 1 or 2."
    copy_rows = spec.threads // 8
    if rows_swizzled and copy_rows % ROW_GROUP:
        return f"warps={spec.tile.warps}: a copy pass of {copy_rows} rows breaks the swizzle of {ROW_GROUP}."
    return None


def spare_registers(spec: KernelSpec) -> int:
    """Registers of a thread that a tile leaves free, roughly: what its launch bounds give less what it needs."""
    tile = spec.tile
    if isinstance(tile, KeyBlockTile):
        return _given(spec, tile.min_blocks) - _key_block_registers(spec, tile)
    assert isinstance(tile, QueryBlockTile)
    return _given(spec, tile.min_blocks) - _query_block_registers(spec, tile)


def _given(spec: KernelSpec, min_blocks: int) -> int:
    return min(255, 65536 // (spec.threads * min_blocks) // 8 * 8)


def _why_many_registers(spec: KernelSpec, min_blocks: int, need: int) -> str | None:
    given = _given(spec, min_blocks)
    if need > given:
        return (
            f"{spec.key} needs about {need} registers a thread; {min_blocks} block(s) of {spec.threads} threads leave "
            f"{given}. Use a smaller tile or slice, more warps or fewer min_blocks."
        )
    return None


def _key_block_registers(spec: KernelSpec, tile: KeyBlockTile) -> int:
    """Registers that live at once, at most: a 16 x n fp32 accumulator or fragment takes n / 2, a 16-bit one n / 4."""
    blocks = tile.Bc * tile.row_split // tile.warps // BLOCK
    width, values, step = padded_columns(spec), value_columns(spec), slice_columns(tile)
    kept = blocks * (width + values) // 2 // tile.row_split  # dK and dV
    if tile.v_regs:
        kept += blocks * values * 2 // spec.chunk
    scores = blocks * step if tile.weave or spec.fp32 else blocks * step * 3 // 4  # S, or P rounded, beside dP
    split = dQ_split(spec) if spec.kernel == "fused" else None
    of_dQ = tile.Br // split[0] * (width // split[1]) // 32 if split else 0
    return kept + max(scores, of_dQ + _on_the_way(spec, tile.Br, width)) + _OTHER_REGISTERS


def _query_block_registers(spec: KernelSpec, tile: QueryBlockTile) -> int:
    blocks = tile.Br // tile.warps // BLOCK
    width, step = padded_columns(spec), slice_columns(tile)
    kept = blocks * width // 2 + (blocks * width * 2 // spec.chunk if tile.q_regs else 0)
    scores = max(blocks * step, blocks * step // 4 + _on_the_way(spec, tile.Bc, width))
    return kept + scores + blocks * _STATISTICS_REGISTERS + _OTHER_REGISTERS


def _on_the_way(spec: KernelSpec, rows: int, width: int) -> int:
    """Of the two tiles that come next, where they wait in registers: when S and dP are dead, and dS is alive.

    Not counted for the widest heads: there is no tile with room for them, and ptxas spills some, which costs less.
    """
    return 2 * staged_registers(spec, rows, width) if width <= WIDEST_SWIZZLED else 0

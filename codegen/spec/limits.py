"""Compute bytes, registers and threads of a kernel, and say which limit it breaks."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BadProblem
from . import backward_shape as shape
from . import warpgroup_key_shape as key_warpgroups
from . import warpgroup_query_shape as query_warpgroups
from . import warpgroup_shape as warpgroups
from . import warpgroup_wide_shape as wide_warpgroups
from .feature_shape import why_bad_with_features
from .forward_shape import forward_registers, why_bad_forward
from .gpu import REGISTERS_PER_SM, Gpu
from .kernel import KernelSpec
from .order import why_bad_order
from .problem import ELEMENT_BYTES, Dtype
from .staging import has_cp_async
from .tile import (
    ForwardTile,
    KeyBlockTile,
    QueryBlockTile,
    WarpgroupKeyTile,
    WarpgroupQueryTile,
    WarpgroupTile,
    WarpgroupWideTile,
)

CHUNK = 16  # bytes of a cp.async, of an ldmatrix row
LANES_A_ROW = 8  # lanes that copy one row; a copy pass is 128 bytes wide
MAX_WARPS = 16
MAX_REGISTERS = 255
MAX_BLOCKS = 32  # resident blocks of an SM; 16 or 24 on some parts, which no kernel here comes near


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer of dynamic shared memory."""

    name: str  # as in the text: Q_smem
    bytes: int
    offset: int
    note: str  # shape and layout


def copy_rows(spec: KernelSpec) -> int:
    """Rows that one pass of a tile copy covers: eight lanes a row."""
    return spec.threads // LANES_A_ROW


def padded_row_bytes(columns: int, chunk: int = 8) -> int:
    """Bytes of a shared row of `columns` elements, `chunk` of them in 16 bytes, padded to an odd number of such chunks.

    Eight rows of an ldmatrix then start in eight different bank groups, and an address is a register plus an immediate.

    >>> padded_row_bytes(128), padded_row_bytes(72), padded_row_bytes(128, chunk=4)
    (272, 144, 528)
    """
    return (columns // chunk | 1) * CHUNK


def buffers(spec: KernelSpec) -> tuple[Buffer, ...]:
    """The dynamic shared memory of a kernel, in order; the emitted text takes its offsets from here."""
    tile = spec.tile
    if isinstance(tile, ForwardTile):
        rows, of_V = padded_row_bytes(spec.d, spec.chunk), padded_row_bytes(spec.dv, spec.chunk)
        of_Q = max(rows, of_V)  # O takes Q's place
        return _lay_out(
            ("Q_smem", tile.Br * of_Q, f"[{tile.Br}][{spec.d}], rows of {of_Q} B"),
            ("K_smem", tile.Bc * rows, f"[{tile.Bc}][{spec.d}], rows of {rows} B"),
            ("V_smem", tile.Bc * of_V, f"[{tile.Bc}][{spec.dv}], rows of {of_V} B"),
        )
    if isinstance(tile, KeyBlockTile) and spec.kernel != "convert":
        return _key_block_buffers(spec, tile)
    if isinstance(tile, QueryBlockTile):
        return _query_block_buffers(spec, tile)
    if isinstance(tile, WarpgroupTile):
        return _warpgroup_buffers(spec, tile)
    if isinstance(tile, WarpgroupKeyTile):
        return _converting_buffers(spec, tile) if spec.kernel == "convert90" else _warpgroup_key_buffers(spec, tile)
    if isinstance(tile, WarpgroupWideTile):
        return _warpgroup_wide_buffers(spec, tile)
    if isinstance(tile, WarpgroupQueryTile):
        return _warpgroup_query_buffers(spec, tile)
    if spec.kernel == "combine":
        slices = spec.threads // shape.delta_lanes(spec.d)
        return _lay_out(("O_smem", slices * spec.d * 4, f"[{slices}][{spec.d}] floats"))
    return ()


def _key_block_buffers(spec: KernelSpec, tile: KeyBlockTile) -> tuple[Buffer, ...]:
    width = shape.row_columns(spec)
    keys, queries = tile_bytes(spec, tile, tile.Bc, width), tile_bytes(spec, tile, tile.Br, width)
    stages, scores = f"[{tile.stages}]", tile_bytes(spec, tile, tile.Bc, tile.Br)
    items = [("K_smem", keys, f"[{tile.Bc}][{width}]")]
    if not tile.v_regs:
        items += [("V_smem", keys, f"[{tile.Bc}][{width}]")]
    items += [
        ("Q_smem", tile.stages * queries, f"{stages}[{tile.Br}][{width}]"),
        ("dO_smem", tile.stages * queries, f"{stages}[{tile.Br}][{width}]"),
    ]
    of_fragments = ELEMENT_BYTES[spec.dtype] * tile.Bc * tile.Br
    if shape.has_dS_smem(spec):
        items += [("dS_smem", of_fragments if spec.fp32 else scores, f"dS^T [{tile.Bc}][{tile.Br}]")]
    if tile.row_split > 1:
        items += [("P_smem", of_fragments, f"P^T [{tile.Bc}][{tile.Br}] in the order of the fragments")]
    items += [("stats_smem", tile.stages * shape.stats_bytes(tile.Br), f"{stages}[{tile.Br // 16}][3][16] floats")]
    return _lay_out(*items)


def _query_block_buffers(spec: KernelSpec, tile: QueryBlockTile) -> tuple[Buffer, ...]:
    width = shape.row_columns(spec)
    keys, queries = tile_bytes(spec, tile, tile.Bc, width), tile_bytes(spec, tile, tile.Br, width)
    return _lay_out(
        ("Q_smem", queries, f"[{tile.Br}][{width}]"),
        ("dO_smem", queries, f"[{tile.Br}][{width}]"),
        ("K_smem", tile.stages * keys, f"[{tile.stages}][{tile.Bc}][{width}]"),
        ("V_smem", tile.stages * keys, f"[{tile.stages}][{tile.Bc}][{width}]"),
    )


def _warpgroup_buffers(spec: KernelSpec, tile: WarpgroupTile) -> tuple[Buffer, ...]:
    return _lay_out(
        _panels("Q_smem", tile.Br, spec.d),
        _panels("K_smem", tile.Bc, spec.d, tile.stages),
        _panels("V_smem", tile.Bc, spec.dv, tile.stages),
        *([_panels("P_smem", tile.Br, tile.Bc)] if tile.p_smem else []),
        *_mbarriers(warpgroups.barriers(tile)),
    )


def _warpgroup_query_buffers(spec: KernelSpec, tile: WarpgroupQueryTile) -> tuple[Buffer, ...]:
    return _lay_out(
        _panels("Q_smem", tile.Br, spec.d),
        _panels("dO_smem", tile.Br, spec.dv),
        _panels("K_smem", tile.Bc, spec.d, tile.stages),
        _panels("V_smem", tile.Bc, spec.dv, tile.v_stages),
        *_mbarriers(query_warpgroups.barriers(tile)),
    )


def _warpgroup_key_buffers(spec: KernelSpec, tile: WarpgroupKeyTile) -> tuple[Buffer, ...]:
    items = [
        _panels("K_smem", tile.Bc, spec.d),
        _panels("V_smem", tile.Bc, spec.dv),
        _panels("Q_smem", tile.Br, spec.d, tile.stages),
        _panels("dO_smem", tile.Br, spec.dv, tile.stages),
    ]
    if spec.kernel == "fused90":
        columns = shape.padded_columns(spec)
        items += [_panels("dS_smem", tile.Br, tile.Bc, tile.dS_stages)]
        if tile.bulk_sums:
            sums = f"{tile.Br} x {columns} floats in the order of the fragments"
            items += [("dQ_smem", 4 * tile.Br * columns, sums)]
    stats = tile.stages * shape.stats_bytes(tile.Br)
    items += [("stats_smem", stats, f"[{tile.stages}][{tile.Br // 16}][3][16] floats")]
    return _lay_out(*items, *_mbarriers(key_warpgroups.barriers(tile)))


def _warpgroup_wide_buffers(spec: KernelSpec, tile: WarpgroupWideTile) -> tuple[Buffer, ...]:
    stats = tile.stages * shape.stats_bytes(tile.Br)
    return _lay_out(
        _panels("K_smem", tile.Bc, spec.d),
        _panels("V_smem", tile.Bc, spec.dv),
        _panels("Q_smem", tile.Br, spec.d, tile.stages),
        _panels("dO_smem", tile.Br, spec.dv, tile.dO_stages),
        _panels("P_smem", tile.Br, tile.Bc),
        _panels("dS_smem", tile.Br, tile.Bc),
        ("stats_smem", stats, f"[{tile.stages}][{tile.Br // 16}][3][16] floats"),
        *_mbarriers(wide_warpgroups.barriers(tile)),
    )


def _converting_buffers(spec: KernelSpec, tile: WarpgroupKeyTile) -> tuple[Buffer, ...]:
    columns = shape.padded_columns(spec)
    row = padded_row_bytes(columns)
    return _lay_out(("dQ_smem", tile.Br * row, f"[{tile.Br}][{columns}], rows of {row} B"))


def _panels(name: str, rows: int, columns: int, stages: int = 0) -> tuple[str, int, str]:
    """A buffer of rows in panels of 64 columns, or several."""
    note = f"[{warpgroups.panels(columns)}][{rows}][{warpgroups.PANEL}]"
    size = warpgroups.panel_bytes(rows, columns) * max(stages, 1)
    return name, size, f"[{stages}]{note}" if stages else note


def _mbarriers(number: int) -> tuple[tuple[str, int, str], ...]:
    """What follows the buffers of panels; the last is what may be lost before the first begins."""
    return (
        ("barriers", number * warpgroups.BARRIER, f"[{number}] mbarriers"),
        ("slack", warpgroups.ALIGNMENT, "the first buffer begins at the next multiple of 1024 B"),
    )


def tile_bytes(spec: KernelSpec, tile: KeyBlockTile | QueryBlockTile, rows: int, width: int) -> int:
    """Bytes of a backward kernel's shared tile: rows in swizzled panels lose nothing, others are padded."""
    if shape.swizzled(tile, width, spec.chunk):
        return rows * width * CHUNK // spec.chunk
    return rows * padded_row_bytes(width, spec.chunk)


def _lay_out(*items: tuple[str, int, str]) -> tuple[Buffer, ...]:
    placed, offset = [], 0
    for name, size, note in items:
        placed.append(Buffer(name, size, offset, note))
        offset += size
    return tuple(placed)


def smem_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of one block, in bytes: what the text lays out and the launch asks for."""
    return sum(buffer.bytes for buffer in buffers(spec))


def why_illegal(spec: KernelSpec, gpu: Gpu) -> str | None:
    """The limit that `spec` breaks on `gpu`, as a sentence with both numbers; None if it fits."""
    return why_no_dtype(spec.dtype, gpu) or _why_bad_shape(spec) or _why_too_large(spec, gpu)


def why_no_dtype(dtype: Dtype, gpu: Gpu) -> str | None:
    """Why the tensor cores of `gpu` cannot multiply `dtype`, as a sentence; None if they can."""
    if dtype != "fp16" and gpu.sm < 80:
        return f"{dtype} needs sm_80, and {gpu.key} is sm_{gpu.sm}. Use fp16 on {gpu.key}."
    return None


def check_dtype(dtype: Dtype, gpu: Gpu) -> None:
    """Raise BadProblem unless the tensor cores of `gpu` multiply `dtype`."""
    reason = why_no_dtype(dtype, gpu)
    if reason:
        raise BadProblem(reason)


def _why_bad_shape(spec: KernelSpec) -> str | None:
    tile, bad = spec.tile, why_bad_order(spec) or why_bad_with_features(spec)
    if bad:
        return bad
    for name in ("Br", "Bc", "stages", "v_stages", "dO_stages", "dS_stages", "row_split", "min_blocks"):
        if getattr(tile, name, 1) < 1:
            return f"{name}={getattr(tile, name)}: must be 1 or more."
    stages = getattr(tile, "stages", 1)
    if stages > 1 and not has_cp_async(spec):
        return f"stages={stages}: on sm_{spec.sm}, without cp.async, the next tile waits in registers. Use stages=1."
    if not 1 <= tile.warps <= MAX_WARPS:
        return f"warps={tile.warps}: a block has 1 to {MAX_WARPS} warps."
    if isinstance(tile, ForwardTile):
        return why_bad_forward(spec, tile)
    if isinstance(tile, KeyBlockTile):
        return shape.why_bad_key_block(spec, tile)
    if isinstance(tile, QueryBlockTile):
        return shape.why_bad_query_block(spec, tile)
    if isinstance(tile, WarpgroupTile):
        return warpgroups.why_bad_warpgroup(spec, tile)
    if isinstance(tile, WarpgroupKeyTile):
        return key_warpgroups.why_bad_warpgroup_keys(spec, tile)
    if isinstance(tile, WarpgroupWideTile):
        return wide_warpgroups.why_bad_warpgroup_wide(spec, tile)
    if isinstance(tile, WarpgroupQueryTile):
        return query_warpgroups.why_bad_warpgroup_query(spec, tile)
    if spec.kernel == "delta":
        return shape.why_bad_delta(tile.warps)
    return None


def _why_too_large(spec: KernelSpec, gpu: Gpu) -> str | None:
    need = smem_bytes(spec)
    if need > gpu.smem_block_bytes:
        return (
            f"{spec.key} needs {need} B of shared memory; {gpu.key} gives a block {gpu.smem_block_bytes} B. "
            "Use a smaller Br or Bc, or one stage."
        )
    return _why_too_many(spec, gpu)


def _why_too_many(spec: KernelSpec, gpu: Gpu) -> str | None:
    """Whether min_blocks blocks of a kernel share an SM, by each of its resources.

    The registers of the backward kernels are a matter of their shape.
    """
    tile, min_blocks = spec.tile, getattr(spec.tile, "min_blocks", 1)
    blocks = f"{spec.key}: min_blocks={min_blocks}"
    if isinstance(tile, ForwardTile):
        given = min(MAX_REGISTERS, REGISTERS_PER_SM // (spec.threads * min_blocks) // 8 * 8)
        need = forward_registers(spec, tile)
        if need > given:
            return (
                f"{blocks} leave {given} registers a thread, and it needs about {need}. "
                "Use a smaller Br, Bc or q_steps."
            )
    need, given = min_blocks * (smem_bytes(spec) + gpu.reserved_smem_bytes), gpu.smem_sm_bytes
    if need > given:
        return f"{blocks} need {need} B of shared memory; an SM of {gpu.key} has {given} B. Use a smaller Br or Bc."
    need, given = min_blocks * spec.threads, gpu.threads_sm
    if need > given:
        return f"{blocks} have {need} threads; an SM of {gpu.key} holds {given}. Use fewer warps."
    return None


def blocks_per_sm(spec: KernelSpec, gpu: Gpu, registers: int) -> int:
    """Blocks that an SM holds at once, by registers a thread, shared memory and threads.

    Registers are given to a warp in units of 256 from its sub-partition's quarter of the file (CUDA occupancy
    calculator).
    """
    warps_of_registers = 4 * (REGISTERS_PER_SM // 4 // (32 * (-(-registers // 8) * 8)))
    by_smem = gpu.smem_sm_bytes // (smem_bytes(spec) + gpu.reserved_smem_bytes)
    return min(warps_of_registers // spec.tile.warps, by_smem, gpu.threads_sm // spec.threads, MAX_BLOCKS)

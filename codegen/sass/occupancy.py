"""Count how many blocks of a kernel share a multiprocessor."""

from .board import Board, Work
from .errors import DoesNotFit

SUB_PARTITIONS = 4
LANES = 32
REGISTER_UNIT = 8  # registers a thread are allocated in eights, within one sub-partition's quarter of the file
RESERVED_SMEM_BYTES = 1024  # per block, from sm_80 on
SMEM_UNIT = 128


def blocks_per_sm(registers: int, static_smem_bytes: int, work: Work, board: Board) -> int:
    """Resident blocks of one multiprocessor; DoesNotFit names the limit if there are none."""
    allocated = -(-registers // REGISTER_UNIT) * REGISTER_UNIT * LANES
    warps_by_registers = board.registers_per_sm // SUB_PARTITIONS // max(allocated, 1) * SUB_PARTITIONS
    reserved = RESERVED_SMEM_BYTES if board.sm >= 80 else 0
    smem = -(-(work.dynamic_smem_bytes + static_smem_bytes + reserved) // SMEM_UNIT) * SMEM_UNIT
    smem_name = f"{smem} B of shared memory a block ({board.smem_per_sm_bytes} B an SM)"
    limits = {
        f"{registers} registers a thread": warps_by_registers // work.warps,
        smem_name: board.smem_per_sm_bytes // max(smem, 1),
        f"{work.warps * LANES} threads a block": board.max_threads_per_sm // (LANES * work.warps),
        "blocks an SM": board.max_blocks_per_sm,
    }
    tightest = min(limits, key=lambda name: limits[name])
    if limits[tightest] < 1:
        raise DoesNotFit(
            f"no block of {work.warps} warps fits an SM of {board.name}: {tightest}; take a smaller tile or fewer warps"
        )
    return limits[tightest]

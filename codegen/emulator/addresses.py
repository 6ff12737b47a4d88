"""Lay out the generic address space: global memory lies low, the other state spaces have windows far above it."""

SHARED_WINDOW = 0x100_0000_0000
"""Where the shared memory of a thread's block begins."""

LOCAL_WINDOW = 0x200_0000_0000
"""Where a thread's local memory begins."""

PARAM_WINDOW = 0x300_0000_0000
"""Where the parameters of the kernel begin."""

RANK_SHIFT = 24
"""An address in the shared memory of a cluster is an offset, and above this bit the rank of its block plus one; of an
address without a rank it is the block's own."""

OFFSET_MASK = (1 << RANK_SHIFT) - 1

WINDOW_BYTES = 1 << 36
"""Size of each window; every address below the first one is global."""

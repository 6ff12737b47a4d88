"""Say what a copy holds in registers where there is no cp.async to take it past them."""

from __future__ import annotations

from .kernel import KernelSpec

_LANES = 8  # that copy one row
_PANEL = 64  # columns of a row that they copy at once, 16 bytes each
_CHUNK = 4  # registers of 16 bytes


def has_cp_async(spec: KernelSpec) -> bool:
    """Whether copies go past the registers: cp.async came with sm_80. Before it a tile waits in registers."""
    return spec.sm >= 80


def staged_registers(spec: KernelSpec, rows: int, columns: int) -> int:
    """Registers of a thread for its part of a tile of 16-bit elements that waits for its place in shared memory."""
    if has_cp_async(spec):
        return 0
    return _CHUNK * -(-rows * _LANES // spec.threads) * -(-columns // _PANEL)

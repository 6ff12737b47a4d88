"""Lay tensors [B, H, N, d] out in memory, in that order or as [B, N, H, d]."""

from __future__ import annotations

from torch import Tensor


def in_order(x: Tensor, bnhd: bool) -> Tensor:
    """x [B, H, N, d], its memory ordered as [B, H, N, d] or as [B, N, H, d]."""
    _, H, N, d = x.shape
    if not bnhd and x.stride() == (H * N * d, N * d, d, 1):
        return x
    out = empty_in_order(x, bnhd)
    return x if x.stride() == out.stride() else out.copy_(x)


def empty_in_order(x: Tensor, bnhd: bool, *, d: int | None = None) -> Tensor:
    """An empty tensor like x [B, H, N, d], its memory ordered as [B, H, N, d] or as [B, N, H, d]; `d`: of its own."""
    B, H, N, columns = x.shape
    columns = columns if d is None else d
    return x.new_empty(B, N, H, columns).transpose(1, 2) if bnhd else x.new_empty(B, H, N, columns)

"""An attention forward in Triton, written here for comparison with published speeds of Triton's, and its compiler.

The structure is the usual one: a block owns BR queries of one head and walks the keys in tiles of BC; with a mask,
first the tiles below the diagonal, then those on it. Needs no GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LOG2_E = tl.constexpr(1.4426950408889634)


class Compiled(NamedTuple):
    """Machine code and what a launch of it takes."""

    name: str
    cubin: bytes
    warps: int
    smem_bytes: int


@triton.jit
def walk(o_tile, l, m, q_tile, k, v, first, last, i, scale, BC: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Fold the keys first .. last - 1 into O, l and m (FlashAttention-2, algorithm 1)."""
    x = tl.arange(0, D)
    for start in tl.range(first, last, BC):
        j = start + tl.arange(0, BC)
        s = tl.dot(q_tile, tl.load(k + j[None, :] * D + x[:, None])) * scale
        if MASKED:
            s = tl.where(j[None, :] <= i[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        v_tile = tl.load(v + j[:, None] * D + x[None, :])
        o_tile = tl.dot(p.to(v_tile.dtype), v_tile, o_tile * alpha[:, None])
        m = m_new
    return o_tile, l, m


@triton.jit
def forward(q, k, v, o, lse, N, scale, BR: tl.constexpr, BC: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr):
    """O [heads, N, D] and lse [heads, N] of one tile of queries; N is a multiple of BR, BR of BC."""
    tile = tl.program_id(0)
    i = tile * BR + tl.arange(0, BR)
    x = tl.arange(0, D)
    head = tl.program_id(1).to(tl.int64) * N * D
    rows = head + i[:, None] * D + x[None, :]
    q_tile = tl.load(q + rows)
    m = tl.full((BR,), float("-inf"), tl.float32)
    l = tl.zeros((BR,), tl.float32)
    o_tile = tl.zeros((BR, D), tl.float32)
    scale_log2 = scale * LOG2_E
    diagonal = tile * BR if CAUSAL else N
    o_tile, l, m = walk(o_tile, l, m, q_tile, k + head, v + head, 0, diagonal, i, scale_log2, BC, D, False)
    if CAUSAL:
        o_tile, l, m = walk(
            o_tile, l, m, q_tile, k + head, v + head, diagonal, diagonal + BR, i, scale_log2, BC, D, True
        )
    tl.store(o + rows, (o_tile / l[:, None]).to(o.dtype.element_ty))
    tl.store(lse + tl.program_id(1) * N + i, (m + tl.log2(l)) / LOG2_E)


def compile_forward(sm: int, d: int, causal: bool, *, Br: int, Bc: int, warps: int, stages: int) -> Compiled:
    """Machine code for sm / 10, fp16."""
    signature = {**dict.fromkeys("qkvo", "*fp16"), "lse": "*fp32", "N": "i32", "scale": "fp32"}
    constants = {"BR": Br, "BC": Bc, "D": d, "CAUSAL": causal}
    names = [*signature, *constants]
    aligned = [n for n, kind in signature.items() if kind[0] == "*"] + ["N"]
    source = ASTSource(
        fn=forward,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    about = compiled.metadata
    return Compiled(about.name, compiled.asm["cubin"], about.num_warps, about.shared)

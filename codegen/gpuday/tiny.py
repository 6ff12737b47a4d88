"""Run every kernel once at a tiny shape, tails included: the program that compute-sanitizer watches."""

from __future__ import annotations

import sys

import torch

from ..operator.op import attention


def main() -> int:
    """Forward, and both backwards, for a d of each template branch: whole and half 16-column steps."""
    for dtype, d, Nq, Nk in ((torch.bfloat16, 64, 65, 65), (torch.float16, 72, 65, 70)):
        for causal in (False, True):
            q, k, v = (
                torch.randn(1, H, N, d, dtype=dtype, device="cuda", requires_grad=True)
                for H, N in ((2, Nq), (1, Nk), (1, Nk))
            )
            for deterministic in (False, True):
                O = attention(q, k, v, causal=causal, deterministic=deterministic)
                torch.autograd.grad(O, (q, k, v), torch.ones_like(O))
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())

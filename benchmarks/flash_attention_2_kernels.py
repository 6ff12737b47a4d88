"""Name FlashAttention-2's kernels: which of them runs for a head dimension, a mask and a GPU, and how it is built.

    >>> kernel_for("forward", 128, True, find_gpu("rtx4090")).name
    'forward_d128_causal_64x64_w4_sm80'

The rules are those of its flash_fwd_launch_template.h and flash_bwd_launch_template.h (2.8.3), bf16 without dropout,
for lengths that are multiples of the tile; the architectures are those of its setup.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from flashsmith.spec.gpu import KB, Gpu, find_gpu
from flashsmith.spec.problem import Pass, Problem
from published import SPEEDS
from published import problem as problem_of

BUILT_FOR = (80, 90, 100, 120)  # the code for the nearest lower one of the same major runs on the others
ELEMENT_BYTES = 2  # bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One instantiation of its templates."""

    which: Pass
    d: int
    causal: bool
    Br: int
    Bc: int
    warps: int
    atoms: tuple[int, int, int] = (1, 1, 1)  # backward: its AtomLayoutMSdP, AtomLayoutNdKV, AtomLayoutMdQ
    v_regs: bool = False  # backward: V in registers
    sm: int

    @property
    def name(self) -> str:
        """Of its cubin, without the suffix."""
        mask = ["causal"] if self.causal else []
        layout = [f"atoms{''.join(map(str, self.atoms))}"] if self.which == "backward" else []
        v = ["vregs"] if self.v_regs else []
        words = [self.which, f"d{self.d}", *mask, f"{self.Br}x{self.Bc}", f"w{self.warps}", *layout, *v]
        return "_".join([*words, f"sm{self.sm}"])

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block; the compiler checks it against its kernel_traits.h."""
        q_tile, kv_tile = self.Br * self.d, self.Bc * self.d
        if self.which == "forward":
            return ELEMENT_BYTES * (q_tile + 2 * kv_tile)
        rest = 2 * self.Br * self.Bc  # P and dS
        kv = max(2 * kv_tile, kv_tile + rest) if self.v_regs else 2 * kv_tile + rest
        return ELEMENT_BYTES * (3 * q_tile + kv)  # Q twice, dO, then K and V

    @property
    def macros(self) -> dict[str, int | str]:
        """What flash_attention_2/*.cu are compiled with."""
        even = self.d <= 128  # above it the launch templates take the kernel for any lengths, even for even ones
        shared: dict[str, int | str] = {
            "HEAD_DIM": self.d, "BLOCK_M": self.Br, "BLOCK_N": self.Bc, "WARPS": self.warps,
            "SMEM_BYTES": self.smem_bytes, "CAUSAL": str(self.causal).lower(), "EVEN_MN": str(even).lower(),
        }  # fmt: skip
        if self.which == "forward":
            return shared
        atoms = dict(zip(("ATOMS_M_SDP", "ATOMS_N_DKV", "ATOMS_M_DQ"), self.atoms, strict=True))
        return {**shared, **atoms, "V_IN_REGS": str(self.v_regs).lower()}


def kernel_for(which: Pass, d: int, causal: bool, gpu: Gpu) -> Kernel:
    """The kernel that its launch templates choose on `gpu`; of a backward the main one, dQ, dK and dV together."""
    sm = max(built for built in BUILT_FOR if built // 10 == gpu.sm // 10 and built <= gpu.sm)
    if which == "forward":
        Br, Bc, warps = _forward_tile(d, causal, gpu)
        return Kernel(which=which, d=d, causal=causal, Br=Br, Bc=Bc, warps=warps, sm=sm)
    Br, Bc, atoms, v_regs = _backward_tile(d, gpu)
    return Kernel(which=which, d=d, causal=causal, Br=Br, Bc=Bc, warps=8, atoms=atoms, v_regs=v_regs, sm=sm)


def _forward_tile(d: int, causal: bool, gpu: Gpu) -> tuple[int, int, int]:
    if d in (32, 64):
        return 128, 128, 4
    if d == 128 and gpu.sm // 10 == 8 and gpu.sm != 80:  # two blocks fit in 99 KB
        return (64, 64, 4) if causal else (128, 32, 4)
    if d == 128:
        return 128, 64, 4
    if d == 256:
        one_large = gpu.smem_block_bytes >= 128 * KB and gpu.smem_sm_bytes < 192 * KB  # else two small ones
        return (128, 64, 8) if one_large else (64, 64, 4)
    raise KeyError(f"forward, d={d}: only d = 32, 64, 128, 256 are listed here")


def _backward_tile(d: int, gpu: Gpu) -> tuple[int, int, tuple[int, int, int], bool]:
    roomy = gpu.smem_block_bytes >= 144 * KB
    if d == 32:
        return 128, 128, (4, 4, 4), True
    if d == 64:
        return (128, 128, (4, 4, 4), False) if roomy else (64, 128, (2, 4, 4), True)
    if d == 128:
        return (64, 128, (2, 4, 2), False) if roomy else (64, 64, (4, 2, 2), True)
    raise KeyError(f"backward, d={d}: only d = 32, 64, 128 are listed here")


class Case(NamedTuple):
    """A speed to predict."""

    gpu: str
    which: Pass
    problem: Problem

    @property
    def kernel(self) -> Kernel:
        """The one that runs, of a backward the main one."""
        return kernel_for(self.which, self.problem.d, self.problem.causal, find_gpu(self.gpu))


def _cases() -> Iterable[Case]:
    """All that were published, and the longest of its benchmark's lengths on a part of each kind."""
    yield from (Case(speed.gpu, speed.which, speed.problem) for speed in SPEEDS)
    for gpu, head_dims in (("a100", (64, 128, 256)), ("h100-sxm", (64, 128, 256)), ("rtx4090", (64, 128, 256)),
                           ("b200", (128,)), ("rtx5090", (128,))):  # fmt: skip
        for d in head_dims:
            for causal in (False, True):
                yield Case(gpu, "forward", problem_of(d, causal, 16384))
                if d <= 128:
                    yield Case(gpu, "backward", problem_of(d, causal, 16384))


CASES = tuple(dict.fromkeys(_cases()))
KERNELS = tuple(dict.fromkeys(case.kernel for case in CASES))

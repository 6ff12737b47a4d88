"""Name the microbenchmarks: their kernels, what a step of each loop holds, at how many warps each is launched.

templates/microbench.cu.j2 has the CUDA; docs/microbenchmarks.md says what each settles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from ..render import render_template
from ..sass import Function, Instruction
from ..sass.rates import MEMORY, SPECIAL, TENSOR_CORE, pipe_of
from ..spec.backward_shape import red_width

TEMPLATE = "microbench.cu.j2"
WARPS = 16  # of the largest block: four for each sub-partition
SUB_PARTITIONS = 4
SMEM_BYTES = 2048  # of a warp
WINDOW_BYTES = 4096  # of a warp: global memory that stays in L2
STEPS = 512  # of a launch: filling the pipes at its start is below 1% of it
STAMPS = 64  # of a warp in `policy`
COPY_BYTES = 512  # that a warp copies at once
PIECES = SMEM_BYTES // COPY_BYTES  # that it has room for
LENGTHS = (64, 128)  # of a `pipe` loop: the slope between the two is free of what the loop itself costs
FETCHED = (256, 512, 1024, 2048, 4096, 8192)  # instructions of 16 bytes in a loop: 4 to 128 KB
ROUNDS, CHAIN, BARRIERS, REDUCTIONS, TIMED_HMMA = 4, 32, 64, 8, 64  # of a step

Scope = Literal["sub-partition", "SM", "warp"]
PIPES: tuple[tuple[str, dict[str, int]], ...] = (
    ("FFMA", {"FFMA": 1}), ("FMNMX", {"FMNMX": 1}), ("MUFU", {"MUFU": 1}), ("F2FP", {"F2FP": 1}),
    ("SHFL", {"SHFL": 1}), ("STS", {"STS": 1}), ("LDS", {"LDS": 1}),
    ("FFMA_FMNMX", {"FFMA": 1, "FMNMX": 1}), ("MUFU_F2FP", {"MUFU": 1, "F2FP": 1}),
)  # fmt: skip
SHARED = frozenset({"SHFL", "STS", "LDS"})  # go through the one shared-memory pipe of the SM
BESIDE = ((0, 1), (PIECES, 1), (PIECES, 2))  # copies beside 48 ldmatrix, and groups in flight
SAME = {"REDG": "RED"}  # names of an instruction that changed with the architecture
# What must not slip into a loop uncounted: each would share a pipe with what is timed.
SCARCE = frozenset({MEMORY, SPECIAL, TENSOR_CORE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One entry point of the text: a function template and its arguments."""

    function: str
    arguments: tuple[str | int, ...]
    loop: Mapping[str, int]  # opcodes of a step, besides the loop's own

    @property
    def name(self) -> str:
        """As the cubin has it: tensor_16_5."""
        return "_".join([self.function, *map(str, self.arguments)])

    @property
    def call(self) -> str:
        """As C++ has it: tensor<16, 5>."""
        return f"{self.function}<{', '.join(map(str, self.arguments))}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One kernel in one launch, and the rate that its time stands for."""

    kernel: Kernel
    counted: str  # the opcode whose rate it is
    scope: Scope  # who shares what it is limited by
    warps: int = WARPS
    everywhere: bool = False  # one block on each SM at once; else a single block
    lane_bytes: int = 0  # that an instruction moves: the rate is then in bytes

    @property
    def steps(self) -> int:
        """Turns of the loop."""
        return STAMPS if self.kernel.function == "policy" else STEPS

    @property
    def unit(self) -> str:
        """Of the rate."""
        return "B/clk/SM" if self.lane_bytes else f"cycles a {self.counted} and {self.scope}"

    def rate(self, cycles: float) -> float:
        """From the cycles of a step: bytes a clock and SM, or cycles an instruction."""
        count = self.kernel.loop[self.counted]
        if self.lane_bytes:
            return count * self.warps * 32 * self.lane_bytes / cycles
        sharing = {"SM": self.warps, "sub-partition": max(1, self.warps // SUB_PARTITIONS), "warp": 1}[self.scope]
        return cycles / (count * sharing)


def benchmarks(sm: int) -> tuple[Benchmark, ...]:
    """All of them for an architecture."""
    return (*_tensor(), *_latencies(), *_memory(sm), *_pipes(), *_fetch())


def kernels(sm: int) -> tuple[Kernel, ...]:
    """The entry points that they need, each once."""
    return tuple({b.kernel.name: b.kernel for b in benchmarks(sm)}.values())


def text(sm: int) -> str:
    """The CUDA of all kernels for an architecture. Raises RenderError, and UsageError before sm_80."""
    if sm < 80:
        raise UsageError(f"the microbenchmarks time cp.async and bf16, which sm_{sm} has not; use sm_80 or later.")
    return render_template(
        TEMPLATE, f"microbench sm_{sm}", sm=sm, kernels=kernels(sm), vector=red_width(sm) > 1, warps=WARPS,
        smem_bytes=SMEM_BYTES, window_bytes=WINDOW_BYTES, piece=COPY_BYTES, rounds=ROUNDS, links=CHAIN,
        reductions=REDUCTIONS,
    )  # fmt: skip


def timed_loop(function: Function) -> tuple[Instruction, ...]:
    """The instructions of the longest loop: benchmarks have but one."""
    loop = max(function.loops, key=lambda summary: summary.instructions)
    return tuple(i for i in function.instructions if loop.first_address <= i.address <= loop.last_address)


def unrolled(kernel: Kernel, function: Function) -> int:
    """How many steps ptxas made of a turn of the loop. Raises ValueError if the loop is not what the kernel says.

    ptxas deletes results that nobody reads, merges equal loads, and would time something else than what is asked.
    """
    if not function.loops:
        raise ValueError(f"{kernel.name} has no loop")
    found = Counter(SAME.get(i.base, i.base) for i in timed_loop(function) if not i.never_executes)
    times = {found[opcode] / count for opcode, count in kernel.loop.items()}
    uncounted = {o: n for o, n in found.items() if o not in kernel.loop and pipe_of(o) in SCARCE}
    if len(times) != 1 or not min(times).is_integer() or not min(times) or uncounted:
        raise ValueError(f"{kernel.name} holds {dict(found)} in its loop, not {dict(kernel.loop)} and the loop's own")
    return int(min(times))


def _tensor() -> tuple[Benchmark, ...]:
    found = []
    for hmma, ldmatrix in ((16, 0), (0, 8), (16, 2), (16, 4), (16, 5), (16, 8), (8, 8)):
        loop = {opcode: ROUNDS * count for opcode, count in (("HMMA", hmma), ("LDSM", ldmatrix)) if count}
        kernel = Kernel(function="tensor", arguments=(hmma, ldmatrix), loop=loop)
        scope: Scope = "sub-partition" if hmma else "SM"
        counted = next(iter(loop))
        found += [Benchmark(kernel=kernel, counted=counted, scope=scope, warps=warps) for warps in (4, 8, 16)]
    policy = Kernel(function="policy", arguments=(TIMED_HMMA,), loop={"HMMA": TIMED_HMMA, "STG": 1})
    return (*found, Benchmark(kernel=policy, counted="HMMA", scope="sub-partition", warps=8))


def _latencies() -> tuple[Benchmark, ...]:
    ops = ("HMMA", "LDSM", "LDS", "LDGSTS", "MUFU")
    chains = [Kernel(function="chain", arguments=(op,), loop={op: CHAIN}) for op in ops]
    barrier = Kernel(function="barrier", arguments=(BARRIERS,), loop={"BAR": BARRIERS})
    return (
        *(Benchmark(kernel=k, counted=str(k.arguments[0]), scope="warp", warps=1) for k in chains),
        *(Benchmark(kernel=barrier, counted="BAR", scope="warp", warps=warps) for warps in (4, 8, 16)),
    )


def _memory(sm: int) -> tuple[Benchmark, ...]:
    found = []
    for width in sorted({1, red_width(sm)}):
        kernel = Kernel(function="reduce", arguments=(width,), loop={"RED": REDUCTIONS})
        found += [
            Benchmark(kernel=kernel, counted="RED", scope="SM", everywhere=everywhere, lane_bytes=4 * width)
            for everywhere in (False, True)
        ]

    def copy(copies: int, ldmatrix: int, groups: int) -> Kernel:
        loop = {opcode: n for opcode, n in (("LDGSTS", copies), ("LDSM", ldmatrix)) if n}
        return Kernel(function="copy", arguments=(copies, ldmatrix, groups), loop=loop)

    bandwidth = [
        Benchmark(kernel=copy(PIECES, 0, groups), counted="LDGSTS", scope="SM", everywhere=everywhere, lane_bytes=16)
        for groups in (1, 2)
        for everywhere in (False, True)
    ]
    # Twelve ldmatrix a copy: shared memory is then what limits, not L2, and the difference is what a copy writes.
    beside = [Benchmark(kernel=copy(n, 48, groups), counted="LDSM", scope="SM") for n, groups in BESIDE]
    return (*found, *bandwidth, *beside)


def _pipe(op: str, length: int, subpartitions: int = SUB_PARTITIONS) -> Kernel:
    loop = {opcode: n * length for opcode, n in dict(PIPES)[op].items()}
    return Kernel(function="pipe", arguments=(op, length, subpartitions), loop=loop)


def _pipes() -> tuple[Benchmark, ...]:
    found = []
    for op, opcodes in PIPES:
        counted = next(iter(opcodes))
        scope: Scope = "SM" if op in SHARED else "sub-partition"
        found += [Benchmark(kernel=_pipe(op, n), counted=counted, scope=scope) for n in LENGTHS]
    alone = [Benchmark(kernel=_pipe("LDS", n, 1), counted="LDS", scope="sub-partition") for n in LENGTHS]
    return (*found, *alone)


def _fetch() -> tuple[Benchmark, ...]:
    return tuple(
        Benchmark(kernel=_pipe("FFMA", length), counted="FFMA", scope="sub-partition", warps=warps)
        for length in FETCHED
        for warps in (4, 8)
    )

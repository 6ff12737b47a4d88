"""Count the memory of attention between forward and backward: standard attention's P beside our O, m and l.

Bytes are exact; GB is 10^9 bytes, KB is 1024. Standard attention keeps the weights P [B, Hq, Nq, Nk] of every layer for
its backward. The tiled forward leaves O [B, Hq, Nq, d] and two float32 a row; the backward makes each tile of P again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from .errors import UsageError
from .spec.gpu import Gpu
from .spec.problem import ELEMENT_BYTES, Problem

Way = Literal["standard", "flash"]
STATISTIC = 4  # bytes of m, and of l, for each row: float32
GB = 1e9
GRANULE = 128  # lengths are searched in steps of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Bytes of one attention layer: `q`, `k`, `v` and `O` are there either way, and `P`, or `m` and `l`."""

    q: int
    k: int
    v: int
    O: int
    P: int  # the weights that standard attention keeps
    m: int
    l: int

    @property
    def written(self) -> int:
        """What our forward writes to global memory: O, m and l, each once."""
        return self.O + self.m + self.l

    @property
    def statistics(self) -> int:
        """m and l together."""
        return self.m + self.l

    def kept(self, way: Way) -> int:
        """What must stay from the forward to the backward, inputs and O included."""
        common = self.q + self.k + self.v + self.O
        return common + (self.P if way == "standard" else self.statistics)


def ledger(problem: Problem) -> Ledger:
    """The bytes of each tensor of `problem`.

    >>> one = ledger(Problem(dtype="fp16", d=128, Hq=1, Nq=32768))
    >>> one.P, one.statistics
    (2147483648, 262144)
    """
    rows, keys = problem.B * problem.Hq * problem.Nq, problem.B * problem.kv_heads * problem.keys
    element = ELEMENT_BYTES[problem.dtype]
    q, kv = rows * problem.d * element, keys * problem.d * element
    return Ledger(q=q, k=kv, v=kv, O=q, P=rows * problem.keys * element, m=rows * STATISTIC, l=rows * STATISTIC)


def longest(problem: Problem, gpu: Gpu, way: Way) -> int:
    """The longest N = Nq = Nk, a multiple of 128, whose `kept` fits the memory of `gpu`; 0 if none does."""

    def fits(steps: int) -> bool:
        n = steps * GRANULE
        return ledger(replace(problem, Nq=n, Nk=n)).kept(way) <= memory_bytes(gpu)

    return _most(fits) * GRANULE


def largest_batch(problem: Problem, gpu: Gpu, way: Way) -> int:
    """The largest B whose `kept` fits the memory of `gpu`; 0 if not even one sequence does."""
    one = ledger(replace(problem, B=1)).kept(way)
    if one == 0:
        raise UsageError("a problem without rows keeps nothing: every batch fits.")
    return memory_bytes(gpu) // one


def memory_bytes(gpu: Gpu) -> int:
    """The memory of a part as its data sheet counts it, all of it for one layer: an upper limit, no forecast."""
    return int(gpu.memory_gb * GB)


def table(problem: Problem, gpus: Mapping[str, Gpu]) -> dict[str, object]:
    """All figures of a problem, and what fits each GPU each way: what `flashsmith memory --json` prints, but counts."""
    figures = ledger(problem)
    one_head = ledger(replace(problem, B=1, Hq=1, Hk=1))
    ways: tuple[Way, Way] = ("standard", "flash")
    return {
        "problem": asdict(problem),
        "bytes": {**asdict(figures), "written": figures.written, "statistics": figures.statistics},
        "one_head": {"P": one_head.P, "statistics": one_head.statistics, "O": one_head.O},
        "kept": {way: figures.kept(way) for way in ways},
        "fits": {
            key: {
                way: {"longest_n": longest(problem, gpu, way), "largest_batch": largest_batch(problem, gpu, way)}
                for way in ways
            }
            for key, gpu in gpus.items()
        },
    }


def _most(fits: Callable[[int], bool]) -> int:
    """The largest n for which fits(n); fits is true up to some n and false from there on."""
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

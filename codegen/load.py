"""Load the best kernel known for a problem on a GPU: Problem + Gpu -> Loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import paths
from .compile import Binary, compile_source
from .errors import NoTunedKernel
from .render import Source, render
from .spec.defaults import default_tile
from .spec.gpu import GPUS, Gpu, served_gpu
from .spec.kernel import KernelName, KernelSpec, kernels_of
from .spec.limits import why_illegal
from .spec.problem import Pass, Problem
from .spec.record import Evidence, Record, read_records, record_path
from .spec.tile import Tile

Rung = Literal["record", "near length", "same class", "default"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A kernel that serves a problem, and why it does."""

    spec: KernelSpec
    rung: Rung
    evidence: Evidence | None  # None for a default tile: nothing was timed
    found: str  # the file and the lengths of the record, or the rule

    @property
    def tile(self) -> Tile:
        """The tile chosen."""
        return self.spec.tile

    @property
    def source(self) -> Source:
        """Its CUDA text."""
        return render(self.spec)

    @property
    def binary(self) -> Binary:
        """Its machine code; compiled by the first to ask."""
        return compile_source(self.source)


def load_best(problem: Problem, kernel: KernelName, gpu: str | Gpu = "auto", folder: Path | None = None) -> Loaded:
    """The best kernel for `problem`.

    An exact record; else the record of the nearest length on the same GPU; else a record of a GPU of the same class
    (sm, shared memory, tensor rate); else a default computed by arithmetic. dtype, d, mask, kernel and sm are never
    approximated. Records in `folder` (by default the user's) go before those that the package ships.

    Raises UnknownGpu, BadProblem; NoTunedKernel if not even the default fits.
    """
    target = served_gpu(gpu) if isinstance(gpu, str) else gpu
    folders = (folder or paths.user_tuned_dir(), paths.shipped_tuned_dir())
    recorded: KernelName = "fused" if kernel == "convert" else kernel  # convert reads what fused accumulates
    rungs: list[tuple[Rung, str]] = [("record", target.key), ("near length", target.key), *_same_class(target)]
    for rung, name in rungs:
        for path in (record_path(f, name) for f in folders):
            record = _nearest(_fitting(read_records(path), recorded, problem, target), problem, exact=rung == "record")
            if record is not None:
                spec = KernelSpec.of(kernel, problem, record.tile, target.sm)
                return Loaded(
                    spec=spec, rung=rung, evidence=record.evidence, found=f"{path}, Nq={record.Nq}, Nk={record.Nk}"
                )
    spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, target), target.sm)
    reason = why_illegal(spec, target)
    if reason:
        raise NoTunedKernel(
            f"no record serves {kernel} {problem.text} on {target.key}, and the default does not fit: {reason}"
        )
    return Loaded(spec=spec, rung="default", evidence=None, found=f"no record in {record_path(folders[0], target.key)}")


def load_pass(
    problem: Problem, which: Pass, gpu: str | Gpu = "auto", *, deterministic: bool = False, folder: Path | None = None
) -> dict[KernelName, Loaded]:
    """The kernels of a pass, in the order of their launches."""
    return {
        kernel: load_best(problem, kernel, gpu, folder) for kernel in kernels_of(which, deterministic=deterministic)
    }  # fmt: skip


def source_sha256(spec: KernelSpec) -> str:
    """The hash by which a record knows the text that it speaks of."""
    return hashlib.sha256(render(spec).text.encode()).hexdigest()


def _same_class(target: Gpu) -> list[tuple[Rung, str]]:
    alike = (target.sm, target.smem_sm_kb, target.tensor_flops_clk)
    others = [g for g in GPUS.values() if g.key != target.key and (g.sm, g.smem_sm_kb, g.tensor_flops_clk) == alike]
    return [("same class", g.key) for g in others]


def _fitting(records: Iterable[Record], kernel: KernelName, problem: Problem, target: Gpu) -> list[Record]:
    """Records of this kernel and problem whose text is still what was timed, and whose tile is still legal."""
    asked = (kernel, problem.dtype, problem.d, problem.causal, target.sm)
    return [
        r
        for r in records
        if (r.kernel, r.dtype, r.d, r.causal, r.sm) == asked
        and why_illegal(r.spec, target) is None
        and source_sha256(r.spec) == r.source_sha256
    ]


def _nearest(records: list[Record], problem: Problem, *, exact: bool) -> Record | None:
    """The record whose lengths are those of the problem, or nearest to them by ratio."""

    def distance(record: Record) -> float:
        pairs = ((record.Nq, problem.Nq), (record.Nk, problem.keys))
        return sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in pairs)

    best = min(records, key=distance, default=None)
    return None if best is None or (exact and distance(best) > 0) else best

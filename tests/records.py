"""Records of any kernel, written by hand: of today's text, with the time and the search that a test needs."""

from __future__ import annotations

from typing import Literal

from flashsmith.compile import version_text
from flashsmith.load import source_sha256
from flashsmith.predict import model_of
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.problem import Dtype, Problem
from flashsmith.spec.record import Evidence, Record
from flashsmith.spec.search import Search
from flashsmith.spec.tile import Tile


def record_of(
    kernel: KernelName, time_ms: float, kind: Literal["predicted", "measured"] = "predicted", *, gpu: str = "a100",
    dtype: Dtype = "bf16", d: int = 64, causal: bool = False, B: int = 2, heads: int = 16, Nq: int = 1024,
    tile: Tile | None = None, search: Search | None = None, by: str = "", trials: int = 9,
) -> Record:  # fmt: skip
    """A record that a load of its lengths takes; of the default tile unless another is named."""
    part = find_gpu(gpu)
    problem = Problem(dtype=dtype, d=d, causal=causal, B=B, Hq=heads, Nq=Nq)
    tile = tile or default_tile(kernel, problem, part)
    by = by or (model_of(kernel) if kind == "predicted" else "NVIDIA A100, driver 580.65, 2026-11-29")
    return Record(
        gpu=gpu, sm=part.sm, kernel=kernel, dtype=dtype, d=d, causal=causal, B=B, Hq=heads, Hk=heads, Nq=Nq, Nk=Nq,
        tile=tile, source_sha256=source_sha256(KernelSpec.of(kernel, problem, tile, part.sm)), nvrtc=version_text(),
        evidence=Evidence(kind=kind, time_ms=time_ms, tflops=100.0, spread=0.02, by=by, trials=trials), search=search,
    )  # fmt: skip

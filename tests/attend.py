"""Run whole passes on the emulator, for tests that bring their own inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from flashsmith.compile import Binary
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.load import load_pass
from flashsmith.run import Extras, run_backward, run_forward
from flashsmith.spec.dtype import round_to, widen
from flashsmith.spec.kernel import KernelName
from flashsmith.spec.problem import Dtype, Pass, Problem
from numpy.typing import ArrayLike, NDArray

Bits = NDArray[np.uint16]
Fields = tuple[tuple[str, Any], ...]  # of a Problem


@dataclass(frozen=True)
class Attended:
    """Outputs in float64, and the engine with its reports."""

    O: NDArray[Any]
    m: NDArray[Any]
    l: NDArray[Any]
    dQ: NDArray[Any]
    dK: NDArray[Any]
    dV: NDArray[Any]
    engine: EmulatedEngine

    @property
    def lse(self) -> NDArray[Any]:
        """m + ln l."""
        with np.errstate(divide="ignore"):
            return np.asarray(self.m + np.log(self.l))

    def finite(self) -> bool:
        """Whether O and the gradients hold neither NaN nor infinity."""
        return all(np.isfinite(x).all() for x in (self.O, self.dQ, self.dK, self.dV))


@cache
def binaries(
    dtype: Dtype, d: int, causal: bool, which: Pass, deterministic: bool = False, features: Fields = ()
) -> dict[KernelName, Binary]:  # fmt: skip
    """The kernels that an A100 would be served."""
    problem = Problem(dtype=dtype, d=d, causal=causal, **dict(features))
    loaded = load_pass(problem, which, "a100", deterministic=deterministic)
    return {name: kernel.binary for name, kernel in loaded.items()}


def attend(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dO: ArrayLike | None = None,
    *,
    dtype: Dtype = "bf16",
    causal: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
    features: Mapping[str, Any] | None = None,
    lengths: tuple[list[int], list[int]] | None = None,
    k_lens: list[int] | None = None,
) -> Attended:
    """Forward and backward of arrays [B, H, N, d]: numbers, rounded to `dtype`, or its bits with their strides.

    `features` are fields of a Problem; `lengths` those of the queries and keys of packed sequences.
    """
    ones = np.ones((*np.shape(q)[:3], np.shape(v)[3]))
    bits = [_bits(x, dtype) for x in (q, k, v, ones if dO is None else dO)]
    d, engine = bits[0].shape[-1], EmulatedEngine(check_races=True)
    fields = dict(features or {})
    fields |= {"lengths": "packed"} if lengths else {"lengths": "padded"} if k_lens else {}
    fields |= {"dv": bits[2].shape[-1]} if bits[2].shape[-1] != d else {}
    if "anchor" in fields:  # which matters where the lengths differ
        fields |= {"Nq": 8192, "Nk": 8192 + np.shape(k)[2] - np.shape(q)[2]}
    window = Problem(dtype=dtype, d=d, causal=causal, **fields).bounds
    starts = [np.cumsum([0, *each]).astype(np.int32) for each in lengths or ()]
    extras = Extras(
        left=window[0] or 0, right=window[1] or 0,
        cu_q=engine.tensor(starts[0]) if starts else None, cu_k=engine.tensor(starts[1]) if starts else None,
        max_q=max(lengths[0]) if lengths else 0, max_k=max(lengths[1]) if lengths else 0,
        k_lens=engine.tensor(np.array(k_lens, np.int32)) if k_lens else None,
    )  # fmt: skip
    asked = tuple(fields.items())
    factor = Problem(dtype=dtype, d=d, scale=scale).softmax_scale
    Q, K, V, G = (engine.tensor(x) for x in bits)
    out = run_forward(engine, binaries(dtype, d, causal, "forward", False, asked), Q, K, V, factor, extras=extras)
    kernels = binaries(dtype, d, causal, "backward", deterministic, asked)
    gradients = run_backward(engine, kernels, Q, K, V, out, G, factor, extras=extras)
    assert not any(report.race_count for _, report in engine.reports)
    rows = (engine.read(x).astype(np.float64) for x in (out.m, out.l))
    matrices = (widen(engine.read(x), dtype) for x in (out.O, gradients.dQ, gradients.dK, gradients.dV))
    O, dQ, dK, dV = matrices
    m, l = rows
    return Attended(O, m, l, dQ, dK, dV, engine)


def _bits(x: ArrayLike, dtype: Dtype) -> Bits:
    array = np.asarray(x)
    return array if array.dtype == np.uint16 else round_to(array, dtype)

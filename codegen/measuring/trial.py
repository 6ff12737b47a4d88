"""Try one candidate on the GPU: check it on small shapes, then time it. The work of the measuring process."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np

from ..compile import Binary
from ..engines.engine import Engine, Tensor
from ..errors import LaunchError, WrongResult
from ..forms import pass_of
from ..inputs import full_extras
from ..measure import Again, Clock, Timing, Try, launcher, measure, sample
from ..predict import sizes_of
from ..run import Extras, run_forward, tensors_of
from ..spec.defaults import default_tile
from ..spec.dtype import Bits, round_to, stored_as
from ..spec.gpu import Gpu
from ..spec.kernel import STATS, KernelName
from ..spec.problem import Problem
from ..verify import MORE_SHAPES, of_tile, why_wrong
from .contention import neighbours

BLOCK = (1 << 20) - 3  # random numbers that are repeated to fill a tensor; odd, so that no two heads are alike
VERSION_FILE = Path("/proc/driver/nvidia/version")


class Bench:
    """Tensors of one problem on one engine, and the kernels that are timed on them."""

    def __init__(
        self, kernel: KernelName, problem: Problem, gpu: Gpu, engine: Engine, clock: Clock,
        checking: Callable[[], Engine], by: str,
    ) -> None:  # fmt: skip
        self._problem, self._gpu, self._engine, self._clock = problem, gpu, engine, clock
        self._checking, self._by = checking, by
        self._extras = full_extras(problem, engine)
        self._tensors = timed_tensors(kernel, problem, gpu, engine, self._extras)

    def __call__(self, request: Try | Again) -> Timing | list[float]:
        """Raises WrongResult, LaunchError, ImpossibleTime."""
        try:
            return self._answer(request)
        except RuntimeError as error:  # PyTorch's, for a fault that shows at whatever touches the device next
            raise LaunchError(f"{request.binary.spec.key}: {str(error).splitlines()[0]}") from error

    def _answer(self, request: Try | Again) -> Timing | list[float]:
        spec = request.binary.spec
        if isinstance(request, Try):
            reason = why_wrong(request.binary, self._problem, self._gpu, self._checking, MORE_SHAPES)
            if reason:
                raise WrongResult(f"{spec.key}: {reason}")
        try:
            launch = launcher(
                self._engine, request.binary, self._problem, self._tensors, self._clock.clear, self._extras
            )
            if isinstance(request, Try):
                return measure(spec, self._problem, self._gpu, launch, self._clock, by=self._by)
            return sample(launch, self._clock, count=request.count)
        except LaunchError as error:
            raise LaunchError(f"{spec.key}, while it was timed: {error}") from error


def timed_tensors(
    kernel: KernelName, problem: Problem, gpu: Gpu, engine: Engine, extras: Extras
) -> dict[str, Tensor]:  # fmt: skip
    """Every tensor that `kernel` is launched with, of the problem's full size; what it reads is filled."""
    sizes = sizes_of(problem)
    B, Nq, Nk = (
        (1, problem.B * problem.Nq, problem.B * problem.keys) if sizes.all_q else (problem.B, problem.Nq, problem.keys)
    )
    shapes = {
        "Q": (B, problem.Hq, Nq, problem.d), "K": (B, problem.kv_heads, Nk, problem.d),
        "V": (B, problem.kv_heads, Nk, problem.value_dim), "dO": (B, problem.Hq, Nq, problem.value_dim),
    }  # fmt: skip
    tensors = {name: engine.tensor(_noise(shape, problem, seed)) for seed, (name, shape) in enumerate(shapes.items())}
    tensors |= tensors_of(extras)
    stored = stored_as(problem.dtype)
    if pass_of(kernel) == "forward":
        m, l = (engine.empty(sizes.rows, np.float32) for _ in range(2))
        return {**tensors, "O": engine.empty(shapes["dO"], stored), "m": m, "l": l}
    of_default: dict[KernelName, Binary] = {"forward": _of_default("forward", problem, gpu)}
    forward = run_forward(
        engine, of_default, tensors["Q"], tensors["K"], tensors["V"], problem.softmax_scale, extras=extras
    )  # fmt: skip
    outputs = {f"d{name}": engine.empty(shapes[name], stored) for name in "QKV"}
    stats = engine.empty((sizes.stats_rows, STATS), np.float32)
    before = {**tensors, "O": forward.O, "m": forward.m, "l": forward.l, "stats": stats}
    if problem.sinks:
        before["dsinks"] = engine.empty(sizes.rows, np.float32)
    launcher(engine, _of_default("delta", problem, gpu), problem, before, lambda tensor: None, extras)()
    return {**tensors, "stats": stats, **outputs}


def _of_default(kernel: KernelName, problem: Problem, gpu: Gpu) -> Binary:
    return of_tile(kernel, problem, default_tile(kernel, problem, gpu), gpu)


def _noise(shape: tuple[int, ...], problem: Problem, seed: int) -> Bits:
    """Normal numbers in the problem's dtype. Zeros would not do: a GPU runs them at a higher clock."""
    block = round_to(np.random.default_rng(seed).standard_normal(min(BLOCK, int(np.prod(shape)))), problem.dtype)
    return np.resize(block, shape)


def on_device(kernel: KernelName, problem: Problem, gpu: Gpu, index: int) -> Bench:
    """The work of a measuring process on a real device. Raises UsageError without one."""
    shared = neighbours(index)  # before there is a context of ours
    if shared:
        warnings.warn(f"the GPU is shared with {shared}: times will be worth less.", stacklevel=2)
    from ..engines.clock import CudaClock
    from ..engines.cuda import CudaEngine
    from ..engines.driver import cuda_device

    device = cuda_device(index)
    engine = CudaEngine(device)
    checking = CudaEngine(device, poison=True)
    by = f"{device.name}, driver {driver_version()}, {date.today().isoformat()}{', shared' if shared else ''}"
    clock = CudaClock(engine, int(gpu.l2_mb * 2**20))
    return Bench(kernel, problem, gpu, engine, clock, lambda: checking, by)


def driver_version() -> str:
    """The kernel driver's own number, else the CUDA version that it serves."""
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", VERSION_FILE.read_text())
    except OSError:
        found = None
    if found:
        return found.group(1)
    from cupy.cuda import runtime

    served = int(runtime.driverGetVersion())
    return f"for CUDA {served // 1000}.{served % 1000 // 10}"

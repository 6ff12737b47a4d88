"""Works for measuring processes that stand in for a GPU: they answer, crash, hang or lie, as the request says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from flashsmith.errors import LaunchError, WrongResult
from flashsmith.measure import Again, Timing, Try
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.tile import ForwardTile

Request = tuple[str, Any]


def obedient() -> Callable[[Request], Any]:
    """A work that does what the request names; it counts its calls, so that a fresh process is recognised."""
    calls = 0

    def work(request: Request) -> Any:
        nonlocal calls
        calls += 1
        what, value = request
        if what == "crash":
            os.kill(os.getpid(), value)
        elif what == "exit":
            os._exit(value)
        elif what == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        elif what == "launch error":
            raise LaunchError("an illegal memory access was encountered")
        elif what == "wrong":
            raise WrongResult("dK is off by 1.0e+00, allowed 1.0e-02")
        elif what == "bug":
            raise KeyError("a mistake of the work's own")
        return os.getpid(), calls, value

    return work


def stillborn() -> Callable[[Request], Any]:
    raise ImportError("no PyTorch here")


def slow_to_start() -> Callable[[Request], Any]:
    time.sleep(3600)
    raise AssertionError


def timing(seconds: float, samples: int = 50) -> Timing:
    return Timing(
        kernel="forward", gpu="a100", seconds=seconds, low=0.98 * seconds, high=1.03 * seconds, samples=samples,
        tflops=100.0, by="NVIDIA A100-SXM4-80GB, driver 580.65, 2026-11-29",
    )  # fmt: skip


def true_seconds(tile: ForwardTile) -> float:
    """A time for each tile, far apart."""
    return 1e-3 * (1 + tile.Bc / 100 + tile.Br / 1000 + tile.warps / 50 + tile.q_steps / 200 + tile.min_blocks / 700)


def gpu_with_bad_kernels(bad: dict[int, str]) -> Callable[[Any], Any]:
    """A work for which tiles of some Bc are poison: at the check, at a repetition, or for ever."""
    poisoned = False

    def work(request: Try | Again) -> Any:
        nonlocal poisoned
        tile: Any = request.binary.spec.tile
        if poisoned:
            raise LaunchError("CUDA_ERROR_ILLEGAL_ADDRESS, left by an earlier kernel")
        fate = bad.get(tile.Bc, "")
        if fate == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fate == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        elif fate == "fault":
            poisoned = True  # sticky: every launch of this process fails from here on
            raise LaunchError("CUDA_ERROR_ILLEGAL_ADDRESS")
        elif fate == "wrong":
            raise WrongResult("O is off by 1.0e+00, allowed 1.0e-02")
        seconds = true_seconds(tile)
        return [seconds] * request.count if isinstance(request, Again) else timing(seconds)

    return work


class Spec:
    """A stand-in for a Binary that travels to another process."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

"""Measure the emulator on our own kernels: seconds of a warm forward and backward, and their ratio, in one run.

OPENBLAS_NUM_THREADS=1 python benchmarks/emulator_speed.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flashsmith.check import make_inputs
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.load import load_best, load_pass
from flashsmith.run import run_backward, run_forward
from flashsmith.spec.problem import Problem

CASES = ((512, 2), (1024, 8))  # N, heads
REPEATS = 3


def seconds(work: Callable[[], object]) -> float:
    """The least of a few runs: the first also lowers the PTX to Python."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure(problem: Problem) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    forward = load_best(problem, "forward", "a100").binary  # whole, also where the loader would part the keys
    backward = {name: kernel.binary for name, kernel in load_pass(problem, "backward", "a100").items()}
    engine, inputs, scale = EmulatedEngine(), make_inputs(problem), problem.softmax_scale
    q, k, v, dO = (engine.tensor(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dO))
    saved = run_forward(engine, {"forward": forward}, q, k, v, scale)
    return (
        seconds(lambda: run_forward(engine, {"forward": forward}, q, k, v, scale)),
        seconds(lambda: run_backward(engine, backward, q, k, v, saved, dO, scale)),
    )


def main() -> None:
    print(f"{'N':>5} {'heads':>5} {'causal':>6} {'forward s':>10} {'backward s':>11} {'ratio':>6}")
    for N, heads in CASES:
        for causal in (False, True):
            one, two = measure(Problem(dtype="fp16", d=64, causal=causal, Hq=heads, Nq=N))
            print(f"{N:5d} {heads:5d} {causal!s:>6} {one:10.3f} {two:11.3f} {two / one:6.1f}")


if __name__ == "__main__":
    main()

"""Do one part of a GPU day in this process: python -m flashsmith.gpuday.work FILE PART [ARGUMENT ...]

What is found is written to FILE whenever there is more of it. Exit status 0; 1 if something is wrong; 3, and a last
line that says why, if the part cannot run here.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .runner import SKIP

Tell = Callable[[Any], None]


class CannotRun(Exception):
    """The part needs something that is not here; the message says what."""


def environment(tell: Tell) -> None:
    """The device, the software, the two ceilings (bytes and matrix FLOPs a second), the host cost of a warm call."""
    from .machine import ceilings, describe, host_cost

    found: dict[str, Any] = {}
    for more in (describe, ceilings, host_cost):
        found |= more()
        tell(found)


def tests(tell: Tell) -> None:
    """tests/gpu of this checkout, by pytest."""
    from .machine import run_tests

    found = run_tests()
    tell(found)
    if found["failed"]:
        raise SystemExit(f"{len(found['failed'])} tests failed: {found['failed'][0]['test']}")


def rates(tell: Tell) -> None:
    """Microbenchmarks of pipes, memory path and clock: what the constants of a timing model follow from."""
    from ..engines.driver import cuda_device
    from .rates import measured_rates

    found: list[dict[str, Any]] = []
    for each in measured_rates(cuda_device()):
        found.append(each)
        tell(found)


def sanitizer(tell: Tell) -> None:
    """compute-sanitizer over every kernel at a tiny shape."""
    from .machine import run_sanitizers

    found: list[dict[str, Any]] = []
    for result in run_sanitizers():
        found.append(result)
        tell(found)
    if any(result["errors"] for result in found):
        raise SystemExit("compute-sanitizer found errors")


def tune(tell: Tell, d: str, causal: str, folder: str) -> None:
    """A short search of each kernel, by measured time; a record each."""
    from ..spec.gpu import present_gpu
    from ..spec.problem import Problem
    from ..tune import tune_kernel, tuned_kernels

    problem = Problem(dtype="bf16", d=int(d), causal=causal == "True", B=4, Hq=2048 // int(d), Nq=4096)
    gpu, found = present_gpu(), list[dict[str, Any]]()
    for kernel in (*tuned_kernels("forward", problem, gpu), *tuned_kernels("backward", problem, gpu)):
        tuned = tune_kernel(kernel, problem, gpu, Path(folder), trials=TRIALS, by="measured")
        found.append(asdict(tuned.record))
        tell(found)


TRIALS = 8  # for each kernel: a search of half a minute, no more


def bench(tell: Tell, d: str, causal: str) -> None:
    """Ours beside PyTorch's kernels, forward and backward, every length, in this one run."""
    from ..backends import FLEX, backends
    from ..bench import problems

    served = {name: attend for name, attend in backends().items() if name != FLEX}
    _bench(tell, problems("bf16", int(d), causal == "True"), served)


def flex(tell: Tell) -> None:
    """FlexAttention, which compiles at each length: the lengths that matter first."""
    from ..backends import FLEX, backends
    from ..bench import problems
    from .plan import CONFIGS

    asked = [problem for n in (8192, 2048) for d, causal in CONFIGS for problem in problems("bf16", d, causal, (n,))]
    _bench(tell, asked, {FLEX: backends()[FLEX]})


def tiles(tell: Tell, kernel: str) -> None:
    """The measured time of random legal tiles: what a timing model is fitted to and judged by."""
    from ..spec.gpu import present_gpu
    from ..spec.kernel import HOPPER
    from .tiles import timed_tiles

    if kernel in HOPPER and present_gpu().sm != 90:
        raise CannotRun(f"{kernel} is for sm_90")
    found: list[dict[str, Any]] = []
    for each in timed_tiles(kernel):
        found.append(each)
        tell(found)


def warpgroups(tell: Tell) -> None:
    """The kernels of warpgroups by what only a GPU can judge, beside cuDNN."""
    from ..spec.gpu import present_gpu
    from .warpgroups import timed_variants

    if present_gpu().sm != 90:
        raise CannotRun("kernels of warpgroups are for sm_90")
    found: list[dict[str, Any]] = []
    for each in timed_variants():
        found.append(each)
        tell(found)


def memory(tell: Tell) -> None:
    """Peak and kept bytes of a forward each way, beside what the ledger computes."""
    from ..footprint import measure_forward
    from ..ledger import ledger
    from ..spec.problem import Problem

    found: list[dict[str, Any]] = []
    for n in (8192, 16384, 32768):
        problem = Problem(dtype="fp16", d=128, Hq=4, Nq=n)
        computed = ledger(problem)
        for measured in measure_forward(problem):
            found.append({**asdict(measured), "computed": {"P": computed.P, "written": computed.written}})
        tell(found)


def _bench(tell: Tell, asked: Any, served: Any) -> None:
    from ..bench import bench_measured
    from ..engines.clock import CudaClock
    from ..engines.cuda import cuda_engine
    from ..spec.gpu import present_gpu

    gpu, engine = present_gpu(), cuda_engine()
    clock, found = CudaClock(engine, int(gpu.l2_mb * 2**20)), []
    for row in bench_measured(asked, ("forward", "backward"), gpu, clock, served, str(engine.driver.memory)):
        found.append(asdict(row))
        tell(found)


PARTS: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (environment, tests, rates, sanitizer, tune, bench, flex, tiles, warpgroups, memory)
}


def main(arguments: list[str]) -> int:
    """Run a part; what it finds goes to its file, what goes wrong to the output's last line."""
    file, name, *rest = arguments

    def tell(found: Any) -> None:
        fresh = Path(f"{file}.new")
        fresh.write_text(json.dumps(found, default=str))
        os.replace(fresh, file)

    try:
        _need_a_gpu()
        PARTS[name](tell, *rest)
    except CannotRun as reason:
        print(reason)
        return SKIP
    except ImportError as error:
        traceback.print_exc()
        print(f"{error.name} is not installed here" if error.name else error)
        return SKIP if isinstance(error, ModuleNotFoundError) else 1
    return 0


def _need_a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise CannotRun("no CUDA device is here, or PyTorch is built without CUDA")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

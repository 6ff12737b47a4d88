"""Describe the machine, measure its two ceilings, and run the programs of others on it: pytest, compute-sanitizer."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, cast
from xml.etree import ElementTree

from ..spec.problem import Dtype

PACKAGES = ("torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "numpy", "jinja2", "optuna", "pytest")
ROOT = Path(__file__).resolve().parents[2]  # of the checkout, where there is one
QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,utilization.gpu"
SANITIZERS = ("memcheck", "racecheck", "synccheck")
SANITIZER_PATHS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
COPY_BYTES = 2**31  # of the copy that measures bandwidth: many times any L2
MATRIX = 8192  # rows and columns of the product that measures the tensor cores
CEILING_CALLS = 10
HOST_CALLS = 300  # fewer than the launches that the driver queues, so that none waits for the GPU
ERROR_STATUS = 9  # asked of compute-sanitizer when it finds something


def describe() -> dict[str, Any]:
    """Device, driver, software; each read, none changed."""
    import torch

    from ..compile import version_text

    seen = torch.cuda.get_device_properties(0)
    smi = shutil.which("nvidia-smi")
    query = [str(smi), f"--query-gpu={QUERY}", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout if smi else ""
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": seen.name, "sms": seen.multi_processor_count, "sm": 10 * seen.major + seen.minor,
        "memory_bytes": seen.total_memory, "l2_bytes": getattr(seen, "L2_cache_size", None),
        "nvidia_smi": dict(zip(QUERY.split(","), map(str.strip, said.splitlines()[0].split(",")), strict=False))
        if said.strip() else {},
        "python": platform.python_version(), "nvrtc": version_text(), "cuda_of_torch": torch.version.cuda,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }  # fmt: skip


def ceilings() -> dict[str, float]:
    """Measured: GB/s of a device copy, read and written bytes both counted; TFLOP/s of a bf16 matrix product."""
    import torch

    source = torch.empty(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copy_s = _median_seconds(lambda: target.copy_(source))
    x, y = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_s = _median_seconds(lambda: x @ y)
    return {"copy_gb_s": 2 * COPY_BYTES / copy_s / 1e9, "matmul_tflops": 2 * MATRIX**3 / product_s / 1e12}


def host_cost() -> dict[str, float]:
    """Measured: microseconds of the host in a warm call, PyTorch's dispatch and the driver's launch included."""
    import torch

    from ..operator.op import attention

    q = torch.randn(1, 8, 64, 64, dtype=torch.bfloat16, device="cuda")
    for _ in range(HOST_CALLS):
        attention(q, q, q)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        attention(q, q, q)
    return {"warm_call_us": (time.perf_counter() - start) / HOST_CALLS * 1e6}


def run_tests() -> dict[str, Any]:
    """Counts, seconds and each failure of tests/gpu, one after the other: some of them time kernels.

    Their kernels are compiled before, on every core, into the cache of this user.
    """
    from .. import paths
    from .work import CannotRun

    folder = ROOT / "tests" / "gpu"
    if not list(folder.glob("test_*.py")):
        raise CannotRun(f"{folder} holds no tests: this is an installed package, not a checkout")
    _compile_for_tests()
    environment = {**os.environ, "FLASHSMITH_TEST_KERNELS": str(paths.cache_dir())}
    with tempfile.TemporaryDirectory() as work:
        xml = Path(work) / "tests.xml"
        command = [sys.executable, "-m", "pytest", str(folder), "-q", "-p", "no:cacheprovider", f"--junitxml={xml}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if not xml.exists():
            raise SystemExit(f"pytest ended with status {done.returncode} and no results")
        return parse_junit(xml)


def _compile_for_tests() -> None:
    from ..spec.gpu import present_gpu
    from ..spec.problem import Problem
    from ..warmup import warm_up

    grid = product(("bf16", "fp16"), (64, 72, 128, 256), (False, True))
    problems = [Problem(dtype=cast(Dtype, dtype), d=d, causal=causal) for dtype, d, causal in grid]
    for deterministic in (False, True):
        warm_up(
            problems, ("forward", "backward"), present_gpu(), deterministic=deterministic, workers=os.cpu_count() or 1
        )  # fmt: skip


def parse_junit(file: Path) -> dict[str, Any]:
    """What pytest's XML says: counts, and of each failed or skipped test why."""
    cases = list(ElementTree.parse(file).getroot().iter("testcase"))  # our own file, written a moment ago
    failed: list[dict[str, str]] = []
    skipped: list[dict[str, str]] = []
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for kind, into in (("failure", failed), ("error", failed), ("skipped", skipped)):
            for node in case.iter(kind):
                into.append({"test": name, "why": (node.get("message") or "")[:500]})
    seconds = round(sum(float(case.get("time") or 0) for case in cases), 1)
    passed = len(cases) - len({x["test"] for x in failed}) - len(skipped)
    return {"passed": passed, "failed": failed, "skipped": skipped, "seconds": seconds}


def run_sanitizers() -> Iterator[dict[str, Any]]:
    """One line a tool: how many errors it found in a run of every kernel at a tiny shape."""
    from .work import CannotRun

    found = shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *SANITIZER_PATHS)))
    if found is None:
        raise CannotRun("compute-sanitizer is not installed here")
    for tool in SANITIZERS:
        command = [found, "--tool", tool, "--error-exitcode", str(ERROR_STATUS)]
        done = subprocess.run(
            [*command, sys.executable, "-m", "flashsmith.gpuday.tiny"], capture_output=True, text=True, check=False
        )  # fmt: skip
        text = done.stdout + done.stderr
        counts = [int(n) for n in re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)]
        if done.returncode not in (0, ERROR_STATUS) and not counts:
            raise CannotRun(f"compute-sanitizer does not work here: {(text.strip().splitlines() or ['no output'])[-1]}")
        yield {"tool": tool, "errors": sum(counts), "status": done.returncode, "output": text[-2000:]}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _median_seconds(call: Callable[[], object]) -> float:
    import torch

    for _ in range(3):
        call()
    marks: Any = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CEILING_CALLS)]  # type: ignore[no-untyped-call]
    for first, last in marks:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return median(first.elapsed_time(last) for first, last in marks) / 1e3

"""Compile every default tile for d <= 128 and write codegen/spec/spills.json: those that spill, until none does.

python tools/find_spills.py [--gpus a100,h100-sxm] [--d 64,128] [--dtypes bf16,fp16]
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from flashsmith.compile import compile_source
from flashsmith.render import render
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import GPUS
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.spills import known_spills, spill_key

FILE = Path(__file__).parents[1] / "codegen" / "spec" / "spills.json"
KERNELS: tuple[KernelName, ...] = ("forward", "fused", "dkdv", "dq")


def spilling(case: tuple[str, KernelName, int, bool, str]) -> list[str]:
    """The defaults of one case that spill, in the order in which they would be chosen."""
    name, kernel, d, causal, dtype = case
    found: list[str] = []
    while True:
        problem, gpu = Problem(dtype=dtype, d=d, causal=causal), GPUS[name]  # type: ignore[arg-type]
        spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, gpu), gpu.sm)
        if compile_source(render(spec)).spill_bytes == 0:
            return found
        found.append(spill_key(spec))
        known_spills().add(found[-1])


def one_of_each_class() -> list[str]:
    """GPUs that differ in what a default depends on."""
    classes = {(gpu.sm, gpu.smem_sm_kb, gpu.threads_sm): gpu.key for gpu in GPUS.values() if gpu.served}
    return list(classes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", default=",".join(one_of_each_class()))
    parser.add_argument("--d", default=",".join(map(str, range(8, 129, 8))))
    parser.add_argument("--dtypes", default="bf16,fp16")
    options = parser.parse_args()
    gpus, ds, dtypes = options.gpus.split(","), map(int, options.d.split(",")), options.dtypes.split(",")
    cases = list(product(gpus, KERNELS, ds, (False, True), dtypes))
    with ProcessPoolExecutor(2) as pool:
        for number, found in enumerate(pool.map(spilling, cases), 1):
            known_spills().update(found)
            if found:
                print(f"{number}/{len(cases)}", *found, file=sys.stderr, flush=True)
                FILE.write_text(json.dumps(sorted(known_spills()), indent=0) + "\n")


if __name__ == "__main__":
    main()

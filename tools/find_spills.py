"""Compile the default tiles of some kernels; keep those whose loops spill in codegen/spec/spills.json, until none does.

python tools/find_spills.py [--kernels forward,dq] [--gpus a100,h100-sxm] [--d 64,128] [--dtypes bf16,fp16]

What was known of these is forgotten first. Of wide heads (choose.WIDE) no spill is let pass outside of loops either.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from flashsmith.choose import WIDE
from flashsmith.compile import Binary, compile_source
from flashsmith.render import render
from flashsmith.sass import disassemble
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import GPUS
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.limits import why_no_dtype
from flashsmith.spec.problem import Problem
from flashsmith.spec.spills import known_spills, spill_key

FILE = Path(__file__).parents[1] / "codegen" / "spec" / "spills.json"
KERNELS: tuple[KernelName, ...] = ("forward", "fused", "dkdv", "dq")


HEAD_DIMS = (*range(8, 129, 8), 192, 256)


def spilling(case: tuple[str, KernelName, int, bool, str]) -> list[str]:
    """The defaults of one case that spill, in the order in which they would be chosen."""
    name, kernel, d, causal, dtype = case
    found: list[str] = []
    problem, gpu = Problem(dtype=dtype, d=d, causal=causal), GPUS[name]  # type: ignore[arg-type]
    if why_no_dtype(problem.dtype, gpu) or (gpu.sm < 80 and d > WIDE):
        return found  # of wide heads on sm_75 the fastest tiles spill, or all
    while True:
        spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, gpu), gpu.sm)
        binary = compile_source(render(spec))
        if binary.spill_bytes == 0 or (d <= WIDE and not spilling_loops(binary)):
            return found
        found.append(spill_key(spec))
        known_spills().add(found[-1])


def spilling_loops(binary: Binary) -> bool:
    """Whether any loop moves registers to or from memory; a few instructions before and after it cost nothing."""
    function = disassemble(binary.cubin).functions[binary.spec.kernel]
    return any(loop.spill_instructions for loop in function.loops)


def one_of_each_class() -> list[str]:
    """GPUs that differ in what a default depends on."""
    classes = {(gpu.sm, gpu.smem_sm_kb, gpu.threads_sm): gpu.key for gpu in GPUS.values() if gpu.served}
    return list(classes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--gpus", default=",".join(one_of_each_class()))
    parser.add_argument("--d", default=",".join(map(str, HEAD_DIMS)))
    parser.add_argument("--dtypes", default="bf16,fp16")
    options = parser.parse_args()
    gpus, ds, dtypes = options.gpus.split(","), [int(d) for d in options.d.split(",")], options.dtypes.split(",")
    kernels: list[KernelName] = [k for k in KERNELS if k in options.kernels.split(",")]
    cases = list(product(gpus, kernels, ds, (False, True), dtypes))
    forgotten = {
        f"{kernel}_{'fp32_' if dtype == 'fp32' else ''}d{d}" for kernel, d, dtype in product(kernels, ds, dtypes)
    }
    sms = {f"sm{GPUS[name].sm}" for name in gpus}
    of_these = [key for key in known_spills() if key.partition("_sm")[0].removesuffix("_causal") in forgotten]
    of_these = [key for key in of_these if sms & {*key.split("_")}]
    known_spills().difference_update(of_these)
    FILE.write_text(json.dumps(sorted(known_spills()), indent=0) + "\n")
    with ProcessPoolExecutor(2) as pool:
        for number, found in enumerate(pool.map(spilling, cases), 1):
            known_spills().update(found)
            if found:
                print(f"{number}/{len(cases)}", *found, file=sys.stderr, flush=True)
                FILE.write_text(json.dumps(sorted(known_spills()), indent=0) + "\n")


if __name__ == "__main__":
    main()

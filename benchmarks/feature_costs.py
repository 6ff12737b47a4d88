"""Print what each feature costs in the loops of the kernels. No GPU is needed.

    python benchmarks/feature_costs.py [--gpu a100] [--d 128]    the table, as Markdown
    python benchmarks/feature_costs.py --write                   the same, into docs/kernels.md

For each feature and kernel: instructions of the loop that are no HMMA, for each HMMA, spills among them, and the
predicted TFLOP/s, all with the tile that a load serves when the user has no records. The loop is that of ordinary
tiles, as the model takes it: of a forward without masks and without a new maximum.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import document
from flashsmith.load import load_best
from flashsmith.predict import MODEL, predict
from flashsmith.sass import disassemble
from flashsmith.score_mod import ALIBI, BIAS, softcap
from flashsmith.spec.features import ScoreMod
from flashsmith.spec.gpu import Gpu, find_gpu
from flashsmith.spec.kernel import KernelName
from flashsmith.spec.problem import Problem
from markdown_table import table

DOCUMENT = document.DOCS / "kernels.md"
COMMAND = "python benchmarks/feature_costs.py --write"
KERNELS: tuple[KernelName, ...] = ("forward", "fused", "dkdv", "dq")
LENGTH = 8192


def formula(text: str, *, grad: bool = False) -> ScoreMod:
    """A score_mod whose tables are bf16, as those of a model in bf16 are."""
    return ScoreMod.of(text, lambda name: {"dtype": "bf16", "grad": grad})


FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "causal, top-left": {"causal": True, "anchor": "top-left", "Nk": LENGTH + 1024},
    "causal window of 1024 keys": {"causal": True, "window": (1024, None)},
    "window, 512 keys either way": {"window": (512, 512)},
    "padded keys": {"lengths": "padded"},
    "packed sequences": {"lengths": "packed"},
    "causal, packed": {"causal": True, "lengths": "packed"},
    "dv = 64": {"dv": 64},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.1},
    "softcap": {"score_mod": formula(softcap(30))},
    "ALiBi": {"score_mod": formula(ALIBI)},
    "ALiBi, gradient of slopes": {"score_mod": formula(ALIBI, grad=True)},
    "additive bias": {"score_mod": formula(BIAS)},
    "additive bias, its gradient": {"score_mod": formula(BIAS, grad=True)},
    "causal window, softcap, dropout": {
        "causal": True, "window": (1024, None), "score_mod": formula(softcap(30)), "dropout": 0.1,
    },
}  # fmt: skip


def cell(kernel: KernelName, problem: Problem, gpu: Gpu, folder: Path) -> tuple[str, str]:
    """Others per HMMA with spills in the loop, and TFLOP/s; `folder` holds the user's records."""
    binary = load_best(problem, kernel, gpu, folder).binary
    function = disassemble(binary.cubin).functions[kernel]
    loop = function.short_trace.loop
    products = sum(instruction.base == "HMMA" for instruction in loop)
    predicted = predict(binary, problem, gpu)
    spills = f" ({predicted.spills_in_loop} spills)" if predicted.spills_in_loop else ""
    return f"{(len(loop) - products) / products:.2f}{spills}", f"{predicted.tflops:.0f}"


def rows(gpu: Gpu, d: int) -> Iterator[Sequence[str]]:
    """A line for each feature."""
    for name, fields in FEATURES.items():
        print(name, file=sys.stderr)
        problem = Problem(dtype="bf16", d=d, **{"Nq": LENGTH, "Nk": LENGTH, "B": 2, **fields})
        with TemporaryDirectory() as folder:
            cells = [cell(kernel, problem, gpu, Path(folder)) for kernel in KERNELS]
        yield (name, *(text for pair in cells for text in pair))


def text(gpu: Gpu, d: int) -> str:
    """Legend and table."""
    head = ["feature", *(word for kernel in KERNELS for word in (f"{kernel}: others per HMMA", "TFLOP/s"))]
    legend = (
        f"{MODEL}. {gpu.key}, bf16, d = {d}, N = {LENGTH}, 16 heads, batch 2; each kernel alone, with the tile that "
        "a load serves from the shipped records. Of a mask only the pairs that are seen count as FLOPs; packed and "
        "padded sequences are all as long as the longest."
    )
    return "\n".join((legend, "", *table(head, rows(gpu, d)), ""))


def main() -> None:
    """Print the table, or put it into its document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="a100")
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # few of these problems have a record
    made = text(find_gpu(args.gpu), args.d)
    document.give(DOCUMENT, COMMAND, made, write_it=args.write)


if __name__ == "__main__":
    main()

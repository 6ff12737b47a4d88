"""Put our fastest kernels beside FlashAttention-2's own, all predicted by one model. No GPU is needed.

    python benchmarks/beside_flash_attention.py            the table, as Markdown; FlashAttention-2's predictions as
                                                           flash_attention_2.csv keeps them
    python benchmarks/beside_flash_attention.py --write    the same, into docs/kernels.md
    python benchmarks/beside_flash_attention.py --cubins FOLDER           with its machine code predicted now
    python benchmarks/beside_flash_attention.py --cubins FOLDER --keep    and every prediction of it kept in that file

FOLDER is one that compile_flash_attention_2.py filled. Our tiles are those that a load serves from the shipped records;
records and studies of the user's are set aside.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import document
import flash_attention_2_speeds
from flash_attention_2_kernels import CASES, Case
from flash_attention_2_speeds import FILE, OwnSpeed, predict_case
from flashsmith.load import Loaded, load_best
from flashsmith.predict import MODEL, pass_tflops, predict
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import FORWARD, FUSED, SPLIT, KernelName
from flashsmith.spec.problem import Pass, Problem
from flashsmith.spec.tile import tile_key
from markdown_table import table
from published import SPEEDS, TOKENS, WIDTH
from published import problem as problem_of

DOCUMENT = document.DOCS / "kernels.md"
COMMAND = "python benchmarks/beside_flash_attention.py --write"
LENGTH = 16384
FORMS: dict[str, tuple[KernelName, ...]] = {"forward": FORWARD, "fused": FUSED, "split": SPLIT}


class Row(NamedTuple):
    """One line of the table."""

    gpu: str
    form: Literal["forward", "fused", "split"]
    d: int
    causal: bool = False

    @property
    def which(self) -> Pass:
        return "forward" if self.form == "forward" else "backward"

    @property
    def problem(self) -> Problem:
        return problem_of(self.d, self.causal, LENGTH)

    @property
    def theirs(self) -> Case:
        """FlashAttention-2's fastest for the same problem: its fused backward, whatever the form of ours."""
        return Case(self.gpu, self.which, self.problem)


ROWS = (
    Row("a100", "forward", 128),
    Row("a100", "forward", 128, causal=True),
    Row("a100", "forward", 64),
    Row("a100", "fused", 128),
    Row("a100", "fused", 128, causal=True),
    Row("a100", "fused", 64),
    Row("a100", "fused", 64, causal=True),
    Row("a100", "split", 128),
    Row("a100", "split", 64),
    Row("h100-sxm", "forward", 128),
    Row("h100-sxm", "forward", 64),
    Row("h100-sxm", "fused", 128),
    Row("h100-sxm", "fused", 64),
    Row("rtx4090", "forward", 128),
    Row("rtx4090", "forward", 64),
    Row("rtx4090", "fused", 128),
    Row("rtx4090", "fused", 64),
)

HEAD = (
    "GPU", "kernel", "d", "FlashAttention-2, published", "FlashAttention-2, predicted", "ours, predicted", "ratio",
    "ours, rare blocks in every tile", "ratio", "spills in our loop", "our tile",
)  # fmt: skip

LEGEND = (
    f"TFLOP/s of whole passes, bf16, N = {LENGTH}, {TOKENS} tokens, heads * d = {WIDTH}. FLOPs as FlashAttention-2 "
    "counts them: half with a mask, five products in a backward, a split one too. Published speeds were measured by "
    "others (benchmarks/published.py says by whom). A ratio is ours over FlashAttention-2's, both predicted. The "
    "second of ours counts every tile as one that needs a mask, a new maximum or care for huge scores, where the code "
    "knows such tiles; FlashAttention-2's loops have no such branch. Spills are instructions of the loop."
)


def predict_theirs(cubins: Path) -> list[OwnSpeed]:
    """Every case: all of them before the first is written, so that a missing cubin costs nothing that was kept."""
    found = []
    for number, case in enumerate(CASES, 1):
        print(f"FlashAttention-2 {number}/{len(CASES)} {case.gpu} {case.kernel.name}", file=sys.stderr)
        found.append(predict_case(case, cubins))
    return found


class Ours(NamedTuple):
    """What the model says of the kernels that serve."""

    tflops: float
    tflops_always: float  # rare blocks of the loop executed in every tile
    spills_in_loop: int  # of all kernels of the pass
    tile: str


def predict_ours(row: Row, folder: Path) -> Ours:
    """Our kernels for a row, those that a load serves when the user's records are those of `folder`."""
    gpu, problem = find_gpu(row.gpu), row.problem
    serving = [load_best(problem, kernel, gpu, folder) for kernel in FORMS[row.form]]
    usual = [predict(loaded.binary, problem, gpu) for loaded in serving]
    always = [predict(loaded.binary, problem, gpu, rare_always=True) for loaded in serving]
    return Ours(
        tflops=pass_tflops(tuple(usual), row.which, problem),
        tflops_always=pass_tflops(tuple(always), row.which, problem),
        spills_in_loop=sum(each.spills_in_loop for each in always),
        tile="; ".join(_words(loaded) for loaded in serving if loaded.spec.kernel not in ("delta", "convert")),
    )


def cells(row: Row, ours: Ours, theirs: float) -> tuple[str, ...]:
    """A line of the table; `theirs` are the TFLOP/s predicted of FlashAttention-2."""
    kernel = f"{row.form}{' causal' if row.causal else ''}"
    return (
        row.gpu, kernel, str(row.d), published(row), f"{theirs:.0f}", f"{ours.tflops:.0f}",
        f"{ours.tflops / theirs:.2f}", f"{ours.tflops_always:.0f}", f"{ours.tflops_always / theirs:.2f}",
        str(ours.spills_in_loop), ours.tile,
    )  # fmt: skip


def published(row: Row) -> str:
    """What FlashAttention-2 was measured at, with its length where that is another; empty if nobody says."""
    for speed in SPEEDS:
        asked = speed.problem
        if (speed.gpu, speed.which, asked.d, asked.causal) == (row.gpu, row.which, row.d, row.causal):
            return f"{speed.tflops:g}" + (f" (N = {asked.Nq})" if asked.Nq != LENGTH else "")
    return ""


def report(cubins: Path | None) -> Iterable[str]:
    """The document, line by line."""
    kept = {} if cubins else flash_attention_2_speeds.read()
    lines = []
    with TemporaryDirectory() as nobody:
        for number, row in enumerate(ROWS, 1):
            print(f"{number}/{len(ROWS)} {row.gpu} {row.form} d={row.d}", file=sys.stderr)
            theirs = predict_case(row.theirs, cubins) if cubins else kept[row.theirs]
            lines.append(cells(row, predict_ours(row, Path(nobody)), theirs.tflops))
    yield f"{MODEL}. {LEGEND}"
    yield ""
    yield from table(HEAD, lines)


def _words(loaded: Loaded) -> str:
    """The tile, and where it is from unless a record of this GPU serves it."""
    own = loaded.rung in ("record", "near length")
    return tile_key(loaded.tile) + ("" if own else f" ({loaded.rung})")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Our kernels beside FlashAttention-2's, predicted.")
    parser.add_argument("--cubins", type=Path, metavar="FOLDER", help="what compile_flash_attention_2.py wrote")
    parser.add_argument("--keep", action="store_true", help=f"keep every prediction of --cubins in {FILE.name}")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    asked = parser.parse_args(arguments)
    if asked.keep and not asked.cubins:
        parser.error("--keep needs --cubins: the predictions are made of them")
    warnings.simplefilter("ignore")  # a record of another length serves, as it should
    if asked.keep:
        flash_attention_2_speeds.write(predict_theirs(asked.cubins))
    text = "\n".join(report(asked.cubins)) + "\n"
    document.give(DOCUMENT, COMMAND, text, write_it=asked.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())

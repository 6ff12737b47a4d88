"""Compare the timing model with what others published, and with what a GPU of ours measured. No GPU is needed.

    python benchmarks/model_accuracy.py                       the tables of docs/model.md, as Markdown
    python benchmarks/model_accuracy.py --write               the same, into the document
    python benchmarks/model_accuracy.py --report [FILE ...]   each tile that `make gpu` measured, beside its prediction;
                                                              without FILE every benchmarks/*/report.json

Predictions and measurements stand side by side here on purpose. This is the one place: nothing else compares them, and
nothing that is printed here goes back into the model.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

import document
import flash_attention_2_speeds
import measured_tiles
from flashsmith.compile import version_text
from flashsmith.predict import MODEL, NOISE
from markdown_table import table
from published import COMMENT_GPU, COMMENT_LENGTH, COMMENTS, SOURCES, SPEEDS, TRITON_SPEEDS, Comment, Speed, TritonSpeed
from published_rows import (
    COMMENT_HEAD,
    OWN_HEAD,
    RIGHT,
    SPEED_HEAD,
    TRITON_HEAD,
    WRONG,
    Compared,
    compare_own_code,
    compare_speed,
    compare_tiles,
    compare_triton,
)

HERE = Path(__file__).parent
DOCUMENT = document.DOCS / "model.md"
COMMAND = "python benchmarks/model_accuracy.py --write"


def tables() -> Iterable[str]:
    """The accuracy section of docs/model.md, line by line."""
    yield f"{versions()}. TFLOP/s; FLOPs as FlashAttention-2 counts them; sources below the tables."
    yield ""
    yield from own_code_tables()
    yield ""
    yield "FlashAttention-2's tiles in our kernels, beside what FlashAttention-2 itself reached:"
    yield ""
    speeds = [compare_speed(speed) for speed in _told(SPEEDS)]
    yield from table(SPEED_HEAD, [cells for _, cells in speeds])
    yield ""
    yield from table(SUMMARY_HEAD, summary([row for row, _ in speeds]))
    yield ""
    yield "A forward of our own in Triton, beside what Triton's reached:"
    yield ""
    of_triton = [compare_triton(speed) for speed in _told(TRITON_SPEEDS)]
    yield from table(TRITON_HEAD, [cells for _, cells in of_triton])
    yield ""
    yield from table(SUMMARY_HEAD, summary([row for row, _ in of_triton]))
    yield ""
    yield f"Tiles that FlashAttention-2 left ({COMMENT_GPU}, N = {COMMENT_LENGTH}), time over that of the tile it took:"
    yield ""
    comments = [compare_tiles(comment) for comment in _told(COMMENTS)]
    yield from table(COMMENT_HEAD, comments)
    yield ""
    yield count_signs([cells[-1] for cells in comments])
    yield ""
    yield from (f"- {name}: {source}" for name, source in SOURCES.items())


def own_code_tables() -> Iterable[str]:
    """FlashAttention-2's machine code, as flash_attention_2.csv keeps what the model says of it."""
    kept = flash_attention_2_speeds.read()
    made = " and ".join(dict.fromkeys(f"flash-attn {each.flash_attn} by nvcc {each.nvcc}" for each in kept.values()))
    yield f"FlashAttention-2's own machine code ({made}), beside what it reached:"
    yield ""
    rows = [compare_own_code(speed, kept) for speed in SPEEDS]
    yield from table(OWN_HEAD, [cells for _, cells in rows])
    yield ""
    yield from table(SUMMARY_HEAD, summary([row for row, _ in rows]))


def summary(rows: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Mean and worst difference of each GPU, of each kind and of all."""
    done = [row for row in rows if row.difference is not None]
    groups = {"all": done}
    for name in dict.fromkeys(name for row in done for name in (row.gpu, row.kind)):
        groups[name] = [row for row in done if name in (row.gpu, row.kind)]
    return [(name, *spread([row.difference or 0.0 for row in group])) for name, group in groups.items()]


SUMMARY_HEAD = ("rows", "number", "mean difference", "bias", "worst")


def spread(differences: Sequence[float]) -> tuple[str, str, str, str]:
    """
    >>> spread([0.1, -0.3])
    ('2', '20%', '-10%', '-30%')
    """
    worst = max(differences, key=abs)
    return str(len(differences)), f"{mean(map(abs, differences)):.0%}", f"{mean(differences):+.0%}", f"{worst:+.0%}"


def count_signs(verdicts: Sequence[str]) -> str:
    """How many of the comments the model agrees with."""
    right, wrong = verdicts.count(RIGHT), verdicts.count(WRONG)
    refused = sum(verdict.startswith("not ours") for verdict in verdicts)
    close = len(verdicts) - right - wrong - refused
    return (
        f"{right} of {len(verdicts) - refused} signs right, {wrong} wrong, {close} within the {NOISE:.0%} below which "
        f"two predictions say nothing of each other; {refused} tiles are none of ours."
    )


def versions() -> str:
    """What the rows depend on besides this text."""
    import triton

    return f"{MODEL}, machine code by NVRTC {version_text()} and Triton {triton.__version__}"


def _told(asked: Sequence[Speed | TritonSpeed | Comment]) -> Iterable[Speed | TritonSpeed | Comment]:
    for number, each in enumerate(asked, 1):
        print(f"{type(each).__name__} {number}/{len(asked)}", file=sys.stderr)
        yield each


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How accurate the timing model is.")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {DOCUMENT.name}")
    parser.add_argument(
        "--report", nargs="*", type=Path, metavar="FILE", help="compare with tiles measured by `make gpu`"
    )
    asked = parser.parse_args(arguments)
    if asked.report is not None:
        lines = list(measured_tiles.tables(asked.report or sorted(HERE.glob("*/report.json"))))
        print("\n".join(lines) if lines else "no measured report under benchmarks/")
        return 0
    warnings.simplefilter("ignore")  # Triton's, of its own future
    text = "\n".join(tables()) + "\n"
    document.give(DOCUMENT, COMMAND, text, write_it=asked.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())

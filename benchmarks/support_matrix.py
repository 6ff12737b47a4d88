"""Say what is served, by asking for it. No GPU is needed.

    python benchmarks/support_matrix.py            the table, as Markdown
    python benchmarks/support_matrix.py --write    the same, into README.md

Every cell is an answer of the library: a tile is chosen and held against the limits of the GPU, or the
request is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import document
from flashsmith.errors import FlashsmithError
from flashsmith.load import backward_form, forward_form
from flashsmith.render import render
from flashsmith.score_mod import ALIBI, BIAS, softcap
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.features import ScoreMod
from flashsmith.spec.gpu import GPUS, Gpu, find_gpu
from flashsmith.spec.kernel import FORWARD, FUSED, SPLIT, KernelName, KernelSpec
from flashsmith.spec.limits import why_illegal, why_no_dtype
from flashsmith.spec.problem import MAX_D, Problem
from markdown_table import table

DOCUMENT = document.DOCS.parent / "README.md"
COMMAND = "python benchmarks/support_matrix.py --write"
FORMS: dict[str, tuple[KernelName, ...]] = {"forward": FORWARD, "fused backward": FUSED, "split backward": SPLIT}
DIMS = range(8, MAX_D + 1, 8)
BASE = Problem(dtype="fp16", d=64, Hq=8, Hk=2, Nq=1024)  # fp16: what every GPU multiplies
HEAD = ("", *FORMS, "deterministic", "keys in parts, heads packed")


def mod(text: str) -> dict[str, Any]:
    """A score_mod whose tables have gradients."""
    return {"score_mod": ScoreMod.of(text, lambda name: {"grad": True})}


FEATURES: dict[str, dict[str, Any]] = {
    "causal, diagonal at the bottom right or top left": {"causal": True, "anchor": "top-left", "Nk": 1500},
    "sliding window, left and right": {"window": (256, 128)},
    "padded keys": {"lengths": "padded"},
    "packed sequences (varlen)": {"lengths": "packed"},
    "dv other than d": {"d": 192, "dv": 128},
    "softcap": mod(softcap(30)),
    "ALiBi, gradient of the slopes": mod(ALIBI),
    "additive bias of any broadcast, its gradient": mod(BIAS),
    "score_mod, gradients of its tensors": mod("score * gain[h] + table[max(i - j, 0)]"),
    "attention sinks, their gradient": {"sinks": True},
    "dropout": {"dropout": 0.1},
}


def rows() -> Iterator[Sequence[str]]:
    """A line for each feature; first for dtypes, on the GPUs that multiply them."""
    for dtype in ("bf16", "fp16", "fp32"):
        yield (f"{dtype}, plain and causal", *answers(replace(BASE, dtype=dtype)))
    for name, fields in FEATURES.items():
        yield (name, *answers(replace(BASE, **fields)))


def answers(problem: Problem) -> Iterator[str]:
    """Of one problem: each form, and what may be asked of it beside."""
    gpus = [gpu for gpu in GPUS.values() if not why_no_dtype(problem.dtype, gpu)]
    for kernels in FORMS.values():
        yield in_words(problem, kernels, gpus)
    yield said(lambda: backward_form(problem, find_gpu("a100"), deterministic=True))
    few = replace(problem, Nq=1, Nk=65536, Hq=32, Hk=8)
    yield "yes" if forward_form(few, find_gpu("a100")).form == "parts" else "no: whole"


def in_words(problem: Problem, kernels: tuple[KernelName, ...], gpus: Sequence[Gpu]) -> str:
    """The head dimensions that have a tile on every GPU, or those that lack one and where."""
    dims = DIMS if problem.dv is None else [problem.d]
    lacking: dict[str, list[int]] = {}
    for gpu in gpus:
        for d in dims:
            if not serves(replace(problem, d=d), kernels, gpu):
                lacking.setdefault(gpu.key, []).append(d)
    if not lacking:
        return "yes"
    if len(lacking) == len(gpus) and all(len(each) == len(dims) for each in lacking.values()):
        return "no"
    return "; ".join(f"{gpu}: d <= {min(dims) - 8}" for gpu, dims in lacking.items())


def serves(problem: Problem, kernels: tuple[KernelName, ...], gpu: Gpu) -> bool:
    """Whether every kernel of a pass has a tile that fits, and a text."""
    try:
        for kernel in kernels:
            spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, gpu), gpu.sm)
            if why_illegal(spec, gpu):
                return False
            if problem.d in (64, 128):
                render(spec)
    except FlashsmithError:
        return False
    return True


def said(ask: Any) -> str:
    """yes, or the reason of a refusal."""
    try:
        ask()
    except FlashsmithError as error:
        return "no: " + str(error).partition(": ")[2].partition(",")[0]
    return "yes"


def text() -> str:
    """The table."""
    return "\n".join((*table(HEAD, rows()), ""))


def main() -> None:
    """Print the table, or put it into the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    made = text()
    document.give(DOCUMENT, COMMAND, made, write_it=parser.parse_args().write)


if __name__ == "__main__":
    main()

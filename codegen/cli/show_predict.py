"""Lay predicted times out for people: time, speed, what each pipe does, what bounds it, and how far to believe it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..spec.gpu import Gpu, find_gpu
from ..spec.kernel import HOPPER, KernelName
from .console import print_lines, table

if TYPE_CHECKING:
    from ..predict import Prediction
    from ..predict_cubin import CubinPrediction


def how_sure(gpu: Gpu | None = None, margin: bool = False, kernels: Iterable[KernelName] = ()) -> str:
    """The error of times predicted for `gpu`, None: for GPUs of which that is known; of `kernels`, if they are named.

    With `margin`, where several stand beside each other, what they cannot tell.
    """
    from ..predict import ERROR, NOISE, error_of

    beside = f"; two that differ by less than {NOISE:.0%} say nothing of each other" if margin else ""
    error = error_of(gpu, kernels) if gpu is not None else ERROR
    if gpu is not None and error is None:
        return f"predicted times: {never_compared(gpu)}{beside}"
    return f"predicted times: mean error of the model {error:.0%}{beside}"


def never_compared(gpu: Gpu) -> str:
    """Of a GPU without an error."""
    return f"the model was never compared with a measurement on sm_{gpu.sm}, so that its error there is not known"


def predictions(kernels: Sequence[Prediction], tflops: float, gpu: Gpu, parts: int) -> None:
    """Each kernel's predicted time, how busy its pipes are and what bounds it; then the pass, the keys in `parts`."""
    made = table("kernel", "ms", "TFLOP/s", "blocks/SM", "spread", "spills", right=("ms", "TFLOP/s", "spread"))
    for p in kernels:
        speed = f"{p.tflops:.1f}" if p.tflops else ""
        made.add_row(
            p.kernel, f"{p.seconds * 1e3:.3f}", speed, str(p.blocks_per_sm), f"{p.spread:.0%}", str(p.spills_in_loop)
        )  # fmt: skip
    print_lines(
        made,
        *(f"{p.kernel} pipes: {shares(p.pipes)}" for p in kernels if p.pipes),
        *(f"{p.kernel}: {p.bound_by}" for p in kernels),
        *(
            f"{p.kernel}: {p.tiles_skipped} of the {p.tiles} tiles of a head are skipped, no query in them sees a key"
            for p in kernels
            if p.tiles_skipped
        ),
        *([f"the keys are cut into {parts} parts"] if parts > 1 else []),
        f"predicted: {tflops:.1f} TFLOP/s on {gpu.key}, {_of_peak(tflops, kernels, gpu)}",
        how_sure(gpu, kernels=[p.kernel for p in kernels]),
    )


def _of_peak(tflops: float, kernels: Sequence[Prediction], gpu: Gpu) -> str:
    """By the fastest instructions that the kernels have."""
    if any(p.kernel in HOPPER for p in kernels):
        return f"{tflops / gpu.wgmma_tflops:.0%} of its wgmma peak"
    return f"{tflops / gpu.peak_tflops:.0%} of its mma.sync peak"


def cubin(prediction: CubinPrediction) -> None:
    """One launch of a kernel that is not ours."""
    from ..predict import error_of

    time = prediction.time
    facts = {
        "function": f"{prediction.function}, {prediction.target}",
        "ms": f"{time.seconds * 1e3:.4g}",
        "blocks/SM": str(time.blocks_per_sm),
        "waves": f"{time.waves:.2f}",
    }
    if time.pipes:
        facts |= {
            "TFLOP/s": f"{time.tflops:.1f}",
            "iterations of a block": f"{time.iterations:.1f}, {time.cycles_per_iteration:.0f} cycles each",
            "busy in the loop": shares(time.pipes),
            "spread over start phases": f"{time.spread:.0%}",
            "spills in the loop": str(time.spills_in_loop),
        }
    if prediction.rare_instructions:
        how = f"{prediction.rare_instructions} instructions, run in {prediction.rare_share:.0%} of the iterations"
        facts["behind a branch"] = f"{how}; --rare says otherwise"
    made = table("", "")
    made.show_header = False
    for name, value in {**facts, "bound by": time.bound_by}.items():
        made.add_row(name, value)
    known, gpu = prediction.mean_error, find_gpu(prediction.gpu)
    believed = "by products and other work, often too fast" if known is None else f"mean error {known:.0%}"
    if error_of(gpu) is None:
        believed = never_compared(gpu)
    print_lines(made, f"predicted for {prediction.gpu} by {prediction.by}: {believed}")


def shares(pipes: Mapping[str, float]) -> str:
    """How busy each pipe is, busiest first.

    >>> shares({"shared": 0.61, "tensor": 0.92})
    'tensor 92%, shared 61%'
    """
    return ", ".join(f"{name} {pipes[name]:.0%}" for name in sorted(pipes, key=lambda name: -pipes[name]))

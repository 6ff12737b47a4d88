"""Predict the time of anybody's kernel: a cubin, one launch and a Gpu -> CubinPrediction. No GPU is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .errors import CannotPredict, UsageError
from .predict import MODEL, board_of, error_of
from .sass import BadCubin, DoesNotFit, Function, KernelTime, Listing, SassError, Work, disassemble, predict_time
from .spec.gpu import Gpu

WARP = 32
MAX_THREADS = 1024  # of a block
TEGRA = frozenset({87})  # parts that run nothing built for another sm, and whose code no other part runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch. What the code does not say of itself: how much there is to do."""

    blocks: int
    threads: int  # of a block
    smem_bytes: int = 0  # dynamic shared memory of a block
    tensor_flops: float = 0.0  # that the tensor cores execute in the whole launch, masked parts of tiles included
    hbm_bytes: float | None = None  # read and written once; times a kernel that has no tensor instructions
    rare_share: float = 1.0  # share of iterations that run what is behind a branch in the loop: masks, rescue code

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.smem_bytes < 0 or self.tensor_flops < 0 or (self.hbm_bytes or 0) < 0:
            raise UsageError("a launch has one block or more, and no negative bytes or FLOPs.")
        if not 0 <= self.rare_share <= 1:
            raise UsageError(f"rare_share={self.rare_share}: a share is from 0 to 1.")
        if not 0 < self.threads <= MAX_THREADS or self.threads % WARP:
            raise UsageError(f"{self.threads} threads a block: must be a multiple of {WARP} up to {MAX_THREADS}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinPrediction:
    """The predicted time of one launch of one function."""

    kind: ClassVar[Literal["predicted"]] = "predicted"
    function: str
    target: str  # what it is built for: "sm_80", "sm_90a"
    gpu: str
    time: KernelTime
    rare_instructions: int  # of an iteration, behind a branch: what Launch.rare_share is about
    rare_share: float
    mean_error: float | None  # of the model; None for what was compared with too little to say
    by: str = MODEL


def predict_cubin(cubin: bytes, launch: Launch, gpu: Gpu, name: str | None = None) -> CubinPrediction:
    """The time of one launch of function `name`, by default the only one, on `gpu`.

    Raises UsageError for bytes that are no cubin, for a function or GPU that does not go with it, and for work that is
    missing; CannotPredict for machine code that the model does not know.
    """
    try:
        listing = disassemble(cubin)
        why_not = _why_not_run(listing, gpu)
        if why_not:
            raise UsageError(why_not)
        function = _pick(listing, name)
        _need_work(function, launch)
        work = Work(
            blocks=launch.blocks, warps=launch.threads // WARP, dynamic_smem_bytes=launch.smem_bytes,
            tensor_flops=launch.tensor_flops, hbm_bytes=launch.hbm_bytes, rare_share=launch.rare_share,
        )  # fmt: skip
        time = predict_time(function, board_of(gpu), work)
    except (BadCubin, DoesNotFit) as error:
        raise UsageError(str(error)) from error
    except SassError as error:
        raise CannotPredict(str(error)) from error
    return CubinPrediction(
        function=function.name, target=listing.target, gpu=gpu.key, time=time, rare_share=launch.rare_share,
        rare_instructions=max(0, len(function.trace.loop) - len(function.short_trace.loop)),
        mean_error=None if function.trace.uses_warpgroups else error_of(gpu),
    )  # fmt: skip


def _why_not_run(listing: Listing, gpu: Gpu) -> str | None:
    """CUDA's rules of binary compatibility: the same major, no lower minor; an `a` build on its own sm only."""
    built = f"the cubin is built for {listing.target}, and {gpu.key} is sm_{gpu.sm}"
    if listing.sm == gpu.sm:
        return None
    if listing.variant or TEGRA & {listing.sm, gpu.sm}:
        return f"{built}: such code runs on its own sm only. Build it for sm_{gpu.sm}."
    if listing.sm // 10 != gpu.sm // 10 or listing.sm > gpu.sm:
        return f"{built}: machine code runs on the same major version, from its own minor on. Build it for sm_{gpu.sm}."
    return None


def _pick(listing: Listing, name: str | None) -> Function:
    names = list(listing.functions)
    if name is None and len(names) == 1:
        return listing.functions[names[0]]
    if name in listing.functions:
        return listing.functions[name]
    asked = f"the cubin has no function {name}" if name else "the cubin has several functions"
    raise UsageError(f"{asked}: name one with --function: {', '.join(names)}.")


def _need_work(function: Function, launch: Launch) -> None:
    if function.trace.uses_tensor_cores and not launch.tensor_flops:
        raise UsageError(
            f"{function.name} computes on tensor cores, and its FLOPs say how often its loop runs: give --flops, "
            "those of the whole launch."
        )
    if not function.trace.uses_tensor_cores and not launch.hbm_bytes:
        raise UsageError(
            f"{function.name} has no tensor instructions, and is timed by the bytes it moves: give --hbm-bytes, "
            "those of the whole launch."
        )

"""Time attention beside PyTorch's own kernels, or predict ours."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..errors import UnknownGpu, UsageError
from ..spec.gpu import Gpu, present_gpu, served_gpu
from ..spec.problem import Pass
from . import show_bench
from .app import app
from .options import CausalOption, DimOption, DtypeOption, GpuOption, JsonOption, Passes
from .output import print_json

if TYPE_CHECKING:
    from ..bench import Row


@app.command()
def bench(
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    which: Annotated[Passes, typer.Option("--pass", help="What to time.")] = Passes.both,
    lengths: Annotated[str, typer.Option("--n", help="Lengths: 512,1024,...")] = "512,1024,2048,4096,8192,16384",
    flex: Annotated[bool, typer.Option("--flex", help="FlexAttention too; it compiles at each length.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it: a .png or .svg file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """TFLOP/s by length at 16k tokens, Hq d = 2048: measured on the GPU that is here, predicted for one that is not."""
    from ..bench import problems

    target = served_gpu(gpu)
    asked = problems(cast(Any, dtype), d, causal, _lengths(lengths))
    passes: tuple[Pass, ...] = ("forward", "backward") if which is Passes.both else (which.value,)
    if plot is not None:
        from .plot import check_plot, draw

        check_plot(plot)
    rows = _measured(asked, passes, target, flex) if _is_here(target) else _predicted(asked, passes, target)
    if plot is not None:
        draw(rows, target, plot)
    if as_json:
        print_json({"gpu": target.key, "rows": [asdict(row) for row in rows]})
    else:
        show_bench.rows(rows, target)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--n {text}: whole numbers with commas between them, as in 512,1024.") from error
    if min(lengths) < 1:
        raise UsageError(f"--n {text}: a length is 1 or more.")
    return lengths


def _is_here(gpu: Gpu) -> bool:
    try:
        return present_gpu() is gpu
    except UnknownGpu:
        return False


def _predicted(asked: Any, passes: tuple[Pass, ...], gpu: Gpu) -> list[Row]:
    from ..bench import bench_predicted

    return list(bench_predicted(asked, passes, gpu))


def _measured(asked: Any, passes: tuple[Pass, ...], gpu: Gpu, flex: bool) -> list[Row]:
    from ..backends import FLEX, backends
    from ..bench import bench_measured
    from ..engines.clock import CudaClock
    from ..engines.cuda import cuda_engine

    engine = cuda_engine()
    clock = CudaClock(engine, int(gpu.l2_mb * 2**20))
    served = {name: attend for name, attend in backends().items() if flex or name != FLEX}
    return list(bench_measured(asked, passes, gpu, clock, served, str(engine.driver.memory)))

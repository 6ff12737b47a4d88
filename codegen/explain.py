"""Explain why a kernel serves: what was looked into, the tiles that it stands beside, and what bounds each of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .compile import compile_source
from .errors import CompileError, RenderError
from .forms import Choice, pass_of
from .load import UNTUNED, Loaded, ladder, load_best, pass_form
from .lookup import Step
from .predict import NOISE, Prediction, predict
from .render import render
from .sass import SassError
from .spec.defaults import default_tile
from .spec.gpu import Gpu
from .spec.kernel import KernelName, KernelSpec
from .spec.limits import why_illegal
from .spec.problem import Problem
from .spec.record import Record
from .spec.search import Search
from .spec.tile import Tile

Role = Literal["served", "runner-up", "default"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A tile, what the record says of its time, and what the model says of it now."""

    roles: tuple[Role, ...]
    tile: Tile
    recorded_ms: float | None  # for the record's lengths, of its kind of evidence; None if it has none
    prediction: Prediction | None  # for the lengths asked for
    failure: str = ""  # why there is no prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a kernel serves a problem on a GPU."""

    kernel: KernelName
    looked: tuple[Step, ...]  # into which files, in order; none for a kernel that is not tuned
    loaded: Loaded
    contenders: tuple[Contender, ...]  # what serves comes first
    form: Choice  # of the pass that the kernel is of

    @property
    def record(self) -> Record | None:
        """The record of this kernel that serves, if one does: convert takes its tile from a record of fused."""
        record = self.loaded.record
        return record if record and record.kernel == self.kernel else None

    @property
    def search(self) -> Search | None:
        """What the record keeps of its search."""
        return self.record.search if self.record else None

    def against_served(self) -> dict[Role, float]:
        """Of each other tile, its predicted time over that of what serves, less 1; 0 where that is noise."""
        served = self.contenders[0].prediction
        ratios = {
            contender.roles[0]: contender.prediction.seconds / served.seconds - 1
            for contender in self.contenders[1:]
            if contender.prediction and served
        }
        return {role: 0.0 if abs(ratio) < NOISE else ratio for role, ratio in ratios.items()}


def explain(problem: Problem, kernel: KernelName, gpu: Gpu, folder: Path | None = None) -> Explanation:
    """Why `kernel` serves `problem` on `gpu` as it does. Compiles each tile that it names.

    Raises BadProblem; NoTunedKernel as load_best does.
    """
    loaded = load_best(problem, kernel, gpu, folder)
    form = pass_form(problem, pass_of(kernel), gpu, folder=folder)
    return Explanation(
        kernel=kernel,
        looked=() if kernel in UNTUNED else tuple(ladder(problem, kernel, gpu, folder)),
        loaded=loaded,
        contenders=_contenders(loaded, problem, gpu, form.parts),
        form=form,
    )


def _contenders(loaded: Loaded, problem: Problem, gpu: Gpu, parts: int) -> tuple[Contender, ...]:
    """What serves, the runner-up, the default: each tile once, with all that it is."""
    kernel, record = loaded.spec.kernel, loaded.record
    known: list[tuple[Role, Tile, float | None]]
    if record is not None and record.kernel != kernel:  # convert, whose tile is fused's or reads what nobody wrote
        known = [("served", loaded.tile, None)]
    else:
        default, search = default_tile(kernel, problem, gpu), record.search if record else None
        then = search.default if search and search.default and search.default.tile == default else None
        known = [("served", loaded.tile, record.evidence.time_ms if record else None)]
        known += [("runner-up", search.runner_up.tile, search.runner_up.time_ms)] if search and search.runner_up else []
        known += [("default", default, then.time_ms if then else None)]
    roles: dict[Tile, list[Role]] = {}
    times: dict[Tile, float | None] = {}
    for role, tile, ms in known:
        roles.setdefault(tile, []).append(role)
        times[tile] = times.get(tile) or ms
    return tuple(
        _contender(tuple(roles[tile]), KernelSpec.of(kernel, problem, tile, gpu.sm), times[tile], problem, gpu, parts)
        for tile in roles
    )  # fmt: skip


def _contender(
    roles: tuple[Role, ...], spec: KernelSpec, recorded_ms: float | None, problem: Problem, gpu: Gpu, parts: int
) -> Contender:
    prediction, failure = None, why_illegal(spec, gpu) or ""
    if not failure:
        try:
            prediction = predict(compile_source(render(spec)), problem, gpu, parts=parts)
        except (RenderError, CompileError, SassError) as error:
            failure = f"{type(error).__name__}: {error}"
    return Contender(
        roles=roles, tile=spec.tile, recorded_ms=recorded_ms, prediction=prediction, failure=failure
    )  # fmt: skip

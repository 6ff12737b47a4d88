"""Search one kernel with several processes, by predicted or by measured time: Job -> Winner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from .choose import Winner, choose, search
from .errors import NothingFound, UsageError
from .judge import Judge
from .measuring.contention import device_identity, device_lock
from .measuring.process import Measurer
from .measuring.trial import on_device
from .objective import WORKERS, Candidate, Measured, Predicted
from .propose import Proposer
from .spec.gpu import Gpu
from .spec.kernel import KernelName, KernelSpec
from .spec.problem import Problem
from .spec.tile import Tile
from .study import Study, open_study
from .study.name import Kind
from .workers import Helpers, cores

FIRST = 8  # tiles that are measured first: the model's best

Verify = Callable[[KernelSpec], str]
Progress = Callable[[Candidate], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A search as each of its workers knows it. Raises UsageError for several workers without a storage to meet in."""

    kernel: KernelName
    problem: Problem
    gpu: Gpu
    trials: int
    seed: int = 0
    storage: str | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers}: a search needs at least 1.")
        if self.workers > 1 and self.storage is None:
            raise UsageError(f"--workers {self.workers}: several workers need a storage that all can open.")

    @property
    def processes(self) -> int:
        """Processes in which each worker compiles: of several, each has a share of the cores."""
        return WORKERS if self.workers == 1 else max(1, cores() // self.workers)

    @property
    def ahead(self) -> int:
        """Tiles that a worker asks for before it tells of the oldest."""
        return 2 * self.processes

    def study(self, kind: Kind) -> Study:
        """Where the workers meet."""
        return open_study(self.storage, self.kernel, self.problem, self.gpu, kind)

    def proposer(self, first: Sequence[Tile] = (), *, measured: bool = False) -> Proposer:
        """What each of them would try next."""
        return Proposer(self.kernel, self.problem, self.gpu, seed=self.seed, first=first, measured=measured)


def search_predicted(job: Job, *, verify: Verify, progress: Progress) -> Winner:
    """The winner by the model's times. Raises NothingFound, StorageLost."""
    with job.study("predicted") as study:
        return _predicted(job, study, verify, progress)


def _predicted(job: Job, study: Study, verify: Verify, progress: Progress) -> Winner:
    helpers = 0 if study.done(job.trials) else job.workers - 1
    with Helpers(helpers, partial(_help_to_predict, job)):
        return choose(
            job.kernel, job.problem, job.gpu, trials=job.trials, seed=job.seed, study=study, ahead=job.ahead,
            objective=partial(Predicted, job.kernel, job.problem, job.gpu, processes=job.processes),
            verify=verify, progress=progress,
        )  # fmt: skip


def _help_to_predict(job: Job, number: int) -> None:
    objective = Predicted(job.kernel, job.problem, job.gpu, processes=job.processes)
    with job.study("predicted") as study, closing(objective) as timed:
        search(study, job.proposer(), timed, trials=job.trials, ahead=job.ahead)


def search_measured(job: Job, devices: Sequence[int], *, verify: Verify, progress: Progress) -> Winner:
    """The winner by the times of the GPUs `devices`, of which each worker has one.

    The model orders the tiles first and turns down those that it is sure of; its times stay in a study of their own.
    Raises NothingFound, StorageLost, MeasuringBroken; UsageError if a GPU is in use, or for more workers than GPUs.
    """
    if job.workers > len(devices):
        raise UsageError(f"--workers {job.workers}: {len(devices)} {job.gpu.key} can measure here, for a worker each.")
    with (
        device_lock(device_identity(devices[0])),
        job.study("measured") as study,
        job.study("predicted") as model,
    ):
        done = study.done(job.trials)
        first = () if done else predicted_order(job, model)
        helpers = 0 if done else job.workers - 1
        with (
            Helpers(helpers, partial(_help_to_measure, job, tuple(devices), tuple(first))),
            _measured(job, devices[0], model) as timed,
        ):
            return choose(
                job.kernel, job.problem, job.gpu, trials=job.trials, seed=job.seed, first=first, measured=True,
                study=study, ahead=job.ahead, objective=lambda: timed, verify=verify, progress=progress,
            )  # fmt: skip


def _help_to_measure(job: Job, devices: Sequence[int], first: Sequence[Tile], number: int) -> None:
    device = devices[number]
    with (
        device_lock(device_identity(device)),
        job.study("measured") as study,
        job.study("predicted") as model,
        _measured(job, device, model) as timed,
    ):
        search(study, job.proposer(first, measured=True), timed, trials=job.trials, ahead=job.ahead)


@contextmanager
def _measured(job: Job, device: int, model: Study) -> Iterator[Measured]:
    with Measurer(partial(on_device, job.kernel, job.problem, job.gpu, device)) as measurer:
        yield Measured(
            job.kernel, job.problem, job.gpu, measurer, processes=job.processes, judge=Judge(model)
        )  # fmt: skip


def predicted_order(job: Job, model: Study, count: int = FIRST) -> Sequence[Tile]:
    """The tiles that the model would try first, from a search of half as many trials."""
    job = replace(job, trials=job.trials // 2)
    if job.trials < 1:
        return ()
    try:
        winner = _predicted(job, model, verify=lambda spec: "", progress=lambda candidate: None)
    except NothingFound:
        return ()
    of_search = winner.candidates[: job.trials]  # behind them may stand tiles that the GPU's search asked about
    timed = [(c.time.seconds, n, c.tile) for n, c in enumerate(of_search) if c.time is not None]
    return [tile for _, _, tile in sorted(timed)[:count]]

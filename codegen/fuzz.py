"""Draw random problems with random tiles and check them: a number -> Case -> Verdict, the same for the same number."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, replace
from functools import partial

from .check import Verdict, check
from .compile import compile_source
from .engines.emulated import EmulatedEngine
from .errors import BadProblem, LowerRung, NoTunedKernel
from .forms import KERNELS_OF, Form, pass_of, timed_kernels
from .inputs import make_inputs
from .load import load_best
from .render import render
from .score_mod import ALIBI, BIAS, softcap
from .spec.defaults import default_tile
from .spec.features import ScoreMod, TableDtype
from .spec.gpu import Gpu, find_gpu
from .spec.kernel import CONVERTS, SPLIT90_WIDE, KernelName, KernelSpec, split90
from .spec.limits import why_illegal, why_no_dtype
from .spec.problem import Pass, Problem
from .spec.space import choices, tile_of
from .spec.tile import Tile, tile_text

GPUS = ("a100", "rtx4090", "h100-sxm", "t4")  # a text of its own for each
DIMS = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256)  # small ones first, and more often
LENGTHS = (0, 1, 2, 7, 16, 17, 33, 63, 64, 65, 100, 127, 129, 190, 257)
FORMULAS = (
    ALIBI, BIAS, softcap(3), "3.0 * tanh((score + bias[h, i - j + 300]) / 3.0)",
    "score * exp(-0.01 * abs(i - j)) + w[j]",
    "score if i // 16 == j // 16 or j < 3 else -inf", "score + row[b, i] * column[h, j]", "score * gain[h]",
)  # fmt: skip
TRIES = 200  # at a legal tile, before the default is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One random check."""

    seed: int
    problem: Problem
    which: Pass
    gpu: Gpu
    kernels: tuple[KernelName, ...]
    kernel: KernelName  # the one whose tile was drawn; the others have those that load serves
    tile: Tile

    @property
    def command(self) -> str:
        """The line that repeats it."""
        p = self.problem
        sizes = f"--nq {p.Nq} --nk {p.keys} --heads {p.Hq} --kv-heads {p.kv_heads} --batch {p.B}"
        sizes += f" --scale {p.scale}" if p.scale is not None else ""
        return (
            f"flashsmith check {self.which} --gpu {self.gpu.key} {p.options} {sizes} --kernel {self.kernel} "
            f"--tile {tile_text(self.tile)} --seed {self.seed}"
        )


def draw(seed: int) -> Case:
    """The case of a number: every feature in every combination that is served."""
    rng = random.Random(seed)
    while True:
        problem, gpu = _problem(rng), find_gpu(rng.choice(GPUS))
        if why_no_dtype(problem.dtype, gpu):
            problem = replace(problem, dtype="fp16")
        kernels, kernel = _kernels(rng, problem, gpu)
        try:
            problem = _served(kernels, problem, gpu)
        except NoTunedKernel:
            continue  # nothing fits: the next one
        tile = _tile(rng, kernel, problem, gpu)
        return Case(
            seed=seed, problem=problem, which=pass_of(kernel), gpu=gpu, kernels=kernels, kernel=kernel, tile=tile
        )  # fmt: skip


def run(case: Case) -> Verdict:
    """Check it on the emulator, whose fresh memory is NaN, with the race detector on. Raises what a launch raises."""
    specs = {name: _spec(case, name) for name in case.kernels}
    binaries = {name: compile_source(render(spec)) for name, spec in specs.items()}
    engine = EmulatedEngine(check_races=True)
    return check(case.problem, case.which, binaries, engine, make_inputs(case.problem, case.seed))


def _spec(case: Case, name: KernelName) -> KernelSpec:
    if case.kernel in (name, CONVERTS.get(name)):
        return KernelSpec.of(name, case.problem, case.tile, case.gpu.sm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowerRung)  # of problems such as these no record is expected
        return load_best(case.problem, name, case.gpu).spec


def _kernels(rng: random.Random, problem: Problem, gpu: Gpu) -> tuple[tuple[KernelName, ...], KernelName]:
    """The launches of a pass, and the one that gets a tile of its own."""
    forms: list[Form] = ["whole", "fused", "split"]
    if gpu.sm == 90:
        forms += ["whole90", "fused90", "split90"]
    form = rng.choice(forms)
    if form == "split90" and split90(problem) == SPLIT90_WIDE:
        form = "split90_wide"
    return KERNELS_OF[form], rng.choice(timed_kernels(form))


def _served(kernels: tuple[KernelName, ...], problem: Problem, gpu: Gpu) -> Problem:
    """The problem; plain and in 16 bits if the kernels have not what it asks for. Raises NoTunedKernel."""
    try:
        for name in kernels:
            default_tile(name, problem, gpu)
    except BadProblem:
        problem = replace(problem.plain, dtype="bf16" if problem.dtype == "fp32" else problem.dtype)
        for name in kernels:
            default_tile(name, problem, gpu)
    return problem


def _tile(rng: random.Random, kernel: KernelName, problem: Problem, gpu: Gpu) -> Tile:
    allowed = choices(kernel, problem, gpu, measured=True)
    for _ in range(TRIES):
        tile = tile_of(kernel, {name: rng.choice(list(values)) for name, values in allowed.items()})
        if why_illegal(KernelSpec.of(kernel, problem, tile, gpu.sm), gpu) is None:
            return tile
    return default_tile(kernel, problem, gpu)


def _problem(rng: random.Random) -> Problem:
    often = partial(rng.choices, k=1)
    d = often(DIMS, weights=[1 / (n + 3) for n in range(len(DIMS))])[0]
    Hk, group = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
    lengths = often(("uniform", "padded", "packed"), weights=(3, 1, 1))[0]
    return Problem(
        dtype=rng.choice(("bf16", "bf16", "fp16", "fp16", "fp32")), d=d,
        dv=rng.choice(DIMS[:14]) if rng.random() < 0.2 else None,
        B=rng.choice((1, 2)) if lengths == "uniform" else rng.choice((2, 3, 4)), Hq=Hk * group, Hk=Hk,
        Nq=rng.choice(LENGTHS), Nk=rng.choice(LENGTHS), causal=rng.random() < 0.4,
        window=(rng.choice((None, None, 0, 5, 40, 130)), rng.choice((None, None, 1, 9, 70))),
        anchor=rng.choice(("bottom-right", "bottom-right", "top-left")), lengths=lengths,  # type: ignore[arg-type]
        score_mod=_score_mod(rng), sinks=rng.random() < 0.2, dropout=rng.choice((0.0, 0.0, 0.0, 0.1, 0.5)),
        scale=rng.choice((None, None, 0.3)),
    )  # fmt: skip


def _score_mod(rng: random.Random) -> ScoreMod | None:
    if rng.random() < 0.55:
        return None
    dtypes: tuple[TableDtype, ...] = ("fp32", "fp32", "fp16", "bf16")
    return ScoreMod.of(rng.choice(FORMULAS), lambda name: {"dtype": rng.choice(dtypes), "grad": rng.random() < 0.5})

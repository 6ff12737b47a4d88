"""What makes a time: warm-up, samples, quantiles, and the floor below which none is believed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from flashsmith.compile import Binary, compile_source
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.engines.engine import Tensor
from flashsmith.errors import FlashsmithError, ImpossibleTime, LaunchError, Rejected, WrongResult
from flashsmith.measure import FEWEST, MOST, WARM_UP_S, Again, Try, floor_seconds, sample, timing_of
from flashsmith.measuring import trial
from flashsmith.measuring.trial import Bench, timed_tensors
from flashsmith.objective import Measured
from flashsmith.render import Source, render
from flashsmith.run import NOTHING
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import ForwardTile, KeyBlockTile, Tile, WarpgroupTile

from .features import FEATURES

GPU = find_gpu("a100")
LARGE = Problem(dtype="bf16", d=128, causal=True, B=2)
SMALL = Problem(dtype="bf16", d=64, causal=True, Hq=2, Hk=1, Nq=70, Nk=90)


def spec_of(problem: Problem, kernel: KernelName = "forward") -> KernelSpec:
    return KernelSpec.of(kernel, problem, default_tile(kernel, problem, GPU), GPU.sm)


class FakeClock:
    """Launches once a call, and says how long that took."""

    def __init__(self, *times: float) -> None:
        self.times = cycle(times or (1e-3,))
        self.counts: list[int] = []
        self.cleared = 0

    def seconds(self, launch: Callable[[], None], count: int) -> list[float]:
        self.counts.append(count)
        launch()
        return [next(self.times) for _ in range(count)]

    def clear(self, tensor: Tensor) -> None:
        self.cleared += 1


@pytest.mark.parametrize(("each", "count"), [(1e-5, MOST), (5e-3, 50), (1.0, FEWEST)])
def test_samples_fill_a_budget_after_a_warm_up(each: float, count: int) -> None:
    clock = FakeClock(each)
    assert sample(lambda: None, clock) == [each] * count
    assert clock.counts[-1] == count and set(clock.counts[:-1]) == {3}
    assert sum(clock.counts[:-1]) * each >= WARM_UP_S or len(clock.counts) == MOST + 1
    assert len(sample(lambda: None, clock, count=7)) == 7


@pytest.mark.parametrize("each", [0.0, -1.0, float("nan")])
def test_a_clock_that_stands_still_is_found_out(each: float) -> None:
    with pytest.raises(ImpossibleTime, match="nothing ran"):
        sample(lambda: None, FakeClock(each))


def test_median_and_quantiles() -> None:
    """One lucky sample and one unlucky one move neither."""
    seconds = [1e-2, *(2e-2 + 1e-5 * n for n in range(99)), 5.0]
    timing = timing_of(spec_of(LARGE), LARGE, GPU, seconds, by="a test")
    assert timing.seconds == pytest.approx(2.049e-2)
    assert (timing.low, timing.high) == (pytest.approx(2.019e-2), pytest.approx(2.079e-2))
    assert timing.spread == pytest.approx(0.6 / 20.49, rel=1e-3) and timing.samples == 101
    assert timing.tflops == pytest.approx(LARGE.flops("forward") / 2.049e-2 / 1e12)


def test_no_time_below_the_floor_is_believed() -> None:
    """At twice the tensor peak, and no faster than the inputs arrive (BUG-30)."""
    floor = floor_seconds(spec_of(LARGE), LARGE, GPU)
    peak = LARGE.flops("forward") / (GPU.peak_tflops * 1e12)
    assert floor == pytest.approx(peak / 2, rel=1e-3)
    timing_of(spec_of(LARGE), LARGE, GPU, [1.01 * floor] * 9, by="a test")
    with pytest.raises(ImpossibleTime, match=r"no a100 does the work in less than"):
        timing_of(spec_of(LARGE), LARGE, GPU, [0.99 * floor] * 9, by="a test")
    one_row = replace(LARGE, Nq=1, causal=False)  # decoding: the memory bounds it
    moved = 2 * 2 * 2 * 16 * 8192 * 128 / (GPU.hbm_gbs * 1e9)
    assert floor_seconds(spec_of(one_row), one_row, GPU) == pytest.approx(moved / 2)
    assert floor_seconds(spec_of(LARGE, "dkdv"), LARGE, GPU) == pytest.approx(2 * floor)
    assert floor_seconds(spec_of(LARGE, "delta"), LARGE, GPU) == 0


def test_the_floor_of_warpgroups_is_that_of_wgmma() -> None:
    """Two thirds of the other kernels' on the same part: no wgmma that runs above the nominal clock is refused."""
    hopper = find_gpu("h200")
    spec = KernelSpec.of("forward90", LARGE, WarpgroupTile(Br=128, Bc=128), 90)
    floor = floor_seconds(spec, LARGE, hopper)
    assert floor == pytest.approx(floor_seconds(spec_of(LARGE), LARGE, hopper) * 2 / 3, rel=0.001)
    visible = LARGE.flops("forward") / (hopper.wgmma_tflops * 1e12)
    assert floor == pytest.approx(visible / 2, rel=0.001) and floor < visible * hopper.clock_ghz / 1.98


@pytest.mark.parametrize(("Nq", "Nk"), [(5, 5), (3, 8), (8, 3), (1, 9), (9, 1), (0, 4), (4, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_pairs_are_those_of_the_mask(Nq: int, Nk: int, causal: bool) -> None:
    i, j = np.mgrid[:Nq, :Nk]
    seen = (j <= i + Nk - Nq).sum() if causal else Nq * Nk
    assert replace(SMALL, causal=causal, Nq=Nq, Nk=Nk).visible_pairs() == seen


@cache
def compiled(kernel: KernelName, tile: Tile, old: str = "", new: str = "") -> Binary:
    """A kernel, with one piece of its text changed."""
    source = render(KernelSpec.of(kernel, SMALL, tile, GPU.sm))
    assert old in source.text
    return compile_source(Source(source.spec, source.text.replace(old, new)))


def bench(kernel: KernelName, clock: FakeClock) -> Bench:
    return Bench(kernel, SMALL, GPU, EmulatedEngine(), clock, EmulatedEngine, "the emulator")


@pytest.mark.parametrize("kernel", ["forward", "fused", "dkdv", "dq"])
def test_every_tuned_kernel_can_be_timed(kernel: KernelName) -> None:
    """It finds all the tensors of its signature, inside their bounds: the emulator would say if not."""
    clock = FakeClock(0.5)
    seconds = bench(kernel, clock)(Again(compiled(kernel, default_tile(kernel, SMALL, GPU)), 2))
    assert seconds == [0.5, 0.5]
    assert (clock.cleared > 0) is (kernel == "fused")  # its accumulator, for every launch


@pytest.mark.parametrize("kernel", ["forward90", "fused90", "dkdv90", "dq90"])
def test_kernels_of_warpgroups_can_be_timed(kernel: KernelName) -> None:
    """Their tensor maps are encoded once, and a launch has at most as many blocks as the GPU multiprocessors."""
    gpu, clock = find_gpu("h100-sxm"), FakeClock(0.5)
    timed = Bench(kernel, SMALL, gpu, EmulatedEngine(sms=1), clock, EmulatedEngine, "the emulator")
    spec = KernelSpec.of(kernel, SMALL, default_tile(kernel, SMALL, gpu), gpu.sm)
    assert timed(Again(compile_source(render(spec)), 2)) == [0.5, 0.5]
    assert (clock.cleared > 0) is (kernel == "fused90")


@pytest.mark.parametrize("kernel", ["forward", "fused", "dkdv", "dq"])
@pytest.mark.parametrize("feature", ["everything", "everything padded", "bias"])
def test_kernels_with_features_can_be_timed(feature: str, kernel: KernelName) -> None:
    problem = replace(SMALL, B=2, **FEATURES[feature])
    spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, GPU), GPU.sm)
    timed = Bench(kernel, problem, GPU, EmulatedEngine(), FakeClock(0.5), EmulatedEngine, "the emulator")
    assert timed(Again(compile_source(render(spec)), 1)) == [0.5]


def test_tensors_are_filled_with_different_numbers() -> None:
    engine = EmulatedEngine()
    tensors = timed_tensors("forward", SMALL, GPU, engine, NOTHING)
    q, k, v = (engine.read(tensors[name]) for name in "QKV")
    assert len(np.unique(q)) > 1000 and not np.array_equal(k, v) and not np.array_equal(q[0, 0], q[0, 1])


class Direct:
    """A measuring process that is none: the bench itself, on the emulator, with a time for each tile."""

    def __init__(self, kernel: KernelName, times: dict[Tile, float]) -> None:
        self.clock, self.times = FakeClock(), times
        self.bench = bench(kernel, self.clock)

    def ask(self, request: Try | Again) -> Any:
        self.clock.times = cycle([self.times[request.binary.spec.tile]])
        try:
            return self.bench(request)
        except FlashsmithError as error:
            raise Rejected(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        return None


class Now:
    """An executor that does it at once."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Any:
        value = work(*args)
        return type("Done", (), {"result": lambda self: value})()

    def close(self) -> None:
        return None


FORWARD = ForwardTile(Br=64, Bc=16, warps=4)
SPLIT = KeyBlockTile(Br=32, Bc=64, warps=4, row_split=2)
LIES = {  # the tile, its time in seconds, what is changed in its text, and why it is refused
    "honest": (FORWARD, 1.0, "", "", ""),
    "returns at once": (replace(FORWARD, Bc=32), 0.001, "const int kv_head =", "return; const int kv_head =",
                        "WrongResult: .*O is off by nan"),
    "half of O": (replace(FORWARD, Bc=48), 0.5, "chunk < d / 8) {", "chunk < d / 16) {",
                  "WrongResult: .*O is off by nan"),
    "no causal mask": (replace(FORWARD, Bc=64), 0.5, "const int room = last + row", "const int room = Bc + last + row",
                       "WrongResult: .*O is off by "),
    "impossible time": (replace(FORWARD, Bc=80), 1e-12, "", "", "ImpossibleTime: .*no a100 does the work"),
}  # fmt: skip


def test_a_kernel_that_cheats_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with its reason before it is timed; the honest one wins (BUG-30)."""
    monkeypatch.setattr(trial, "MORE_SHAPES", ((70, 90),))
    by_tile = {tile: (old, new) for tile, _, old, new, _ in LIES.values()}
    direct = Direct("forward", {tile: seconds for tile, seconds, *_ in LIES.values()})
    objective = Measured(
        "forward", SMALL, GPU, direct, pool=Now(),  # type: ignore[arg-type]
        builder=lambda spec: compiled("forward", spec.tile, *by_tile[spec.tile]),
    )  # fmt: skip
    candidates = {name: objective.submit(lie[0]).result() for name, lie in LIES.items()}
    ranked = objective.final(list(candidates.values()))
    assert [c.tile for c in ranked] == [FORWARD] and ranked[0].time and ranked[0].time.seconds == 1.0
    for name, (*_, reason) in LIES.items():
        if reason:
            assert candidates[name].time is None
            assert re.search(reason, candidates[name].failure), candidates[name].failure


def test_a_right_dv_does_not_excuse_a_wrong_dk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MORE_SHAPES", ((70, 90),))
    wrong = compiled("dkdv", SPLIT, "[e % 4] *= scale;", "[e % 4] *= 2 * scale;")
    with pytest.raises(WrongResult, match=r"Nq=70, Nk=90: dK is off by"):
        bench("dkdv", FakeClock(0.6))(Try(wrong))


def test_a_fault_that_shows_late_is_a_launch_error() -> None:
    """At the seventh launch, and as PyTorch's own RuntimeError (BUG-29)."""

    class Failing(FakeClock):
        def seconds(self, launch: Callable[[], None], count: int) -> list[float]:
            if len(self.counts) == 6:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
            return super().seconds(launch, count)

    with pytest.raises(LaunchError, match=r"forward_bf16.*an illegal memory access was encountered$"):
        bench("forward", Failing(1e-3))(Again(compiled("forward", FORWARD), 9))

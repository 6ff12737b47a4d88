"""Derive the timing model's constants from the microbenchmarks of a GPU day: python -m flashsmith.gpuday.constants.

Each derivation turns one benchmark round: the model says how long its loop takes, given the constant; here the constant
follows from how long it took. docs/microbenchmarks.md tells the physics.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import FlashsmithError, UsageError
from ..sass import SassError
from ..sass.issue import OPERANDS_READ, QUEUE_TO_PIPE
from ..sass.measured import FILE, Measured, write_measured
from ..sass.plan import LATER_PER_WAVEFRONT
from ..sass.rates import memory_path, pipe_rates
from ..spec.backward_shape import red_width
from ..spec.gpu import Gpu, identify
from .benchmarks import (
    BARRIERS,
    BESIDE,
    COPY_BYTES,
    LENGTHS,
    PIECES,
    SUB_PARTITIONS,
    TIMED_HMMA,
    WARPS,
)

HMMA_FLOPS = 4096  # of one m16n8k16 of a warp
WAVEFRONTS = 4  # of ldmatrix.x4, and of 16 bytes a lane: 512 bytes, 128 at a time
ALONE = 1  # sub-partition
DIGITS = 4  # that are kept
GREEDY_GAP = 0.25  # see rates.Lead: half way between taking turns, 0, and greedy, 1/2 or more

Place = Literal["path", "pipes", "board"]


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant of the model: what it was and what it is by measurement."""

    place: Place
    name: str
    fitted: float | bool
    measured: float | bool
    benchmark: str  # that settles it


class Findings:
    """The findings of a day's `rates`, by benchmark, warps and whether every SM took part."""

    def __init__(self, found: Sequence[Mapping[str, Any]]) -> None:
        self._found = {(f["benchmark"], f["warps"], f["sms"] > 1, f.get("data", "")): f for f in found}

    def get(self, benchmark: str, warps: int = WARPS, everywhere: bool = False, data: str = "") -> Mapping[str, Any]:
        """One finding. Raises UsageError if the report lacks it or says why it has no time."""
        found = self._found.get((benchmark, warps, everywhere, data), {})
        if "rate" not in found:
            why = found.get("failure") or "it has no such line"
            where = ("every SM" if everywhere else "one SM") + (f", {data} data" if data else "")
            raise UsageError(
                f"the constants need the benchmark {benchmark} at {warps} warps on {where}, and the report lacks it: "
                f"{why}. Run the part `rates` again."
            )
        return found

    def cycles(self, benchmark: str, warps: int = WARPS, everywhere: bool = False) -> float:
        """Of a step."""
        return float(self.get(benchmark, warps, everywhere)["cycles"])

    def slope(self, op: str, subpartitions: int = SUB_PARTITIONS) -> float:
        """Cycles that one more instruction of every warp adds to a step: what the loop itself costs cancels."""
        short, long = (self.cycles(f"pipe_{op}_{n}_{subpartitions}") for n in LENGTHS)
        return (long - short) / (LENGTHS[1] - LENGTHS[0])


def derive(found: Sequence[Mapping[str, Any]], gpu: Gpu) -> tuple[Constant, ...]:
    """Every constant that the findings settle. Raises UsageError if one of the benchmarks is missing.

    Not settled, and left as they are: the depth of the memory queue, the backlog of reductions, the latencies of S2R
    and of refills.
    """
    at = Findings(found)
    pipes = _pipes(at)
    settled: dict[Place, Settled] = {"path": _path(at, gpu, pipes["special"][0]), "pipes": pipes, "board": _board(at)}
    return tuple(
        Constant(place, name, _fitted(place, name, gpu), value if isinstance(value, bool) else _rounded(value), source)
        for place, values in settled.items()
        for name, (value, source) in values.items()
    )


Settled = dict[str, tuple[float, str]]


def _pipes(at: Findings) -> Settled:
    """With four warps a sub-partition its pipe never waits for one: the slope is what an instruction holds it for."""
    warps = WARPS / SUB_PARTITIONS
    ops = (("fma", "FFMA"), ("alu", "FMNMX"), ("convert", "F2FP"), ("special", "MUFU"))
    return {name: (at.slope(op) / warps, f"pipe_{op}") for name, op in ops}


def _path(at: Findings, gpu: Gpu, special: float) -> Settled:
    """The memory path of the SM.

    wavefront_cycles: sixteen warps keep the one shared-memory pipe full, so an ldmatrix.x4 holds it for its share of
    the time, a quarter of it for each of its 128 bytes. request_cycles: the same for a load of a single wavefront.
    address_cycles: four warps of one sub-partition alone; whatever their pace is beyond the pipe's own is its address
    unit's. (If it is the pipe's own the unit is no slower, and which of them it is makes no difference.)

    fill_share: a copy beside twelve ldmatrix is limited by shared memory and not by L2; what the copies add to the time
    of the ldmatrix, beyond the wavefronts of a request, is the writing of their data. shared_latency: of a chain of
    loads, less the way to the pipe. special_latency: of a chain of MUFU, less the pipe's own cycles.

    reduction_bytes_per_clock: every SM adds at once, by the width that the kernels of this architecture use.
    barrier_cycles: four warps, one a sub-partition, arrive together, so that nothing but the barrier is waited for.
    greedy: two warps with nothing but products to issue; a scheduler that takes turns keeps them together.
    """
    width = red_width(gpu.sm)
    wavefront = at.get("tensor_0_8")["rate"] / WAVEFRONTS
    request = at.slope("LDS") / WARPS
    quiet, _, busy = (f"copy_{copies}_48_{groups}" for copies, groups in BESIDE)
    copied = (at.cycles(busy) - at.cycles(quiet)) / (PIECES * WARPS)
    fill = (copied - at.get(quiet)["rate"]) / WAVEFRONTS
    way = QUEUE_TO_PIPE + max(wavefront, request) - OPERANDS_READ + LATER_PER_WAVEFRONT["LDS"]
    return {
        "wavefront_cycles": (wavefront, "tensor_0_8, 16 warps"),
        "request_cycles": (request, "pipe_LDS, 16 warps"),
        "address_cycles": (at.slope("LDS", ALONE) / (WARPS / SUB_PARTITIONS), "pipe_LDS, one sub-partition"),
        "fill_share": (max(0.0, fill), f"{busy} against {quiet}"),
        "shared_latency": (at.get("chain_LDS", 1)["rate"] - way, "chain_LDS"),
        "special_latency": (at.get("chain_MUFU", 1)["rate"] - special, "chain_MUFU"),
        "reduction_bytes_per_clock": (at.get(f"reduce_{width}", everywhere=True)["rate"], f"reduce_{width}, every SM"),
        "barrier_cycles": (at.get(f"barrier_{BARRIERS}", 4)["rate"], f"barrier_{BARRIERS}, 4 warps"),
        "greedy": (at.get(f"policy_{TIMED_HMMA}", 8)["gap"] > GREEDY_GAP, f"policy_{TIMED_HMMA}"),
    }


def _board(at: Findings) -> Settled:
    """What belongs to the part.

    tensor_flops_per_clock_sm: four warps a sub-partition, each with sixteen products that wait for none of the others.
    l2_bytes_per_clock_sm: cp.async of every SM at once, two groups of each warp in flight. l2_latency: a single copy at
    a time, less the way to the pipe and the time of its bytes. clock_ghz: random data under load; zeros cost less power
    than attention does.
    """
    interval = at.get("tensor_16_0")["rate"]
    l2 = at.get("copy_4_0_2", everywhere=True)["rate"]
    trip = at.get("chain_LDGSTS", 1)["rate"]
    return {
        "tensor_flops_per_clock_sm": (SUB_PARTITIONS * HMMA_FLOPS / interval, "tensor_16_0, 16 warps"),
        "l2_bytes_per_clock_sm": (l2, "copy_4_0_2, every SM"),
        "l2_latency": (trip - QUEUE_TO_PIPE - COPY_BYTES / l2, "chain_LDGSTS"),
        "clock_ghz": (float(at.get("clock", everywhere=True, data="random")["rate"]), "clock, random data"),
    }


def _fitted(place: Place, name: str, gpu: Gpu) -> float | bool:
    """The constant that serves while nothing is measured."""
    if place == "board":
        names = {"tensor_flops_per_clock_sm": "tensor_flops_clk", "l2_bytes_per_clock_sm": "l2_bytes_clk"}
        return float(getattr(gpu, names.get(name, name)))
    value: float | bool = getattr(memory_path(gpu.sm) if place == "path" else pipe_rates(gpu.sm), name)
    return value


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def measured_of(state: Mapping[str, Any]) -> tuple[Measured, tuple[Constant, ...]]:
    """The entry of the GPU of a day's report, and its constants one by one.

    Raises UnknownGpu for a GPU that the table does not hold, UsageError for a report without its microbenchmarks.
    """
    parts = state.get("parts") or {}
    machine, found = ((parts.get(name) or {}).get("found") for name in ("environment", "rates"))
    if not isinstance(machine, dict) or not isinstance(found, list):
        raise UsageError("the report lacks the part `environment` or `rates`. Run `make gpu` on the GPU first.")
    gpu = identify(machine["gpu"], sms=machine["sms"], sm=machine["sm"])
    constants = derive(found, gpu)

    def of(place: Place) -> dict[str, Any]:
        return {c.name: c.measured for c in constants if c.place == place}

    entry = Measured(
        gpu=gpu.key, sm=gpu.sm, date=str(machine["when"])[:10],
        driver=str((machine.get("nvidia_smi") or {}).get("driver_version", "")), path=of("path"), pipes=of("pipes"),
        board=of("board"),
    )  # fmt: skip
    return entry, constants


def main(arguments: list[str] | None = None) -> int:
    """Print each constant and write the file. Exit status 0; 2, and why on stderr, if the report does not serve."""
    parser = argparse.ArgumentParser(prog="flashsmith.gpuday.constants", description="Constants that a GPU measured.")
    parser.add_argument("report", type=Path, help="report.json of a GPU day")
    parser.add_argument("--to", type=Path, default=FILE, help="the file that the model reads, by default")
    asked = parser.parse_args(arguments)
    try:
        entry, constants = measured_of(_read(asked.report))
        write_measured(asked.to, entry)
    except (FlashsmithError, SassError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{entry.gpu}, sm_{entry.sm}, {entry.date}, driver {entry.driver}")
    for c in constants:
        print(f"{c.name:26} fitted {_shown(c.fitted):>8}  measured {_shown(c.measured):>8}  by {c.benchmark}")
    print(asked.to)
    return 0


def _read(report: Path) -> dict[str, Any]:
    try:
        state = json.loads(report.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{report} cannot be read: {error}. It should be the report.json of a GPU day.") from error
    if not isinstance(state, dict):
        raise UsageError(f"{report} is no report of a GPU day.")
    return state


def _shown(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.{DIGITS}g}"


if __name__ == "__main__":
    sys.exit(main())

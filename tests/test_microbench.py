"""Microbenchmarks without a GPU: loops hold what they time, and the derivation of constants turns the model round.

A device whose clocks are those of the issue model stands in for a GPU. Whatever constants that model is given, the
microbenchmarks and the derivation must find.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashsmith import predict
from flashsmith.compile import compile_text, options_for
from flashsmith.emulator import GlobalMemory, Kernel, launch, parse
from flashsmith.errors import UsageError
from flashsmith.gpuday import benchmarks, constants, rates, work
from flashsmith.gpuday.benchmarks import Benchmark, kernels, text, timed_loop, unrolled
from flashsmith.gpuday.constants import derive, measured_of
from flashsmith.gpuday.report import markdown
from flashsmith.sass import BadConstants, Board, Listing, as_measured, constants_version, disassemble, measured
from flashsmith.sass.measured import Measured, read_measured, with_constants, write_measured
from flashsmith.sass.rates import MEMORY_PATH, MemoryPath, memory_path, pipe_rates
from flashsmith.spec.gpu import GPUS

from tests.modelled_device import ModelledDevice
from tests.sass.cuda import compile_scores

SMS = (80, 86, 89, 90, 100, 120)
ONE = 0x3F803F80  # two bf16 ones


@cache
def listing(cubin: bytes) -> Listing:
    return disassemble(cubin)


@cache
def compiled(key: str, cuda: str, sm: int, options: tuple[str, ...]) -> tuple[bytes, str, Any]:
    return compile_text(key, cuda, sm, options)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each text is compiled and listed once; loops of 4096 instructions are left to one test; no measured constants."""
    monkeypatch.setattr(benchmarks, "FETCHED", (256,))
    monkeypatch.setattr(rates, "compile_text", compiled)
    monkeypatch.setattr(rates, "disassemble", listing)
    monkeypatch.setattr("tests.modelled_device.disassemble", listing)
    monkeypatch.setattr(measured, "FILE", tmp_path / "measured.json")


def functions(sm: int) -> dict[str, Any]:
    return listing(compiled("microbench", text(sm), sm, options_for(sm))[0]).functions


@pytest.mark.parametrize("sm", SMS)
def test_loops_hold_what_they_time(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many HMMA, LDSM and so on a step, and nothing else of a scarce pipe: ptxas deletes and merges what it can."""
    if sm == 90:
        monkeypatch.setattr(benchmarks, "FETCHED", (256, 8192))
    found = functions(sm)
    assert set(found) == {k.name for k in kernels(sm)} and ("reduce_4" in found) == (sm >= 90)
    for kernel in kernels(sm):
        assert unrolled(kernel, found[kernel.name]) in (1, 4), kernel.name
        assert not found[kernel.name].spill_instructions
    mix = [i.base for i in timed_loop(found["tensor_16_5"])]
    assert (mix.count("HMMA"), mix.count("LDSM")) == (64, 20)


def test_a_loop_that_is_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer loads than asked, and an instruction of a scarce pipe that nobody asked for, are faults, not times."""
    found = functions(90)
    lacks = replace(benchmarks._pipe("LDS", 64), loop={"LDS": 65})
    surplus = replace(benchmarks._pipe("MUFU_F2FP", 64), loop={"F2FP": 64})
    for kernel in (lacks, surplus):
        with pytest.raises(ValueError, match=kernel.name):
            unrolled(kernel, found[kernel.name])
    with pytest.raises(ValueError, match="no loop"):
        unrolled(lacks, replace(found["pipe_LDS_64_4"], instructions=found["pipe_LDS_64_4"].instructions[:9]))
    board = predict.board_of(GPUS["h200"])
    kernel = replace(benchmarks._pipe("LDS", 64), loop={"LDS": 65})
    monkeypatch.setattr(rates, "kernels", lambda sm: (kernel,))
    benchmark = next(b for b in benchmarks.benchmarks(90) if b.kernel.name == kernel.name)
    device = ModelledDevice(board)
    finding = next(rates.measured_rates(device, [benchmark]))
    assert "'LDS': 64" in finding["failure"] and "rate" not in finding and device.launches == 0


@cache
def emulated() -> dict[str, Kernel]:
    """The kernels with clocks that stand still: the emulator has none."""
    ptx = compiled("microbench", text(90), 90, options_for(90))[1]
    return parse(ptx.replace("%clock64", "0").replace("%globaltimer", "0")).kernels


def run_emulated(name: str, word: int, *, warps: int = 4, steps: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """(results [threads], the window as 32-bit words) of one block whose window is filled with a word."""
    memory = GlobalMemory()
    window = memory.upload(np.full(warps * benchmarks.WINDOW_BYTES // 4, word, "u4"))
    clocks = memory.upload(np.zeros(max(2, steps) * warps, "i8"))
    results = memory.upload(np.full(32 * warps, np.nan, "f4"))
    run = bytes(rates.Run(clocks, results, window, steps))
    launch(emulated()[name], 1, 32 * warps, [run], memory, shared_bytes=warps * benchmarks.SMEM_BYTES)
    return memory.read(results, (32 * warps,), "f4"), memory.read(window, (warps * 1024,), "u4")


def test_results_that_are_stored() -> None:
    """Every product, load and chain took part in what is stored."""
    products = sum(4 * (k + 16 * 4 * 3) for k in range(16))  # 16 sums of four rounds of three steps
    assert np.array_equal(run_emulated("tensor_16_0", ONE)[0], np.full(128, products, "f4"))
    words = np.full(1, ONE, "u4").view("f4")[0]  # an even number of equal loads folds to nothing
    assert np.array_equal(run_emulated("tensor_16_5", ONE)[0], np.full(128, products, "f4"))
    assert np.array_equal(run_emulated("policy_64", ONE)[0], np.full(128, products, "f4"))
    assert np.array_equal(run_emulated("chain_HMMA", ONE)[0], np.full(128, 4 * 16 * 32 * 3, "f4"))
    for chain in ("chain_LDS", "chain_LDSM", "chain_LDGSTS"):  # each lane has come back to its own address
        assert not run_emulated(chain, 0)[0].any(), chain
    for copy in ("copy_4_0_1", "copy_4_0_2"):
        assert np.array_equal(run_emulated(copy, ONE)[0], np.full(128, words, "f4")), copy
    assert not run_emulated("copy_0_48_1", ONE)[0].any()


def test_reductions_add_one_a_step() -> None:
    for name, floats in (("reduce_1", 256), ("reduce_4", 1024)):
        window = run_emulated(name, 0)[1].view("f4")
        assert np.array_equal(window[: 4 * floats], np.full(4 * floats, 3, "f4")) and not window[4 * floats :].any()


def test_operations_compute() -> None:
    half = int(np.float32(0.5).view("u4"))
    x = np.float32(0.5)
    for _ in range(3 * 64 // 16):
        x = x * np.float32(0.5) + np.float32(0.5)
    assert np.allclose(run_emulated("pipe_FFMA_64_4", half)[0], 16 * x, rtol=1e-6)
    for name in ("pipe_FMNMX_64_4", "pipe_SHFL_64_4", "pipe_STS_64_4", "pipe_LDS_64_4"):
        assert np.array_equal(run_emulated(name, half)[0], np.full(128, 8, "f4")), name
    alone = run_emulated("pipe_LDS_64_1", half, warps=8)[0].reshape(8, 32)
    assert np.array_equal(np.isnan(alone[:, 0]), [w % 4 != 0 for w in range(8)])  # the others left before the loop


NEEDED = (
    "tensor_0_8 16", "tensor_16_0 16", "policy_64 8", "chain_LDS 1", "chain_LDGSTS 1", "chain_MUFU 1", "barrier_64 4",
    "pipe_LDS_64_4 16", "pipe_LDS_128_4 16", "pipe_LDS_64_1 16", "pipe_LDS_128_1 16", "pipe_FFMA_64_4 16",
    "pipe_FFMA_128_4 16", "pipe_FMNMX_64_4 16", "pipe_FMNMX_128_4 16", "pipe_F2FP_64_4 16", "pipe_F2FP_128_4 16",
    "pipe_MUFU_64_4 16", "pipe_MUFU_128_4 16", "copy_4_0_2 16 all", "copy_0_48_1 16", "copy_4_48_2 16",
    "reduce_1 16 all", "reduce_4 16 all",
)  # fmt: skip


def needed(sm: int) -> list[Benchmark]:
    """The benchmarks that some constant follows from."""

    def line(b: Benchmark) -> str:
        return f"{b.kernel.name} {b.warps}{' all' if b.everywhere else ''}"

    return [b for b in benchmarks.benchmarks(sm) if line(b) in NEEDED]


@cache
def findings(board: Board) -> tuple[dict[str, Any], ...]:
    """What the benchmarks that matter find on a device with these constants."""
    return tuple(rates.measured_rates(ModelledDevice(board), needed(board.sm)))


def board(name: str, **path: float | bool) -> Board:
    fitted = predict.board_of(GPUS[name])
    return replace(fitted, path=replace(fitted.path, **path))  # type: ignore[arg-type]


def altered(name: str) -> Board:
    """Every constant another than the fitted one."""
    found = board(
        name, wavefront_cycles=1.25, request_cycles=2.5, fill_share=0.8, shared_latency=31.0, address_cycles=6.0,
        reduction_bytes_per_clock=40.0, barrier_cycles=33.0, special_latency=25.0,
    )  # fmt: skip
    pipes = replace(pipe_rates(found.sm), fma=2.5, alu=3.0, convert=4.0, special=6.0)
    return replace(
        found, pipes=pipes, tensor_flops_per_clock_sm=0.9 * found.tensor_flops_per_clock_sm,
        l2_bytes_per_clock_sm=1.3 * found.l2_bytes_per_clock_sm, l2_latency=400.0, clock_ghz=1.5,
    )  # fmt: skip


def greedy() -> Board:
    """A tensor core slower than ptxas' stall counts, so that two warps are ready whenever it is free."""
    return replace(board("h200", greedy=True), tensor_flops_per_clock_sm=2500.0)


@pytest.mark.parametrize(
    ("made", "exact", "fill"),
    [
        (lambda: board("h200"), 0.025, 0.12), (lambda: altered("h200"), 0.025, 0.12),
        (lambda: altered("a100"), 0.025, 0.12), (greedy, 0.06, 0.25),
    ],
    ids=["h200 as fitted", "h200 altered", "a100 altered", "h200 greedy"],
)  # fmt: skip
def test_the_derivation_turns_the_model_round(made: Callable[[], Board], exact: float, fill: float) -> None:
    """The constants that the model was given come back from the times that it gives the benchmarks.

    A greedy scheduler leaves one warp to run alone in the end, which blurs them a little.
    """
    device = made()
    given = {"path": device.path, "pipes": device.pipes or pipe_rates(device.sm), "board": device}
    found = derive(findings(device), GPUS[device.name])
    assert {c.name for c in found} == {*measured.PATH_FIELDS, *measured.PIPE_FIELDS, *measured.BOARD_FIELDS}
    for constant in found:
        want = getattr(given[constant.place], constant.name)
        near = {"abs": fill} if constant.name == "fill_share" else {"rel": exact}
        assert constant.measured == (want if constant.name == "greedy" else pytest.approx(want, **near)), constant


def test_fitted_values_stand_beside_the_measured() -> None:
    found = {c.name: c for c in derive(findings(altered("h200")), GPUS["h200"])}
    assert found["wavefront_cycles"].fitted == 1.0 and found["l2_latency"].fitted == 280
    assert found["tensor_flops_per_clock_sm"].fitted == 2731 and found["special"].fitted == 8


def test_warps_that_lead() -> None:
    """Greedy apart, taking turns together."""
    policy = [b for b in benchmarks.benchmarks(90) if b.kernel.function == "policy"]
    turns, leads = (next(rates.measured_rates(ModelledDevice(b), policy)) for b in (board("h200"), greedy()))
    assert turns["gap"] < 0.1 and leads["gap"] > 0.4
    assert len(leads["stamps"]) == 8 and len(leads["stamps"][0]) == benchmarks.STAMPS


def machine(gpu: str = "NVIDIA H200", sms: int = 132) -> dict[str, Any]:
    smi = {"driver_version": "580.65"}
    return {"gpu": gpu, "sms": sms, "sm": 90, "when": "2026-12-01T10:00:00+00:00", "nvidia_smi": smi}


def day(found: Any, environment: Any = None) -> dict[str, Any]:
    """A report with those findings."""
    parts = {"environment": machine() if environment is None else environment, "rates": found}
    return {
        "parts": {
            name: {"status": "done", "reason": "", "seconds": 1.0, "found": f, "output": ""}
            for name, f in parts.items()
        }
    }


def test_a_day_changes_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """From the part of the day to its report, to the file, to another model and another prediction of that GPU."""
    told: list[Any] = []
    device = altered("h200")
    monkeypatch.setattr("flashsmith.engines.driver.cuda_device", lambda: ModelledDevice(device))
    monkeypatch.setattr(rates, "benchmarks", lambda sm: tuple(needed(sm)))
    work.PARTS["rates"](lambda found: told.append(len(found)))
    assert told == list(range(1, len(needed(90)) + 3))  # and the clock, twice
    report = tmp_path / "report.json"
    report.write_text(json.dumps(day(findings(device))))
    before = predict.board_of(GPUS["h200"])
    assert constants_version() == "" and before.path == MEMORY_PATH
    assert constants.main([str(report), "--to", str(measured.FILE)]) == 0
    said = capsys.readouterr().out
    assert "h200, sm_90, 2026-12-01, driver 580.65" in said and str(measured.FILE) in said
    line = next(x for x in said.splitlines() if x.startswith("barrier_cycles")).split()
    assert line[1:4] == ["fitted", "20", "measured"] and float(line[4]) == pytest.approx(33, rel=0.02)
    assert constants_version() == ", rates of h200 2026-12-01"
    after = predict.board_of(GPUS["h200"])
    assert after.path.wavefront_cycles == pytest.approx(1.25, rel=0.02) and after.clock_ghz == 1.5
    function = disassemble(compile_scores(90)).functions["scores"]
    launched = predict.Work(864, 4, 18432, 2.0 * 128 * 64 * 64 * 64 * 864)
    slow, fast = (predict.predict_time(function, b, launched).seconds for b in (after, before))
    assert slow > 1.1 * fast


def test_the_model_names_what_was_measured(tmp_path: Path) -> None:
    """MODEL is made when predict.py is imported, so another process says it."""
    write_measured(tmp_path / "one.json", Measured(gpu="h200", sm=90, date="2026-12-01", driver="1"))
    program = (
        "import sys; from pathlib import Path; from flashsmith.sass import measured; measured.FILE = Path(sys.argv[1]);"
        "from flashsmith.predict import MODEL; print(MODEL)"
    )

    def said(file: str) -> str:
        command = [sys.executable, "-c", program, str(tmp_path / file)]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout.strip()

    assert said("one.json") == "issue-model 2, rates of h200 2026-12-01"
    assert said("none.json") == "issue-model 2"


def test_without_a_file_nothing_changes() -> None:
    for gpu in GPUS.values():
        found = predict.board_of(gpu)
        assert found.path is memory_path(gpu.sm) and found.pipes is None
        assert gpu.sm < 80 or found.path == MemoryPath()
        assert found.tensor_flops_per_clock_sm == gpu.tensor_flops_clk and as_measured(found) is found


def test_turing_has_not_what_they_time() -> None:
    with pytest.raises(UsageError, match=r"sm_75 has not; use sm_80"):
        text(75)


def test_whose_constants_serve_a_board() -> None:
    """A board's own GPU, else the latest of its architecture for what is the architecture's; no other."""
    h200 = Measured(gpu="h200", sm=90, date="2026-12-02", driver="1", path={"fill_share": 0.1}, pipes={"alu": 1.5},
                    board={"l2_latency": 300.0})  # fmt: skip
    h100 = Measured(gpu="h100-sxm", sm=90, date="2026-12-01", driver="1", path={"fill_share": 0.2})
    fitted = {name: predict.board_of(GPUS[name]) for name in ("h200", "h100-sxm", "h100-pcie", "a100")}
    found = {name: with_constants(b, (h200, h100)) for name, b in fitted.items()}
    assert [b.path.fill_share for b in found.values()] == [0.1, 0.2, 0.1, 0.5]
    assert [b.l2_latency for b in found.values()] == [300, 280, 280, 270]
    assert found["h100-pcie"].pipes == replace(pipe_rates(90), alu=1.5) and found["a100"] is fitted["a100"]


def test_a_file_keeps_other_gpus(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    for gpu, sm, date in (("h200", 90, "2026-12-01"), ("a100", 80, "2026-12-02"), ("h200", 90, "2026-12-03")):
        write_measured(file, Measured(gpu=gpu, sm=sm, date=date, driver="1", path={"greedy": True}))
    assert [(m.gpu, m.date) for m in read_measured(file)] == [("a100", "2026-12-02"), ("h200", "2026-12-03")]


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"schema": 2, "measured": []}', '{"schema": 1, "measured": [{"gpu": "h200"}]}',
        '{"schema": 1, "measured": [{"gpu": "h200", "sm": 90, "date": "", "driver": "", "path": {"wave": 1}}]}',
        '{"schema": 1, "measured": [{"gpu": "h200", "sm": 90, "date": "", "driver": "", "path": {"greedy": 1}}]}',
        '{"schema": 1, "measured": [{"gpu": "h200", "sm": 90, "date": "", "driver": "", "pipes": {"alu": 0}}]}',
    ],
)  # fmt: skip
def test_a_bad_file_is_an_error(content: str) -> None:
    measured.FILE.write_text(content)
    with pytest.raises(BadConstants, match=r"measured\.json cannot be read"):
        as_measured(predict.board_of(GPUS["h200"]))


def without(name: str) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [f for f in findings(board("h200")) if f["benchmark"] != name]


def failed(name: str) -> list[dict[str, Any]]:
    fault = {"benchmark": name, "warps": 16, "sms": 1, "unit": "", "failure": "it holds 4 LDSM"}
    return [*without(name)(), fault]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (lambda: day(without("tensor_0_8")()), "tensor_0_8 at 16 warps on one SM"),
        (lambda: day(without("clock")()), "clock at 16 warps on every SM, random data"),
        (lambda: day(failed("tensor_0_8")), "it holds 4 LDSM"),
        (lambda: day(findings(board("h200")), machine("NVIDIA RTX 4070")), "NVIDIA RTX 4070"),
        (lambda: day(findings(board("h200")), machine(sms=66)), "66 SMs"),
        (lambda: {"parts": {}}, "lacks the part"),
        (lambda: [], "no report"),
    ],
    ids=["no benchmark", "no clock", "a fault", "unknown GPU", "a slice", "no parts", "no report"],
)  # fmt: skip
def test_a_report_that_does_not_serve(state: Callable[[], Any], why: str, tmp_path: Path, capsys: Any) -> None:
    """One clear error, and no file."""
    report = tmp_path / "report.json"
    report.write_text(json.dumps(state()))
    assert constants.main([str(report), "--to", str(measured.FILE)]) == 2
    assert why in capsys.readouterr().err and not measured.FILE.exists()


def test_a_report_that_is_not_there(tmp_path: Path, capsys: Any) -> None:
    assert constants.main([str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_constant_that_no_machine_has(tmp_path: Path) -> None:
    """A latency below zero is not written."""
    found: Sequence[dict[str, Any]] = [
        {**f, "rate": 1.0} if f["benchmark"] == "chain_LDGSTS" else f for f in findings(board("h200"))
    ]
    entry, _ = measured_of(day(found))
    with pytest.raises(BadConstants, match="l2_latency came out as -"):
        write_measured(tmp_path / "file.json", entry)
    assert not (tmp_path / "file.json").exists()


def test_the_report_shows_every_finding() -> None:
    found = [*findings(board("h200")), {"benchmark": "x", "warps": 4, "sms": 1, "unit": "", "failure": "no loop"}]
    shown = markdown(day(found))
    for expected in (
        "## rates", "| tensor_0_8 | 16 | 1 |", "| copy_4_0_2 | 16 | 132 |", "B/clk/SM", "| x | 4 | 1 | - | - |",
        "- x: no loop", "clock, random data", "1.755 | GHz", "of a stamp's time apart",
    ):  # fmt: skip
        assert expected in shown, expected

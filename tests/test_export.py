"""Exported passes compile, launch what run.py launches, and give the right answer when C calls them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flashsmith import run
from flashsmith.cli import main
from flashsmith.compile import compile_source
from flashsmith.emulator import GlobalMemory, launch, parse
from flashsmith.emulator.memory import BASE
from flashsmith.engines.engine import Tensor
from flashsmith.errors import RenderError, UsageError
from flashsmith.export import Plan, cubin_files, cuda_files, plan_of
from flashsmith.export.expression import Expression
from flashsmith.load import load_best, load_pass
from flashsmith.parts import choose_parts
from flashsmith.reference import Given, attention
from flashsmith.render import Source
from flashsmith.run import Extras, Sizes
from flashsmith.spec.dtype import EPSILON, round_to, stored_as, widen
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelName, KernelSpec
from flashsmith.spec.problem import Dtype, Problem
from numpy.typing import DTypeLike, NDArray

from .exported import GCC, Launched, Library, needs_nvcc, run_tool, written

BF16_64 = {"dtype": "bf16", "d": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "forward d64": ("forward", BF16_64),
    "forward d128 causal": ("forward", {"dtype": "bf16", "d": 128, "causal": True}),
    "forward d72 fp16 causal": ("forward", {"dtype": "fp16", "d": 72, "causal": True}),
    "forward by parts": ("forward", {**BF16_64, "Hq": 4, "Hk": 2, "Nq": 1, "Nk": 30000}),
    "forward d64 window": ("forward", {**BF16_64, "window": (20, 3)}),
    "forward d40 fp32": ("forward", {"dtype": "fp32", "d": 40}),
    "fused d64 causal": ("backward", {**BF16_64, "causal": True}),
    "fused d64 window": ("backward", {**BF16_64, "causal": True, "window": (20, None)}),
    "split d72 dv40 fp16": ("split", {"dtype": "fp16", "d": 72, "dv": 40}),
}
GPU = "a100"


@cache
def plan(case: str) -> Plan:
    which, of_problem = CASES[case]
    problem = Problem(**of_problem)
    sources = sources_of(problem, which)
    parts = choose_parts(sources["partial"].spec, problem, find_gpu(GPU)).parts if "partial" in sources else 1
    return plan_of(problem, "forward" if which == "forward" else "backward", sources, parts=parts)


def sources_of(problem: Problem, which: str) -> dict[KernelName, Source]:
    if which == "forward" and not problem.features.plain:  # no such forward is cut into parts
        return {"forward": load_best(problem, "forward", GPU).source}
    kernels = load_pass(problem, "forward" if which == "forward" else "backward", GPU, deterministic=which == "split")
    return {name: loaded.source for name, loaded in kernels.items()}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Each case compiled once."""
    made: dict[str, Library] = {}

    def get(case: str) -> Library:
        if case not in made:
            made[case] = Library(plan(case), tmp_path_factory.mktemp("export"))
        made[case].hook()
        return made[case]

    yield get


# ---- formulas


def test_a_formula_remembers_how_it_was_made() -> None:
    B, N, H = Expression("B", 3), Expression("Nq", 200), Expression("Hq", 6)
    assert (-(-N // 64)).text == "ceil_div(Nq, 64)" and -(-N // 64) == 4
    assert (-(-(N * H) // 64) * B).text == "ceil_div(Nq * Hq, 64) * B"
    assert (B * (H // 2)).text == "B * (Hq / 2)" and (B * H // 2).text == "B * Hq / 2"
    assert ((N + 1) * B).text == "(Nq + 1) * B" and (N - (B - 1)).text == "Nq - (B - 1)"
    assert (-N).text == "-Nq" and (1 * N).text == "Nq" and (N * 128 // 128).text == "Nq"
    assert (-(N * 2 // 4)).text == "-(Nq * 2 / 4)" and -(N * 2 // 4) == -100
    assert (5 - N).text == "5 - Nq" and (1000 // N).text == "1000 / Nq" and (2 * N).text == "2 * Nq"


def test_a_limit_is_a_comparison_that_came_out_false() -> None:
    limits: list[tuple[str, int]] = []
    n = Expression("Nq", 200, limits)
    assert not n * 2 > 2**31 - 1 and n > 1 and max(1, n) is n
    assert limits == [("Nq * 2", 2**31 - 1)]


# ---- text


@needs_nvcc
@pytest.mark.parametrize("case", CASES)
def test_nvcc_takes_it_with_every_warning_an_error(case: str, libraries: Any) -> None:
    """Compiling is the test: -Werror all-warnings, and -Wall -Wextra -Werror on the host's side."""
    assert all(name in libraries(case).ptx for name in libraries(case).bytes_of)


@pytest.mark.skipif(not GCC, reason="gcc, which compiles the header, is not here")
@pytest.mark.parametrize("case", ["forward by parts", "forward d64 window", "fused d64 causal"])
def test_the_header_and_its_example_are_c(case: str, tmp_path: Path) -> None:
    source = written(plan(case), tmp_path)
    header = source.with_suffix(".h").read_text()
    assert max(map(len, header.splitlines())) <= 140
    example = header.split("// Example:\n")[1].split("#ifndef")[0].replace("//    ", "   ")
    given = "".join(
        f"{'' if field.written or not field.view else 'const '}{'void' if field.view else 'float'} *{field.name}, "
        for field in plan(case).fields
    )
    declared = "const char *cudaGetErrorString(int error); int cudaMalloc(void **, size_t);"
    sizes = ", ".join(f"int64_t {size}" for size in plan(case).sizes if size not in plan(case).asked)
    program = f'#include "{source.stem}.h"\n#include <stdio.h>\n{declared}\nvoid f({given}{sizes})\n{{\n{example}}}\n'
    (tmp_path / "example.c").write_text(program)
    run_tool(GCC, "-std=c99", "-Wall", "-Werror", "-c", tmp_path / "example.c", "-o", tmp_path / "example.o")


@pytest.mark.parametrize("case", CASES)
def test_the_text_of_each_kernel_is_the_one_rendered(case: str) -> None:
    """Nothing but its name changes."""
    text = cuda_files(plan(case))[f"{plan(case).name}.cu"]
    for each in plan(case).launches:
        kernel = each.source.spec.kernel
        assert each.source.text.replace(f" {kernel}(", f" {plan(case).name}_{kernel}(") in text
    launcher = text[text.index("#pragma nv_diag_default") :]
    assert "{{" not in launcher and "{%" not in launcher and "\n\n\n" not in launcher
    assert max(map(len, launcher.splitlines())) <= 140


@pytest.mark.parametrize("case", ["forward d64", "fused d64 causal"])
def test_golden(case: str, golden: Callable[[str, str], None]) -> None:
    """The launcher of one pass and the header of the other; the kernels between have golden files of their own."""
    files, name = cuda_files(plan(case)), plan(case).name
    if plan(case).which == "forward":
        golden(f"{name}.h", files[f"{name}.h"])
    else:
        golden(f"{name}.launcher.cu", files[f"{name}.cu"].partition("#pragma nv_diag_default 177\n\n")[2])


# ---- what is launched

SIZES = [
    Sizes(B=1, Hq=1, Hk=1, Nq=1, Nk=1),
    Sizes(B=2, Hq=6, Hk=2, Nq=200, Nk=333),
    Sizes(B=1, Hq=16, Hk=16, Nq=128, Nk=128),
    Sizes(B=3, Hq=5, Hk=1, Nq=129, Nk=64, parts=3),
    Sizes(B=1, Hq=8, Hk=4, Nq=8192, Nk=8192, parts=7),
    Sizes(B=65536, Hq=1, Hk=1, Nq=4, Nk=4),
    Sizes(B=1, Hq=65536, Hk=65536, Nq=4, Nk=4, parts=2),
    Sizes(B=7, Hq=12, Hk=3, Nq=1, Nk=131072, parts=64),
    Sizes(B=1, Hq=32, Hk=8, Nq=2**20, Nk=17),
    Sizes(B=4, Hq=2, Hk=1, Nq=63, Nk=65),
    Sizes(B=1, Hq=3, Hk=3, Nq=2**24 + 1, Nk=2**24 + 1),
    Sizes(B=9, Hq=9, Hk=9, Nq=577, Nk=127),
]


def numbers_of(plan: Plan, sizes: Sizes) -> dict[str, Any]:
    """What a launcher takes beside tensors; of a window as many keys as the plan was made for."""
    return {name: plan.asked.get(name, 0) if name in ("left", "right") else getattr(sizes, name) for name in plan.sizes}


def window_of(plan: Plan) -> Extras:
    return Extras(left=plan.asked.get("left", 0), right=plan.asked.get("right", 0))


def given_for(plan: Plan, sizes: Sizes, scale: float = 0.3) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments in C and the same tensors in Python, at addresses where nothing lies."""
    values: dict[str, Any] = numbers_of(plan, sizes) | {"scale": scale, "stream": 77}
    tensors = {}
    for n, field in enumerate(plan.fields, 1):
        if field.view:
            strides = (8 * (2**32 + n), 8 * (2**20 + n), 8 * (1000 + n))
            values[field.name] = (n << 40, *strides)
        else:
            strides = (1, 1, 1)
            values[field.name] = n << 40
        tensors[field.name] = Tensor(
            n << 40, (), (*strides, 1), stored_as(plan.problem.dtype if field.view else "fp32")
        )
    return values, tensors


def workspace_of(plan: Plan, sizes: Sizes, start: int) -> tuple[dict[str, Tensor], int]:
    """The temporaries that run.py allocates, each on 256 bytes, and their bytes in all."""
    specs = {launch.source.spec.kernel: launch.source.spec for launch in plan.launches}
    rows = sizes.B * sizes.Hq * sizes.Nq * sizes.parts
    floats = {"stats": sizes.stats_rows * 3, "O_part": rows * plan.problem.d, "m_part": rows, "l_part": rows}
    if "fused" in specs:
        floats["dQ_acc"] = run.dq_accumulator_floats(specs["fused"], sizes)
    place, tensors = start, {}
    for buffer in plan.temporaries:
        tensors[buffer.name] = Tensor(place, (), (1, 1, 1, 1), np.dtype(np.float32))
        place += -(-4 * floats[buffer.name] // 256) * 256
    return tensors, place - start


@needs_nvcc
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"B{s.B} H{s.Hq} {s.Hk} N{s.Nq} {s.Nk} parts{s.parts}")
def test_the_launcher_launches_what_run_launches(case: str, sizes: Sizes, libraries: Any) -> None:
    """Grid, block, shared memory, stream and every byte of the arguments."""
    library, pass_ = libraries(case), plan(case)
    values, tensors = given_for(pass_, sizes)
    if pass_.temporaries:
        temporaries, total = workspace_of(pass_, sizes, 1 << 50)
        args = library.args(values | {"workspace": 1 << 50, "workspace_bytes": total})
        assert library.workspace_bytes(ctypes.byref(args)) == total
        tensors |= temporaries
    else:
        args = library.args(values)
    assert library.why(ctypes.byref(args)) is None and library.call(args) == 0
    for launch_, launched in zip(pass_.launches, library.launches, strict=True):
        spec = launch_.source.spec
        expected = run.pack(spec, tensors, sizes, 0.3, window_of(pass_))
        assert launched.kernel == f"{pass_.name}_{spec.kernel}" and launched.stream == 77
        assert launched.grid == (run.grid(spec, sizes), 1, 1) and launched.block == (spec.threads, 1, 1)
        assert launched.smem == launch_.source.smem_bytes
        assert launched.args == tuple(
            value if isinstance(value, bytes) else struct.pack({"int": "<i", "float": "<f"}.get(arg.type, "<Q"), value)
            for arg, value in zip(spec.signature, expected, strict=True)
        )
    zeroed = [(tensors["dQ_acc"].address, 0)] if "dQ_acc" in tensors else []
    assert [(address, value) for address, _, value, _, _ in library.fills] == zeroed


# ---- what comes out


class Device:
    """A library whose launches and fills happen in the emulator's memory."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.memory = GlobalMemory()
        self.kernels = parse(library.ptx).kernels
        library.hook(self._launch, self._fill)

    def _launch(self, launched: Launched) -> None:
        kernel = self.kernels[launched.kernel]
        report = launch(
            kernel, launched.grid, launched.block, launched.args, self.memory, launched.smem, check_races=True
        )  # fmt: skip
        assert report.race_count == 0

    def _fill(self, to: int, pitch: int, value: int, width: int, height: int) -> None:
        for first in range(to, to + height * pitch, pitch):
            self.memory.read(first, (width,), "u1")  # that it lies inside an allocation
            self.memory.views[1][first - BASE : first - BASE + width] = value

    def tensor(self, x: NDArray[Any]) -> tuple[int, int, int, int]:
        """x [B, H, N, d] laid out in memory as [B, N, H, d], as the launcher takes it."""
        _, H, N, d = x.shape
        return self.memory.upload(x.transpose(0, 2, 1, 3)), N * H * d, d, H * d

    def read(self, tensor: tuple[int, int, int, int], shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        B, H, N, d = shape
        return self.memory.read(tensor[0], (B, N, H, d), dtype).transpose(0, 2, 1, 3)

    def run(self, sizes: Sizes, given: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Every output of the pass, by name, for these inputs; outputs are NaN before it."""
        plan, values = self.library.plan, numbers_of(self.library.plan, sizes)
        for name, x in given.items():
            values[name] = self.tensor(x) if x.ndim == 4 else self.memory.upload(x)
        dtype = stored_as(plan.problem.dtype)
        shapes = {
            field.name: tuple(int(n) if n.isdigit() else getattr(sizes, n) for n in field.shape)
            for field in plan.fields
            if field.written
        }
        for name, shape in shapes.items():
            empty = np.full(shape, 0xFFFF, dtype) if len(shape) == 4 else np.full(shape, np.nan, np.float32)
            values[name] = self.tensor(empty) if len(shape) == 4 else self.memory.upload(empty)
        args = self.library.args(values)
        if plan.temporaries:
            args.workspace_bytes = self.library.workspace_bytes(ctypes.byref(args))  # type: ignore[attr-defined]
            args.workspace = self.memory.empty(args.workspace_bytes, "u1")  # type: ignore[attr-defined]
        assert self.library.call(args) == 0, self.library.why(ctypes.byref(args))
        return {
            name: widen(self.read(values[name], shape, dtype), plan.problem.dtype)
            if len(shape) == 4
            else self.memory.read(values[name], shape, "f4").astype(float)
            for name, shape in shapes.items()
        }


def numbers(problem: Problem, B: int, Hq: int, Hk: int, Nq: int, Nk: int) -> list[NDArray[Any]]:
    """q, k, v and dO, about 1/2, as tensors of the dtype hold them."""
    random, d, dv = np.random.default_rng(0), problem.d, problem.value_dim
    shapes = (B, Hq, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, dv), (B, Hq, Nq, dv)
    return [round_to(random.standard_normal(shape) + 0.5, problem.dtype) for shape in shapes]


def close(found: NDArray[Any], right: NDArray[Any], dtype: Dtype) -> bool:
    """Within a few roundings to `dtype` of the largest value, and of sums: P and dS are rounded on their way."""
    return bool(np.abs(found - right).max() <= (6 * EPSILON[dtype] + 1e-5) * np.abs(right).max())


@needs_nvcc
@pytest.mark.parametrize("case", CASES)
def test_c_gets_the_right_answer(case: str, libraries: Any) -> None:
    """What nvcc makes of the exported text, called from C, on the emulator, against float64."""
    problem = plan(case).problem
    inputs = numbers(problem, B=2, Hq=4, Hk=2, Nq=70, Nk=101)
    dlse = np.random.default_rng(1).standard_normal((2, 4, 70)).astype(np.float32)
    q, k, v, dO = (widen(x, problem.dtype) for x in inputs)
    right = attention(
        q, k, v, dO, scale=problem.softmax_scale, causal=problem.causal, dlse=dlse.astype(float),
        given=Given(window=problem.window),
    )  # fmt: skip
    given: dict[str, NDArray[Any]] = dict(zip("QKV", inputs, strict=False))
    if plan(case).which == "backward":
        given |= {"O": round_to(right.O, problem.dtype), "dO": inputs[3], "dlse": dlse}
        given |= {"m": right.m.astype(np.float32), "l": right.l.astype(np.float32)}
    out = Device(libraries(case)).run(Sizes(B=2, Hq=4, Hk=2, Nq=70, Nk=101, parts=3), given)
    for name in ("O",) if plan(case).which == "forward" else ("dQ", "dK", "dV"):
        assert close(out[name], getattr(right, name), problem.dtype), name
    if plan(case).which == "forward":
        assert np.abs(out["m"] + np.log(out["l"]) - right.lse).max() < 1e-5 * (1 + np.abs(right.lse).max())


@needs_nvcc
@pytest.mark.parametrize("case", ["forward d64", "forward by parts", "fused d64 causal"])
@pytest.mark.parametrize("zero", ["B", "Hq", "Nq", "Nk"])
def test_nothing_gives_what_run_gives(case: str, zero: str, libraries: Any) -> None:
    """No launch; O = 0, m = -inf, l = 0, or gradients of 0, wherever there is an element."""
    n = {"B": 2, "Hq": 4, "Hk": 2, "Nq": 5, "Nk": 7, zero: 0}
    sizes, d = Sizes(**n, parts=2), plan(case).problem.d
    device = Device(libraries(case))
    queries, keys, rows = (
        np.ones(shape, np.uint16) for shape in ((n["B"], n["Hq"], n["Nq"], d), (n["B"], 2, n["Nk"], d), n_rows(n))
    )
    given: dict[str, NDArray[Any]] = {"Q": queries, "K": keys, "V": keys}
    if plan(case).which == "backward":
        statistics = rows.astype(np.float32)
        given |= {"O": queries, "dO": queries, "m": statistics, "l": statistics}
    out = device.run(sizes, given)
    assert device.library.launches == []
    for name, values in out.items():
        assert (values == (-np.inf if name == "m" else 0)).all(), name


def n_rows(n: dict[str, int]) -> tuple[int, int, int]:
    return n["B"], n["Hq"], n["Nq"]


@needs_nvcc
def test_rows_may_run_backwards(libraries: Any) -> None:
    """A negative stride, and one of a dimension of one element that is no multiple of 8."""
    device, d = Device(libraries("forward d64")), 64
    inputs = numbers(Problem(dtype="bf16", d=d), B=1, Hq=1, Hk=1, Nq=9, Nk=20)
    place = device.memory.empty((9, d), np.uint16)
    upside_down = (device.memory.upload(inputs[0][:, :, ::-1]) + 8 * d * 2, 1, 3, -d)
    K, V = map(device.tensor, inputs[1:3])
    m, l = (device.memory.empty((9,), "f4") for _ in "ml")
    values = {"B": 1, "Hq": 1, "Hk": 1, "Nq": 9, "Nk": 20, "K": K, "V": V, "m": m, "l": l}
    args = device.library.args(values | {"Q": upside_down, "O": (place + 8 * d * 2, 5, 7, -d)})
    assert device.library.call(args) == 0
    right = attention(*(widen(x, "bf16") for x in inputs), scale=d**-0.5, causal=False)
    assert close(widen(device.memory.read(place, (9, d), np.uint16), "bf16")[::-1], right.O[0, 0], "bf16")
    nothing = device.library.args(values | {"Q": upside_down, "O": (place + 8 * d * 2, 5, 7, -d), "Nk": 0})
    assert device.library.call(nothing) == 0 and not device.memory.read(place, (9, d), np.uint16).any()


@needs_nvcc
def test_a_stride_that_nothing_steps_over_is_free(libraries: Any) -> None:
    """PyTorch gives any stride to a dimension of one element."""
    library = libraries("forward d64")
    values, _ = given_for(plan("forward d64"), Sizes(B=1, Hq=1, Hk=1, Nq=1, Nk=1))
    args = library.args(values | {name: (64, 1, 3, 5) for name in "QKVO"})
    assert library.call(args) == 0 and library.launches[0].args[0] == struct.pack("<4q", 64, 1, 3, 5)


# ---- what is refused

GOOD = Sizes(B=2, Hq=6, Hk=2, Nq=200, Nk=333, parts=2)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "negative": ("forward d64", {"Nq": -1}, "Nq must be 0 to 2147483392"),
    "too long": ("forward d64", {"Nk": 2**31 - 255}, "Nk must be 0 to 2147483392"),
    "heads": ("forward d64", {"Hk": 4}, "Hq must be a multiple of Hk"),
    "no key head": ("forward d64", {"Hk": 0}, "Hq must be a multiple of Hk"),
    "scale": ("forward d64", {"scale": -1.0}, "scale must be positive and finite; 0 stands for 0.125"),
    "scale nan": ("forward d64", {"scale": float("nan")}, "scale must be positive and finite; 0 stands for 0.125"),
    "null": ("forward d64", {"K": (0, 8, 8, 8)}, "K must not be null, and its rows must start on 16 bytes"),
    "address": ("forward d64", {"V": (24, 8, 8, 8)}, "V must not be null, and its rows must start on 16 bytes"),
    "batch": ("forward d64", {"O": (32, 4, 8, 8)}, "O must not be null, and its rows must start on 16 bytes"),
    "head": ("forward d64", {"Q": (32, 8, 4, 8)}, "Q must not be null, and its rows must start on 16 bytes"),
    "row": ("fused d64 causal", {"dK": (32, 8, 8, 68)}, "dK must not be null, and its rows must start on 16 bytes"),
    "statistics": ("forward d64", {"m": 0}, "m must not be null"),
    "parts": ("forward by parts", {"parts": 0}, "parts must be 1 to 4096"),
    "blocks": ("forward d64", {"B": 2**16, "Hq": 2**15, "Nq": 4}, "must be at most 2147483647"),
    "rows": ("forward d64", {"B": 2**30, "Hq": 2**30}, "B * Hq * Nq and B * Hk * Nk must be at most 2^40"),
    "rows without a key": ("forward d64", {"B": 2**30, "Hq": 2**30, "Nk": 0}, "B * Hq * Nq and B * Hk * Nk must be at"),
    "workspace": ("split d72 dv40 fp16", {"workspace": 0}, "workspace must not be null, and must start on 16 bytes"),
    "small workspace": ("split d72 dv40 fp16", {"workspace_bytes": 36863}, "workspace_bytes must be at least"),
}


@needs_nvcc
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_launched_is_refused_with_a_reason(name: str, libraries: Any) -> None:
    """cudaErrorInvalidValue, a sentence, and no launch."""
    case, wrong, reason = REFUSED[name]
    library = libraries(case)
    values, _ = given_for(plan(case), GOOD)
    if plan(case).temporaries:
        values |= {"workspace": 1 << 50, "workspace_bytes": 1 << 30}
    good = library.args(values)
    assert library.call(good) == 0 and library.why(ctypes.byref(good)) is None
    library.hook()
    bad = library.args(values | wrong)
    assert library.call(bad) == 1 and reason in library.why(ctypes.byref(bad)).decode()
    assert library.launches == [] and library.fills == []


@needs_nvcc
def test_what_the_runtime_says_ends_the_pass(libraries: Any) -> None:
    """Its status comes back, and nothing further is launched."""
    library = libraries("fused d64 causal")

    def fail(launched: Launched) -> None:
        raise ZeroDivisionError

    library.hook(fail)
    values, _ = given_for(plan("fused d64 causal"), GOOD)
    args = library.args(values | {"workspace": 1 << 50, "workspace_bytes": 1 << 30})
    assert library.run(ctypes.byref(args)) == 999 and len(library.launches) == 1


@needs_nvcc
def test_shared_memory_is_asked_for_once_on_each_device(libraries: Any) -> None:
    library = libraries("forward d64")
    args = library.args(given_for(plan("forward d64"), GOOD)[0])
    for device, asked in ((5, 1), (5, 1), (6, 2), (5, 2), (6, 2), (70, 3), (70, 4)):
        library.device.value = device
        assert library.call(args) == 0 and len(library.attributes) == asked, device
    kernel = plan("forward d64").launches[0]
    maximum = 8  # cudaFuncAttributeMaxDynamicSharedMemorySize
    assert set(library.attributes) == {("flashsmith_forward_bf16_d64_forward", maximum, kernel.source.smem_bytes)}


@needs_nvcc
def test_the_gradient_of_lse_may_be_left_out(libraries: Any) -> None:
    library = libraries("split d72 dv40 fp16")
    values, _ = given_for(plan("split d72 dv40 fp16"), GOOD)
    args = library.args(values | {"dlse": 0, "workspace": 1 << 50, "workspace_bytes": 1 << 30})
    assert library.call(args) == 0 and library.launches[0].args[4] == bytes(8)


@needs_nvcc
def test_a_scale_that_is_left_out_is_that_of_the_head_dimension(libraries: Any) -> None:
    library = libraries("forward d128 causal")
    values, _ = given_for(plan("forward d128 causal"), GOOD, scale=0.0)
    assert library.call(library.args(values)) == 0
    scale, scale_log2 = (struct.unpack("<f", data)[0] for data in library.launches[0].args[-2:])
    assert scale == np.float32(128**-0.5) and scale_log2 == np.float32(128**-0.5 * run.LOG2_E)


def test_a_feature_without_a_place_in_the_launcher_is_named() -> None:
    problem = Problem(dtype="bf16", d=64, sinks=True)
    with pytest.raises(UsageError, match=r"takes sinks \(\[Hq\], .*\), and .* no place .*without sinks\."):
        plan_of(problem, "forward", {"forward": load_best(problem, "forward", GPU).source})


def test_arithmetic_that_is_no_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid that takes another course for other sizes would be wrong in C."""
    grid = run.grid

    def grid_of_two_kinds(spec: KernelSpec, sizes: Sizes) -> int:
        return grid(spec, sizes) if sizes.Nq < 50000 else grid(spec, sizes) * 2

    monkeypatch.setattr(run, "grid", grid_of_two_kinds)
    problem = Problem(dtype="bf16", d=64)
    with pytest.raises(UsageError, match="follow no formula of the sizes alone"):
        plan_of(problem, "forward", sources_of(problem, "forward"))


def test_a_kernel_that_names_itself_twice_cannot_be_renamed() -> None:
    sources = sources_of(Problem(dtype="bf16", d=64), "forward")
    twice = {"forward": Source(sources["forward"].spec, sources["forward"].text + "// see forward(\n")}
    with pytest.raises(RenderError, match=r"must name forward\( once"):
        cuda_files(plan_of(Problem(dtype="bf16", d=64), "forward", twice))


# ---- machine code


@pytest.mark.parametrize("case", ["forward d128 causal", "fused d64 causal", "forward by parts"])
def test_the_description_says_how_run_launches(case: str) -> None:
    """Formulas, evaluated, give the grid and the bytes that run.py gives; offsets are those of the PTX."""
    files = cubin_files(plan(case), compile_source)
    described = json.loads(files["launch.json"])
    for sizes in SIZES:
        check_description(case, described, sizes)
    for each, launch_ in zip(described["launches"], plan(case).launches, strict=True):
        binary = compile_source(launch_.source)
        assert files[each["cubin"]] == binary.cubin
        assert hashlib.sha256(binary.cubin).hexdigest() == each["sha256"]
        params = parse(binary.ptx).kernels[each["entry"]].params
        assert [(p["offset"], p["bytes"]) for p in each["parameters"]] == [(p.offset, p.size) for p in params]
        assert (each["threads"], each["dynamic_smem_bytes"]) == (binary.spec.threads, binary.smem_bytes)


def check_description(case: str, described: dict[str, Any], sizes: Sizes) -> None:
    values, tensors = given_for(plan(case), sizes)
    temporaries, total = workspace_of(plan(case), sizes, 1 << 50)
    names = {name: View(*value) if isinstance(value, tuple) else value for name, value in values.items()}
    names |= {name: tensor.address for name, tensor in temporaries.items()}

    def value_of(formula: str) -> Any:
        return eval(formula if "scale" in formula else formula.replace("/", "//"), {"ceil_div": ceil_div}, names)

    assert sum(value_of(buffer["bytes"]) for buffer in described["workspace"]) == total
    for each, launch_ in zip(described["launches"], plan(case).launches, strict=True):
        assert value_of(each["grid"]["x"]) == run.grid(launch_.source.spec, sizes)
        packed = run.pack(launch_.source.spec, tensors | temporaries, sizes, 0.3, window_of(plan(case)))
        for parameter, expected in zip(each["parameters"], packed, strict=True):
            found = [value_of(formula) for formula in parameter["values"]]
            assert (struct.pack(f"<{len(found)}q", *found) if len(found) > 1 else found[0]) == expected


class View(NamedTuple):
    """The members of a tensor, as formulas name them."""

    data: int
    batch: int
    head: int
    row: int


def ceil_div(n: int, step: int) -> int:
    return -(-n // step)


# ---- the command


def export(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["export", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


A100 = ("--gpu", GPU, "--d", "64")


def test_export_writes_two_files_and_says_where(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = export(capsys, "forward", *A100, "--causal", "-o", tmp_path / "made")
    stem = tmp_path / "made" / "flashsmith_forward_bf16_d64_causal"
    assert status == 0 and out.split() == [f"{stem}.cu", f"{stem}.h"]
    text = Path(f"{stem}.cu").read_text()
    assert text.startswith("// Made by flashsmith export: forward of bf16 d=64 causal, for sm_80.\n")
    assert str(tmp_path) not in text
    assert export(capsys, "backward", *A100, "--deterministic", "-o", tmp_path / "made")[0] == 0  # beside it
    status, out, _ = export(capsys, "forward", *A100, "--causal", "-o", tmp_path / "made", "--json")  # and again
    said = json.loads(out)
    assert status == 0 and said["name"] == stem.name and said["kernels"][0].startswith("forward_bf16_d64_causal_sm80")
    assert Path(f"{stem}.cu").read_text() == text
    assert sorted(p.suffix for p in (tmp_path / "made").iterdir()) == [".cu", ".cu", ".h", ".h"]


def test_export_takes_a_tile_a_name_and_lengths(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert export(capsys, "forward", *A100, "--tile", "Br=64,Bc=32", "--name", "mine", "-o", tmp_path)[0] == 0
    assert "_Br64_Bc32_" in (tmp_path / "mine.cu").read_text() and "int mine(" in (tmp_path / "mine.h").read_text()
    few = ("--nq", "1", "--nk", "30000", "--heads", "4", "--kv-heads", "2")
    assert export(capsys, "forward", *A100, *few, "-o", tmp_path)[0] == 0
    header = (tmp_path / "flashsmith_forward_bf16_d64_parts.h").read_text()
    assert f"args.parts = {plan('forward by parts').parts};" in header


def test_export_writes_machine_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert export(capsys, "backward", *A100, "--emit", "cubin", "--name", "mine", "-o", tmp_path)[0] == 0
    assert {p.name for p in tmp_path.iterdir()} == {"delta.cubin", "fused.cubin", "convert.cubin", "launch.json"}
    split = ("backward", *A100, "--deterministic", "--emit", "cubin", "-o", tmp_path)
    status, _, error = export(capsys, *split)
    assert status == 2 and "holds the machine code of mine. Name another folder, or replace it with --force." in error
    assert export(capsys, *split, "--force")[0] == 0  # what the description named before is gone
    assert {p.name for p in tmp_path.iterdir()} == {"delta.cubin", "dkdv.cubin", "dq.cubin", "launch.json"}


@pytest.mark.parametrize("name", ["notes.txt", "flashsmith_forward_bf16_d64.cu", "forward.cubin", "launch.json"])
def test_files_of_others_are_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    status, _, error = export(capsys, "forward", *A100, "-o", tmp_path)
    assert status == 2 and f"a file that no export made ({name})" in error and "--force" in error
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]
    assert export(capsys, "forward", *A100, "-o", tmp_path, "--force")[0] == 0
    assert (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("forward", *A100, "--name", "a-b"), "--name 'a-b' cannot begin the names of C functions"),
        (("forward", "--gpu", GPU, "--d", "60"), "d=60 is not served"),
        (("forward", *A100, "--tile", "Bc=17"), "Bc=17"),
        (("backward", *A100, "--kernel", "forward"), "--kernel forward is not part of this pass"),
        (("backward", *A100, "--sinks"), "takes sinks"),
    ],
    ids=["name", "d", "tile", "kernel", "feature"],
)
def test_a_bad_request_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    status, out, error = export(capsys, *arguments, "-o", tmp_path / "made")
    assert status == 2 and out == "" and reason in error and not (tmp_path / "made").exists()


def test_a_folder_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, error = export(capsys, "forward", *A100, "-o", tmp_path / "file")
    assert status == 2 and f"-o {tmp_path / 'file'}: " in error

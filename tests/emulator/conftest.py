"""Compile CUDA with NVRTC, wrap bare PTX, launch both on the emulator, and state what floats should come out."""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from flashsmith.emulator import GlobalMemory, Report, launch, parse

SECONDS_PER_TEST = 20  # a hang is a failure, not a stuck run

REGISTERS = """
    .reg .pred %p<8>;
    .reg .b16 %h<16>;
    .reg .b32 %r<32>;
    .reg .f32 %f<32>;
    .reg .b64 %rd<16>;
"""


@pytest.fixture(autouse=True)
def time_limit():
    """Stop a test that hangs, for instance in an emulated deadlock."""

    def stop(signum, frame):
        raise TimeoutError(f"the test took more than {SECONDS_PER_TEST} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS_PER_TEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


# ---- text --------------------------------------------------------------------------------------------------------


@functools.cache
def compile_cuda(source: str, arch: str = "compute_80", options: tuple[str, ...] = ()) -> str:
    """CUDA C++ text to PTX text; compiled once a session."""
    nvrtc = pytest.importorskip("cupy.cuda", reason="NVRTC's bindings (CuPy) are not installed").nvrtc
    program = nvrtc.createProgram(source, "snippet.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("--std=c++17", f"-arch={arch}", *options))
    except Exception as error:
        raise AssertionError(nvrtc.getProgramLog(program)) from error
    ptx = nvrtc.getPTX(program)
    return (ptx.decode() if isinstance(ptx, bytes) else ptx).rstrip("\0")


def ptx_kernel(
    body: str,
    params: Sequence[str] = (".u64",),
    *,
    declarations: str = "",
    head: str = "",
    target: str = "sm_80",
    name: str = "k",
) -> str:
    """Wrap a body in an entry with the parameters p0, p1, ... and REGISTERS to use."""
    listed = ", ".join(f".param {type_} p{i}" for i, type_ in enumerate(params))
    return (
        f".version 8.3\n.target {target}\n.address_size 64\n{head}\n"
        f".visible .entry {name}({listed})\n{{{REGISTERS}{declarations}\n{body}\n    ret;\n}}\n"
    )


# ---- launching ---------------------------------------------------------------------------------------------------


class Out(NamedTuple):
    """An argument to allocate, not to upload."""

    shape: int | tuple[int, ...]
    dtype: type | str | np.dtype


@dataclass(frozen=True)
class Run:
    """What a launch left behind: its pointer arguments read back in order, their addresses, the report."""

    arrays: list[np.ndarray]
    addresses: list[int]
    report: Report
    memory: GlobalMemory

    @property
    def out(self) -> np.ndarray:
        """The last pointer argument: by habit the output."""
        return self.arrays[-1]


def run_ptx(ptx: str, args: Sequence[object], grid=1, block=32, *, kernel: str | None = None, **options) -> Run:
    """Launch a kernel of a PTX text; arrays are uploaded, Outs allocated, the rest is passed on."""
    kernels = parse(ptx).kernels
    chosen = kernels[kernel] if kernel else next(iter(kernels.values()))
    memory = GlobalMemory()
    passed, buffers = [], []
    for arg in args:
        if isinstance(arg, Out):
            passed.append(memory.empty(arg.shape, arg.dtype))
            buffers.append((passed[-1], arg.shape, arg.dtype))
        elif isinstance(arg, np.ndarray):
            passed.append(memory.upload(arg))
            buffers.append((passed[-1], arg.shape, arg.dtype))
        else:
            passed.append(arg)
    report = launch(chosen, grid=grid, block=block, args=passed, memory=memory, **options)
    arrays = [memory.read(*buffer) for buffer in buffers]
    return Run(arrays, [address for address, *_ in buffers], report, memory)


def run_cuda(source: str, args: Sequence[object], *, arch: str = "compute_80", nvrtc_options=(), **options) -> Run:
    """Compile CUDA and launch its first kernel."""
    return run_ptx(compile_cuda(source, arch, tuple(nvrtc_options)), args, **options)


def apply(code: str, *operands: np.ndarray, out, threads: int = 128, target: str = "sm_80", diverge=True) -> np.ndarray:
    """Run PTX once an element: operands arrive in %a, %b, %c, %e; what it leaves in %d comes back as `out`.

    Emulators tend to have two ways to run an instruction, for whole warps and for some lanes. So the code runs again in
    a branch that only the odd lanes take: these must get the same, the even ones keep the zero they had.
    """
    result = run_ptx(*element_kernel(code, operands, out, threads, target, False)).out
    if diverge:
        odd_only = run_ptx(*element_kernel(code, operands, out, threads, target, True)).out
        bits = f"u{result.itemsize}"
        np.testing.assert_array_equal(odd_only.view(bits)[1::2], result.view(bits)[1::2], "odd lanes in a branch")
        assert not odd_only.view(bits)[::2].any(), "a lane that is not in the branch was written"
    return result


def element_kernel(code: str, operands, out, threads: int, target: str, diverge: bool) -> tuple:
    """The kernel of `apply` and how to launch it, as arguments of run_ptx."""
    count, size = len(operands[0]), np.dtype(out).itemsize
    block = min(threads, count)
    assert count % block == 0 and all(len(x) == count for x in operands)
    lines = ["mov.u32 %r0, %ctaid.x;", "mov.u32 %r1, %ntid.x;", "mov.u32 %r2, %tid.x;"]
    lines += ["mad.lo.s32 %r0, %r0, %r1, %r2;"]
    declared = [f".reg .{register_type(out)} %d;"]
    for i, (name, operand) in enumerate(zip("abce", operands, strict=False)):
        type_ = register_type(operand.dtype)
        declared.append(f".reg .{type_} %{name};")
        lines += [f"ld.param.u64 %rd0, [p{i}];", f"mad.wide.s32 %rd0, %r0, {operand.itemsize}, %rd0;"]
        lines += [f"ld.global.{type_} %{name}, [%rd0];"]
    if diverge:
        zero = "0f00000000" if register_type(out) == "f32" else "0"
        lines += [f"mov.{register_type(out)} %d, {zero};", "and.b32 %r1, %r0, 1;", "setp.eq.s32 %p7, %r1, 0;"]
        lines += ["@%p7 bra $even;"]
    lines += [code, "$even:"]
    lines += [f"ld.param.u64 %rd0, [p{len(operands)}];", f"mad.wide.s32 %rd0, %r0, {size}, %rd0;"]
    lines += [f"st.global.{register_type(out)} [%rd0], %d;"]
    params = [".u64"] * (len(operands) + 1)
    text = ptx_kernel("\n".join(lines), params, declarations=" ".join(declared), target=target)
    return text, [*operands, Out(count, out)], count // block, block


def register_type(dtype) -> str:
    """The register that holds a NumPy value: .f32 for float32, otherwise untyped bits."""
    dtype = np.dtype(dtype)
    return "f32" if dtype == np.float32 else f"b{8 * dtype.itemsize}"


# ---- numbers -----------------------------------------------------------------------------------------------------


def to_bf16(values) -> np.ndarray:
    """Float32 values to bfloat16 bits (uint16), round to nearest even; NaN becomes 0x7fff."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def from_bf16(bits) -> np.ndarray:
    """Bfloat16 bits to float32 values."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def pack2(low, high) -> np.ndarray:
    """Two 16-bit arrays to one of 32-bit registers."""
    low, high = (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) for x in (low, high))
    return low | high << 16


def unpack2(words, dtype=np.uint16) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high halves of 32-bit registers."""
    halves = np.ascontiguousarray(words, np.uint32).view(np.uint16).reshape(*np.shape(words), 2)
    return tuple(np.ascontiguousarray(halves[..., i]).view(dtype) for i in (0, 1))


def assert_same_floats(actual, expected) -> None:
    """Equal bit for bit, except that every NaN equals every other."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    bits = np.dtype(f"u{actual.itemsize}")
    same = (actual.view(bits) == expected.view(bits)) | (np.isnan(actual) & np.isnan(expected))
    wrong = np.flatnonzero(~same.ravel())
    assert not len(wrong), (
        f"{len(wrong)} differ, first at {wrong[0]}: {actual.flat[wrong[0]]!r} for {expected.flat[wrong[0]]!r}"
    )


def assert_within_ulps(actual, expected, ulps: float) -> None:
    """Float32 results beside float64 expectations, in units of the last place of the latter (specials must agree)."""
    expected = np.asarray(expected, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = expected.astype(np.float32)
        special = ~np.isfinite(rounded)
        error = np.abs(np.where(special, 0, actual - expected)) / np.spacing(np.abs(np.where(special, 1, rounded)))
    assert_same_floats(np.asarray(actual)[special], rounded[special])
    assert error.max() <= ulps, f"{error.max():.2f} ulp at {expected.flat[error.argmax()]!r}"


def mentions(error: BaseException, *texts: str) -> bool:
    """Whether a message names all of these, in any case."""
    return all(re.search(re.escape(text), str(error), re.IGNORECASE) for text in texts)

"""Mistakes that a GPU would punish, or silently forgive: each must stop the launch and say where."""

from __future__ import annotations

import time

import numpy as np
import pytest
from flashsmith.emulator import (
    Deadlock,
    DivergentBarrier,
    EmulatorError,
    GlobalMemory,
    Misaligned,
    OutOfBounds,
    PtxError,
    Uninitialised,
    UnknownInstruction,
    launch,
    parse,
)

from .conftest import Out, compile_cuda, mentions, ptx_kernel, run_cuda, run_ptx

i32, f32 = np.int32, np.float32
HEAD = """
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [p0];
    ld.param.u64 %rd1, [p1];
"""
SHARED = ".shared .align 16 .b8 buffer[256];"


def run_body(body: str, *, declarations: str = "", size: int = 32, **options):
    """Launch a body on an uploaded and an empty buffer of `size` floats."""
    text = ptx_kernel(HEAD + body, [".u64", ".u64"], declarations=declarations)
    return run_ptx(text, [np.arange(size, dtype=f32), Out(size, f32)], **options)


def test_every_error_is_an_emulator_error():
    """One except clause is enough for a caller."""
    for error in (PtxError, UnknownInstruction, OutOfBounds, Misaligned, Uninitialised, Deadlock, DivergentBarrier):
        assert issubclass(error, EmulatorError)


# ---- bounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "instruction", ["ld.global.f32 %f0, [%rd2];", "st.global.f32 [%rd2], 0f00000000;"], ids=["load", "store"]
)
@pytest.mark.parametrize("offset", [128, -4, 1 << 40], ids=["one past the end", "one before", "far away"])
def test_outside_a_buffer(instruction, offset):
    """The message names the instruction, the thread and the address."""
    memory = GlobalMemory()
    address = memory.upload(np.zeros(32, f32))
    text = ptx_kernel(
        f"""
        mov.u32 %r0, %tid.x;
        ld.param.u64 %rd0, [p0];
        mov.b64 %rd2, %rd0;
        setp.ne.u32 %p0, %r0, 5;
        @%p0 bra good;
        add.s64 %rd2, %rd0, {offset};
    good:
        {instruction}
        """
    )
    with pytest.raises(OutOfBounds) as caught:
        launch(parse(text).kernels["k"], grid=1, block=32, args=[address], memory=memory)
    message = str(caught.value)
    assert mentions(caught.value, instruction[:9], "thread", "5"), message
    assert f"{address + offset:x}" in message.lower().replace("_", "") or str(address + offset) in message, message


def test_the_last_element_is_inside():
    """The counterpart: no false alarm at the edge, for vectors too."""
    run = run_body(
        "ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%rd0+112]; st.global.v4.f32 [%rd1+112], {%f0, %f1, %f2, %f3};"
    )
    np.testing.assert_array_equal(run.out[-4:], [28, 29, 30, 31])


def test_a_vector_that_starts_inside_and_ends_outside():
    """Every byte counts: 16 bytes at the last but one float of 30."""
    with pytest.raises(OutOfBounds):
        run_body("ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%rd0+112];", size=30)


@pytest.mark.parametrize("size", [1, 3, 127, 128, 129])
def test_one_element_past_buffers_of_many_sizes(size):
    """No rounding up of an allocation hides a missing bounds check of the kernel."""
    source = """
    extern "C" __global__ void k(const unsigned char* x, unsigned char* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = x[i];
    }"""
    x = np.arange(size, dtype=np.uint8)
    assert (run_cuda(source, [x, Out(size, np.uint8), size], grid=5).out == x).all()
    with pytest.raises(OutOfBounds):
        run_cuda(source, [x, Out(size + 1, np.uint8), size + 1], grid=5)
    with pytest.raises(OutOfBounds):
        run_cuda(source, [np.arange(size + 1, dtype=np.uint8), Out(size, np.uint8), size + 1], grid=5)


def test_atomics_and_async_copies_are_checked_too():
    """red, atom and cp.async outside a buffer."""
    with pytest.raises(OutOfBounds):
        run_body("red.global.add.f32 [%rd0+128], 0f3F800000;")
    with pytest.raises(OutOfBounds):
        run_body("atom.global.add.u32 %r1, [%rd0+128], 1; st.global.u32 [%rd1], %r1;")
    body = "mov.u32 %r1, buffer; cp.async.cg.shared.global [%r1], [%rd0+128], 16; cp.async.wait_all;"
    with pytest.raises(OutOfBounds):
        run_body(body, declarations=SHARED)


def test_a_null_pointer():
    """Address 0 belongs to nobody."""
    text = ptx_kernel("ld.param.u64 %rd0, [p0]; ld.global.u32 %r0, [%rd0]; st.global.u32 [%rd0], %r0;")
    with pytest.raises(OutOfBounds):
        run_ptx(text, [0])


def test_lanes_that_are_switched_off_do_not_fault():
    """A guarded access with a wild address in the lanes that do not run it."""
    body = """
        setp.lt.u32 %p0, %r0, 8;
        mad.wide.u32 %rd2, %r0, 16, %rd0;
        mad.wide.u32 %rd3, %r0, 4, %rd1;
        @%p0 ld.global.f32 %f0, [%rd2];
        @%p0 st.global.f32 [%rd3], %f0;
    """
    np.testing.assert_array_equal(run_body(body).out[:8], np.arange(0, 32, 4))


@pytest.mark.parametrize(
    "instruction", ["ld.shared.f32 %f0, [%r1];", "st.shared.f32 [%r1], 0f00000000;"], ids=["load", "store"]
)
def test_past_shared_memory(instruction):
    """256 static bytes plus what the launch gives: the byte behind them is outside."""
    body = "mov.u32 %r1, buffer; add.s32 %r1, %r1, {};" + instruction
    run_body(body.format(252), declarations=SHARED)
    with pytest.raises(OutOfBounds) as caught:
        run_body(body.format(256), declarations=SHARED)
    assert mentions(caught.value, instruction[:9]), str(caught.value)
    run_body(body.format(256 + 60), declarations=SHARED, shared_bytes=64)
    with pytest.raises(OutOfBounds):
        run_body(body.format(256 + 64), declarations=SHARED, shared_bytes=64)
    with pytest.raises(OutOfBounds):
        run_body(body.format(-4), declarations=SHARED)


def test_ldmatrix_past_shared_memory():
    """A row address whose 16 bytes do not fit."""
    body = "mov.u32 %r1, buffer; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1+256];"
    with pytest.raises(OutOfBounds):
        run_body(body, declarations=SHARED)


def test_shared_memory_of_the_neighbouring_block_is_outside():
    """Blocks that run together must not reach each other."""
    source = """
    extern __shared__ float s[];
    extern "C" __global__ void k(float* out, int i) {
        s[threadIdx.x + i] = 1.f;
        __syncthreads();
        out[threadIdx.x] = s[0];
    }"""
    run_cuda(source, [Out(32, f32), 0], grid=8, shared_bytes=128)
    with pytest.raises(OutOfBounds):
        run_cuda(source, [Out(32, f32), 1], grid=8, shared_bytes=128)


# ---- what nobody wrote ---------------------------------------------------------------------------------------------


def test_reading_shared_memory_that_nobody_wrote():
    """Poison without the checks, an error that names the instruction with them; what was written is quiet."""
    body = """
        mov.u32 %r1, buffer;
        mad.lo.s32 %r1, %r0, 4, %r1;
        st.shared.u32 [%r1], %r0;
        bar.sync 0;
        ld.shared.u32 %r2, [%r1+{}];
        mad.wide.u32 %rd2, %r0, 4, %rd1;
        st.global.u32 [%rd2], %r2;
    """
    assert np.isnan(run_body(body.format(4), declarations=SHARED).out[31])
    with pytest.raises(Uninitialised) as caught:
        run_body(body.format(4), declarations=SHARED, check_races=True)
    assert mentions(caught.value, "ld.shared"), str(caught.value)
    run_body(body.format(0), declarations=SHARED, check_races=True)


# ---- alignment ---------------------------------------------------------------------------------------------------

MISALIGNED = {
    "f32 at 2": "ld.global.f32 %f0, [%rd0+2];",
    "v4 at 8": "ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%rd0+8];",
    "v2 store at 4": "st.global.v2.f32 [%rd1+4], {%f0, %f1};",
    "u64 at 4": "ld.global.u64 %rd2, [%rd0+4];",
    "u16 at 1": "ld.global.u16 %r1, [%rd0+1];",
    "shared v4 at 4": "mov.u32 %r1, buffer; ld.shared.v4.f32 {%f0, %f1, %f2, %f3}, [%r1+4];",
    "ldmatrix at 8": "mov.u32 %r1, buffer; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1+8];",
    "cp.async at 8": "mov.u32 %r1, buffer; cp.async.cg.shared.global [%r1+8], [%rd0], 16;",
    "cp.async from 4": "mov.u32 %r1, buffer; cp.async.cg.shared.global [%r1], [%rd0+4], 16;",
    "atomic at 2": "red.global.add.u32 [%rd0+2], 1;",
}


@pytest.mark.parametrize("case", MISALIGNED)
def test_misaligned_access(case):
    """The whole size of the access is its alignment."""
    with pytest.raises(Misaligned) as caught:
        run_body(MISALIGNED[case], declarations=SHARED)
    instruction = MISALIGNED[case].rstrip(";").split("; ")[-1]
    assert mentions(caught.value, instruction.split()[0]), str(caught.value)


# ---- text --------------------------------------------------------------------------------------------------------

UNKNOWN = {
    "invented": "frobnicate.b32 %r1, %r0;",
    "video": "vadd4.s32.s32.s32 %r1, %r0, %r0, %r0;",
    "invented modifier": "add.sideways.s32 %r1, %r0, %r0;",
    "invented type": "mov.b33 %r1, %r0;",
    "invented shape": """mma.sync.aligned.m17n9k16.row.col.f32.f16.f16.f32
        {%f0, %f1, %f2, %f3}, {%r0, %r0, %r0, %r0}, {%r0, %r0}, {%f0, %f1, %f2, %f3};""",
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_instruction_is_refused_by_name(case):
    """An instruction that the emulator does not know never passes for a no-op."""
    code = UNKNOWN[case]
    with pytest.raises(EmulatorError) as caught:
        run_body(code)
    assert isinstance(caught.value, (UnknownInstruction, PtxError))
    assert mentions(caught.value, code.split()[0].split(".")[0]), str(caught.value)


def test_invented_opcode_is_an_unknown_instruction():
    """The class that callers look for; its message quotes the whole opcode."""
    with pytest.raises(UnknownInstruction, match=r"frobnicate\.b32"):
        run_body("frobnicate.b32 %r1, %r0;")


def test_unknown_special_register():
    """A name nobody declared."""
    with pytest.raises(EmulatorError):
        run_body("mov.u32 %r1, %nosuchregister; st.global.u32 [%rd1], %r1;")


def test_trap():
    """A kernel that stops itself, as a failed assert does; not before a lane gets there."""
    run_body("setp.gt.u32 %p0, %r0, 31;\n@%p0 trap;")
    with pytest.raises(EmulatorError):
        run_body("setp.gt.u32 %p0, %r0, 30;\n@%p0 trap;")


# ---- barriers ----------------------------------------------------------------------------------------------------


def seconds_until_error(source: str, errors, *, block: int = 64, args=None) -> float:
    start = time.perf_counter()
    with pytest.raises(errors):
        run_cuda(source, args or [Out(64, i32)], block=block)
    return time.perf_counter() - start


def test_lanes_of_a_warp_at_two_different_barriers():
    """Half of the warp waits at one bar.sync, half at the other: neither can ever fill."""
    source = """
    extern "C" __global__ void k(int* out) {
        if (threadIdx.x & 1) asm volatile("bar.sync 1;" ::: "memory");
        else asm volatile("bar.sync 2;" ::: "memory");
        out[threadIdx.x] = 1;
    }"""
    assert seconds_until_error(source, (DivergentBarrier, Deadlock), block=32) < 15


def test_warps_at_two_different_barriers():
    """Warp 0 waits for everybody at barrier 1, warp 1 at barrier 2."""
    source = """
    extern "C" __global__ void k(int* out) {
        if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
        else asm volatile("bar.sync 2, 64;" ::: "memory");
        out[threadIdx.x] = 1;
    }"""
    assert seconds_until_error(source, (DivergentBarrier, Deadlock)) < 15


def test_waiting_at_a_barrier_for_a_thread_that_waits_for_us():
    """Even lanes stand at the barrier, odd ones spin for a flag that is set behind it."""
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ volatile int flag;
        flag = 0;
        __syncthreads();
        if (threadIdx.x & 1) { while (flag == 0) { } }
        __syncthreads();
        flag = 1;
        out[threadIdx.x] = 1;
    }"""
    assert seconds_until_error(source, (DivergentBarrier, Deadlock)) < 15


def test_barrier_reached_by_a_part_of_a_warp():
    """Lanes under an if reach __syncthreads while their warp mates go another way and stay alive."""
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ int s[64];
        int t = threadIdx.x;
        s[t] = t;
        if (t % 32 < 16) asm volatile("bar.sync 0;" ::: "memory");
        out[t] = s[t ^ 1];
        asm volatile("bar.sync 1;" ::: "memory");
        out[t] += 1;
    }"""
    assert seconds_until_error(source, (DivergentBarrier, Deadlock)) < 15


def test_a_flag_that_nobody_sets():
    """A loop without an end is told from a long one."""
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ volatile int flag;
        flag = 0;
        while (flag == 0) { }
        out[threadIdx.x] = 1;
    }"""
    assert seconds_until_error(source, Deadlock) < 15


# ---- launches ----------------------------------------------------------------------------------------------------

ADD_ONE = 'extern "C" __global__ void k(int* out, int x, float y) { out[threadIdx.x] = x + (int)y; }'


def launch_add_one(grid=1, block=32, args=None, **options):
    """Launch ADD_ONE with something wrong."""
    memory = GlobalMemory()
    out = memory.empty(1024, i32)
    kernel = parse(compile_cuda(ADD_ONE)).kernels["k"]
    return launch(
        kernel, grid=grid, block=block, args=[out, 1, 2.0] if args is None else [out, *args], memory=memory, **options
    )


def test_the_launch_that_the_refusals_are_variants_of():
    """It works when nothing is wrong, also at the limits."""
    for grid, block in ((1, 32), ((1, 1, 1), (32, 1, 1)), (2, 1024), ((1, 2, 3), (8, 8, 16)), ((70000, 1, 1), 1)):
        assert launch_add_one(grid, block).global_written_bytes > 0


REFUSED = {
    "zero grid": {"grid": 0},
    "zero grid in y": {"grid": (1, 0, 1)},
    "zero block": {"block": 0},
    "negative grid": {"grid": -1},
    "block of 2048": {"block": 2048},
    "block of 32 x 33": {"block": (32, 33, 1)},
    "block of 65 in z": {"block": (1, 1, 65)},
    "grid of 65536 in y": {"grid": (1, 65536, 1)},
    "grid of 65536 in z": {"grid": (1, 1, 65536)},
    "one argument missing": {"args": [1]},
    "one argument too many": {"args": [1, 2.0, 3]},
    "no arguments": {"args": []},
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_launch_that_cuda_would_refuse(case):
    """Before anything runs."""
    with pytest.raises((ValueError, EmulatorError)):
        launch_add_one(**REFUSED[case])


@pytest.mark.parametrize("args", [[1], [1, 2.0, 3], []], ids=["missing", "too many", "none"])
def test_wrong_number_of_arguments_is_a_value_error(args):
    """The message gives both numbers."""
    with pytest.raises(ValueError) as caught:
        launch_add_one(args=args)
    assert mentions(caught.value, str(len(args) + 1), "3"), str(caught.value)


@pytest.mark.parametrize("size", [0, 3, 5, 8])
def test_bytes_of_another_size_are_a_value_error(size):
    """A by-value argument must fill its parameter exactly."""
    assert launch_add_one(args=[bytes(4), 2.0]).global_written_bytes == 128
    with pytest.raises(ValueError):
        launch_add_one(args=[bytes(size), 2.0])
    with pytest.raises(ValueError):
        launch_add_one(args=[1, bytes(size)])


@pytest.mark.parametrize("args", [[2**40, 2.0], [2.5, 2.0], ["1", 2.0], [1, None]], ids=str)
def test_a_value_that_its_parameter_cannot_hold(args):
    """No silent truncation of an int, no float for an int."""
    with pytest.raises((ValueError, TypeError)):
        launch_add_one(args=args)

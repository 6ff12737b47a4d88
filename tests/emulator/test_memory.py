"""Loads, stores, atomics, parameters, local and shared memory, and the buffers of GlobalMemory."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from flashsmith.emulator import GlobalMemory

from .conftest import Out, ptx_kernel, run_cuda, run_ptx

i32, u32, i64, u64, f16, f32 = np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32
FIRST_LINES = """
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [p0];
    ld.param.u64 %rd1, [p1];
"""


# ---- GlobalMemory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f2", "f4", "i4", "u2", "i8", "u1"])
def test_upload_and_read_back(dtype):
    """What goes in comes out, of any type and shape, at an aligned address."""
    memory = GlobalMemory()
    array = np.arange(3 * 5 * 7).reshape(3, 5, 7).astype(dtype)
    address = memory.upload(array)
    assert isinstance(address, int) and address % 256 == 0
    np.testing.assert_array_equal(memory.read(address, array.shape, array.dtype), array)


def test_upload_copies():
    """Later changes of the host's array stay on the host, and what is read is the reader's own."""
    memory = GlobalMemory()
    array = np.ones(8, f32)
    address = memory.upload(array)
    array[:] = 2
    memory.read(address, 8, f32)[:] = 3
    np.testing.assert_array_equal(memory.read(address, 8, f32), np.ones(8))


def test_upload_of_a_strided_view():
    """Elements arrive in C order."""
    memory = GlobalMemory()
    view = np.arange(24, dtype=i32).reshape(4, 6).T[::2]
    np.testing.assert_array_equal(memory.read(memory.upload(view), view.shape, i32), view)


def test_empty_is_poison():
    """Memory that nobody wrote reads as NaN."""
    memory = GlobalMemory()
    for dtype in (f16, f32):
        assert np.isnan(memory.read(memory.empty((3, 5), dtype), (3, 5), dtype)).all()
    assert (memory.read(memory.empty(7, np.uint8), 7, np.uint8) == 0xFF).all()


def test_allocations_stand_apart():
    """Between two buffers lies a gap, so that running off one does not reach the other; addresses need 64 bits."""
    memory = GlobalMemory()
    addresses = [memory.upload(np.zeros(1000, np.uint8)) for _ in range(20)]
    starts = sorted(addresses)
    assert min(np.diff(starts)) >= 1000 + 256
    assert len(set(addresses)) == 20


def test_many_bytes():
    """Growing does not move or lose what is there."""
    memory = GlobalMemory()
    first = memory.upload(np.arange(1000, dtype=i32))
    big = memory.upload(np.full(20_000_000, 7, np.uint8))
    np.testing.assert_array_equal(memory.read(first, 1000, i32), np.arange(1000))
    assert memory.read(big, 20_000_000, np.uint8).sum() == 140_000_000


# ---- global loads and stores -------------------------------------------------------------------------------------

VECTORS = {
    "v2.f32": "{%f0, %f1}",
    "v4.f32": "{%f0, %f1, %f2, %f3}",
    "v2.u32": "{%r4, %r5}",
    "v4.b32": "{%r4, %r5, %r6, %r7}",
    "v2.u64": "{%rd4, %rd5}",
    "v4.u16": "{%h0, %h1, %h2, %h3}",
    "v2.b16": "{%h0, %h1}",
    "u64": "%rd4",
    "b16": "%h0",
}


@pytest.mark.parametrize("suffix", VECTORS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_vectors_travel_through_registers(suffix, space):
    """Load, store to shared and back when asked, store: bytes arrive in order."""
    registers = VECTORS[suffix]
    size = int(suffix[-2:]) // 8 * (registers.count(",") + 1)
    x = np.random.default_rng(0).integers(0, 256, 64 * size, np.uint8)
    body = (
        FIRST_LINES
        + f"""
        mad.wide.u32 %rd2, %r0, {size}, %rd0;
        mad.wide.u32 %rd3, %r0, {size}, %rd1;
        ld.global.{suffix} {registers}, [%rd2];
    """
    )
    if space == "shared":
        body += f"""
        mov.u32 %r1, buffer;
        mad.lo.s32 %r1, %r0, {size}, %r1;
        st.shared.{suffix} [%r1], {registers};
        bar.sync 0;
        xor.b32 %r2, %r0, 33;
        mov.u32 %r1, buffer;
        mad.lo.s32 %r1, %r2, {size}, %r1;
        ld.shared.{suffix} {registers}, [%r1];
        """
    body += f"st.global.{suffix} [%rd3], {registers};"
    text = ptx_kernel(body, [".u64", ".u64"], declarations=".shared .align 16 .b8 buffer[1024];")
    out = run_ptx(text, [x, Out(x.shape, np.uint8)], block=64).out
    expected = x if space == "global" else x.reshape(64, size)[np.arange(64) ^ 33].ravel()
    np.testing.assert_array_equal(out, expected)


def test_vector_stores_with_gaps_leave_the_gaps():
    """Only the bytes of the vector are written."""
    body = (
        FIRST_LINES
        + """
        mad.wide.u32 %rd3, %r0, 32, %rd1;
        cvt.rn.f32.u32 %f0, %r0;
        st.global.v2.f32 [%rd3+8], {%f0, %f0};
    """
    )
    out = run_ptx(ptx_kernel(body, [".u64", ".u64"]), [np.zeros(1, i32), Out((32, 8), f32)]).out
    np.testing.assert_array_equal(out[:, 2:4], np.repeat(np.arange(32)[:, None], 2, 1))
    assert np.isnan(out[:, [0, 1, 4, 5, 6, 7]]).all()


NARROW = {"u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16}


@pytest.mark.parametrize("type_", NARROW)
def test_narrow_loads_extend(type_):
    """Into a wide register: sign of s8 and s16, zeros otherwise; .nc and cache hints change nothing."""
    dtype = NARROW[type_]
    x = np.arange(256, dtype=np.uint8).view(dtype)
    size, count = x.itemsize, len(x)
    for space in ("global", "global.nc", "global.L1::no_allocate", "volatile.global"):
        body = (
            FIRST_LINES
            + f"""
            mad.wide.u32 %rd2, %r0, {size}, %rd0;
            mad.wide.u32 %rd3, %r0, 4, %rd1;
            ld.{space}.{type_} %r4, [%rd2];
            st.global.u32 [%rd3], %r4;
        """
        )
        out = run_ptx(ptx_kernel(body, [".u64", ".u64"]), [x, Out(count, i32)], block=count).out
        np.testing.assert_array_equal(out, x.astype(i32), space)


def test_narrow_stores_touch_their_bytes_only():
    """st.u8 and st.u16 of wide registers cut to the low bits; neighbours stay poison."""
    body = (
        FIRST_LINES
        + """
        mul.lo.u32 %r1, %r0, 65793;
        mad.wide.u32 %rd2, %r0, 4, %rd0;
        mad.wide.u32 %rd3, %r0, 4, %rd1;
        st.global.u8 [%rd2+1], %r1;
        st.global.u16 [%rd3+2], %r1;
    """
    )
    run = run_ptx(ptx_kernel(body, [".u64", ".u64"]), [Out((32, 4), np.uint8), Out((32, 2), np.uint16)])
    value = np.arange(32) * 65793
    byte, half = run.arrays
    np.testing.assert_array_equal(byte[:, 1], value & 255)
    np.testing.assert_array_equal(half[:, 1], value & 65535)
    assert (byte[:, [0, 2, 3]] == 255).all() and (half[:, 0] == 65535).all()


def test_addresses_are_64_bits_wide():
    """A detour of 2^35 bytes and back; a negative constant offset; an index of 64 bits."""
    body = (
        FIRST_LINES
        + """
        mad.wide.s32 %rd2, %r0, -4, %rd0;
        add.s64 %rd2, %rd2, 34359738368;
        add.s64 %rd2, %rd2, -34359738244;
        ld.global.u32 %r1, [%rd2+0];
        ld.global.u32 %r2, [ %rd2 + -0 ];
        add.s32 %r1, %r1, %r2;
        mad.wide.u32 %rd3, %r0, 4, %rd1;
        add.s64 %rd3, %rd3, 16;
        st.global.u32 [%rd3+-16], %r1;
    """
    )
    x = np.arange(32, dtype=i32)
    out = run_ptx(ptx_kernel(body, [".u64", ".u64"]), [x, Out(32, i32)]).out
    np.testing.assert_array_equal(out, 2 * x[::-1])


def test_pointer_arithmetic_of_a_strided_tensor():
    """Strides as 64-bit arguments, as the attention kernels take them."""
    source = """
    extern "C" __global__ void k(const float* x, float* out, long long row, long long column, int rows, int columns) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < rows * columns) out[i] = x[(i / columns) * row + (i % columns) * column];
    }"""
    x = np.arange(7 * 11 * 2, dtype=f32).reshape(11, 14)
    out = run_cuda(source, [x, Out((7, 11), f32), 1 * 2, 14, 7, 11], grid=3).out
    np.testing.assert_array_equal(out, x[:, ::2].T)


# ---- in a branch -------------------------------------------------------------------------------------------------


def test_memory_in_a_branch():
    """Lanes 3, 6, 9 ... load, store, add and copy in every space; the others leave everything alone."""
    source = """
    extern "C" __global__ void k(const float4* x, float4* out, int* tickets, int* counter) {
        __shared__ float4 s[96];
        __shared__ int own;
        int t = threadIdx.x;
        s[t] = float4{-1, -1, -1, -1};
        if (t == 0) own = 100;
        __syncthreads();
        if (t % 3 == 0) {
            float4 v = x[t];
            int local[4] = {t, t + 1, t + 2, t + 3};
            local[(t / 3) & 3] = -t;
            s[95 - t] = float4{v.w, v.z, v.y, (float)local[(t / 6) & 3]};
            tickets[t] = atomicAdd(counter, 2) + atomicAdd(&own, 1000);
        }
        __syncthreads();
        if (t & 1) out[t] = s[t];
    }"""
    x = np.arange(384, dtype=f32).reshape(96, 4)
    run = run_cuda(source, [x, Out((96, 4), f32), np.full(96, -5, i32), np.zeros(1, i32)], block=96, check_races=True)
    shared = np.full((96, 4), -1, f32)
    for t in range(0, 96, 3):
        last = -t if t // 3 & 3 == t // 6 & 3 else t + (t // 6 & 3)
        shared[95 - t] = [x[t, 3], x[t, 2], x[t, 1], last]
    out, tickets, counter = run.arrays[1:]
    np.testing.assert_array_equal(out[1::2], shared[1::2])
    assert np.isnan(out[::2]).all()
    third = np.arange(96) % 3 == 0
    assert (tickets[~third] == -5).all() and counter[0] == 64
    np.testing.assert_array_equal(np.sort(tickets[third] % 1000 - 100), np.arange(0, 64, 2))
    np.testing.assert_array_equal(np.sort(tickets[third] // 1000), np.arange(32))
    assert run.report.race_count == 0


# ---- parameters --------------------------------------------------------------------------------------------------


def test_struct_passed_by_value():
    """Its bytes follow C's layout, padding included."""
    source = """
    struct Problem { char tag; short heads; int n; float scale; long long stride[3]; double unused; };
    extern "C" __global__ void k(int before, Problem p, float* out, char after) {
        int t = threadIdx.x;
        out[t] = before + p.tag * 2 + p.heads * 3 + p.n * 5 + p.scale + p.stride[t % 3] + after;
    }"""
    problem = struct.pack("<bxhifxxxxqqqd", -3, 300, 70000, 0.5, 1 << 20, 2, 3, 0.0)
    out = run_cuda(source, [11, problem, Out(32, f32), 13]).out
    expected = 11 - 6 + 900 + 350000 + 0.5 + np.array([1 << 20, 2, 3])[np.arange(32) % 3] + 13
    np.testing.assert_array_equal(out, expected)


def test_scalars_of_every_type():
    """Python numbers and NumPy scalars take the parameter's type, not the other way round."""
    body = """
        ld.param.u64 %rd0, [p0];
        ld.param.b32 %r0, [p1];
        ld.param.f32 %f0, [p1];
        ld.param.s32 %r1, [p2];
        ld.param.u64 %rd1, [p3];
        ld.param.s16 %r2, [p4];
        ld.param.u8 %r3, [p5];
        st.global.v2.b32 [%rd0], {%r0, %r1};
        st.global.f32 [%rd0+8], %f0;
        st.global.u64 [%rd0+16], %rd1;
        st.global.v2.u32 [%rd0+24], {%r2, %r3};
    """
    text = ptx_kernel(body, [".u64", ".f32", ".u32", ".u64", ".u16", ".u8"])
    for args in ([0.125, -5, -6, -7, 250], [f32(0.125), i32(-5), i64(-6), np.int16(-7), np.uint8(250)]):
        out = run_ptx(text, [Out(8, u32), *args]).out
        assert out[0] == out[2] == f32(0.125).view(u32)
        assert out[1] == 2**32 - 5
        assert out[4:6].view(i64)[0] == -6
        assert out[6] == 2**32 - 7 and out[7] == 250
    assert run_ptx(text, [Out(8, u32), 3, 4, 5, 6, 7]).out[2] == f32(3).view(u32)  # an int for an f32


def test_parameters_by_address():
    """mov takes a parameter's address; ld.param adds to it, also as a vector."""
    body = """
        ld.param.u64 %rd0, [p0];
        mov.b64 %rd1, p1;
        ld.param.v2.u32 {%r0, %r1}, [%rd1+8];
        ld.param.u32 %r2, [p1+4];
        st.global.u32 [%rd0], %r0;
        st.global.u32 [%rd0+4], %r1;
        st.global.u32 [%rd0+8], %r2;
    """
    text = ptx_kernel(body, [".u64", ".align 8 .b8"]).replace(".b8 p1", ".b8 p1[16]")
    assert run_ptx(text, [Out(3, u32), struct.pack("<4I", 10, 20, 30, 40)]).out.tolist() == [30, 40, 20]


# ---- local memory ------------------------------------------------------------------------------------------------


def test_local_array_with_a_dynamic_index():
    """Every thread owns its array, in all blocks."""
    source = """
    extern "C" __global__ void k(const int* index, int* out) {
        int a[16];
        int g = blockIdx.x * blockDim.x + threadIdx.x;
        for (int i = 0; i < 16; i++) a[i] = g * 100 + i;
        for (int i = 0; i < 4; i++) a[index[(g + i) % 64] & 15] += 1000 * (i + 1);
        int sum = 0;
        for (int i = 0; i < 16; i++) sum += a[i] * (i + 1);
        out[g] = sum + a[index[g % 64] & 15];
    }"""
    index = np.random.default_rng(1).integers(0, 16, 64).astype(i32)

    def model(g: int) -> int:
        a = [g * 100 + i for i in range(16)]
        for i in range(4):
            a[index[(g + i) % 64]] += 1000 * (i + 1)
        return sum(x * (i + 1) for i, x in enumerate(a)) + a[index[g % 64]]

    run = run_cuda(source, [index, Out(192, i32)], grid=3, block=64)
    np.testing.assert_array_equal(run.out, [model(g) for g in range(192)])


# ---- shared memory -----------------------------------------------------------------------------------------------


def test_static_and_dynamic_shared_memory():
    """Two static arrays and the dynamic one lie apart; blocks have their own."""
    source = """
    extern __shared__ float dynamic[];
    extern "C" __global__ void k(float* out) {
        __shared__ float a[64];
        __shared__ int b[64];
        int t = threadIdx.x;
        a[t] = t + blockIdx.x; b[t] = 2 * t; dynamic[t] = 3 * t; dynamic[64 + t] = 5;
        __syncthreads();
        out[blockIdx.x * 64 + t] = a[63 - t] + b[63 - t] + dynamic[63 - t] + dynamic[127 - t];
    }"""
    out = run_cuda(source, [Out((3, 64), f32)], grid=3, block=64, shared_bytes=512).out
    np.testing.assert_array_equal(out, 6 * np.arange(63, -1, -1) + 5 + np.arange(3)[:, None])


def test_shared_memory_starts_as_nan():
    """What a kernel forgot to write must not read as a plausible number, in any of the float types."""
    body = (
        FIRST_LINES
        + """
        mov.u32 %r1, buffer;
        mad.lo.s32 %r1, %r0, 4, %r1;
        ld.shared.u32 %r2, [%r1];
        mad.wide.u32 %rd3, %r0, 4, %rd1;
        st.global.u32 [%rd3], %r2;
    """
    )
    text = ptx_kernel(body, [".u64", ".u64"], declarations=".shared .align 4 .b8 buffer[128];")
    words = run_ptx(text, [np.zeros(1, i32), Out(32, u32)], grid=1).out
    assert np.isnan(words.view(f32)).all() and np.isnan(words.view(f16)).all()
    assert np.isnan((words << 16).view(f32)).all()  # the low halves as bfloat16


def test_shared_memory_is_poisoned_anew_for_every_block():
    """A block must not see what another one left."""
    source = """
    extern "C" __global__ void k(float* out) {
        __shared__ volatile float s[32];
        if (blockIdx.x % 2 == 0) s[threadIdx.x] = 1.f;
        out[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];
    }"""
    out = run_cuda(source, [Out((600, 32), f32)], grid=600).out
    assert (out[::2] == 1).all() and np.isnan(out[1::2]).all()


def test_generic_pointer_names_shared_or_global_memory():
    """A pointer chosen at run time: ld and st without a space."""
    body = (
        FIRST_LINES
        + """
        mov.u32 %r1, buffer;
        cvt.u64.u32 %rd2, %r1;
        cvta.shared.u64 %rd2, %rd2;
        mad.wide.u32 %rd2, %r0, 4, %rd2;
        st.u32 [%rd2], %r0;
        bar.sync 0;
        mad.wide.u32 %rd3, %r0, 4, %rd0;
        setp.lt.u32 %p0, %r0, 16;
        selp.b64 %rd4, %rd2, %rd3, %p0;
        ld.u32 %r2, [%rd4];
        mad.wide.u32 %rd5, %r0, 4, %rd1;
        st.u32 [%rd5], %r2;
    """
    )
    text = ptx_kernel(body, [".u64", ".u64"], declarations=".shared .align 4 .b8 buffer[128];")
    t = np.arange(32)
    out = run_ptx(text, [(t + 500).astype(i32), Out(32, i32)]).out
    np.testing.assert_array_equal(out, np.where(t < 16, t, t + 500))


# ---- atomics -----------------------------------------------------------------------------------------------------


def test_atomic_add_of_colliding_threads():
    """Integers and floats, many threads an address, the result not read (red)."""
    source = """
    extern "C" __global__ void k(const int* x, int* isum, float* fsum, unsigned long long* lsum) {
        int g = blockIdx.x * 64 + threadIdx.x;
        atomicAdd(isum + g % 5, x[g]);
        atomicAdd(fsum + g % 3, (float)x[g]);
        atomicAdd(lsum, 1ull << 33);
    }"""
    x = np.random.default_rng(2).integers(-99, 99, 256).astype(i32)
    run = run_cuda(source, [x, np.zeros(5, i32), np.ones(3, f32), np.zeros(1, u64)], grid=4, block=64)
    np.testing.assert_array_equal(run.arrays[1], [x[i::5].sum() for i in range(5)])
    np.testing.assert_array_equal(run.arrays[2], [1 + x[i::3].sum() for i in range(3)])
    assert run.arrays[3][0] == 256 << 33


TICKETS = """
extern "C" __global__ void k(int* counter, int* of_grid, int* of_block) {
    __shared__ int own;
    int t = threadIdx.x, g = blockIdx.x * 96 + t;
    if (t == 0) own = 0;
    __syncthreads();
    of_grid[g] = atomicAdd(counter, 1);
    of_block[g] = atomicAdd(&own, 1);
}"""


def test_atomic_add_hands_out_every_ticket_once():
    """The old values that colliding threads get are all different: in global memory and in each block's shared."""
    run = run_cuda(TICKETS, [np.zeros(1, i32), Out(288, i32), Out((3, 96), i32)], grid=3, block=96)
    np.testing.assert_array_equal(np.sort(run.arrays[1]), np.arange(288))
    np.testing.assert_array_equal(np.sort(run.arrays[2]), np.tile(np.arange(96), (3, 1)))


def test_atomic_float_add_returns_running_sums():
    """The old values of one address, sorted, are the partial sums."""
    source = 'extern "C" __global__ void k(float* c, float* out) { out[threadIdx.x] = atomicAdd(c, 1.f); }'
    run = run_cuda(source, [np.full(1, 10, f32), Out(64, f32)], block=64)
    np.testing.assert_array_equal(np.sort(run.out), 10 + np.arange(64))
    assert run.arrays[0][0] == 74


def test_atomic_minimum_and_maximum():
    """Signed and unsigned differ at the top bit; exchange, and, or, xor beside them."""
    source = """
    extern "C" __global__ void k(const int* x, int* s, unsigned* u) {
        int v = x[threadIdx.x];
        atomicMax(s, v); atomicMin(s + 1, v); atomicMax(u, (unsigned)v); atomicMin(u + 1, (unsigned)v);
        atomicAnd(u + 2, (unsigned)v); atomicOr(u + 3, (unsigned)v); atomicXor(u + 4, (unsigned)v);
        atomicExch(s + 2, 5);
    }"""
    x = np.random.default_rng(3).integers(-(2**31), 2**31, 64).astype(i32)
    run = run_cuda(source, [x, np.zeros(3, i32), np.array([0, 2**32 - 1, 2**32 - 1, 0, 0], u32)], block=64)
    xu = x.view(u32)
    assert run.arrays[1].tolist() == [x.max(), x.min(), 5]
    folded = [np.bitwise_and.reduce(xu), np.bitwise_or.reduce(xu), np.bitwise_xor.reduce(xu)]
    assert run.arrays[2].tolist() == [xu.max(), xu.min(), *folded]


def test_compare_and_swap_loop():
    """A float product over colliding threads: each try must see the others' work."""
    source = """
    extern "C" __global__ void k(unsigned* word, unsigned* wins) {
        unsigned old = *(volatile unsigned*)word, seen;
        int tries = 0;
        for (;;) {
            seen = atomicCAS(word, old, old * 3u + 1u);
            tries++;
            if (seen == old) break;
            old = seen;
        }
        wins[threadIdx.x] = tries;
    }"""
    run = run_cuda(source, [np.array([7], u32), Out(48, u32)], block=48)
    value = 7
    for _ in range(48):
        value = (3 * value + 1) % 2**32
    assert run.arrays[0][0] == value
    assert run.out.min() == 1 and run.out.max() <= 48  # somebody wins at once, nobody loses to the same rival twice


def test_shared_atomics():
    """A histogram in shared memory, per block."""
    source = """
    extern "C" __global__ void k(const int* x, int* out) {
        __shared__ int h[8];
        __shared__ float f;
        int t = threadIdx.x;
        if (t < 8) h[t] = 0;
        if (t == 8) f = 0.f;
        __syncthreads();
        int v = x[blockIdx.x * 96 + t];
        atomicAdd(&h[v], 1);
        if (v & 1) atomicAdd(&f, 0.5f);
        __syncthreads();
        if (t < 8) out[blockIdx.x * 9 + t] = h[t];
        if (t == 8) out[blockIdx.x * 9 + 8] = (int)(2 * f);
    }"""
    x = np.random.default_rng(4).integers(0, 8, (2, 96)).astype(i32)
    out = run_cuda(source, [x, Out((2, 9), i32)], grid=2, block=96, check_races=True)
    counts = np.stack([np.bincount(row, minlength=8) for row in x])
    np.testing.assert_array_equal(out.out, np.column_stack([counts, (x & 1).sum(1)]))
    assert out.report.race_count == 0


def test_reduction_instruction_under_a_predicate():
    """red.global.add.f32 of the lanes whose guard holds."""
    body = (
        FIRST_LINES
        + """
        and.b32 %r1, %r0, 3;
        setp.eq.s32 %p0, %r1, 2;
        mad.wide.u32 %rd2, %r1, 4, %rd0;
        mov.f32 %f0, 0f40000000;
        @%p0 red.global.add.f32 [%rd2], %f0;
        @!%p0 red.global.add.u32 [%rd1], 1;
    """
    )
    run = run_ptx(ptx_kernel(body, [".u64", ".u64"]), [np.zeros(4, f32), np.zeros(1, i32)], grid=2)
    assert run.arrays[0].tolist() == [0, 0, 32, 0]
    assert run.arrays[1].tolist() == [48]

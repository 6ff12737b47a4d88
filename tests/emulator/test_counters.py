"""What a launch counts, against what the kernel does by construction."""

from __future__ import annotations

import numpy as np
import pytest

from .conftest import Out, ptx_kernel, run_cuda, run_ptx

i32, u32, f32 = np.int32, np.uint32, np.float32
CLASSES = {
    *("tensor", "float", "integer", "special", "convert", "shared_load", "shared_store", "global_load"),
    *("global_store", "async_copy", "atomic", "barrier", "shuffle", "control", "move", "param_load"),
}
HEAD = """
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [p0];
    ld.param.u64 %rd1, [p1];
    mov.u32 %r1, buffer;
"""


def count(body: str, *, block: int = 32, grid: int = 1, words: int = 4096, target: str = "sm_80"):
    """The report of a body with two buffers of `words` words and 16 KB of shared memory."""
    text = ptx_kernel(
        HEAD + body, [".u64", ".u64"], declarations=".shared .align 128 .b8 buffer[16384];", target=target
    )
    return run_ptx(text, [np.zeros(words, i32), Out(words, i32)], block=block, grid=grid).report


# ---- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 31, 32, 1000, 1024])
def test_bytes_of_a_copy_with_a_ragged_tail(n):
    """Threads past the end move nothing, whether they branch or are predicated."""
    source = """
    extern "C" __global__ void k(const float* x, float* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = x[i];
    }"""
    run = run_cuda(source, [np.zeros(n, f32), Out(n, f32), n], grid=8, block=128)
    assert run.report.global_read_bytes == 4 * n
    assert run.report.global_written_bytes == 4 * n
    assert run.report.written_bytes_of(run.addresses[1]) == 4 * n
    assert run.report.written_bytes_of(run.addresses[0]) == 0


def test_bytes_of_vectors_and_narrow_types():
    """v4 of 32 bits is 16 bytes a lane, u8 one; a guard halves them."""
    report = count("""
        mad.wide.u32 %rd2, %r0, 16, %rd0;
        mad.wide.u32 %rd3, %r0, 16, %rd1;
        and.b32 %r2, %r0, 1;
        setp.eq.s32 %p0, %r2, 0;
        ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd2];
        ld.global.u8 %r3, [%rd2];
        @%p0 ld.global.v2.b32 {%r4, %r5}, [%rd2];
        st.global.u16 [%rd3], %r3;
        @!%p0 st.global.v4.b32 [%rd3], {%r4, %r5, %r6, %r7};
    """)
    assert report.global_read_bytes == 32 * (16 + 1) + 16 * 8
    assert report.global_written_bytes == 32 * 2 + 16 * 16


def test_bytes_are_told_apart_by_buffer():
    """written_bytes_of asks for one allocation; their sum is the total."""
    source = """
    extern "C" __global__ void k(float* a, double* b, short* c) {
        int t = threadIdx.x;
        a[t] = t;
        if (t < 10) b[t] = 1.0;
        c[t] = t;
    }"""
    run = run_cuda(source, [Out(64, f32), Out(64, np.float64), Out(64, np.int16)], block=64)
    written = [run.report.written_bytes_of(address) for address in run.addresses]
    assert written == [256, 80, 128]
    assert run.report.global_written_bytes == sum(written)


def test_bytes_of_atomics_and_async_copies_stand_apart():
    """Atomics count among the bytes written, copies among the bytes read, as far as they are not filled with zeros."""
    report = count(
        """
        mad.wide.u32 %rd2, %r0, 16, %rd0;
        mad.lo.s32 %r2, %r0, 16, %r1;
        red.global.add.f32 [%rd1], 0f3F800000;
        atom.global.add.u64 %rd4, [%rd1+8], %rd2;
        st.global.u64 [%rd1+16], %rd4;
        cp.async.cg.shared.global [%r2], [%rd2], 16;
        cp.async.ca.shared.global [%r2+1024], [%rd2], 8;
        cp.async.cg.shared.global [%r2+2048], [%rd2], 16, 4;
        cp.async.wait_all;
    """,
        block=64,
    )
    assert report.atomic_bytes == 64 * (4 + 8)
    assert report.async_copied_bytes == 64 * (16 + 8 + 16)
    assert report.global_written_bytes == 64 * 8 + report.atomic_bytes  # atomics write too
    assert report.global_read_bytes == 64 * (16 + 8 + 4)


# ---- instructions ------------------------------------------------------------------------------------------------


def test_classes_of_instructions():
    """One warp, each class a known number of times."""
    report = count("""
        mad.wide.u32 %rd2, %r0, 4, %rd0;
        mad.lo.s32 %r2, %r0, 4, %r1;
        ld.global.b32 %r3, [%rd2];
        ld.global.b32 %r4, [%rd2];
        st.shared.b32 [%r2], %r3;
        bar.sync 0;
        ld.shared.b32 %r3, [%r2];
        ld.shared.b32 %r4, [%r2];
        ld.shared.b32 %r5, [%r2];
        cvt.rn.f32.s32 %f0, %r3;
        fma.rn.f32 %f1, %f0, %f0, %f0;
        add.f32 %f1, %f1, %f0;
        ex2.approx.f32 %f2, %f1;
        rcp.approx.f32 %f3, %f2;
        shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {%f4, %f5, %f6, %f7}, {%r3, %r4, %r5, %r6}, {%r3, %r4}, {%f0, %f0, %f0, %f0};
        add.f32 %f4, %f4, %f1;
        cp.async.cg.shared.global [%r1+1024], [%rd0], 16;
        cp.async.wait_all;
        bar.sync 0;
        red.global.add.f32 [%rd1], %f4;
        st.global.f32 [%rd1+4], %f3;
    """)
    counted = report.instructions
    assert set(counted) <= CLASSES
    expected = {"tensor": 1, "float": 3, "special": 2, "convert": 1, "shared_load": 3, "shared_store": 1}
    expected |= {"global_load": 2, "global_store": 1, "atomic": 1, "barrier": 2, "shuffle": 1}
    assert {name: counted.get(name, 0) for name in expected} == expected
    assert counted["async_copy"] >= 1 and counted["integer"] >= 2


def test_instructions_scale_with_warps_and_blocks():
    """Five warps in three blocks: fifteen times a warp's."""
    body = "add.f32 %f0, 0f3F800000, 0f40000000; add.f32 %f1, %f0, %f0; bar.sync 0; st.global.f32 [%rd1], %f1;"
    one, many = count(body).instructions, count(body, block=160, grid=3).instructions
    for name in ("float", "barrier", "global_store"):
        assert many[name] == 15 * one[name] > 0


def test_a_warp_counts_once_however_many_lanes_are_active():
    """A branch taken by three lanes costs the warp an instruction; a warp that skips it pays nothing."""
    body = """
        setp.gt.u32 %p0, %r0, {};
        mov.f32 %f0, 0f3F800000;
        @%p0 bra skip;
        ex2.approx.f32 %f0, %f0;
    skip:
        st.global.f32 [%rd1], %f0;
    """
    assert count(body.format(2), block=64).instructions["special"] == 1
    assert count(body.format(40), block=64).instructions["special"] == 2


def test_a_loop_counts_its_trips():
    """Ten trips of one fma, in each of two warps."""
    source = """
    extern "C" __global__ void k(float* out, int n, float x) {
        float y = x;
        #pragma unroll 1
        for (int i = 0; i < n; i++) y = fmaf(y, x, 1.f);
        out[threadIdx.x] = y;
    }"""
    report = run_cuda(source, [Out(64, f32), 10, 0.5], block=64).report
    assert report.instructions["float"] == 20
    assert report.instructions["global_store"] == 2


def test_flops_of_mma():
    """2 m n k for each warp that runs one."""

    def mma(k: int) -> str:
        a, b = ("{%r2,%r2,%r2,%r2}", "{%r2,%r2}") if k == 16 else ("{%r2,%r2}", "{%r2}")
        return f"mma.sync.aligned.m16n8k{k}.row.col.f32.f16.f16.f32 {{%f0,%f1,%f2,%f3}}, {a}, {b}, {{%f4,%f4,%f4,%f4}};"

    head, tail = "mov.u32 %r2, 0; mov.f32 %f4, 0f00000000;", "st.global.f32 [%rd1], %f0;"
    assert count(head + mma(16) + tail).tensor_flops == 4096
    assert count(head + mma(8) + tail).tensor_flops == 2048
    assert count(head + mma(16) * 3 + mma(8) + tail, block=96, grid=2).tensor_flops == 6 * (3 * 4096 + 2048)
    skipped = "setp.lt.u32 %p0, %r0, 32; @%p0 bra over;" + mma(16) + "over:"
    assert count(head + skipped + tail, block=96).tensor_flops == 2 * 4096


def test_barriers_of_a_block():
    """A block that meets three times counts three; blocks add up."""
    body = "bar.sync 0; bar.sync 0; bar.sync 0; st.global.u32 [%rd1], %r0;"
    assert count(body).barriers == 3
    assert count(body, block=128).barriers == 3
    assert count(body, block=128, grid=4).barriers == 12
    assert count("st.global.u32 [%rd1], %r0;").barriers == 0


def test_seconds_pass():
    """The time of the emulation itself, not of any GPU."""
    assert 0 < count("st.global.u32 [%rd1], %r0;").seconds < 30


def test_bank_counting_can_be_left_off():
    """Results are the same; wavefronts, which cost time to count, are zero."""
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ int s[128];
        s[4 * threadIdx.x] = threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = s[4 * (31 - threadIdx.x)];
    }"""
    runs = [run_cuda(source, [Out(32, i32)], count=flag) for flag in (True, False)]
    np.testing.assert_array_equal(runs[0].out, runs[1].out)
    assert (runs[0].report.shared_wavefronts, runs[1].report.shared_wavefronts) == (8, 0)


# ---- shared memory banks -----------------------------------------------------------------------------------------

ACCESSES = {
    # name: (address of the lane in %r2 from %r0, instruction, wavefronts, ideal)
    "one word a lane": ("mad.lo.s32 %r2, %r0, 4, %r1;", "ld.shared.b32 %r4, [%r2];", 1, 1),
    "the same word": ("mov.u32 %r2, %r1;", "ld.shared.b32 %r4, [%r2];", 1, 1),
    "a stride of 2 words": ("mad.lo.s32 %r2, %r0, 8, %r1;", "ld.shared.b32 %r4, [%r2];", 2, 1),
    "a stride of 8 words": ("mad.lo.s32 %r2, %r0, 32, %r1;", "ld.shared.b32 %r4, [%r2];", 8, 1),
    "a stride of 32 words": ("mad.lo.s32 %r2, %r0, 128, %r1;", "ld.shared.b32 %r4, [%r2];", 32, 1),
    "a stride of 33 words": ("mad.lo.s32 %r2, %r0, 132, %r1;", "ld.shared.b32 %r4, [%r2];", 1, 1),
    "stored with a stride of 8": ("mad.lo.s32 %r2, %r0, 32, %r1;", "st.shared.b32 [%r2], %r0;", 8, 1),
    "vectors of 16 bytes": ("mad.lo.s32 %r2, %r0, 16, %r1;", "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];", 4, 4),
    "vectors of 8 bytes": ("mad.lo.s32 %r2, %r0, 8, %r1;", "ld.shared.v2.b32 {%r4, %r5}, [%r2];", 2, 2),
    "ldmatrix of adjacent rows": (
        "mad.lo.s32 %r2, %r0, 16, %r1;",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];",
        *(4, 4),
    ),
    "ldmatrix of rows 128 bytes apart": (
        "mad.lo.s32 %r2, %r0, 128, %r1;",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];",
        *(32, 4),
    ),
    "ldmatrix of padded rows": (
        "mad.lo.s32 %r2, %r0, 144, %r1;",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];",
        *(4, 4),
    ),
    "ldmatrix of two matrices": (
        "and.b32 %r3, %r0, 15; mad.lo.s32 %r2, %r3, 64, %r1;",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r4, %r5}, [%r2];",
        *(8, 2),
    ),
}


@pytest.mark.parametrize("case", ACCESSES)
def test_wavefronts(case):
    """32 banks of four bytes: what must be serialised, and what the bytes alone would take."""
    address, instruction, wavefronts, ideal = ACCESSES[case]
    report = count(address + instruction + "st.global.u32 [%rd1], %r0;")
    assert (report.shared_wavefronts, report.shared_wavefronts_ideal) == (wavefronts, ideal)
    assert report.bank_conflicts == wavefronts - ideal


def test_wavefronts_of_several_warps_add_up():
    """Two warps, one block: twice as many."""
    report = count("mad.lo.s32 %r2, %r0, 32, %r1; ld.shared.b32 %r4, [%r2]; st.global.u32 [%rd1], %r4;", block=64)
    assert report.shared_wavefronts == 16 and report.shared_wavefronts_ideal == 2


def test_lanes_that_are_switched_off_use_no_banks():
    """Half the lanes: a stride of 8 words has four conflicting lanes a bank."""
    body = "setp.lt.u32 %p0, %r0, 16; mad.lo.s32 %r2, %r0, 32, %r1; @%p0 ld.shared.b32 %r4, [%r2];"
    assert count(body + "st.global.u32 [%rd1], %r0;").shared_wavefronts == 4

"""Hazards between warps of a block: found when a barrier is missing, quiet when it is there."""

from __future__ import annotations

import numpy as np
import pytest

from .conftest import Out, ptx_kernel, run_cuda, run_ptx

i32, u32, f32 = np.int32, np.uint32, np.float32


def kernel(body: str) -> str:
    """A kernel of 64 threads with a shared array s[64]; SYNC and MAYBE stand for barriers."""
    return f"""
    #define SYNC __syncthreads()
    extern "C" __global__ void k(int* out) {{
        __shared__ volatile int s[64];
        int t = threadIdx.x, lane = t % 32, warp = t / 32, r = 0;
        {body}
        out[blockIdx.x * 64 + t] = r;
    }}"""


def race(body: str, **options):
    """Launch two warps of two blocks with the detector on."""
    return run_cuda(kernel(body), [Out((2, 64), i32)], grid=2, block=64, check_races=True, **options)


# MAYBE stands where the missing or superfluous barrier is
HAZARDS = {
    "producer and consumer": ("if (warp == 0) s[lane] = t + 1; MAYBE; if (warp == 1) r = s[lane];", {"RAW"}),
    "exchange": ("s[t] = t; MAYBE; r = s[63 - t];", {"RAW"}),
    "buffer reused": ("s[t] = t; SYNC; r = s[t ^ 32]; MAYBE; s[t] = -t; SYNC; r += s[t ^ 32];", {"WAR"}),
    "two writers": ("s[lane] = t; MAYBE; if (warp == 1) s[lane] = 2 * t; SYNC; r = s[lane];", {"WAW"}),
    "reader of all": ("s[t] = t; MAYBE; for (int i = 0; i < 64; i++) r += s[i];", {"RAW"}),
    "one value broadcast": ("if (t == 40) s[3] = 9; MAYBE; r = s[3];", {"RAW", "WAR"}),
}


@pytest.mark.parametrize("case", HAZARDS)
def test_missing_barrier_is_found(case):
    """The kind is named, in every report."""
    body, kinds = HAZARDS[case]
    report = race(body.replace("MAYBE", "")).report
    assert report.race_count > 0
    assert report.races
    assert {found.kind for found in report.races} & kinds
    assert {found.kind for found in report.races} <= {"RAW", "WAR", "WAW"}


@pytest.mark.parametrize("case", HAZARDS)
def test_barrier_in_its_place_is_quiet(case):
    """The same kernels with the barrier have no race, once the write by both warps is gone."""
    body = HAZARDS[case][0].replace("MAYBE", "SYNC").replace("s[lane] = t; SYNC", "if (warp == 0) s[lane] = t; SYNC")
    report = race(body).report
    assert report.race_count == 0
    assert report.races == ()


def test_detector_is_off_unless_asked():
    """And finds nothing then."""
    source = kernel("s[t] = t; r = s[63 - t];")
    report = run_cuda(source, [Out((1, 64), i32)], block=64).report
    assert report.race_count == 0 and report.races == ()


def test_results_do_not_depend_on_the_detector():
    """It watches; it does not touch."""
    source = kernel("s[t] = 3 * t; SYNC; r = s[63 - t]; SYNC; s[t] = r; SYNC; r += s[t ^ 33];")
    outs = [run_cuda(source, [Out((2, 64), i32)], grid=2, block=64, check_races=flag).out for flag in (False, True)]
    np.testing.assert_array_equal(*outs)


def test_same_warp_needs_no_barrier():
    """Lanes of one warp run in step in program order; a private slice of each warp is no race."""
    assert race("s[t] = t; r = s[t ^ 31]; s[t ^ 1] = r; r = s[t ^ 7];").report.race_count == 0


def test_blocks_do_not_share():
    """The same offsets in two blocks are different memory, whatever runs together."""
    source = kernel("if (blockIdx.x % 2 == warp) { s[lane] = t; r = s[31 - lane]; }")
    assert run_cuda(source, [Out((64, 64), i32)], grid=64, block=64, check_races=True).report.race_count == 0


def test_reads_do_not_race():
    """Many warps read what was written before the barrier."""
    assert race("if (t == 0) s[5] = 1; SYNC; r = s[5] + s[5];").report.race_count == 0


def test_race_only_in_one_iteration():
    """A hazard in the last trip of a loop of which the others are clean."""
    body = "for (int i = 0; i < 4; i++) {{ s[t] = i; if ({}) __syncthreads(); r += s[t ^ 32]; __syncthreads(); }}"
    assert race(body.format("i < 3")).report.race_count > 0
    assert race(body.format("i < 4")).report.race_count == 0


def test_atomics_do_not_race_with_each_other():
    """But reading their result needs a barrier."""
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ int s[2];
        int t = threadIdx.x;
        if (t < 2) s[t] = 0;
        __syncthreads();
        atomicAdd(&s[t & 1], t);
        %s
        out[t] = ((volatile int*)s)[0];
    }"""
    assert run_cuda(source % "__syncthreads();", [Out(64, i32)], block=64, check_races=True).report.race_count == 0
    assert run_cuda(source % "", [Out(64, i32)], block=64, check_races=True).report.race_count > 0


def test_neighbouring_halves_are_different_memory():
    """Two warps write the two halves of the same 32-bit words."""
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ short s[64];
        int t = threadIdx.x;
        s[2 * (t % 32) + t / 32] = t;
        __syncthreads();
        out[t] = s[63 - t];
    }"""
    assert run_cuda(source, [Out(64, i32)], block=64, check_races=True).report.race_count == 0


def test_wide_accesses_touch_all_their_bytes():
    """A vector store of one warp, a scalar load of its last word by another."""
    source = """
    extern "C" __global__ void k(float* out) {
        __shared__ float4 s[32];
        int t = threadIdx.x;
        if (t < 32) s[t] = float4{1, 2, 3, 4};
        %s
        if (t >= 32) out[t] = ((volatile float*)s)[4 * (t - 32) + 3];
    }"""
    assert run_cuda(source % "", [Out(64, f32)], block=64, check_races=True).report.race_count > 0
    assert run_cuda(source % "__syncthreads();", [Out(64, f32)], block=64, check_races=True).report.race_count == 0


HAND_OVER = """
extern "C" __global__ void k(int* out) {
    __shared__ volatile int s[64];
    int t = threadIdx.x, lane = t % 32;
    s[t] = 0;
    __syncthreads();
    for (int i = 0; i < 4; i++) {
        if (t < 32) {
            if (i) asm volatile("bar.sync 2, 64;" ::: "memory");  // the buffer is free
            s[lane] = i * 100 + lane;
            asm volatile("bar.arrive 1, 64;" ::: "memory");       // the buffer is full
        } else {
            asm volatile("bar.sync 1, 64;" ::: "memory");
            out[i * 32 + lane] = s[31 - lane];
            if (i < 3) asm volatile("bar.arrive 2, 64;" ::: "memory");
        }
    }
}"""


def test_named_barriers_hand_a_buffer_to_and_fro():
    """bar.arrive does not wait: a producer and a consumer warp, two barriers, the right order and a wrong one."""
    run = run_cuda(HAND_OVER, [Out((4, 32), i32)], block=64, check_races=True)
    np.testing.assert_array_equal(run.out, np.arange(4)[:, None] * 100 + np.arange(31, -1, -1))
    assert run.report.race_count == 0
    early = HAND_OVER.replace("s[lane] = i * 100 + lane;", "").replace(
        "// the buffer is full", "s[lane] = i * 100 + lane;"
    )
    report = run_cuda(early, [Out((4, 32), i32)], block=64, check_races=True).report
    assert report.race_count > 0  # it says full before it has written


# ---- asynchronous copies and matrices ----------------------------------------------------------------------------

COPY = """
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [p0];
    ld.param.u64 %rd1, [p1];
    mad.wide.u32 %rd2, %r0, 16, %rd0;
    mad.wide.u32 %rd3, %r0, 16, %rd1;
    mov.u32 %r1, buffer;
    mad.lo.s32 %r2, %r0, 16, %r1;
    xor.b32 %r3, %r0, 32;
    mad.lo.s32 %r3, %r3, 16, %r1;
"""
LOAD = "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];\n"
STORE = "st.global.v4.b32 [%rd3], {%r4, %r5, %r6, %r7};\n"
ISSUE = "cp.async.cg.shared.global [%r2], [%rd2], 16;\ncp.async.commit_group;\n"
WAIT, SYNC = "cp.async.wait_group 0;\n", "bar.sync 0;\n"


def race_ptx(body: str, *, target: str = "sm_80"):
    """Two warps, one buffer of 1 KB."""
    text = ptx_kernel(COPY + body, [".u64", ".u64"], declarations=".shared .align 16 .b8 buffer[1024];", target=target)
    return run_ptx(text, [np.arange(256, dtype=i32), Out(256, i32)], block=64, check_races=True).report


def kinds(report) -> set[str]:
    return {found.kind for found in report.races}


def test_async_copy_read_by_another_warp_without_a_barrier():
    """wait_group covers a thread's own copies only: RAW; with the barrier behind the wait all is well."""
    report = race_ptx(ISSUE + WAIT + LOAD + STORE)
    assert report.race_count > 0 and "RAW" in kinds(report)
    assert race_ptx(ISSUE + WAIT + SYNC + LOAD + STORE).race_count == 0


def test_barrier_before_the_wait_does_not_help():
    """The order matters: another warp's copy may land after the barrier."""
    assert race_ptx(ISSUE + SYNC + WAIT + LOAD + STORE).race_count > 0


def test_async_copy_into_a_buffer_that_others_still_read():
    """WAR from the issue on, not from the wait on."""
    first = ISSUE + WAIT + SYNC + LOAD
    report = race_ptx(first + ISSUE + SYNC + WAIT + SYNC + STORE)
    assert report.race_count > 0 and "WAR" in kinds(report)
    assert race_ptx(first + SYNC + ISSUE + WAIT + SYNC + STORE).race_count == 0


def test_own_async_copy_needs_no_barrier():
    """A thread may read what it copied itself after its wait."""
    assert race_ptx(ISSUE + WAIT + LOAD.replace("%r3", "%r2") + STORE).race_count == 0


def test_ldmatrix_of_another_warps_rows():
    """Each lane's sixteen bytes are a read."""
    store = "st.shared.v4.b32 [%r2], {%r0, %r0, %r0, %r0};\n"
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r3];\n"
    report = race_ptx(store + load + STORE)
    assert report.race_count > 0 and kinds(report) <= {"RAW", "WAR"}
    assert race_ptx(store + SYNC + load + STORE).race_count == 0
    assert race_ptx(store + load.replace("%r3", "%r2") + STORE).race_count == 0


def test_stmatrix_is_a_write():
    """Read by another warp without a barrier."""
    store = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r0, %r0, %r0, %r0};\n"
    assert race_ptx(store + LOAD + STORE, target="sm_90").race_count > 0
    assert race_ptx(store + SYNC + LOAD + STORE, target="sm_90").race_count == 0


def test_a_race_says_where():
    """Enough to find the line: its text names something of the instruction or address."""
    report = race_ptx(ISSUE + WAIT + LOAD + STORE)
    text = " ".join(map(str, report.races))
    assert "shared" in text.lower(), text

"""mbarriers, named barriers and roles of warpgroups: who waits for whom, and what goes wrong."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import Deadlock, DivergentBarrier, EmulatorError, Misaligned

from .conftest import Out, mentions, ptx_kernel, run_cuda, run_ptx

i32 = np.int32

PRELUDE = """
typedef unsigned u32;
typedef unsigned long long u64;
__device__ u32 shared_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void init(u64* b, int n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_of(b)), "r"(n));
}
__device__ void end(u64* b) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(shared_of(b))); }
__device__ void arrive(u64* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_of(b)) : "memory");
}
__device__ void expect(u64* b, int n) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_of(b)), "r"(n) : "memory");
}
__device__ void wait(u64* b, u32 parity) {
    asm volatile("{\\n.reg .pred done;\\nSPIN:\\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
                 "@done bra FIN;\\nbra SPIN;\\nFIN:\\n}" :: "r"(shared_of(b)), "r"(parity) : "memory");
}
__device__ void wait_short(u64* b, u32 parity) {
    asm volatile("{\\n.reg .pred done;\\nSPIN:\\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
                 "@!done bra SPIN;\\n}" :: "r"(shared_of(b)), "r"(parity) : "memory");
}
#define SYNC(id, n) asm volatile("bar.sync %0, %1;" :: "r"(id), "n"(n) : "memory")
#define ARRIVE(id, n) asm volatile("bar.arrive %0, %1;" :: "r"(id), "n"(n) : "memory")
"""


def run(body: str, args=None, *, block=64, grid=1, shared="__shared__ u64 bar[4];", **options):
    """A kernel with mbarriers bar[4], thread t, warp w, and out[block] for each block of the grid."""
    source = f"""{PRELUDE}
    extern "C" __global__ void k(int* out) {{
        {shared}
        int t = threadIdx.x, w = t / 32, r = 0;
        {body}
        out[blockIdx.x * blockDim.x + t] = r;
    }}"""
    return run_cuda(source, args or [Out((grid, block), i32)], arch="compute_90a", block=block, grid=grid, **options)


RING = """
    __shared__ volatile int box[2][32];
    if (t == 0) for (int i = 0; i < 4; i++) init(bar + i, i < 2 ? 32 : COUNT);
    __syncthreads();
    int stage = 0, parity = 0;
    for (int i = 0; i < 7; i++) {
        if (w == 0) {
            WAIT(bar + 2 + stage, parity ^ 1);
            box[stage][t % 32] = 100 * i + t + 1000 * blockIdx.x;
            arrive(bar + stage);
        } else {
            WAIT(bar + stage, parity);
            r += box[stage][31 - t % 32] * (i + 1);
            arrive(bar + 2 + stage);
        }
        if (++stage == 2) stage = 0, parity ^= 1;
    }
"""


@pytest.mark.parametrize("shape", ["wait", "wait_short"])
@pytest.mark.parametrize("consumers", [1, 3, 11], ids=lambda n: f"{n} consumers")
def test_ring_of_two_stages(shape, consumers):
    """A producer warp fills, the others read, in both shapes of spin loops; parities wrap several times."""
    block = 32 * (1 + consumers)
    out = run(RING.replace("WAIT", shape).replace("COUNT", str(32 * consumers)), block=block, grid=3).out
    lane, i, number = np.arange(32), np.arange(7)[:, None], np.arange(3)[:, None, None]
    expected = ((100 * i + 31 - lane + 1000 * number) * (i + 1)).sum(1)
    np.testing.assert_array_equal(out[:, :32], 0)
    np.testing.assert_array_equal(out.reshape(3, -1, 32)[:, 1:], np.broadcast_to(expected[:, None], (3, consumers, 32)))


def test_roles_of_warpgroups():
    """Indices, shared memory, shuffles and barriers do not care in which order the emulator keeps its threads."""
    body = """
        __shared__ int s[384];
        if (t == 0) init(bar, 3);
        s[t] = t * t;
        __syncthreads();
        if (t % 128 == 0) arrive(bar);
        wait(bar, 0);
        r = s[383 - t] + __shfl_xor_sync(~0u, t, 5) + 1000000 * blockIdx.x;
        if (t / 128 == 1) r = -r;
    """
    out = run(body, block=384, grid=5).out
    t = np.arange(384)
    expected = (383 - t) ** 2 + (t ^ 5) + 1000000 * np.arange(5)[:, None]
    np.testing.assert_array_equal(out, np.where(t // 128 == 1, -expected, expected))


def test_lanes_wait_for_the_one_that_waits():
    """One lane waits at an mbarrier; the rest of its warp must not run ahead into the barrier of the block."""
    body = """
        if (t == 0) init(bar, 32);
        __syncthreads();
        if (t == 0) wait(bar, 0);
        if (w == 1) arrive(bar);
        __syncthreads();
        r = t;
    """
    np.testing.assert_array_equal(run(body).out.ravel(), np.arange(64))


def test_wait_that_gives_up():
    """try_wait may return false: who looks once and then arrives himself gets on."""
    code = """
        mov.u32 %r0, bar;
        mbarrier.init.shared.b64 [%r0], 32;
        mbarrier.test_wait.parity.shared.b64 %p0, [%r0], 0;
        selp.b32 %r1, 10, 20, %p0;
        mbarrier.arrive.shared.b64 %rd1, [%r0];
        mbarrier.test_wait.shared.b64 %p1, [%r0], %rd1;
        selp.b32 %r2, 1, 2, %p1;
        add.s32 %r1, %r1, %r2;
        ld.param.u64 %rd0, [p0];
        st.global.u32 [%rd0], %r1;
    """
    assert run_ptx(ptx_kernel(code, declarations=".shared .align 8 .b64 bar;"), [Out(1, i32)]).out[0] == 21


def test_bytes_count_beside_arrivals():
    """The phase completes when the arrivals are there and the bytes too, in any order."""
    code = """
        mov.u32 %r0, %tid.x;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [bar], 1;
        bar.sync 0;
        @%p0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 48;
        mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 64;
        mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0;
        @%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 16;
        @%p0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 32;
        mbarrier.test_wait.parity.shared.b64 %p3, [bar], 0;
        selp.b32 %r1, 1, 0, %p1;
        selp.b32 %r2, 10, 0, %p2;
        selp.b32 %r3, 100, 0, %p3;
        add.s32 %r1, %r1, %r2;
        add.s32 %r1, %r1, %r3;
        ld.param.u64 %rd0, [p0];
        st.global.u32 [%rd0], %r1;
    """
    assert run_ptx(ptx_kernel(code, declarations=".shared .align 8 .b64 bar;"), [Out(1, i32)]).out[0] == 100


def test_arrival_with_a_count_and_a_new_life():
    """One arrival may count for several; after inval the place can be initialised again."""
    body = """
        u64 state;
        if (t == 0) init(bar, 8);
        __syncthreads();
        if (t < 2) asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 4;" : "=l"(state) : "r"(shared_of(bar)));
        wait(bar, 0);
        __syncthreads();
        if (t == 0) end(bar);
        if (t == 0) init(bar, 1);
        __syncthreads();
        if (t == 5) arrive(bar);
        wait(bar, 0);
        r = 1;
    """
    assert run(body).out.all()


FAULTS = {
    "not initialised": ("wait(bar + 1, 0);", "no mbarrier was initialised"),
    "count of zero": ("if (t == 0) init(bar, 0);", "must be 1 to"),
    "after inval": ("if (t == 0) { init(bar, 1); end(bar); arrive(bar); }", "no mbarrier"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_faults(case):
    """Each is refused with the instruction and the thread."""
    body, text = FAULTS[case]
    with pytest.raises(EmulatorError) as error:
        run(body)
    assert mentions(error.value, text, "mbarrier", "thread (")


def test_more_arrivals_than_the_count():
    """The pending count must not go below zero within a phase: bytes still missing keep the phase open."""
    with pytest.raises(EmulatorError) as error:
        run("if (t == 0) { init(bar, 1); expect(bar, 16); arrive(bar); }")
    assert mentions(error.value, "more arrivals than the count of 1", "mbarrier.arrive")


def test_misaligned_barrier():
    """An mbarrier has 8 bytes and lies at a multiple of 8."""
    with pytest.raises(Misaligned):
        run("if (t == 0) init((u64*)((char*)bar + 4), 1);")


@pytest.mark.parametrize("shape", ["wait", "wait_short"])
def test_deadlock_names_the_wait(shape):
    """Everybody waits for a phase that lacks one arrival."""
    with pytest.raises(Deadlock) as error:
        run(f"if (t == 0) init(bar, 33); __syncthreads(); if (w == 1) arrive(bar); {shape}(bar, 0);", block=64, grid=2)
    assert mentions(error.value, "mbarrier.try_wait", "1 of 33 arrivals", "thread (0, 0, 0)")


# ---- named barriers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_ping_pong(turns):
    """Two warpgroups take turns at barriers whose number is in a register; the last turn is left over."""
    body = f"""
        __shared__ volatile int log[64], n;
        int wg = t / 128;
        if (t == 0) {{ init(bar, 1); n = 0; }}
        __syncthreads();
        if (wg == 1) ARRIVE(1, 256);
        for (int i = 0; i < {turns}; i++) {{
            SYNC(1 + wg, 256);
            if (t % 128 == 0) {{ log[n] = wg; n = n + 1; }}
            ARRIVE(1 + (wg + 1) % 2, 256);
        }}
        __syncthreads();
        r = t < n ? log[t] : -1;
    """
    result = run(body, block=256, grid=2)
    expected = np.full(256, -1)
    expected[: 2 * turns] = np.tile([0, 1], turns)
    np.testing.assert_array_equal(result.out, np.stack([expected] * 2))
    assert result.report.unfinished_barriers == 2


NAMED = {
    "counts that disagree": ("if (w == 0) SYNC(1, 64); else ARRIVE(1, 96);", EmulatorError, "open for"),
    "more arrivals than the count": (
        "if (w < 2) ARRIVE(1, 96); else SYNC(1, 96);",
        EmulatorError,
        "128 threads arrived",
    ),
    "part of a warp": ("if (t < 16) SYNC(1, 32);", DivergentBarrier, "only lanes"),
    "nobody comes": ("if (w == 0) SYNC(2, 64);", Deadlock, "32 of 64 arrived"),
}


@pytest.mark.parametrize("case", NAMED)
def test_faults_of_named_barriers(case):
    """Counts must agree and be kept; a barrier is a matter of whole warps."""
    body, kind, text = NAMED[case]
    with pytest.raises(kind) as error:
        run(f"if (t == 0) init(bar, 1); __syncthreads(); {body}", block=128)
    assert mentions(error.value, text, "bar.")


# ---- registers and leaders ---------------------------------------------------------------------------------------


def test_register_shares_are_recorded():
    """setmaxnreg by role: the report says who asked for what."""
    body = """
        if (t / 128 == 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        else asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    """
    shares = run(body, block=384, grid=2).report.register_shares
    assert shares == {0: 24, 1: 240, 2: 240}
    with pytest.raises(EmulatorError, match="multiple of 8"):
        run_ptx(ptx_kernel("setmaxnreg.inc.sync.aligned.u32 100;", target="sm_90a"), [0])


def test_elected_lane():
    """elect.sync: the lowest lane that the mask names."""
    code = """
        mov.u32 %r0, %tid.x;
        elect.sync %r1|%p0, 0xfffffff0;
        selp.b32 %r2, 100, 0, %p0;
        add.s32 %r1, %r1, %r2;
        ld.param.u64 %rd0, [p0];
        mad.wide.u32 %rd0, %r0, 4, %rd0;
        st.global.u32 [%rd0], %r1;
    """
    expected = np.tile(np.where(np.arange(32) == 4, 104, 4), 2)
    np.testing.assert_array_equal(run_ptx(ptx_kernel(code), [Out(64, i32)], block=64).out, expected)

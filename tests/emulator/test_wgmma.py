"""wgmma: products of warpgroups with operands in shared memory and in registers, and when they happen."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import DivergentBarrier, EmulatorError, OutOfBounds

from .conftest import Out, from_bf16, mentions, ptx_kernel, run_cuda, run_ptx, to_bf16, unpack2

f32, u16 = np.float32, np.uint16

PRELUDE = """
typedef unsigned u32;
typedef unsigned long long u64;
__device__ u32 shared_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#define FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define LOOK(x, y) float x; asm volatile("mov.f32 %0, %1;" : "=f"(x) : "f"(y) : "memory")
#define WAIT(n) asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(n) : "memory")
"""


def wrapper(n: int, kind: str, in_registers: bool, a_transposed: int, b_transposed: int) -> str:
    """product(d, a, b, adds) as a device function."""
    r = n // 2
    sums = ", ".join(f"%{i}" for i in range(r))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(r))
    if in_registers:
        a, type_, count = "{" + ", ".join(f"%{r + i}" for i in range(4)) + "}", "const u32* a", 4
        inputs, flags = ", ".join(f'"r"(a[{i}])' for i in range(4)), f"1, 1, {b_transposed}"
    else:
        a, type_, count, inputs, flags = f"%{r}", "u64 a", 1, '"l"(a)', f"1, 1, {a_transposed}, {b_transposed}"
    b = r + count
    return f"""
    __device__ __forceinline__ void product(float (&d)[{r}], {type_}, u64 b, int adds) {{
        asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}}, {a}, %{b}, p, {flags};\\n}}"
            : {outs} : {inputs}, "l"(b), "r"(adds));
    }}"""


def kernel(n: int, k: int, kind: str, body: str, in_registers=False, a_transposed=0, b_transposed=0) -> str:
    """A kernel whose warpgroups multiply A [64, k] by B [k, n]; both are copied to shared memory as they come."""
    r = n // 2
    return f"""{PRELUDE}{wrapper(n, kind, in_registers, a_transposed, b_transposed)}
    extern "C" __global__ void __launch_bounds__(256) k(const u32* a_words, const u32* b_words, u64 a_desc, u64 b_desc,
                                 int a_step, int b_step, const u32* fragments, float* out) {{
        __shared__ __align__(1024) u32 a_tile[{64 * k // 2}];
        __shared__ __align__(1024) u32 b_tile[{n * k // 2}];
        const int wg = threadIdx.x / 128;
        for (int i = threadIdx.x; i < {64 * k // 2}; i += blockDim.x) a_tile[i] = a_words[i];
        for (int i = threadIdx.x; i < {n * k // 2}; i += blockDim.x) b_tile[i] = b_words[i];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        const u64 a = a_desc + (shared_of(a_tile) >> 4), b = b_desc + (shared_of(b_tile) >> 4);
        const u32* p = fragments + threadIdx.x % 128 * {k // 4};
        float d[{r}];
        for (int i = 0; i < {r}; i++) d[i] = 1000.f * wg + i;
        {body}
        for (int i = 0; i < {r}; i++) out[threadIdx.x * {r} + i] = d[i];
    }}"""


PRODUCTS = """
    FENCE;
    #pragma unroll
    for (int s = 0; s < K / 16; s++) product(d, OPERAND, b + s * b_step, FIRST);
    COMMIT;
    WAIT(0);
"""


def body_of(k: int, in_registers=False, first="1", text=PRODUCTS) -> str:
    operand = "p + 4 * s" if in_registers else "a + s * a_step"
    return text.replace("K", str(k)).replace("OPERAND", operand).replace("FIRST", first)


def fragment(a: np.ndarray) -> np.ndarray:
    """A [64, k] as the registers of 128 threads: [thread, k / 16, register, half], by the PTX manual's figure."""
    out = np.zeros((128, a.shape[1] // 16, 4, 2), a.dtype)
    for thread in range(128):
        g, t = thread % 32 // 4, thread % 4
        for register in range(4):
            row = 16 * (thread // 32) + g + 8 * (register & 1)
            for half in range(2):
                out[thread, :, register, half] = a[row, 2 * t + half + 8 * (register >> 1) :: 16]
    return out


def sums_of(out: np.ndarray, n: int) -> np.ndarray:
    """The registers [warpgroup, 128, n / 2] as matrices [warpgroup, 64, n]."""
    out = out.reshape(-1, 128, n // 2)
    d = np.zeros((len(out), 64, n), f32)
    for thread in range(128):
        g, t = thread % 32 // 4, thread % 4
        for i in range(n // 2):
            d[:, 16 * (thread // 32) + g + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * t + (i & 1)] = out[:, thread, i]
    return d


def swizzle(tile: np.ndarray, span: int) -> np.ndarray:
    """Lines of 128 bytes with their chunks permuted."""
    lines = np.ascontiguousarray(tile).view("u1").reshape(-1, 8, 16)
    if not span:
        return lines.reshape(-1).view("u4")
    order = np.arange(8) ^ (np.arange(len(lines))[:, None] % (span // 16))
    return np.take_along_axis(lines, order[:, :, None], 1).reshape(-1).view("u4")


def place(x: np.ndarray, layout: str) -> tuple[np.ndarray, int, int]:
    """An operand [mn, k] in shared memory: words, descriptor without address, and its step along k (16 bytes)."""
    mn, k = x.shape
    if layout.startswith("k"):
        span = int(layout[1:])
        if not span:  # core matrices of 8 rows x 16 bytes, those along k 128 bytes apart
            words = swizzle(x.reshape(mn // 8, 8, k // 8, 8).transpose(0, 2, 1, 3), 0)
            return words, 128 // 16 << 16 | (16 * k // 16) << 32, 16
        panel = span // 2  # numbers in a row of a panel
        words = swizzle(x.reshape(mn, k // panel, panel).transpose(1, 0, 2), span)
        assert k == panel, "one panel is enough for a test"
        return words, 1 << 16 | (8 * span // 16) << 32 | {128: 1, 64: 2, 32: 3}[span] << 62, 2
    span = int(layout[2:])
    panel = span // 2
    words = swizzle(x.T.reshape(k, mn // panel, panel).transpose(1, 0, 2), span)
    descriptor = (k * span // 16) << 16 | (8 * span // 16) << 32 | {128: 1, 64: 2, 32: 3}[span] << 62
    return words, descriptor, 16 * span // 16


def operands(n: int, k: int, kind: str):
    """A [64, k] and B [n, k] as 16-bit floats and as float32."""
    rng = np.random.default_rng(n + k)
    x = [rng.standard_normal((rows, k)).astype(f32) + 0.25 for rows in (64, n)]
    if kind == "f16":
        bits = [value.astype(np.float16).view(u16) for value in x]
        return *bits, *(value.view(np.float16).astype(f32) for value in bits)
    bits = [to_bf16(value) for value in x]
    return *bits, *(from_bf16(value) for value in bits)


def run(n, k, kind="bf16", a_layout="k128", b_layout="k128", body=None, in_registers=False, block=256, **options):
    """Launch; the sums [warpgroup, 64, n], and the product in float64."""
    a_bits, b_bits, a, b = operands(n, k, kind)
    a_words, a_desc, a_step = place(a_bits, a_layout)
    b_words, b_desc, b_step = place(b_bits, b_layout)
    transposed = [int(layout.startswith("mn")) for layout in (a_layout, b_layout)]
    source = kernel(n, k, kind, body or body_of(k, in_registers), in_registers, *transposed)
    args = [a_words, b_words, a_desc, b_desc, a_step, b_step, fragment(a_bits).reshape(-1), Out((block, n // 2), f32)]
    result = run_cuda(source, args, arch="compute_90a", block=block, **options)
    return sums_of(result.out, n), a.astype("f8") @ b.astype("f8").T, result


def start_of(n: int, warpgroups: int = 2) -> np.ndarray:
    """What the sums are before: 1000 x the warpgroup + the number of the register."""
    values = 1000 * np.arange(warpgroups)[:, None, None] + np.arange(n // 2)
    return sums_of(np.broadcast_to(values, (warpgroups, 128, n // 2)).astype(f32), n)


LAYOUTS = {
    "K-major, 128": ("k128", "k128", 64),
    "K-major, 64": ("k64", "k64", 32),
    "K-major, 32": ("k32", "k32", 16),
    "K-major, no swizzle": ("k0", "k0", 48),
    "MN-major B": ("k128", "mn128", 64),
    "MN-major A": ("mn128", "k128", 64),
    "MN-major both, 64": ("mn64", "mn64", 32),
    "MN-major both, 32": ("mn32", "mn32", 48),
}


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_in_shared_memory(case, late):
    """Both operands behind descriptors, every swizzle, both majors; the sums continue from what they were."""
    a_layout, b_layout, k = LAYOUTS[case]
    d, expected, _ = run(64, k, "f16", a_layout, b_layout, late=late)
    np.testing.assert_allclose(d, start_of(64) + expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("n", [8, 24, 128, 256])
def test_widths(n, kind):
    """Sums of 8 to 256 columns; with scale-d 0 the first product forgets what was there."""
    d, expected, result = run(n, 64, kind, body=body_of(64, first="s > 0"))
    np.testing.assert_allclose(d, np.stack([expected] * 2), rtol=0, atol=1e-4)
    assert result.report.tensor_flops == 2 * 2 * 64 * n * 64
    assert result.report.instructions["tensor"] == 8 * 4


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("b_layout", ["k128", "mn128"])
def test_a_in_registers(b_layout, late):
    """A as fragments of the four warps."""
    d, expected, _ = run(64, 64, "bf16", "k128", b_layout, in_registers=True, late=late)
    np.testing.assert_allclose(d, start_of(64) + expected, rtol=0, atol=2e-4)


def test_before_the_wait_there_is_poison():
    """Sums read too early are NaN, in both timings; wait 1 lands the older of two groups."""
    early = body_of(64).replace("WAIT(0);", "LOOK(seen, d[3]); WAIT(0); d[3] = seen;")
    for late in (True, False):
        d, *_ = run(16, 64, body=early, late=late)
        assert np.isnan(d).sum() == 2 * 128
    two = """
        float e[8] = {};
        FENCE;
        product(e, a, b, 0); COMMIT;
        product(d, a, b, 0); COMMIT;
        WAIT(1);
        LOOK(first, e[5]);
        LOOK(second, d[5]);
        WAIT(0);
        d[0] = first; d[1] = second;
    """
    d, *_ = run(16, 64, body=two)
    assert np.isfinite(d[:, 0, 0]).all() and np.isnan(d[:, 0, 1]).all()


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_operands_are_read_until_the_wait(late):
    """Late, who overwrites shared memory or A's registers in flight changes the product; early, nobody notices."""
    over = body_of(64, first="s > 0").replace(
        "WAIT(0);", "__syncthreads(); if (threadIdx.x < 32) b_tile[threadIdx.x] = 0; __syncthreads(); WAIT(0);"
    )
    d, expected, _ = run(16, 64, body=over, late=late)
    assert np.allclose(d, expected, rtol=0, atol=1e-4) != late
    registers = """
        u32 f[4] = {p[0], p[1], p[2], p[3]};
        FENCE;
        product(d, f, b, 0);
        COMMIT;
        for (int i = 0; i < 4; i++) asm volatile("mov.u32 %0, 0;" : "+r"(f[i]) :: "memory");
        WAIT(0);
    """
    d, *_ = run(16, 64, body=registers, in_registers=True, late=late)
    assert d.any() != late


def test_warpgroups_apart():
    """One warpgroup multiplies while the other does not; later the other, other steps."""
    body = body_of(64, first="s > 0")
    text = "if (wg == 1) { " + body + " } else { __syncwarp(); " + body.replace("s < 64", "s < 16") + " }"
    d, expected, result = run(16, 64, body=text)
    np.testing.assert_allclose(d[1], expected, rtol=0, atol=1e-4)
    assert not np.allclose(d[0], expected, rtol=0, atol=1e-4)
    assert result.report.tensor_flops == (4 + 1) * 2 * 64 * 16 * 16


def test_faults():
    """A part of a warpgroup, a wait that never comes, a descriptor that leaves shared memory."""
    with pytest.raises(DivergentBarrier) as error:
        run(16, 64, body="if (threadIdx.x < 64) { " + body_of(64) + " }")
    assert mentions(error.value, "wgmma.mma_async", "part of the warpgroup")
    with pytest.raises(DivergentBarrier, match=r"thread \(128, 0, 0\)"):
        run(16, 64, body="if (threadIdx.x < 192) { " + body_of(64) + " }")
    with pytest.raises(EmulatorError, match="nobody has waited"):
        run(16, 64, body=body_of(64).replace("WAIT(0);", ""))
    for check in (False, True):
        with pytest.raises(OutOfBounds, match="descriptor names addresses"):
            run(16, 64, body=body_of(64).replace("b + s * b_step", "b + 4096"), check_races=check)
    with pytest.raises(EmulatorError, match="base offset"):
        run(16, 64, body=body_of(64).replace("b + s * b_step", "b + (1ull << 50)"))
    with pytest.raises(EmulatorError, match="starts where its swizzle does not"):
        run(16, 64, body=body_of(64).replace("b + s * b_step", "b + 8"))


def test_unpacked_fragment_is_what_the_manual_draws():
    """The helper above, against a line of the manual that is easy to remember: thread 0 holds (0, 0) and (0, 1)."""
    a = np.arange(64 * 16, dtype=u16).reshape(64, 16)
    low, high = unpack2(fragment(a).reshape(-1).view("u4"))
    assert (low[0], high[0], low[1], low[2]) == (a[0, 0], a[0, 1], a[8, 0], a[0, 8])


LATE_LANES = """
    mov.u32 %r0, %tid.x;
    and.b32 %r1, %r0, 1;
    setp.eq.u32 %p0, %r1, 1;
    mov.u32 %r2, tile;
    shr.u32 %r3, %r2, 4;
    cvt.u64.u32 %rd1, %r3;
    or.b64 %rd1, %rd1, 0x4000004000000000;
    ld.param.u64 %rd0, [p0];
    mad.wide.u32 %rd0, %r0, 4, %rd0;
    mad.lo.u32 %r4, %r0, 16, %r2;
    st.shared.v4.b32 [%r4], {0, 0, 0, 0};
    st.shared.v4.b32 [%r4+2048], {0, 0, 0, 0};
    st.shared.v4.b32 [%r4+4096], {0, 0, 0, 0};
    st.shared.v4.b32 [%r4+6144], {0, 0, 0, 0};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.u32 %r5, 0;
    again:
        mov.f32 %f0, 0f3F800000;
        mov.f32 %f1, %f0;
        mov.f32 %f2, %f0;
        mov.f32 %f3, %f0;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd1, 1, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        add.u32 %r5, %r5, 1;
        setp.eq.u32 %p1, %r5, 3;
        @%p1 bra finished;
        @%p0 bra again;
        st.global.f32 [%rd0], %f0;
        bra again;
    finished:
"""


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_lanes_wait_at_a_product_for_those_behind_them(late):
    """Odd lanes jump back to the products while the others store what stands below them in the text."""
    declared = ".shared .align 1024 .b8 tile[8192];"
    text = ptx_kernel(LATE_LANES, declarations=declared, target="sm_90a")
    out = run_ptx(text, [Out(128, np.float32)], block=128, late=late).out
    np.testing.assert_array_equal(out.view("u4") == np.float32(1).view("u4"), np.arange(128) % 2 == 0)

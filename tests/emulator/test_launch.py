"""Launches side by side and one after the other: nothing of one may leak into the next."""

from __future__ import annotations

import warnings

import numpy as np
from flashsmith.emulator import GlobalMemory, launch, parse

from .conftest import Out, apply, compile_cuda, run_cuda

i32, u32, f32 = np.int32, np.uint32, np.float32

SUMS = """
extern __shared__ int s[];
extern "C" __global__ void sums(const int* x, int* out, int n) {
    int t = threadIdx.x, size = blockDim.x, i = blockIdx.x * size + t;
    s[t] = i < n ? x[i] : 0;
    __syncthreads();
    for (int d = 1; d < size; d *= 2) {
        int v = t >= d ? s[t - d] : 0;
        __syncthreads();
        s[t] += v;
        __syncthreads();
    }
    if (i < n) out[i] = s[t];
}
extern "C" __global__ void twice(int* x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= 2; }
"""


def test_one_kernel_in_many_shapes():
    """The same Kernel object with blocks, grids and shared memory of other sizes, to and fro."""
    kernel = parse(compile_cuda(SUMS)).kernels["sums"]
    x = np.random.default_rng(0).integers(-99, 99, 700).astype(i32)
    for n, block in ((700, 64), (5, 32), (700, 1024), (300, 96), (700, 64), (1, 1), (77, 7)):
        memory = GlobalMemory()
        source, out = memory.upload(x[:n]), memory.empty(n, i32)
        grid = -(-n // block)
        report = launch(kernel, grid, block, [source, out, n], memory, shared_bytes=4 * block, check_races=True)
        expected = np.concatenate([np.cumsum(x[i : min(i + block, n)]) for i in range(0, n, block)])
        np.testing.assert_array_equal(memory.read(out, n, i32), expected, f"n={n}, block={block}")
        assert report.race_count == 0
        assert report.global_written_bytes == 4 * n


def test_kernels_share_memory():
    """Launches on one GlobalMemory see each other's results, in order; reports stand for one launch each."""
    module = parse(compile_cuda(SUMS))
    memory = GlobalMemory()
    x, out = memory.upload(np.arange(100, dtype=i32)), memory.upload(np.zeros(100, i32))
    reports = [launch(module.kernels["twice"], 4, 32, [x, 100], memory) for _ in range(3)]
    launch(module.kernels["sums"], 1, 100, [x, out, 100], memory, shared_bytes=400)
    np.testing.assert_array_equal(memory.read(out, 100, i32), 8 * np.cumsum(np.arange(100)))
    assert [r.global_written_bytes for r in reports] == [400] * 3
    assert [r.instructions for r in reports[1:]] == [reports[0].instructions] * 2


def test_launches_are_repeatable():
    """Float atomics included: the same bits every time."""
    source = """
    extern "C" __global__ void k(const float* x, float* out) {
        int i = blockIdx.x * 64 + threadIdx.x;
        atomicAdd(out + i % 7, x[i]);
    }"""
    x = np.random.default_rng(1).standard_normal(640).astype(f32)
    first, second = (run_cuda(source, [x, np.zeros(7, f32)], grid=10, block=64).out for _ in range(2))
    np.testing.assert_array_equal(first.view(u32), second.view(u32))
    np.testing.assert_allclose(first, [x[i::7].sum(dtype=np.float64) for i in range(7)], atol=1e-4)


def test_division_by_zero_spoils_its_lane_only():
    """Its result is undefined, the neighbours' are not, and nothing is raised."""
    a, b = np.arange(-16, 16, dtype=i32), np.arange(32, dtype=i32) % 5
    for instruction, expected in (
        ("div.s32", np.trunc(a / np.maximum(b, 1))),
        ("rem.s32", np.fmod(a, np.maximum(b, 1))),
    ):
        result = apply(f"{instruction} %d, %a, %b;", a, b, out=i32)
        np.testing.assert_array_equal(result[b != 0], expected[b != 0])


def test_numbers_raise_no_warnings():
    """NaN, overflow and division by zero are a kernel's business, not Python's."""
    x = np.resize(np.array([np.nan, np.inf, -np.inf, 0, -1, 3e38], f32), 96)
    code = """
        mul.f32 %f0, %a, %a;
        rcp.rn.f32 %f1, %a;
        sub.f32 %f2, %f0, %f1;
        sqrt.rn.f32 %f3, %a;
        lg2.approx.f32 %f4, %a;
        ex2.approx.f32 %f5, %f0;
        cvt.rn.f16x2.f32 %r3, %f2, %f3;
        cvt.rzi.s32.f32 %r4, %a;
        add.f32 %d, %f4, %f5;
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(apply(code, x, out=f32)[0])


def test_numpy_keeps_its_error_state():
    """A launch that silences NumPy says so to nobody else."""
    before = np.geterr()
    run_cuda('extern "C" __global__ void k(float* x) { x[0] = 1.f / x[0]; }', [np.zeros(1, f32)])
    assert np.geterr() == before


def test_arguments_stay_as_they_were():
    """Uploaded arrays are copies, so a kernel that writes its input changes the device's only."""
    x = np.arange(32, dtype=i32)
    source = 'extern "C" __global__ void k(int* x) { x[threadIdx.x] += 1; }'
    run = run_cuda(source, [x])
    np.testing.assert_array_equal(x, np.arange(32))
    np.testing.assert_array_equal(run.out, np.arange(1, 33))


def test_shared_memory_up_to_the_limit_of_the_largest_gpu():
    """Dynamic shared memory of 100 KB, first and last byte."""
    source = """
    extern __shared__ char s[];
    extern "C" __global__ void k(int* out, int last) {
        s[threadIdx.x] = 1;
        s[last - threadIdx.x] = 2;
        __syncthreads();
        out[threadIdx.x] = s[31 - threadIdx.x] * 10 + s[last - 31 + threadIdx.x];
    }"""
    out = run_cuda(source, [Out(32, i32), 102399], shared_bytes=102400).out
    np.testing.assert_array_equal(out, np.full(32, 12))

"""Kernels by another compiler: Triton's PTX, compiled here without a GPU, must run and agree with NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from .conftest import Out, run_ptx

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

f16, f32, f64 = np.float16, np.float32, np.float64


# ---- kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C [M, N] = A [M, K] B [K, N], one tile a block; every edge is ragged."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    x = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + x
        a_tile = tl.load(a + i[:, None] * K + k[None, :], mask=(i[:, None] < M) & (k[None, :] < K), other=0.0)
        b_tile = tl.load(b + k[:, None] * N + j[None, :], mask=(k[:, None] < K) & (j[None, :] < N), other=0.0)
        acc = tl.dot(a_tile, b_tile, acc)
    tl.store(c + i[:, None] * N + j[None, :], acc, mask=(i[:, None] < M) & (j[None, :] < N))


@triton.jit
def attention_kernel(q, k, v, o, lse, N, scale, BR: tl.constexpr, BC: tl.constexpr, D: tl.constexpr):
    """Causal attention with an online softmax: a block owns BR queries of one head."""
    i = tl.program_id(0) * BR + tl.arange(0, BR)
    head = tl.program_id(1).to(tl.int64) * N * D
    x = tl.arange(0, D)
    inside = i[:, None] < N
    q_tile = tl.load(q + head + i[:, None] * D + x[None, :], mask=inside, other=0.0)
    m = tl.full((BR,), float("-inf"), tl.float32)
    l = tl.zeros((BR,), tl.float32)
    acc = tl.zeros((BR, D), tl.float32)
    for start in range(0, tl.minimum(N, (tl.program_id(0) + 1) * BR), BC):
        j = start + tl.arange(0, BC)
        k_tile = tl.load(k + head + j[None, :] * D + x[:, None], mask=j[None, :] < N, other=0.0)
        s = tl.dot(q_tile, k_tile) * (scale * 1.4426950408889634)
        s = tl.where((j[None, :] <= i[:, None]) & (j[None, :] < N), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        v_tile = tl.load(v + head + j[:, None] * D + x[None, :], mask=j[:, None] < N, other=0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
        m = m_new
    tl.store(o + head + i[:, None] * D + x[None, :], (acc / l[:, None]).to(o.dtype.element_ty), mask=inside)
    tl.store(lse + tl.program_id(1) * N + i, (m + tl.log2(l)) * 0.6931471805599453, mask=i < N)


@triton.jit
def gradient_kernel(q, k, v, do, lse, delta, dq, dk, dv, N, scale, BR: tl.constexpr, BC: tl.constexpr, D: tl.constexpr):
    """The causal backward: a block owns BC keys of one head and adds to dQ with atomics."""
    j = tl.program_id(0) * BC + tl.arange(0, BC)
    head = tl.program_id(1).to(tl.int64) * N * D
    x = tl.arange(0, D)
    here = j[:, None] < N
    k_tile = tl.load(k + head + j[:, None] * D + x[None, :], mask=here, other=0.0)
    v_tile = tl.load(v + head + j[:, None] * D + x[None, :], mask=here, other=0.0)
    dk_tile = tl.zeros((BC, D), tl.float32)
    dv_tile = tl.zeros((BC, D), tl.float32)
    for start in range((tl.program_id(0) * BC) // BR * BR, N, BR):
        i = start + tl.arange(0, BR)
        q_tile = tl.load(q + head + i[:, None] * D + x[None, :], mask=i[:, None] < N, other=0.0)
        do_tile = tl.load(do + head + i[:, None] * D + x[None, :], mask=i[:, None] < N, other=0.0)
        row_lse = tl.load(lse + tl.program_id(1) * N + i, mask=i < N, other=0.0)
        row_delta = tl.load(delta + tl.program_id(1) * N + i, mask=i < N, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile)) * scale
        p = tl.exp(s - row_lse[:, None])
        p = tl.where((j[None, :] <= i[:, None]) & (i[:, None] < N) & (j[None, :] < N), p, 0.0)
        dv_tile = tl.dot(tl.trans(p).to(do_tile.dtype), do_tile, dv_tile)
        dp = tl.dot(do_tile, tl.trans(v_tile))
        ds = (p * (dp - row_delta[:, None]) * scale).to(q_tile.dtype)
        dk_tile = tl.dot(tl.trans(ds), q_tile, dk_tile)
        dq_tile = tl.dot(ds, k_tile)
        tl.atomic_add(dq + head + i[:, None] * D + x[None, :], dq_tile, mask=i[:, None] < N, sem="relaxed")
    tl.store(dk + head + j[:, None] * D + x[None, :], dk_tile, mask=here)
    tl.store(dv + head + j[:, None] * D + x[None, :], dv_tile, mask=here)


# ---- compiling and launching -------------------------------------------------------------------------------------


@pytest.fixture(params=[80, 90], ids=lambda number: f"sm_{number}")
def run_triton(request, tmp_path, monkeypatch):
    """Compile a jitted function into a cache of its own and launch the PTX on the emulator."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def run(function, signature: dict[str, str], constants: dict[str, int], args, grid, late=True, **options):
        names = [*signature, *constants]
        kinds = {name: signature.get(name, "constexpr") for name in names}
        attributes = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind[0] == "*"}
        source = ASTSource(
            fn=function,
            signature=kinds,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs=attributes,
        )
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", request.param, 32),
            options={"num_warps": 4, "enable_fp_fusion": True, **options},
        )
        ptx = compiled.asm["ptx"]
        scratch = [0] * (ptx.split(".entry", 1)[1].split(")", 1)[0].count(".param") - len(args))
        return run_ptx(
            ptx,
            [*args, *scratch],  # Triton's own trailing pointers: global and profile scratch, unused here
            grid=grid,
            block=32 * compiled.metadata.num_warps,
            shared_bytes=compiled.metadata.shared,
            check_races=True,
            late=late,
        )

    return run


def normal(seed: int, *shape: int) -> np.ndarray:
    """Random halves with a mean off zero."""
    return (np.random.default_rng(seed).standard_normal(shape) + 0.25).astype(f16)


def attention(q, k, v) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Causal attention in float64: O, lse and the weights P."""
    q, k, v = (x.astype(f64) for x in (q, k, v))
    s = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    s = np.where(np.tri(s.shape[1], dtype=bool), s, -np.inf)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - m)
    total = e.sum(-1, keepdims=True)
    return e / total @ v, (m + np.log(total))[..., 0], e / total


# ---- tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "k", "stages"),
    [pytest.param(64, 64, 64, 2, id="one tile"), pytest.param(100, 75, 83, 3, id="ragged")],
)
def test_matmul(run_triton, m, n, k, stages):
    """Tails in all three dimensions, odd row lengths (so: no vector loads), two or three stages."""
    a, b = normal(0, m, k), normal(1, k, n)
    result = run_triton(
        matmul_kernel,
        {"a": "*fp16", "b": "*fp16", "c": "*fp32", "M": "i32", "N": "i32", "K": "i32"},
        {"BM": 64, "BN": 32, "BK": 32},
        [a, b, Out((m, n), f32), m, n, k],
        grid=(-(-m // 64), -(-n // 32), 1),
        num_stages=stages,
    )
    np.testing.assert_allclose(result.out, a.astype(f64) @ b.astype(f64), rtol=0, atol=1e-4)
    assert result.report.race_count == 0
    tiles = -(-m // 64) * -(-n // 32) * -(-k // 32)
    assert result.report.tensor_flops == tiles * 2 * 64 * 32 * 32
    assert result.report.written_bytes_of(result.addresses[-1]) == 4 * m * n


@pytest.mark.parametrize("n", [64, 150], ids=["whole tiles", "ragged"])
def test_attention_forward(run_triton, n):
    """Online softmax, causal, two heads; lse as tight as float32 gives it."""
    d, heads = 64, 2
    q, k, v = (normal(seed, heads, n, d) for seed in (2, 3, 4))
    pointers = dict.fromkeys(("q", "k", "v", "o"), "*fp16")
    result = run_triton(
        attention_kernel,
        {**pointers, "lse": "*fp32", "N": "i32", "scale": "fp32"},
        {"BR": 64, "BC": 32, "D": d},
        [q, k, v, Out((heads, n, d), f16), Out((heads, n), f32), n, d**-0.5],
        grid=(-(-n // 64), heads, 1),
        num_stages=2,
    )
    o, lse, _ = attention(q, k, v)
    np.testing.assert_allclose(result.arrays[-2], o, rtol=0, atol=4e-3)
    np.testing.assert_allclose(result.arrays[-1], lse, rtol=0, atol=1e-5)
    assert result.report.race_count == 0


def run_backward(run_triton, rows: int, late: bool):
    """The report, and the largest error of dQ, dK and dV, each in units of its largest value; NaN if any is."""
    n, d, heads = 100, 32, 2
    q, k, v, do = (normal(seed, heads, n, d) for seed in (5, 6, 7, 8))
    o, lse, p = attention(q, k, v)
    delta = (o * do.astype(f64)).sum(-1)
    pointers = dict.fromkeys(("q", "k", "v", "do"), "*fp16") | dict.fromkeys(
        ("lse", "delta", "dq", "dk", "dv"), "*fp32"
    )
    shape = (heads, n, d)
    result = run_triton(
        gradient_kernel,
        {**pointers, "N": "i32", "scale": "fp32"},
        {"BR": rows, "BC": 64, "D": d},
        [
            q,
            k,
            v,
            do,
            lse.astype(f32),
            delta.astype(f32),
            np.zeros(shape, f32),
            Out(shape, f32),
            Out(shape, f32),
            n,
            d**-0.5,
        ],
        grid=(-(-n // 64), heads, 1),
        num_stages=2,
        late=late,
    )
    q, k, v, do = (x.astype(f64) for x in (q, k, v, do))
    ds = p * (do @ v.swapaxes(1, 2) - delta[..., None]) * d**-0.5
    expected = {"dq": ds @ k, "dk": ds.swapaxes(1, 2) @ q, "dv": p.swapaxes(1, 2) @ do}
    pairs = zip(expected.values(), result.arrays[-3:], strict=True)
    errors = [np.abs(x - reference).max() / np.abs(reference).max() for reference, x in pairs]
    return result.report, float(np.max(errors))


@pytest.mark.parametrize("rows", [pytest.param(64, id="64 rows"), pytest.param(32, id="32 rows held twice")])
def test_attention_backward(run_triton, rows):
    """Five products, transposed operands, float atomics; 100 positions.

    Tiles of 32 rows are too few for four warps: two of them hold the same values and both store them, which is no race.
    """
    report, error = run_backward(run_triton, rows, late=False)
    assert error < 3e-3
    assert report.atomic_bytes > 0


@pytest.mark.parametrize("rows", [64, 32])
def test_late_results_are_right_unless_there_is_a_race(run_triton, rows):
    """Triton 3.9 refills tiles of 32 rows for sm_90 while up to three wgmma that read them may be in flight.

    Who waits for everything gets the same numbers late as early; else the detector says so, and only then.
    """
    report, error = run_backward(run_triton, rows, late=True)
    assert (error < 3e-3) == (report.race_count == 0)
    if report.race_count:
        assert all(race.kind == "WAR" and "wgmma" in race.first for race in report.races)

"""Kernels of Triton for sm_90 with tensor maps: TMA, mbarriers, wgmma, and roles of warpgroups by another compiler."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import GlobalMemory, encode_tensor_map, launch, missing_wgmma_fences, parse

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

f16 = np.float16
BLOCK = 64


@triton.jit
def matmul_kernel(a, b, c, K, BLOCK: tl.constexpr, SPECIALISED: tl.constexpr):
    """C [M, N] = A [M, K] B [N, K]^T, all through tensor maps, a tile a block."""
    i, j = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in tl.range(0, K, BLOCK, warp_specialize=SPECIALISED):
        acc = tl.dot(a.load([i, k]), b.load([j, k]).T, acc)
    c.store([i, j], acc.to(tl.float16))


@pytest.fixture(params=[False, True], ids=["one role", "warp-specialised"])
def compiled(request, tmp_path, monkeypatch):
    """The kernel for sm_90, compiled into a cache of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tile = f"tensordesc<fp16[{BLOCK},{BLOCK}]>"
    signature = {"a": tile, "b": tile, "c": tile, "K": "i32", "BLOCK": "constexpr", "SPECIALISED": "constexpr"}
    source = ASTSource(matmul_kernel, signature, {(4,): BLOCK, (5,): request.param}, {})
    options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
    return request.param, triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("m, n, k", [(64, 64, 64), (128, 192, 320), (100, 72, 200)], ids=str)
def test_matmul(compiled, m, n, k, late):
    """Whole tiles and ragged edges, rings that wrap; silent detector, and the fences are where they must be."""
    specialised, binary = compiled
    kernel = next(iter(parse(binary.asm["ptx"]).kernels.values()))
    rng = np.random.default_rng(m)
    a, b = ((rng.standard_normal(shape) + 0.25).astype(f16) for shape in ((m, k), (n, k)))
    memory = GlobalMemory()
    out = memory.empty((m, n), f16)
    args = []
    for address, shape in ((memory.upload(a), a.shape), (memory.upload(b), b.shape), (out, (m, n))):
        map_ = encode_tensor_map(address, shape[::-1], (2 * shape[1],), (BLOCK, BLOCK), "f16", 128)
        args += [map_, *shape, shape[1], 1]  # Triton passes the shape and the strides as well
    args += [k, *[0] * (len(kernel.params) - len(args) - 1)]  # and pointers to scratch
    grid = (-(-m // BLOCK), -(-n // BLOCK))
    threads = 32 * binary.metadata.num_warps
    shared = binary.metadata.shared
    report = launch(kernel, grid, threads, args, memory, shared_bytes=shared, check_races=True, late=late)
    expected = a.astype("f8") @ b.astype("f8").T
    np.testing.assert_allclose(memory.read(out, (m, n), f16), expected, rtol=1e-3, atol=1e-2)
    assert report.races == ()
    # Triton gives each of two consumers the whole tile of this size, and both store it
    stores = binary.asm["ptx"].count("global.shared::cta.bulk_group")
    assert report.global_written_bytes == stores * 2 * m * n
    assert bool(report.register_shares) == specialised
    assert missing_wgmma_fences(kernel) == ()

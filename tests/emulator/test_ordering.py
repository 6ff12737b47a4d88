"""Order among warps, bulk copies and wgmma: a pipeline that is right is silent, and each thing left out is found."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import EmulatorError, GlobalMemory, encode_tensor_map, launch, missing_wgmma_fences, parse

from .conftest import Out, compile_cuda, from_bf16, run_cuda, to_bf16
from .test_mbarrier import PRELUDE as BARRIERS
from .test_races import HAZARDS
from .test_races import kernel as plain_kernel
from .test_wgmma import PRELUDE as PRODUCTS
from .test_wgmma import wrapper

f32 = np.float32

# O [64, 16] = sum over tiles j of A_j [64, 64] B_j [16, 64]^T, written twice through one buffer
PIPELINE = (
    BARRIERS
    + PRODUCTS.replace("typedef unsigned u32;\ntypedef unsigned long long u64;\n", "").split("\n", 2)[2]
    + wrapper(16, "bf16", False, 0, 0)
    + """
struct alignas(64) TensorMap { char opaque[128]; };
__device__ void load(u32 target, const TensorMap* map, u64* bar, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];"
        :: "r"(target), "l"(map), "r"(shared_of(bar)), "r"(0), "r"(row) : "memory");
}
__device__ u64 descriptor(u32 address) { return (u64)(address >> 4) | (u64)64 << 32 | 1ull << 62; }

extern "C" __global__ void __launch_bounds__(256, 1)
k(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* out, int tiles) {
    __shared__ __align__(1024) char A[2][8192], B[2][2048];
    __shared__ __align__(16) float O[64 * 16];
    __shared__ u64 full[2], empty[2];
    const int t = threadIdx.x, wg = __shfl_sync(~0u, t / 128, 0);
    if (t == 0) for (int i = 0; i < 2; i++) { init(full + i, 1); init(empty + i, 4); }
    __syncthreads();                                        // the barriers are there
    int stage = 0, parity = 0;
    if (wg == 0) {
        if (t == 0) for (int j = 0; j < tiles; j++) {
            wait(empty + stage, parity ^ 1);
            expect(full + stage, 8192 + 2048);
            load(shared_of(A[stage]), &map_a, full + stage, 64 * j);
            load(shared_of(B[stage]), &map_b, full + stage, 16 * j);
            if (++stage == 2) stage = 0, parity ^= 1;
        }
        return;
    }
    float d[8];
    for (int i = 0; i < 8; i++) d[i] = 0;
    for (int j = 0; j < tiles; j++) {
        wait(full + stage, parity);
        for (int i = 0; i < 8; i++) asm volatile("" : "+f"(d[i]) :: "memory");
        FENCE;
        for (int s = 0; s < 4; s++)
            product(d, descriptor(shared_of(A[stage])) + 2 * s, descriptor(shared_of(B[stage])) + 2 * s, 1);
        COMMIT;
        WAIT(0);
        if (t % 32 == 0) arrive(empty + stage);
        for (int i = 0; i < 8; i++) asm volatile("add.f32 %0, %0, 0f3F800000;" : "+f"(d[i]) :: "memory");
        if (++stage == 2) stage = 0, parity ^= 1;
    }
    for (int h = 0; h < 2; h++) {
        for (int i = 0; i < 8; i++) {
            int row = t / 32 % 4 * 16 + t % 32 / 4 + 8 * (i >> 1 & 1);
            O[row * 16 + 8 * (i >> 2) + t % 4 * 2 + (i & 1)] = (h + 1) * d[i];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        SYNC(1, 128);                                       // all of O is there
        if (t == 128) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 4096;"
                :: "l"(out + h * 1024 + blockIdx.x * 2048), "r"(shared_of(O)) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        }
        SYNC(1, 128);                                       // O is free
    }
}
"""
)


def run(source: str, tiles: int = 5, blocks: int = 3, threads: int = 256, **options):
    """Launch; whether the two results of each block are right, and the report."""
    kernel = parse(compile_cuda(source, "compute_90a")).kernels["k"]
    rng = np.random.default_rng(3)
    a, b = (to_bf16(rng.standard_normal((rows * tiles, 64))) for rows in (64, 16))
    memory = GlobalMemory()
    maps = [
        encode_tensor_map(memory.upload(x), x.shape[::-1], (128,), (64, rows), "bf16", 128)
        for x, rows in ((a, 64), (b, 16))
    ]
    out = memory.empty((blocks, 2, 64, 16), f32)
    report = launch(kernel, blocks, threads, [*maps, out, tiles], memory, **options)
    wide = [from_bf16(x).astype("f8").reshape(tiles, -1, 64) for x in (a, b)]
    expected = np.einsum("jmk,jnk->mn", *wide) + tiles
    right = np.allclose(
        memory.read(out, (blocks, 2, 64, 16), f32), [[expected, 2 * expected]] * blocks, rtol=0, atol=1e-4
    )
    return right, report


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_right_pipeline_is_silent(late):
    """Five tiles through two stages: right in both timings, with the detector and without."""
    for check in (True, False):
        right, report = run(PIPELINE, late=late, check_races=check)
        assert right
        assert report.races == ()
    assert report.global_written_bytes == 3 * 2 * 4096


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_producer_of_one_warp(late):
    """Blocks of 160 threads: the products' warpgroup comes first, then a single warp that loads."""
    source = PIPELINE.replace("if (wg == 0) {\n        if (t == 0) for", "if (wg == 1) {\n        if (t == 128) for")
    source = source.replace("if (t == 128) {\n            asm", "if (t == 0) {\n            asm")
    right, report = run(source, threads=160, late=late, check_races=True)
    assert right
    assert report.races == ()


MUTANTS = {
    "tile not awaited": ("wait(full + stage, parity);", "if (j < tiles - 1) wait(full + stage, parity);", {"RAW"}),
    "stage not awaited": ("wait(empty + stage, parity ^ 1);", "", {"WAR"}),
    "stage released before its products are done": (
        "WAIT(0);\n        if (t % 32 == 0) arrive(empty + stage);",
        "if (t % 32 == 0) arrive(empty + stage);\n        WAIT(0);",
        {"WAR"},
    ),
    "stage released by one warp": ("if (t % 32 == 0) arrive(empty", "if (t % 128 < 4) arrive(empty", {"WAR"}),
    "barriers not there yet": ("__syncthreads();  ", "", {"RAW"}),
    "no proxy fence": ('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "", {"PROXY"}),
    "proxy fence of global memory": ("fence.proxy.async.shared::cta;", "fence.proxy.async.global;", {"PROXY"}),
    "proxy fence too early": (
        'SYNC(1, 128);                                       // all of O is there',
        'O[t % 128] += 0.f * t; SYNC(1, 128);',
        {"PROXY"},
    ),
    "O not complete": ("SYNC(1, 128);                                       // all of O is there", "", {"RAW"}),
    "O not free: no barrier": ("SYNC(1, 128);                                       // O is free", "", {"WAR"}),
    "O not free: no wait": ('asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");', "", {"WAR"}),
}  # fmt: skip


@pytest.mark.parametrize("case", MUTANTS)
def test_what_is_left_out_is_found(case):
    """Many of these compute the right numbers in every timing: only the order shows them."""
    old, new, kinds = MUTANTS[case]
    assert old in PIPELINE
    try:
        _, report = run(PIPELINE.replace(old, new), check_races=True)
    except EmulatorError as error:
        assert case == "stage not awaited", error
        return
    assert {race.kind for race in report.races} & kinds, report.races
    assert report.race_count >= len(report.races)


def test_a_race_says_where():
    """The kind, both instructions, and -1 in place of the warp of a bulk load."""
    old, new, _ = MUTANTS["tile not awaited"]
    race = run(PIPELINE.replace(old, new), check_races=True)[1].races[0]
    assert "cp.async.bulk.tensor" in race.first and "wgmma.mma_async" in race.second
    assert race.warps[0] == -1 and race.warps[1] >= 4


# ---- accesses of threads alone -----------------------------------------------------------------------------------


def race_count(body: str) -> int:
    """Of two warps in a kernel that could copy in bulk, so that this detector watches."""
    source = plain_kernel('asm volatile("cp.async.bulk.commit_group;" ::: "memory"); ' + body)
    options = {"arch": "compute_90a", "grid": 2, "block": 64, "check_races": True}
    return run_cuda(source, [Out((2, 64), np.int32)], **options).report.race_count


@pytest.mark.parametrize("case", HAZARDS)
def test_hazards_without_anything_asynchronous(case):
    """The hazards that the detector of other kernels is tried on: found, and quiet with the barrier in its place."""
    body, _ = HAZARDS[case]
    assert race_count(body.replace("MAYBE", "")) > 0
    right = body.replace("MAYBE", "SYNC").replace("s[lane] = t; SYNC", "if (warp == 0) s[lane] = t; SYNC")
    assert race_count(right) == 0


def test_what_is_no_race():
    """The same value written by two warps, atomics among themselves, and a warp alone."""
    assert race_count("s[lane] = 7; SYNC; r = s[lane];") == 0
    assert race_count("if (t == 0) s[0] = 0; SYNC; atomicAdd((int*)&s[0], t); SYNC; r = s[0];") == 0
    assert race_count("if (t == 0) s[0] = 0; SYNC; atomicAdd((int*)&s[0], t); r = s[0];") > 0
    assert race_count("s[t] = t; r = s[t ^ 31]; s[t ^ 1] = r; r = s[t ^ 7];") == 0


def test_atomics_after_a_read():
    """The reader races with a later atomic, though an atomic was also the last write before it."""
    body = "if (t == 0) s[0] = 0; SYNC; atomicAdd((int*)&s[0], t); SYNC; if (warp == 1) r = s[0]; MAYBE; "
    body += "if (warp == 0) atomicAdd((int*)&s[0], t);"
    assert race_count(body.replace("MAYBE", "")) > 0
    assert race_count(body.replace("MAYBE", "SYNC")) == 0


# ---- fences of registers -----------------------------------------------------------------------------------------


def fences(source: str) -> tuple[str, ...]:
    return missing_wgmma_fences(parse(compile_cuda(source, "compute_90a")).kernels["k"])


def test_missing_wgmma_fence():
    """The sums are written between products (a loop away), and a fence must stand between."""
    assert fences(PIPELINE) == ()
    found = fences(PIPELINE.replace("        FENCE;\n", ""))
    assert found and all("no wgmma.fence after the writes of %f" in text for text in found)


def test_a_fence_on_one_path_only():
    """The other path counts."""
    assert fences(PIPELINE.replace("        FENCE;\n", "        if (j != 1) FENCE;\n"))
    assert fences(PIPELINE.replace("        FENCE;\n", "        if (j == 1) FENCE; else FENCE;\n")) == ()


def test_a_guarded_fence():
    """It may not happen."""
    text = compile_cuda(PIPELINE, "compute_90a").replace("wgmma.fence.sync", "@%p1 wgmma.fence.sync")
    assert missing_wgmma_fences(parse(text).kernels["k"])


def test_kernels_without_wgmma_need_no_fence():
    """Nothing to say of them."""
    assert fences('extern "C" __global__ void k(int* out) { out[threadIdx.x] = 1; }') == ()

"""Clusters: blocks that meet, arrive at each other's mbarriers, and load for each other, in order or found out."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import (
    Deadlock,
    DivergentBarrier,
    EmulatorError,
    GlobalMemory,
    PtxError,
    UnknownInstruction,
    encode_tensor_map,
    launch,
    parse,
)

from .conftest import Out, compile_cuda, mentions, ptx_kernel, run_cuda, run_ptx
from .test_mbarrier import PRELUDE as BARRIERS

i32 = np.int32

PRELUDE = (
    BARRIERS
    + """
struct alignas(64) TensorMap { char opaque[128]; };
__device__ u32 rank_of() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ u32 at_rank(const void* p, u32 rank) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_of(p)), "r"(rank));
    return r;
}
__device__ void arrive_at(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(bar) : "memory");
}
#define INIT_FENCE asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory")
#define MEET(how) asm volatile("barrier.cluster.arrive" how ";\\nbarrier.cluster.wait;" ::: "memory")
__device__ void load(u32 target, const TensorMap* map, u64* bar, int row, unsigned short mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(target), "l"(map), "r"(shared_of(bar)), "r"(0), "r"(row), "h"(mask) : "memory");
}
"""
)

# ---- numbers and places ------------------------------------------------------------------------------------------

NUMBERS = (
    "%clusterid.x", "%clusterid.y", "%nclusterid.x", "%nclusterid.y", "%nclusterid.z", "%cluster_ctaid.x",
    "%cluster_ctaid.y", "%cluster_nctaid.x", "%cluster_nctaid.y", "%cluster_ctarank", "%cluster_nctarank",
)  # fmt: skip


def numbers(cluster: str, grid) -> np.ndarray:
    """What the special registers of thread 0 of each block say: [z, y, x, number]."""
    reads = "".join(
        f'asm volatile("mov.u32 %0, %{name};" : "=r"(r)); out[b * {len(NUMBERS)} + {i}] = r;\n'
        for i, name in enumerate(NUMBERS)
    )
    source = f"""extern "C" __global__ void {cluster} k(int* out) {{
        int r, b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        {reads} }}"""
    shape = (*grid[::-1], len(NUMBERS))
    return run_cuda(source, [Out(shape, i32)], arch="compute_90a", grid=grid, block=32).out


def test_ranks_count_along_x_first():
    """A cluster of 2 x 2 in a grid of 4 x 6 x 2, and blocks without one, which are clusters by themselves."""
    got = numbers("__cluster_dims__(2, 2, 1)", (4, 6, 2))
    _, y, x = np.indices((2, 6, 4))
    two = 2 * np.ones_like(x)
    want = [x // 2, y // 2, two, two + 1, two, x % 2, y % 2, two, two, x % 2 + 2 * (y % 2), two + 2]
    np.testing.assert_array_equal(got, np.stack(want, -1))
    alone = numbers("", (3, 2, 1))
    _, y, x = np.indices((1, 2, 3))
    size, none = np.ones_like(x), np.zeros_like(x)
    want = [x, y, 3 * size, 2 * size, size, none, none, size, size, none, size]
    np.testing.assert_array_equal(alone, np.stack(want, -1))


def test_blocks_of_a_cluster_run_together():
    """More clusters than a batch holds: each still meets, whatever its number."""
    source = PRELUDE + """
    extern "C" __global__ void __cluster_dims__(3, 1, 1) k(int* out) {
        __shared__ u64 bar;
        if (threadIdx.x == 0) { init(&bar, 3); INIT_FENCE; }
        MEET("");
        if (threadIdx.x == 0) for (int r = 0; r < 3; r++) arrive_at(at_rank(&bar, r));
        wait(&bar, 0);
        out[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x;
        MEET("");
    }"""  # fmt: skip
    out = run_cuda(source, [Out((39, 1024), i32)], arch="compute_90a", grid=39, block=1024).out
    np.testing.assert_array_equal(out, np.arange(39)[:, None] + np.zeros((1, 1024), i32))


# ---- a pipeline --------------------------------------------------------------------------------------------------

# Two blocks read the same tiles of 32 x 64 numbers: each loads 16 rows of every tile for both. A warp of each loads,
# another adds up what it finds.
PAIR = PRELUDE + """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(const __grid_constant__ TensorMap map, int* out, int tiles) {
    __shared__ __align__(1024) int tile[2][32 * 32];
    __shared__ u64 full[2], empty[2];
    const int t = threadIdx.x, rank = rank_of();
    if (t == 0) {
        for (int i = 0; i < 2; i++) { init(full + i, 1); init(empty + i, 2); }
        INIT_FENCE;
    }
    MEET(".relaxed");                                    // all mbarriers are there
    int stage = 0, parity = 0, sum = 0;
    if (t < 32) {
        if (t == 0) {
            for (int j = 0; j < tiles; j++) {
                wait(empty + stage, parity ^ 1);
                expect(full + stage, 4096);
                load(shared_of(tile[stage] + rank * 512), &map, full + stage, 32 * j + 16 * rank, 3);
                if (++stage == 2) stage = 0, parity ^= 1;
            }
            for (int i = 0; i < 2; i++) {                // the last arrivals
                wait(empty + stage, parity ^ 1);
                if (++stage == 2) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    for (int j = 0; j < tiles; j++) {
        wait(full + stage, parity);
        for (int i = t - 32; i < 1024; i += 32) sum += (j + 1) * (i / 32 + 1) * tile[stage][i];
        __syncwarp();
        if (t == 32) { arrive(empty + stage); arrive_at(at_rank(empty + stage, rank ^ 1)); }
        if (++stage == 2) stage = 0, parity ^= 1;
    }
    out[blockIdx.x * 32 + t - 32] = sum;
}
"""  # fmt: skip


def run(source: str, tiles: int = 5, blocks: int = 4, **options):
    """Launch; whether all sums are right, and the report."""
    kernel = parse(compile_cuda(source, "compute_90a")).kernels["k"]
    memory = GlobalMemory()
    data = np.random.default_rng(5).integers(0, 1000, (32 * tiles, 32), dtype=i32)
    map_ = encode_tensor_map(memory.upload(data.view("f4")), (32, 32 * tiles), (128,), (32, 16), "f32", 0)
    out = memory.empty((blocks, 32), i32)
    report = launch(kernel, blocks, 64, [map_, out, tiles], memory, **options)
    want = np.einsum("jik,j,i->k", data.reshape(tiles, 32, 32), np.arange(1, tiles + 1), np.arange(1, 33))
    return bool((memory.read(out, (blocks, 32), i32) == want).all()), report


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_a_pair_of_blocks_loads_for_both(late):
    """Right in both timings and in order; every byte is read once for two blocks."""
    for check in (True, False):
        right, report = run(PAIR, late=late, check_races=check)
        assert right
        assert report.races == ()
    assert report.async_copied_bytes == 4 * 5 * 4096
    assert report.global_read_bytes == 2 * 5 * 4096


OWN, REMOTE = "arrive(empty + stage);", "arrive_at(at_rank(empty + stage, rank ^ 1));"
TAIL = "for (int i = 0; i < 2; i++) {                // the last arrivals"
MUTANTS = {
    "the other block is not told": (REMOTE, "arrive(empty + stage);", {"WAR"}),
    "the own block is not told": (OWN, REMOTE, {"WAR"}),
    "only the own block is waited for": (
        "init(empty + i, 2)", "init(empty + i, rank == 0 ? 1 : 2)", {"WAR", EmulatorError},
    ),
    "loads for itself alone": (", 3);\n", ", 1 << rank);\n", {Deadlock}),
    "loads for the other alone": (", 3);\n", ", 2 >> rank);\n", {Deadlock}),
    "loads the other's half": ("32 * j + 16 * rank", "32 * j + 16 * (rank ^ 1)", {"wrong"}),
    "half of the bytes": ("expect(full + stage, 4096)", "expect(full + stage, 2048)", {"RAW", EmulatorError}),
    "the tile is not awaited": ("wait(full + stage, parity);", "", {"RAW"}),
    "the buffer is not awaited": (
        "wait(empty + stage, parity ^ 1);\n                expect", "expect", {"WAR", "WAW", EmulatorError},
    ),
    "nobody meets at the start": ('MEET(".relaxed");', "__syncthreads();", {"RAW", EmulatorError}),
    "mbarriers are not published": ("INIT_FENCE;\n    }", "}", {"RAW"}),
    "leaves before the last arrivals": (TAIL, TAIL.replace("i < 2", "i < 0"), {"EXIT"}),
    "leaves before the very last arrival": (TAIL, TAIL.replace("i < 2", "i < 1"), {"EXIT"}),
}  # fmt: skip


@pytest.mark.parametrize("case", MUTANTS)
def test_what_is_left_out_is_found(case):
    """As a race, as an error, or by the numbers."""
    old, new, expected = MUTANTS[case]
    assert PAIR.count(old) == 1
    found = set()
    for late in (True, False):
        try:
            right, report = run(PAIR.replace(old, new), late=late, check_races=True)
            found |= {race.kind for race in report.races} | (set() if right else {"wrong"})
        except EmulatorError as error:
            found |= {type(error), EmulatorError}
    assert found & expected, found


def test_a_release_publishes_more_than_a_relaxed_arrival():
    """With the default arrival the fence is not needed, as everything before it is handed on."""
    source = PAIR.replace("INIT_FENCE;\n    }", "}").replace('MEET(".relaxed");', 'MEET("");')
    assert run(source, check_races=True)[1].races == ()


def test_a_barrier_at_the_end_keeps_blocks_too():
    """All threads meet instead of the wait for the last arrivals; a relaxed arrival would order nothing."""
    source = PAIR.replace(TAIL, TAIL.replace("i < 2", "i < 0")).replace("return;", "MEET(HOW); return;")
    source = source.replace("= sum;\n", "= sum; MEET(HOW);\n")
    right, report = run(source.replace("HOW", '""'), check_races=True)
    assert right and report.races == ()
    assert {race.kind for race in run(source.replace("HOW", '".relaxed"'), check_races=True)[1].races} == {"EXIT"}


def test_a_race_counts_warps_through_the_cluster():
    """The warp of the other block that arrives too late, and the block that may have gone."""
    races = run(PAIR.replace(TAIL, TAIL.replace("i < 2", "i < 0")), check_races=True)[1].races
    assert {race.warps for race in races} == {(3, 0), (1, 2)}
    assert all("mbarrier.arrive.shared::cluster" in race.first and "ret" in race.second for race in races)
    assert {race.block[0] % 2 for race in races} == {0, 1}


# ---- barriers of clusters ----------------------------------------------------------------------------------------


def meet(body: str, *, block=64, grid=2, **options):
    """A kernel in clusters of two with an mbarrier, thread t and rank."""
    source = PRELUDE + f"""extern "C" __global__ void __cluster_dims__(2, 1, 1) k(int* out) {{
        __shared__ u64 bar, none;
        int t = threadIdx.x, rank = rank_of(), r = 0;
        if (t == 0) {{ init(&bar, 1); INIT_FENCE; }}
        {body}
        out[blockIdx.x * blockDim.x + t] = r;
    }}"""  # fmt: skip
    args = [Out((grid, block), i32)]
    return run_cuda(source, args, arch="compute_90a", block=block, grid=grid, check_races=True, **options)


def test_threads_that_have_exited_are_not_waited_for():
    """Most of one block leave before the others meet, one lane of a warp stays."""
    got = meet('if (rank == 1 && t != 40) return; MEET(""); r = 1; MEET(""); r = 2;')
    np.testing.assert_array_equal(got.out[0], np.full(64, 2))
    assert got.out[1, 40] == 2
    assert got.report.barriers == 4  # two blocks, twice


def test_an_arrival_does_not_wait():
    """What stands between arrival and wait may be what the other block waits for."""
    body = """MEET("");
        if (rank == 0) { wait(&bar, 0); MEET(""); }
        else { asm volatile("barrier.cluster.arrive;" ::: "memory"); if (t == 0) arrive_at(at_rank(&bar, 0));
               asm volatile("barrier.cluster.wait;" ::: "memory"); }
        r = 1;"""
    assert meet(body).out.all()


FAULTS = {
    "one block does not come": ('if (rank == 0) { MEET(""); } else wait(&bar, 0);', Deadlock, "mbarrier"),
    "half of a warp does not come": ('if (t < 16) { MEET(""); } else wait(&bar, 0);', Deadlock, "mbarrier"),
    "arrives twice": (
        'asm volatile("barrier.cluster.arrive;"); asm volatile("barrier.cluster.arrive;");',
        EmulatorError, "arrived before",
    ),
    "waits without an arrival": ('asm volatile("barrier.cluster.wait;");', EmulatorError, "has not arrived"),
    "a part of a warp is aligned": (
        'if (t < 48) { asm volatile("barrier.cluster.arrive.aligned;"); }', DivergentBarrier, "not its whole warp",
    ),
    "a rank that there is not": ("arrive_at(at_rank(&bar, 2));", EmulatorError, "rank 2 in a cluster of 2"),
    "no mbarrier there": ('MEET(""); if (t == 0) arrive_at(at_rank(&none, 1));', EmulatorError, "no mbarrier"),
    "a block that has exited": (
        'MEET(""); if (rank == 1) return; int done;'  # a look that gives up when there is nothing else to do
        'asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.s32 %0, 1, 0, p;}"'
        ' : "=r"(done) : "r"(shared_of(&bar)) : "memory"); if (t == 0) arrive_at(at_rank(&bar, 1)); r = done;',
        EmulatorError, "block 1 of the cluster has exited",
    ),
    "an address with a rank where none may be": (
        'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at_rank(&bar, 1)));', EmulatorError, "outside",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_faults(case):
    """Each is refused, and says why."""
    body, kind, text = FAULTS[case]
    with pytest.raises(kind) as error:
        meet(body)
    assert mentions(error.value, text, "block (")


def test_waiting_for_a_cluster_alone_is_a_deadlock():
    """Two warps at a barrier of the block, the rest at that of the cluster."""
    with pytest.raises(Deadlock) as error:
        meet('if (rank == 0) { MEET(""); } else if (t < 32) { MEET(""); } else SYNC(3, 64);')
    assert mentions(error.value, "barrier 3")
    with pytest.raises(Deadlock) as error:
        meet('asm volatile("barrier.cluster.arrive;"); if (rank == 0 || t > 0) asm volatile("barrier.cluster.wait;");'
             'if (rank == 0) { MEET(""); } else SYNC(3, 96);')  # fmt: skip
    assert mentions(error.value, "barrier 3")


def load_with(mask: int) -> None:
    source = PAIR.replace(", 3);\n", f", {mask});\n")
    run(source)


def test_masks_name_blocks_that_there_are():
    """A bit beyond the cluster, or none at all."""
    for mask in (0, 4, 7):
        with pytest.raises(EmulatorError) as error:
            load_with(mask)
        assert mentions(error.value, f"mask {mask:#x}", "cluster of 2", "multicast")


def test_a_multicast_to_a_block_without_the_mbarrier():
    """The other block has made none at that place."""
    source = PAIR.replace("if (t == 0) {\n        for (int i", "if (t == 0 && rank == 0) {\n        for (int i")
    with pytest.raises(EmulatorError) as error:
        run(source)
    assert mentions(error.value, "no mbarrier was initialised")


def test_a_copy_that_outlives_its_target():
    """Nobody waits for the tile: the block has gone when the other's load comes, or may have."""
    source = PRELUDE + """
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k(const __grid_constant__ TensorMap map, int* out, int tiles) {
        __shared__ __align__(1024) int tile[32 * 32];
        __shared__ u64 bar;
        if (threadIdx.x == 0) { init(&bar, 1); INIT_FENCE; }
        MEET("");
        if (rank_of() == 0 && threadIdx.x == 0) load(shared_of(tile), &map, &bar, 0, 2);
    }"""  # fmt: skip
    with pytest.raises(EmulatorError) as error:
        run(source, blocks=2)
    assert mentions(error.value, "block 1 of the cluster has exited before the copy arrives")
    assert {race.kind for race in run(source, blocks=2, late=False, check_races=True)[1].races} == {"EXIT"}


# ---- launches and forms ------------------------------------------------------------------------------------------


def test_a_grid_is_a_multiple_of_its_clusters():
    """Three blocks are no clusters of two; nor are nine blocks a cluster."""
    with pytest.raises(ValueError, match=r"grid\.x is 3; k needs a multiple of its clusters of 2"):
        meet("", grid=3)
    text = ptx_kernel("").replace(")\n{", ")\n.explicitcluster\n.reqnctapercluster 9, 1, 1\n{", 1)
    with pytest.raises(ValueError, match="1 to 8 blocks"):
        run_ptx(text, [Out(1, i32)], grid=9)


def test_what_is_not_implemented_is_refused():
    """Clusters whose size a launch gives, other forms of barriers, mapa and remote accesses."""
    with pytest.raises(PtxError, match="__cluster_dims__"):
        parse(ptx_kernel("").replace(")\n{", ")\n.explicitcluster\n{", 1))
    for code in (
        "barrier.cluster.arrive.acquire;", "barrier.cluster.wait.release;", "barrier.cluster.sync;",
        "mapa.u64 %rd1, %rd2, %r1;", "mbarrier.try_wait.parity.shared::cluster.b64 %p1, [%r1], 0;",
    ):  # fmt: skip
        with pytest.raises(UnknownInstruction):
            run_ptx(ptx_kernel(code, target="sm_90a"), [Out(1, i32)])
    with pytest.raises(PtxError):
        run_ptx(ptx_kernel("mbarrier.arrive.shared::cluster.b64 %rd1, [%r1];", target="sm_90a"), [Out(1, i32)])

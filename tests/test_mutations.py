"""Small faults in the text of a kernel, each of which must turn its check red."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
from flashsmith.check import Verdict, check
from flashsmith.compile import compile_source
from flashsmith.emulator import EmulatorError
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.render import Source, render
from flashsmith.spec.kernel import FORWARD, FUSED, PARTS, SPLIT, KernelName, KernelSpec
from flashsmith.spec.problem import Pass, Problem
from flashsmith.spec.tile import ALL_HEADS, ForwardTile, KeyBlockTile, QueryBlockTile, RowTile, Tile

TILES: dict[KernelName, Tile] = {
    "forward": ForwardTile(Br=64, Bc=32, warps=4),
    "partial": ForwardTile(Br=64, Bc=32, warps=4),
    "combine": RowTile(),
    "delta": RowTile(),
    "fused": KeyBlockTile(Br=32, Bc=64, warps=4, stages=2),
    "convert": KeyBlockTile(Br=32, Bc=64, warps=4, stages=2),
    "dkdv": KeyBlockTile(Br=32, Bc=64, warps=4, row_split=2),
    "dq": QueryBlockTile(Br=64, Bc=32, warps=4),
}
ASCENDING = ForwardTile(Br=64, Bc=32, warps=4, ascending=True)
PACKED = ForwardTile(Br=64, Bc=32, warps=4, packed=True)
DQ_ALL_HEADS = QueryBlockTile(Br=64, Bc=32, warps=4, order=ALL_HEADS)
DKDV_ALL_HEADS = KeyBlockTile(Br=32, Bc=64, warps=4, row_split=2, order=ALL_HEADS)
PROBLEM = Problem(dtype="bf16", d=64, causal=True, Hq=4, Hk=2, Nq=100, Nk=150)


@dataclass(frozen=True)
class Fault:
    """One change of a kernel's text, and the tensors that show it ("race" if the numbers do not)."""

    kernel: KernelName
    old: str
    new: str
    shows: str
    causal: bool = True
    tile: Tile | None = None  # if not that of TILES


FAULTS = {
    "scale folded twice into dK": Fault("fused", "*= scale;", "*= scale * scale;", "dK"),
    "scale folded twice into dQ": Fault("convert", "scale * sums[2 * h]", "scale * scale * sums[2 * h]", "dQ"),
    "scale folded twice into dQ, dq": Fault("dq", "*= scale;", "*= scale * scale;", "dQ"),
    "one key too many cleared": Fault("fused", ">= keys_left)", ">= keys_left - 1)", "dQ dK", causal=False),
    "delta over half a row": Fault("delta", "for (int x = row_lanes / 2;", "for (int x = row_lanes / 4;", "dQ dK"),
    "delta left out": Fault("delta", "dlse[place] - sum : -sum;", "0 : 0;", "dQ dK"),
    "diagonal at the top left": Fault("forward", "last = here.i0 + Nk - Nq;", "last = here.i0;", "O m l"),
    "diagonal at the top left, fused": Fault("fused", "+ diagonal -", "-", "dQ dK dV"),
    "diagonal off by one, dq": Fault("dq", "min(q + Nk - Nq,", "min(q + Nk - Nq + 1,", "dQ"),
    "tail not masked": Fault("forward", "const int last = Nk - 1;", "const int last = Nk + 99;", "O l", causal=False),
    "dK from P instead of dS": Fault("fused", "dS_rmem[t][k], Q_rmem", "P_rmem[t][k], Q_rmem", "dK"),
    "columns of dV swapped": Fault("fused", "mma_m16n16k16(dV_rmem[t][n]", "mma_m16n16k16(dV_rmem[t][n ^ 1]", "dV"),
    "columns of dK swapped": Fault("fused", "mma_m16n16k16(dK_rmem[t][n]", "mma_m16n16k16(dK_rmem[t][n ^ 1]", "dK"),
    "O not rescaled": Fault("forward", "O[t][n][2 * h] *= alpha[t][h];", "", "O"),
    "l not rescaled": Fault("forward", "l[t][h] *= alpha[t][h];", "", "O l"),
    "max over two lanes of four": Fault("forward", "__shfl_xor_sync(~0u, x, 2)", "__shfl_xor_sync(~0u, x, 1)", "O m l"),
    "wrong head of a group": Fault("forward", "/ (Hq / Hk)", "% Hk", "O m l"),
    "copy not waited for": Fault("forward", "cp_async_wait<0>();", "", "O"),
    "copy not waited for, fused": Fault("fused", "cp_async_wait<0>();", "", "dQ dK dV"),
    "end of the keys not cleared": Fault("forward", "seen_keys - (j + 1) * Bc", "Bc", "O l", tile=ASCENDING),
    "a tile cut short": Fault("forward", "seen_keys - (j + 1) * Bc", "seen_keys - (j + 2) * Bc", "O l", tile=ASCENDING),
    "the same V twice": Fault("forward", "V_gmem += V_walk.tile;", "", "O", tile=ASCENDING),
    "one tile masked too few": Fault("forward", "(j + 1) * Bc - 1 > last", "j * Bc > last", "O l", tile=ASCENDING),
    "tiles of one head twice, dq": Fault("dq", "block % matrices", "block % Tr", "dQ", tile=DQ_ALL_HEADS),
    "the last tile in no part": Fault("partial", "(seen_tiles + parts - 1) / parts", "seen_tiles / parts", "O m l"),
    "every part from the first key": Fault("partial", "k0 = (first + Tc - 1)", "k0 = (Tc - 1)", "O m l"),
    "diagonal of the first part": Fault("partial", "last -= first * Bc;", "", "O m l"),
    "parts not rescaled": Fault("combine", "alpha = ex2((m_row[part] - top) * scale_log2)", "alpha = 1.f", "O"),
    "l of the parts not rescaled": Fault("combine", "ex2((m_row[part] - top) * scale_log2) * l_row", "l_row", "O l"),
    "one part left out": Fault("combine", "other = 1; other < slices", "other = 2; other < slices", "O"),
    "m not scaled": Fault("combine", "__fmul_rn(top, scale)", "top", "m"),
    "Q of the first group": Fault("forward", "here.batch, here.kv_head * heads", "here.batch, 0", "O m l", tile=PACKED),
    "diagonal by rows": Fault("forward", "(first + row) / heads", "(first + row)", "O m l", tile=PACKED),
    "heads in the wrong order": Fault("dkdv", "block % matrices", "block / matrices", "dK dV", tile=DKDV_ALL_HEADS),
}  # fmt: skip


@cache
def source_of(kernel: KernelName, causal: bool = True, tile: Tile | None = None) -> Source:
    problem = replace(PROBLEM, causal=causal)
    return render(KernelSpec.of(kernel, problem, tile or TILES[kernel], 80))


def verdict_with(kernel: KernelName, text: str, causal: bool = True) -> Verdict:
    """The check of the pass that `kernel` belongs to, with its text replaced."""
    kernels = next(names for names in (FORWARD, PARTS, FUSED, SPLIT) if kernel in names)
    sources = {name: source_of(name, causal) for name in kernels}
    sources[kernel] = Source(sources[kernel].spec, text)
    binaries = {name: compile_source(source) for name, source in sources.items()}
    which: Pass = "forward" if kernels in (FORWARD, PARTS) else "backward"
    return check(replace(PROBLEM, causal=causal), which, binaries, EmulatedEngine(check_races=True), parts=3)


SOUND: dict[str, tuple[KernelName, Tile]] = {
    **{kernel: (kernel, TILES[kernel]) for kernel in ("forward", "partial", "fused", "dkdv")},
    "forward, packed": ("forward", PACKED),
    "forward, ascending": ("forward", ASCENDING),
    "dq, all heads": ("dq", DQ_ALL_HEADS),
    "dkdv, all heads": ("dkdv", DKDV_ALL_HEADS),
}  # type: ignore[dict-item]


@pytest.mark.parametrize("name", SOUND)
def test_without_a_fault_the_check_is_green(name: str) -> None:
    kernel, tile = SOUND[name]
    verdict = verdict_with(kernel, source_of(kernel, tile=tile).text)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    text = source_of(fault.kernel, fault.causal, fault.tile).text
    assert fault.old in text, f"{fault.old!r} is no longer in the text of {fault.kernel}"
    try:
        verdict = verdict_with(fault.kernel, text.replace(fault.old, fault.new), fault.causal)
    except EmulatorError:
        return  # the emulator saw an access that must not be
    wrong = {line.tensor for line in verdict.lines if not line.ok}
    assert wrong & set(fault.shows.split()), f"not found: {verdict.lines}"


def barriers() -> list[tuple[KernelName, Tile, int]]:
    """Every barrier of every kernel with matrix products, and of combine."""
    kernels: tuple[KernelName, ...] = ("forward", "fused", "dkdv", "dq")
    texts = [*((kernel, TILES[kernel]) for kernel in kernels), ("forward", ASCENDING), ("combine", TILES["combine"])]
    return [
        (kernel, tile, number)
        for kernel, tile in texts
        for number in range(source_of(kernel, tile=tile).text.count("__syncthreads();"))
    ]


@pytest.mark.parametrize(("kernel", "tile", "number"), barriers())
def test_no_barrier_can_be_spared(kernel: KernelName, tile: Tile, number: int) -> None:
    """Without it the numbers may still be right on the emulator, but a race is reported."""
    parts = source_of(kernel, tile=tile).text.split("__syncthreads();")
    without = "__syncthreads();".join(parts[: number + 1]) + "__syncthreads();".join(parts[number + 1 :])
    verdict = verdict_with(kernel, without)
    assert not verdict.ok, parts[number + 1].splitlines()[0]

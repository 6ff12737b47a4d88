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
from flashsmith.spec.kernel import FORWARD, FUSED, SPLIT, KernelName, KernelSpec
from flashsmith.spec.problem import Pass, Problem
from flashsmith.spec.tile import ALL_HEADS, ForwardTile, KeyBlockTile, QueryBlockTile, RowTile, Tile

TILES: dict[KernelName, Tile] = {
    "forward": ForwardTile(Br=64, Bc=32, warps=4),
    "delta": RowTile(),
    "fused": KeyBlockTile(Br=32, Bc=64, warps=4, stages=2),
    "convert": KeyBlockTile(Br=32, Bc=64, warps=4, stages=2),
    "dkdv": KeyBlockTile(Br=32, Bc=64, warps=4, row_split=2),
    "dq": QueryBlockTile(Br=64, Bc=32, warps=4),
}
ASCENDING = ForwardTile(Br=64, Bc=32, warps=4, ascending=True)
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
    "scale folded twice into dK": Fault("fused", "scale * dK_pair[0]", "scale * scale * dK_pair[0]", "dK"),
    "scale folded twice into dQ": Fault("convert", "scale * sums[2 * h]", "scale * scale * sums[2 * h]", "dQ"),
    "delta over half a row": Fault("delta", "for (int x = row_lanes / 2;", "for (int x = row_lanes / 4;", "dQ dK"),
    "delta left out": Fault("delta", "dlse[place] - sum : -sum;", "0 : 0;", "dQ dK"),
    "diagonal at the top left": Fault("forward", "const int last = i + Nk - Nq;", "const int last = i;", "O m l"),
    "diagonal at the top left, fused": Fault("fused", "k > q + diagonal", "k > q", "dQ dK dV"),
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
    "one tile masked too few": Fault("forward", "j >= whole", "j > whole", "O l", tile=ASCENDING),
    "tiles of one head twice, dq": Fault("dq", "block % matrices", "block % Tr", "dQ", tile=DQ_ALL_HEADS),
    "heads in the wrong order": Fault("dkdv", "block % matrices", "block / matrices", "dK dV", tile=DKDV_ALL_HEADS),
}  # fmt: skip


@cache
def source_of(kernel: KernelName, causal: bool = True, tile: Tile | None = None) -> Source:
    problem = replace(PROBLEM, causal=causal)
    return render(KernelSpec.of(kernel, problem, tile or TILES[kernel], 80))


def verdict_with(kernel: KernelName, text: str, causal: bool = True) -> Verdict:
    """The check of the pass that `kernel` belongs to, with its text replaced."""
    kernels = FORWARD if kernel == "forward" else SPLIT if kernel in ("dkdv", "dq") else FUSED
    sources = {name: source_of(name, causal) for name in kernels}
    sources[kernel] = Source(sources[kernel].spec, text)
    binaries = {name: compile_source(source) for name, source in sources.items()}
    which: Pass = "forward" if kernel == "forward" else "backward"
    return check(replace(PROBLEM, causal=causal), which, binaries, EmulatedEngine(check_races=True))


SOUND: dict[str, tuple[KernelName, Tile]] = {
    **{kernel: (kernel, TILES[kernel]) for kernel in ("forward", "fused", "dkdv")},
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
    """Every barrier of every kernel with matrix products."""
    kernels: tuple[KernelName, ...] = ("forward", "fused", "dkdv", "dq")
    texts = [*((kernel, TILES[kernel]) for kernel in kernels), ("forward", ASCENDING)]
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

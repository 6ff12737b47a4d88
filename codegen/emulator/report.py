"""Hold the result of a launch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to the same shared bytes, by different warps or by what they set going, in no order."""

    kind: str
    """"RAW" (read after write), "WAR", "WAW", "PROXY": TMA or wgmma reads what no fence.proxy.async has covered, or
    "EXIT": the block may exit before what another block of its cluster does in its shared memory."""
    address: int
    """Shared address within the block."""
    block: tuple[int, int, int]
    first: str
    """The earlier instruction with its PTX line; `second` the later one."""
    second: str
    warps: tuple[int, int]
    """Warps of the earlier (-1: a bulk load) and of the later access, counted through all blocks of a cluster."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a launch did.

    Instructions are counted once for each warp that executes them, whatever their guard. Bytes are counted for each
    lane that really loads or stores. Shared-memory wavefronts are those of the first thread block only.
    """

    instructions: dict[str, int]
    global_read_bytes: int
    """Bytes that `ld` requested, and that cp.async and bulk loads read; atomics are not included."""
    global_written_bytes: int
    """Bytes that `st` and bulk stores wrote, and what `red`, `atom` and bulk reductions changed (`atomic_bytes`)."""
    atomic_bytes: int
    async_copied_bytes: int
    """Bytes that cp.async and bulk loads brought to shared memory, filled zeros included."""
    shared_wavefronts: int
    """Of the first thread block: ld, st, ldmatrix, stmatrix and the writes of cp.async; not TMA, not wgmma."""
    shared_wavefronts_ideal: int
    """The same without bank conflicts."""
    tensor_flops: int
    barriers: int
    """Barriers that thread blocks passed."""
    unfinished_barriers: int
    """Barriers of blocks where `bar.arrive` had the last word: threads arrived, and nobody came to wait for them."""
    register_shares: dict[int, int]
    """What each warpgroup of a block last asked for with setmaxnreg, registers a thread."""
    races: tuple[Race, ...]
    """The first few dozen; `race_count` counts all, granule by granule."""
    race_count: int
    seconds: float
    _written: tuple[tuple[int, int, int], ...] = field(repr=False, default=())

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts of the first thread block that only bank conflicts cause."""
        return self.shared_wavefronts - self.shared_wavefronts_ideal

    def written_bytes_of(self, address: int) -> int:
        """Bytes written by st, red and atom to the allocation that contains the address."""
        for start, end, written in self._written:
            if start <= address < max(end, start + 1):
                return written
        raise ValueError(f"{address:#x} lies in no allocation of the launch")

"""Hold what may be tuned: one frozen tile per kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, TypeVar

from ..errors import IllegalTile

# In which order the blocks of a masked kernel start; those with the longest loops come first, of a head, of a group of
# heads, or of all. The more heads are in work at once, the shorter the last blocks of the launch and the fuller the L2.
Order = Literal[0, 1, 2]
HEAD_BY_HEAD: Final = 0  # the blocks of a head are neighbours, and share what they read in the L2 cache
GROUPED: Final = 1  # tile by tile through as many heads as share half of the L2 cache, then the next of them
ALL_HEADS: Final = 2  # tile by tile through all heads, whatever fits

# In a key only where they are not the default: keys that are older than these fields stay as they are.
_SELDOM: Final = frozenset({"order", "ascending", "packed", "p_smem", "cluster", "bulk_sums"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTile:
    """Tile of `forward` and `partial`: one block owns Br query rows and walks the keys in tiles of Bc."""

    Br: int  # query rows of a block
    Bc: int  # keys of a K/V tile
    warps: int  # warps of a block; each owns Br / warps rows
    q_steps: int = (
        0  # 16-column steps of Q whose fragments stay in registers (0: Q is read from shared memory each tile)
    )
    lazy: bool = False  # rescale O only when a row's max grew by more than 2^8 (behind a warp vote)
    min_blocks: int = 1  # blocks per SM that the register allocation must allow
    order: Order = GROUPED
    ascending: bool = False  # K/V tiles first to last, each copied with a look at its end (False: last to first)
    packed: bool = False  # the rows of a block are of all query heads of a key/value head, whose K and V are read once

    short: ClassVar[dict[str, str]] = {
        "Br": "Br", "Bc": "Bc", "warps": "w", "q_steps": "q", "lazy": "lazy", "min_blocks": "b", "order": "o",
        "ascending": "up", "packed": "pack",
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlockTile:
    """Tile of `fused`, `dkdv` and `convert`: one block owns Bc keys and walks the query rows in tiles of Br."""

    Br: int  # query rows of a Q/dO tile
    Bc: int  # keys of a block
    warps: int
    row_split: int = 1  # warps that share the same key rows; they split Br in S and dP, and d in dK and dV
    slice: int = 0  # query columns of S^T that a warp treats at once when row_split is 1 (0: all Br)
    stages: int = 2  # buffers of Q and dO
    v_regs: bool = False  # V fragments stay in registers, V passes through the Q/dO buffers
    weave: bool = True  # exponentials between the matrix products of dP (False: before them)
    min_blocks: int = 1
    order: Order = HEAD_BY_HEAD

    short: ClassVar[dict[str, str]] = {
        "Br": "Br", "Bc": "Bc", "warps": "w", "row_split": "rs", "slice": "sl", "stages": "s", "v_regs": "vreg",
        "weave": "weave", "min_blocks": "b", "order": "o",
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryBlockTile:
    """Tile of `dq`: one block owns Br query rows and walks the keys in tiles of Bc."""

    Br: int
    Bc: int
    warps: int
    slice: int = 0  # key columns of S that a warp treats at once (0: all Bc)
    stages: int = 2  # buffers of K and V
    q_regs: bool = False  # Q fragments stay in registers
    weave: bool = True
    min_blocks: int = 1
    order: Order = HEAD_BY_HEAD

    short: ClassVar[dict[str, str]] = {
        "Br": "Br", "Bc": "Bc", "warps": "w", "slice": "sl", "stages": "s", "q_regs": "qreg", "weave": "weave",
        "min_blocks": "b", "order": "o",
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTile:
    """Tile of `delta` and `combine`: warps of a block, which share its rows."""

    warps: int = 8

    short: ClassVar[dict[str, str]] = {"warps": "w"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpgroupTile:
    """Tile of `forward90`: one block owns Br query rows, 64 for each warpgroup that computes, and walks the keys.

    One warpgroup more copies tiles of Bc keys to shared memory.
    """

    Br: int  # query rows of a block
    Bc: int  # keys of a K/V tile
    stages: int = 2  # buffers of K, and of V
    pingpong: bool = False  # warpgroups take turns: the products of one run under the softmax of another
    overlap: bool = True  # O += P V of a tile runs under the softmax of the next
    early_k_wait: bool = True  # the wait for the next K stands before that for O += P V: see the text
    order: Order = GROUPED
    p_smem: bool = False  # P passes through shared memory, where O, S and P do not fit the registers together
    cluster: int = 1  # blocks that load K and V for each other: 1 or 2

    short: ClassVar[dict[str, str]] = {
        "Br": "Br", "Bc": "Bc", "stages": "s", "pingpong": "pp", "overlap": "ov", "early_k_wait": "ek", "order": "o",
        "p_smem": "ps", "cluster": "cl",
    }  # fmt: skip

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, each of them 64 rows: the height of a wgmma."""
        return self.Br // 64

    @property
    def warps(self) -> int:
        """Warps of a block, those of the producer included."""
        return 4 * (self.consumers + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpgroupKeyTile:
    """Tile of `fused90`, `dkdv90` and `convert90`: one block owns Bc keys, 64 for each of two warpgroups that compute.

    One warpgroup more copies tiles of Br query rows of Q and dO to shared memory.
    """

    Br: int  # query rows of a Q/dO tile
    Bc: int = 128  # keys of a block
    stages: int = 2  # buffers of Q, and of dO
    dS_stages: int = 2  # buffers of dS; with one both warpgroups meet once more a tile
    bulk_sums: bool = True  # dQ is added up by bulk copies of shared memory (False: from registers)
    order: Order = GROUPED

    short: ClassVar[dict[str, str]] = {
        "Br": "Br", "Bc": "Bc", "stages": "s", "dS_stages": "ds", "bulk_sums": "bulk", "order": "o",
    }  # fmt: skip

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, each of them 64 keys: the height of a wgmma."""
        return self.Bc // 64

    @property
    def warps(self) -> int:
        """Warps of a block, those of the producer included."""
        return 4 * (self.consumers + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpgroupQueryTile:
    """Tile of `dq90`: one block owns Br query rows, 64 for each warpgroup that computes, and walks the keys.

    One warpgroup more copies tiles of Bc keys to shared memory.
    """

    Br: int  # query rows of a block
    Bc: int  # keys of a K/V tile
    stages: int = 2  # buffers of K
    v_stages: int = 2  # and of V, which is needed for a shorter time
    overlap: bool = True  # dQ += dS K of a tile runs under the softmax of the next
    order: Order = GROUPED

    short: ClassVar[dict[str, str]] = {
        "Br": "Br", "Bc": "Bc", "stages": "s", "v_stages": "vs", "overlap": "ov", "order": "o",
    }  # fmt: skip

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, each of them 64 rows: the height of a wgmma."""
        return self.Br // 64

    @property
    def warps(self) -> int:
        """Warps of a block, those of the producer included."""
        return 4 * (self.consumers + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpgroupWideTile:
    """Tile of `dkdv90_wide`: one block owns Bc keys, whose dK and dV warpgroups that compute share by columns.

    One warpgroup more copies tiles of 64 query rows of Q and dO to shared memory.
    """

    Bc: int  # keys of a block
    consumers: int = 2  # warpgroups that compute, each of them 64 columns or twice so many
    stages: int = 2  # buffers of Q
    dO_stages: int = 2  # and of dO
    overlap: bool = True  # dV += P^T dO and dK += dS^T Q of a tile run under the softmax of the next
    order: Order = GROUPED

    short: ClassVar[dict[str, str]] = {
        "Bc": "Bc", "consumers": "c", "stages": "s", "dO_stages": "gs", "overlap": "ov", "order": "o",
    }  # fmt: skip

    @property
    def Br(self) -> int:
        """Query rows of a Q/dO tile: the height of a wgmma."""
        return 64

    @property
    def warps(self) -> int:
        """Warps of a block, those of the producer included."""
        return 4 * (self.consumers + 1)


Tile = (
    ForwardTile
    | KeyBlockTile
    | QueryBlockTile
    | RowTile
    | WarpgroupTile
    | WarpgroupKeyTile
    | WarpgroupWideTile
    | WarpgroupQueryTile
)
AnyTile = TypeVar("AnyTile", bound=Tile)


def tile_key(tile: Tile) -> str:
    """The tile in a file name, its fields in order: `Br128_Bc64_w4_q0_lazy0_b2`.

    >>> tile_key(ForwardTile(Br=64, Bc=48, warps=4, ascending=True))
    'Br64_Bc48_w4_q0_lazy0_b1_up1'
    """
    said = (f for f in fields(tile) if f.name not in _SELDOM or getattr(tile, f.name) != f.default)
    return "_".join(f"{tile.short[f.name]}{int(getattr(tile, f.name))}" for f in said)


def tile_text(tile: Tile) -> str:
    """The tile as the command line takes it: `Br=128,Bc=64,warps=4,...`.

    >>> tile_text(RowTile(warps=8))
    'warps=8'
    """
    return ",".join(f"{f.name}={int(getattr(tile, f.name))}" for f in fields(tile))


def parse_tile(text: str, default: AnyTile) -> AnyTile:
    """`default` with the fields that `text` names replaced: `Br=128,Bc=64`.

    Raises IllegalTile for an unknown field or a value that is no whole number.

    >>> parse_tile("warps=4", RowTile())
    RowTile(warps=4)
    """
    kinds = {f.name: type(getattr(default, f.name)) for f in fields(default)}
    changes: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = item.partition("=")
        if name not in kinds:
            raise IllegalTile(f"--tile {item}: {type(default).__name__} has no {name!r}; it has {', '.join(kinds)}.")
        number = {"true": "1", "false": "0"}.get(value.lower(), value)
        if not number.isdigit():
            raise IllegalTile(f"--tile {item}: {value!r} is not a whole number.")
        if kinds[name] is bool and number not in ("0", "1"):
            raise IllegalTile(f"--tile {item}: {name} is 0 or 1.")
        changes[name] = kinds[name](int(number))
    return replace(default, **changes)

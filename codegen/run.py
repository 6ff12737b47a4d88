"""Run one pass: Binaries and tensors in, tensors out. Grids, arguments and temporaries are decided here."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .compile import Binary
from .engines.engine import Engine, Tensor, Value
from .engines.tensor_map import boxes_of, why_no_boxes
from .errors import LaunchError
from .philox import KEEP_ALL
from .score_mod import pack_table, table_name
from .spec import limits
from .spec.backward_shape import padded_columns
from .spec.kernel import (
    CONVERTS,
    FUSED,
    FUSED90,
    PAD_ROWS,
    PERSISTENT,
    SPLIT,
    SPLIT90,
    SPLIT90_WIDE,
    STATS,
    TENSOR_MAP,
    KernelName,
    KernelSpec,
)
from .spec.tile import (
    ForwardTile,
    KeyBlockTile,
    QueryBlockTile,
    WarpgroupKeyTile,
    WarpgroupQueryTile,
    WarpgroupTile,
    WarpgroupWideTile,
)
from .spec.warpgroup_shape import ROWS

LOG2_E = math.log2(math.e)
NAMED = ("cu_q", "cu_k", "k_lens", "sinks", "rng")  # tensors of features, as Extras and the kernels call them
MAX_GRID = 2**31 - 1  # blocks in x
MAX_ROWS = 2**31 - 256  # that a 32-bit number counts, up to the end of the last tile
MAKES: dict[KernelName, tuple[str, ...]] = {
    "forward": (), "partial": (), "combine": (), "delta": (),
    "fused": ("dK", "dV"), "convert": ("dQ",), "dkdv": ("dK", "dV"), "dq": ("dQ",),
    "forward90": (), "fused90": ("dK", "dV"), "convert90": ("dQ",), "dkdv90": ("dK", "dV"),
    "dkdv90_wide": ("dK", "dV"), "dq90": ("dQ",),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What features add to the inputs of a pass; each is read by kernels that have the feature."""

    left: int = 0  # keys that a query sees before its own
    right: int = 0  # and behind its own
    cu_q: Tensor | None = None  # [B + 1], int32: where the rows of each sequence begin; the last is how many there are
    cu_k: Tensor | None = None
    max_q: int = 0  # rows of the longest sequence
    max_k: int = 0
    k_lens: Tensor | None = None  # [B], int32: keys of each sequence
    sinks: Tensor | None = None  # [Hq], float32
    rng: Tensor | None = None  # [2], int64: seed and offset
    keep_below: int = KEEP_ALL  # of 2^16 random numbers, those that keep a weight
    tables: Mapping[str, Tensor] = field(default_factory=dict)  # of score_mod, by name
    grads: Mapping[str, Tensor] = field(default_factory=dict)  # float32, to which gradients of tables are added

    @property
    def keep(self) -> float:
        """The share of the weights that dropout keeps."""
        return self.keep_below / KEEP_ALL


NOTHING = Extras()


def keep_below(dropout: float) -> int:
    """Of 2^16 random numbers, those that keep a weight where a share `dropout` is to be dropped; at least 1.

    >>> keep_below(0.5)
    32768
    """
    return max(1, round((1 - dropout) * KEEP_ALL))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths and counts of one call. Of packed sequences Nq and Nk are those of the longest."""

    B: int
    Hq: int
    Hk: int
    Nq: int
    Nk: int
    parts: int = 1  # into which a forward by parts cuts the keys
    all_q: int | None = None  # query rows of all sequences, if they are packed
    left: int = 0  # keys of the window before a query's own, if it has one
    right: int = 0  # and behind it

    @classmethod
    def of(cls, q: Tensor, k: Tensor, parts: int = 1, extras: Extras = NOTHING) -> Sizes:
        """From q [B, Hq, Nq, d] and k [B, Hk, Nk, d]; packed, from [1, Hq, all_q, d] and the numbers in `extras`."""
        if extras.cu_q is None:
            return cls(B=q.shape[0], Hq=q.shape[1], Hk=k.shape[1], Nq=q.shape[2], Nk=k.shape[2], parts=parts)
        return cls(
            B=extras.cu_q.shape[0] - 1, Hq=q.shape[1], Hk=k.shape[1], Nq=min(extras.max_q, q.shape[2]),
            Nk=min(extras.max_k, k.shape[2]), all_q=q.shape[2],
        )  # fmt: skip

    @property
    def head_rows(self) -> int:
        """Rows of statistics that `delta` writes for a head: whole tiles of each sequence, see `padded` in the text."""
        if self.all_q is None:
            return _ceil(self.Nq, PAD_ROWS) * PAD_ROWS
        return (self.all_q // PAD_ROWS + self.B) * PAD_ROWS

    @property
    def stats_rows(self) -> int:
        """Rows for which `delta` writes statistics."""
        return self.matrices * self.head_rows

    @property
    def matrices(self) -> int:
        """Heads of all batches; of packed sequences, which share their matrix, heads."""
        return self.Hq if self.all_q is not None else self.B * self.Hq

    @property
    def nothing(self) -> bool:
        """Whether there is no row or no key at all."""
        return 0 in (self.B, self.Hq, self.Nq, self.Nk)

    @property
    def rows(self) -> tuple[int, int, int]:
        """Shape of m and l."""
        return (1, self.Hq, self.all_q) if self.all_q is not None else (self.B, self.Hq, self.Nq)


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward leaves: O [B, Hq, Nq, dv]; m and l [B, Hq, Nq], float32."""

    O: Tensor
    m: Tensor
    l: Tensor


@dataclass(frozen=True, slots=True)
class Gradients:
    """dQ [B, Hq, Nq, d]; dK [B, Hk, Nk, d], dV [B, Hk, Nk, dv]; None for those whose kernel was not asked for.

    dsinks [B, Hq, Nq], float32: what each row adds to the gradient of its head's sink, if there are sinks.
    """

    dQ: Tensor | None
    dK: Tensor | None
    dV: Tensor | None
    dsinks: Tensor | None = None


def run_forward(
    engine: Engine,
    binaries: Mapping[KernelName, Binary],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    parts: int = 1,
    bnhd: bool = False,
    extras: Extras = NOTHING,
) -> Forward:
    """One forward pass: forward, or partial for each of `parts` parts of the keys and combine, as `binaries` has them.

    q [B, Hq, Nq, d], k [B, Hk, Nk, d], v [B, Hk, Nk, dv]; of packed sequences B = 1 and the rows are those of all.
    `bnhd`: O lies in memory as [B, Nq, Hq, dv]. Raises LaunchError.
    """
    sizes = Sizes.of(q, k, parts, extras)
    rows = sizes.rows
    of_O = (*q.shape[:3], v.shape[3])
    if _nothing(sizes, extras):  # a row without keys: O = 0, m = -inf, l = 0
        m = engine.tensor(np.full(rows, -np.inf, np.float32))
        return Forward(_ordered(engine.zeros, of_O, q.dtype, bnhd), m, engine.zeros(rows, np.float32))
    O = _ordered(engine.empty, of_O, q.dtype, bnhd)
    out = Forward(O, engine.empty(rows, np.float32), engine.empty(rows, np.float32))
    tensors = {"Q": q, "K": k, "V": v, "O": out.O, "m": out.m, "l": out.l, **tensors_of(extras)}
    if "partial" in binaries:
        tensors |= {name: engine.empty((*rows, parts), np.float32) for name in ("m_part", "l_part")}
        tensors["O_part"] = engine.empty((*rows, parts, q.shape[3]), np.float32)
    for binary in binaries.values():
        _launch(engine, binary, tensors, sizes, scale, extras)
    return out


def run_backward(
    engine: Engine,
    binaries: Mapping[KernelName, Binary],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Forward,
    dO: Tensor,
    scale: float,
    dlse: Tensor | None = None,
    *,
    bnhd: bool = False,
    extras: Extras = NOTHING,
) -> Gradients:
    """One backward pass: delta, then fused and convert, dkdv and dq, or only one of these, as `binaries` has them.

    Those of warpgroups stand in their places, as fused90 in that of fused.
    dlse [B, Hq, Nq], float32: the gradient of lse = m + ln l, if there is one. `bnhd`: the gradients lie in memory as
    [B, N, H, d]. Gradients of score_mod's tables are added to `extras.grads`. Raises LaunchError.
    """
    sizes = Sizes.of(q, k, extras=extras)
    nothing = _nothing(sizes, extras)  # to launch: all gradients are 0
    beyond = extras.k_lens is not None  # keys past the end of their sequence are nobody's: dK and dV are 0 there
    made = {gradient for kernel in binaries for gradient in MAKES[kernel]}
    outputs = {
        name: _ordered(engine.zeros if nothing or (beyond and name != "dQ") else engine.empty, x.shape, x.dtype, bnhd)
        for name, x in (("dQ", q), ("dK", k), ("dV", v))
        if name in made
    }
    dsinks = None
    if extras.sinks is not None:
        dsinks = outputs["dsinks"] = (engine.zeros if nothing else engine.empty)(sizes.rows, np.float32)
    out = Gradients(outputs.get("dQ"), outputs.get("dK"), outputs.get("dV"), dsinks)
    if nothing:
        return out
    stats = engine.empty((sizes.stats_rows, STATS), np.float32)
    tensors = {
        "Q": q, "K": k, "V": v, "O": forward.O, "m": forward.m, "l": forward.l, "dO": dO, "stats": stats, **outputs,
        **tensors_of(extras),
    }  # fmt: skip
    if dlse is not None:
        tensors["dlse"] = dlse
    for fused in set(CONVERTS.values()) & set(binaries):
        tensors["dQ_acc"] = engine.zeros((dq_accumulator_floats(binaries[fused].spec, sizes),), np.float32)
    for kernel in dict.fromkeys((*FUSED, *FUSED90, *SPLIT, *SPLIT90, *SPLIT90_WIDE)):
        if kernel in binaries:
            _launch(engine, binaries[kernel], tensors, sizes, scale, extras)
    return out


def _nothing(sizes: Sizes, extras: Extras) -> bool:
    """Whether there is no row, or no key and no sink either that a row would see."""
    return sizes.nothing and not (extras.sinks is not None and 0 not in sizes.rows)


def tensors_of(extras: Extras) -> dict[str, Tensor]:
    """The tensors of the features by the names of the kernels' parameters."""
    named = {name: getattr(extras, name) for name in NAMED}
    tables = {table_name(name): table for name, table in extras.tables.items()}
    grads = {f"grad_{name}": grad for name, grad in extras.grads.items()}
    return {**{name: x for name, x in named.items() if x is not None}, **tables, **grads}


def grid(spec: KernelSpec, sizes: Sizes) -> int:
    """Blocks of one launch, flat in x, or tiles that its blocks share. Raises LaunchError past the hardware's limit."""
    tile = spec.tile
    if isinstance(tile, ForwardTile):
        rows = sizes.Nq * (sizes.Hq // max(1, sizes.Hk))
        if tile.packed and rows > MAX_ROWS:
            raise LaunchError(f"{spec.key}: {rows} rows of a group, and packed=1 counts to {MAX_ROWS}. Use packed=0.")
        blocks = row_tiles(tile, sizes) * sizes.B * (sizes.Hk if tile.packed else sizes.Hq)
        blocks *= sizes.parts if spec.kernel == "partial" else 1
    elif isinstance(tile, WarpgroupTile):
        blocks = tiles_in_clusters(tile, sizes) * sizes.B * sizes.Hq
    elif isinstance(tile, QueryBlockTile | WarpgroupQueryTile) or spec.kernel in CONVERTS:
        blocks = _ceil(sizes.Nq, tile.Br) * sizes.B * sizes.Hq  # type: ignore[union-attr]
    elif spec.kernel == "combine":
        blocks = sizes.B * sizes.Hq * sizes.Nq
    elif isinstance(tile, KeyBlockTile | WarpgroupKeyTile | WarpgroupWideTile):
        blocks = _ceil(sizes.Nk, tile.Bc) * sizes.B * sizes.Hk
    else:  # delta
        blocks = _ceil(sizes.Nq, PAD_ROWS) * sizes.B * sizes.Hq
    if blocks > MAX_GRID:
        raise LaunchError(f"{spec.key}: {blocks} blocks, and a grid has at most {MAX_GRID} in x. Split the batch.")
    return blocks


def blocks_of(spec: KernelSpec, sizes: Sizes, sms: int) -> int:
    """Blocks that are launched: of kernels whose blocks share out what there is to do, one for each multiprocessor."""
    tiles, cluster = grid(spec, sizes), getattr(spec.tile, "cluster", 1)
    return min(tiles, max(1, sms // cluster) * cluster) if spec.kernel in PERSISTENT else tiles


def row_tiles(tile: ForwardTile, sizes: Sizes) -> int:
    """Tiles of Br rows: of the query rows of a head, or of all heads of a group."""
    return _ceil(sizes.Nq * (sizes.Hq // sizes.Hk if tile.packed else 1), tile.Br)


def tiles_in_clusters(tile: WarpgroupTile, sizes: Sizes) -> int:
    """Tiles of Br query rows of a head, as many for each block of a cluster: the last may lie past the end."""
    return _ceil(sizes.Nq, tile.Br * tile.cluster) * tile.cluster


def dq_accumulator_floats(spec: KernelSpec, sizes: Sizes) -> int:
    """Elements of fused's dQ accumulator: whole tiles of Br rows, as many columns as rows have in shared memory."""
    Br = spec.tile.Br  # type: ignore[union-attr]
    tiles = _ceil(sizes.Nq, Br) if sizes.all_q is None else sizes.all_q // Br + sizes.B
    return sizes.matrices * tiles * Br * padded_columns(spec)


def _ordered(
    allocate: Callable[[tuple[int, ...], DTypeLike], Tensor], shape: tuple[int, ...], dtype: DTypeLike, bnhd: bool
) -> Tensor:
    """A tensor [B, H, N, d], its memory in that order or as [B, N, H, d]."""
    if not bnhd:
        return allocate(shape, dtype)
    B, H, N, d = shape
    out = allocate((B, N, H, d), dtype)
    return replace(out, shape=shape, strides=tuple(out.strides[axis] for axis in (0, 2, 1, 3)))


def _launch(
    engine: Engine, binary: Binary, tensors: Mapping[str, Tensor], sizes: Sizes, scale: float, extras: Extras
) -> None:
    spec = binary.spec
    aligned = {name: _reachable(engine, spec, name, tensor) for name, tensor in tensors.items()}
    blocks = blocks_of(spec, sizes, engine.sms)
    if blocks:  # none: no sequence has a key, and the kernel owns keys
        args = pack(spec, aligned, sizes, scale, extras, engine=engine)
        engine.launch(engine.load(binary), grid=blocks, block=spec.threads, smem=binary.smem_bytes, args=args)


def _reachable(engine: Engine, spec: KernelSpec, name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of an input whose rows do not start on 16 bytes, or that TMA cannot take.

    A row of zeros for an input without rows of which a kernel has a tensor map: all that is read past its end is 0.
    """
    inputs = {arg.name for arg in spec.signature if arg.type == "View<const T>"}
    described = {arg.tensor for arg in spec.signature if arg.type == TENSOR_MAP} - {*MAKES[spec.kernel]}
    if name in described and 0 in tensor.shape:  # a tensor map has at least one row; sinks are seen without any key
        return engine.zeros((1, 1, 1, tensor.shape[3]), tensor.dtype)
    bad = (name in inputs and not tensor.aligned) or (name in described and why_no_boxes(tensor) is not None)
    return engine.contiguous(tensor) if bad else tensor


def pack(
    spec: KernelSpec, tensors: Mapping[str, Tensor], sizes: Sizes, scale: float, extras: Extras = NOTHING,
    *, engine: Engine | None = None,
) -> tuple[Value, ...]:  # fmt: skip
    """The arguments of one launch, in the order and with the types of the kernel's signature.

    Of kernels with tensor maps, `engine` encodes them.
    """
    # The backward's kernels leave 1 / keep out of dP and P, and so out of what they sum: it comes with the scale.
    of_gradients = scale / extras.keep if spec.kernel in CONVERTS else scale
    numbers: dict[str, Any] = {
        "Hq": sizes.Hq, "Hk": sizes.Hk, "Nq": sizes.Nq, "Nk": sizes.Nk, "rows": sizes.stats_rows,
        "max_Nq": sizes.Nq, "max_Nk": sizes.Nk, "all_q": sizes.all_q, "B": sizes.B, "parts": sizes.parts,
        "tiles": grid(spec, sizes) if spec.kernel in PERSISTENT else 0,
        "scale": of_gradients, "scale_log2": scale * LOG2_E, "score_scale": of_gradients,
        "score_scale_log2": scale * LOG2_E,
        "left": extras.left, "right": extras.right, "keep_below": extras.keep_below, "keep": extras.keep,
    }  # fmt: skip
    values: list[Value] = []
    for arg in spec.signature:
        if arg.type in ("View<const T>", "View<T>"):
            tensor = tensors[arg.name]
            batch, head, row = tensor.strides[:3]
            values.append(struct.pack("<Qqqq", tensor.address, 0 if spec.features.packed else batch, head, row))
        elif arg.type == "Walk":
            row_bytes = tensors[arg.tensor].strides[2] * tensors[arg.tensor].dtype.itemsize
            values.append(struct.pack("<qq", limits.copy_rows(spec) * row_bytes, _walked_rows(spec) * row_bytes))
        elif arg.type == TENSOR_MAP:
            assert engine is not None  # who launches such a kernel has one
            boxes = boxes_of(tensors[arg.tensor], spec.dtype, _box_rows(spec, arg.tensor))
            values.append(engine.tensor_map(boxes))
        elif arg.type.startswith("score_mod::Table"):
            table = tensors[arg.name]
            values.append(pack_table(table.address, table.shape, table.strides))
        elif arg.type.endswith("*"):
            values.append(tensors[arg.name].address if arg.name in tensors else 0)
        else:
            values.append(float(numbers[arg.name]) if arg.type == "float" else int(numbers[arg.name]))
    return tuple(values)


def _box_rows(spec: KernelSpec, tensor: str) -> int:
    """Rows of a box: of Q and dO a tile or all of a block, and so of K and V, of outputs those of a warpgroup.

    Of a tile of K or V each block of a cluster loads its share.
    """
    tile = spec.tile
    rows = {"Q": tile.Br, "dO": tile.Br, "dQ": ROWS}  # type: ignore[union-attr]
    if not isinstance(tile, WarpgroupWideTile):  # whose warpgroups share columns, not keys
        rows |= {"dK": ROWS, "dV": ROWS}
    return rows.get(tensor, tile.Bc // getattr(tile, "cluster", 1))  # type: ignore[union-attr]


def _walked_rows(spec: KernelSpec) -> int:
    """Rows of the tiles that a block walks over: keys in forward and dq, query rows in fused and dkdv."""
    tile = spec.tile
    return tile.Br if isinstance(tile, KeyBlockTile) else tile.Bc  # type: ignore[union-attr]


def _ceil(n: int, step: int) -> int:
    return -(-n // step)

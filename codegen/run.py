"""Run one pass: Binaries and tensors in, tensors out. Grids, arguments and temporaries are decided here."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .compile import Binary
from .engines.engine import Engine, Tensor, Value
from .errors import LaunchError
from .spec import limits
from .spec.backward_shape import padded_columns
from .spec.kernel import FUSED, PAD_ROWS, SPLIT, STATS, KernelName, KernelSpec
from .spec.tile import ForwardTile, KeyBlockTile, QueryBlockTile

LOG2_E = math.log2(math.e)
MAX_GRID = 2**31 - 1  # blocks in x
MAX_ROWS = 2**31 - 256  # that a 32-bit number counts, up to the end of the last tile
MAKES: dict[KernelName, tuple[str, ...]] = {
    "forward": (), "partial": (), "combine": (), "delta": (),
    "fused": ("dK", "dV"), "convert": ("dQ",), "dkdv": ("dK", "dV"), "dq": ("dQ",),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths and counts of one call."""

    B: int
    Hq: int
    Hk: int
    Nq: int
    Nk: int
    parts: int = 1  # into which a forward by parts cuts the keys

    @classmethod
    def of(cls, q: Tensor, k: Tensor, parts: int = 1) -> Sizes:
        """From q [B, Hq, Nq, d] and k [B, Hk, Nk, d]."""
        return cls(B=q.shape[0], Hq=q.shape[1], Hk=k.shape[1], Nq=q.shape[2], Nk=k.shape[2], parts=parts)

    @property
    def stats_rows(self) -> int:
        """Rows for which `delta` writes statistics."""
        return self.B * self.Hq * _ceil(self.Nq, PAD_ROWS) * PAD_ROWS


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward leaves: O [B, Hq, Nq, d]; m and l [B, Hq, Nq], float32."""

    O: Tensor
    m: Tensor
    l: Tensor


@dataclass(frozen=True, slots=True)
class Gradients:
    """dQ [B, Hq, Nq, d]; dK and dV [B, Hk, Nk, d]; None for those whose kernel was not asked for."""

    dQ: Tensor | None
    dK: Tensor | None
    dV: Tensor | None


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
) -> Forward:
    """One forward pass: forward, or partial for each of `parts` parts of the keys and combine, as `binaries` has them.

    `bnhd`: O lies in memory as [B, Nq, Hq, d]. Raises LaunchError.
    """
    sizes = Sizes.of(q, k, parts)
    rows = (sizes.B, sizes.Hq, sizes.Nq)
    if 0 in rows or sizes.Nk == 0:  # a row without keys: O = 0, m = -inf, l = 0
        m = engine.tensor(np.full(rows, -np.inf, np.float32))
        return Forward(_like(engine.zeros, q, bnhd), m, engine.zeros(rows, np.float32))
    out = Forward(_like(engine.empty, q, bnhd), engine.empty(rows, np.float32), engine.empty(rows, np.float32))
    tensors = {"Q": q, "K": k, "V": v, "O": out.O, "m": out.m, "l": out.l}
    if "partial" in binaries:
        tensors |= {name: engine.empty((*rows, parts), np.float32) for name in ("m_part", "l_part")}
        tensors["O_part"] = engine.empty((*rows, parts, q.shape[3]), np.float32)
    for binary in binaries.values():
        _launch(engine, binary, tensors, sizes, scale)
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
) -> Gradients:
    """One backward pass: delta, then fused and convert, dkdv and dq, or only one of these, as `binaries` has them.

    dlse [B, Hq, Nq], float32: the gradient of lse = m + ln l, if there is one. `bnhd`: the gradients lie in memory as
    [B, N, H, d]. Raises LaunchError.
    """
    sizes = Sizes.of(q, k)
    nothing = 0 in (sizes.B, sizes.Hq, sizes.Nq, sizes.Nk)  # to launch: all gradients are 0
    allocate = engine.zeros if nothing else engine.empty
    made = {gradient for kernel in binaries for gradient in MAKES[kernel]}
    outputs = {name: _like(allocate, x, bnhd) for name, x in (("dQ", q), ("dK", k), ("dV", v)) if name in made}
    out = Gradients(outputs.get("dQ"), outputs.get("dK"), outputs.get("dV"))
    if nothing:
        return out
    stats = engine.empty((sizes.stats_rows, STATS), np.float32)
    tensors = {
        "Q": q, "K": k, "V": v, "O": forward.O, "m": forward.m, "l": forward.l, "dO": dO, "stats": stats, **outputs,
    }  # fmt: skip
    if dlse is not None:
        tensors["dlse"] = dlse
    if "fused" in binaries:
        tensors["dQ_acc"] = engine.zeros((dq_accumulator_floats(binaries["fused"].spec, sizes),), np.float32)
    for kernel in (*FUSED, *SPLIT[1:]):
        if kernel in binaries:
            _launch(engine, binaries[kernel], tensors, sizes, scale)
    return out


def grid(spec: KernelSpec, sizes: Sizes) -> int:
    """Blocks of one launch, flat in x. Raises LaunchError past the hardware's limit."""
    tile = spec.tile
    if isinstance(tile, ForwardTile):
        rows = sizes.Nq * (sizes.Hq // max(1, sizes.Hk))
        if tile.packed and rows > MAX_ROWS:
            raise LaunchError(f"{spec.key}: {rows} rows of a group, and packed=1 counts to {MAX_ROWS}. Use packed=0.")
        blocks = row_tiles(tile, sizes) * sizes.B * (sizes.Hk if tile.packed else sizes.Hq)
        blocks *= sizes.parts if spec.kernel == "partial" else 1
    elif isinstance(tile, QueryBlockTile) or spec.kernel == "convert":
        blocks = _ceil(sizes.Nq, tile.Br) * sizes.B * sizes.Hq  # type: ignore[union-attr]
    elif spec.kernel == "combine":
        blocks = sizes.B * sizes.Hq * sizes.Nq
    elif isinstance(tile, KeyBlockTile):
        blocks = _ceil(sizes.Nk, tile.Bc) * sizes.B * sizes.Hk
    else:  # delta
        blocks = sizes.stats_rows // PAD_ROWS
    if blocks > MAX_GRID:
        raise LaunchError(f"{spec.key}: {blocks} blocks, and a grid has at most {MAX_GRID} in x. Split the batch.")
    return blocks


def row_tiles(tile: ForwardTile, sizes: Sizes) -> int:
    """Tiles of Br rows: of the query rows of a head, or of all heads of a group."""
    return _ceil(sizes.Nq * (sizes.Hq // sizes.Hk if tile.packed else 1), tile.Br)


def dq_accumulator_floats(spec: KernelSpec, sizes: Sizes) -> int:
    """Elements of fused's dQ accumulator: whole tiles of Br rows, as many columns as rows have in shared memory."""
    Br = spec.tile.Br  # type: ignore[union-attr]
    return sizes.B * sizes.Hq * _ceil(sizes.Nq, Br) * Br * padded_columns(spec)


def _like(allocate: Callable[[tuple[int, ...], DTypeLike], Tensor], x: Tensor, bnhd: bool) -> Tensor:
    """A tensor like x [B, H, N, d], its memory in that order or as [B, N, H, d]."""
    if not bnhd:
        return allocate(x.shape, x.dtype)
    B, H, N, d = x.shape
    out = allocate((B, N, H, d), x.dtype)
    return replace(out, shape=x.shape, strides=tuple(out.strides[axis] for axis in (0, 2, 1, 3)))


def _launch(engine: Engine, binary: Binary, tensors: Mapping[str, Tensor], sizes: Sizes, scale: float) -> None:
    spec = binary.spec
    aligned = {name: _reachable(engine, spec, name, tensor) for name, tensor in tensors.items()}
    args = pack(spec, aligned, sizes, scale)
    engine.launch(engine.load(binary), grid=grid(spec, sizes), block=spec.threads, smem=binary.smem_bytes, args=args)


def _reachable(engine: Engine, spec: KernelSpec, name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of an input whose rows do not start on 16 bytes."""
    inputs = {arg.name for arg in spec.signature if arg.type == "View<const T>"}
    return engine.contiguous(tensor) if name in inputs and not tensor.aligned else tensor


def pack(spec: KernelSpec, tensors: Mapping[str, Tensor], sizes: Sizes, scale: float) -> tuple[Value, ...]:
    """The arguments of one launch, in the order and with the types of the kernel's signature."""
    numbers: dict[str, Any] = {
        "Hq": sizes.Hq, "Hk": sizes.Hk, "Nq": sizes.Nq, "Nk": sizes.Nk, "rows": sizes.stats_rows,
        "parts": sizes.parts, "scale": scale, "scale_log2": scale * LOG2_E,
    }  # fmt: skip
    values: list[Value] = []
    for arg in spec.signature:
        if arg.type in ("View<const T>", "View<T>"):
            tensor = tensors[arg.name]
            values.append(struct.pack("<Qqqq", tensor.address, *tensor.strides[:3]))
        elif arg.type == "Walk":
            row_bytes = tensors[arg.tensor].strides[2] * tensors[arg.tensor].dtype.itemsize
            values.append(struct.pack("<qq", limits.copy_rows(spec) * row_bytes, _walked_rows(spec) * row_bytes))
        elif arg.type in ("const float*", "float*"):
            values.append(tensors[arg.name].address if arg.name in tensors else 0)
        else:
            values.append(float(numbers[arg.name]) if arg.type == "float" else int(numbers[arg.name]))
    return tuple(values)


def _walked_rows(spec: KernelSpec) -> int:
    """Rows of the tiles that a block walks over: keys in forward and dq, query rows in fused and dkdv."""
    tile = spec.tile
    return tile.Br if isinstance(tile, KeyBlockTile) else tile.Bc  # type: ignore[union-attr]


def _ceil(n: int, step: int) -> int:
    return -(-n // step)

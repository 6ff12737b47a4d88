"""Lower bulk copies: cp.async.bulk with tensor maps and without, reductions, and their groups."""

from __future__ import annotations

from .emitter import Emitter
from .instructions import Instruction, Operand, TensorAddress
from .types import is_float

_LOAD = "mbarrier::complete_tx::bytes"
_DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
_KNOWN = (
    *("async", "reduce", "bulk", "tensor", "tile", "global", "shared::cta", "shared::cluster", "bulk_group", _LOAD),
    *("L2::cache_hint", "add", "f32", *_DIMENSIONS),
)


def lower_bulk(e: Emitter, i: Instruction) -> None:
    """Any cp instruction with .bulk."""
    flags = i.modifiers
    if "commit_group" in flags:
        e.emit(f"commit_bulk(W, {e.lanes})")
        return
    if "wait_group" in flags:
        e.emit(f"wait_for_bulk(W, {e.known(i.operands[0])}, {e.lanes})")
        return
    if "prefetch" in flags:
        return
    reduces = flags[0] == "reduce"
    # only sums of float32 are implemented; with a tensor map the type is the map's, known when it is read
    wrong = reduces and ("add" not in flags or ("tensor" not in flags and flags[-1] != "f32"))
    if wrong or any(flag not in _KNOWN for flag in flags) or (not reduces and is_float(flags[-1])):
        e.unknown(i, "this form")
    target, source, *more = i.operands
    if _LOAD in flags:
        _lower_load(e, i, target, source, more)
    elif isinstance(target, TensorAddress):
        e.emit(f"store_tile(W, {_tensor(e, target)}, {e.address(source)}, {reduces}, {e.lanes}, {i.index})")
    else:
        size = e.source(more[0], "u32")
        addresses = f"{e.address(target)}, {e.address(source)}"
        e.emit(f"store_line(W, {addresses}, {size}, {reduces}, {e.lanes}, {i.index})")


def _lower_load(e: Emitter, i: Instruction, target: Operand, source: Operand, more: list[Operand]) -> None:
    if isinstance(source, TensorAddress):
        arguments = f"{_tensor(e, source)}, {e.address(target)}, {e.address(more[0])}"
        e.emit(f"load_tile(W, {arguments}, {e.lanes}, {i.index})")
        return
    arguments = f"{e.address(target)}, {e.address(source)}, {e.source(more[0], 'u32')}, {e.address(more[1])}"
    e.emit(f"load_line(W, {arguments}, {e.lanes}, {i.index})")


def _tensor(e: Emitter, operand: TensorAddress) -> str:
    corner = "".join(f"{e.source(name, 's32')}, " for name in operand.corner)
    return f"{e.address(operand.map)}, ({corner})"

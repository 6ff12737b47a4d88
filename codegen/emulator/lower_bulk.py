"""Lower bulk copies: cp.async.bulk with tensor maps and without, reductions, their groups, and prefetches."""

from __future__ import annotations

from .emitter import Emitter
from .instructions import Instruction, Operand, TensorAddress
from .types import is_float

_LOAD = "mbarrier::complete_tx::bytes"
_MULTICAST = "multicast::cluster"
_DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
_KNOWN = (
    *("async", "reduce", "bulk", "tensor", "tile", "global", "shared::cta", "shared::cluster", "bulk_group", _LOAD),
    *(_MULTICAST, "L2::cache_hint", "add", "f32", *_DIMENSIONS),
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
        if "global" not in flags:
            e.unknown(i, "a copy between blocks")
        _lower_load(e, i, target, source, more)
    elif isinstance(target, TensorAddress):
        e.emit(f"store_tile(W, {_tensor(e, target)}, {e.address(source)}, {reduces}, {e.lanes}, {i.index})")
    else:
        size = e.source(more[0], "u32")
        addresses = f"{e.address(target)}, {e.address(source)}"
        e.emit(f"store_line(W, {addresses}, {size}, {reduces}, {e.lanes}, {i.index})")


def lower_prefetch(e: Emitter, i: Instruction) -> None:
    """Prefetches: nothing is cached here, but that of a tensor map names one."""
    if i.modifiers[:1] == ("tensormap",):
        e.emit(f"prefetch_map(W, {e.address(i.operands[0])}, {e.lanes}, {i.index})")


def _lower_load(e: Emitter, i: Instruction, target: Operand, source: Operand, more: list[Operand]) -> None:
    if isinstance(source, TensorAddress):
        arguments, function = f"{_tensor(e, source)}, {e.address(target)}", "load_tile"
    else:
        arguments, function = f"{e.address(target)}, {e.address(source)}, {e.source(more.pop(0), 'u32')}", "load_line"
    mask = e.source(more[1], "u16") if _MULTICAST in i.modifiers else "None"
    e.emit(f"{function}(W, {arguments}, {e.address(more[0])}, {mask}, {e.lanes}, {i.index})")


def _tensor(e: Emitter, operand: TensorAddress) -> str:
    corner = "".join(f"{e.source(name, 's32')}, " for name in operand.corner)
    return f"{e.address(operand.map)}, ({corner})"

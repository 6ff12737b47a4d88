"""Lower mbarrier instructions and mapa; mbarrier instructions that wait end a basic block."""

from __future__ import annotations

from collections.abc import Callable

from .addresses import SHARED_WINDOW
from .classes import state_space
from .emitter import Emitter
from .errors import PtxError
from .instructions import Instruction, Operand

_SCOPES = ("shared", "shared::cta", "relaxed", "release", "acquire", "cta", "cluster")
_OF_CLUSTER = "shared::cluster"


def shared_address(e: Emitter, i: Instruction, operand: Operand) -> str:
    """Expression for an address in shared memory, whether the instruction names that space or takes a generic one."""
    address = e.address(operand)
    if state_space(i) == "shared":
        return address
    return f"subtract({address}, {e.constant(SHARED_WINDOW, 'u64')})"


def lower_mbarrier(e: Emitter, i: Instruction) -> None:
    """mbarrier.init, .inval, .arrive, .arrive.expect_tx, .expect_tx and .complete_tx."""
    kind, rest = i.modifiers[0], i.modifiers[1:-1]
    of_cluster = _OF_CLUSTER in rest and kind == "arrive"  # of other blocks' barriers nothing else is implemented
    if i.type != "b64" or any(flag not in (*_SCOPES, "expect_tx", *([_OF_CLUSTER] * of_cluster)) for flag in rest):
        e.unknown(i, "this form")
    expects = "expect_tx" in rest
    if kind == "init":
        count = e.source(i.operands[1], "u32")
        e.emit(f"init_mbarrier(W, {shared_address(e, i, i.operands[0])}, {count}, {e.lanes}, {i.index})")
    elif kind == "inval":
        e.emit(f"invalidate_mbarrier(W, {shared_address(e, i, i.operands[0])}, {e.lanes}, {i.index})")
    elif kind in ("expect_tx", "complete_tx"):
        address, size = shared_address(e, i, i.operands[0]), e.source(i.operands[1], "s32")
        e.emit(f"expect_bytes(W, {address}, {size}, {1 if kind == 'expect_tx' else -1}, {e.lanes}, {i.index})")
    elif kind == "arrive":
        _lower_arrive(e, i, expects, of_cluster)
    else:
        e.unknown(i, "this form")


def _lower_arrive(e: Emitter, i: Instruction, expects: bool, of_cluster: bool) -> None:
    name, address, *more = i.operands
    if len(more) > 1 or (expects and not more) or (of_cluster and name != "_"):
        raise PtxError("the operands do not fit")
    number = e.source(more[0], "s32") if more else ""
    count = e.constant(1, "s32") if expects or not more else number
    size = number if expects else e.constant(0, "s32")
    e.emit(f"l = {e.lanes}")
    e.emit(f"t = arrive_at_mbarrier(W, {shared_address(e, i, address)}, {count}, {size}, {of_cluster}, l, {i.index})")
    if name != "_":
        e.emit(f"put({e.register(str(name), 'u8')}, l, t)")


def lower_wait(e: Emitter, i: Instruction) -> None:
    """mbarrier.try_wait and .test_wait: which threads find their phase complete, and at which barriers the others wait.

    Without .parity the operand is what an arrival returned: here just the parity of that phase.
    """
    flags = i.modifiers[1:-1]
    if i.type != "b64" or any(flag not in (*_SCOPES, "parity") for flag in flags) or not 3 <= len(i.operands) <= 4:
        e.unknown(i, "this form")
    name, address, phase = i.operands[:3]
    parity = e.source(phase, "u32" if "parity" in flags else "b64")
    e.emit(f"w, t = test_mbarrier(W, {shared_address(e, i, address)}, {parity}, {e.lanes}, {i.index})")
    e.write(str(name), "pred", "copyto({d}, t)")
    e.emit("B[:] = [(w, None)]")
    e.emit("return t")


def lower_mapa(e: Emitter, i: Instruction) -> None:
    """mapa.shared::cluster: an address in the shared memory of another block of the cluster."""
    if i.modifiers != (_OF_CLUSTER, "u32"):
        e.unknown(i, "this form")
    name, address, rank = i.operands
    mapped = f"map_to_rank(W, {e.source(address, 'u32')}, {e.source(rank, 'u32')}, {e.lanes}, {i.index})"
    e.write(str(name), "u32", f"copyto({{d}}, {mapped})")


LOWER: dict[str, Callable[[Emitter, Instruction], None]] = {"mbarrier": lower_mbarrier, "mapa": lower_mapa}

"""Lower a basic block to a Python function: pick the lowering of each instruction and compile the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import (
    lower_compare,
    lower_convert,
    lower_float,
    lower_integer,
    lower_mbarrier,
    lower_memory,
    lower_move,
    lower_warp,
    lower_wgmma,
)
from .blocks import Block, Item, TensorGroup
from .cluster_barriers import check_cluster_barrier
from .emitter import Emitter, Lowered, Symbols
from .errors import PtxError, UnknownInstruction
from .instructions import Instruction
from .types import is_float

_TABLE = {
    **lower_integer.LOWER,
    **lower_compare.LOWER,
    **lower_convert.LOWER,
    **lower_move.LOWER,
    **lower_memory.LOWER,
    **lower_mbarrier.LOWER,
    **lower_warp.LOWER,
    **lower_wgmma.LOWER,
    # the same names for integers and floats: _lower chooses by the type
    **{name: lowering for name, lowering in lower_float.LOWER.items() if name not in lower_integer.LOWER},
}


def _lower(e: Emitter, instruction: Instruction) -> None:
    base = instruction.base
    if base in lower_float.LOWER and is_float(instruction.type):
        lowering = lower_float.LOWER[base]
    elif base == "bar" and instruction.modifiers[:1] == ("warp",):
        return  # lanes of a warp run in lock-step here
    elif base == "trap":
        e.begin(instruction)
        e.emit(f"trap(W, {e.lanes}, {instruction.index})")
        return
    elif base not in _TABLE:
        raise UnknownInstruction(f"{instruction}: {instruction.opcode.text} is not implemented")
    else:
        lowering = _TABLE[base]
    _apply(lowering, e, instruction)


def _apply(lowering: Callable[[Emitter, Instruction], None], e: Emitter, instruction: Instruction) -> None:
    e.begin(instruction)
    try:
        lowering(e, instruction)
    except (PtxError, UnknownInstruction) as error:
        if str(error).startswith("PTX line"):
            raise
        raise type(error)(f"{instruction}: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PtxError(f"{instruction}: the operands do not fit the instruction ({error})") from error


def lower_block(block: Block, items: Iterable[Item], symbols: Symbols, masked: bool, name: str) -> Lowered:
    """Generate the function of a block; it returns the condition of a guarded jump at its end, else None."""
    e = Emitter(symbols, masked)
    for item in items:
        if isinstance(item, TensorGroup):
            e.begin_unguarded()
            lower_warp.lower_group(e, item)
        else:
            _lower(e, item)
    _lower_end(e, block)
    source = e.source_of()
    code = compile(source, f"<{name} block {block.index}{' masked' if masked else ''}>", "exec")
    function = next(constant for constant in code.co_consts if hasattr(constant, "co_code"))
    return Lowered(source, function, e.bindings, e.constants)


def _lower_end(e: Emitter, block: Block) -> None:
    end = block.end
    if end is None:
        return
    if block.kind == "wait":
        _apply(lower_mbarrier.lower_wait, e, end)
        return
    condition = "None"
    if end.guard is not None:
        guard = e.source(end.guard, "pred")
        condition = f"logical_not({guard})" if end.guard_negated else guard
    if block.kind == "barrier":
        number, count = barrier_operands(end)
        e.emit(f"B[:] = [({e.source(number, 'u32')}, {e.source(count, 'u32') if count else None})]")
    elif block.kind == "cluster":
        check_cluster_barrier(end)
    elif block.kind == "table":
        e.emit(f"B[:] = [({e.source(end.operands[0], 'u32')}, None)]")
    e.emit(f"return {condition}")


def barrier_operands(instruction: Instruction) -> tuple[str, str | None]:
    """Number and thread count of a barrier instruction; an error for forms that are not implemented."""
    modifiers = [m for m in instruction.modifiers if m != "cta"]
    arrives = modifiers[:1] == ["arrive"]
    if modifiers[:1] not in (["sync"], ["arrive"]) or modifiers[1:] not in ([], ["aligned"]):
        raise UnknownInstruction(f"{instruction}: {instruction.opcode.text} is not implemented")
    operands = [str(operand) for operand in instruction.operands]
    if not operands or len(operands) > 2 or (arrives and len(operands) < 2):
        raise PtxError(f"{instruction}: a barrier takes its number and perhaps a thread count")
    return operands[0], operands[1] if len(operands) > 1 else None

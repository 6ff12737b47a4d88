"""Lower loads, stores, atomics and asynchronous copies to calls of the window that executes them."""

from __future__ import annotations

from collections.abc import Callable

from .classes import state_space
from .emitter import Emitter
from .errors import PtxError
from .instructions import Address, Instruction, Operand
from .lower_bulk import lower_bulk, lower_prefetch
from .types import CODE, SIGNED, SIZE, UNSIGNED, is_signed

# qualifiers that change where a value is cached or when others see it, never what this emulator computes
_HINTS = (
    "global", "shared", "shared::cta", "local", "param", "param::entry", "const", "nc", "weak", "relaxed", "volatile",
    "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "ca", "cg", "cs", "lu", "cv", "wb", "wt",
    "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
    "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint",
    "noftz", "v2", "v4", "v8",
)  # fmt: skip
_ATOMIC = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def _vector(i: Instruction, operand: Operand) -> tuple[str, ...]:
    """The registers of a vector operand, as many as .v2, .v4 or .v8 says."""
    names = operand if isinstance(operand, tuple) else (str(operand),)
    count = next((int(modifier[1]) for modifier in ("v2", "v4", "v8") if modifier in i.modifiers), 1)
    if len(names) != count:
        raise PtxError(f"{len(names)} registers for a vector of {count}")
    return names


def lower_load(e: Emitter, i: Instruction) -> None:
    """ld and ldu from every state space, with extension into wider registers."""
    e.flags(i, _HINTS)
    space = state_space(i)
    names = _vector(i, i.operands[0])
    code = CODE[i.type]
    if space == "param":
        _load_param(e, i, names)
        return
    space = "global" if space == "const" else space
    if SIZE[i.type] * len(names) > 16 and space != "global":
        e.unknown(i, "a vector of 32 bytes")
    address = e.address(i.operands[1])
    e.emit(f"l = {e.lanes}")
    e.emit(f"t = W.load_{space}({address}, {code}, {len(names)}, l, {i.index})")
    for k, name in enumerate(names):
        if name == "_":
            continue
        width = SIZE[e.symbols.registers.get(name, i.type)]
        type_name = i.type if width == SIZE[i.type] else (SIGNED if is_signed(i.type) else UNSIGNED)[width]
        e.emit(f"put({e.register(name, CODE[type_name])}, l, t[:, {k}])")


def _load_param(e: Emitter, i: Instruction, names: tuple[str, ...]) -> None:
    """ld.param: at a fixed place one value serves all threads; behind a register each has its own."""
    operand = i.operands[1]
    if not isinstance(operand, Address):
        raise PtxError(f"expected an address, found {operand}")
    base, offset, size = operand.base, operand.offset, SIZE[i.type]
    behind_register = base in e.symbols.registers
    if behind_register:
        e.emit(f"l = {e.lanes}")
        e.emit(f"a = {e.address(operand)} if l is None else {e.address(operand)}[l]")
    elif base not in e.symbols.params:
        raise PtxError(f"{base} is no parameter")
    for k, name in enumerate(names):
        if name == "_":
            continue
        width = SIZE[e.symbols.registers.get(name, i.type)]
        type_name = i.type if width == size else (SIGNED if is_signed(i.type) else UNSIGNED)[width]
        if behind_register:
            value = f"W.load_param(a, {k * size}, {CODE[i.type]}, {i.index})"
            e.emit(f"put({e.register(name, CODE[type_name])}, l, {value})")
            continue
        value = f"W.load_param({e.symbols.params[base] + offset + k * size}, 0, {CODE[i.type]}, {i.index})"
        e.write(name, type_name, f"copyto({{d}}, {value}, casting='unsafe')")


def lower_store(e: Emitter, i: Instruction) -> None:
    """st to global, shared, local or generic addresses."""
    e.flags(i, _HINTS)
    space = state_space(i)
    if space in ("param", "const"):
        e.unknown(i, f"space .{space}")
    names = _vector(i, i.operands[1])
    if SIZE[i.type] * len(names) > 16 and space != "global":
        e.unknown(i, "a vector of 32 bytes")
    address = e.address(i.operands[0])
    bits = f"b{8 * SIZE[i.type]}"
    # a number is read as the type that the instruction names, a register as its bits
    values = "".join(f"{e.source(name, bits if _is_register(e, name) else i.type)}, " for name in names)
    e.emit(f"W.store_{space}({address}, {CODE[bits]}, ({values}), {e.lanes}, {i.index})")


def _is_register(e: Emitter, name: str) -> bool:
    return name in e.symbols.registers or name.startswith("%")


def lower_atomic(e: Emitter, i: Instruction) -> None:
    """atom and red on global, shared and generic addresses; scalar, .v2 and .v4 of f32."""
    flags = e.flags(i, (*_HINTS, *_ATOMIC))
    operation = next((flag for flag in flags if flag in _ATOMIC), "")
    space = state_space(i)
    packed = i.type in ("f16", "bf16", "f16x2", "bf16x2")
    if not operation or (packed and operation != "add") or space not in ("global", "shared", "generic"):
        e.unknown(i, "this form")
    returns = i.base == "atom"
    operands = i.operands[1:] if returns else i.operands
    names = _vector(i, i.operands[0]) if returns else ()
    address = e.address(operands[0])
    type_name = "u" + i.type[1:] if operation in ("exch", "cas", "and", "or", "xor") and i.type[0] == "b" else i.type
    # cas names the expected value first
    new = operands[2] if operation == "cas" else operands[1]
    values = "".join(f"{e.source(name, type_name)}, " for name in _vector(i, new))
    compare = e.source(operands[1], type_name) if operation == "cas" else "None"
    kind = i.type if packed else CODE[type_name]
    used = any(name != "_" and name in e.symbols.read for name in names)
    e.emit(f"l = {e.lanes}")
    arguments = f"'{space}', {address}, '{operation}', '{kind}', ({values}), {compare}, l, {i.index}"
    if not used:
        e.emit(f"reduce(W, {arguments})")
        return
    e.emit(f"t = atomic(W, {arguments})")
    for k, name in enumerate(names):
        if name != "_":
            e.emit(f"put({e.register(name, CODE[type_name])}, l, t[:, {k}])")


def lower_copy(e: Emitter, i: Instruction) -> None:
    """cp.async with its groups, and its bulk forms."""
    m = i.modifiers
    if "bulk" in m:
        lower_bulk(e, i)
        return
    if m[:2] == ("async", "commit_group"):
        e.emit(f"commit_copies(W, {e.mask})")
        return
    if m[:2] == ("async", "wait_group"):
        e.emit(f"wait_for_copies(W, {e.known(i.operands[0])}, {e.mask}, {i.index})")
        return
    if m[:2] == ("async", "wait_all"):
        e.emit(f"commit_copies(W, {e.mask})\nwait_for_copies(W, 0, {e.mask}, {i.index})")
        return
    allowed = ("async", "ca", "cg", "shared", "shared::cta", "global", "L2::64B", "L2::128B", "L2::256B")
    size = e.known(i.operands[2]) if len(i.operands) > 2 else None
    if any(flag not in allowed for flag in m) or m[:1] != ("async",) or size not in (4, 8, 16) or len(i.operands) > 4:
        e.unknown(i, "this form")
    filled = e.source(i.operands[3], "u32") if len(i.operands) > 3 else "None"
    target, source = e.address(i.operands[0]), e.address(i.operands[1])
    e.emit(f"copy_async(W, {target}, {source}, {size}, {filled}, {e.lanes}, {i.index})")


def lower_fence(e: Emitter, i: Instruction) -> None:
    """Fences: only what they say of shared memory to the asynchronous proxy, and of mbarriers to other blocks, matters,
    and only to the race detector."""
    if i.modifiers[:1] == ("proxy",) and i.modifiers[1].startswith("async") and "global" not in i.modifiers:
        e.emit(f"fence_proxy(W, {e.lanes})")
    elif i.modifiers[:1] == ("mbarrier_init",):
        e.emit(f"publish_mbarriers(W, {e.lanes})")


def lower_nothing(e: Emitter, i: Instruction) -> None:
    """Barriers of memory and hints: memory is sequentially consistent here, and nothing is cached."""


LOWER: dict[str, Callable[[Emitter, Instruction], None]] = {
    "ld": lower_load,
    "ldu": lower_load,
    "st": lower_store,
    "atom": lower_atomic,
    "red": lower_atomic,
    "cp": lower_copy,
    "fence": lower_fence,
    "prefetch": lower_prefetch,
    **dict.fromkeys(("membar", "prefetchu", "nanosleep", "griddepcontrol"), lower_nothing),
}

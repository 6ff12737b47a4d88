"""Lower what a warp does together: shuffles, votes, matrix loads and products."""

from __future__ import annotations

from collections.abc import Callable

from .blocks import Chain, TensorGroup
from .emitter import Emitter
from .instructions import Instruction, Operand
from .tensor_shapes import product_of
from .types import CODE


def _tuple(e: Emitter, names: tuple[str, ...], type_name: str) -> str:
    return "(" + "".join(f"{e.source(name, type_name)}, " for name in names) + ")"


def _members(e: Emitter, i: Instruction, operand: Operand) -> None:
    """Check that the lanes named by the member mask take part; a constant full mask needs no check when all do."""
    known = e.known(operand)
    if e.mask == "None" and known is not None and known & 0xFFFFFFFF == 0xFFFFFFFF:
        return
    e.emit(f"check_members(W, {e.source(operand, 'b32')}, {e.mask}, {i.index})")


def lower_shfl(e: Emitter, i: Instruction) -> None:
    """shfl.sync: bfly, up, down, idx, with clamp and segment mask; `d|p` also says whether the source was in range."""
    flags = e.flags(i, ("sync", "bfly", "up", "down", "idx"))
    mode = flags[-1]
    value, lane, clamp, *members = i.operands[1:]
    if not members or flags[0] != "sync":
        e.unknown(i, "the form without .sync")
    _members(e, i, members[0])
    names = [name.strip() for name in str(i.operands[0]).split("|")]
    known_lane, known_clamp = e.known(lane), e.known(clamp)
    arguments = f"'{mode}', {known_lane}, {known_clamp}"
    if known_lane is None or known_clamp is None:
        arguments = f"'{mode}', {e.source(lane, 'u32')}, {e.source(clamp, 'u32')}"
        e.emit(f"t, q = shuffle_variable({e.source(value, 'b32')}, n, {arguments})")
    else:
        e.emit(f"t, q = shuffle({e.source(value, 'b32')}, n, {arguments})")
    e.write(names[0], "b32", "copyto({d}, t)")
    if len(names) > 1:
        e.write(names[1], "pred", "copyto({d}.reshape(-1, 32), q)")


def lower_vote(e: Emitter, i: Instruction) -> None:
    """vote.sync: any, all, uni, ballot."""
    flags = i.modifiers
    if flags[0] != "sync" or len(flags) != 3 or flags[1] not in ("any", "all", "uni", "ballot"):
        e.unknown(i, "this form")
    name, value, members = i.operands
    _members(e, i, members)
    result = f"vote_{flags[1]}({e.source(value, 'pred')}, n, {e.source(members, 'b32')}, {e.mask})"
    e.write(str(name), "b32" if flags[1] == "ballot" else "pred", f"copyto({{d}}.reshape(-1, 32), {result})")


def lower_activemask(e: Emitter, i: Instruction) -> None:
    """activemask: the lanes that execute this block together."""
    e.write(str(i.operands[0]), "b32", f"copyto({{d}}.reshape(-1, 32), active_lanes(n, {e.mask}))")


def lower_elect(e: Emitter, i: Instruction) -> None:
    """elect.sync: the lowest of the lanes named is the leader; `d|p` are its number and whether this lane is it."""
    _members(e, i, i.operands[1])
    number, leads = [name.strip() for name in str(i.operands[0]).split("|")]
    e.emit(f"t, q = leading_lanes(n, {e.source(i.operands[1], 'b32')})")
    if number != "_":
        e.write(number, "b32", "copyto({d}.reshape(-1, 32), t)")
    e.write(leads, "pred", "copyto({d}.reshape(-1, 32), q)")


def lower_setmaxnreg(e: Emitter, i: Instruction) -> None:
    """setmaxnreg.inc and .dec: recorded."""
    count = e.known(i.operands[0])
    if i.modifiers[0] not in ("inc", "dec") or i.modifiers[1:] != ("sync", "aligned", "u32") or count is None:
        e.unknown(i, "this form")
    e.emit(f"set_register_share(W, {count}, {e.mask}, {i.index})")


def lower_ldmatrix(e: Emitter, i: Instruction) -> None:
    """ldmatrix .x1, .x2, .x4, plain and .trans."""
    _matrix_flags(e, i)
    names = i.operands[0] if isinstance(i.operands[0], tuple) else (str(i.operands[0]),)
    address = e.address(i.operands[1])
    transposed = "trans" in i.modifiers
    call = f"load_matrices(W, {address}, {{targets}}, {transposed}, {e.mask}, {i.index})"
    if e.mask == "None":
        registers = "".join(f"{e.register(name, 'u4')}, " for name in names)
        e.emit(call.format(targets=f"({registers})"))
        return
    e.emit(f"m = [empty(n, u4) for _ in range({len(names)})]")
    e.emit(call.format(targets="m"))
    for k, name in enumerate(names):
        e.write(name, "b32", f"copyto({{d}}, m[{k}])")


def lower_stmatrix(e: Emitter, i: Instruction) -> None:
    """stmatrix .x1, .x2, .x4, plain and .trans."""
    _matrix_flags(e, i)
    names = i.operands[1] if isinstance(i.operands[1], tuple) else (str(i.operands[1]),)
    sources = _tuple(e, names, "b32")
    address = e.address(i.operands[0])
    e.emit(f"store_matrices(W, {address}, {sources}, {'trans' in i.modifiers}, {e.mask}, {i.index})")


def _matrix_flags(e: Emitter, i: Instruction) -> None:
    flags = e.flags(i, ("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta"))
    count = next((int(flag[1]) for flag in flags if flag in ("x1", "x2", "x4")), 0)
    vector = i.operands[0 if i.base == "ldmatrix" else 1]
    have = len(vector) if isinstance(vector, tuple) else 1
    if i.type != "b16" or "m8n8" not in flags or count != have:
        e.unknown(i, "this form")


def lower_movmatrix(e: Emitter, i: Instruction) -> None:
    """movmatrix.trans: transposes an 8x8 matrix held by a warp."""
    if i.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
        e.unknown(i, "this form")
    e.emit(f"check_whole_warps(W, {e.mask}, {i.index})")
    e.write(str(i.operands[0]), "b32", f"transpose_matrix({e.source(i.operands[1], 'b32')}, {{d}})")


def lower_guarded_mma(e: Emitter, i: Instruction) -> None:
    """An mma under a guard: a group of its own, merged by the mask."""
    A, B, C, D, kind, _ = product_of(i)
    lower_group(e, TensorGroup([Chain(A, B, C, D, kind)], i))


def lower_group(e: Emitter, group: TensorGroup) -> None:
    """Chains with common A fragments as one batched product."""
    chains = group.chains
    of_inputs, of_sums = chains[0].kind
    sums = "f32" if of_sums == "f32" else "b32"
    B, C, D = (tuple([name for chain in chains for name in getattr(chain, part)]) for part in ("B", "C", "D"))
    function = "multiply_matrices" if of_sums == "f32" else "multiply_matrices_f16"
    inputs = f"{_tuple(e, chains[0].A, 'b32')}, {_tuple(e, B, 'b32')}, {_tuple(e, C, sums)}"
    call = f"{function}({inputs}, {{targets}}, {of_inputs!r})"
    # sums are written one register after the other, so a result must not replace an addend that is still needed
    crossed = any(d in chain.C[:k] + chain.C[k + 1 :] for chain in chains for k, d in enumerate(chain.D))
    if e.mask == "None" and not crossed:
        targets = "".join(f"{e.register(name, CODE[sums])}, " for name in D)
        e.emit(call.format(targets=f"({targets})"))
        return
    e.emit(f"check_whole_warps(W, {e.mask}, {group.first.index})")
    e.emit(f"m = [empty(n, {CODE[sums]}) for _ in range({len(D)})]")
    e.emit(call.format(targets="m"))
    for k, name in enumerate(D):
        e.write(name, sums, f"copyto({{d}}, m[{k}])")


LOWER: dict[str, Callable[[Emitter, Instruction], None]] = {
    "shfl": lower_shfl,
    "vote": lower_vote,
    "activemask": lower_activemask,
    "elect": lower_elect,
    "setmaxnreg": lower_setmaxnreg,
    "ldmatrix": lower_ldmatrix,
    "stmatrix": lower_stmatrix,
    "movmatrix": lower_movmatrix,
    "mma": lower_guarded_mma,
}

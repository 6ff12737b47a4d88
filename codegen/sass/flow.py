"""Build the control flow graph of a function: basic blocks, dominators, natural loops.

Loops are found in the graph, never by address range: ptxas rotates loops and puts rarely taken blocks, and sometimes
busy ones such as a prefetch, before the header (docs/model.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .instruction import Instruction

LEAVES_FUNCTION = frozenset({"EXIT", "RET", "KILL"})
JUMPS = frozenset({"BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU"})
ENDS_BLOCK = LEAVES_FUNCTION | JUMPS | {"CALL"}


class Block(NamedTuple):
    """Instructions start..end-1, and the blocks control may go to."""

    start: int
    end: int
    successors: tuple[int, ...]


class Loop(NamedTuple):
    """A natural loop: all back edges to one header, and the blocks that reach them without passing the header."""

    header: int
    latches: tuple[int, ...]
    body: frozenset[int]


class Graph(NamedTuple):
    blocks: tuple[Block, ...]
    order: tuple[int, ...]  # reachable blocks in reverse postorder
    back_edges: frozenset[tuple[int, int]]
    loops: tuple[Loop, ...]


def build_graph(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> Graph:
    """The graph of one function; `labels` maps a name to the index of the instruction it stands before."""
    blocks = _split_blocks(instructions, labels)
    order = _reverse_postorder(blocks)
    predecessors: list[list[int]] = [[] for _ in blocks]
    for block in order:
        for successor in blocks[block].successors:
            predecessors[successor].append(block)
    dominator = _immediate_dominators(order, predecessors)
    back = [(a, b) for a in order for b in blocks[a].successors if _dominates(b, a, dominator)]
    latches: dict[int, list[int]] = {}
    for latch, header in back:
        latches.setdefault(header, []).append(latch)
    loops = tuple(Loop(h, tuple(ls), _loop_body(h, ls, predecessors)) for h, ls in latches.items())
    return Graph(blocks, order, frozenset(back), loops)


def _split_blocks(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> tuple[Block, ...]:
    leaders = {0} | set(labels.values())
    leaders |= {i + 1 for i, instruction in enumerate(instructions) if instruction.base in ENDS_BLOCK}
    starts = sorted(x for x in leaders if x < len(instructions))
    number = {start: block for block, start in enumerate(starts)}
    ends = [*starts[1:], len(instructions)]
    return tuple(
        Block(start, end, tuple(_successors(instructions[end - 1], end, labels, number)))
        for start, end in zip(starts, ends, strict=True)
    )


def _successors(last: Instruction, end: int, labels: Mapping[str, int], number: Mapping[int, int]) -> Iterator[int]:
    # BRA.DIV guards the slow path of a diverged warp (warp-wide shuffles one lane at a time): never taken here.
    # sm_80's ptxas leaves some loops by `@!P0 CALL.REL.NOINC `(.L_x_1)`: with a label of this function, a plain jump.
    jumps = (last.base in JUMPS or (last.base == "CALL" and bool(last.targets))) and ".DIV" not in last.opcode
    if jumps:
        for label in last.targets:
            if label in labels and labels[label] in number:  # a label at the very end has no instruction
                yield number[labels[label]]
    falls_through = not (jumps or last.base in LEAVES_FUNCTION) or _is_conditional(last)
    if falls_through and end in number:
        yield number[end]


def _is_conditional(branch: Instruction) -> bool:
    """A guard, or (from sm_90 on) a predicate operand before the target: `BRA.U UP0, `(.L_x_2)`."""
    operands = branch.text.partition("`")[0].split()[1:] if branch.base == "BRA" else []
    return branch.guard not in ("", "PT", "UPT") or bool(operands)


def _reverse_postorder(blocks: Sequence[Block]) -> tuple[int, ...]:
    if not blocks:
        return ()
    seen, order = {0}, []
    stack = [(0, iter(blocks[0].successors))]
    while stack:
        block, successors = stack[-1]
        following = next((s for s in successors if s not in seen), None)
        if following is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(blocks[following].successors)))
    return tuple(reversed(order))


def _immediate_dominators(order: Sequence[int], predecessors: Sequence[Sequence[int]]) -> dict[int, int]:
    """Cooper, Harvey and Kennedy, "A simple, fast dominance algorithm"."""
    position = {block: i for i, block in enumerate(order)}
    dominator = {order[0]: order[0]} if order else {}

    def meet(a: int, b: int) -> int:
        while a != b:
            while position[a] > position[b]:
                a = dominator[a]
            while position[b] > position[a]:
                b = dominator[b]
        return a

    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [p for p in predecessors[block] if p in dominator]
            new = known[0]
            for other in known[1:]:
                new = meet(new, other)
            if dominator.get(block) != new:
                dominator[block] = new
                changed = True
    return dominator


def _dominates(above: int, block: int, dominator: Mapping[int, int]) -> bool:
    while block != above and dominator[block] != block:
        block = dominator[block]
    return block == above


def _loop_body(header: int, latches: Sequence[int], predecessors: Sequence[Sequence[int]]) -> frozenset[int]:
    body, stack = {header}, list(latches)
    while stack:
        block = stack.pop()
        if block not in body:
            body.add(block)
            stack.extend(predecessors[block])
    return frozenset(body)

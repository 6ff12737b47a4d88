"""Choose what a warp executes: the main loop, the way to it and the way out, as straight lists of instructions.

The main loop is the innermost loop with tensor instructions (an outer loop, over heads or persistent, holds peeled
iterations as well), of several the one with most tensor work, then the shortest (the unmasked twin of a masked loop).
Each way takes all the tensor work and global memory traffic it can. What is behind a branch besides (masks, rescue
code, lazy rescaling) is `rare`: counted as executed, as when the model was compared with published figures
 (docs/model.md), or left out. It may stand in the loop, or beside it: then a warp leaves the loop in the middle, goes
through the rare code with work of its own, and comes back to the loop's head.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .flow import Graph, Loop
from .instruction import Instruction
from .rates import ASYNCHRONOUS_OPCODES, GLOBAL_MEMORY
from .tensor import TENSOR, WARPGROUP_TENSOR, tensor_flops


class Trace(NamedTuple):
    """Instructions in the order a warp meets them; `loop` is one iteration and empty when no loop has tensor work."""

    prologue: tuple[Instruction, ...]
    loop: tuple[Instruction, ...]
    epilogue: tuple[Instruction, ...]

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether any of it runs on tensor cores."""
        return any(i.base in TENSOR for part in self for i in part)

    @property
    def uses_warpgroups(self) -> bool:
        """Whether the loop's tensor instructions are those of warpgroups, which run on their own (wgmma)."""
        return any(i.base in WARPGROUP_TENSOR for i in self.loop)


class LoopSummary(NamedTuple):
    """One loop of the listing; the counts hold for the blocks of its body, inner loops included, each once."""

    first_address: int  # of its header, bytes from the start of the function
    last_address: int  # of its (last) branch back
    instructions: int
    tensor_instructions: int
    spill_instructions: int
    innermost: bool


def trace_function(instructions: Sequence[Instruction], graph: Graph, *, rare: bool = True) -> Trace:
    """The three lists for the path with most work; `rare` says whether it goes through rare blocks or past them."""
    weights = [_weight(instructions[b.start : b.end], rare) for b in graph.blocks]
    everywhere = set(graph.order)
    loops = _product_loops(instructions, graph, weights)
    if not loops:
        whole = _heaviest(graph, weights, {0}, everywhere, _exits(instructions, graph) or everywhere)
        return Trace(_listed(instructions, graph, whole), (), ())
    loop, path = loops[0]
    if rare:
        path = _detour(instructions, graph, weights, loop, path) or path
    way_in = _heaviest(graph, weights, {0}, everywhere, {loop.header})[:-1]
    doors = {s for block in loop.body for s in graph.blocks[block].successors} - loop.body
    outside = everywhere - loop.body
    # A kernel that leaves through an outer loop's head reaches no EXIT without a back edge: then to any block.
    exits = _exits(instructions, graph) & outside
    way_out = _heaviest(graph, weights, doors, outside, exits) or _heaviest(graph, weights, doors, outside, outside)
    return Trace(*(_listed(instructions, graph, p) for p in (way_in, path, way_out)))


def summarise_loops(instructions: Sequence[Instruction], graph: Graph) -> tuple[LoopSummary, ...]:
    """Every loop, in the order of the listing."""
    found = []
    for loop in graph.loops:
        blocks = [graph.blocks[b] for b in loop.body]
        body = [i for block in blocks for i in instructions[block.start : block.end]]
        found.append(
            LoopSummary(
                first_address=instructions[graph.blocks[loop.header].start].address,
                last_address=max(instructions[graph.blocks[b].end - 1].address for b in loop.latches),
                instructions=len(body),
                tensor_instructions=sum(i.base in TENSOR for i in body),
                spill_instructions=sum(i.spills for i in body),
                innermost=not any(other.body < loop.body for other in graph.loops),
            )
        )
    return tuple(sorted(found))


def trace_twin(instructions: Sequence[Instruction], graph: Graph) -> tuple[Instruction, ...]:
    """The longest loop beside the main one with the same tensor work, as one for masked tiles; () if there is none."""
    loops = _product_loops(instructions, graph, [_weight(instructions[b.start : b.end], False) for b in graph.blocks])
    listed = [_listed(instructions, graph, path) for _, path in loops]
    work = [sum(tensor_flops(i.opcode) for i in each) for each in listed]
    return next((twin for twin, flops in zip(listed[:0:-1], work[:0:-1], strict=True) if flops == work[0]), ())


def _product_loops(
    instructions: Sequence[Instruction], graph: Graph, weights: Sequence[int]
) -> list[tuple[Loop, list[int]]]:
    """The innermost loops with tensor work, the way through each: first those with most work, of them the shortest."""
    tensor_loops = [loop for loop in graph.loops if any(weights[b] >= WEIGHT_OF_A_FLOP for b in loop.body)]
    found: list[tuple[int, int, Loop, list[int]]] = []
    for loop in tensor_loops:
        if any(other.body < loop.body for other in tensor_loops):
            continue
        path = _heaviest(graph, weights, {loop.header}, loop.body, set(loop.latches))
        listed = _listed(instructions, graph, path)
        tensor_work = sum(tensor_flops(i.opcode) for i in listed)
        if tensor_work:
            found.append((-tensor_work, len(listed), loop, path))
    found.sort(key=lambda each: each[:2])
    return [(loop, path) for _, _, loop, path in found]


def _detour(
    instructions: Sequence[Instruction], graph: Graph, weights: Sequence[int], main: Loop, ordinary: Sequence[int]
) -> list[int]:
    """The iteration that leaves the main loop and comes back through the loop around it; [] if there is none.

    It does the work of an ordinary one, whether ptxas shares the half before the branch with the main loop or copies
    it. A turn of a persistent kernel's outer loop does more: it writes a result.
    """

    def work(path: Sequence[int]) -> tuple[int, int]:
        listed = _listed(instructions, graph, path)
        return sum(tensor_flops(i.opcode) for i in listed), sum(_is_traffic(i) for i in listed)

    def heaviest(sources: Iterable[int], inside: frozenset[int], targets: Iterable[int]) -> list[int]:
        return _heaviest(graph, weights, sources, inside, targets)

    around = [loop for loop in graph.loops if main.body < loop.body]
    if not around:
        return []
    outer = min(around, key=lambda loop: len(loop.body))
    outside = outer.body - main.body
    latches = outside & set(outer.latches)
    way_back = heaviest({outer.header}, outside, {b for b in outside if main.header in graph.blocks[b].successors})
    doors = {s for block in main.body for s in graph.blocks[block].successors}
    for out in (heaviest({main.header}, outer.body, latches), heaviest(doors, outside, latches)):
        if out and work([*out, *way_back]) == work(ordinary):
            return [*out, *way_back]
    return []


WEIGHT_OF_TRAFFIC = 10**6  # of an instruction: outweighs any number of others
WEIGHT_OF_A_FLOP = 10**12  # outweighs any traffic


def _weight(block: Sequence[Instruction], rare: bool) -> int:
    flops = sum(tensor_flops(i.opcode) for i in block if i.base in TENSOR)
    traffic = 0 if rare else sum(_is_traffic(i) for i in block)
    return flops * WEIGHT_OF_A_FLOP + traffic * WEIGHT_OF_TRAFFIC + (len(block) if rare else -len(block))


def _is_traffic(instruction: Instruction) -> bool:
    """An mbarrier's phase is no traffic: a block that only looks at it again is the body of a wait."""
    return instruction.base in GLOBAL_MEMORY or (
        instruction.base in ASYNCHRONOUS_OPCODES and instruction.base != "SYNCS"
    )


def _exits(instructions: Sequence[Instruction], graph: Graph) -> set[int]:
    return {b for b in graph.order if instructions[graph.blocks[b].end - 1].base == "EXIT"}


def _heaviest(
    graph: Graph, weights: Sequence[int], sources: Iterable[int], inside: Iterable[int], targets: Iterable[int]
) -> list[int]:
    """The heaviest path without back edges from a source to a target, all within `inside`; [] if there is none."""
    inside = set(inside)
    best: dict[int, tuple[int, int | None]] = {b: (weights[b], None) for b in sources if b in inside}
    position = {block: i for i, block in enumerate(graph.order)}
    for block in graph.order:
        if block not in best or block not in inside:
            continue
        for successor in graph.blocks[block].successors:
            if successor not in inside or position[successor] <= position[block]:
                continue
            weight = best[block][0] + weights[successor]
            if successor not in best or weight > best[successor][0]:
                best[successor] = (weight, block)
    reached = [b for b in targets if b in best]
    if not reached:
        return []
    path: list[int] = []
    block_or_none: int | None = max(reached, key=lambda b: (best[b][0], -position[b]))
    while block_or_none is not None:
        path.append(block_or_none)
        block_or_none = best[block_or_none][1]
    return path[::-1]


def _listed(instructions: Sequence[Instruction], graph: Graph, path: Sequence[int]) -> tuple[Instruction, ...]:
    return tuple(i for b in path for i in instructions[graph.blocks[b].start : graph.blocks[b].end])

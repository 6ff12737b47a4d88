"""Cut a kernel into basic blocks and gather the tensor-core instructions of a block into batched products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .classes import instruction_class
from .dataflow import names_read, names_written
from .errors import PtxError
from .instructions import Instruction
from .tensor_shapes import Product, group_product_of, product_of


@dataclass(slots=True, eq=False)
class Block:
    """Instructions without a jump inside.

    `kind` says what ends the block: fall, branch, table, exit, barrier, cluster (a barrier of clusters) or wait.

    A wait at an mbarrier is a block of its own, so that it can be tried again.
    """

    index: int
    instructions: list[Instruction]
    kind: str
    end: Instruction | None
    targets: tuple[int, ...] = ()
    classes: Counter[str] = field(default_factory=Counter)
    tensor_flops: int = 0

    @property
    def all_instructions(self) -> list[Instruction]:
        """The instructions and the one that ends the block."""
        return self.instructions if self.end is None else [*self.instructions, self.end]


def _ending(instruction: Instruction) -> str | None:
    base = instruction.base
    if base == "bra":
        return "branch"
    if base == "brx":
        return "table"
    if base in ("ret", "exit"):
        return "exit"
    if base == "mbarrier" and instruction.modifiers[:1] in (("try_wait",), ("test_wait",)):
        return "wait"
    if base == "barrier" and instruction.modifiers[:1] == ("cluster",):
        return "cluster"
    if base in ("bar", "barrier") and "warp" not in instruction.modifiers:
        return "barrier"
    return None


def cut_blocks(
    instructions: Sequence[Instruction], labels: dict[str, int], tables: dict[str, tuple[str, ...]]
) -> list[Block]:
    """Basic blocks in the order of the text; the last one ends the thread."""
    starts = set(labels.values())
    blocks: list[Block] = []
    block_at: dict[int, int] = {}
    pending: list[Instruction] = []
    for position, instruction in enumerate(instructions):
        kind = _ending(instruction)
        if pending and (position in starts or kind == "wait"):
            blocks.append(Block(len(blocks), pending, "fall", None))
            pending = []
        if not pending:
            block_at[position] = len(blocks)
        if kind is None:
            pending.append(instruction)
        else:
            blocks.append(Block(len(blocks), pending, kind, instruction))
            pending = []
    block_at.setdefault(len(instructions), len(blocks))
    blocks.append(Block(len(blocks), pending, "exit", None))
    for block in blocks:
        _finish(block, block_at, labels, tables)
    return blocks


def _finish(block: Block, block_at: dict[int, int], labels: dict[str, int], tables: dict[str, tuple[str, ...]]) -> None:
    names: tuple[str, ...] = ()
    if block.kind == "branch" and block.end is not None:
        names = (str(block.end.operands[0]),)
    elif block.kind == "table" and block.end is not None:
        table = str(block.end.operands[1])
        if table not in tables:
            raise PtxError(f"{block.end}: no .branchtargets {table}")
        names = tables[table]
    for name in names:
        if name not in labels:
            raise PtxError(f"{block.end}: no label {name}")
    block.targets = tuple([block_at[labels[name]] for name in names])
    for instruction in block.all_instructions:
        block.classes[instruction_class(instruction)] += 1
        if instruction.base == "mma":
            block.tensor_flops += product_of(instruction).flops
        elif instruction.base == "wgmma" and instruction.modifiers[0] == "mma_async":
            block.tensor_flops += group_product_of(instruction).flops // 4  # its warps are counted one by one


@dataclass(slots=True)
class Chain:
    """Products that add to one accumulator, one after the other: `D = C + A0 B0 + A1 B1 + ...`, in steps of k = 8."""

    A: tuple[str, ...]
    B: tuple[str, ...]
    C: tuple[str, ...]
    D: tuple[str, ...]
    kind: tuple[str, str]


@dataclass(slots=True)
class TensorGroup:
    """Chains with the same A fragments, computed as one batched matrix product; `first` names it in messages."""

    chains: list[Chain]
    first: Instruction


Item: TypeAlias = "Instruction | TensorGroup"


def schedule(block: Block, read_count: dict[str, int]) -> list[Item]:
    """The block with its mma instructions moved down to the first instruction that depends on them, and grouped."""
    items: list[Item] = []
    queue = _TensorQueue(read_count)
    for instruction in block.instructions:
        if instruction.base == "mma" and instruction.guard is None:
            product = product_of(instruction)
            if not queue.accepts(product):
                items.extend(queue.flush())
            queue.add(product, instruction)
            continue
        if queue.depends(instruction):
            items.extend(queue.flush())
        items.append(instruction)
    items.extend(queue.flush())
    return items


class _TensorQueue:
    """Products not yet computed, chained where one adds to the result of another."""

    def __init__(self, read_count: dict[str, int]) -> None:
        self._read_count = read_count
        self._first: Instruction | None = None
        self._clear()

    def _clear(self) -> None:
        self._chains: list[Chain] = []
        self._by_result: dict[tuple[str, ...], Chain] = {}
        self._written: set[str] = set()
        self._read: set[str] = set()

    def depends(self, instruction: Instruction) -> bool:
        """Whether the instruction touches a pending result or overwrites a pending operand."""
        if not self._chains:
            return False
        written = names_written(instruction)
        return (
            not self._written.isdisjoint(written)
            or not self._read.isdisjoint(written)
            or not self._written.isdisjoint(names_read(instruction))
        )

    def accepts(self, product: Product) -> bool:
        """Whether a further product can wait with the others."""
        if not self._chains:
            return True
        if not self._written.isdisjoint(product.A) or not self._written.isdisjoint(product.B):
            return False
        if not self._read.isdisjoint(product.D) and not self._chain_of(product):
            return False
        if self._written.isdisjoint(product.C):
            return self._written.isdisjoint(product.D)
        return self._chain_of(product) is not None

    def _chain_of(self, product: Product) -> Chain | None:
        """The chain that this product continues, if nobody else wants the intermediate sum."""
        chain = self._by_result.get(product.C)
        # sums in fp16 are rounded after every instruction, so those cannot become one longer product
        if chain is None or chain.kind != product.kind or product.kind[1] != "f32":
            return None
        if product.D == product.C:
            return chain
        private = all(self._read_count.get(name, 0) == 1 for name in product.C)
        return chain if private and self._written.isdisjoint(product.D) and self._read.isdisjoint(product.D) else None

    def add(self, product: Product, instruction: Instruction) -> None:
        """Queue a product."""
        if self._first is None:
            self._first = instruction
        chain = self._chain_of(product)
        if chain is None:
            chain = Chain(product.A, product.B, product.C, product.D, product.kind)
            self._chains.append(chain)
        else:
            del self._by_result[product.C]
            chain.A += product.A
            chain.B += product.B
            chain.D = product.D
        self._by_result[product.D] = chain
        self._written.update(product.D)
        self._read.update(product.A, product.B, product.C)

    def flush(self) -> Iterator[TensorGroup]:
        """Groups of chains that share their A fragments, in the order of their first product."""
        groups: dict[tuple[tuple[str, ...], tuple[str, str]], list[Chain]] = {}
        for chain in self._chains:
            groups.setdefault((chain.A, chain.kind), []).append(chain)
        first = self._first
        self._first = None
        self._clear()
        if first is not None:
            for chains in groups.values():
                yield TensorGroup(chains, first)

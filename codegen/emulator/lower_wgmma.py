"""Lower wgmma: products of a warpgroup, their groups and waits."""

from __future__ import annotations

from collections.abc import Callable

from .emitter import Emitter
from .instructions import Instruction
from .tensor_shapes import group_product_of


def lower_wgmma(e: Emitter, i: Instruction) -> None:
    """wgmma.mma_async, .fence, .commit_group and .wait_group."""
    kind = i.modifiers[0]
    if i.modifiers[1:3] != ("sync", "aligned"):
        e.unknown(i, "this form")
    if kind == "mma_async":
        _lower_product(e, i)
    elif kind == "commit_group":
        e.emit(f"commit_products(W, {e.mask}, {i.index})")
    elif kind == "wait_group":
        e.emit(f"wait_for_products(W, {e.known(i.operands[0])}, {e.mask}, {i.index})")
    elif kind != "fence":  # registers are in order here; that a fence is there is a matter of the text (see fences.py)
        e.unknown(i, "this form")


def _lower_product(e: Emitter, i: Instruction) -> None:
    product = group_product_of(i)
    for name in (*product.D, *product.A):
        e.register(name, "u4")
    a = e.source(product.a_descriptor, "b64") if product.a_descriptor else "None"
    b, adds = e.source(product.b_descriptor, "b64"), e.source(product.adds, "pred")
    operands = f"Operands({product.D}, {product.A}, {product.transposed}, {product.kind!r})"
    e.emit(f"issue_product(W, {operands}, {a}, {b}, {adds}, {e.mask}, {i.index})")


LOWER: dict[str, Callable[[Emitter, Instruction], None]] = {"wgmma": lower_wgmma}

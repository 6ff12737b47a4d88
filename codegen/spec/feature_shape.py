"""Estimate the registers that features take, and say which tiles do not go with them."""

from __future__ import annotations

from ..score_mod import parse
from ..score_mod.tree import Read, names_in, walk
from .backward_shape import slice_columns
from .features import Features, ScoreMod
from .kernel import KernelSpec
from .tile import (
    ForwardTile,
    KeyBlockTile,
    QueryBlockTile,
    WarpgroupKeyTile,
    WarpgroupQueryTile,
    WarpgroupTile,
    WarpgroupWideTile,
)

# A thread's registers beside those of a plain kernel, for each 16 rows or keys that its warp owns: rounded up from
# kernels of d = 64 with small tiles, in which nothing is spilled.
_OF_RANDOM_NUMBERS = 20
_OF_READS = 26  # tables whose entry is another for each pair: addresses, and entries on their way
_OF_A_FUNCTION = 12  # of the score


def feature_registers(spec: KernelSpec) -> int:
    """Registers of a thread, roughly, that the features of `spec` take; 0 without any.

    A default tile leaves them free if it can; ptxas may do with fewer, so that a tile is legal without them.
    """
    features, blocks = spec.features, _blocks(spec)
    if features.plain:
        return 0
    need = 0
    if features.dropout:
        need += blocks * _OF_RANDOM_NUMBERS
        if isinstance(spec.tile, KeyBlockTile | QueryBlockTile) and not spec.tile.weave:
            need += blocks * slice_columns(spec.tile) // 4  # P is needed until there is dP: it carries what is dropped
    mod = features.score_mod
    if mod:
        need += blocks * max(_OF_READS if reads_pairs(mod) else 0, 0 if parse(mod.text).additive else _OF_A_FUNCTION)
        if not isinstance(spec.tile, ForwardTile) and keeps_a_number(mod):
            need += blocks * slice_columns(spec.tile) // 2  # type: ignore[arg-type]
    return need


def warpgroup_feature_registers(spec: KernelSpec) -> int:
    """The same for a thread of two warpgroups that compute: what sums and scores must leave of it, or ptxas spills.

    Read off kernels of d = 64, 128 and 256.
    """
    features, tile = spec.features, spec.tile
    if isinstance(tile, WarpgroupKeyTile):
        return _in_backward(spec, tile.Br, of_random_numbers=40)
    if isinstance(tile, WarpgroupQueryTile):
        return _in_backward(spec, tile.Bc, of_random_numbers=30)
    if isinstance(tile, WarpgroupWideTile):
        return _in_backward(spec, tile.Bc // tile.consumers, of_random_numbers=40)
    mod, need = features.score_mod, 0
    if features.dropout:
        need += 30 if halves_known(spec) else 52
    if mod:
        need += (30 if reads_pairs(mod) else 0) + (0 if parse(mod.text).additive else 6)
    return need


def _in_backward(spec: KernelSpec, columns: int, of_random_numbers: int) -> int:
    """Of a tile of `columns` columns of scores, half as many in a thread: a number for each, or what it is made of."""
    features, mod = spec.features, spec.features.score_mod
    need = of_random_numbers if features.dropout else 0
    if mod:
        need += columns // 2
        need += columns // 2 if _slope_is_another_number(mod) else 0
        need += columns // 2 if keeps_scores(mod) else 0
        need += columns // 4 * (2 if features.dropout else 1) if mod.grads else 0
    return need


def _slope_is_another_number(mod: ScoreMod) -> bool:
    """Whether the compiler is left with a number for each score beside the one that is kept, or that a table gives."""
    formula = parse(mod.text)
    if formula.additive:
        return False
    return reads_pairs(mod) if keeps_a_number(mod) else formula.slope.depends_on("i", "j")


def _blocks(spec: KernelSpec) -> int:
    """Of 16 rows or keys that a warp owns."""
    tile = spec.tile
    if isinstance(tile, KeyBlockTile):
        return max(1, tile.Bc * tile.row_split // tile.warps // 16)
    return max(1, tile.Br // tile.warps // 16) if isinstance(tile, ForwardTile | QueryBlockTile) else 1


def halves_known(spec: KernelSpec) -> bool:
    """Whether each block of 16 keys that a warp treats is known to be the first or the second half of 32 keys.

    Both halves take their random bits from one draw: where they are known to be neighbours, it is made once.
    """
    tile = spec.tile
    if isinstance(tile, ForwardTile | WarpgroupTile):
        return tile.Bc % 32 == 0
    if isinstance(tile, QueryBlockTile):
        return tile.Bc % 32 == 0 and slice_columns(tile) % 32 == 0
    return isinstance(tile, KeyBlockTile) and tile.Bc * tile.row_split // tile.warps % 32 == 0


def why_not_cheap(features: Features) -> str | None:
    """The feature for which a tile must leave registers free that a plain kernel would use; None if there is none."""
    return "dropout" if features.dropout else "score_mod" if features.score_mod else None


def reads_pairs(mod: ScoreMod) -> bool:
    """Whether it reads a table whose entry depends on the query or the key."""
    reads = (node for node in walk(parse(mod.text).tree) if isinstance(node, Read))
    return any(names_in(index) & {"i", "j"} for read in reads for index in read.index)


def keeps_a_number(mod: ScoreMod) -> bool:
    """Whether the backward keeps a number for each score: its slope, or itself for the gradients of tables."""
    formula = parse(mod.text)
    return keeps_scores(mod) or (not formula.additive and formula.slope.depends_on("score"))


def keeps_scores(mod: ScoreMod) -> bool:
    """Whether the gradient of a table depends on the score, which the exponential has overwritten by then."""
    wanted = {table.name for table in mod.grads}
    if not wanted:  # then nothing has to be differentiated
        return False
    return any(g.tensor in wanted and g.derivative.depends_on("score") for g in parse(mod.text).gradients)


def why_bad_with_features(spec: KernelSpec) -> str | None:
    """The rule that a tile breaks in a kernel with features, as a sentence; None if it breaks none."""
    tile = spec.tile
    if not isinstance(tile, ForwardTile):
        return None
    if tile.packed and not (spec.plain and spec.d == spec.dv):
        return "packed=1: heads are packed in plain and causal kernels with d = dv alone. Leave packed=0."
    if tile.ascending and spec.features.masked:
        return "ascending=1: with a window or padding the walk over the keys goes down. Leave ascending=0."
    return None

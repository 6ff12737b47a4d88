"""Turn the features of a call into what an op takes: their tensors as a list, and a text that says all the rest.

The text is made while a caller's arguments are checked, and read inside the op, where it names each tensor as the
kernels do: cu_q, cu_k, k_lens, sinks, rng, and table_NAME for each that score_mod reads.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, SupportsIndex, cast

import torch
from torch import Tensor

from ..errors import BadProblem, UsageError
from ..run import keep_below
from ..score_mod import ALIBI, MAX_RANK, compose, softcap, table_name
from ..spec.features import ScoreMod, Table, TableDtype, check_anchor
from .added import Added
from .inputs import check_tensor
from .scores import wide_dtype

if TYPE_CHECKING:
    from .tiled import Gradients

TABLE = table_name("")
TABLE_DTYPES: dict[torch.dtype, TableDtype] = {torch.float16: "fp16", torch.bfloat16: "bf16"}  # others: float32
SLOPES, BIAS = "alibi_slopes", "additive_bias"  # tables of alibi_slopes and bias, and of nothing else
MAX_COUNTED = 2**24  # rows or keys that score_mod can tell apart as numbers: float32 counts no further
MAX_SEED = 2**63 - 1
STEP = 128  # rows; about those of a block
UNBOUNDED = -1  # a side of the window, as flash-attn says it


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of a call that its features' tensors have to agree with."""

    B: int
    Hq: int
    Nq: int  # of packed sequences, those of the longest
    Nk: int


def gathered(
    q: Tensor, sizes: Sizes, lengths: Mapping[str, Tensor], *, anchor: str, softcap: float | None,
    alibi_slopes: Tensor | None, bias: Tensor | None, sinks: Tensor | None, dropout_p: float, score_mod: str | None,
    tables: Mapping[str, Tensor] | None, rng: Tensor | None,
) -> tuple[list[Tensor], str]:  # fmt: skip
    """The tensors of the features, those of `lengths` first, and the text that goes with them.

    Raises TypeError or a ValueError (UsageError) that names the argument, what it needs and what it is.
    """
    check_anchor(anchor)
    B, Hq = sizes.B, sizes.Hq
    of_tables: dict[str, Tensor] = {}
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, q, shapes={"[Hq]": (Hq,), "[B, Hq]": (B, Hq)})
        of_tables[SLOPES] = alibi_slopes
    if bias is not None:
        _check_bias(bias, q, sizes)
        of_tables[BIAS] = bias
    of_tables.update(_checked_tables(tables or {}, q))
    if (alibi_slopes is not None or score_mod) and max(sizes.Nq, sizes.Nk) > MAX_COUNTED:
        raise BadProblem(
            f"Nq={sizes.Nq}, Nk={sizes.Nk}: score_mod and alibi_slopes compute with rows and keys in float32, which "
            f"counts to {MAX_COUNTED}. Split the sequence, or leave them out."
        )
    tensors = dict(lengths)
    if sinks is not None:
        check_tensor("sinks", sinks, q, shapes={"[Hq]": (Hq,)})
        tensors["sinks"] = sinks.to(wide_dtype(q.dtype))
    if not 0 <= dropout_p < 1:
        raise BadProblem(f"dropout_p={dropout_p}: a share of the weights, 0 or more and less than 1.")
    if dropout_p > 0:
        if rng is None:
            rng = torch.randint(MAX_SEED, (2,), dtype=torch.int64, device=q.device)
        check_tensor("rng", rng, q, dtypes=(torch.int64,), shapes={"[2], seed and offset": (2,)})
        tensors["rng"] = rng
    tensors |= {f"{TABLE}{name}": of_tables[name] for name in sorted(of_tables)}
    ranks = tuple((name, table.dim()) for name, table in of_tables.items())
    cap = None if softcap is None else softcap.__float__()  # torch.compile takes this for a constant, float() not
    text = spelled(anchor == "top-left", cap, score_mod, ranks, tuple(tensors))
    return list(tensors.values()), text


def bounds_of(window: object) -> list[int]:
    """(left, right) of a window, UNBOUNDED for a side without a bound. Raises UsageError for anything else."""
    if window is None:
        return [UNBOUNDED, UNBOUNDED]
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise UsageError(
            f"window={window!r}: it is (left, right), numbers of keys seen before and behind a query's own; None or -1 "
            "for all of them."
        )
    return [_bound(window, side) for side in window]


def _bound(window: Sequence[object], side: object) -> int:
    if side is None:
        return UNBOUNDED
    keys = side if isinstance(side, int) else operator.index(cast("SupportsIndex", side))
    if keys < UNBOUNDED:
        raise BadProblem(f"window={window}: a side is 0 keys or more, or None or -1 for all of them.")
    return keys


def _check_bias(bias: Tensor, q: Tensor, sizes: Sizes) -> None:
    """Raise unless it broadcasts to [B, Hq, Nq, Nk]."""
    check_tensor("bias", bias, q)
    whole = (sizes.B, sizes.Hq, sizes.Nq, sizes.Nk)
    fits = 1 <= bias.dim() <= 4 and all(
        own in (1, full) for own, full in zip(bias.shape, whole[4 - bias.dim() :], strict=True)
    )
    if not fits:
        raise UsageError(
            f"bias has shape {tuple(bias.shape)}, which does not broadcast to [B, Hq, Nq, Nk] = {whole}; each of its 1 "
            "to 4 dimensions is 1 or that of the scores, the last ones first."
        )


def _checked_tables(tables: Mapping[str, Tensor], q: Tensor) -> Mapping[str, Tensor]:
    for name, table in tables.items():
        shown = f"tables[{name!r}]"
        check_tensor(shown, table, q)
        if name in (SLOPES, BIAS):
            raise UsageError(f"{shown}: the name is that of an argument of its own; give the tensor another.")
        if not 1 <= table.dim() <= MAX_RANK or table.numel() == 0:
            raise UsageError(
                f"{shown} has shape {tuple(table.shape)}: 1 to {MAX_RANK} dimensions of 1 or more are needed."
            )
    return tables


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def spelled(
    top_left: bool, cap: float | None, score_mod: str | None, ranks: tuple[tuple[str, int], ...], names: tuple[str, ...]
) -> str:
    """What is asked for beside the tensors `names`, and beside numbers, as a text; `ranks` are those of the tables.

    Raises BadScoreMod, with a caret, for a formula, and UsageError for tables that it does not read as they are.
    """
    if score_mod is not None and not isinstance(score_mod, str):
        raise TypeError(
            f"score_mod is {type(score_mod).__name__}; it is written as a text, such as 'score - 0.5 * abs(i - j)'."
        )
    return json.dumps([top_left, _formula(cap, score_mod, ranks), names])


@lru_cache(maxsize=1024)
def _formula(cap: float | None, score_mod: str | None, ranks: tuple[tuple[str, int], ...]) -> str:
    """Softcap, ALiBi, bias and the user's own, one after the other, as one formula; empty if there is none."""
    dims = dict(ranks)
    texts = [] if cap is None else [softcap(cap)]
    if SLOPES in dims:
        texts.append(ALIBI.replace("slope[h]", f"{SLOPES}[h]" if dims[SLOPES] == 1 else f"{SLOPES}[b, h]"))
    if BIAS in dims:
        texts.append(f"score + {BIAS}[{', '.join('bhij'[4 - dims[BIAS] :])}]")
    texts += [] if score_mod is None else [score_mod]
    formula = compose(texts)
    reads = formula.tensors
    for name, read in reads.items():
        if name not in dims:
            given = ", ".join(dims) or "none"
            raise UsageError(f"score_mod reads {name}, which is not in tables; given: {given}.")
        if dims[name] != read:
            raise UsageError(f"score_mod reads {name} with {read} indexes, and tables[{name!r}] has {dims[name]}.")
    for name in dims:
        if name not in reads:
            raise UsageError(f"tables[{name!r}] is not read by score_mod; leave it out.")
    return formula.text if texts else ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `spelled` says."""

    top_left: bool
    formula: str
    names: tuple[str, ...]  # of the tensors, in the order of the list


@lru_cache(maxsize=4096)
def _asked(text: str) -> _Asked:
    top_left, formula, names = json.loads(text)
    return _Asked(top_left, formula, tuple(names))


def _laid_out(longest: int) -> int:
    """Rows that blocks are laid out for, so that batches whose longest sequences differ a little are launched alike."""
    return longest if longest <= STEP else -(-longest // STEP) * STEP


def added_of(
    text: str, extras: Sequence[Tensor], window: Sequence[int], longest: Sequence[int], dropout_p: float,
    asking: Sequence[bool] = (),
) -> Added:  # fmt: skip
    """What an op is told of features. `asking`: which of the tensors' gradients are asked for."""
    asked = _asked(text)
    tensors = dict(zip(asked.names, extras, strict=True))
    tables = {name.removeprefix(TABLE): x for name, x in tensors.items() if name.startswith(TABLE)}
    wanted = {name for name, wants in zip(asked.names, asking, strict=False) if wants}
    if not all(x.numel() for x in tables.values()):  # of a bias without entries: there are no scores then
        asked, tables = replace(asked, formula=""), {}
    kinds = tuple((name, x.dtype, x.dim(), f"{TABLE}{name}" in wanted) for name, x in tables.items())
    left, right = (None if side == UNBOUNDED else side for side in window)
    max_q, max_k = map(_laid_out, longest)
    return Added(
        window=(left, right), top_left=asked.top_left, max_q=max_q, max_k=max_k, keep_below=keep_below(dropout_p),
        score_mod=_score_mod(asked.formula, kinds) if asked.formula else None, tables=tables,
        **{name: x for name, x in tensors.items() if not name.startswith(TABLE)},
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _score_mod(formula: str, kinds: tuple[tuple[str, torch.dtype, int, bool], ...]) -> ScoreMod:
    tables = (
        Table(name=name, dtype=TABLE_DTYPES.get(dtype, "fp32"), rank=rank, grad=grad)
        for name, dtype, rank, grad in kinds
    )
    return ScoreMod(text=formula, tables=tuple(tables))


def gradients_of(text: str, extras: Sequence[Tensor], needs: Sequence[bool], found: Gradients) -> list[Tensor | None]:
    """The gradients of an op's list of tensors, in their dtypes; None for those that `needs` does not ask for."""
    made = {f"{TABLE}{name}": x for name, x in found.dtables.items()} | {"sinks": found.dsinks}
    gradients: list[Tensor | None] = []
    for name, x, need in zip(_asked(text).names, extras, needs, strict=True):
        gradient = made.get(name)
        if need and gradient is None:  # nothing was computed, for there was nothing to compute
            gradient = x.new_zeros(x.shape)
        gradients.append(gradient.to(x.dtype).contiguous() if need and gradient is not None else None)
    return gradients


def check_lengths(name: str, lengths: Tensor, q: Tensor, B: int, Nk: int) -> None:
    """Raise unless it is [B], int32, and (looked at on the CPU alone: a GPU would have to wait) each is 0 to Nk."""
    check_tensor(name, lengths, q, dtypes=(torch.int32,), shapes={"[B]": (B,)})
    if _readable(lengths) and bool(((lengths < 0) | (lengths > Nk)).any()):
        raise UsageError(f"{name} is {lengths.tolist()}: each is 0 or more and at most Nk={Nk}.")


def check_packed(which: str, cu: Tensor, longest: int, q: Tensor, rows: int) -> None:
    """Raise unless cu_seqlens_q, or _k, is [B + 1], int32, and the longest sequence a number of rows.

    On the CPU, see above, also unless it rises from 0 to `rows` by steps of at most `longest`.
    """
    name = f"cu_seqlens_{which}"
    check_tensor(name, cu, q, dtypes=(torch.int32,))
    if cu.dim() != 1 or cu.shape[0] == 0:
        raise UsageError(
            f"{name} has shape {tuple(cu.shape)}: [B + 1] is needed, where each sequence begins and the last ends."
        )
    if longest < 0:
        raise UsageError(f"max_seqlen_{which}={longest}: the rows of the longest sequence, 0 or more.")
    if not _readable(cu):
        return
    steps = cu.diff()
    if int(cu[0]) != 0 or int(cu[-1]) != rows or bool((steps < 0).any()):
        raise UsageError(
            f"{name} is {_short(cu)}: it begins with 0, never falls, and ends with the {rows} rows that there are."
        )
    if steps.numel() and int(steps.max()) > longest:
        raise UsageError(f"max_seqlen_{which}={longest}, and {name} has a sequence of {int(steps.max())} rows.")


def _readable(x: Tensor) -> bool:
    """Whether its numbers can be looked at for nothing."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.device.type == "cpu"


def _short(x: Tensor) -> str:
    values = cast("list[int]", x.tolist())
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"

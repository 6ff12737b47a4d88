"""Ask for what attention has beyond the plain and the causal one, in the same words at every command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import Annotated, Any, get_args

import typer

from ..errors import UsageError
from ..spec.features import ScoreMod, TableDtype, Window


class Anchor(str, Enum):
    bottom_right = "bottom-right"
    top_left = "top-left"


class Lengths(str, Enum):
    uniform = "uniform"
    padded = "padded"
    packed = "packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureOptions:
    """Each field is an option of every command that `takes_features`."""

    dv: Annotated[int | None, typer.Option("--dv", help="Head dimension of V and O. Default: that of Q and K.")] = None
    scale: Annotated[float | None, typer.Option("--scale", help="Factor of Q K^T. Default: 1/sqrt(d).")] = None
    window: Annotated[
        str, typer.Option("--window", help="L,R: keys seen before and behind a query's own; either may be left out.")
    ] = ""
    anchor: Annotated[
        Anchor, typer.Option("--anchor", help="The key of query i itself: i + Nk - Nq (bottom-right) or i (top-left).")
    ] = Anchor.bottom_right
    lengths: Annotated[
        Lengths, typer.Option("--lengths", help="padded: each sequence has keys of its own number; packed: rows, too.")
    ] = Lengths.uniform
    score_mod: Annotated[
        str, typer.Option("--score-mod", help="A formula in place of the score: 'score - slope[h] * (i - j)'.")
    ] = ""
    tables: Annotated[
        str, typer.Option("--tables", help="Dtypes and gradients of its tensors: slope:bf16:grad,bias:fp16. Else fp32.")
    ] = ""
    sinks: Annotated[bool, typer.Option("--sinks", help="One more logit for each head, which has no value.")] = False
    dropout: Annotated[float, typer.Option("--dropout", help="Share of the weights that is dropped.")] = 0.0

    def of_problem(self) -> dict[str, Any]:
        """The fields of a Problem that they say. Raises UsageError, and BadScoreMod for a bad formula."""
        return {
            "dv": self.dv, "scale": self.scale, "window": _window(self.window), "anchor": self.anchor.value,
            "lengths": self.lengths.value, "score_mod": _score_mod(self.score_mod, self.tables),
            "sinks": self.sinks, "dropout": self.dropout,
        }  # fmt: skip


NO_FEATURES = FeatureOptions()


def takes_features(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of FeatureOptions in the place of its parameter `features`."""
    options = inspect.signature(FeatureOptions, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    others = [p.replace(kind=p.KEYWORD_ONLY) for name, p in signature.parameters.items() if name != "features"]
    before = list(signature.parameters).index("features")
    parameters = [*others[:before], *options.values(), *others[before:]]

    @wraps(command)
    def with_options(**given: Any) -> None:
        command(features=FeatureOptions(**{name: given.pop(name) for name in options}), **given)

    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def _window(text: str) -> Window:
    """'128,0' as (128, 0), '128,' as (128, None)."""
    sides = [side.strip() for side in text.split(",")] if text else ["", ""]
    if len(sides) != 2 or not all(side.isdecimal() or not side for side in sides):
        raise UsageError(f"--window {text}: two numbers of keys, L,R, of which either may be left out: 128,0 or 128,.")
    left, right = (int(side) if side else None for side in sides)
    return left, right


def _score_mod(text: str, tables: str) -> ScoreMod | None:
    """The formula in its one spelling, with the tensors that it reads."""
    said = dict(_table(each.strip()) for each in tables.split(",") if each.strip())
    mod = ScoreMod.of(text, lambda name: said.get(name, {})) if text else None
    unread = said.keys() - {table.name for table in mod.tables} if mod else said.keys()
    if unread:
        raise UsageError(f"--tables {tables}: --score-mod reads no {' and no '.join(sorted(unread))}.")
    return mod


def _table(text: str) -> tuple[str, dict[str, Any]]:
    """'slope:bf16:grad' as a name and fields of a Table."""
    name, *words = text.split(":")
    dtypes = [word for word in words if word in get_args(TableDtype)]
    if len(dtypes) > 1 or set(words) - {*dtypes, "grad"}:
        raise UsageError(f"--tables {text}: NAME, then :{'|'.join(get_args(TableDtype))} and :grad if you like.")
    return name, {"grad": "grad" in words, **({"dtype": dtypes[0]} if dtypes else {})}

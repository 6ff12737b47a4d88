"""Lay an explanation out for people: the files, the tiles beside each other, what bounds them, the search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..spec.gpu import find_gpu
from ..spec.tile import tile_text
from .console import print_lines, table
from .show_predict import how_sure

if TYPE_CHECKING:
    from ..explain import Contender, Explanation


def explanation(found: Explanation) -> None:
    """Everything but the inputs. Times of the record and predictions for the lengths asked for have a column each."""
    from ..forms import pass_of

    looked_into = table("rung", "file", "found")
    for step in found.looked:
        looked_into.add_row(step.rung, str(step.path), step.why)
    if found.looked:
        print_lines(looked_into)
    print_lines(f"served by {found.loaded.rung}: {tile_text(found.loaded.tile)}", _evidence(found))
    print_lines(f"{pass_of(found.kernel)} form: {found.form.reason}")
    print_lines(_contenders(found))
    print_lines(*(f"{' and '.join(c.roles)}: {_bound(c)}" for c in found.contenders))
    predicted = next((c.prediction for c in found.contenders if c.prediction), None)
    print_lines(*_differences(found), how_sure(find_gpu(predicted.gpu) if predicted else None))
    _search(found)


def _evidence(found: Explanation) -> str:
    record, taken = found.record, found.loaded.record
    if taken and not record:
        return f"evidence: none of its own; {found.kernel} takes the tile of {taken.kernel}"
    if not record:
        return "evidence: none, nothing was timed"
    known, heads = record.evidence, f"{record.Hq} heads over {record.Hk}"
    lengths = f"B={record.B}, {heads}, Nq={record.Nq}, Nk={record.Nk}"
    return (
        f"evidence of the record: {known.kind} by {known.by} for {lengths}: "
        f"{known.time_ms:.3f} ms, {known.tflops:.1f} TFLOP/s"
    )


def _contenders(found: Explanation) -> object:
    recorded = (f"{found.record.evidence.kind} ms (record)",) if found.record else ()
    numbers = (*recorded, "predicted ms (now)", "blocks/SM", "spills in loop", "tensor", "shared")
    lines = table("", "tile", *numbers, right=numbers)
    for contender in found.contenders:
        ms = (f"{contender.recorded_ms:.3f}" if contender.recorded_ms else "-",) if recorded else ()
        lines.add_row(", ".join(contender.roles), tile_text(contender.tile), *ms, *_predicted(contender))
    return lines


def _predicted(contender: Contender) -> tuple[str, ...]:
    """Its milliseconds, blocks, spills and the share of the loop in which two pipes are busy."""
    p = contender.prediction
    if p is None:
        return ("-",) * 5
    shares = (f"{p.pipes[pipe]:.0%}" if pipe in p.pipes else "-" for pipe in ("tensor", "shared"))
    return (f"{1e3 * p.seconds:.3f}", str(p.blocks_per_sm), str(p.spills_in_loop), *shares)


def _bound(contender: Contender) -> str:
    return contender.prediction.bound_by if contender.prediction else f"not predicted: {contender.failure}"


def _differences(found: Explanation) -> list[str]:
    """Of the predicted times; those that the model cannot tell apart are called equal."""
    from ..predict import NOISE

    ratios = found.against_served()
    equal = [role for role, ratio in ratios.items() if not ratio]
    words = [
        f"{role} {abs(ratio):.0%} {'slower' if ratio > 0 else 'faster'}" for role, ratio in ratios.items() if ratio
    ]
    if equal:
        words.append(f"{' and '.join(equal)} equal within the model's noise of {NOISE:.0%}")
    return [f"predicted now, beside what serves: {'; '.join(words)}"] if words else []


def _search(found: Explanation) -> None:
    """The trials that brought something better."""
    if not found.record:
        return
    search, evidence = found.search, found.record.evidence
    if not search:
        return print_lines(f"search: {evidence.trials} trials; the record keeps no more of them")
    lines = table("trial", f"best {evidence.kind} ms", right=("trial", f"best {evidence.kind} ms"))
    for trial, ms in search.curve:
        lines.add_row(str(trial), f"{ms:.3f}")
    pruned = f", {search.pruned} turned down by the model" if search.pruned else ""
    when = "; times of the trials, before the best met again" if evidence.kind == "measured" else ""
    print_lines(f"search: {evidence.trials} trials, {search.failed} failed{pruned}, seed {search.seed}{when}", lines)

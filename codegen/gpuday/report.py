"""Write the report of a GPU day for people: one Markdown file made from the state alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from ..whole_file import write_whole

State = dict[str, Any]
Found = Any


def write_markdown(folder: Path, state: State) -> None:
    """report.md beside report.json; old file or new file."""
    write_whole(folder / "report.md", markdown(state).encode())


def markdown(state: State) -> str:
    """Every part's status, then what each found. All times in it were measured on the GPU that it names."""
    parts: dict[str, State] = state.get("parts", {})
    lines = ["# A day on a GPU", "", *_parts(parts)]
    for name, part in parts.items():
        section = SECTIONS.get(name.split()[0])
        if section and part.get("found"):
            lines += ["", f"## {name}", "", *section(part["found"])]
    return "\n".join(lines) + "\n"


def _parts(parts: dict[str, State]) -> Iterable[str]:
    rows = [(name, p["status"], f"{p['seconds']:.0f}", p["reason"]) for name, p in parts.items()]
    return _table(("part", "status", "s", "why"), rows)


def _environment(found: Found) -> Iterable[str]:
    yield from _table(("", ""), [(name, _flat(value)) for name, value in found.items()])


def _tests(found: Found) -> Iterable[str]:
    yield f"{found['passed']} passed, {len(found['failed'])} failed, {len(found['skipped'])} skipped."
    yield from (f"- FAILED {x['test']}: {x['why']}" for x in found["failed"])
    yield from (f"- skipped {x['test']}: {x['why']}" for x in found["skipped"])


def _rates(found: Found) -> Iterable[str]:
    rows = [
        (r["benchmark"] + (f", {r['data']} data" if "data" in r else ""), str(r["warps"]), str(r["sms"]),
         f"{r['cycles']:.2f}" if "cycles" in r else "-", f"{r['rate']:.3f}" if "rate" in r else "-", r["unit"])
        for r in found
    ]  # fmt: skip
    yield from _table(("benchmark", "warps", "SMs", "cycles a step", "rate", "unit"), rows)
    yield ""
    yield from (f"- {r['benchmark']}: {r['failure']}" for r in found if "failure" in r)
    yield from (
        f"- {r['benchmark']}: two warps of a sub-partition are {r['gap']:.2f} of a stamp's time apart, "
        f"the younger ahead in {r['younger_first']:.0%}" for r in found if "gap" in r
    )  # fmt: skip


def _tune(found: Found) -> Iterable[str]:
    rows = [
        (r["kernel"], _flat(r["tile"]), f"{r['evidence']['time_ms']:.4f}", f"{r['evidence']['tflops']:.0f}",
         r["evidence"]["kind"], str(r["evidence"]["trials"]))
        for r in found
    ]  # fmt: skip
    yield from _table(("kernel", "tile", "ms", "TFLOP/s", "evidence", "tried"), rows)


def _bench(found: Found) -> Iterable[str]:
    for which, d, causal in dict.fromkeys((r["which"], r["d"], r["causal"]) for r in found):
        part = [r for r in found if (r["which"], r["d"], r["causal"]) == (which, d, causal)]
        names = list(dict.fromkeys(r["backend"] for r in part))
        at = {(r["n"], r["backend"]): r for r in part}
        lengths = dict.fromkeys(r["n"] for r in part)
        yield f"{which} {part[0]['dtype']} d={d}{' causal' if causal else ''}, measured: TFLOP/s and % of the peak"
        yield ""
        yield from _table(("N", *names), [(str(n), *(_speed(at.get((n, name))) for name in names)) for n in lengths])
        yield ""
    yield from dict.fromkeys(f"- {r['backend']}, N={r['n']}: {r['note']}" for r in found if r["note"])


def _tiles(found: Found) -> Iterable[str]:
    timed = [line for line in found if "seconds" in line]
    yield f"{len(timed)} tiles measured, {len(found) - len(timed)} not; every one is in report.json."
    yield ""
    rows = []
    for d, causal in dict.fromkeys((line["problem"]["d"], line["problem"]["causal"]) for line in timed):
        part = [x for x in timed if (x["problem"]["d"], x["problem"]["causal"]) == (d, causal)]
        best = min(part, key=lambda line: line["seconds"])
        middle = median(line["seconds"] for line in part)
        problem = f"d={d}{' causal' if causal else ''}"
        rows.append((problem, str(len(part)), f"{best['seconds'] * 1e3:.3f}", best["key"], f"{middle * 1e3:.3f}"))
    yield from _table(("problem", "tiles", "best ms", "best", "median ms"), rows)


def _warpgroups(found: Found) -> Iterable[str]:
    def of(line: State) -> tuple[str, int, bool]:
        return line["which"], line["problem"]["d"], line["problem"]["causal"]

    for which, d, causal in dict.fromkeys(map(of, found)):
        part = [x for x in found if of(x) == (which, d, causal)]
        yield f"{which} bf16 d={d}{' causal' if causal else ''} N={part[0]['problem']['Nq']}, measured, in this order"
        yield ""
        rows = [
            (_flat(x["tile"]) if "tile" in x else x["key"], f"{x['tflops']:.1f}" if "tflops" in x else x["failure"])
            for x in part
        ]
        yield from _table(("tile", "TFLOP/s"), rows)
        yield ""


def _memory(found: Found) -> Iterable[str]:
    rows = [
        (m["way"], str(m["n"]), m["failed"] or f"{m['peak'] / 1e9:.3f}", f"{m['kept'] / 1e9:.3f}",
         f"{m['computed']['P' if m['way'] == 'standard' else 'written'] / 1e9:.3f}")
        for m in found
    ]  # fmt: skip
    yield from _table(("way", "N", "peak GB, measured", "kept GB, measured", "P, or O + m + l, GB, computed"), rows)


def _sanitizer(found: Found) -> Iterable[str]:
    yield from _table(("tool", "errors"), [(r["tool"], str(r["errors"])) for r in found])


SECTIONS: dict[str, Callable[[Found], Iterable[str]]] = {
    "environment": _environment, "tests": _tests, "rates": _rates, "tune": _tune, "bench": _bench, "flex": _bench,
    "tiles": _tiles, "warpgroups": _warpgroups, "memory": _memory, "sanitizer": _sanitizer,
}  # fmt: skip


def _speed(row: Found) -> str:
    return "-" if not row or row["tflops"] is None else f"{row['tflops']:.1f} ({row['peak_share']:.0%})"


def _flat(value: Found) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterable[str]:
    cells = [list(head), *([cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows)]
    yield "| " + " | ".join(cells[0]) + " |"
    yield "|" + " --- |" * len(cells[0])
    yield from ("| " + " | ".join(row) + " |" for row in cells[1:])

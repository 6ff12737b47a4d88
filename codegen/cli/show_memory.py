"""Lay the memory ledger out for people."""

from __future__ import annotations

from typing import Any

from .console import print_lines, table


def ledger(figures: dict[str, Any]) -> None:
    """The tensors of the problem, what is kept each way, what was counted or measured, what fits each GPU."""
    problem, sizes, kept = figures["problem"], figures["bytes"], figures["kept"]
    B, H, n = problem["B"], problem["Hq"], problem["Nq"]
    print_lines(f"{problem['dtype']} d={problem['d']}, B={B}, {H} heads, N={n}; computed, exact")
    rows = table("", "one head", "all heads and batches", right=("one head", "all heads and batches"))
    one = figures["one_head"]
    rows.add_row("standard: P, N x N", size(one["P"]), size(sizes["P"]))
    rows.add_row("ours: m and l", size(one["statistics"]), size(sizes["statistics"]))
    rows.add_row("either: O", size(one["O"]), size(sizes["O"]))
    rows.add_row("kept for the backward, standard", "", size(kept["standard"]))
    rows.add_row("kept for the backward, ours", "", size(kept["flash"]))
    print_lines(rows, "kept: q, k, v and O, and P or m and l.")
    for c in figures["counted"]:
        wanted = c["computed"]["O"] + c["computed"]["m"] + c["computed"]["l"]
        verdict = "exactly O, m and l" if c["agrees"] else "WRONG: not O, m and l alone"
        print_lines(
            f"counted on the emulator, one head, N={c['n']}: {c['total']} B stored, computed {wanted} B: {verdict}"
        )
    for m in figures["measured"]:
        result = m["failed"] or f"{size(m['peak'])} at the peak of a forward, {size(m['kept'])} kept after it"
        print_lines(f"measured on this GPU, {m['way']}, N={m['n']}: {result}")
    columns = ("longest N, standard", "longest N, ours", "largest batch, standard", "largest batch, ours")
    fits = table("gpu", *columns, right=columns)
    for key, ways in figures["fits"].items():
        numbers = (ways[way][what] for what in ("longest_n", "largest_batch") for way in ("standard", "flash"))
        fits.add_row(key, *map(str, numbers))
    print_lines(fits, "fits: one layer's kept tensors in all of the memory; computed, an upper limit.")


def size(count: int) -> str:
    """Bytes as people read them: GB and MB are powers of ten, KB is 1024 bytes.

    >>> size(2147483648), size(262144)
    ('2.147 GB', '256 KB')
    """
    for unit, step in (("GB", 1e9), ("MB", 1e6)):
        if count >= step:
            return f"{count / step:.4g} {unit}"
    return f"{count / 1024:.4g} KB" if count >= 1024 else f"{count} B"

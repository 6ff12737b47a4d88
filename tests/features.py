"""Every feature of attention, and some together, as fields of a Problem: what several tests run through."""

from __future__ import annotations

from typing import Any

from flashsmith.spec.features import ScoreMod, Table

SLOPE, BIAS = Table(name="slope", grad=True), Table(name="bias", rank=4, grad=True)
ALIBI = ScoreMod(text="score - slope[h] * abs(i + Nk - Nq - j)", tables=(SLOPE,))
MODS = {
    "bias": ScoreMod(text="score + bias[b, h, i, j]", tables=(BIAS,)),
    "softcap": ScoreMod(text="2.0 * tanh(score / 2.0)"),
    "mask": ScoreMod(text="score if (i - j) % 3 != 0 or i < 2 else -inf"),
    "table twice": ScoreMod(text="score * w[i // 2] + w[j - i]", tables=(Table(name="w", grad=True),)),
    "capped": ScoreMod(text="9.0 * tanh(score / 9.0) + slope[h] * (j - i)", tables=(SLOPE,)),
    "finite where seen": ScoreMod(text="score + w[h] * sqrt(i + Nk - Nq - j)", tables=(Table(name="w", grad=True),)),
}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "Nk": 15},
    "left": {"causal": True, "window": (5, None)},
    "window": {"window": (9, 4)},
    "a window past the keys": {"window": (2, 1), "Nk": 9},
    "top-left": {"causal": True, "anchor": "top-left"},
    "a window at the top left": {"window": (3, 2), "anchor": "top-left", "Nk": 13},
    "padded": {"lengths": "padded", "causal": True},
    "padded window": {"lengths": "padded", "window": (6, 3)},
    "packed": {"lengths": "packed", "causal": True},
    "packed window": {"lengths": "packed", "window": (4, 2), "anchor": "top-left"},
    "wide values": {"dv": 24},
    "sinks": {"sinks": True, "causal": True, "Nk": 15},
    "dropout": {"dropout": 0.3},
    "packed dropout": {"dropout": 0.3, "lengths": "packed"},
    "alibi": {"score_mod": ALIBI, "causal": True},
    **{name: {"score_mod": mod} for name, mod in MODS.items() if name not in ("capped", "finite where seen")},
    "finite where seen": {"score_mod": MODS["finite where seen"], "causal": True},
    "packed bias": {"score_mod": MODS["bias"], "lengths": "packed", "causal": True},
    "everything": {
        "score_mod": MODS["capped"], "sinks": True, "dropout": 0.3, "lengths": "packed", "window": (7, 5), "dv": 8,
    },
    "everything padded": {
        "score_mod": MODS["capped"], "sinks": True, "dropout": 0.3, "lengths": "padded", "window": (7, 5), "dv": 8,
    },
}  # fmt: skip

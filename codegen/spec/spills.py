"""Remember the default tiles in whose loops ptxas spills registers, so that none of them is a default.

How many registers fit without a spill cannot be computed: near the limit it depends on ptxas' scheduling. The entries
were found by compiling the defaults: `python tools/find_spills.py` writes spills.json anew.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from .kernel import KernelSpec


def spills(spec: KernelSpec) -> bool:
    """Whether ptxas was seen to spill in a loop of this kernel; of what was never compiled, nothing is known."""
    return spill_key(spec) in known_spills()


def spill_key(spec: KernelSpec) -> str:
    """The spec without its dtype: of two 16-bit ones it changes opcodes only."""
    return spec.key if spec.fp32 else spec.key.replace(f"_{spec.dtype}_", "_", 1)


@cache
def known_spills() -> set[str]:
    """The keys in spills.json."""
    return set(json.loads(files(__package__).joinpath("spills.json").read_text()))

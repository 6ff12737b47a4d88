"""Name the study that a search belongs to: what people look for, and a digest of all that its times depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Literal

from ..compile import options_for, version_text
from ..predict import MODEL
from ..render import render
from ..spec.gpu import Gpu
from ..spec.kernel import KernelName, KernelSpec
from ..spec.problem import Problem
from ..spec.tile import Tile

SCHEMA = 1  # of a study's trials; raise it when the meaning of an attribute changes

Kind = Literal["predicted", "measured"]


def study_name(kernel: KernelName, problem: Problem, gpu: Gpu, kind: Kind, space: Iterable[Tile]) -> str:
    """The same for the same search, anywhere; another one as soon as a time could be another.

    The digest covers the text of every tile of the space, and so the space, the templates and what they compute with;
    NVRTC, its options, the problem, the GPU's numbers, the kind of time, and the model's version where it predicts.
    """
    numbers = {name: value for name, value in asdict(gpu).items() if not isinstance(value, str)}
    facts = {
        "schema": SCHEMA, "kernel": kernel, "problem": asdict(problem), "gpu": numbers, "kind": kind,
        "nvrtc": version_text(), "options": options_for(gpu.sm), "model": MODEL if kind == "predicted" else "",
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for tile in space:
        digest.update(f"\0{tile!r}\0".encode())
        digest.update(render(KernelSpec.of(kernel, problem, tile, gpu.sm)).text.encode())
    p = problem
    shape = f"{p.dtype}-d{p.d}{'-causal' if p.causal else ''}-B{p.B}-H{p.Hq}x{p.kv_heads}-N{p.Nq}x{p.keys}"
    return f"{kernel}-{gpu.key}-{shape}-{kind}-{digest.hexdigest()[:12]}"

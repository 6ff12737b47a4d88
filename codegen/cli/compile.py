"""Compile a kernel and report what it needs."""

from __future__ import annotations

from ..spec.gpu import served_gpu
from ..spec.limits import blocks_per_sm
from . import show
from .app import app
from .features import NO_FEATURES, FeatureOptions, takes_features
from .options import CausalOption, DimOption, DtypeOption, GpuOption, JsonOption, Kernel, SourceOption, TileOption
from .output import print_json
from .request import compiled, facts_of, problem_of, source_of, spec_of


@app.command("compile")
@takes_features
def compile_(
    kernel: Kernel,
    gpu: GpuOption = "auto",
    dtype: DtypeOption = "bf16",
    d: DimOption = 128,
    causal: CausalOption = False,
    features: FeatureOptions = NO_FEATURES,
    tile: TileOption = "",
    source: SourceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a kernel: registers, spills, shared memory, blocks per SM, seconds."""
    target, problem = served_gpu(gpu), problem_of(dtype, d, causal, features)
    binary = compiled(source_of(spec_of(kernel, problem, target, tile), source))
    facts = {
        **facts_of(binary.spec),
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "blocks_per_sm": blocks_per_sm(binary.spec, target, binary.registers),
        "seconds": binary.seconds,
        "cached": binary.cached,
    }
    if as_json:
        print_json(facts)
    else:
        show.facts(facts)

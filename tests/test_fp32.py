"""fp32 inputs: three products of TF32 are as near to float64 as plain attention in fp32, with every feature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from flashsmith.check import Verdict, check
from flashsmith.compile import Binary, compile_source
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import BadProblem, NoTunedKernel
from flashsmith.inputs import make_inputs
from flashsmith.load import backward_form, load_pass
from flashsmith.render import Source, render
from flashsmith.run import run_forward
from flashsmith.sass import disassemble
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import FORWARD, KernelName, KernelSpec
from flashsmith.spec.limits import smem_bytes, why_illegal
from flashsmith.spec.problem import Pass, Problem
from flashsmith.spec.tile import KeyBlockTile
from flashsmith.work import tile_flops

from .features import FEATURES

SLACK = 3e-6  # beside twice the error of plain attention, where a check allows 1e-5
TF32_FLOPS = 2048  # of one warp's m16n8k8
KERNELS: tuple[KernelName, ...] = ("forward", "dkdv", "dq")
PASSES = pytest.mark.parametrize("which", ["forward", "backward"])


def problem_of(**fields: object) -> Problem:
    return Problem(**{"dtype": "fp32", "Hq": 4, "Hk": 2, **fields})  # type: ignore[arg-type]


def checked(problem: Problem, which: Pass, gpu: str) -> Verdict:
    """What the defaults make of `problem`, the forward whole."""
    if which == "forward":
        target = find_gpu(gpu)
        binaries = {kernel: binary_of(kernel, problem, gpu) for kernel in FORWARD}
        assert why_illegal(binaries["forward"].spec, target) is None
    else:
        binaries = {kernel: loaded.binary for kernel, loaded in load_pass(problem, which, gpu).items()}
        assert list(binaries) == ["delta", "dkdv", "dq"]
    return check(problem, which, binaries, EmulatedEngine())


def binary_of(kernel: KernelName, problem: Problem, gpu: str, edit: Callable[[str], str] = str) -> Binary:
    # as many query rows as make the tile one for many
    tile = default_tile(kernel, replace(problem, Nq=4096, Nk=4096), find_gpu(gpu))
    source = render(KernelSpec.of(kernel, problem, tile, find_gpu(gpu).sm))
    return compile_source(Source(source.spec, edit(source.text)))


CASES = {
    "d=40 causal": ("a100", {"d": 40, "causal": True, "Nq": 100, "Nk": 133}),
    "d=64": ("h100-sxm", {"d": 64, "Nq": 130, "Nk": 70}),
    "d=72 causal, more queries than keys": ("rtx4090", {"d": 72, "causal": True, "Nq": 97, "Nk": 37}),
    "d=128 causal": ("a100", {"d": 128, "causal": True, "Nq": 65, "Nk": 129}),
    "d=128": ("rtx4090", {"d": 128, "Nq": 37, "Nk": 200}),
    "d=256 causal": ("a100", {"d": 256, "causal": True, "Nq": 70, "Nk": 90, "Hq": 2, "Hk": 1}),
}


@PASSES
@pytest.mark.parametrize("case", CASES)
def test_is_as_near_to_float64_as_plain_fp32(case: str, which: Pass) -> None:
    gpu, fields = CASES[case]
    verdict = checked(problem_of(**fields), which, gpu)
    assert verdict.ok, verdict.reason
    lazy_m = {"m"}  # that of a kernel that rescales lazily may lie below the max
    for line in verdict.lines:
        assert line.tensor in lazy_m or line.error <= 2 * line.plain + SLACK, line


@PASSES
@pytest.mark.parametrize("feature", ["everything", "wide values", "packed window"])
def test_features_hold_in_fp32(feature: str, which: Pass) -> None:
    problem = replace(problem_of(d=32, B=3, Nq=37, Nk=45), **FEATURES[feature])
    verdict = checked(problem, which, "a100")
    assert verdict.ok, verdict.reason


def test_keys_in_parts() -> None:
    """Few queries against many keys: partial, and combine with eight floats a lane."""
    problem = problem_of(d=64, Nq=3, Nk=700, Hq=8)
    loaded = load_pass(problem, "forward", "a100")
    assert list(loaded) == ["partial", "combine"]
    verdict = check(problem, "forward", {k: x.binary for k, x in loaded.items()}, EmulatedEngine(), parts=3)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("tile", [KeyBlockTile(Br=64, Bc=16, warps=4, row_split=4, stages=1),
                                  KeyBlockTile(Br=64, Bc=64, warps=4, slice=32, stages=1, v_regs=True)],
                         ids=["row_split", "v_regs"])  # fmt: skip
def test_other_tiles_of_the_backward(tile: KeyBlockTile) -> None:
    problem = problem_of(d=40, causal=True, Nq=90, Nk=70)
    dkdv = compile_source(render(KernelSpec.of("dkdv", problem, tile, 80)))
    binaries = {kernel: loaded.binary for kernel, loaded in load_pass(problem, "backward", "a100").items()}
    verdict = check(problem, "backward", {**binaries, "dkdv": dkdv}, EmulatedEngine())
    assert verdict.ok, verdict.reason


def test_one_product_instead_of_three_is_found_out() -> None:
    """Big times big alone is what PyTorch calls allow_tf32."""

    def coarse(text: str) -> str:
        lines = text.splitlines()
        kept = [line for line in lines if not ("mma_tf32(D, " in line and "small(" in line)]
        assert len(kept) == len(lines) - 2
        return "\n".join(kept)

    problem = problem_of(d=64, Nq=64, Nk=64)
    verdict = check(problem, "forward", {"forward": binary_of("forward", problem, "a100", coarse)}, EmulatedEngine())
    assert not verdict.ok and "O is off" in verdict.reason


def test_nan_stays_in_its_row() -> None:
    problem = problem_of(d=64, Nq=40, Nk=50, Hq=1, Hk=1)
    inputs, engine = make_inputs(problem), EmulatedEngine()
    q = np.array(inputs.q)
    q[0, 0, 7, 3] = np.nan
    binaries = {"forward": binary_of("forward", problem, "a100")}
    q, k, v = (engine.tensor(x) for x in (q, inputs.k, inputs.v))
    O = engine.read(run_forward(engine, binaries, q, k, v, problem.softmax_scale).O)
    assert np.isnan(O).all(-1)[0, 0].tolist() == np.isnan(O).any(-1)[0, 0].tolist() == [i == 7 for i in range(40)]


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("gpu", ["a100", "rtx4090", "h100-sxm"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_loop_is_tensor_cores_without_a_spill(kernel: KernelName, gpu: str, d: int) -> None:
    """Every product is three HMMA of TF32, and no other; no register goes to memory."""
    binary = binary_of(kernel, Problem(dtype="fp32", d=d), gpu)
    function = disassemble(binary.cubin).functions[kernel]
    products = [x.opcode for x in function.trace.loop if x.base == "HMMA"]
    assert set(products) == {"HMMA.1688.F32.TF32"}
    assert len(products) * TF32_FLOPS * binary.spec.tile.warps == tile_flops(binary.spec)
    assert not any(loop.spill_instructions for loop in function.loops)


def test_every_default_fits() -> None:
    """All head dimensions, down to 99 KB; the backward of the widest does not fit there, and says so."""
    for gpu in map(find_gpu, ("a100", "rtx4090", "h100-sxm")):
        for d in range(8, 257, 8):
            problem = Problem(dtype="fp32", d=d, causal=True)
            for kernel in KERNELS:
                if kernel == "dkdv" and d > 224 and gpu.key == "rtx4090":
                    with pytest.raises(NoTunedKernel, match="of shared memory"):
                        default_tile(kernel, problem, gpu)
                    continue
                spec = KernelSpec.of(kernel, problem, default_tile(kernel, problem, gpu), gpu.sm)
                assert smem_bytes(spec) <= gpu.smem_block_bytes and why_illegal(spec, gpu) is None


def test_the_fused_backward_is_refused_and_split_serves() -> None:
    problem, gpu = Problem(dtype="fp32", d=64), find_gpu("a100")
    spec = KernelSpec.of("fused", problem, KeyBlockTile(Br=64, Bc=64, warps=4), gpu.sm)
    assert "not written for fp32" in (why_illegal(spec, gpu) or "")
    choice = backward_form(problem, gpu)
    assert choice.form == "split" and "not written for fp32" in choice.reason


def test_turing_has_no_tf32() -> None:
    with pytest.raises(BadProblem, match="fp32 needs sm_80"):
        default_tile("forward", Problem(dtype="fp32", d=64), find_gpu("t4"))

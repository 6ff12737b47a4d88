"""Turing, sm_75, without cp.async, bf16 and deep products: what a T4 is served is right, and what ptxas made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product

import flashsmith as fs
import pytest
import torch
from flashsmith.check import check
from flashsmith.cli import main
from flashsmith.compile import Binary, compile_source
from flashsmith.engines.emulated import EmulatedEngine
from flashsmith.errors import BadProblem, NoTunedKernel, UsageError
from flashsmith.load import load_best, pass_form
from flashsmith.predict import error_of
from flashsmith.render import render
from flashsmith.sass import Function, disassemble
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import GPUS
from flashsmith.spec.kernel import FORWARD, FUSED, HOPPER, PARTS, SPLIT, KernelName, KernelSpec
from flashsmith.spec.limits import why_illegal
from flashsmith.spec.problem import Pass, Problem
from flashsmith.spec.tile import ForwardTile, KeyBlockTile
from flashsmith.work import PRODUCTS, tile_flops

T4 = GPUS["t4"]
HMMA_FLOPS = 2048  # of one warp's m16n8k8
OURS = [kernel for kernel in PRODUCTS if kernel not in HOPPER]
MODES: dict[str, tuple[Pass, tuple[KernelName, ...]]] = {
    "forward": ("forward", FORWARD), "fused": ("backward", FUSED), "split": ("backward", SPLIT),
}  # fmt: skip


@cache
def binary_of(kernel: KernelName, d: int, causal: bool) -> Binary:
    problem = Problem(dtype="fp16", d=d, causal=causal)
    return compile_source(render(KernelSpec.of(kernel, problem, default_tile(kernel, problem, T4), T4.sm)))


def function_of(kernel: KernelName, d: int, causal: bool) -> Function:
    return disassemble(binary_of(kernel, d, causal).cubin).functions[kernel]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [40, 64, 72, 128, 192])
def test_matrix(d: int, causal: bool, mode: str) -> None:
    """Heads 4 over 2, tails and both signs of Nk - Nq; within twice the error of plain attention, no race."""
    which, names = MODES[mode]
    kernels = {name: binary_of(name, d, causal) for name in names}
    for Nq, Nk in ((5, 2), (70, 133)):
        problem = Problem(dtype="fp16", d=d, causal=causal, Hq=4, Hk=2, Nq=Nq, Nk=Nk)
        verdict = check(problem, which, kernels, EmulatedEngine(check_races=True))
        assert verdict.ok, f"Nq={Nq} Nk={Nk}: {verdict.reason}"


@pytest.mark.parametrize("mode", ["forward", "split"])
def test_the_widest_heads(mode: str) -> None:
    which, names = MODES[mode]
    problem = Problem(dtype="fp16", d=256, causal=True, Hq=2, Hk=1, Nq=40, Nk=70)
    kernels = {name: binary_of(name, 256, True) for name in names}
    verdict = check(problem, which, kernels, EmulatedEngine(check_races=True))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    "tile",
    [ForwardTile(Br=64, Bc=48, warps=2, q_steps=2, lazy=True), ForwardTile(Br=64, Bc=32, warps=4, ascending=True),
     ForwardTile(Br=32, Bc=48, warps=2, packed=True)],
    ids=["lazy", "ascending", "packed"],
)  # fmt: skip
def test_forwards_of_other_kinds(tile: ForwardTile) -> None:
    problem = Problem(dtype="fp16", d=72, causal=True, Hq=4, Hk=2, Nq=9, Nk=150)
    kernels: dict[KernelName, Binary] = {
        "forward": compile_source(render(KernelSpec.of("forward", problem, tile, T4.sm)))
    }
    verdict = check(problem, "forward", kernels, EmulatedEngine(check_races=True))
    assert verdict.ok, verdict.reason


def test_a_forward_by_parts() -> None:
    problem = Problem(dtype="fp16", d=64, causal=True, Hq=4, Hk=2, Nq=7, Nk=399)
    kernels = {
        name: compile_source(render(KernelSpec.of(name, problem, default_tile(name, problem, T4), T4.sm)))
        for name in PARTS
    }
    verdict = check(problem, "forward", kernels, EmulatedEngine(check_races=True), parts=3)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "split"])
def test_warps_that_share_keys(deterministic: bool) -> None:
    """The next tile waits in registers while the partners' products run, or while dQ is made."""
    problem = Problem(dtype="fp16", d=64, causal=True, Hq=2, Hk=1, Nq=70, Nk=90)
    tile = KeyBlockTile(Br=64, Bc=64, warps=8, row_split=2, slice=16, stages=1)
    names = SPLIT if deterministic else FUSED
    specs = [KernelSpec.of(name, problem, default_tile(name, problem, T4), T4.sm) for name in names]
    kernels = {
        spec.kernel: compile_source(render(replace(spec, tile=tile) if isinstance(spec.tile, KeyBlockTile) else spec))
        for spec in specs
    }
    verdict = check(problem, "backward", kernels, EmulatedEngine(check_races=True))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("kernel", OURS)
def test_the_loop_is_tensor_cores_without_a_spill(kernel: KernelName, d: int, causal: bool) -> None:
    """As many HMMA as the tile's products need, divided among the warps; no register goes to memory in a loop."""
    function, spec = function_of(kernel, d, causal), binary_of(kernel, d, causal).spec
    opcodes = [instruction.base for instruction in function.trace.loop]
    assert opcodes.count("HMMA") * HMMA_FLOPS * spec.tile.warps == tile_flops(spec)
    assert not any(loop.spill_instructions for loop in function.loops)


@pytest.mark.parametrize(("kernel", "d"), [("forward", 64), ("forward", 128), ("fused", 64), ("dkdv", 64), ("dq", 64)])
def test_products_run_while_the_next_tile_is_on_its_way(kernel: KernelName, d: int) -> None:
    """Loads and stores of 16 bytes, and between a load and the store of what it brought some HMMA."""
    loop = function_of(kernel, d, False).trace.loop
    opcodes = [instruction.opcode for instruction in loop]
    loads = [n for n, opcode in enumerate(opcodes) if opcode.startswith("LDG.E.128")]
    assert loads and not any(opcode.startswith("LDGSTS") for opcode in opcodes)
    bases = [instruction.base for instruction in (*loop, *loop)]
    for load in loads:
        register = loop[load].text.split()[1].rstrip(",")
        store = next(n for n in range(load, len(bases)) if _stores(str((*loop, *loop)[n]), register))
        assert bases[load:store].count("HMMA") >= 8, loop[load].text


def _stores(text: str, register: str) -> bool:
    return "STS.128" in text and text.endswith(f", {register}")


@pytest.mark.parametrize("kernel", ["forward", "fused", "dkdv", "dq"])
def test_bf16_is_refused_in_one_sentence(kernel: KernelName) -> None:
    problem = Problem(dtype="bf16", d=64)
    with pytest.raises(BadProblem, match=r"bf16 needs sm_80, and t4 is sm_75\. Use fp16 on t4"):
        load_best(problem, kernel, "t4")


def test_two_stages_are_refused() -> None:
    problem = Problem(dtype="fp16", d=64)
    for kernel in ("fused", "dq"):
        tile = replace(default_tile(kernel, problem, T4), stages=2)  # type: ignore[arg-type, call-arg]
        reason = why_illegal(KernelSpec.of(kernel, problem, tile, T4.sm), T4)  # type: ignore[arg-type]
        assert reason is not None and "waits in registers" in reason and "stages=1" in reason


def test_what_does_not_fit_is_split_or_refused_with_both_numbers() -> None:
    problem = Problem(dtype="fp16", d=256)
    with pytest.raises(NoTunedKernel, match=r"no tile of fused for fp16 d=256 fits t4.*needs"):
        default_tile("fused", problem, T4)
    choice = pass_form(problem, "backward", T4)
    assert choice.kernels == SPLIT and "no tile of fused" in choice.reason


def test_a_search_leaves_out_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched: list[str] = []

    def tune_kernel(kernel: str, *_: object, **__: object) -> None:
        searched.append(kernel)
        if kernel == "dq":
            raise UsageError("enough")

    monkeypatch.setattr("flashsmith.tune.tune_kernel", tune_kernel)
    assert main(["tune", "--gpu", "t4", "--dtype", "fp16", "--d", "256", "--pass", "backward"]) == 2
    assert searched == ["dkdv", "dq"] and "no tile of fused" in capsys.readouterr().err


def test_every_head_dimension_has_a_tile() -> None:
    for d, causal, kernel in product(range(8, 257, 8), (False, True), ("forward", "dkdv", "dq", "fused")):
        problem = Problem(dtype="fp16", d=d, causal=causal)
        if kernel == "fused" and d > 192:
            continue
        tile = default_tile(kernel, problem, T4)  # type: ignore[arg-type]
        assert why_illegal(KernelSpec.of(kernel, problem, tile, T4.sm), T4) is None  # type: ignore[arg-type]


def test_a_prediction_says_that_nothing_was_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(T4) is None
    asked = ["predict", "forward", "--gpu", "t4", "--dtype", "fp16", "--d", "64", "--nq", "4096"]
    assert main(asked) == 0
    assert "never compared with a measurement on sm_75" in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_error"] is None


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_operator(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    monkeypatch.setenv("FLASHSMITH_ENGINE", "emulator")
    monkeypatch.setenv("FLASHSMITH_GPU", "t4")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 50, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    ours = fs.attention(q, k, v, causal=causal)
    gradients = torch.autograd.grad(ours.float().square().sum(), (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    wanted = torch.autograd.grad(theirs.square().sum(), (q, k, v))
    for got, want in zip((ours, *gradients), (theirs, *wanted), strict=True):
        assert (got.double() - want.double()).abs().max() < 4e-3 * want.abs().max()
    with pytest.raises(BadProblem, match=r"bf16 needs sm_80.*fp16 on t4"):
        fs.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())


def test_a_tile_of_two_stages_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["render", "dq", "--gpu", "t4", "--dtype", "fp16", "--d", "64", "--tile", "stages=2"]
    assert main(asked) == 2
    assert "Use stages=1" in capsys.readouterr().err

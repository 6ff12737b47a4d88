"""attention() on the kernels: CPU tensors on the emulator, beside the tiled loop."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import flashsmith as fs
import pytest
import torch
from flashsmith.forms import KERNELS_OF, Form
from flashsmith.operator import kernels
from flashsmith.run import MAKES
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Pass, Problem
from flashsmith.spec.record import write_record
from torch import Tensor

from tests.records import record_of

BF16 = torch.bfloat16
NOISE = 0.03  # of the largest value: a few roundings of bf16, in P and dS as well


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_ENGINE", "emulator")


def qkv(dtype: torch.dtype = BF16, Nq: int = 40, Nk: int = 50) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, Nq, 64), (1, 2, Nk, 64), (1, 2, Nk, 64))
    return [(torch.randn(s, generator=generator) + 0.5).to(dtype).requires_grad_() for s in shapes]


def outputs(inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """O, lse, and the gradients of those that ask."""
    O, lse = fs.attention(*inputs, causal=True, return_lse=True, **options)
    dO = torch.randn(O.shape, generator=torch.Generator().manual_seed(1)).to(O.dtype)
    return [O, lse, *torch.autograd.grad(O, [x for x in inputs if x.requires_grad], dO)]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.stride() == y.stride()
        assert (x.double() - y.double()).abs().max() <= NOISE * y.double().abs().max()


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_kernels_and_the_tiled_loop_agree(
    dtype: torch.dtype, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = outputs(qkv(dtype), deterministic=deterministic)
    monkeypatch.setenv("FLASHSMITH_ENGINE", "emulator")
    close(outputs(qkv(dtype), deterministic=deterministic), want)


def test_sequence_major_tensors_and_an_expanded_do(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv()]
    found = []
    for engine in ("torch", "emulator"):
        monkeypatch.setenv("FLASHSMITH_ENGINE", engine)
        O = fs.attention(*inputs, causal=True, layout="bnhd")
        found.append([O, *torch.autograd.grad(O.sum(), inputs)])
    close(found[1], found[0])


@pytest.mark.parametrize("asking", ["q", "k", "v", "kv"])
def test_only_the_kernels_of_the_gradients_asked_for_run(
    asking: str, emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = dict(zip("qkv", outputs(qkv(), deterministic=True)[2:], strict=True))
    ran: list[tuple[str, ...]] = []
    run_backward = kernels.run_backward

    def record(engine: Any, binaries: Any, *inputs: Any, **options: Any) -> Any:
        ran.append(tuple(binaries))
        return run_backward(engine, binaries, *inputs, **options)

    monkeypatch.setattr(kernels, "run_backward", record)
    inputs = [x.requires_grad_(name in asking) for name, x in zip("qkv", qkv(), strict=True)]
    got = dict(zip(asking, outputs(inputs)[2:], strict=True))
    assert ran == [("delta", "dq" if asking == "q" else "dkdv")]
    assert all(torch.equal(got[name], want[name]) for name in asking)


def test_the_gradient_of_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for engine in ("torch", "emulator"):
        monkeypatch.setenv("FLASHSMITH_ENGINE", engine)
        inputs = qkv()
        O, lse = fs.attention(*inputs, causal=True, return_lse=True)
        found.append(list(torch.autograd.grad(O.sum() + (lse * lse).sum(), inputs)))
    close(found[1], found[0])


def test_each_gradient_has_its_kernel() -> None:
    for needs in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        for form in ("fused", "split", "fused90", "split90"):
            made = {x for kernel in kernels.kernels_for(needs, form) for x in MAKES[kernel]}
            assert made >= {name for name, need in zip(("dQ", "dK", "dV"), needs, strict=True) if need}


@pytest.mark.parametrize(("split_ms", "form"), [(0.01, "split"), (1.0, "fused")])
def test_the_form_of_the_backward_that_the_records_favour_runs(
    split_ms: float, form: Form, emulator: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Chosen once for a shape: the second call looks nothing up."""
    monkeypatch.setenv("FLASHSMITH_TUNED_DIR", str(tmp_path))
    for kernel, ms in {"fused": 0.1, "dkdv": split_ms, "dq": split_ms}.items():
        write_record(tmp_path, record_of(kernel, ms, d=40, B=1, heads=2, Nq=40))  # type: ignore[arg-type]
    kernels._form.cache_clear()
    ran, chosen = [], []
    run_backward, pass_form = kernels.run_backward, kernels.pass_form

    def record(engine: Any, binaries: Any, *inputs: Any, **options: Any) -> Any:
        ran.append(tuple(binaries))
        return run_backward(engine, binaries, *inputs, **options)

    def choose(problem: Problem, which: Pass, *others: Any) -> Any:
        chosen.append(which)
        return pass_form(problem, which, *others)

    monkeypatch.setattr(kernels, "run_backward", record)
    monkeypatch.setattr(kernels, "pass_form", choose)
    for _ in range(2):
        inputs = [torch.randn(1, 2, 40, 40).to(torch.bfloat16).requires_grad_() for _ in range(3)]
        torch.autograd.grad(fs.attention(*inputs).sum(), inputs)
    kernels._form.cache_clear()
    assert ran == [KERNELS_OF[form]] * 2 and chosen == ["forward", "backward"]


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_few_queries_run_by_parts_with_their_heads_packed(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query of six heads over two, against 500 keys; the backward takes what the two kernels left."""
    ran: list[Any] = []
    run_forward = kernels.run_forward

    def record(engine: Any, binaries: Any, *inputs: Any, **options: Any) -> Any:
        ran.append(({name: binary.spec.tile for name, binary in binaries.items()}, options["parts"]))
        return run_forward(engine, binaries, *inputs, **options)

    monkeypatch.setattr(kernels, "run_forward", record)
    generator, found = torch.Generator().manual_seed(0), []
    shapes = ((1, 6, 1, 64), (1, 2, 500, 64), (1, 2, 500, 64))
    given = [torch.randn(shape, generator=generator).to(BF16) for shape in shapes]
    for engine in ("torch", "emulator"):
        monkeypatch.setenv("FLASHSMITH_ENGINE", engine)
        inputs = [x.transpose(1, 2).contiguous() if layout == "bnhd" else x for x in given]
        leaves = [x.requires_grad_() for x in inputs]
        O, lse = fs.attention(*leaves, causal=True, layout=layout, return_lse=True)
        found.append([O, lse, *torch.autograd.grad(O.sum(), leaves)])
    close(found[1], found[0])
    ((tiles, parts),) = ran
    assert list(tiles) == ["partial", "combine"] and parts > 1 and tiles["partial"].packed


def test_float64_is_refused_by_the_kernels(emulator: None) -> None:
    served = "torch.bfloat16 and torch.float16 and torch.float32"
    with pytest.raises(TypeError, match=rf"are torch.float64: the kernels serve {served}"):
        fs.attention(*qkv(torch.float64))


def test_float32_is_nearly_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    want = outputs(qkv(torch.float64))
    monkeypatch.setenv("FLASHSMITH_ENGINE", "emulator")
    for got, exact in zip(outputs(qkv(torch.float32)), want, strict=True):
        assert got.dtype == torch.float32
        assert (got.double() - exact).abs().max() <= 5e-6 * exact.abs().max()


@pytest.mark.parametrize(("Nq", "Nk"), [(5, 0), (0, 5)])
def test_empty_dimensions(Nq: int, Nk: int, emulator: None) -> None:
    inputs = qkv(Nq=Nq, Nk=Nk)
    O, lse = fs.attention(*inputs, return_lse=True)
    assert O.shape == inputs[0].shape and not O.any() and lse.isneginf().all()
    assert not any(x.any() for x in torch.autograd.grad(O, inputs, torch.ones_like(O)))


def test_threads_that_ask_at_once_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that takes its time."""
    compiled: list[str] = []

    def slow(source: Any) -> str:
        time.sleep(0.05)
        compiled.append(source.spec.key)
        return str(source.spec.key)

    monkeypatch.setattr(kernels, "compile_source", slow)
    kernels._compiled.cache_clear()
    gpu, found = find_gpu("a100"), []
    problems = [Problem(dtype="bf16", d=d) for d in (64, 72)]
    specs = [KernelSpec.of("forward", p, default_tile("forward", p, gpu), gpu.sm) for p in problems]
    start = threading.Barrier(8)

    def ask(spec: KernelSpec) -> None:
        start.wait()
        found.append((spec.key, kernels._binary(spec)))

    threads = [threading.Thread(target=ask, args=(specs[n % 2],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    kernels._compiled.cache_clear()
    assert sorted(compiled) == sorted(spec.key for spec in specs)
    assert len(found) == 8 and all(key == binary for key, binary in found)

"""The CUDA engine on a real device: results, streams, devices, graphs, shared memory, faults, times."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import flashsmith as fs
import pytest
import torch
from flashsmith.check import check
from flashsmith.compile import Binary, compile_source
from flashsmith.engines.cuda import CudaEngine, cuda_engine
from flashsmith.engines.driver import find_device
from flashsmith.errors import LaunchError, Rejected
from flashsmith.load import load_pass
from flashsmith.measure import Again, Try, floor_seconds
from flashsmith.measuring.process import Measurer
from flashsmith.measuring.trial import on_device
from flashsmith.predict import predict
from flashsmith.render import Source, render
from flashsmith.run import run_forward
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import Gpu, present_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.spec.tile import ForwardTile, Tile
from flashsmith.tune import tune_kernel
from flashsmith.verify import MORE_SHAPES, of_tile, why_wrong
from torch import Tensor

pytestmark = pytest.mark.gpu

PROBLEM = Problem(dtype="bf16", d=64, causal=True, B=1, Hq=4, Hk=2, Nq=1024)


@pytest.fixture
def gpu() -> Gpu:
    return present_gpu()


@pytest.fixture
def engine() -> CudaEngine:
    return cuda_engine(poison=True)


def qkv(device: torch.device, N: int = 1024, seed: int = 0) -> list[Tensor]:
    random = torch.Generator(device).manual_seed(seed)
    shapes = ((2, 8, N, 64), (2, 2, N, 64), (2, 2, N, 64))
    return [
        torch.randn(s, generator=random, device=device, dtype=torch.float32).to(torch.bfloat16).requires_grad_()
        for s in shapes
    ]  # fmt: skip


def exact(inputs: list[Tensor]) -> Tensor:
    """Causal attention in float64."""
    q, k, v = (x.detach().double() for x in inputs)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    S = q @ k.mT / math.sqrt(q.shape[3])
    mask = torch.ones(S.shape[-2:], device=S.device).tril(S.shape[3] - S.shape[2]).bool()
    return S.masked_fill(~mask, -math.inf).softmax(-1) @ v


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got.double() - want).abs().max() <= 0.02 * want.abs().max())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("d", [64, 72, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_pass_is_right(dtype: str, d: int, causal: bool, gpu: Gpu, engine: CudaEngine) -> None:
    """Against float64 with poisoned outputs, on the shapes that candidates are checked on."""
    problem = replace(PROBLEM, dtype=dtype, d=d, causal=causal)  # type: ignore[arg-type]
    for Nq, Nk in MORE_SHAPES:
        small = replace(problem, Nq=Nq, Nk=Nk)
        for which, deterministic in (("forward", False), ("backward", False), ("backward", True)):
            loaded = load_pass(small, which, gpu, deterministic=deterministic)  # type: ignore[arg-type]
            verdict = check(small, which, {k: x.binary for k, x in loaded.items()}, engine)  # type: ignore[arg-type]
            assert verdict.ok, verdict.reason


@pytest.mark.parametrize("smem", [49151, 49152, 49153])
def test_shared_memory_around_48_kib(smem: int, gpu: Gpu, engine: CudaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16 B of static shared memory beside it (BUG-26)."""
    tile = ForwardTile(Br=64, Bc=16, warps=4)  # which needs far less
    binary = edited(gpu, "__shared__ volatile int still[4]; still[threadIdx.x % 4] = 1;", tile)
    monkeypatch.setattr(Source, "smem_bytes", smem)
    verdict = check(replace(PROBLEM, Nq=129), "forward", {"forward": binary}, engine)
    assert verdict.ok and binary.static_smem_bytes >= 16, verdict.reason


def test_a_side_stream_sees_its_own_inputs(device: torch.device) -> None:
    """A long kernel, new data, the op, on one stream: always the result for the new data (BUG-16)."""
    inputs, news = qkv(device), [x.detach() for x in qkv(device, seed=1)]
    want = exact(news)
    fs.attention(*inputs, causal=True)
    stream = torch.cuda.Stream(device)
    for _ in range(50):
        data = [x.detach().clone() for x in inputs]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            for x, new in zip(data, news, strict=True):
                x.copy_(new)
            O = fs.attention(*data, causal=True)
        stream.synchronize()
        assert close(O, want)


def test_a_graph_replays_forward_and_backward(device: torch.device) -> None:
    """Captured once, replayed on changed inputs; collecting garbage meanwhile breaks nothing (BUG-17)."""
    inputs = qkv(device)

    def both() -> list[Tensor]:
        O = fs.attention(*inputs, causal=True)
        return [O, *torch.autograd.grad(O, inputs, torch.ones_like(O))]

    warm = torch.cuda.Stream(device)
    with torch.cuda.stream(warm):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = both()
        gc.collect()
    for seed in (1, 2, 3):
        with torch.no_grad():
            for x, new in zip(inputs, qkv(device, seed=seed), strict=True):
                x.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert close(static[0], exact(inputs))
        # dQ of the fused backward is summed by atomics, in another order each time.
        assert all(close(got, want.double()) for got, want in zip(static, both(), strict=True))


def test_a_cold_call_in_a_capture_leaves_the_process_usable(gpu: Gpu, device: torch.device) -> None:
    cold, inputs = cuda_engine(), qkv(device)
    binary = of_tile("forward", PROBLEM, default_tile("forward", PROBLEM, gpu), gpu)
    with pytest.raises(LaunchError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run_forward(cold, {"forward": binary}, *(cold.given(x) for x in inputs), 0.125)
    assert close(fs.attention(*inputs, causal=True), exact(inputs))


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_the_second_device(device: torch.device) -> None:
    """On 1, on 0, on 1, while 0 stays current and holds nothing of it (BUG-15)."""
    inputs = {n: qkv(torch.device("cuda", n)) for n in (0, 1)}
    for n in (1, 0, 1):
        before = torch.cuda.memory_allocated(1 - n)
        assert close(fs.attention(*inputs[n], causal=True), exact(inputs[n]))
        assert torch.cuda.current_device() == 0 and torch.cuda.memory_allocated(1 - n) == before
    with pytest.raises(ValueError, match="must be on one device"):
        fs.attention(inputs[0][0], *inputs[1][1:])


@pytest.fixture
def measurer(gpu: Gpu) -> Iterator[Measurer]:
    index = find_device(gpu)
    assert index is not None
    with Measurer(partial(on_device, "forward", PROBLEM, gpu, index), timeout_s=20.0) as made:
        yield made


def edited(gpu: Gpu, new: str, tile: Tile | None = None) -> Binary:
    """A forward with something more near its beginning."""
    source = render(
        KernelSpec.of("forward", PROBLEM, tile or default_tile("forward", PROBLEM, gpu), gpu.sm)
    )  # fmt: skip
    first = "    const int kv_head ="
    assert first in source.text
    return compile_source(Source(source.spec, source.text.replace(first, f"    {new}\n{first}", 1)))


def test_a_candidate_is_timed_and_a_bad_one_only_fails(gpu: Gpu, measurer: Measurer) -> None:
    """Out of bounds, spinning, returning at once: each has its reason; the next is timed as ever (BUG-29, 30, 32)."""
    good = of_tile("forward", PROBLEM, default_tile("forward", PROBLEM, gpu), gpu)
    first = measurer.ask(Try(good))
    assert first.samples >= 30 and 0 < first.spread < 0.5 and gpu.name.split()[-1] in first.by
    for text, reason in (
        ("if (Nq == Nk) *reinterpret_cast<volatile int*>(16) = 1;", "LaunchError"),
        ("if (Nq == Nk) for (volatile int n = 0;; ) n = n + 1;", "Timeout"),
        ("return;", "WrongResult"),
    ):
        with pytest.raises(Rejected, match=f"^{reason}"):
            measurer.ask(Try(edited(gpu, text)))
        again = measurer.ask(Try(good))
        assert again.seconds == pytest.approx(first.seconds, rel=0.05)
    assert len(measurer.ask(Again(good, 20))) == 20
    assert torch.ones(1).cuda().item() == 1  # this process's own context is untouched


def test_the_floor_lies_below_the_truth(gpu: Gpu, measurer: Measurer) -> None:
    """No real kernel is refused as too fast, and the model is not far off: within a factor of two."""
    good = of_tile("forward", PROBLEM, default_tile("forward", PROBLEM, gpu), gpu)
    seconds = measurer.ask(Try(good)).seconds
    assert floor_seconds(good.spec, PROBLEM, gpu) < seconds
    assert 0.5 < predict(good, PROBLEM, gpu).seconds / seconds < 2


def test_a_search_by_measured_time(gpu: Gpu, tmp_path: Path) -> None:
    problem = replace(PROBLEM, Hq=16, Hk=16, Nq=2048, Nk=2048)
    tuned = tune_kernel("forward", problem, gpu, tmp_path, trials=6)
    evidence = tuned.record.evidence
    assert evidence.kind == "measured" and evidence.samples >= 100 and "driver" in evidence.by
    assert tuned.winner.default is not None and tuned.winner.time.seconds <= tuned.winner.default.seconds
    assert (
        why_wrong(of_tile("forward", problem, tuned.record.tile, gpu), problem, gpu, partial(cuda_engine, poison=True))
        == ""
    )

"""attention() on a real device: large grids and offsets, repeated runs, warm calls, threads, torch.compile, memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import flashsmith as fs
import pytest
import torch
import torch._dynamo.testing
from flashsmith.footprint import measure_forward
from flashsmith.ledger import ledger
from flashsmith.operator import kernels
from flashsmith.spec.problem import Problem
from torch import Tensor

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
GB = 10**9
SLACK = 0.02  # of the largest value: roundings of bf16 in the inputs, in P and in dS


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """The large tests need most of a small card."""
    yield
    torch.cuda.empty_cache()


def need(device: torch.device, count: int) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    if total < count:
        pytest.skip(f"needs {count / GB:.0f} GB of memory, the device has {total / GB:.0f}")


def normal(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=BF16)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """O in float64, for [B, H, N, d] of equal heads."""
    S = q.double() @ k.double().mT / math.sqrt(q.shape[3])
    if causal:
        hidden = torch.ones(S.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + S.shape[3] - S.shape[2])
        S = S.masked_fill(hidden, -math.inf)
    return S.softmax(-1) @ v.double()


def close(got: Tensor, want: Tensor) -> None:
    assert torch.isfinite(got).all()
    assert (got.double() - want.double()).abs().max() <= SLACK * want.double().abs().max()


def gradients(q: Tensor, k: Tensor, v: Tensor, dO: Tensor, **options: Any) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(fs.attention(*inputs, **options), inputs, dO)


def exact_gradients(q: Tensor, k: Tensor, v: Tensor, dO: Tensor) -> tuple[Tensor, ...]:
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(exact(*inputs), inputs, dO.double())


@pytest.mark.parametrize(("B", "H"), [(65535, 1), (65536, 1), (1, 65536), (8192, 9)])
def test_batches_and_heads_past_65535(B: int, H: int, device: torch.device) -> None:
    """Forward and both backwards (BUG-08)."""
    q, k, v, dO = (normal(device, B, H, 4, 64, seed=seed) for seed in range(4))
    close(fs.attention(q, k, v), exact(q, k, v))
    want = exact_gradients(q, k, v, dO)
    for deterministic in (False, True):
        for got, right in zip(gradients(q, k, v, dO, deterministic=deterministic), want, strict=True):
            close(got, right)


def test_more_query_tiles_than_65535(device: torch.device) -> None:
    """One head of 8.4 million rows (BUG-08)."""
    need(device, 16 * GB)
    N = 65536 * 128 + 1
    q, k, v = normal(device, 1, 1, N, 64), normal(device, 1, 1, 16, 64, seed=1), normal(device, 1, 1, 16, 64, seed=2)
    O = fs.attention(q, k, v)
    for rows in (slice(0, 1000), slice(N // 2, N // 2 + 1000), slice(N - 1000, N)):
        close(O[:, :, rows], exact(q[:, :, rows], k, v))


def test_strides_that_pass_2_to_the_31(device: torch.device) -> None:
    """A sequence-major view whose last key lies 2.15e9 elements in: as the contiguous one, both ways (BUG-09)."""
    need(device, 20 * GB)
    base = torch.empty(24000, 700, 128, dtype=BF16, device=device)
    base[:, :2].normal_()
    view = base.permute(1, 0, 2)[:2, None]  # [2, 1, 24000, 128]
    assert view.stride(2) * 23999 > 2**31 and view.stride() != view.contiguous().stride()
    q, dO = normal(device, 2, 1, 16, 128), normal(device, 2, 1, 16, 128, seed=1)
    copied = view.contiguous()
    assert torch.equal(fs.attention(q, view, view), fs.attention(q, copied, copied))
    strided = gradients(q, view, view, dO, deterministic=True)
    for got, want in zip(strided, gradients(q, copied, copied, dO, deterministic=True), strict=True):
        assert torch.equal(got, want)


def test_more_than_2_to_the_31_elements(device: torch.device) -> None:
    """q and O of 2^31 + 2^14 elements: the last rows are those of a call of their own (BUG-09)."""
    need(device, 20 * GB)
    N = 2**24 + 128
    q = torch.empty(1, 1, N, 128, dtype=BF16, device=device).normal_()
    k, v = normal(device, 1, 1, 16, 128, seed=1), normal(device, 1, 1, 16, 128, seed=2)
    O = fs.attention(q, k, v)
    close(O[:, :, -1000:], exact(q[:, :, -1000:], k, v))
    close(O[:, :, :1000], exact(q[:, :, :1000], k, v))


def test_fifty_backwards_are_one(device: torch.device) -> None:
    """Bit-identical where that is promised, and where no atomics add; all within the bound (BUG-23)."""
    q, dO = normal(device, 60, 1, 2048, 128), torch.ones(60, 1, 2048, 128, dtype=BF16, device=device)
    k, v = normal(device, 60, 1, 128, 128, seed=1), normal(device, 60, 1, 128, 128, seed=2)
    want = exact_gradients(q, k, v, dO)
    first = {kind: gradients(q, k, v, dO, deterministic=kind) for kind in (False, True)}
    for got, right in zip((*first[False], *first[True]), (*want, *want), strict=True):
        close(got, right)
    for _ in range(50):
        assert all(map(torch.equal, gradients(q, k, v, dO, deterministic=True), first[True]))
        dQ, dK, dV = gradients(q, k, v, dO, deterministic=False)
        assert torch.equal(dK, first[False][1]) and torch.equal(dV, first[False][2])
        close(dQ, want[0])


def test_every_layout_of_do_is_the_same(device: torch.device) -> None:
    """Contiguous, transposed, every second column, expanded (BUG-10)."""
    q, k, v, dO = (normal(device, 2, 4, 100, 64, seed=seed) for seed in range(4))
    want = gradients(q, k, v, dO, deterministic=True)
    wide = torch.zeros(2, 4, 100, 128, dtype=BF16, device=device)
    wide[..., ::2] = dO
    for other in (dO.transpose(1, 2).contiguous().transpose(1, 2), wide[..., ::2]):
        assert all(map(torch.equal, gradients(q, k, v, other, deterministic=True), want))
    ones = torch.ones((), dtype=BF16, device=device).expand_as(q)
    plain = gradients(q, k, v, torch.ones_like(q), deterministic=True)
    assert all(map(torch.equal, gradients(q, k, v, ones, deterministic=True), plain))


@pytest.mark.parametrize(
    ("Nq", "Hk", "Nk"), [(1, 8, 5000), (1, 2, 5000), (7, 1, 33000), (64, 2, 9000), (300, 8, 20000)]
)
def test_few_queries_against_many_keys(Nq: int, Hk: int, Nk: int, device: torch.device) -> None:
    """By parts, with heads packed or not; the same bits from run to run, and from a graph."""
    q, k, v = normal(device, 2, 8, Nq, 64), normal(device, 2, Hk, Nk, 64, seed=1), normal(device, 2, Hk, Nk, 64, seed=2)
    O = fs.attention(q, k, v, causal=True)
    close(O, exact(q, *(x.repeat_interleave(8 // Hk, dim=1) for x in (k, v)), causal=True))
    assert torch.equal(fs.attention(q, k, v, causal=True), O)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fs.attention(q, k, v, causal=True)
    graph.replay()
    torch.cuda.synchronize(device)
    assert torch.equal(captured, O)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_a_warm_call_is_a_cold_one(layout: str, device: torch.device) -> None:
    """Bit for bit, forward and backward, on tensors that the first call has not seen."""
    sets = [[normal(device, 2, 70, 70, 64, seed=10 * n + x) for x in range(4)] for n in range(3)]

    def run(q: Tensor, k: Tensor, v: Tensor, dO: Tensor) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        O, lse = fs.attention(*inputs, layout=layout, return_lse=True, deterministic=True)  # type: ignore[call-overload]
        return [O, lse, *torch.autograd.grad((O * dO).float().sum() + lse.sum(), inputs)]

    warm = [run(*tensors) for tensors in sets]
    for tensors, got in zip(sets, warm, strict=True):
        kernels._replays.clear()
        cold = run(*tensors)
        assert all(map(torch.equal, got, cold))
        assert [x.stride() for x in got] == [x.stride() for x in cold]


def test_threads_and_streams_keep_to_themselves(device: torch.device) -> None:
    """Eight threads, each on a stream of its own, one shape: each gets the result of its own tensors (BUG-21)."""
    sets = [[normal(device, 1, 8, 300, 64, seed=10 * n + x) for x in range(3)] for n in range(8)]
    want = [exact(*tensors) for tensors in sets]
    got: dict[int, list[Tensor]] = {}
    torch.cuda.synchronize()

    def run(n: int) -> None:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            got[n] = [fs.attention(*sets[n]) for _ in range(20)]
        stream.synchronize()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 8
    for n, results in got.items():
        for O in results:
            close(O, want[n])


def test_compiled_is_eager(device: torch.device) -> None:
    """fullgraph, forward and backward; another N does not compile again (BUG-18)."""
    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounter()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fs.attention(q * 1.0, k, v, causal=True, deterministic=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=compiles)
    inductor = torch.compile(step, fullgraph=True, dynamic=True)
    for N in (65, 130, 200):
        inputs = [normal(device, 2, 4, N, 64, seed=seed).requires_grad_() for seed in range(3)]
        dO = normal(device, 2, 4, N, 64, seed=3)
        found = []
        for call in (step, compiled, inductor) if N == 65 else (step, compiled):
            O = call(*inputs)
            found.append([O, *torch.autograd.grad(O, inputs, dO)])
        for other in found[1:]:
            assert all(map(torch.equal, other, found[0]))
            assert [x.stride() for x in other] == [x.stride() for x in found[0]]
    assert compiles.frame_count == 1


@pytest.mark.parametrize("how", ["contiguous", "transposed", "sliced"])
def test_opcheck(how: str, device: torch.device) -> None:
    """PyTorch's own checks of a custom op: schema, fake strides, autograd registration (BUG-18)."""
    from flashsmith.operator.library import plain_forward

    x = normal(device, 2, 4, 65, 64)
    made = {"contiguous": x, "transposed": x.transpose(1, 2).contiguous().transpose(1, 2), "sliced": x[:, :, 1:]}[how]
    inputs = [made.detach().requires_grad_() for _ in range(3)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(plain_forward, (*inputs, None, True, False, True), test_utils=tests)


def test_what_a_forward_keeps(device: torch.device) -> None:
    """Standard attention keeps P; ours O, m and l, to the allocator's rounding."""
    problem = Problem(dtype="fp16", d=64, Hq=4, Nq=4096)
    standard, flash = measure_forward(problem)
    computed = ledger(problem)
    assert not standard.failed and standard.kept >= computed.P
    assert not flash.failed and computed.written <= flash.kept <= computed.written + 3 * 2**21
    assert flash.peak <= computed.written + 3 * 2**21

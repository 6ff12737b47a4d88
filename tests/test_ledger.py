"""The memory ledger: the figures that the product promises, what is counted, and what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flashsmith.errors import UsageError
from flashsmith.footprint import count_forward, measure_forward, standard_attention
from flashsmith.ledger import GRANULE, Way, largest_batch, ledger, longest, memory_bytes, table
from flashsmith.spec.gpu import GPUS, find_gpu
from flashsmith.spec.problem import Problem

LONG = Problem(dtype="fp16", d=128, Hq=32, Nq=32768)
H200 = find_gpu("h200")
WAYS: tuple[Way, Way] = ("standard", "flash")


def test_the_figures_at_32768() -> None:
    """One head's P 2.147 GB, 32 heads' 68.7 GB; m and l together 256 KB a head."""
    one = ledger(replace(LONG, Hq=1, Hk=1))
    assert one.P == 2 * 32768**2 == 2_147_483_648 and one.statistics == 256 * 1024
    everything = ledger(LONG)
    assert everything.P == 32 * one.P and round(everything.P / 1e9, 1) == 68.7
    assert everything.written == 32 * (32768 * 128 * 2 + 256 * 1024)


def test_only_p_grows_with_the_square() -> None:
    once, twice = ledger(LONG), ledger(replace(LONG, Nq=65536, Nk=65536))
    assert twice.P == 4 * once.P
    for name in ("q", "k", "v", "O", "m", "l", "written", "statistics"):
        assert getattr(twice, name) == 2 * getattr(once, name)


def test_grouped_heads_share_k_and_v() -> None:
    grouped = ledger(replace(LONG, Hk=4))
    assert grouped.k == ledger(LONG).k // 8 and grouped.P == ledger(LONG).P


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", ["a100", "rtx3090", "h200"])
def test_what_fits_is_the_last_that_does(key: str, way: Way) -> None:
    gpu = find_gpu(key)
    n, room = longest(LONG, gpu, way), memory_bytes(gpu)
    assert n % GRANULE == 0
    assert ledger(replace(LONG, Nq=n, Nk=n)).kept(way) <= room
    assert ledger(replace(LONG, Nq=n + GRANULE, Nk=n + GRANULE)).kept(way) > room
    B = largest_batch(LONG, gpu, way)
    assert B == 0 or ledger(replace(LONG, B=B)).kept(way) <= room
    assert ledger(replace(LONG, B=B + 1)).kept(way) > room


def test_longer_and_more_by_far_more_than_five_times() -> None:
    assert longest(LONG, H200, "flash") > 10 * longest(LONG, H200, "standard")
    assert largest_batch(LONG, H200, "flash") > 10 * largest_batch(LONG, H200, "standard")


def test_nothing_to_keep() -> None:
    with pytest.raises(UsageError, match="keeps nothing"):
        largest_batch(replace(LONG, Nq=0, Nk=0), H200, "flash")


def test_the_table_has_every_gpu_and_both_ways() -> None:
    found = table(LONG, GPUS)
    fits = found["fits"]
    assert isinstance(fits, dict) and set(fits) == set(GPUS)
    assert all(set(ways) == {"standard", "flash"} for ways in fits.values())


@pytest.mark.parametrize(("dtype", "d", "causal"), [("fp16", 128, False), ("bf16", 72, True)])
def test_the_kernel_stores_o_m_and_l_and_nothing_else(dtype: str, d: int, causal: bool) -> None:
    """Counted store by store: each once, linear in N, no byte elsewhere."""
    short, twice = count_forward(Problem(dtype=dtype, d=d, causal=causal, Hq=1), find_gpu("a100"), (100, 200))  # type: ignore[arg-type]
    assert short.agrees and twice.agrees
    assert short.total == 100 * (2 * d + 8) and twice.total == 2 * short.total


def test_standard_attention_is_attention() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 30, 16)
    for causal in (False, True):
        mask = torch.ones(20, 30, dtype=torch.bool).tril(10) if causal else None
        want = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
        assert torch.allclose(standard_attention(q, k, k, causal), want, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_measuring_without_a_gpu_says_so() -> None:
    with pytest.raises(UsageError, match="none is here"):
        measure_forward(LONG)

"""The table of GPUs, and the names by which they are found."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from flashsmith.errors import UnknownGpu, UsageError
from flashsmith.spec.gpu import GPUS, find_gpu, identify, served_gpu
from flashsmith.spec.record import read_records, record_path, write_record

from tests.spec.test_record import RECORD

NAMES = "t4 a100 a100-40gb a10 rtx3090 l4 l40s rtx4090 h100-sxm h100-pcie h200 b200 rtx5090 orin"


def test_the_fourteen_parts() -> None:
    assert list(GPUS) == NAMES.split()
    assert all(gpu.source and gpu.tensor_source for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("key", "tflops"),
    [("a100", 312), ("rtx3090", 71), ("a10", 125), ("l40s", 366), ("rtx4090", 165), ("rtx5090", 210), ("t4", 65)],
)
def test_peaks_are_those_of_the_data_sheets(key: str, tflops: float) -> None:
    assert find_gpu(key).peak_tflops == pytest.approx(tflops, rel=0.015)


@pytest.mark.parametrize(
    ("key", "kilobytes"),
    [("a100", 163), ("rtx3090", 99), ("rtx4090", 99), ("h100-sxm", 227), ("rtx5090", 99), ("t4", 64)],
)
def test_shared_memory_of_a_block(key: str, kilobytes: int) -> None:
    assert find_gpu(key).smem_block_bytes == kilobytes * 1024


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("Tesla T4", "t4"),
        ("nvidia  a100-sxm4-80gb", "a100"),
    ],
)
def test_nvidias_own_names(name: str, key: str) -> None:
    assert find_gpu(name).key == key


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "laptop part"),
        ("NVIDIA GeForce RTX 3090 Laptop GPU", "laptop part"),
        ("NVIDIA RTX 4090 Mobile", "laptop part"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "MIG slice"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.39gb", "MIG slice"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG slice"),
        ("NVIDIA H200 NVL", "NVL card"),
        ("NVIDIA H100 NVL", "NVL card"),
        ("NVIDIA H20-3e", ""),
        ("NVIDIA H20", ""),
        ("NVIDIA GeForce RTX 4090 D", ""),
        ("NVIDIA GeForce RTX 3090 Ti", ""),
        ("NVIDIA L40", ""),
        ("NVIDIA A10G", ""),
        ("Tesla V100-SXM2-16GB", ""),
        ("NVIDIA A100/../../etc", ""),
        ("../a100", ""),
        ("", ""),
    ],
)
def test_other_parts_are_never_guessed(name: str, why: str) -> None:
    """Nor given to a part of a like name, whose rates they have not got (BUG-37)."""
    with pytest.raises(UnknownGpu, match=rf"{why}.*rtx4090"):
        find_gpu(name)


def test_a_device_must_be_the_part_that_its_name_says() -> None:
    """The same name with other SMs, or another compute capability, is another part (BUG-37)."""
    assert identify("NVIDIA H100 80GB HBM3", sms=132, sm=90) is GPUS["h100-sxm"]
    with pytest.raises(UnknownGpu, match=r"has 114 SMs .* has 132"):
        identify("NVIDIA H100 80GB HBM3", sms=114, sm=90)
    with pytest.raises(UnknownGpu, match=r"capability 8\.6.* and 8\.0"):
        identify("NVIDIA A100-SXM4-80GB", sms=108, sm=86)


@pytest.mark.parametrize("key", GPUS)
def test_what_is_written_for_a_part_is_found_again(key: str, tmp_path: Path) -> None:
    """By its key and by its own name; in a file whose name is safe (BUG-37)."""
    path = write_record(tmp_path, replace(RECORD, gpu=key, sm=GPUS[key].sm))
    assert re.fullmatch(r"[A-Za-z0-9._-]+", path.name)
    for name in (key, GPUS[key].name):
        assert read_records(record_path(tmp_path, find_gpu(name).key))[0].gpu == key
    assert [file.name for file in tmp_path.glob("*.json")] == [path.name]


@pytest.mark.parametrize("key", ["../a100", "a100/b", "", ".", "..", "a 100", "a100\n", "-x", "é"])
def test_no_record_is_looked_for_elsewhere(key: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot name a file"):
        record_path(tmp_path, key)


def test_the_t4_is_served_and_what_is_older_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served_gpu("t4") is GPUS["t4"]
    monkeypatch.setitem(GPUS, "t4", replace(GPUS["t4"], sm=70))
    with pytest.raises(UnknownGpu, match=r"7\.0.*7\.5"):
        served_gpu("t4")


def test_auto_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import runtime

    def no_device() -> int:
        raise runtime.CUDARuntimeError(100)

    monkeypatch.setattr(runtime, "getDevice", no_device)
    with pytest.raises(UnknownGpu, match="no CUDA device"):
        find_gpu("auto")


def test_only_hopper_has_wgmma() -> None:
    """Its peak is half again that of mma.sync there, and what the data sheet says."""
    hopper = find_gpu("h100-sxm")
    assert hopper.wgmma_tflops == pytest.approx(989, rel=0.05)
    assert hopper.wgmma_tflops / hopper.peak_tflops == pytest.approx(1.5, rel=0.001)
    assert [gpu.key for gpu in GPUS.values() if gpu.wgmma_tflops] == ["h100-sxm", "h100-pcie", "h200"]

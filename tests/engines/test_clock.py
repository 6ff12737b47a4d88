"""The clock of the CUDA device, with PyTorch's events and streams written down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashsmith.engines.clock import FLUSH, CudaClock
from flashsmith.engines.cuda import CudaEngine
from flashsmith.errors import LaunchError

from tests.engines.test_cuda import FakeDriver


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is put on the stream, in order."""
    calls: list[str] = []

    class Event:
        made = 0

        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing
            self.number = Event.made
            Event.made += 1

        def record(self, stream: Any) -> None:
            assert stream.name == "current"
            calls.append("start" if self.number % 2 == 0 else "end")

        def elapsed_time(self, end: Event) -> float:
            assert end.number == self.number + 1 and calls[-1] == "synchronize"
            return 0.25 * end.number  # milliseconds

    zero = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda x: calls.append(f"clear {x.numel()}") or zero(x))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(name="current"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("hold"))
    monkeypatch.setattr(FakeDriver, "synchronize", lambda self: calls.append("synchronize"))
    return calls


def test_each_launch_stands_between_its_events_behind_a_flush(log: list[str]) -> None:
    """All are queued behind a wait, so that the CPU's own time is in none of them; one synchronisation at the end."""
    clock = CudaClock(CudaEngine(FakeDriver([1], index=0)), l2_bytes=1000)
    seconds = clock.seconds(lambda: log.append("launch"), 3)
    assert log == ["hold", *[f"clear {FLUSH * 1000}", "start", "launch", "end"] * 3, "synchronize"]
    assert seconds == [0.25e-3, 0.75e-3, 1.25e-3]


def test_an_accumulator_is_cleared_on_the_device(log: list[str]) -> None:
    engine = CudaEngine(FakeDriver([0]), poison=True)
    tensor = engine.empty((6,), "float32")
    CudaClock(engine, l2_bytes=10).clear(tensor)
    assert log == ["clear 6"] and not engine.read(tensor).any()


def test_what_pytorch_raises_meanwhile_is_a_launch_error(log: list[str]) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: misaligned address\nCUDA kernel errors might be ...")

    with pytest.raises(LaunchError, match=r"fake 0: CUDA error: misaligned address$"):
        CudaClock(CudaEngine(FakeDriver([0])), l2_bytes=10).seconds(fail, 2)

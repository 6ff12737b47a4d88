"""Time launches on a CUDA device with its own clock: events on the stream, L2 overwritten before each launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import LaunchError
from .cuda import CudaEngine
from .engine import Tensor

FLUSH = 2  # times the L2: a buffer of just its size would leave lines behind
HOLD_CYCLES = 150_000  # a launch, some 80 us: the GPU waits while the CPU queues them all, so that none waits for it


class CudaClock:
    """A Clock on the engine's device and PyTorch's current stream."""

    def __init__(self, engine: CudaEngine, l2_bytes: int) -> None:
        self._engine = engine
        self._flush = torch.empty(FLUSH * l2_bytes, dtype=torch.int8, device=engine.driver.memory)

    def seconds(self, launch: Callable[[], None], count: int) -> list[float]:
        engine = self._engine
        try:
            with engine.driver.current():
                stream = torch.cuda.current_stream(engine.driver.index)
                pairs = [(_event(), _event()) for _ in range(count)]
                torch.cuda._sleep(HOLD_CYCLES * count)  # type: ignore[no-untyped-call]
                for first, last in pairs:
                    self._flush.zero_()
                    first.record(stream)
                    launch()
                    last.record(stream)
        except RuntimeError as error:  # what PyTorch makes of every CUDA error, those of earlier launches included
            raise LaunchError(f"{engine.driver.name}: {str(error).splitlines()[0]}") from error
        engine.driver.synchronize()
        return [first.elapsed_time(last) / 1e3 for first, last in pairs]

    def clear(self, tensor: Tensor) -> None:
        self._engine.torch(tensor).zero_()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

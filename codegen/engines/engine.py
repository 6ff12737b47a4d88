"""Say what an engine does: hold tensors, load a binary, make one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from ..compile import Binary
    from .tensor_map import Boxes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that an engine's kernels can reach; 16-bit floats are held as their bits, uint16."""

    address: int  # of its first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: np.dtype[Any]
    owner: object = None  # keeps the memory alive

    @property
    def aligned(self) -> bool:
        """Whether every row starts on 16 bytes and is contiguous: what cp.async and 16-byte loads need."""
        step = 16 // self.dtype.itemsize
        outer = (s for n, s in zip(self.shape[:-1], self.strides[:-1], strict=True) if n > 1)
        contiguous = self.shape[-1] <= 1 or self.strides[-1] == 1
        return contiguous and self.address % 16 == 0 and all(s % step == 0 for s in outer)


Value = int | float | bytes  # of one kernel parameter; bytes for a structure


class Engine(Protocol):
    """Where kernels run."""

    name: str

    @property
    def sms(self) -> int:
        """Multiprocessors."""
        ...

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """A copy of a NumPy array with its strides, within reach of the kernels."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        """A contiguous tensor of unknown (on the emulator: poisoned) content."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        """A contiguous tensor of zeros."""
        ...

    def contiguous(self, tensor: Tensor) -> Tensor:
        """The same elements in a new, aligned, contiguous tensor."""
        ...

    def read(self, tensor: Tensor) -> NDArray[Any]:
        """The tensor's elements as a NumPy array."""
        ...

    def tensor_map(self, boxes: Boxes) -> bytes:
        """The kernel argument by which TMA copies boxes of a tensor. Raises LaunchError."""
        ...

    def load(self, binary: Binary) -> Any:
        """The kernel of `binary`, ready to launch; loading the same binary again is cheap."""
        ...

    def launch(self, kernel: Any, *, grid: int, block: int, smem: int, args: Sequence[Value]) -> None:
        """One launch: `grid` blocks of `block` threads, `smem` bytes of dynamic shared memory. Raises LaunchError."""
        ...

"""Generate, read, check, time and tune exact attention kernels.

>>> import flashsmith as fs
>>> fs.Problem(dtype="bf16", d=128, causal=True).text
'bf16 d=128 causal'
"""

from typing import TYPE_CHECKING, Any

from .errors import FlashsmithError
from .spec.problem import Problem

if TYPE_CHECKING:
    from .load import Loaded, load_best, load_pass

__all__ = ["FlashsmithError", "Loaded", "Problem", "load_best", "load_pass"]


def __getattr__(name: str) -> Any:
    """What needs NVRTC, PyTorch or Optuna is imported when it is first asked for."""
    if name in __all__:
        from . import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

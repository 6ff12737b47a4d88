"""Generate, read, check, time and tune exact attention kernels.

>>> import flashsmith as fs
>>> fs.Problem(dtype="bf16", d=128, causal=True).text
'bf16 d=128 causal'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import FlashsmithError
from .spec.problem import Problem

if TYPE_CHECKING:
    from . import compat
    from .huggingface import register_transformers
    from .load import Loaded, load_best, load_pass
    from .operator.op import attention, attention_varlen

__all__ = [
    "FlashsmithError",
    "Loaded",
    "Problem",
    "attention",
    "attention_varlen",
    "compat",
    "load_best",
    "load_pass",
    "register_transformers",
]

_HOME = {
    "Loaded": ".load",
    "attention": ".operator.op",
    "attention_varlen": ".operator.op",
    "load_best": ".load",
    "load_pass": ".load",
    "register_transformers": ".huggingface",
}


def __getattr__(name: str) -> Any:
    """What needs NVRTC, PyTorch or Optuna is imported when it is first asked for."""
    if name == "compat":
        return import_module(".compat", __name__)
    if name in _HOME:
        return getattr(import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

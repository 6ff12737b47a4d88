"""Export a pass for people without Python: CUDA with a launcher in C, or machine code with a description in JSON."""

from .cuda import cuda_files
from .folder import write_files
from .launches import cubin_files
from .plan import Plan
from .trace import plan_of

__all__ = ["Plan", "cubin_files", "cuda_files", "plan_of", "write_files"]

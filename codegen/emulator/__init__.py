"""Execute PTX on the CPU: whole thread blocks, vectorised with NumPy, with every access checked.

>>> from flashsmith.emulator import GlobalMemory, launch, parse
>>> text = '''
... .version 8.0
... .target sm_80
... .address_size 64
... .visible .entry store(.param .u64 out) {
...     .reg .b32 %r<2>; .reg .b64 %rd<3>;
...     ld.param.u64 %rd1, [out];
...     mov.u32 %r1, %tid.x;
...     mul.wide.u32 %rd2, %r1, 4;
...     add.s64 %rd2, %rd1, %rd2;
...     st.global.u32 [%rd2], %r1;
...     ret;
... }'''
>>> memory = GlobalMemory()
>>> out = memory.empty(4, "u4")
>>> report = launch(parse(text).kernels["store"], 1, 4, [out], memory)
>>> memory.read(out, 4, "u4").tolist(), report.global_written_bytes
([0, 1, 2, 3], 16)
"""

from .errors import (
    Deadlock,
    DivergentBarrier,
    EmulatorError,
    Misaligned,
    OutOfBounds,
    PtxError,
    Trap,
    Uninitialised,
    UnknownInstruction,
)
from .fences import missing_wgmma_fences
from .launch import launch
from .memory import GlobalMemory
from .parse import Kernel, Module, Param, parse
from .report import Race, Report
from .tensor_map import TensorMap, encode_tensor_map, read_tensor_map

__all__ = [
    "Deadlock",
    "DivergentBarrier",
    "EmulatorError",
    "GlobalMemory",
    "Kernel",
    "Misaligned",
    "Module",
    "OutOfBounds",
    "Param",
    "PtxError",
    "Race",
    "Report",
    "TensorMap",
    "Trap",
    "Uninitialised",
    "UnknownInstruction",
    "encode_tensor_map",
    "launch",
    "missing_wgmma_fences",
    "parse",
    "read_tensor_map",
]

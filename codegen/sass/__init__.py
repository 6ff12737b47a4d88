"""Time a CUDA kernel from its machine code, without a GPU.

`disassemble` a cubin, describe the `Board` it would run on and the `Work` of a launch, and `predict_time` issues the
kernel's main loop for one multiprocessor as the control bits in the code say. Knows nothing of attention.
"""

from .annotate import annotate
from .board import Board, Work
from .bound import static_bound
from .control import Control, decode_control
from .elf import Resources, resource_usage
from .errors import (
    BadConstants,
    BadCubin,
    DisassemblerMissing,
    DoesNotFit,
    MissingWork,
    SassError,
    UnknownArchitecture,
    UnknownOpcode,
)
from .instruction import Instruction
from .kernel_time import KernelTime, predict_time
from .listing import Function, Listing, disassemble
from .measured import as_measured, constants_version
from .occupancy import blocks_per_sm
from .path import LoopSummary, Trace
from .rates import COMPARED, memory_path
from .tensor import WARPS_OF_A_GROUP

__all__ = [
    "COMPARED",
    "WARPS_OF_A_GROUP",
    "BadConstants",
    "BadCubin",
    "Board",
    "Control",
    "DisassemblerMissing",
    "DoesNotFit",
    "Function",
    "Instruction",
    "KernelTime",
    "Listing",
    "LoopSummary",
    "MissingWork",
    "Resources",
    "SassError",
    "Trace",
    "UnknownArchitecture",
    "UnknownOpcode",
    "Work",
    "annotate",
    "as_measured",
    "blocks_per_sm",
    "constants_version",
    "decode_control",
    "disassemble",
    "memory_path",
    "predict_time",
    "resource_usage",
    "static_bound",
]

"""Name what can go wrong between a cubin and a predicted time, one class per mistake."""


class SassError(Exception):
    """Base of every error of this package; the message says what was asked, what stands in the way and what to do."""


class DisassemblerMissing(SassError):
    """NVIDIA's nvdisasm is neither in a wheel of this environment nor on the PATH."""


class BadCubin(SassError):
    """The bytes are not a cubin that nvdisasm and the ELF reader understand."""


class UnknownOpcode(SassError):
    """An instruction on the timed path has no entry in `rates.py`; guessing its cost would falsify the time."""


class UnknownArchitecture(SassError):
    """No table of pipe rates exists for this sm."""


class DoesNotFit(SassError):
    """Not even one block of the launch fits a multiprocessor of the board."""


class MissingWork(SassError):
    """The launch lacks a number (FLOPs or bytes) without which no time follows."""


class BadConstants(SassError):
    """A file of measured constants that cannot be read, or a constant that no machine has."""

"""Name every way in which a launch can fail; each message says which instruction, where, and what the limit was."""

from __future__ import annotations


class EmulatorError(Exception):
    """Base of all errors of the emulator: `except EmulatorError` catches what a kernel or its launch did wrong."""


class PtxError(EmulatorError):
    """The text is no PTX that the parser understands."""


class UnknownInstruction(EmulatorError):
    """An opcode or a modifier that the emulator does not implement; it is never guessed."""


class OutOfBounds(EmulatorError):
    """An access outside every allocation, or outside the shared, local or parameter memory of the launch."""


class Misaligned(EmulatorError):
    """An access whose address is no multiple of its size."""


class Uninitialised(EmulatorError):
    """A read of shared bytes that nobody has written (reported only by `check_races=True`)."""


class Deadlock(EmulatorError):
    """Threads wait at a barrier or an mbarrier that nobody can complete, or spin on a value that nobody writes."""


class DivergentBarrier(EmulatorError):
    """A barrier or another warp-wide instruction was reached by a part of a warp only."""


class Trap(EmulatorError):
    """The kernel executed `trap`."""

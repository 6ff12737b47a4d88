"""Decode the control bits with which ptxas schedules each instruction.

The 128-bit encoding carries 21 bits of schedule at bit 105 (bit 41 of the high word), the same layout from sm_70 to
sm_120: stall 4, yield 1, write barrier 3, read barrier 3, wait mask 6, reuse 4 (docs/model.md).
"""

from typing import NamedTuple

NO_BARRIER = 7  # the 3-bit fields name scoreboard 0..5; 7 means none


class Control(NamedTuple):
    """The schedule of one instruction.

    `stall` counts cycles until this warp may issue again (0 acts as 1); `write` and `read` name the scoreboard that is
    released when the result is there, and when the operands have been read; `waits` are the scoreboards to wait for.
    """

    stall: int
    yields: bool
    write: int
    read: int
    waits: tuple[int, ...]
    reuse: int

    def __str__(self) -> str:
        """In the notation of maxas: `B0-2---:R1:W-:Y:S04`."""
        waits = "".join(str(k) if k in self.waits else "-" for k in range(6))
        read = "-" if self.read == NO_BARRIER else str(self.read)
        write = "-" if self.write == NO_BARRIER else str(self.write)
        return f"B{waits}:R{read}:W{write}:{'Y' if self.yields else '-'}:S{self.stall:02d}"


WAITS = tuple(tuple(k for k in range(6) if mask >> k & 1) for mask in range(64))


def decode_control(high_word: int) -> Control:
    """The schedule in the upper 64 bits of an instruction.

    >>> decode_control(0x000FE40000000F00).stall
    2
    """
    bits = high_word >> 41
    return Control(
        stall=bits & 15,
        yields=not bits >> 4 & 1,  # the bit is inverted: set means "do not yield"
        write=bits >> 5 & 7,
        read=bits >> 8 & 7,
        waits=WAITS[bits >> 11 & 63],
        reuse=bits >> 17 & 15,
    )

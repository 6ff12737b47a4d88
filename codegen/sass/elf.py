"""Read registers, static shared memory and stack of each kernel from a cubin's ELF sections."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from .errors import BadCubin

# Attributes of .nv.info, from the names cuobjdump -elf prints: each holds (symbol index, value).
EIATTR_FRAME_SIZE = 0x11
EIATTR_REGCOUNT = 0x2F
EIFMT_SVAL = 4  # the one format whose value has its own size

RESERVED_SMEM_BYTES = 1024  # from sm_90 on .nv.shared.NAME includes the KB that the system keeps for itself
RELOCATABLE_SM_SHIFT = 8  # ABI version 8 (CUDA 12.8 and later) keeps the sm in bits 8..15 of e_flags, before in 0..7


class Resources(NamedTuple):
    """What one kernel takes: registers a thread, bytes of static shared memory a block, bytes of stack a thread.

    The stack holds spilled registers and local arrays. Shared memory is what the source declares, without the KB that
    the system reserves per block (cuobjdump counts that one in from sm_90 on).
    """

    registers: int
    static_smem_bytes: int
    stack_bytes: int


class Section(NamedTuple):
    name: str
    offset: int
    size: int
    link: int
    info: int


def read_sections(cubin: bytes) -> list[Section]:
    """The section headers of a 64-bit ELF file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise BadCubin(
            f"expected a cubin (64-bit ELF), got {len(cubin)} bytes beginning {cubin[:8]!r}; compile to sm_XX, no PTX"
        )
    try:
        (table,) = struct.unpack_from("<Q", cubin, 0x28)
        entry, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
        raw = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry) for i in range(count)]
        strings = raw[names][4]
        return [Section(_string(cubin, strings + s[0]), s[4], s[5], s[6], s[7]) for s in raw]
    except (struct.error, IndexError, ValueError) as error:
        raise BadCubin(
            f"damaged cubin of {len(cubin)} bytes: {error}; NVRTC's getCUBIN drops the last byte, append a zero byte"
        ) from error


def read_sm(cubin: bytes) -> int:
    """The architecture a cubin is built for: 80, 90, 120 ..."""
    read_sections(cubin)
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    return int(flags >> RELOCATABLE_SM_SHIFT & 0xFF if cubin[8] >= 8 else flags & 0xFF)


def resource_usage(cubin: bytes) -> dict[str, Resources]:
    """Resources of each kernel by name."""
    sections = read_sections(cubin)
    symbols = next((_symbol_names(cubin, s, sections) for s in sections if s.name == ".symtab"), [])
    registers: dict[str, int] = {}
    stack: dict[str, int] = {}
    shared: dict[str, int] = {}
    reserved = RESERVED_SMEM_BYTES if read_sm(cubin) >= 90 else 0
    for section in sections:
        if section.name == ".nv.info":
            for attribute, symbol, value in _attributes(cubin, section):
                if attribute == EIATTR_REGCOUNT:
                    registers[symbols[symbol]] = value
                elif attribute == EIATTR_FRAME_SIZE:
                    stack[symbols[symbol]] = value
        elif section.name.startswith(".nv.shared."):
            shared[section.name[len(".nv.shared.") :]] = max(0, section.size - reserved)
    kernels = [s for s in sections if s.name.startswith(".text.")]
    for section in kernels:  # sm_80 style: the count in the section header, for tools that write no EIATTR_REGCOUNT
        registers.setdefault(section.name[len(".text.") :], section.info >> 24)
    names = [s.name[len(".text.") :] for s in kernels]
    return {name: Resources(registers[name], shared.get(name, 0), stack.get(name, 0)) for name in names}


def _string(cubin: bytes, start: int) -> str:
    return cubin[start : cubin.index(b"\0", start)].decode()


def _symbol_names(cubin: bytes, table: Section, sections: list[Section]) -> list[str]:
    strings = sections[table.link].offset
    offsets = range(table.offset, table.offset + table.size, 24)
    return [_string(cubin, strings + struct.unpack_from("<I", cubin, offset)[0]) for offset in offsets]


def _attributes(cubin: bytes, info: Section) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol, value) for every attribute of .nv.info that holds a pair."""
    offset, end = info.offset, info.offset + info.size
    while offset < end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, offset)
        offset += 4
        if form != EIFMT_SVAL:
            continue
        if size == 8:
            symbol, value = struct.unpack_from("<II", cubin, offset)
            yield attribute, symbol, value
        offset += size

"""Print machine code with the CUDA line that each instruction comes from beside it."""

import re

from .elf import read_sections
from .listing import Function, Listing, disassemble, run_nvdisasm

SECTION = re.compile(r"^\.text\.([^\n:]+):\n", re.M)
LINE = re.compile(r'^\s+//## File "(?P<file>[^"]*)", line (?P<line>\d+)|^\s+/\*(?P<address>[0-9a-f]+)\*/', re.M)
NO_LINES = "// No line information in this cubin: compile with -lineinfo to see the CUDA source beside the code.\n"


def annotate(code: Listing | bytes, source: str) -> str:
    """Instructions under the source lines they come from; compile with `-lineinfo`.

    `source` is the text that was compiled; lines of other files (headers) are named, not quoted.
    """
    listing = code if isinstance(code, Listing) else disassemble(code)
    if not any(section.name == ".debug_line" for section in read_sections(listing.cubin)):
        return NO_LINES + str(listing)
    origins = _origins(listing.cubin)
    main_file = _main_file(origins)
    text = source.splitlines()
    parts = [f"{listing.target}\n"]
    for name, function in listing.functions.items():
        parts.append(_annotate_function(function, origins.get(name, {}), text, main_file))
    return "\n".join(parts)


Origins = dict[str, dict[int, tuple[str, int]]]  # function -> address -> (file, line)


def _origins(cubin: bytes) -> Origins:
    pieces = SECTION.split(run_nvdisasm(cubin, "-g"))[1:]
    origins: Origins = {}
    for name, body in zip(pieces[::2], pieces[1::2], strict=True):
        current: tuple[str, int] | None = None
        lines = origins.setdefault(name, {})
        for match in LINE.finditer(body):
            file, line, address = match.groups()
            if address is None:
                current = (file, int(line))
            elif current is not None:
                lines[int(address, 16)] = current
    return origins


def _main_file(origins: Origins) -> str:
    """The file most instructions come from: the source itself, whatever name NVRTC was given for it."""
    files = [file for lines in origins.values() for file, _ in lines.values()]
    return max(set(files), key=files.count) if files else ""


def _annotate_function(function: Function, origins: dict[int, tuple[str, int]], text: list[str], main_file: str) -> str:
    head, *rows = str(function).splitlines()
    lines = [head]
    last = None
    for row in rows:
        if not row.startswith("  "):  # a label
            lines.append(row)
            continue
        origin = origins.get(int(row.split(maxsplit=1)[0], 16))
        if origin is not None and origin != last:
            file, number = last = origin
            quoted = text[number - 1].strip() if file == main_file and number <= len(text) else f"({file})"
            lines.append(f"// {number:4d}: {quoted}")
        lines.append(row)
    return "\n".join(lines) + "\n"

"""Machine code with its CUDA source beside it."""

from flashsmith.sass import annotate, disassemble

from .cuda import SCALE, compile_cubin


def test_source_lines_stand_above_their_instructions():
    text = annotate(compile_cubin(SCALE, 90, "-lineinfo")[0], SCALE)
    lines = text.splitlines()
    assert "//    6: x[blockIdx.x * 256 + threadIdx.x] = by * row[255 - threadIdx.x];" in lines
    store = next(k for k, line in enumerate(lines) if " STG" in line)
    origin = next(line for line in reversed(lines[:store]) if line.startswith("//"))
    assert "by * row[255 - threadIdx.x]" in origin
    barrier = next(k for k, line in enumerate(lines) if "BAR.SYNC" in line)
    assert lines[barrier - 1].endswith("__syncthreads();")


def test_nothing_is_lost():
    listing = disassemble(compile_cubin(SCALE, 80, "-lineinfo")[0])
    annotated = annotate(listing, SCALE)
    assert [x for x in annotated.splitlines() if not x.startswith("//")] == str(listing).splitlines()


def test_without_line_information_it_says_so():
    text = annotate(compile_cubin(SCALE, 80)[0], SCALE)
    assert text.startswith("// No line information") and "EXIT" in text

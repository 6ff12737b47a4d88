"""PTX text to kernels: names, parameters, sizes, and everything in the text that is easy to trip over."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import EmulatorError, Kernel, Module, PtxError, parse

from .conftest import Out, compile_cuda, ptx_kernel, run_ptx

i32, f32 = np.int32, np.float32

SEVERAL = """
struct Strides { long long batch, head, row; int rows; };
extern "C" __global__ void __launch_bounds__(256)
forward(const float* x, int n, float scale, Strides s, short h, double d) {
    __shared__ float tile[3][40];
    tile[n % 3][threadIdx.x % 40] = x[s.row + s.rows] * scale + h + (float)d;
    __syncthreads();
    ((float*)x)[0] = tile[0][n % 40];
}
extern "C" __global__ void backward(float* x) { x[0] = 1.f; }
"""


def test_module_and_kernels():
    """All entries by name, in the order of the text; the target as written."""
    module = parse(compile_cuda(SEVERAL))
    assert isinstance(module, Module) and module.target == "sm_80"
    assert set(module.kernels) == {"forward", "backward"}
    for name, kernel in module.kernels.items():
        assert isinstance(kernel, Kernel) and kernel.name == name
    assert parse(compile_cuda(SEVERAL, "compute_90")).target == "sm_90"


def test_parameters():
    """Sizes, offsets and alignment follow C."""
    kernel = parse(compile_cuda(SEVERAL)).kernels["forward"]
    assert isinstance(kernel.params, tuple)
    assert [p.size for p in kernel.params] == [8, 4, 4, 32, 2, 8]
    assert [p.offset for p in kernel.params] == [0, 8, 12, 16, 48, 56]
    assert [p.align for p in kernel.params] == [8, 4, 4, 8, 2, 8]
    assert [p.name for p in kernel.params] == [f"forward_param_{i}" for i in range(6)]
    assert [p.type.lstrip(".") for p in kernel.params[:3]] == ["u64", "u32", "f32"]


def test_shared_bytes_and_thread_limit():
    """What is static in the text; None where nothing bounds the block."""
    kernels = parse(compile_cuda(SEVERAL)).kernels
    assert kernels["forward"].static_shared_bytes == 3 * 40 * 4
    assert kernels["forward"].max_threads == 256
    assert kernels["backward"].static_shared_bytes == 0
    assert kernels["backward"].max_threads is None


def test_thread_limit_of_several_dimensions():
    """.maxntid and .reqntid name a product."""
    text = ptx_kernel("ld.param.u64 %rd0, [p0];")
    for directive, limit in ((".maxntid 128", 128), (".maxntid 16, 8, 2", 256), (".reqntid 64, 1, 1", 64)):
        changed = text.replace("p0)\n{", f"p0)\n{directive}\n.minnctapersm 1\n{{")
        assert changed != text
        assert parse(changed).kernels["k"].max_threads == limit


def test_shared_arrays_are_aligned():
    """Padding between arrays counts."""
    declarations = ".shared .align 4 .b8 a[6];\n .shared .align 16 .b8 b[32];\n .shared .f32 c;"
    kernel = parse(ptx_kernel("mov.u32 %r0, a; mov.u32 %r1, b; mov.u32 %r2, c;", declarations=declarations)).kernels[
        "k"
    ]
    assert 16 + 32 + 4 <= kernel.static_shared_bytes <= 64


def store(*lines: str, declarations: str = "", head: str = "") -> np.ndarray:
    """Run lines that leave a value in %r9; returns what lane 0 stored."""
    body = "ld.param.u64 %rd0, [p0];\n" + "\n".join(lines) + "\nst.global.u32 [%rd0], %r9;"
    return run_ptx(ptx_kernel(body, declarations=declarations, head=head), [Out(1, i32)]).out[0]


def test_line_directives_swallow_nothing():
    """.loc, .file and .pragma end with their line, not at a semicolon (pitfall 1)."""
    lines = [
        "mov.u32 %r9, 1;",
        ".loc 1 36 20",
        "add.s32 %r9, %r9, 10;",
        '.pragma "nounroll";',
        "add.s32 %r9, %r9, 100;",
        "\t.loc\t1 2 3 // and a comment",
        "add.s32 %r9, %r9, 1000;",
    ]
    assert store(*lines, head='.file 1 "a; b.cu"') == 1111


def test_comments():
    """Both kinds, with PTX and braces inside."""
    lines = [
        "mov.u32 %r9, 1; // add.s32 %r9, %r9, 5; }",
        "/* add.s32 %r9, %r9, 7;",
        "   { */ add.s32 %r9, %r9, 10; /* // */ add.s32 %r9, %r9, 100;",
    ]
    assert store(*lines) == 111


def test_scopes_have_registers_and_labels_of_their_own():
    """Inline asm comes in braces: the same names in several scopes are different things (pitfall 4)."""
    block = """
    {{
        .reg .pred p;
        .reg .b32 x;
        mov.u32 x, {start};
    again:
        add.s32 x, x, 1;
        setp.lt.s32 p, x, {stop};
        @p bra again;
        add.s32 %r9, %r9, x;
    }}"""
    lines = [
        "mov.u32 %r9, 0;",
        block.format(start=0, stop=5),
        block.format(start=10, stop=20),
        block.format(start=3, stop=0),
    ]
    assert store(*lines) == 5 + 20 + 4


def test_forward_jump_inside_a_scope():
    """A label that stands behind its use, twice."""
    block = """{{
        .reg .pred p;
        setp.gt.s32 p, %r9, {limit};
        @p bra.uni over;
        add.s32 %r9, %r9, 100;
    over:
    }}"""
    assert store("mov.u32 %r9, 7;", block.format(limit=5), block.format(limit=8)) == 107


def test_jumps_out_of_a_scope_and_over_a_label_of_its_own():
    """A spin loop as inline assembly writes it, twice: labels behind the jump, and an outer label from within."""
    block = """{
        .reg .pred p;
    spin:
        add.s32 %r9, %r9, 1;
        setp.ge.s32 p, %r9, LIMIT;
        @p bra done;
        bra spin;
    done:
        setp.ge.s32 p, %r9, 12;
        @p bra end;
    }"""
    lines = [block.replace("LIMIT", limit) for limit in ("5", "9", "30", "90")]
    assert store("mov.u32 %r9, 0;", *lines, "end:") == 30


def test_nested_scopes_shadow():
    """An inner register hides the outer of the same name until its brace closes."""
    code = """
    .reg .b32 x;
    mov.u32 x, 1;
    { .reg .b32 x; mov.u32 x, 50; { .reg .b32 x; mov.u32 x, 900; } mov.u32 %r8, x; }
    add.s32 %r9, x, %r8;"""
    assert store(code) == 51


def test_several_statements_on_a_line_and_one_over_several():
    """White space means nothing."""
    assert store("mov.u32 %r9,4;add.s32 %r9,%r9,%r9;\n add.s32\n\t%r9 ,\n %r9 , 1 ;") == 9


def test_register_declarations():
    """Ranges, lists and plain names."""
    declarations = ".reg .b32 alpha, beta;\n.reg .s32 %q<3>;\n.reg .u32 $x_1;"
    lines = ["mov.u32 alpha, 1;", "mov.u32 beta, 10;", "mov.u32 %q2, 100;", "mov.u32 $x_1, 1000;"]
    lines += ["add.s32 %r9, alpha, beta;", "add.s32 %r9, %r9, %q2;", "add.s32 %r9, %r9, $x_1;"]
    assert store(*lines, declarations=declarations) == 1111


def test_sinks():
    """An underscore takes what nobody wants."""
    lines = ["mov.u32 %r9, 5;", "setp.eq.s32 _|%p1, %r9, 5;", "mov.b64 %rd1, 38654705667;", "mov.b64 {_, %r8}, %rd1;"]
    lines += ["selp.b32 %r9, 100, %r8, %p1;"]
    assert store(*lines) == 9


def test_constant_memory_and_globals_or_a_clear_refusal():
    """A module-level table is either readable or refused, never zeros."""
    source = """
    __constant__ int table[4] = {5, 6, 7, 8};
    extern "C" __global__ void k(int* out, int i) { out[0] = table[i & 3]; }"""
    try:
        out = run_ptx(compile_cuda(source), [Out(1, i32), 2]).out
    except EmulatorError:
        return
    assert out[0] == 7


def test_device_function_calls_or_a_clear_refusal():
    """A call that was not inlined either works or is named."""
    source = """
    __device__ __noinline__ int twice(int x) { return 2 * x + 1; }
    extern "C" __global__ void k(int* out, int i) { out[0] = twice(i); }"""
    try:
        out = run_ptx(compile_cuda(source), [Out(1, i32), 20]).out
    except EmulatorError:
        return
    assert out[0] == 41


GOOD = ptx_kernel("ld.param.u64 %rd0, [p0]; st.global.u32 [%rd0], 1;")
BROKEN = {
    "not PTX": "int main() { return 0; }",
    "empty": "",
    "brace missing": GOOD.rstrip().rstrip("}"),
    "undeclared register": ptx_kernel("mov.u32 %nobody1, 5; ld.param.u64 %rd0, [p0]; st.global.u32 [%rd0], %nobody1;"),
    "unknown label": ptx_kernel("bra nowhere;"),
    "unknown parameter": ptx_kernel("ld.param.u64 %rd0, [p7]; st.global.u32 [%rd0], 1;"),
    "operand missing": ptx_kernel("ld.param.u64 %rd0, [p0]; add.s32 %r0, %r1; st.global.u32 [%rd0], %r0;"),
    "address not closed": ptx_kernel("ld.param.u64 %rd0, [p0; st.global.u32 [%rd0], 1;"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_text_is_refused(case):
    """While parsing, or at the latest when the kernel runs; always as one of the emulator's errors."""
    with pytest.raises(EmulatorError):
        run_ptx(BROKEN[case], [Out(1, i32)], kernel="k")


@pytest.mark.parametrize("case", ["not PTX", "empty", "brace missing"])
def test_text_without_structure_is_a_ptx_error(case):
    """parse itself says so."""
    with pytest.raises(PtxError):
        parse(BROKEN[case])

"""Loops and paths: in the graph, not by address."""

import pytest
from flashsmith.sass import disassemble
from flashsmith.sass.flow import build_graph
from flashsmith.sass.path import summarise_loops, trace_function

from .cuda import compile_scores
from .listings import HMMA, listed


def traced(*lines, rare=True):
    instructions, labels = listed(lines)
    graph = build_graph(instructions, labels)
    return trace_function(instructions, graph, rare=rare), summarise_loops(instructions, graph)


def test_a_prefetch_before_the_header_belongs_to_the_loop():
    """FlashAttention-2's K prefetch: out of line, above the loop's head, reached by a branch out of the loop."""
    trace, loops = traced(
        "MOV R0, R1", "BRA `(.L_head)",
        ".L_prefetch:", "LDGSTS.E.128 [R2], [R4.64]", "LDGSTS.E.128 [R2+0x10], [R4.64]", "BRA `(.L_back)",
        ".L_head:", HMMA, "@P0 BRA `(.L_prefetch)",
        ".L_back:", "IADD3 R0, R0, 0x1, RZ", "@P1 BRA `(.L_head)", "STG.E [R2.64], R4", "EXIT",
    )  # fmt: skip
    assert [i.base for i in trace.loop] == ["HMMA", "BRA", "LDGSTS", "LDGSTS", "BRA", "IADD3", "BRA"]
    assert [i.base for i in trace.prologue] == ["MOV", "BRA"]
    assert [i.base for i in trace.epilogue] == ["STG", "EXIT"]
    assert loops[0].instructions == 7


def test_a_skip_branch_is_not_taken():
    trace, _ = traced(
        ".L_head:", HMMA, "@!P0 BRA `(.L_skip)", "FMUL R0, R0, R1", "FMUL R2, R2, R1",
        ".L_skip:", "BRA.U UP0, `(.L_head)", "EXIT",
    )  # fmt: skip
    assert [i.base for i in trace.loop].count("FMUL") == 2


def test_the_short_way_skips_arithmetic_but_no_copies():
    lines = (
        ".L_head:", HMMA, "@!P0 BRA `(.L_unmasked)", "FSEL R0, R0, -INF , P2", "FSEL R2, R2, -INF , P2",
        ".L_unmasked:", "@!P1 BRA `(.L_last)", "LDGSTS.E.128 [R2], [R4.64]",
        ".L_last:", "BRA.U UP0, `(.L_head)", "EXIT",
    )  # fmt: skip
    long, short = (traced(*lines, rare=rare)[0].loop for rare in (True, False))
    assert [i.base for i in long] == ["HMMA", "BRA", "FSEL", "FSEL", "BRA", "LDGSTS", "BRA"]
    assert [i.base for i in short] == ["HMMA", "BRA", "BRA", "LDGSTS", "BRA"]


def test_a_detour_through_rare_code_is_an_iteration_of_its_own() -> None:
    """A loop over ordinary tiles, left in the middle for a special one; then the code of both ends in its own copy."""
    lines = (
        ".L_head:", HMMA, "@P0 BRA `(.L_special)", HMMA, "LDGSTS.E.128 [R2], [R4.64]", "@P1 BRA `(.L_head)",
        "BRA `(.L_done)",
        ".L_special:", "FSEL R0, R0, -INF , P2", HMMA, "LDGSTS.E.128 [R2], [R4.64]", "@P1 BRA `(.L_head)",
        ".L_done:", "STG.E [R2.64], R4", "EXIT",
    )  # fmt: skip
    special, ordinary = (traced(*lines, rare=rare)[0].loop for rare in (True, False))
    assert [i.base for i in special] == ["HMMA", "BRA", "FSEL", "HMMA", "LDGSTS", "BRA"]  # one header, two ways back
    assert [i.base for i in ordinary] == ["HMMA", "BRA", "HMMA", "LDGSTS", "BRA"]


def test_a_detour_whose_first_half_is_a_copy() -> None:
    """As ptxas rotates it on sm_90: the inner loop begins in the middle of an iteration."""
    lines = (
        ".L_outer:", HMMA, "@P0 BRA `(.L_special)",
        ".L_head:", "MUFU.EX2 R0, R1", HMMA, "LDGSTS.E.128 [R2], [R4.64]", "@!P1 BRA `(.L_done)", HMMA,
        "@!P0 BRA `(.L_head)",
        ".L_special:", "FSEL R0, R0, -INF , P2", HMMA, "LDGSTS.E.128 [R2], [R4.64]", "@P1 BRA `(.L_outer)",
        ".L_done:", "STG.E [R2.64], R4", "EXIT",
    )  # fmt: skip
    special, ordinary = (traced(*lines, rare=rare)[0].loop for rare in (True, False))
    assert [i.base for i in special] == ["FSEL", "HMMA", "LDGSTS", "BRA", "HMMA", "BRA"]
    assert [i.base for i in ordinary] == ["MUFU", "HMMA", "LDGSTS", "BRA", "HMMA", "BRA"]


def test_a_turn_of_a_persistent_loop_is_no_detour():
    trace, _ = traced(
        ".L_tile:", "MOV R0, R1", ".L_head:", HMMA, "@P0 BRA `(.L_head)", "STG.E [R2.64], R4", "@P1 BRA `(.L_tile)",
        "EXIT",
    )  # fmt: skip
    assert [i.base for i in trace.loop] == ["HMMA", "BRA"]


def test_a_call_of_a_local_label_leaves_the_loop():
    """sm_80: `@!P0 CALL.REL.NOINC `(.L_x)` is how ptxas leaves a loop whose warps shuffle."""
    trace, _ = traced(
        ".L_head:", HMMA, "@!P0 CALL.REL.NOINC `(.L_out)", "BRA `(.L_head)", ".L_out:", "STG.E [R2.64], R4", "EXIT"
    )
    assert [i.base for i in trace.epilogue] == ["STG", "EXIT"]


def test_a_divergence_path_is_left_out():
    trace, _ = traced(
        ".L_head:", HMMA, "BRA.DIV ~URZ, `(.L_slow)", ".L_back:", "@P0 BRA `(.L_head)", "EXIT",
        ".L_slow:", *["SHFL.BFLY PT, R0, R1, 0x1, 0x1f"] * 9, "BRA `(.L_back)",
    )  # fmt: skip
    assert [i.base for i in trace.loop] == ["HMMA", "BRA", "BRA"]


def test_an_exit_behind_an_outer_loop_is_found():
    """FlashAttention-2's backward leaves through the head of its outer loop, which only a back edge reaches."""
    trace, _ = traced(
        ".L_outer:", "@P2 EXIT", ".L_head:", HMMA, "@P0 BRA `(.L_head)", "STG.E [R2.64], R4", "BRA `(.L_outer)",
    )  # fmt: skip
    assert [i.base for i in trace.epilogue] == ["STG", "BRA"]


def test_no_loop_at_all():
    trace, loops = traced(HMMA, "@P0 BRA `(.L_end)", "MOV R0, R1", ".L_end:", "EXIT")
    assert not trace.loop and not loops
    assert [i.base for i in trace.prologue] == ["HMMA", "BRA", "MOV", "EXIT"]


@pytest.mark.parametrize("sm", [80, 89, 90, 120])
@pytest.mark.parametrize("shape", [{}, {"outer": True}, {"masked": True}, {"outer": True, "masked": True}], ids=str)
def test_the_main_loop_of_compiled_kernels(sm, shape):
    """Inner loop under an outer one, unmasked twin of a masked one; with the copies behind the branch."""
    function = disassemble(compile_scores(sm, **shape)).functions["scores"]
    loop = function.trace.loop
    Br, Bc, d, warps = 128, 64, 64, 4
    assert sum(i.base == "HMMA" for i in loop) == 2 * Br * Bc * d // 4096 // warps
    assert sum(i.base == "LDGSTS" for i in loop) == Bc * d * 2 // 16 // (warps * 32)
    assert sum(i.base == "LDSM" for i in loop) == Bc // 16 * d // 16
    assert not any(i.base in ("FSEL", "FSETP") for i in loop)  # the mask
    on_the_way_in = sum(i.base == "HMMA" for i in function.trace.prologue)  # sm_120's ptxas also peels iterations
    assert on_the_way_in % 64 == 0 and on_the_way_in >= 64 * shape.get("masked", False)
    tensor_loops = [x for x in function.loops if x.tensor_instructions]
    assert len(tensor_loops) == 1 + shape.get("outer", False) + shape.get("masked", False)

"""cp.async: data lands at the wait that covers its group, never before."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import OutOfBounds

from .conftest import Out, ptx_kernel, run_ptx

i32, f32 = np.int32, np.float32
SHARED = ".shared .align 16 .b8 buffer[4096];"
HEAD = """
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [p0];
    ld.param.u64 %rd1, [p1];
    mad.wide.u32 %rd2, %r0, 16, %rd0;
    mad.wide.u32 %rd3, %r0, 16, %rd1;
    mov.u32 %r1, buffer;
    mad.lo.s32 %r1, %r0, 16, %r1;
"""


def copy(stage: int, size: int = 16, kind: str = "cg", source: str = "", offset: int = 0) -> str:
    """Issue the copy of chunk `stage` (512 bytes apart) into stage `stage` of the buffer."""
    return (
        f"cp.async.{kind}.shared.global [%r1+{512 * stage + offset}], [%rd2+{512 * stage + offset}], {size}{source};\n"
    )


def look(stage: int, row: int) -> str:
    """Store what this thread sees in a stage to row `row` of the output."""
    return (
        f"ld.shared.v4.f32 {{%f0, %f1, %f2, %f3}}, [%r1+{512 * stage}];\n"
        f"st.global.v4.f32 [%rd3+{512 * row}], {{%f0, %f1, %f2, %f3}};\n"
    )


COMMIT = "cp.async.commit_group;\n"


def wait(groups: int) -> str:
    return f"cp.async.wait_group {groups};\n"


def run(body: str, rows: int, x: np.ndarray | None = None, **options):
    """Launch one warp on 8 stages of 128 floats; returns what it looked at, a row a look."""
    x = np.arange(1024, dtype=f32) if x is None else x
    text = ptx_kernel(HEAD + body, [".u64", ".u64"], declarations=SHARED)
    return run_ptx(text, [x, Out((rows, 128), f32)], **options)


def stage_of(i: int) -> np.ndarray:
    return np.arange(128 * i, 128 * i + 128, dtype=f32)


def test_before_the_wait_there_is_poison():
    """A forgotten wait shows up as NaN, not as the right answer by luck."""
    out = run(copy(0) + COMMIT + look(0, 0) + wait(0) + look(0, 1), 2).out
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1], stage_of(0))


def test_early_copies_are_there_at_once():
    """The other extreme of timing: then the missing wait goes unseen, but for the race detector in another warp."""
    body = copy(0) + COMMIT + look(0, 0) + wait(0) + look(0, 1)
    out = run(body, 2, late=False).out
    np.testing.assert_array_equal(out, [stage_of(0)] * 2)


def test_before_the_wait_the_old_contents_are_still_there():
    """The second copy into a buffer shows only after its own wait."""
    body = copy(0) + COMMIT + wait(0)
    body += "cp.async.cg.shared.global [%r1], [%rd2+512], 16;\n" + COMMIT + look(0, 0) + wait(0) + look(0, 1)
    out = run(body, 2).out
    assert not (out[0] == stage_of(1)).any()
    np.testing.assert_array_equal(out[1], stage_of(1))


def test_wait_group_leaves_the_youngest_groups_in_flight():
    """Four groups: wait 2 lands the first two, wait 1 the third, wait 0 the last."""
    body = "".join(copy(i) + COMMIT for i in range(4))
    row = 0
    for groups in (2, 1, 0):
        body += wait(groups)
        for stage in range(4):
            body += look(stage, row)
            row += 1
    out = run(body, 12).out.reshape(3, 4, 128)
    for waited, landed in enumerate((2, 3, 4)):
        for stage in range(4):
            if stage < landed:
                np.testing.assert_array_equal(out[waited, stage], stage_of(stage))
            else:
                assert np.isnan(out[waited, stage]).all(), f"stage {stage} after wait {2 - waited}"


def test_several_copies_make_one_group():
    """A group is all that was issued since the last commit."""
    body = copy(0) + copy(1) + COMMIT + copy(2) + COMMIT + wait(1) + "".join(look(i, i) for i in range(3))
    out = run(body, 3).out
    np.testing.assert_array_equal(out[:2], [stage_of(0), stage_of(1)])
    assert np.isnan(out[2]).all()


def test_empty_groups_count():
    """A commit with nothing before it makes a group: the idiom of a loop's tail."""
    body = copy(0) + COMMIT + COMMIT + wait(1) + look(0, 0)
    np.testing.assert_array_equal(run(body, 1).out[0], stage_of(0))


def test_wait_group_does_not_cover_what_was_not_committed():
    """wait_group 0 waits for groups; wait_all for everything."""
    out = run(copy(0) + wait(0) + look(0, 0) + "cp.async.wait_all;\n" + look(0, 1), 2).out
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1], stage_of(0))


def test_groups_belong_to_a_thread():
    """Odd lanes commit twice; wait_group 1 lands the copy of the odd ones only."""
    body = """
        and.b32 %r2, %r0, 1;
        setp.eq.s32 %p0, %r2, 1;
    """
    body += copy(0) + COMMIT + "@!%p0 bra even;\n" + COMMIT + "even:\n" + wait(1) + look(0, 0) + wait(0) + look(0, 1)
    out = run(body, 2).out
    before = out[0].reshape(32, 4)
    assert np.isnan(before[::2]).all()
    np.testing.assert_array_equal(before[1::2], stage_of(0).reshape(32, 4)[1::2])
    np.testing.assert_array_equal(out[1], stage_of(0))


def test_a_ring_of_stages_in_a_loop():
    """Three stages, one group an iteration, the reader two behind: every tile arrives in order."""
    body = (
        copy(0)
        + COMMIT
        + copy(1)
        + COMMIT
        + """
        mov.u32 %r2, 0;
    loop:
        cp.async.wait_group 1;
        bar.sync 0;
        rem.u32 %r3, %r2, 3;
        mad.lo.u32 %r4, %r3, 512, %r1;
        ld.shared.v4.f32 {%f0, %f1, %f2, %f3}, [%r4];
        st.global.v4.f32 [%rd3], {%f0, %f1, %f2, %f3};
        add.s64 %rd3, %rd3, 512;
        add.u32 %r5, %r2, 2;
        setp.lt.u32 %p0, %r5, 8;
        rem.u32 %r6, %r5, 3;
        mad.lo.u32 %r6, %r6, 512, %r1;
        mad.wide.u32 %rd4, %r5, 512, %rd2;
        @%p0 cp.async.cg.shared.global [%r6], [%rd4], 16;
        cp.async.commit_group;
        add.u32 %r2, %r2, 1;
        setp.lt.u32 %p1, %r2, 8;
        @%p1 bra loop;
    """
    )
    result = run(body, 8, check_races=True)
    np.testing.assert_array_equal(result.out.ravel(), np.arange(1024))
    assert result.report.race_count == 0


@pytest.mark.parametrize("size", [4, 8, 16])
def test_sizes_of_ca(size):
    """cp.async.ca moves 4, 8 or 16 bytes; the rest of the chunk stays poison."""
    out = run(copy(0, size, "ca") + COMMIT + wait(0) + look(0, 0), 1).out[0].reshape(32, 4)
    words = size // 4
    np.testing.assert_array_equal(out[:, :words], stage_of(0).reshape(32, 4)[:, :words])
    assert np.isnan(out[:, words:]).all()


def test_cache_hints_change_nothing():
    """.L2::128B and spaces spelled out."""
    body = "cp.async.cg.shared.global.L2::128B [%r1], [%rd2], 16;\n" + COMMIT + wait(0) + look(0, 0)
    np.testing.assert_array_equal(run(body, 1).out[0], stage_of(0))


@pytest.mark.parametrize("kept", [0, 4, 8, 12, 16])
def test_source_size_zero_fills_the_rest(kept):
    """cp.async with a src-size reads that many bytes and writes zeros behind them."""
    out = run(f"mov.u32 %r2, {kept};\n" + copy(0, 16, "cg", ", %r2") + COMMIT + wait(0) + look(0, 0), 1).out[0]
    expected = stage_of(0).reshape(32, 4).copy()
    expected[:, kept // 4 :] = 0
    np.testing.assert_array_equal(out.reshape(32, 4), expected)


def test_zero_fill_is_chosen_by_each_lane():
    """The tail of a tile: rows past the end get zeros."""
    body = (
        "setp.lt.u32 %p0, %r0, 21;\n selp.b32 %r2, 16, 0, %p0;\n"
        + copy(0, 16, "cg", ", %r2")
        + COMMIT
        + wait(0)
        + look(0, 0)
    )
    expected = np.where(np.arange(128) < 84, stage_of(0), 0)
    np.testing.assert_array_equal(run(body, 1).out[0], expected)


def test_zero_fill_reads_nothing():
    """With src-size 0 the source may lie past the end of its buffer; with 16 it may not."""
    body = (
        "setp.lt.u32 %p0, %r0, 21;\n selp.b32 %r2, 16, 0, %p0;\n"
        + copy(0, 16, "cg", ", %r2")
        + COMMIT
        + wait(0)
        + look(0, 0)
    )
    short = np.arange(84, dtype=f32)
    np.testing.assert_array_equal(run(body, 1, short).out[0], np.where(np.arange(128) < 84, stage_of(0), 0))
    with pytest.raises(OutOfBounds):
        run(body.replace("21", "22"), 1, short)


def test_copies_under_a_predicate():
    """Lanes whose guard is false copy nothing and their memory stays as it was."""
    body = "setp.lt.u32 %p0, %r0, 9;\n@%p0 " + copy(0) + COMMIT + wait(0) + look(0, 0)
    out = run(body, 1).out[0]
    np.testing.assert_array_equal(out[:36], np.arange(36))
    assert np.isnan(out[36:]).all()


def test_another_warp_sees_the_data_after_wait_and_barrier():
    """The two halves of a block exchange tiles."""
    body = (
        copy(0)
        + COMMIT
        + wait(0)
        + "bar.sync 0;\n"
        + "xor.b32 %r2, %r0, 32;\n mov.u32 %r1, buffer;\n mad.lo.s32 %r1, %r2, 16, %r1;\n"
    )
    result = run(body + look(0, 0), 2, block=64, check_races=True)
    np.testing.assert_array_equal(result.out.ravel(), np.roll(np.arange(256), 128))
    assert result.report.race_count == 0


def test_copies_in_a_branch():
    """Every third lane copies in a branch of its own, with a group of its own."""
    body = "rem.u32 %r2, %r0, 3;\nsetp.ne.u32 %p0, %r2, 0;\n@%p0 bra over;\n" + copy(0) + COMMIT + wait(0)
    out = run(body + "over:\n" + look(0, 0), 1).out[0].reshape(32, 4)
    third = np.arange(32) % 3 == 0
    np.testing.assert_array_equal(out[third], stage_of(0).reshape(32, 4)[third])
    assert np.isnan(out[~third]).all()

"""Bulk copies: boxes of tensors and lines of bytes between global and shared memory, with mbarriers and groups."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.emulator import EmulatorError, GlobalMemory, Misaligned, OutOfBounds, encode_tensor_map, launch, parse

from .conftest import mentions, ptx_kernel

f32, u16 = np.float32, np.uint16
TYPES = {2: "bf16", 4: "f32", 1: "u8"}


def load(rank: int) -> str:
    corner = ", ".join(f"%r{10 + axis}" for axis in range(rank))
    kind = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    return f"@%p0 {kind} [%r1], [%rd1, {{{corner}}}], [%r2];\n"


def store(rank: int, kind: str = "cp.async") -> str:
    corner = ", ".join(f"%r{10 + axis}" for axis in range(rank))
    if kind == "cp.async":
        return f"@%p0 cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [%rd1, {{{corner}}}], [%r1];\n"
    return f"@%p0 cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.bulk_group [%rd1, {{{corner}}}], [%r1];\n"


WAIT = """
    spin:
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;
        @!%p1 bra spin;
"""
BEGIN = """
    mov.u32 %r0, %tid.x;
    setp.eq.u32 %p0, %r0, 0;
    mov.u64 %rd1, p0;
    cvta.param.u64 %rd1, %rd1;
    ld.param.u64 %rd2, [p1];
    mov.u32 %r1, tile;
    mov.u32 %r2, bar;
    @%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
    bar.sync 0;
    prefetch.tensormap [%rd1];
"""
LOOK = """
    mad.lo.u32 %r3, %r0, 4, %r1;
    mad.wide.u32 %rd3, %r0, 4, %rd2;
    mov.u32 %r4, %r0;
    look:
        setp.ge.u32 %p2, %r4, WORDS;
        @%p2 bra look_end;
        ld.shared.b32 %r5, [%r3];
        st.global.b32 [%rd3], %r5;
        add.u32 %r3, %r3, 128;
        add.s64 %rd3, %rd3, 128;
        add.u32 %r4, %r4, 32;
        bra look;
    look_end:
"""
FILL = LOOK.replace("look", "fill").replace("ld.shared.b32 %r5, [%r3]", "ld.global.b32 %r5, [%rd3]")
FILL = FILL.replace("st.global.b32 [%rd3], %r5", "st.shared.b32 [%r3], %r5")


def expect(size: int) -> str:
    return f"@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size};\n"


def corner(values) -> str:
    return "".join(f"mov.s32 %r{10 + axis}, {value};\n" for axis, value in enumerate(values))


class Run:
    """A tensor in global memory, a second buffer of `words` 32-bit words (what the tile holds), and a launch."""

    def __init__(self, body: str, tensor: np.ndarray, box, swizzle=0, words=None, shape=None, data=None, **options):
        memory = GlobalMemory()
        address = memory.upload(tensor)
        shape = shape or tensor.shape[::-1]
        strides = tensor.strides[::-1][1:]
        size = int(np.prod(box)) * tensor.itemsize
        words = size // 4 if words is None else words
        other = memory.upload(data) if data is not None else memory.empty(words, "u4")
        map_ = encode_tensor_map(address, shape, strides, box, TYPES[tensor.itemsize], swizzle)
        text = ptx_kernel(BEGIN + body.replace("WORDS", str(words)), target="sm_90a")
        text = text.replace(".param .u64 p0", ".param .align 64 .b8 p0[128], .param .u64 p1")
        text = text.replace(
            ".reg .pred", ".shared .align 1024 .b8 tile[32768]; .shared .align 8 .b64 bar; .reg .pred", 1
        )
        self.report = launch(parse(text).kernels["k"], 1, 32, [map_, other], memory, **options)
        self.tensor = memory.read(address, tensor.shape, tensor.dtype)
        self.tile = memory.read(other, words, "u4")
        self.written = self.report.written_bytes_of(address)


def box_of(tensor: np.ndarray, at, box) -> np.ndarray:
    """The box at a corner (both innermost first), zeros outside of the tensor."""
    grid = np.indices(box[::-1]) + np.array(at[::-1]).reshape(-1, *[1] * len(box))
    inside = np.all([(g >= 0) & (g < n) for g, n in zip(grid, tensor.shape, strict=True)], axis=0)
    where = tuple(np.clip(g, 0, n - 1) for g, n in zip(grid, tensor.shape, strict=True))
    return np.where(inside, tensor[where], 0).astype(tensor.dtype)


def unswizzled(tile: np.ndarray, span: int) -> np.ndarray:
    """Undo the swizzle as NVIDIA's figures draw it: chunk c of a 128-byte line n lies at c ^ (n % (span / 16))."""
    if not span:
        return tile.view("u1")
    chunks = tile.view("u1").reshape(-1, 8, 16)
    permuted = np.arange(8) ^ (np.arange(len(chunks))[:, None] % (span // 16))
    return np.take_along_axis(chunks, permuted[:, :, None], 1).reshape(-1)


CASES = {
    "1-D": ((64,), (16,), (8,), 0),
    "1-D past the end": ((64,), (32,), (48,), 0),
    "2-D, 128-byte swizzle": ((40, 128), (64, 16), (64, 8), 128),
    "2-D, 64-byte swizzle": ((40, 128), (32, 16), (32, 8), 64),
    "2-D, 32-byte swizzle": ((40, 128), (16, 32), (16, 8), 32),
    "2-D before the start": ((40, 64), (64, 16), (0, -5), 128),
    "3-D ragged": ((3, 21, 64), (64, 8, 2), (0, 17, 2), 128),
    "4-D": ((2, 3, 20, 64), (64, 16, 1, 1), (0, 8, 2, 1), 128),
    "4-D, wholly outside": ((2, 3, 20, 64), (64, 16, 1, 1), (0, 8, 3, 1), 128),
    "5-D": ((2, 2, 3, 4, 16), (8, 2, 3, 2, 1), (8, 3, -1, 0, 1), 0),
    "corner between multiples of 16 bytes": ((8, 64), (16, 8), (3, 1), 0),
    "edge between multiples of 16 bytes": ((8, 64), (16, 8), (48, 1), 0, (59, 8)),
}


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("case", CASES)
def test_boxes_arrive(case, late):
    """Any rank, zeros outside, swizzled, whether the data comes at once or at the last moment."""
    shape, box, at, swizzle, *extent = CASES[case]
    tensor = np.random.default_rng(1).integers(1, 60000, shape, dtype=u16)
    body = corner(at) + expect(2 * int(np.prod(box))) + load(len(box)) + WAIT + LOOK
    run = Run(body, tensor, box, swizzle, shape=extent[0] if extent else None, late=late)
    seen = tensor[:, : extent[0][0]] if extent else tensor
    np.testing.assert_array_equal(unswizzled(run.tile, swizzle).view(u16), box_of(seen, at, box).ravel())
    assert run.report.async_copied_bytes == 2 * np.prod(box)


def test_without_a_wait_there_is_poison():
    """Late, the target is NaN until somebody has to wait; early, a missing wait goes unseen."""
    tensor = np.arange(1, 65, dtype=u16)
    body = corner([0]) + expect(128) + load(1) + LOOK
    assert (Run(body, tensor, (64,)).tile == 0xFFFFFFFF).all()
    np.testing.assert_array_equal(Run(body, tensor, (64,), late=False).tile.view(u16), tensor)


@pytest.mark.parametrize("case", CASES)
def test_boxes_are_stored(case):
    """What lies outside is left out; the bytes written are counted."""
    shape, box, at, swizzle, *extent = CASES[case]
    rng = np.random.default_rng(2)
    tensor, tile = np.zeros(shape, u16), rng.integers(1, 60000, int(np.prod(box)), dtype=u16)
    body = FILL + "fence.proxy.async.shared::cta;\nbar.sync 0;\n" + corner(at) + store(len(box))
    body += "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;\n"
    run = Run(body, tensor, box, swizzle, data=tile, words=tile.size // 2, shape=extent[0] if extent else None)
    expected, marks = np.zeros(shape, u16), box_of(np.arange(1, tensor.size + 1).reshape(shape), at, box).ravel()
    if extent:
        marks = box_of(np.arange(1, tensor.size + 1).reshape(shape)[:, : extent[0][0]], at, box).ravel()
    values = unswizzled(tile, swizzle).view(u16)
    expected.ravel()[marks[marks > 0] - 1] = values[marks > 0]
    np.testing.assert_array_equal(run.tensor, expected)
    assert run.written == 2 * (marks > 0).sum()


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_a_store_reads_until_its_wait(late):
    """Who overwrites the tile before wait_group changes what is stored, if the store is late."""
    body = FILL + corner([0]) + store(1) + "cp.async.bulk.commit_group;\nbar.sync 0;\n"
    body += "st.shared.u16 [%r1], 7;\n" + store(1) + "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 1;\n"
    body += "st.shared.u16 [%r1+2], 9;\n"
    tile = np.arange(100, 108, dtype=u16)
    run = Run(body, np.zeros(8, u16), (8,), data=tile, words=4, late=late)
    np.testing.assert_array_equal(run.tensor, [7, 9 if late else 101, *range(102, 108)])


def test_tensor_reduction():
    """cp.reduce.async.bulk.tensor adds, inside the tensor only."""
    tensor, tile = np.arange(24, dtype=f32).reshape(3, 8), np.arange(100, 132, dtype=f32)
    body = FILL + corner([0, 1]) + store(2, "reduce") + "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"
    run = Run(body, tensor, (8, 4), data=tile, words=32)
    expected = tensor.copy()
    expected[1:] += tile.reshape(4, 8)[:2]
    np.testing.assert_array_equal(run.tensor, expected)
    assert run.report.atomic_bytes == 64


LINE = """
    ld.param.u64 %rd1, [p0];
    ld.param.u64 %rd2, [p1];
    mov.u32 %r0, %tid.x;
    setp.eq.u32 %p0, %r0, 0;
    mov.u32 %r1, tile;
    mov.u32 %r2, bar;
    @%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
    bar.sync 0;
    mov.u32 %r9, SIZE;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], %r9;
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+AT], [%rd1], %r9, [%r2];
    spin:
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;
        @!%p1 bra spin;
    @%p0 STORE [%rd2], [%r1+AT], %r9;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
"""


def line(x: np.ndarray, y: np.ndarray, instruction: str, size=None, at=0) -> np.ndarray:
    """Bring x to shared memory and from there to y."""
    memory = GlobalMemory()
    addresses = [memory.upload(x), memory.upload(y)]
    body = LINE.replace("SIZE", str(x.nbytes if size is None else size)).replace("AT", str(at))
    declared = ".shared .align 128 .b8 tile[1024]; .shared .align 8 .b64 bar;"
    text = ptx_kernel(body.replace("STORE", instruction), (".u64", ".u64"), declarations=declared)
    launch(parse(text).kernels["k"], 1, 32, addresses, memory)
    return memory.read(addresses[1], y.shape, y.dtype)


def test_lines_of_bytes():
    """cp.async.bulk in both directions, and a sum of float32."""
    x, y = np.arange(60, dtype=f32), np.full(60, 0.5, f32)
    np.testing.assert_array_equal(line(x, y, "cp.async.bulk.global.shared::cta.bulk_group"), x)
    reduction = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
    np.testing.assert_array_equal(line(x, y, reduction), x + y)


@pytest.mark.parametrize("size, at, error", [(20, 0, Misaligned), (32, 8, Misaligned), (512, 0, OutOfBounds)])
def test_faults_of_lines(size, at, error):
    """Sixteen bytes is the grain of everything, and both ends lie within their memory."""
    with pytest.raises(error) as found:
        line(np.zeros(64, f32), np.zeros(64, f32), "cp.async.bulk.global.shared::cta.bulk_group", size, at)
    assert mentions(found.value, "cp.async.bulk", "thread (0, 0, 0)")


# ---- tensor maps -------------------------------------------------------------------------------------------------

BAD_MAPS = {
    "address": ({"address": 0x1008}, "multiple of 16"),
    "rank": ({"shape": (64, 2, 2, 2, 2, 2)}, "dimensions"),
    "box too large": ({"box": (64, 257)}, "1 to 256"),
    "stride": ({"strides": (120,)}, "stride of dimension 1 is 120"),
    "box wider than the swizzle": ({"box": (128, 8), "shape": (128, 9), "strides": (256,)}, "256 bytes wide"),
    "box not of whole chunks": ({"box": (12, 8)}, "24 bytes wide"),
    "empty": ({"shape": (64, 0)}, "0 elements"),
    "type": ({"dtype": "f64"}, "f64"),
    "swizzle": ({"swizzle": 256}, "swizzle of 256"),
}


@pytest.mark.parametrize("case", BAD_MAPS)
def test_maps_that_no_driver_takes(case):
    """Each of the documented limits has its message."""
    change, text = BAD_MAPS[case]
    good = {"address": 0x1000, "shape": (64, 9), "strides": (128,), "box": (64, 8), "dtype": "bf16", "swizzle": 128}
    assert len(encode_tensor_map(**good)) == 128
    with pytest.raises(ValueError, match=text):
        encode_tensor_map(**{**good, **change})


def test_only_a_map_is_prefetched_as_one():
    text = ptx_kernel("ld.param.u64 %rd1, [p0];\nprefetch.tensormap [%rd1];", target="sm_90a")
    memory = GlobalMemory()
    wrong = memory.upload(np.zeros(128, "u1"))
    with pytest.raises(EmulatorError) as found:
        launch(parse(text).kernels["k"], 1, 32, [wrong], memory)
    assert mentions(found.value, "prefetch.tensormap", "no tensor map")


def test_faults_of_boxes():
    """Wrong coordinates, a tile off its alignment, no map at all, a tensor that is not there, and sums of bfloat16."""
    tensor = np.zeros((8, 64), u16)
    body = corner([0, 0]) + expect(1024)
    with pytest.raises(EmulatorError, match="1 coordinates for a tensor of 2 dimensions"):
        Run(body + load(1), tensor, (64, 8))
    with pytest.raises(Misaligned, match="multiple of 128"):
        Run(body + "add.u32 %r1, %r1, 64;\n" + load(2), tensor, (64, 8))
    with pytest.raises(Misaligned, match="multiple of 64"):
        Run(body + "add.u64 %rd1, %rd1, 16;\n" + load(2), tensor, (64, 8))
    with pytest.raises(EmulatorError, match="no tensor map"):
        Run(body + "add.u64 %rd1, %rd1, 64;\n" + load(2), tensor, (64, 8))
    with pytest.raises(OutOfBounds, match=r"outside the \d+ bytes of shared"):
        Run(body + "add.u32 %r1, %r1, 32256;\n" + load(2), tensor, (64, 8))
    with pytest.raises(OutOfBounds, match="allocation"):
        Run(body + load(2), tensor, (64, 16), shape=(64, 16))
    with pytest.raises(EmulatorError, match="sums of bf16 are not implemented"):
        Run(corner([0, 0]) + store(2, "reduce"), tensor, (64, 8))

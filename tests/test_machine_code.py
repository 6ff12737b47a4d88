"""What ptxas made of the kernels: tensor cores in every matrix product, and nothing spilled."""

from __future__ import annotations

import pytest
from flashsmith.compile import Binary, compile_source
from flashsmith.render import render
from flashsmith.sass import disassemble
from flashsmith.sass.block_time import flops_of
from flashsmith.spec.defaults import default_tile
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import HOPPER, KernelName, KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.work import PRODUCTS, tile_flops

HMMA_FLOPS = 4096  # of one warp's m16n8k16
OURS = [kernel for kernel in PRODUCTS if kernel not in HOPPER]


def binary_of(kernel: KernelName, gpu: str, d: int, causal: bool) -> Binary:
    problem, target = Problem(dtype="bf16", d=d, causal=causal), find_gpu(gpu)
    return compile_source(render(KernelSpec.of(kernel, problem, default_tile(kernel, problem, target), target.sm)))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("gpu", ["a100", "rtx4090", "h100-sxm"])
@pytest.mark.parametrize("kernel", OURS)
def test_the_loop_is_tensor_cores_without_a_spill(kernel: KernelName, gpu: str, d: int, causal: bool) -> None:
    """As many HMMA as the tile's products need, divided among the warps; no register goes to memory."""
    binary = binary_of(kernel, gpu, d, causal)
    function = disassemble(binary.cubin).functions[kernel]
    opcodes = [instruction.base for instruction in function.trace.loop]
    assert opcodes.count("HMMA") * HMMA_FLOPS * binary.spec.tile.warps == tile_flops(binary.spec)
    assert not any(loop.spill_instructions for loop in function.loops)


@pytest.mark.parametrize("d", [192, 256])
@pytest.mark.parametrize("gpu", ["a100", "rtx4090", "h100-sxm"])
@pytest.mark.parametrize("kernel", OURS)
def test_large_heads_spill_nothing_anywhere(kernel: KernelName, gpu: str, d: int) -> None:
    binary = binary_of(kernel, gpu, d, False)
    assert binary.spill_bytes == 0
    opcodes = [instruction.base for instruction in disassemble(binary.cubin).functions[kernel].trace.loop]
    assert opcodes.count("HMMA") * HMMA_FLOPS * binary.spec.tile.warps == tile_flops(binary.spec)


@pytest.mark.parametrize("d", [8, 24, 40, 72, 80, 120])
@pytest.mark.parametrize("kernel", OURS)
def test_other_head_dims_spill_nothing_in_a_loop(kernel: KernelName, d: int) -> None:
    function = disassemble(binary_of(kernel, "a100", d, True).cubin).functions[kernel]
    assert not any(loop.spill_instructions for loop in function.loops)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("kernel", "d"),
    [("forward90", 72), ("forward90", 128), ("fused90", 64), ("fused90", 72), ("fused90", 128), ("dkdv90", 72),
     ("dkdv90_wide", 136), ("dkdv90_wide", 256), ("dq90", 72), ("dq90", 256)],
)  # fmt: skip
def test_the_loop_of_warpgroups_is_what_a_tile_needs(kernel: KernelName, d: int, causal: bool) -> None:
    """As many FLOPs of HGMMA as the tile's products need, divided among the warps that compute; and no spill."""
    binary = binary_of(kernel, "h100-sxm", d, causal)
    warps = 4 * binary.spec.tile.consumers  # type: ignore[union-attr]
    loop = disassemble(binary.cubin).functions[kernel].short_trace.loop
    assert flops_of(loop) * warps == tile_flops(binary.spec) and binary.spill_bytes == 0


def test_copies_go_past_the_registers() -> None:
    """K and V reach shared memory by cp.async of 16 bytes, and fragments by ldmatrix of four matrices."""
    function = disassemble(binary_of("forward", "a100", 128, False).cubin).functions["forward"]
    opcodes = [instruction.opcode for instruction in function.trace.loop]
    assert any(op.startswith("LDGSTS") and ".128" in op for op in opcodes)
    assert any(op.startswith("LDSM") and op.endswith(".4") for op in opcodes)
    assert not any(op.startswith(("LDG.", "STS")) for op in opcodes)

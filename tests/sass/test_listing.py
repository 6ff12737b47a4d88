"""From a cubin to functions of instructions, and what the ELF sections say of them."""

import re
import subprocess
from pathlib import Path

import flashsmith.sass.listing as listing_module
import pytest
from flashsmith.sass import BadCubin, DisassemblerMissing, disassemble, resource_usage
from flashsmith.sass.listing import find_nvdisasm

from .cuda import SCALE, SPILLS, compile_cubin, compile_scores
from .recorded import function_of

ARCHITECTURES = [80, 86, 89, 90, 100, 120]


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_every_instruction_is_read(sm):
    cubin, _ = compile_cubin(SCALE, sm)
    listing = disassemble(cubin)
    function = listing.functions["scale"]
    assert listing.sm == sm
    assert [i.address for i in function.instructions] == [16 * k for k in range(len(function.instructions))]
    assert {"STS", "LDS", "BAR", "EXIT"} <= {i.base for i in function.instructions}


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_resources_agree_with_ptxas(sm):
    cubin, log = compile_cubin(SCALE, sm)
    usage = resource_usage(cubin)["scale"]
    assert usage.registers == int(re.search(r"Used (\d+) registers", log).group(1))
    assert usage.static_smem_bytes == int(re.search(r"(\d+) bytes smem", log).group(1)) == 1024
    assert usage.stack_bytes == 0


@pytest.mark.parametrize("built", ["80", "90", "90a", "100a", "120a"])
def test_a_variant_of_an_architecture_is_told(built):
    listing = disassemble(compile_cubin(SCALE, built)[0])
    assert listing.target == f"sm_{built}" and listing.sm == int(built.rstrip("a"))


def test_resources_agree_with_cuobjdump(tmp_path: Path):
    cuobjdump = Path(find_nvdisasm()).with_name("cuobjdump")
    if not cuobjdump.is_file():
        pytest.skip("cuobjdump is in a wheel of its own")
    cubin, _ = compile_cubin(SPILLS, 80)
    (tmp_path / "k.cubin").write_bytes(cubin)
    text = subprocess.run([cuobjdump, "-res-usage", tmp_path / "k.cubin"], capture_output=True, text=True).stdout
    told = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED):(\d+)", text)}
    assert told == dict(zip(("REG", "SHARED", "STACK"), resource_usage(cubin)["spills"], strict=True))


def test_spills_are_counted_where_they_are():
    function = disassemble(compile_cubin(SPILLS, 80)[0]).functions["spills"]
    (loop,) = function.loops
    assert 0 < loop.spill_instructions < function.spill_instructions
    assert function.stack_bytes > 0
    assert function_of("forward_d128_sm80", "fwd").spill_instructions == 0


def test_a_cubin_may_hold_several_kernels():
    assert function_of("fused_d64_sm80", "fused").registers == 253
    assert function_of("fused_d64_sm80", "convert").registers < 64
    assert not function_of("fused_d64_sm80", "convert").trace.loop


def test_text_shows_address_schedule_and_label():
    text = str(disassemble(compile_scores(90)))
    assert text.startswith("sm_90\n\nscores: ")
    assert re.search(r"^\.L_x_\d+:$", text, re.M)
    assert re.search(r"^  [0-9a-f]{5}  B[0-5-]{6}:R[0-5-]:W[0-5-]:[Y-]:S\d\d  HMMA\.16816\.F32\.BF16 R", text, re.M)


@pytest.mark.parametrize(
    "data", [b"", b".version 8.0\n.target sm_80\n", b"\x7fELF\x02" + bytes(80)], ids=["empty", "ptx", "cut"]
)
def test_other_bytes_are_refused(data):
    with pytest.raises(BadCubin):
        disassemble(data)


def test_a_missing_disassembler_is_named(monkeypatch):
    monkeypatch.setattr(listing_module.sys, "path", [])
    monkeypatch.setenv("PATH", "")
    find_nvdisasm.cache_clear()
    try:
        with pytest.raises(DisassemblerMissing, match="nvidia-cuda-nvdisasm"):
            find_nvdisasm()
    finally:
        find_nvdisasm.cache_clear()

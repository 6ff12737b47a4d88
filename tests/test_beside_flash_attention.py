"""FlashAttention-2's kernels beside ours: which they are, how they are compiled, what is kept of them, the table."""

from __future__ import annotations

import lzma
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from flashsmith.predict import MODEL, sizes_of
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.problem import Problem
from flashsmith.work import tiles_per_block as our_tiles

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import beside_flash_attention as beside
import compile_flash_attention_2 as compiling
import document
import flash_attention_2_speeds as speeds
from flash_attention_2_kernels import CASES, KERNELS, Case, Kernel, kernel_for
from flash_attention_2_versions import Versions
from published import SPEEDS
from published import problem as problem_of

RECORDED = Path(__file__).parent / "sass" / "data"  # machine code of ours, here in the place of theirs
VERSIONS = Versions(flash_attn="2.8.3", nvcc="13.5.37")


# ---- which kernels they are --------------------------------------------------------------------------------------


def test_published_speeds_name_the_tiles_that_the_rules_choose() -> None:
    for speed in SPEEDS:
        kernel, tile = kernel_for(speed.which, speed.problem.d, speed.problem.causal, find_gpu(speed.gpu)), speed.tile
        assert (kernel.Br, kernel.Bc, kernel.warps, kernel.sm) == (tile.Br, tile.Bc, tile.warps, speed.sm), speed
        if speed.which == "backward":
            assert (kernel.atoms[0], kernel.v_regs) == (tile.row_split, tile.v_regs), speed  # type: ignore[union-attr]


def test_names_say_what_a_kernel_is() -> None:
    """A name is a cubin's, so no two are alike; one that is not listed is refused."""
    assert kernel_for("forward", 128, True, find_gpu("rtx4090")).name == "forward_d128_causal_64x64_w4_sm80"
    assert kernel_for("backward", 64, False, find_gpu("l4")).name == "backward_d64_64x128_w8_atoms244_vregs_sm80"
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)
    with pytest.raises(KeyError, match="d=96: only"):
        kernel_for("forward", 96, False, find_gpu("a100"))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_their_blocks_walk_over_the_tiles_that_ours_do(which: str, causal: bool) -> None:
    """Each tile of ours counts the same, whatever the order of the blocks."""
    problem = problem_of(128, causal, 2048)
    speed = next(each for each in SPEEDS if (each.which, each.problem.d) == (which, 128))
    kernel = kernel_for(speed.which, 128, causal, find_gpu("a100"))
    spec = KernelSpec.of("forward" if which == "forward" else "fused", problem, speed.tile, 80)
    tiles = speeds.tiles_per_block(kernel, problem)
    ours = our_tiles(spec, sizes_of(problem))
    assert sorted([*tiles] * (len(ours) // len(tiles))) == sorted(ours)
    work = speeds.work_of(kernel, problem)
    masked_too = 2 * problem.flops(speed.which) if causal else problem.flops(speed.which)
    assert work.tensor_flops == masked_too * sum(tiles) / (problem.Nq * problem.keys / kernel.Br / kernel.Bc)
    assert work.unequal == (tiles if causal else None)
    assert work.serial_hbm_bytes == (14 * problem.B * problem.Hq * problem.Nq * 128 if which == "backward" else 0)


# ---- how they are compiled ---------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What an unpacked source distribution has to have."""
    folder = tmp_path / "flash_attn-2.8.3"
    (folder / "csrc/cutlass/include").mkdir(parents=True)
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn/__init__.py").write_text('__version__ = "2.8.3"\n')
    return folder


def nvcc_that(folder: Path, does: str) -> str:
    """A program in the place of nvcc."""
    program = folder / "nvcc"
    version = 'if [ "$1" = --version ]; then echo "release 13.5, V13.5.37"; exit; fi'
    program.write_text(f"#!/bin/sh\n{version}\nfor last; do :; done\n{does}\n")
    program.chmod(0o755)
    return str(program)


def test_what_is_there_is_not_compiled_again(sources: Path, tmp_path: Path) -> None:
    nvcc, cubins = nvcc_that(tmp_path, 'echo "$@" > "$last"'), tmp_path / "cubins"
    names = ["forward_d256_64x64_w4_sm90", "backward_d128_64x64_w8_atoms422_vregs_sm80"]
    cubins.mkdir()
    (cubins / f"{names[0]}.cubin").write_text("there")
    assert compiling.main([str(sources), str(cubins), *names, "--nvcc", nvcc]) == 0
    assert sorted(file.name for file in cubins.iterdir()) == sorted(
        [*(f"{name}.cubin" for name in names), "versions.json"]
    )
    assert (cubins / f"{names[0]}.cubin").read_text() == "there"
    asked = (cubins / f"{names[1]}.cubin").read_text().split()
    assert {"-cubin", "-arch=sm_80", "--use_fast_math", "-DHEAD_DIM=128", "-DATOMS_M_DQ=2", "-DV_IN_REGS=true",
            "-DEVEN_MN=true", "-DSMEM_BYTES=81920", f"-I{sources}/csrc/flash_attn/src"} <= set(asked)  # fmt: skip
    assert Versions.of(cubins) == VERSIONS


def test_a_failure_leaves_nothing_and_says_what_nvcc_said(sources: Path, tmp_path: Path) -> None:
    nvcc = nvcc_that(tmp_path, 'echo half > "$last"; echo "static assertion failed" >&2; exit 1')
    cubins = tmp_path / "cubins"
    with pytest.raises(SystemExit, match=r"forward_d128_128x64_w4_sm80: nvcc failed\.\nstatic assertion failed"):
        compiling.main([str(sources), str(cubins), "--nvcc", nvcc])
    assert [file.name for file in cubins.iterdir()] == ["versions.json"]


def test_folders_and_names_that_will_not_do(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvcc = nvcc_that(tmp_path, "exit 1")
    with pytest.raises(SystemExit, match="is no unpacked source distribution of flash-attn"):
        compiling.main([str(tmp_path), str(tmp_path / "c"), "--nvcc", nvcc])
    with pytest.raises(SystemExit, match=r"does not run: .*--nvcc"):
        compiling.main([str(sources), str(tmp_path / "c"), "--nvcc", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        compiling.main([str(sources), str(tmp_path / "c"), "forward_d96", "--nvcc", nvcc])
    assert "no kernel is named forward_d96" in capsys.readouterr().err
    VERSIONS._replace(nvcc="12.9.1").sign(tmp_path)
    with pytest.raises(SystemExit, match=r"holds cubins of .*12\.9\.1.*take another folder"):
        compiling.main([str(sources), str(tmp_path), "--nvcc", nvcc])
    assert compiling.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == [kernel.name for kernel in KERNELS]


# ---- what is predicted of them -----------------------------------------------------------------------------------


def test_machine_code_in_their_place(tmp_path: Path) -> None:
    """A kernel of known speed under the name of theirs: as many of its blocks share an SM."""
    case = Case("a100", "forward", problem_of(128, False, 16384))
    VERSIONS.sign(tmp_path)
    with pytest.raises(SystemExit, match=case.kernel.name):
        speeds.predict_case(case, tmp_path)
    cubin = lzma.decompress((RECORDED / "forward_d128_sm80.cubin.xz").read_bytes())
    (tmp_path / f"{case.kernel.name}.cubin").write_bytes(cubin)
    said = speeds.predict_case(case, tmp_path)
    assert said.tflops == pytest.approx(253, rel=0.02)
    assert said.case == case and (said.model, said.flash_attn, said.nvcc) == (MODEL, *VERSIONS)


# ---- what is kept of them ----------------------------------------------------------------------------------------


def test_what_is_kept_is_of_the_model_here_and_complete(tmp_path: Path) -> None:
    kept = speeds.read()
    assert tuple(kept) == CASES and {said.model for said in kept.values()} == {MODEL}
    for case, said in kept.items():
        kernel: Kernel = case.kernel
        told = (said.kernel, said.sm, said.warps, said.smem_bytes)
        assert told == (kernel.name, kernel.sm, kernel.warps, kernel.smem_bytes)
        assert said.tflops > 0 and said.registers <= 255 and said.blocks_per_sm > 0
        assert said.rare_in_loop == 0, "docs/model.md says that its loops have nothing behind a branch"
    again = tmp_path / "again.csv"
    speeds.write(kept.values(), again)
    assert again.read_bytes() == speeds.FILE.read_bytes()
    speeds.write([replace(next(iter(kept.values())), model="issue-model 0")], again)
    with pytest.raises(SystemExit, match=r"by issue-model 0, and the model here is issue-model .*--keep"):
        speeds.read(again)


# ---- the table ---------------------------------------------------------------------------------------------------

OURS = beside.Ours(tflops=250.4, tflops_always=240.0, spills_in_loop=3, tile="Br128_Bc64")


def test_the_table_renders_from_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside, "predict_ours", lambda row, folder: OURS)
    assert beside.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{MODEL}. TFLOP/s") and len(lines) == 4 + len(beside.ROWS)
    theirs = speeds.read()[Case("a100", "forward", problem_of(128, True, 16384))].tflops
    figures = f"{theirs:.0f} | 250 | {250.4 / theirs:.2f} | 240 | {240 / theirs:.2f}"
    assert lines[5] == f"| a100 | forward causal | 128 | 200 | {figures} | 3 | Br128_Bc64 |"
    assert "| rtx4090 | fused | 64 | 124.81 (N = 2048) |" in lines[-1]


def test_what_is_written_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--cubins predicts for the table, and with --keep for the file."""
    kept, written = dict(speeds.read()), []
    monkeypatch.setattr(beside, "predict_ours", lambda row, folder: OURS)
    monkeypatch.setattr(beside, "predict_case", lambda case, cubins: replace(kept[case], tflops=100.0))
    monkeypatch.setattr(speeds, "write", written.extend)
    assert beside.main(["--cubins", "folder"]) == 0 and not written
    assert "| 225.5 | 100 | 250 | 2.50 | 240 | 2.40 |" in capsys.readouterr().out
    assert beside.main(["--cubins", "folder", "--keep"]) == 0
    assert [said.case for said in written] == list(CASES)
    with pytest.raises(SystemExit):
        beside.main(["--keep"])


@pytest.mark.parametrize("row", [beside.Row("a100", "forward", 128), beside.Row("h100-sxm", "fused", 64)], ids=str)
def test_the_document_holds_what_the_command_prints(
    row: beside.Row, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FLASHSMITH_SHIPPED_DIR")
    line = beside.cells(row, beside.predict_ours(row, tmp_path), speeds.read()[row.theirs].tflops)
    lines = document.read(beside.DOCUMENT, beside.COMMAND).splitlines()
    assert len(lines) == 4 + len(beside.ROWS) and f"| {' | '.join(line)} |" in lines
    spills = beside.HEAD.index("spills in our loop")
    assert all(each.split(" | ")[spills] == "0" for each in lines[4:])


def test_rare_blocks_in_every_tile_take_time(tmp_path: Path) -> None:
    """Each tile then is masked and has a new maximum. A tile that no record serves says so."""
    ours = beside.predict_ours(beside.Row("a100", "forward", 64, causal=True), tmp_path)
    assert 0.5 * ours.tflops < ours.tflops_always < 0.9 * ours.tflops
    assert ours.tile.startswith("Br") and ours.tile.endswith(" (default)")


def test_a_problem_is_that_of_the_published_speed() -> None:
    assert beside.Row("a100", "split", 64).theirs == Case("a100", "backward", problem_of(64, False, 16384))
    assert beside.published(beside.Row("a100", "fused", 64, causal=True)) == ""
    assert all(row.theirs in CASES for row in beside.ROWS)
    assert isinstance(beside.ROWS[0].problem, Problem)

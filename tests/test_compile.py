"""NVRTC without a GPU: what a Binary holds, what an error shows, and when the compiler is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flashsmith import compile as compiling
from flashsmith.compile import compile_source, options_for
from flashsmith.errors import CompileError, UsageError
from flashsmith.render import Source
from flashsmith.spec.kernel import KernelSpec
from flashsmith.spec.tile import RowTile

KERNEL = """extern "C" __global__ void delta(float* x, int n)
{
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) x[threadIdx.x] = 2.f * s[63 - threadIdx.x];
}
"""

COMPILE = """
import sys
from flashsmith import compile as compiling
calls = []
compile_ = compiling._compile
compiling._compile = lambda *a: (calls.append(a), compile_(*a))[1]
from tests.test_compile import source
binary = compiling.compile_source(source(int(sys.argv[1]), sys.argv[2]))
print(len(calls), len(binary.cubin))
"""


def source(sm: int = 80, text: str = KERNEL) -> Source:
    return Source(KernelSpec(kernel="delta", dtype="bf16", d=64, causal=False, tile=RowTile(warps=2), sm=sm), text)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def in_another_process(sm: int = 80, text: str = KERNEL, **environment: str) -> list[int]:
    """[compiler calls, bytes of the cubin] of a fresh interpreter."""
    process = subprocess.run(
        [sys.executable, "-c", COMPILE, str(sm), text],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [int(word) for word in process.stdout.split()]


@pytest.mark.parametrize("sm", [80, 86, 87, 89, 90, 100, 120])
def test_machine_code_and_ptx_for_every_target(cache: Path, sm: int) -> None:
    binary = compile_source(source(sm))
    assert binary.cubin[:4] == b"\x7fELF" and f".target sm_{sm}" in binary.ptx
    assert binary.registers > 0 and binary.spill_bytes == 0 and binary.static_smem_bytes == 256


def test_what_lies_on_disk_is_for_people(cache: Path) -> None:
    """Source, PTX, cubin and facts as plain files under a readable name; nothing pickled."""
    binary = compile_source(source())
    (folder,) = (path for path in cache.iterdir() if path.name.startswith("delta_bf16_d64_sm80_w2-"))
    assert (folder / "kernel.cu").read_text() == KERNEL
    assert (folder / "kernel.cubin").read_bytes() == binary.cubin
    assert json.loads((folder / "build.json").read_text())["registers"] == binary.registers
    assert {path.name for path in folder.iterdir()} == {"kernel.cu", "kernel.cubin", "kernel.ptx", "build.json"}


def test_a_second_process_does_not_compile(cache: Path, tmp_path: Path) -> None:
    """The key is the same whatever the hash seed and the working directory are (BUG-28)."""
    assert in_another_process()[0] == 1
    assert in_another_process(PYTHONHASHSEED="1")[0] == 0
    assert in_another_process(PYTHONHASHSEED="2", TMPDIR=str(tmp_path))[0] == 0


@pytest.mark.parametrize("change", ["text", "sm", "options", "nvrtc"])
def test_anything_that_matters_compiles_again(cache: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """The key is a hash of the rendered text, the options, the target and the compiler (BUG-39)."""
    first = compile_source(source())
    if change == "options":
        monkeypatch.setattr(compiling, "OPTIONS", (*compiling.OPTIONS, "--use_fast_math"))
    if change == "nvrtc":
        monkeypatch.setattr(compiling, "nvrtc_version", lambda: (12, 0))
    changed = source(86 if change == "sm" else 80, KERNEL.replace("2.f", "3.f") if change == "text" else KERNEL)
    assert not first.cached and not compile_source(changed).cached
    assert compile_source(changed).cached


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.ptx", "build.json"])
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b'{"sha256": [1]}', None], ids=["empty", "bytes", "json", "gone"])
def test_a_damaged_entry_is_named_and_compiled_again(cache: Path, name: str, damage: bytes | None) -> None:
    good = compile_source(source())
    (folder,) = cache.glob("delta_*")
    (folder / name).unlink() if damage is None else (folder / name).write_bytes(damage)
    with pytest.warns(UserWarning, match="damaged"):
        again = compile_source(source())
    assert not again.cached and again.cubin == good.cubin
    assert compile_source(source()).cached


def test_sixteen_cold_processes_compile_once(cache: Path) -> None:
    """Started together on an empty cache; one compiles, the others wait for its result."""
    command = [sys.executable, "-c", COMPILE, "80", KERNEL]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(16)]
    answers = [process.communicate(timeout=120)[0].split() for process in running]
    assert sum(int(calls) for calls, _ in answers) == 1
    assert len({size for _, size in answers}) == 1
    assert not list(cache.glob(".new-*"))


def test_a_killed_writer_leaves_nothing_half(cache: Path) -> None:
    """kill -9 while the entry is being written: the next process compiles, unhindered by the dead one's lock."""
    script = COMPILE.replace("binary =", "import os; os.rename = lambda *a: os.kill(os.getpid(), 9)\nbinary =")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    dead = subprocess.run([sys.executable, "-c", script, "80", KERNEL], env=environment, check=False)
    assert dead.returncode == -9
    assert in_another_process()[0] == 1
    assert in_another_process()[0] == 0


def test_an_error_shows_the_failing_line(cache: Path) -> None:
    with pytest.raises(CompileError) as error:
        compile_source(source(text=KERNEL.replace("63 - threadIdx.x", "63 - threadIdy.x")))
    message = str(error.value)
    assert "delta_bf16_d64_sm80_w2" in message and 'identifier "threadIdy" is undefined' in message
    assert ">    6 |     if (threadIdx.x < n) x[threadIdx.x] = 2.f * s[63 - threadIdy.x];" in message
    assert not list(cache.glob("delta_*"))


def test_a_target_that_nvrtc_does_not_know(cache: Path) -> None:
    """The message holds the target, the library's version and what it supports (BUG-25)."""
    with pytest.raises(CompileError, match=r"NVRTC \d+\.\d+ makes no code for sm_999; it knows 75, 80"):
        compile_source(source(999))


@pytest.mark.parametrize("cuda_path", [None, "empty folder ü", "missing"])
def test_no_toolkit_is_needed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_path: str | None
) -> None:
    """No header is included, so it does not matter what CUDA_PATH says (BUG-24)."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_PATH", "CUDA_HOME")}
    if cuda_path is not None:
        environment["CUDA_PATH"] = str(tmp_path / cuda_path)
        if cuda_path != "missing":
            (tmp_path / cuda_path).mkdir()
    process = subprocess.run(
        [sys.executable, "-c", COMPILE, "80", KERNEL], capture_output=True, text=True, check=True,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert process.stdout.split()[0] == "1"


@pytest.mark.parametrize("fault", ["link", "open to all"])
def test_a_cache_that_others_could_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder = tmp_path / "cache"
    if fault == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "real")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(folder))
    with pytest.raises(UsageError, match="FLASHSMITH_CACHE_DIR"):
        compile_source(source())


def test_options_name_the_target() -> None:
    assert "-arch=sm_90" in options_for(90)
    assert "-arch=sm_90a" in options_for(90, "sm_90a")

"""Compile Source to Binary with NVRTC: machine code, PTX, registers, spills. No GPU, toolkit or host compiler."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from . import cache, paths
from .errors import CompileError
from .render import Source

if TYPE_CHECKING:
    from .spec.kernel import KernelSpec

OPTIONS = (
    "--std=c++17",
    "-lineinfo",
    "--ptxas-options=-v",
)  # line numbers for `--emit sass`; -v for registers and spills
FILE = "kernel.cu"
SERIALISED = r"\bC75\d\d\b"  # advice of ptxas on wgmma, which -v shows; the code would be right, and slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """One compiled kernel."""

    source: Source
    cubin: bytes
    ptx: str
    log: str
    registers: int  # a thread
    spill_bytes: int  # a thread, stores and loads
    static_smem_bytes: int
    seconds: float  # that NVRTC took when it was compiled
    cached: bool  # found on disk

    @property
    def spec(self) -> KernelSpec:
        """What it was rendered from."""
        return self.source.spec

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory that a launch must ask for."""
        return self.source.smem_bytes


@dataclass(frozen=True, slots=True)
class _Facts:
    """What ptxas says of a kernel: kept in build.json."""

    log: str
    registers: int
    spill_bytes: int
    static_smem_bytes: int
    seconds: float


def compile_source(source: Source, *, use_cache: bool = True) -> Binary:
    """Machine code and PTX of `source` for its sm; from disk when the same text was compiled before.

    Raises CompileError with NVRTC's log and the lines it points at.
    """
    options = options_for(source.spec.sm, source.spec.target)
    if not use_cache:
        return _binary(source, *_compile(source, options), cached=False)
    digest = cache.digest_of(source.text, *options, f"nvrtc {version_text()}")
    entry = cache.Entry(paths.cache_dir(), source.spec.key, digest)
    found = _read(entry)
    if found is None:
        with entry.lock():
            found = _read(entry)  # another process may have compiled it while this one waited
            if found is None:
                cubin, ptx, facts = _compile(source, options)
                contents = {FILE: source.text.encode(), "kernel.cubin": cubin, "kernel.ptx": ptx.encode()}
                entry.write(contents, {"key": source.spec.key, "options": options, **asdict(facts)})
                return _binary(source, cubin, ptx, facts, cached=False)
    return _binary(source, *found, cached=True)


def options_for(sm: int, target: str = "") -> tuple[str, ...]:
    """NVRTC's options for real machine code of compute capability sm / 10, or of `target`: sm_90a."""
    return (*OPTIONS, f"-arch={target or f'sm_{sm}'}")


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC library that is loaded."""
    from cupy.cuda import nvrtc

    major, minor = nvrtc.getVersion()
    return int(major), int(minor)


def version_text() -> str:
    """NVRTC's version as people write it: 13.5."""
    return "{}.{}".format(*nvrtc_version())


def _read(entry: cache.Entry) -> tuple[bytes, str, _Facts] | None:
    found = entry.read()
    if found is None:
        return None
    contents, build = found
    facts = _Facts(**{name: build[name] for name in _Facts.__dataclass_fields__})
    return contents["kernel.cubin"], contents["kernel.ptx"].decode(), facts


def _compile(source: Source, options: tuple[str, ...]) -> tuple[bytes, str, _Facts]:
    return compile_text(source.spec.key, source.text, source.spec.sm, options)


def compile_text(key: str, text: str, sm: int, options: tuple[str, ...]) -> tuple[bytes, str, _Facts]:
    """Machine code and PTX of CUDA text, and what ptxas says of it; `key` names it in errors. Nothing is cached.

    Raises CompileError with NVRTC's log and the lines it points at.
    """
    from cupy.cuda import nvrtc

    supported = nvrtc.getSupportedArchs()
    if sm not in supported:
        raise CompileError(
            f"{key}: NVRTC {version_text()} makes no code for sm_{sm}; "
            f"it knows {', '.join(map(str, supported))}. Install another nvidia-cuda-nvrtc."
        )
    program = nvrtc.createProgram(text, FILE, [], [])
    try:
        start = time.perf_counter()
        try:
            nvrtc.compileProgram(program, list(options))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).rstrip("\0")
            raise CompileError(_explain(key, text, log)) from error
        seconds = time.perf_counter() - start
        log = nvrtc.getProgramLog(program).rstrip("\0")
        # CuPy drops the file's last byte; nvdisasm and cuobjdump want it.
        cubin, ptx = nvrtc.getCUBIN(program) + b"\0", nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    serialised = next((line for line in log.splitlines() if re.search(SERIALISED, line)), None)
    if serialised:
        raise CompileError(f"{key}: ptxas makes each wgmma wait for the one before. {serialised.strip()}")
    return cubin, (ptx.decode() if isinstance(ptx, bytes) else ptx).rstrip("\0"), _facts(log, seconds)


def _facts(log: str, seconds: float) -> _Facts:
    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return _Facts(
        log=log,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
        static_smem_bytes=number(r"(\d+) bytes smem"),
        seconds=round(seconds, 3),
    )


def _binary(source: Source, cubin: bytes, ptx: str, facts: _Facts, *, cached: bool) -> Binary:
    values: dict[str, Any] = asdict(facts)
    return Binary(source=source, cubin=cubin, ptx=ptx, cached=cached, **values)


def _explain(key: str, text: str, log: str) -> str:
    """NVRTC's log, and beside each line that it names the text around it."""
    lines = text.splitlines()
    shown: list[str] = []
    for number in sorted({int(n) for n in re.findall(rf"{re.escape(FILE)}\((\d+)\): error", log)})[:5]:
        first, last = max(1, number - 2), min(len(lines), number + 2)
        shown += [f"{'>' if n == number else ' '}{n:5d} | {lines[n - 1]}" for n in range(first, last + 1)] + [""]
    return "\n".join([f"NVRTC refused {key}:", "", log.strip(), "", *shown]).rstrip()

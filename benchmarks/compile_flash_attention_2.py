"""Compile FlashAttention-2's own kernels into cubins, one each, some 30 s of CPU apiece. No GPU is needed.

    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip download --no-deps --no-build-isolation --no-binary :all: flash-attn==2.8.3
    tar xzf flash_attn-2.8.3.tar.gz
    pip install --target cuda nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl
    python benchmarks/compile_flash_attention_2.py flash_attn-2.8.3 cubins --nvcc cuda/nvidia/cu13/bin/nvcc [NAME ...]
    python benchmarks/compile_flash_attention_2.py --list

pip's build of the source distribution imports torch; the file that it downloads is all that is used. nvcc needs a g++.
A kernel whose cubin is there is skipped, so a stopped run goes on where it stood.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flash_attention_2_kernels import KERNELS, Kernel
from flash_attention_2_versions import Versions

OURS = Path(__file__).parent / "flash_attention_2"
# Those of its setup.py that reach the device code.
FLAGS = (
    "-O3", "-std=c++17", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "--expt-relaxed-constexpr",
    "--expt-extended-lambda", "--use_fast_math",
)  # fmt: skip


def compile_kernel(kernel: Kernel, sources: Path, nvcc: str, cubin: Path) -> None:
    """Write the cubin, whole or not at all. Raises SystemExit with what nvcc said."""
    includes = (OURS / "include", sources / "csrc/flash_attn/src", sources / "csrc/cutlass/include")
    with tempfile.TemporaryDirectory(dir=cubin.parent) as folder:
        made = Path(folder) / cubin.name
        command = [nvcc, "-cubin", f"-arch=sm_{kernel.sm}", *FLAGS, *(f"-I{each}" for each in includes)]
        command += [f"-D{name}={value}" for name, value in kernel.macros.items()]
        done = subprocess.run([*command, str(OURS / f"{kernel.which}.cu"), "-o", str(made)], capture_output=True)
        if done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace")
            raise SystemExit(f"{kernel.name}: nvcc failed.\n{said}")
        os.replace(made, cubin)


def versions_of(sources: Path, nvcc: str) -> Versions:
    """What the cubins are made of and by. Raises SystemExit for a folder or a program that is something else."""
    about, cutlass = sources / "flash_attn" / "__init__.py", sources / "csrc/cutlass/include"
    if not about.is_file() or not cutlass.is_dir():
        raise SystemExit(f"{sources} is no unpacked source distribution of flash-attn: no {about} or no {cutlass}.")
    found = re.search(r'__version__ = "([^"]+)"', about.read_text())
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{nvcc} does not run: {error}. Give the path of one with --nvcc.") from error
    release = re.search(r"\bV([\d.]+)", said)
    if not found or not release:
        raise SystemExit(f"{about} or `{nvcc} --version` names no version.")
    return Versions(flash_attn=found.group(1), nvcc=release.group(1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="?", help="the unpacked source distribution of flash-attn")
    parser.add_argument("cubins", type=Path, nargs="?", help="the folder to write to")
    parser.add_argument("names", nargs="*", metavar="NAME", help="these kernels; without, all")
    parser.add_argument("--nvcc", default="nvcc", help="the compiler; by default the one on the PATH")
    parser.add_argument("--list", action="store_true", help="print the names")
    asked = parser.parse_args(arguments)
    if asked.list:
        print("\n".join(kernel.name for kernel in KERNELS))
        return 0
    if asked.cubins is None:
        parser.error("give the sources and the folder for the cubins")
    unknown = set(asked.names) - {kernel.name for kernel in KERNELS}
    if unknown:
        parser.error(f"no kernel is named {', '.join(sorted(unknown))}; --list prints the names")
    versions = versions_of(asked.sources, asked.nvcc)
    asked.cubins.mkdir(parents=True, exist_ok=True)
    versions.sign(asked.cubins)
    wanted = [kernel for kernel in KERNELS if not asked.names or kernel.name in asked.names]
    for number, kernel in enumerate(wanted, 1):
        cubin = asked.cubins / f"{kernel.name}.cubin"
        there = cubin.exists()
        print(f"{number}/{len(wanted)} {kernel.name}{': there' if there else ''}", file=sys.stderr, flush=True)
        if not there:
            compile_kernel(kernel, asked.sources, asked.nvcc, cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())

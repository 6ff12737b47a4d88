"""Importing flashsmith is cheap and touches no driver."""

import subprocess
import sys

SCRIPT = """
import sys
import flashsmith
heavy = {"torch", "cupy", "optuna", "triton", "rich", "typer"} & set(sys.modules)
assert not heavy, heavy
flashsmith.Problem(dtype="bf16", d=64)
"""

FORKED = """
import ctypes, os, sys
import flashsmith.cli, flashsmith.load
assert not {"torch", "optuna"} & set(sys.modules)
maps = open("/proc/self/maps").read()
assert "libcuda.so" not in maps and "libcudart" not in maps, "a driver library is loaded"
"""


def test_import_loads_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def test_import_loads_no_driver() -> None:
    """So that processes forked later can use a GPU (BUG-22)."""
    subprocess.run([sys.executable, "-c", FORKED], check=True)

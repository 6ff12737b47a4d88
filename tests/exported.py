"""Compile an exported pass with nvcc, and call it from here on a CUDA runtime that has no GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flashsmith.export import Plan, cuda_files

NVCC, GCC, GXX = (shutil.which(tool) for tool in ("nvcc", "gcc", "g++"))
STAND_IN = Path(__file__).parent / "stand_in_cudart.cpp"

needs_nvcc = pytest.mark.skipif(not (NVCC and GXX), reason="nvcc and g++, which compile what is exported, are not here")

ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_size_t, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip
ON_SET = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
)
ON_ATTRIBUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)


class CTensor(ctypes.Structure):
    """flashsmith_input and flashsmith_output."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row")))


def args_type(plan: Plan) -> type[ctypes.Structure]:
    """NAME_args, member by member as the header has them."""
    members: list[tuple[str, Any]] = [(field.name, CTensor) for field in plan.fields if field.view]
    members += [(field.name, ctypes.c_void_p) for field in plan.fields if not field.view]
    members += [(size, ctypes.c_int64) for size in plan.sizes]
    members += [("scale", ctypes.c_double)]
    if plan.temporaries:
        members += [("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_size_t)]
    return type("Args", (ctypes.Structure,), {"_fields_": [*members, ("stream", ctypes.c_void_p)]})


def run_tool(*command: object) -> None:
    """A compiler; what it says is the failure."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"


def written(plan: Plan, folder: Path) -> Path:
    """The .cu of the plan; its header lies beside it."""
    for name, text in cuda_files(plan).items():
        (folder / name).write_text(text)
    return folder / f"{plan.name}.cu"


@dataclass(frozen=True)
class Launched:
    """One launch that a launcher asked for."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    stream: int | None
    args: tuple[bytes, ...]


class Library:
    """An exported pass, linked with the stand-in: what it launches, fills and asks for is recorded here."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.Args = plan, args_type(plan)
        source = written(plan, folder)
        # PTX only: no machine code is needed, and none is made.
        run_tool(
            NVCC, "-std=c++17", f"-gencode=arch=compute_{plan.sm},code=compute_{plan.sm}", "-Werror", "all-warnings",
            "-Xcompiler", "-Wall,-Wextra,-Werror,-fPIC", "-keep", "-keep-dir", folder,
            "-c", source, "-o", folder / "pass.o",
        )  # fmt: skip
        run_tool(GXX, "-shared", "-fPIC", "-o", folder / "pass.so", folder / "pass.o", STAND_IN)
        self.ptx = (folder / f"{plan.name}.ptx").read_text()
        self.library = ctypes.CDLL(str(folder / "pass.so"))
        self.run = self.library[plan.name]
        self.why = self.library[f"{plan.name}_why_refused"]
        self.why.restype = ctypes.c_char_p
        if plan.temporaries:
            self.workspace_bytes = self.library[f"{plan.name}_workspace_bytes"]
            self.workspace_bytes.restype = ctypes.c_size_t
        self.bytes_of = {
            f"{plan.name}_{launch.source.spec.kernel}": [parameter.bytes for parameter in launch.parameters]
            for launch in plan.launches
        }
        self.launches: list[Launched] = []
        self.fills: list[tuple[int, int, int, int, int]] = []  # address, pitch, value, width, height
        self.attributes: list[tuple[str, int, int]] = []
        self.device = ctypes.c_int.in_dll(self.library, "current_device")
        self.hook()

    def hook(
        self,
        launch: Callable[[Launched], None] = lambda launched: None,
        fill: Callable[[int, int, int, int, int], None] = lambda *call: None,
    ) -> None:
        """Forget what was recorded; from now on call these as well."""
        self.device.value = 0
        for record in (self.launches, self.fills, self.attributes):
            record.clear()
        failures: list[BaseException] = []

        def on_launch(name: bytes, shape: Any, smem: int, stream: int | None, pointers: Any) -> int:
            kernel = name.decode()
            args = tuple(ctypes.string_at(pointers[n], size) for n, size in enumerate(self.bytes_of[kernel]))
            grid, block = tuple(shape[:3]), tuple(shape[3:6])
            self.launches.append(Launched(kernel, grid, block, smem, stream, args))  # type: ignore[arg-type]
            return self._status(failures, launch, self.launches[-1])

        def on_set(to: int, pitch: int, value: int, width: int, height: int, stream: int | None) -> int:
            self.fills.append((to, pitch, value, width, height))
            return self._status(failures, fill, *self.fills[-1])

        def on_attribute(name: bytes, attribute: int, value: int) -> int:
            self.attributes.append((name.decode(), attribute, value))
            return 0

        self.failures = failures
        self._hooks = ON_LAUNCH(on_launch), ON_SET(on_set), ON_ATTRIBUTE(on_attribute)
        for name, hook in zip(("on_launch", "on_set", "on_attribute"), self._hooks, strict=True):
            ctypes.c_void_p.in_dll(self.library, name).value = ctypes.cast(hook, ctypes.c_void_p).value

    @staticmethod
    def _status(failures: list[BaseException], call: Callable[..., None], *args: Any) -> int:
        try:
            call(*args)
        except BaseException as error:  # ctypes prints what a callback raises and goes on: kept, and raised by `call`
            failures.append(error)
            return 999
        return 0

    def args(self, values: Mapping[str, Any]) -> ctypes.Structure:
        """The structure; a tensor is (address, batch, head, row)."""
        made = self.Args()
        for name, value in values.items():
            setattr(made, name, CTensor(*value) if isinstance(value, tuple) else value)
        return made

    def call(self, args: ctypes.Structure) -> int:
        """The status; a failure inside a hook is raised here."""
        status = int(self.run(ctypes.byref(args)))
        if self.failures:
            raise self.failures[0]
        return status

"""Nothing that is read from disk is ever run: caches and records are JSON, text and machine code (BUG-41)."""

from __future__ import annotations

import ast
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import flashsmith as fs
import pytest
from flashsmith.compile import FILE, compile_source
from flashsmith.errors import UsageError
from flashsmith.load import load_best
from flashsmith.render import render
from flashsmith.spec.gpu import find_gpu

PACKAGE = Path(fs.__file__).parent
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "yaml", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("yaml", "load"), ("numpy", "load"), ("np", "load"), ("os", "system"), ("os", "popen")}
P = fs.Problem(dtype="bf16", d=64)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    for file in files:
        yield file, ast.parse(file.read_text())


def test_no_module_that_runs_what_it_reads() -> None:
    for file, tree in trees():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & MODULES, f"{file}:{getattr(node, 'lineno', 0)}"


def test_no_call_that_runs_what_it_reads() -> None:
    """Python is made at run time by the emulator's code generator alone, from PTX that it parsed itself."""
    generators = set()
    for file, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            where = f"{file}:{node.lineno}"
            if isinstance(node.func, ast.Name) and node.func.id in CALLS:
                assert file.is_relative_to(PACKAGE / "emulator"), where
                generators.add(file)
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                assert (node.func.value.id, node.func.attr) not in LOADERS, where
            options = {option.arg: option.value for option in node.keywords}
            assert "allow_pickle" not in options, where
            shell = options.get("shell")
            assert not (isinstance(shell, ast.Constant) and shell.value), where
    assert len(generators) == 1


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore")
def test_a_pickle_in_every_file_that_may_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records and every file of a cache entry: read as damaged, and nothing of it runs."""
    sprung, tuned, kernels = tmp_path / "sprung", tmp_path / "tuned", tmp_path / "kernels"
    trap = pickle.dumps(Trap(sprung))
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(kernels))
    tuned.mkdir()
    for name in ("a100", "a100-40gb"):
        (tuned / f"{name}.json").write_bytes(trap)
    loaded = load_best(P, "forward", "a100", tuned)
    assert loaded.rung == "default" and (tuned / "a100.json").read_bytes() == trap
    good = loaded.binary.cubin
    (entry,) = kernels.glob("forward*")
    names = sorted(file.name for file in entry.iterdir())
    assert {FILE, "kernel.cubin", "kernel.ptx", "build.json"} <= set(names)
    for name in names:
        (entry / name).write_bytes(trap)
        assert compile_source(render(loaded.spec)).cubin == good
    assert not sprung.exists()


@pytest.mark.parametrize("how", ["link", "writable", "group"])
def test_a_cache_that_others_could_fill_is_refused(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    if how == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "real")
    else:
        folder.mkdir()
        folder.chmod(0o777 if how == "writable" else 0o770)
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(folder))
    with pytest.raises(UsageError, match="FLASHSMITH_CACHE_DIR"):
        compile_source(render(load_best(P, "delta", find_gpu("a100")).spec))


def test_the_cache_is_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = os.umask(0)
    try:
        monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
        compile_source(render(load_best(P, "delta", find_gpu("a100")).spec))
    finally:
        os.umask(old)
    folder = tmp_path / "cache"
    assert folder.stat().st_mode & 0o777 == 0o700

"""Compile ahead the kernels that a list of problems will ask for, so that their first call finds them on disk."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from .compile import Binary, compile_source
from .errors import CompileError, LaunchError, UsageError
from .load import Loaded, load_pass
from .lookup import Rung
from .spec.gpu import Gpu
from .spec.kernel import KernelSpec
from .spec.problem import Pass, Problem

NUMBERS = ("d", "B", "Hq", "Hk", "Nq", "Nk")  # that a problem's text may name


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """One kernel that a later call will find."""

    key: str
    rung: Rung  # how it was chosen
    cached: bool  # it was on disk already
    seconds: float  # that NVRTC took when it was compiled, now or before
    failure: str = ""  # NVRTC's complaint if there is no kernel, or what its check found


def warm_up(
    problems: Iterable[Problem], passes: Sequence[Pass], gpu: Gpu, *, deterministic: bool = False,
    check: bool = False, workers: int = 1, progress: Callable[[Warmed], None] = lambda warmed: None,
) -> tuple[Warmed, ...]:  # fmt: skip
    """Compile each kernel that serves the problems, once each, and keep it in the cache. A failure does not end it.

    `check` runs each on small shapes as well, on the emulator: a record passes the gate that a fresh winner passed.
    `workers` processes share the work; NVRTC holds a lock of its own, so threads would wait for each other. More than
    one needs a main module that can be imported again. Raises NoTunedKernel in strict mode for a problem without a
    record.
    """
    wanted: dict[KernelSpec, tuple[Loaded, Problem]] = {}
    for problem in problems:
        for which in passes:
            for loaded in load_pass(problem, which, gpu, deterministic=deterministic).values():
                wanted.setdefault(loaded.spec, (loaded, problem))
    work = partial(_warm, gpu=gpu, check=check)
    done = []
    with ExitStack() as held:
        many: Callable[..., Iterable[Warmed]] = map
        if min(workers, len(wanted)) > 1:
            spawn = multiprocessing.get_context("spawn")
            many = held.enter_context(ProcessPoolExecutor(min(workers, len(wanted)), mp_context=spawn)).map
        for warmed in many(work, wanted.values()):
            progress(warmed)
            done.append(warmed)
    return tuple(done)


def parse_problem(text: str, default: Problem) -> Problem:
    """`default` with the fields that `text` names: `dtype=bf16,d=128,causal=1,Nq=8192`.

    Raises UsageError for an unknown field, or a value that is no whole number; BadProblem for one that is not served.

    >>> parse_problem("d=64,causal=1", Problem(dtype="bf16", d=128)).text
    'bf16 d=64 causal'
    """
    known = [f.name for f in fields(Problem) if f.name in (*NUMBERS, "dtype", "causal")]
    changes: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = item.partition("=")
        if name not in known:
            raise UsageError(f"problem {text!r}: {name!r} is not one of {', '.join(known)}.")
        if name == "dtype":
            changes[name] = value
            continue
        number = {"true": "1", "false": "0"}.get(value.lower(), value)
        if not number.isdigit() or (name == "causal" and number not in ("0", "1")):
            wanted = "0 or 1" if name == "causal" else "a number"
            raise UsageError(f"problem {text!r}: {name}={value!r} is not {wanted}.")
        changes[name] = bool(int(number)) if name == "causal" else int(number)
    changes.setdefault("Hk", None if "Hq" in changes else default.Hk)
    changes.setdefault("Nk", None if "Nq" in changes else default.Nk)
    return replace(default, **changes)


def _warm(asked: tuple[Loaded, Problem], gpu: Gpu, check: bool) -> Warmed:
    loaded, problem = asked
    key = loaded.spec.key
    try:
        binary = compile_source(loaded.source)
        wrong = _why_wrong(binary, problem, gpu) if check else ""
    except (CompileError, LaunchError) as error:
        return Warmed(key=key, rung=loaded.rung, cached=False, seconds=0.0, failure=str(error).splitlines()[0])
    return Warmed(key=key, rung=loaded.rung, cached=binary.cached, seconds=binary.seconds, failure=wrong)


def _why_wrong(binary: Binary, problem: Problem, gpu: Gpu) -> str:
    from .engines.emulated import EmulatedEngine
    from .verify import why_wrong

    return why_wrong(binary, problem, gpu, partial(EmulatedEngine, check_races=True))

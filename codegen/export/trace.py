"""Trace one pass into a Plan: what is launched, with what, as formulas of the sizes.

Nothing of `run.py` is written again here. Its passes run on an engine that holds no data, with sizes that are numbers
and remember their formulas; what they allocate, zero and launch is the plan. They run for several sizes, and must come
to the same formulas each time: arithmetic that depends on more than them is refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..engines.engine import Tensor, Value
from ..engines.tensor_map import Boxes
from ..errors import LaunchError, UsageError
from ..render import Source
from ..run import Extras, Forward, run_backward, run_forward
from ..spec.dtype import stored_as
from ..spec.kernel import ARG_BYTES, HOPPER, SIGNATURES, Arg, KernelName
from ..spec.problem import Pass, Problem
from .expression import Expression
from .plan import Field, Launch, Parameter, Plan, Temporary

ALIGN_TEMPORARY = 256  # bytes: each temporary starts on as many, like memory of cudaMalloc
OPTIONAL = frozenset({"dlse"})  # pointers that may be null

# Sizes of the traces: any that fit together, no two alike, no head count 1. EMPTY has no key: nothing is launched, and
# outputs are filled.
PROBES: tuple[dict[str, int], ...] = (
    {"B": 3, "Hq": 12, "Hk": 4, "Nq": 1000, "Nk": 777, "parts": 5, "left": 103, "right": 59},
    {"B": 2, "Hq": 35, "Hk": 7, "Nq": 17, "Nk": 4099, "parts": 9, "left": 8, "right": 4001},
    {"B": 5, "Hq": 16, "Hk": 2, "Nq": 90001, "Nk": 31, "parts": 11, "left": 70000, "right": 10},
)
EMPTY = {**PROBES[0], "Nq": 6, "Nk": 0}
OF_WINDOWS = frozenset({("left", "int"), ("right", "int")})  # parameters of kernels with a window


def plan_of(
    problem: Problem, which: Pass, sources: Mapping[KernelName, Source], *, parts: int = 1, name: str | None = None
) -> Plan:
    """The plan of a pass of these kernels. `parts`: into which a forward by parts cuts the keys of `problem`.

    Raises UsageError for a kernel with a parameter that a launcher in C has no place for, and for a bad name.
    """
    for source in sources.values():
        _check_parameters(source)
    traces = [
        _Trace(problem, which, sources, probe, scale) for probe, scale in zip(PROBES, (1.0, 0.5, 2.0), strict=True)
    ]
    plans = [trace.formulas() for trace in traces]
    if any(plan != plans[0] for plan in plans):
        keys = ", ".join(source.spec.key for source in sources.values())
        raise UsageError(f"the launches of {keys} follow no formula of the sizes alone, and cannot be exported.")
    launches, temporaries, limits = plans[0]
    taken = {arg.name for source in sources.values() for arg in source.spec.signature}
    sizes = tuple(size for size in PROBES[0] if size in taken | {"B", "Hk", "Nk"})
    return Plan(
        name=_c_name(name or default_name(which, sources)), problem=problem, which=which, sizes=sizes, parts=parts,
        fields=traces[0].fields(_Trace(problem, which, sources, EMPTY, 1.0)),
        temporaries=temporaries, launches=launches, limits=limits,
    )  # fmt: skip


def default_name(which: Pass, sources: Mapping[KernelName, Source]) -> str:
    """Of the pass's main kernel, without its GPU and tile: flashsmith_forward_bf16_d128_causal.

    Another form of the same pass has a name of its own, so that both can be linked.
    """
    main = next(source.spec for kernel, source in sources.items() if kernel != "delta")
    text = main.key.split(f"_sm{main.sm}_")[0].removeprefix(main.kernel)
    form = {"partial": "_parts", "dkdv": "_split"}.get(main.kernel, "")
    return re.sub(r"\W", "_", f"flashsmith_{which}{text}{form}")


def _c_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise UsageError(f"--name {name!r} cannot begin the names of C functions: use letters, digits and _.")
    return name


def _check_parameters(source: Source) -> None:
    """Raise UsageError unless all parameters are those of plain, causal or windowed attention."""
    if source.spec.kernel in HOPPER:
        other = source.spec.kernel.removesuffix("90")
        raise UsageError(f"{source.spec.key} takes tensor maps, which an exported launcher cannot encode. Use {other}.")
    known = {(arg.name, arg.type) for arg in SIGNATURES[source.spec.kernel]} | OF_WINDOWS
    for arg in source.spec.signature:
        if (arg.name, arg.type) not in known:
            raise UsageError(
                f"{source.spec.key} takes {arg.name} ({arg.note}), and an exported launcher has no place for it. "
                f"Export the pass without {' or '.join(source.spec.features.words)}."
            )


class _Engine:
    """An Engine that holds no data: it hands out addresses, and keeps what is allocated and launched."""

    name = "trace"
    sms = 1  # of no kernel that can be exported the launch depends on them

    def __init__(self) -> None:
        self.fills: dict[int, float | None] = {}  # of each allocation; None: nothing in particular
        self.made: dict[int, Tensor] = {}
        self.launches: list[tuple[Source, int, tuple[Value, ...]]] = []
        self._next = 1

    def given(self, shape: Sequence[int], dtype: DTypeLike) -> Tensor:
        """A tensor with an address and strides of its own, every row on 16 bytes."""
        n, self._next = self._next, self._next + 1
        return Tensor(n << 32, tuple(shape), (8 * (3000 + n), 8 * (2000 + n), 8 * (1000 + n), 1), np.dtype(dtype))

    def _make(self, shape: tuple[int, ...], dtype: DTypeLike, fill: float | None) -> Tensor:
        tensor = self.given(shape, dtype)
        self.fills[tensor.address], self.made[tensor.address] = fill, tensor
        return tensor

    def tensor(self, array: NDArray[Any]) -> Tensor:
        return self._make(array.shape, array.dtype, float(array.flat[0]))

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        return self._make(shape, dtype, None)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        return self._make(shape, dtype, 0.0)

    def contiguous(self, tensor: Tensor) -> Tensor:
        raise LaunchError("a trace copies nothing: all of its tensors are aligned.")

    def read(self, tensor: Tensor) -> NDArray[Any]:
        raise LaunchError("a trace holds no data.")

    def tensor_map(self, boxes: Boxes) -> bytes:
        raise LaunchError("a trace has no driver that encodes tensor maps.")

    def load(self, binary: Any) -> Any:
        return binary

    def launch(self, kernel: Any, *, grid: int, block: int, smem: int, args: Sequence[Value]) -> None:
        self.launches.append((kernel, grid, tuple(args)))


class _Trace:
    """One run of a pass for one set of sizes."""

    def __init__(
        self,
        problem: Problem,
        which: Pass,
        sources: Mapping[KernelName, Source],
        probe: Mapping[str, int],
        scale: float,
    ) -> None:
        self.limits: list[tuple[str, int]] = []
        self.sizes = {name: Expression(name, value, self.limits) for name, value in probe.items()}
        self.scale = scale
        self.engine = _Engine()
        B, Hq, Hk, Nq, Nk, parts, left, right = self.sizes.values()
        extras = Extras(left=left, right=right)
        d, dv, bits = problem.d, problem.value_dim, stored_as(problem.dtype)
        given = self.engine.given
        Q, K, V = given((B, Hq, Nq, d), bits), given((B, Hk, Nk, d), bits), given((B, Hk, Nk, dv), bits)
        kernels = cast(Any, sources)  # a pass asks of a Binary its spec and its shared memory: a Source knows both
        self.inputs = {"Q": Q, "K": K, "V": V}
        if which == "forward":
            cut = parts if "partial" in sources else 1
            out: Any = run_forward(self.engine, kernels, Q, K, V, scale, parts=cut, extras=extras)
        else:
            saved = Forward(given((B, Hq, Nq, dv), bits), *(given((B, Hq, Nq), np.float32) for _ in "ml"))
            dO, dlse = given((B, Hq, Nq, dv), bits), given((B, Hq, Nq), np.float32)
            self.inputs |= {"O": saved.O, "m": saved.m, "l": saved.l, "dO": dO, "dlse": dlse}
            out = run_backward(self.engine, kernels, Q, K, V, saved, dO, scale, dlse, extras=extras)
        results = {field.name: getattr(out, field.name) for field in fields(out)}
        self.outputs: dict[str, Tensor] = {name: tensor for name, tensor in results.items() if tensor is not None}

    def fields(self, empty: _Trace) -> tuple[Field, ...]:
        """What the caller gives; `empty`, a trace without a key, says what outputs then hold."""
        args = {arg.name: arg for source, _, _ in self.engine.launches for arg in source.spec.signature}
        made = []
        for name, tensor in (self.inputs | self.outputs).items():
            fill = empty.engine.fills[empty.outputs[name].address] if name in self.outputs else None
            if empty.engine.launches or (name in self.outputs and fill is None):
                raise UsageError(f"{name} is computed even where there is no key; that cannot be exported.")
            if self.engine.fills.get(tensor.address) is not None:
                raise UsageError(f"{name} is set before the first launch; that cannot be exported.")
            shape = tuple(n.text if isinstance(n, Expression) else str(n) for n in tensor.shape)
            made.append(
                Field(name=name, note=args[name].note, view=args[name].type.startswith("View"), shape=shape, fill=fill,
                      optional=name in OPTIONAL)
            )  # fmt: skip
        return tuple(made)

    def formulas(self) -> tuple[tuple[Launch, ...], tuple[Temporary, ...], tuple[tuple[str, int], ...]]:
        """Launches, temporaries and limits."""
        named = {name: tensor.address for name, tensor in (self.inputs | self.outputs).items()}
        temporaries: list[Temporary] = []
        launches = []
        for source, blocks, args in self.engine.launches:
            offset, parameters = 0, []
            for arg, value in zip(source.spec.signature, args, strict=True):
                made = self.engine.made.get(value) if isinstance(value, int) else None
                if arg.name not in named and made is not None and arg.type in ("float*", "const float*"):
                    named[arg.name] = made.address
                    temporaries.append(self._temporary(arg, made))
                size = ARG_BYTES[arg.type]
                offset = -(-offset // min(size, 8)) * min(size, 8)  # members and pointers are of 8 bytes at most
                parameters.append(Parameter(arg=arg, offset=offset, values=self._values(arg, value, named)))
                offset += size
            text = blocks.text if isinstance(blocks, Expression) else str(blocks)
            launches.append(Launch(source=source, blocks=text, parameters=tuple(parameters)))
        return tuple(launches), tuple(temporaries), tuple(dict.fromkeys(self.limits))

    def _temporary(self, arg: Arg, tensor: Tensor) -> Temporary:
        size = prod(tensor.shape) * tensor.dtype.itemsize
        padded = -(-size // ALIGN_TEMPORARY) * ALIGN_TEMPORARY
        assert isinstance(padded, Expression)  # no temporary is of one size for all calls
        zeroed = self.engine.fills[tensor.address] == 0.0
        return Temporary(name=arg.name, note=arg.note, bytes=padded.text, zeroed=zeroed)

    def _values(self, arg: Arg, value: Value, named: Mapping[str, int]) -> tuple[str, ...]:
        """What a parameter holds, as formulas; the value that `run.py` packed must agree."""
        tensors = self.inputs | self.outputs
        if arg.type in ("View<const T>", "View<T>") and isinstance(value, bytes):
            tensor = tensors[arg.name]
            if struct.unpack("<Qqqq", value) == (tensor.address, *tensor.strides[:3]):
                return tuple(f"{arg.name}.{member}" for member in ("data", "batch", "head", "row"))
        elif arg.type == "Walk" and isinstance(value, bytes):
            row = tensors[arg.tensor].strides[2]
            steps = [divmod(step, row) for step in struct.unpack("<qq", value)]
            if not any(rest for _, rest in steps):
                return tuple(f"{factor} * {arg.tensor}.row" for factor, _ in steps)
        elif arg.type in ("float*", "const float*", "int"):
            if (self.sizes if arg.type == "int" else named).get(arg.name) == value:
                return (arg.name,)
        elif arg.type == "float" and isinstance(value, float):
            factor = value / self.scale
            return ("scale" if factor == 1 else f"scale * {factor!r}",)
        raise UsageError(f"{arg.name} ({arg.note}) is no formula of sizes, strides and scale; it cannot be exported.")

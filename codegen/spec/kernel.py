"""Name one kernel's text completely, and the arguments it is launched with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from .problem import Dtype, Problem, check_head_dim
from .tile import ForwardTile, KeyBlockTile, QueryBlockTile, RowTile, Tile, tile_key

KernelName = Literal["forward", "partial", "combine", "delta", "fused", "convert", "dkdv", "dq"]
KERNELS: tuple[KernelName, ...] = get_args(KernelName)
TILE_OF: dict[KernelName, type[Tile]] = {
    "forward": ForwardTile,
    "partial": ForwardTile,
    "combine": RowTile,
    "delta": RowTile,
    "fused": KeyBlockTile,
    "convert": KeyBlockTile,
    "dkdv": KeyBlockTile,
    "dq": QueryBlockTile,
}
MASKED: frozenset[KernelName] = frozenset({"forward", "partial", "fused", "dkdv", "dq"})  # others' text knows no mask

# The launches of each pass, in order. The forward by parts gives each part of the keys its own blocks, where those of
# the query rows leave multiprocessors idle. The split backward adds nothing atomically: bit-identical from run to run.
FORWARD: tuple[KernelName, ...] = ("forward",)
PARTS: tuple[KernelName, ...] = ("partial", "combine")
FUSED: tuple[KernelName, ...] = ("delta", "fused", "convert")
SPLIT: tuple[KernelName, ...] = ("delta", "dkdv", "dq")

STATS = 3  # numbers that `delta` leaves for each row: see SIGNATURES["delta"]
STATS_ROWS = 16  # rows whose statistics lie together
PAD_ROWS = 128  # statistics are written for a multiple of this many rows, so that no tile reads past them

ArgType = Literal["View<const T>", "View<T>", "Walk", "const float*", "float*", "int", "float"]
ARG_BYTES: dict[ArgType, int] = {
    "View<const T>": 32, "View<T>": 32, "Walk": 16, "const float*": 8, "float*": 8, "int": 4, "float": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel parameter: its C type, its name and what the text says of it."""

    type: ArgType
    name: str
    note: str

    @property
    def tensor(self) -> str:
        """The tensor whose rows a Walk steps over: K_walk -> K."""
        return self.name.removesuffix("_walk")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Everything that the text of one kernel depends on."""

    kernel: KernelName
    dtype: Dtype
    d: int
    causal: bool
    tile: Tile
    sm: int  # compute capability times ten: 80 for an A100

    def __post_init__(self) -> None:
        check_head_dim(self.d)
        if not isinstance(self.tile, TILE_OF[self.kernel]):
            raise TypeError(f"{self.kernel} takes a {TILE_OF[self.kernel].__name__}, not {type(self.tile).__name__}.")
        if self.causal and self.kernel not in MASKED:
            object.__setattr__(self, "causal", False)

    @classmethod
    def of(cls, kernel: KernelName, problem: Problem, tile: Tile, sm: int) -> KernelSpec:
        """The spec of `kernel` for the part of `problem` that its text depends on."""
        return cls(kernel=kernel, dtype=problem.dtype, d=problem.d, causal=problem.causal, tile=tile, sm=sm)

    @property
    def key(self) -> str:
        """Readable, sorts well, names a folder: forward_bf16_d128_causal_sm80_Br128_Bc64_w4_q0_lazy0_b2."""
        mask = "_causal" if self.causal else ""
        return f"{self.kernel}_{self.dtype}_d{self.d}{mask}_sm{self.sm}_{tile_key(self.tile)}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.tile.warps

    @property
    def half_step(self) -> bool:
        """Whether d / 8 is odd: sums over d end in a half step (mma m16n8k8), and the columns of d in a half block."""
        return self.d % 16 != 0

    @property
    def signature(self) -> tuple[Arg, ...]:
        """The kernel's parameters in order."""
        return SIGNATURES[self.kernel]


def _view(name: str, shape: str, const: bool = True) -> Arg:
    return Arg("View<const T>" if const else "View<T>", name, shape)


_Q, _K, _V, _dO = (
    _view("Q", "[B, Hq, Nq, d]"),
    _view("K", "[B, Hk, Nk, d]"),
    _view("V", "[B, Hk, Nk, d]"),
    _view("dO", "[B, Hq, Nq, d]"),
)
_SIZES = (
    Arg("int", "Hq", "query heads"),
    Arg("int", "Hk", "key/value heads; query head h reads head h / (Hq / Hk)"),
    Arg("int", "Nq", "query rows of a head"),
    Arg("int", "Nk", "keys of a head"),
)
_SCALES = (
    Arg("float", "scale", "of Q K^T"),
    Arg("float", "scale_log2", "scale * log2(e): exp(scale * x) = exp2(scale_log2 * x)"),
)
_STATS = Arg(
    "const float*", "stats", "[B, Hq, Nq padded to 128 / 16, 3, 16]: -lse in base 2, -delta, huge m (see delta)"
)

_ROWS_OF_PARTS = (
    Arg("const float*", "O_part", "[B, Hq, Nq, parts, d], sum of exp(scale (S - m)) V over the keys of a part"),
    Arg("const float*", "m_part", "[B, Hq, Nq, parts], max of the unscaled scores; the lowest float without a key"),
    Arg("const float*", "l_part", "[B, Hq, Nq, parts], sum of exp(scale (S - m))"),
)
_PARTS = Arg("int", "parts", "into which the keys that a block sees are cut")

SIGNATURES: dict[KernelName, tuple[Arg, ...]] = {
    "forward": (
        _Q, _K, _V, _view("O", "[B, Hq, Nq, d]", const=False),
        Arg("float*", "m", "[B, Hq, Nq], max of the scaled scores of a row; -inf if it sees no key"),
        Arg("float*", "l", "[B, Hq, Nq], sum of exp(S - m) of a row; 0 if it sees no key"),
        Arg("Walk", "K_walk", "bytes between copy passes and between K tiles"),
        Arg("Walk", "V_walk", "bytes between copy passes and between V tiles"),
        *_SIZES, *_SCALES,
    ),
    "partial": (
        _Q, _K, _V, *(replace(arg, type="float*") for arg in _ROWS_OF_PARTS),
        Arg("Walk", "K_walk", "bytes between copy passes and between K tiles"),
        Arg("Walk", "V_walk", "bytes between copy passes and between V tiles"),
        *_SIZES, *_SCALES, _PARTS,
    ),
    "combine": (
        *_ROWS_OF_PARTS, _view("O", "[B, Hq, Nq, d]", const=False),
        Arg("float*", "m", "[B, Hq, Nq], max of the scaled scores of a row; -inf if it sees no key"),
        Arg("float*", "l", "[B, Hq, Nq], sum of exp(S - m) of a row; 0 if it sees no key"),
        Arg("int", "Hq", "query heads"), Arg("int", "Nq", "query rows of a head"), *_SCALES, _PARTS,
    ),
    "delta": (
        _view("O", "[B, Hq, Nq, d]"), _dO,
        Arg("const float*", "m", "[B, Hq, Nq]"), Arg("const float*", "l", "[B, Hq, Nq]"),
        Arg("const float*", "dlse", "[B, Hq, Nq], the gradient of lse = m + ln l; null if there is none"),
        Arg("float*", "stats", "[B, Hq, Nq padded to 128 / 16, 3, 16]: -lse in base 2, -delta, huge m"),
        Arg("int", "Hq", "query heads"), Arg("int", "Nq", "query rows of a head"),
    ),
    "fused": (
        _Q, _K, _V, _dO, _STATS,
        Arg("float*", "dQ_acc", "[B, Hq, Tr, Br * columns], sums of dQ / scale in the order of the fragments"),
        _view("dK", "[B, Hk, Nk, d]", const=False), _view("dV", "[B, Hk, Nk, d]", const=False),
        Arg("Walk", "Q_walk", "bytes between copy passes and between Q tiles"),
        Arg("Walk", "dO_walk", "bytes between copy passes and between dO tiles"),
        *_SIZES, _SCALES[0],
    ),
    "convert": (
        Arg("const float*", "dQ_acc", "[B, Hq, Tr, Br * columns], sums of dQ / scale in the order of the fragments"),
        _view("dQ", "[B, Hq, Nq, d]", const=False),
        Arg("int", "Hq", "query heads"), Arg("int", "Nq", "query rows of a head"),
        Arg("float", "scale", "of Q K^T"),
    ),
    "dkdv": (
        _Q, _K, _V, _dO, _STATS,
        _view("dK", "[B, Hk, Nk, d]", const=False), _view("dV", "[B, Hk, Nk, d]", const=False),
        Arg("Walk", "Q_walk", "bytes between copy passes and between Q tiles"),
        Arg("Walk", "dO_walk", "bytes between copy passes and between dO tiles"),
        *_SIZES, _SCALES[0],
    ),
    "dq": (
        _Q, _K, _V, _dO, _STATS,
        _view("dQ", "[B, Hq, Nq, d]", const=False),
        Arg("Walk", "K_walk", "bytes between copy passes and between K tiles"),
        Arg("Walk", "V_walk", "bytes between copy passes and between V tiles"),
        *_SIZES, *_SCALES,
    ),
}  # fmt: skip

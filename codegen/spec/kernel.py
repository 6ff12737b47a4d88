"""Name one kernel's text completely, and the arguments it is launched with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..errors import BadProblem
from ..score_mod import table_name
from .features import FLAGS, PLAIN, Features, TableDtype
from .problem import ELEMENT_BYTES, Dtype, Problem, check_head_dim
from .tile import (
    ForwardTile,
    KeyBlockTile,
    QueryBlockTile,
    RowTile,
    Tile,
    WarpgroupKeyTile,
    WarpgroupQueryTile,
    WarpgroupTile,
    WarpgroupWideTile,
    tile_key,
)

KernelName = Literal[
    "forward", "partial", "combine", "delta", "fused", "convert", "dkdv", "dq",
    "forward90", "fused90", "convert90", "dkdv90", "dkdv90_wide", "dq90",
]  # fmt: skip
# Of TMA and wgmma, which sm_90a alone has, and what reads in their order.
HOPPER: frozenset[KernelName] = frozenset({"forward90", "fused90", "convert90", "dkdv90", "dkdv90_wide", "dq90"})
PERSISTENT: frozenset[KernelName] = frozenset({"forward90"})  # a block works on one tile after another
KERNELS: tuple[KernelName, ...] = tuple(name for name in get_args(KernelName) if name not in HOPPER)  # of all parts
TILE_OF: dict[KernelName, type[Tile]] = {
    "forward": ForwardTile,
    "partial": ForwardTile,
    "combine": RowTile,
    "delta": RowTile,
    "fused": KeyBlockTile,
    "convert": KeyBlockTile,
    "dkdv": KeyBlockTile,
    "dq": QueryBlockTile,
    "forward90": WarpgroupTile,
    "fused90": WarpgroupKeyTile,
    "convert90": WarpgroupKeyTile,
    "dkdv90": WarpgroupKeyTile,
    "dkdv90_wide": WarpgroupWideTile,
    "dq90": WarpgroupQueryTile,
}
# The text of others knows no mask.
MASKED: frozenset[KernelName] = frozenset(
    {"forward", "partial", "fused", "dkdv", "dq", "forward90", "fused90", "dkdv90", "dkdv90_wide", "dq90"}
)

# The features that a kernel of warpgroups has; one that is not named here has none.
WARPGROUP_FEATURES: dict[KernelName, frozenset[str]] = {
    **dict.fromkeys(
        ("forward90", "fused90", "dkdv90", "dkdv90_wide", "dq90"), frozenset({*FLAGS, "score_mod", "padded", "packed"})
    ),
    "convert90": frozenset({"packed"}),
}

# The launches of each pass, in order. The forward by parts gives each part of the keys its own blocks, where those of
# the query rows leave multiprocessors idle. The split backward adds nothing atomically: bit-identical from run to run.
FORWARD: tuple[KernelName, ...] = ("forward",)
PARTS: tuple[KernelName, ...] = ("partial", "combine")
WARPGROUPS: tuple[KernelName, ...] = ("forward90",)
FUSED: tuple[KernelName, ...] = ("delta", "fused", "convert")
FUSED90: tuple[KernelName, ...] = ("delta", "fused90", "convert90")
SPLIT: tuple[KernelName, ...] = ("delta", "dkdv", "dq")
SPLIT90: tuple[KernelName, ...] = ("delta", "dkdv90", "dq90")
SPLIT90_WIDE: tuple[KernelName, ...] = ("delta", "dkdv90_wide", "dq90")  # of heads of more than 128 columns

# What turns sums of dQ into dQ, and what leaves them: of one tile.
CONVERTS: dict[KernelName, KernelName] = {"convert": "fused", "convert90": "fused90"}

WIDEST90 = 128  # columns of heads whose dK and dV of 64 keys fit the registers of a warpgroup: see dkdv90


def split90(problem: Problem) -> tuple[KernelName, ...]:
    """The split backward of warpgroups of a problem."""
    return SPLIT90 if max(problem.d, problem.value_dim) <= WIDEST90 else SPLIT90_WIDE


STATS = 3  # numbers that `delta` leaves for each row: see SIGNATURES["delta"]
STATS_ROWS = 16  # rows whose statistics lie together
PAD_ROWS = 128  # statistics are written for a multiple of this many rows, so that no tile reads past them

ArgType = Literal[
    "View<const T>", "View<T>", "Walk", "const float*", "float*", "const int*", "const i64*", "int", "float",
    "score_mod::Table<float>", "score_mod::Table<score_mod::fp16>", "score_mod::Table<score_mod::bf16>",
    "const __grid_constant__ TensorMap",
]  # fmt: skip
ARG_BYTES: dict[ArgType, int] = {
    "View<const T>": 32, "View<T>": 32, "Walk": 16, "const float*": 8, "float*": 8, "const int*": 8, "const i64*": 8,
    "int": 4, "float": 4,
    "score_mod::Table<float>": 56, "score_mod::Table<score_mod::fp16>": 56, "score_mod::Table<score_mod::bf16>": 56,
    "const __grid_constant__ TensorMap": 128,
}  # fmt: skip
TENSOR_MAP: ArgType = "const __grid_constant__ TensorMap"  # a tensor as TMA sees it


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel parameter: its C type, its name and what the text says of it."""

    type: ArgType
    name: str
    note: str

    @property
    def tensor(self) -> str:
        """The tensor whose rows a Walk steps over, or that a TensorMap describes: K_walk -> K, K_map -> K."""
        return self.name.removesuffix("_walk").removesuffix("_map")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Everything that the text of one kernel depends on."""

    kernel: KernelName
    dtype: Dtype
    d: int
    causal: bool
    tile: Tile
    sm: int  # compute capability times ten: 80 for an A100
    dv: int = 0  # head dimension of V and O; 0: d
    features: Features = PLAIN

    def __post_init__(self) -> None:
        check_head_dim(self.d)
        if not isinstance(self.tile, TILE_OF[self.kernel]):
            raise TypeError(f"{self.kernel} takes a {TILE_OF[self.kernel].__name__}, not {type(self.tile).__name__}.")
        causal = (self.causal or self.features.shifted) and self.kernel in MASKED
        object.__setattr__(self, "causal", causal)
        object.__setattr__(self, "features", self.features.of(self.kernel))
        d, dv = self.d, self.dv or self.d
        object.__setattr__(self, "d", dv if self.kernel == "delta" else d)  # it reads O and dO alone
        object.__setattr__(self, "dv", dv)
        check_head_dim(self.dv, "dv")
        if self.kernel in ("partial", "combine") and not (self.plain and d == dv):
            raise BadProblem(
                f"{self.kernel} serves plain and causal attention with d = dv; others run whole, in forward."
            )
        other = self.kernel.partition("90")[0]
        if self.kernel in HOPPER and self.fp32:
            raise BadProblem(f"{self.kernel} serves 16 bits; fp32 runs in {other}.")
        unknown = self._unknown_features() if self.kernel in HOPPER else ()
        if unknown:
            raise BadProblem(f"{self.kernel} does not serve {', '.join(unknown)}; such attention runs in {other}.")

    def _unknown_features(self) -> tuple[str, ...]:
        """Those, in words, that a kernel of warpgroups does not have."""
        known = WARPGROUP_FEATURES.get(self.kernel, frozenset())
        given = {name for name in FLAGS if getattr(self.features, name)}
        others = {name for name in ("score_mod",) if self.features.score_mod}
        lengths = set() if self.features.lengths == "uniform" else {self.features.lengths}
        return tuple(sorted(name.replace("_", "-") for name in (given | others | lengths) - known))

    @classmethod
    def of(cls, kernel: KernelName, problem: Problem, tile: Tile, sm: int) -> KernelSpec:
        """The spec of `kernel` for the part of `problem` that its text depends on."""
        return cls(
            kernel=kernel, dtype=problem.dtype, d=problem.d, dv=problem.value_dim, causal=problem.causal, tile=tile,
            sm=sm, features=problem.features,
        )  # fmt: skip

    @property
    def plain(self) -> bool:
        """Whether the text has no feature."""
        return self.features.plain

    @property
    def key(self) -> str:
        """Readable, sorts well, names a folder: forward_bf16_d128_causal_sm80_Br128_Bc64_w4_q0_lazy0_b2."""
        dims = f"d{self.d}" + (f"_dv{self.dv}" if self.dv != self.d else "")
        mask = "_causal" if self.causal and not self.features.shifted else ""
        return f"{self.kernel}_{self.dtype}_{dims}{mask}{self.features.key}_sm{self.sm}_{tile_key(self.tile)}"

    @property
    def target(self) -> str:
        """The architecture that its machine code is for: what sm_90a adds to sm_90, no other part has."""
        return f"sm_{self.sm}{'a' if self.kernel in HOPPER else ''}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.tile.warps

    @property
    def fp32(self) -> bool:
        """Whether the products are of fp32, each three of TF32 parts: see ptx.j2."""
        return self.dtype == "fp32"

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes: what a lane copies at once, and a row of an ldmatrix matrix."""
        return 16 // ELEMENT_BYTES[self.dtype]

    @property
    def depth(self) -> int:
        """Columns of A and rows of B that a matrix product of the tensor cores adds up: 32 bytes of a row."""
        return 2 * self.chunk

    @property
    def half_step(self) -> bool:
        """Whether sums over d, and the columns of d, end in a half step (m16n8k8 of 16 bits, d / 8 odd)."""
        return self.d % self.depth != 0

    @property
    def half_values(self) -> bool:
        """Whether the columns of O end in a half block (16 bits, dv / 8 odd)."""
        return self.dv % self.depth != 0

    @property
    def signature(self) -> tuple[Arg, ...]:
        """The kernel's parameters in order."""
        args = signature(self.kernel, self.features, values="dv" if self.dv != self.d else "d")
        if getattr(self.tile, "cluster", 1) == 1:
            return args
        return tuple(replace(arg, note=arg.note.replace("boxes of Bc rows", "boxes of Bc / 2 rows")) for arg in args)


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
_MAPS_OF_KEYS = (
    Arg(TENSOR_MAP, "Q_map", "[B, Hq, Nq, d] in boxes of Br rows x 64 columns"),
    Arg(TENSOR_MAP, "K_map", "[B, Hk, Nk, d] in boxes of Bc rows x 64 columns"),
    Arg(TENSOR_MAP, "V_map", "[B, Hk, Nk, dv] in boxes of Bc rows x 64 columns"),
    Arg(TENSOR_MAP, "dO_map", "[B, Hq, Nq, dv] in boxes of Br rows x 64 columns"),
)
_GRADIENTS_OF_KEYS = (
    Arg(TENSOR_MAP, "dK_map", "[B, Hk, Nk, d] in boxes of 64 rows x 64 columns"),
    Arg(TENSOR_MAP, "dV_map", "[B, Hk, Nk, dv] in boxes of 64 rows x 64 columns"),
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
    "forward90": (
        Arg(TENSOR_MAP, "Q_map", "[B, Hq, Nq, d] in boxes of Br rows x 64 columns"),
        Arg(TENSOR_MAP, "K_map", "[B, Hk, Nk, d] in boxes of Bc rows x 64 columns"),
        Arg(TENSOR_MAP, "V_map", "[B, Hk, Nk, dv] in boxes of Bc rows x 64 columns"),
        _view("O", "[B, Hq, Nq, dv]", const=False),
        Arg("float*", "m", "[B, Hq, Nq], max of the scaled scores of a row; -inf if it sees no key"),
        Arg("float*", "l", "[B, Hq, Nq], sum of exp(S - m) of a row; 0 if it sees no key"),
        *_SIZES, *_SCALES, Arg("int", "tiles", "of Br query rows, of all heads; the blocks share them"),
    ),
    "fused90": (
        *_MAPS_OF_KEYS, *_GRADIENTS_OF_KEYS, _STATS,
        Arg("float*", "dQ_acc", "[B, Hq, Tr, Br * columns], sums of dQ / scale in the order of the fragments"),
        *_SIZES, *_SCALES,
    ),
    "convert90": (
        Arg("const float*", "dQ_acc", "[B, Hq, Tr, Br * columns], sums of dQ / scale in the order of the fragments"),
        _view("dQ", "[B, Hq, Nq, d]", const=False),
        Arg("int", "Hq", "query heads"), Arg("int", "Nq", "query rows of a head"),
        Arg("float", "scale", "of Q K^T"),
    ),
    "dkdv90": (*_MAPS_OF_KEYS, *_GRADIENTS_OF_KEYS, _STATS, *_SIZES, *_SCALES),
    "dkdv90_wide": (
        *_MAPS_OF_KEYS,
        Arg(TENSOR_MAP, "dK_map", "[B, Hk, Nk, d] in boxes of Bc rows x 64 columns"),
        Arg(TENSOR_MAP, "dV_map", "[B, Hk, Nk, dv] in boxes of Bc rows x 64 columns"),
        _STATS, *_SIZES, *_SCALES,
    ),
    "dq90": (
        *_MAPS_OF_KEYS, Arg(TENSOR_MAP, "dQ_map", "[B, Hq, Nq, d] in boxes of 64 rows x 64 columns"),
        _STATS, *_SIZES, *_SCALES,
    ),
}  # fmt: skip

# Tensors whose rows are as long as those of V.
_OF_VALUES = frozenset({"V", "O", "dO", "dV"})

_CU = (
    Arg("const int*", "cu_q", "[B + 1], where the rows of each sequence begin in Q; the last: how many there are"),
    Arg("const int*", "cu_k", "[B + 1], and in K and V"),
    Arg("int", "all_q", "query rows of all sequences"),
    Arg("int", "B", "sequences"),
)
_TABLE_TYPES: dict[TableDtype, ArgType] = {
    "fp32": "score_mod::Table<float>", "fp16": "score_mod::Table<score_mod::fp16>",
    "bf16": "score_mod::Table<score_mod::bf16>",
}  # fmt: skip


def signature(kernel: KernelName, features: Features, values: str = "d") -> tuple[Arg, ...]:
    """The parameters of a kernel: those of the plain one, renamed where a feature has another use for a name, and more.

    `values`: what the text calls the head dimension of V and O.
    """
    return (*(_renamed(arg, features, values) for arg in SIGNATURES[kernel]), *_of_features(kernel, features))


def _renamed(arg: Arg, features: Features, values: str) -> Arg:
    # TMA would store rows past the end of a sequence, over those of another or of padding.
    ragged = features.packed if arg.name == "dQ_map" else features.lengths != "uniform"
    if ragged and arg.name in ("dQ_map", "dK_map", "dV_map"):
        arg = Arg("View<T>", arg.tensor, arg.note.partition(" in boxes")[0])
    if values != "d" and arg.name in _OF_VALUES:
        arg = replace(arg, note=arg.note.replace(", d]", f", {values}]"))
    if features.packed:
        note = arg.note.replace("B, Hq, Nq", "1, Hq, all_q").replace("B, Hk, Nk", "1, Hk, all keys")
        note = note.replace("[1, Hq, all_q]", "[Hq, all_q]")
        arg = replace(arg, note=note)
    longest = (arg.name == "Nq" and features.packed) or (arg.name == "Nk" and features.lengths != "uniform")
    if longest:
        return replace(arg, name=f"max_{arg.name}", note=f"{arg.note}, of the longest sequence")
    if features.score_mod and arg.name in ("scale", "scale_log2"):
        name = arg.name.replace("scale", "score_scale")
        return replace(arg, name=name, note=f"{arg.note}; then comes score_mod")
    return arg


def _of_features(kernel: KernelName, features: Features) -> Iterator[Arg]:
    if features.packed:
        yield from _CU
    if features.lengths == "padded":
        yield Arg("const int*", "k_lens", "[B], keys of each sequence; the others are not seen")
    if features.left:
        yield Arg("int", "left", "keys that a query sees before its own")
    if features.shifted:
        yield Arg("int", "right", "keys that a query sees behind its own")
    if features.sinks:
        yield Arg("const float*", "sinks", "[Hq], a logit of each head that has no value")
    if features.sinks and kernel == "delta":
        yield Arg("float*", "dsinks", "[B, Hq, Nq], what each row adds to the gradient of its head's sink")
    if features.dropout:
        yield from _of_dropout(kernel)
    if features.score_mod:
        for table in features.score_mod.tables:
            yield Arg(_TABLE_TYPES[table.dtype], table_name(table.name), f"`{table.name}` of score_mod")
        for table in features.score_mod.grads:
            yield Arg("score_mod::Table<float>", f"grad_{table.name}", f"the gradient of `{table.name}`, added up")


def _of_dropout(kernel: KernelName) -> Iterator[Arg]:
    if kernel != "delta":
        yield Arg("const i64*", "rng", "[2], seed and offset of the random numbers")
        yield Arg("int", "keep_below", "a weight is kept if its 16 random bits are below")
    yield Arg("float", "keep", "the share of the weights that is kept, keep_below / 65536")

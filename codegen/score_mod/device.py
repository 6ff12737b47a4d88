"""Hold the device functions that emitted statements call, in namespace score_mod, and pack the tables they read."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .tree import MAX_RANK

ELEMENTS = ("float", "bf16", "fp16")
"""What a table may hold: Table<float>, Table<score_mod::bf16>, Table<score_mod::fp16>."""


@dataclass(frozen=True, slots=True)
class _Function:
    text: str
    needs: tuple[str, ...] = ()


_FUNCTIONS = {
    "infinity": _Function("__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }"),
    "ex2": _Function("""\
// 2^x to 2^-22; 2^-inf = 0.
__device__ __forceinline__ float ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}"""),
    "rcp": _Function("""\
// 1 / x to within one unit in the last place; 1 / 0 = inf.
__device__ __forceinline__ float rcp(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}"""),
    "divide": _Function("""\
// a / b to within two units in the last place; 0 if |b| > 2^126.
__device__ __forceinline__ float divide(float a, float b)
{
    float y;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}"""),
    "exp": _Function(
        """\
// e^x; rounding the exponent moves it by a relative 2^-24 |x|.
__device__ __forceinline__ float exp(float x) { return ex2(x * 1.442695041f); }""",
        ("ex2",),
    ),
    "sqrt": _Function("""\
__device__ __forceinline__ float sqrt(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}"""),
    "sigmoid": _Function(
        """\
// 1 / (1 + e^-x)
__device__ __forceinline__ float sigmoid(float x) { return rcp(1.f + ex2(x * -1.442695041f)); }""",
        ("ex2", "rcp"),
    ),
    "tanh": _Function(
        """\
// 1 - 2 / (1 + e^2x), absolute error within 5e-7: a softmax takes no notice of less. NaN stays NaN.
__device__ __forceinline__ float tanh(float x) { return fmaf(-2.f, rcp(1.f + ex2(x * 2.885390082f)), 1.f); }""",
        ("ex2", "rcp"),
    ),
    "within_a_turn": _Function("""\
// x less a whole number of turns of 2 pi, which is taken off in two parts.
__device__ __forceinline__ float within_a_turn(float x)
{
    const float turns = rintf(x * 0.1591549431f);
    return fmaf(turns, 1.7484555e-7f, fmaf(turns, -6.283185482f, x));
}"""),
    "sin": _Function(
        """\
// sin x to 2^-20, for |x| up to 10^4.
__device__ __forceinline__ float sin(float x)
{
    float y;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(within_a_turn(x)));
    return y;
}""",
        ("within_a_turn",),
    ),
    "cos": _Function(
        """\
// cos x to 2^-20, for |x| up to 10^4.
__device__ __forceinline__ float cos(float x)
{
    float y;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(within_a_turn(x)));
    return y;
}""",
        ("within_a_turn",),
    ),
    "sign": _Function("""\
// -1, 0 or 1; NaN stays NaN.
__device__ __forceinline__ float sign(float x) { return x > 0.f ? 1.f : x < 0.f ? -1.f : x; }"""),
    "least": _Function("""\
// The lesser of two; NaN if one is.
__device__ __forceinline__ float least(float a, float b)
{
#if __CUDA_ARCH__ >= 800
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a < b || a != a ? a : b;
#endif
}"""),
    "greatest": _Function("""\
// The greater of two; NaN if one is.
__device__ __forceinline__ float greatest(float a, float b)
{
#if __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a > b || a != a ? a : b;
#endif
}"""),
    "floor_int": _Function("""\
// floor(x) within +-2^30, so that what is added to it does not overflow; NaN becomes 0.
__device__ __forceinline__ int floor_int(float x) { return max(-(1 << 30), min(__float2int_rd(x), 1 << 30)); }"""),
    "floor_div": _Function("""\
// floor(a / n), n > 0.
__device__ __forceinline__ int floor_div(int a, int n)
{
    const int towards_0 = a / n;
    return towards_0 - (a < towards_0 * n);
}"""),
    "floor_mod": _Function("""\
// a - n floor(a / n), n > 0: 0 to n - 1.
__device__ __forceinline__ int floor_mod(int a, int n)
{
    const int rest = a % n;
    return rest < 0 ? rest + n : rest;
}"""),
    "offset": _Function("""\
using i64 = long long;

// A tensor of up to four dimensions. Strides count elements; dimensions that it has not got have stride 0 and size 1.
template <typename E>
struct Table {
    E* data;
    i64 stride[4];
    int size[4];
};

// Where an entry lies, in elements from the first. An index outside becomes the nearest inside: whatever a formula asks
// for, nothing outside the tensor is touched.
template <typename E, typename... Index>
__device__ __forceinline__ i64 offset(const Table<E>& table, Index... index)
{
    const int at[] = { index... };
    i64 sum = 0;
    #pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof...(index)); ++k)
        sum += static_cast<unsigned int>(max(0, min(at[k], table.size[k] - 1))) * table.stride[k];
    return sum;
}"""),
    "load float": _Function("""\
// Loads through the read-only path; not volatile, so that the compiler may take one out of a loop.
__device__ __forceinline__ float load(const float* address)
{
    float x;
    asm("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(address));
    return x;
}"""),
    "load bf16": _Function("""\
// The bits of a __nv_bfloat16.
struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float load(const bf16* address)
{
    unsigned short bits;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(bits) : "l"(address));
    return __uint_as_float(static_cast<unsigned int>(bits) << 16);
}"""),
    "load fp16": _Function("""\
// The bits of a __half.
struct fp16 {
    unsigned short bits;
};

__device__ __forceinline__ float load(const fp16* address)
{
    float x;
    asm("{ .reg .b16 bits; ld.global.nc.b16 bits, [%1]; cvt.f32.f16 %0, bits; }" : "=f"(x) : "l"(address));
    return x;
}"""),
    "read": _Function(
        """\
// The entry of a table that nobody writes while the kernel runs.
template <typename E, typename... Index>
__device__ __forceinline__ float read(const Table<E>& table, Index... index)
{
    return load(table.data + offset(table, index...));
}""",
        ("offset",),
    ),
    "place": _Function(
        """\
// The address of an entry: where its gradient is added up.
template <typename E, typename... Index>
__device__ __forceinline__ E* place(const Table<E>& table, Index... index)
{
    return table.data + offset(table, index...);
}""",
        ("offset",),
    ),
}


def device_functions(names: Iterable[str], elements: Sequence[str] = ("float",)) -> str:
    """The text of the functions named, and of what these need, in one namespace; empty for none.

    `names` is what `Code.functions` lists; `elements` are the types of the tables that are read.
    """
    wanted: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in wanted:
            wanted.add(name)
            pending += _FUNCTIONS[name].needs
            if name == "read":
                pending += [f"load {element}" for element in elements]
    if not wanted:
        return ""
    body = "\n\n".join(function.text for name, function in _FUNCTIONS.items() if name in wanted)
    return f"namespace score_mod {{\n\n{body}\n\n}}  // namespace score_mod"


def pack_table(address: int, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    """A Table<E> as a kernel argument: 56 bytes. Strides count elements; the length 0 has no entry to read.

    Raises ValueError for more than four dimensions or a length of 0.
    """
    if not 1 <= len(shape) == len(strides) <= MAX_RANK or min(shape) < 1:
        raise ValueError(f"a table of shape {tuple(shape)} and strides {tuple(strides)}; 1 to 4 lengths of 1 or more")
    missing = MAX_RANK - len(shape)
    return struct.pack("<Q4q4i", address, *strides, *[0] * missing, *shape, *[1] * missing)

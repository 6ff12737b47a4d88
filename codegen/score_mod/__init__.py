"""Turn one formula that replaces an attention score into its derivatives, CUDA statements, and NumPy or torch values.

>>> from flashsmith.score_mod import emit, parse
>>> softcap = parse("30 * tanh(score / 30)")
>>> softcap.slope.text
'1 - tanh(score / 30) * tanh(score / 30)'

**What may be written.** One Python expression. `score` is a score as the softmax would take it (scaled, base e). `b`,
`h`, `i`, `j` are the integers batch, query head, query row and key; `Nq` and `Nk` the lengths; `inf` and `pi` floats.
A tensor is any other name with 1 to 4 integer indexes: `bias[b, h, i, j]`. Operators: + - * / and ** with a literal,
whole or half exponent; // and % of integers by a positive literal, Nq or Nk, rounded down as in Python; comparisons,
and, or, not; `x if condition else y`. Functions: abs cos exp floor log max min sigmoid sign sin sqrt tanh. Integers
stay integers, but / and the functions give floats; floor makes an integer of a float. Everything else is refused by
`BadScoreMod`, which shows the place. Indexes are clamped into the tensor, never checked: index arithmetic is 32-bit.

**How a kernel uses it.**

1. `expression = parse(text)`, or `compose([text, ...])`. It is frozen and hashed by what it says: a key.
   `expression.text` is the one spelling, `expression.tensors` gives {name: number of indexes}.
2. Forward: `code = emit(expression, Names(score="s", i="i", ...))`. `Names` says which C++ expressions hold what: i
   and j as int and as float, because converting an int for each score costs a slow pipe. Put `code.uniform` where b,
   h, Nq and Nk are known, before the loop (once a row, if a block has rows of several heads); `code.lines` where a
   score is; then `code.value` is the new score. Open a scope for the lines of each score, since they define names
   (prefix `mod`).
3. Backward: `emit(expression, names, slope=True, gradients=True)`, or gradients=["slope", ...] for the tensors named,
   with `s` the score before the change. What the results share is computed once. With dS the gradient of the changed
   score: the gradient of the score is dS * `code.slope`, and each of `code.gradients` adds dS * `derivative` to its
   tensor at `score_mod::place(SUMS, index...)`, where SUMS is a `score_mod::Table<float>` that the caller clears.
   Leave the multiplication out if `expression.slope.is_one` or `expression.additive`. Where the weight is 0 skip the
   score: a derivative may be infinite there, and 0 * inf is NaN.
4. Once a file: `device_functions(code.functions, elements)` is the text of what the statements call, with elements
   out of `ELEMENTS` for the types of the tables. It includes nothing and needs nothing defined.
5. A kernel parameter `score_mod::Table<float> table_NAME` (or score_mod::bf16, score_mod::fp16) for each tensor,
   named by `table_name(tensor)`; `pack_table(address, shape, strides)` gives its 56 bytes.
6. Without a GPU: `evaluate(expression, score=..., b=..., ...)` on NumPy arrays or torch tensors, differentiable; also
   for `expression.slope` and `derivative`, which are Expressions.

**Accuracy.** float32 with a relative error of 1e-6 or so an operation. exp rounds its exponent: relative 6e-8 |x|
more. tanh: absolute 5e-7. sin and cos: absolute 1e-6 for |x| up to 1e4. Division by more than 2^126 gives 0; subnormal
numbers are 0 in functions and division. NaN passes through every function, min and max too. Sums of integers used as
numbers are exact below 2^24.
"""

from .device import ELEMENTS, device_functions, pack_table
from .emit import Code, GradientCode, Names, emit, table_name
from .evaluate import evaluate
from .expression import Expression, TensorGradient, compose, parse
from .known import ALIBI, BIAS, softcap
from .parse import BadScoreMod
from .tree import MAX_RANK

__all__ = [
    "ALIBI",
    "BIAS",
    "ELEMENTS",
    "MAX_RANK",
    "BadScoreMod",
    "Code",
    "Expression",
    "GradientCode",
    "Names",
    "TensorGradient",
    "compose",
    "device_functions",
    "emit",
    "evaluate",
    "pack_table",
    "parse",
    "softcap",
    "table_name",
]

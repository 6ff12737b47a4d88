"""Emitted CUDA, compiled by NVRTC and run on the emulator, against the float64 evaluation; and its text."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from flashsmith.emulator import GlobalMemory, launch
from flashsmith.emulator import parse as parse_ptx
from flashsmith.score_mod import (
    ALIBI,
    BIAS,
    Expression,
    Names,
    device_functions,
    emit,
    evaluate,
    pack_table,
    parse,
    softcap,
    table_name,
)

from ..emulator.conftest import compile_cuda, from_bf16, to_bf16
from .formulas import LENGTHS, SHAPES, TENSORS, random_formula, random_values

BLOCK = 128
ELEMENTS = {"float": "float", "bf16": "score_mod::bf16", "fp16": "score_mod::fp16"}


def kernel_text(expression: Expression, element: str = "float", *, derivatives: bool = True) -> str:
    """A kernel with a thread a score: value and slope in out, and each entry's gradient added to its table's sums."""
    code = emit(expression, Names(b="b", h="h", i="i", j="j"), slope=derivatives, gradients=derivatives)
    body = [*code.uniform, *code.lines, f"out[n] = {code.value};"]
    if derivatives:
        body.append(f"out[N + n] = {code.slope};")
        for gradient in code.gradients:
            index = "".join(f", {at}" for at in gradient.index)
            body.append(f"atomicAdd(score_mod::place(sums_{gradient.tensor}{index}), {gradient.derivative});")
    tables = "".join(
        f", const score_mod::Table<{ELEMENTS[element]}> {table_name(name)}, const score_mod::Table<float> sums_{name}"
        for name in expression.tensors
    )
    lines = "\n    ".join(body)
    return f"""{device_functions(code.functions, [element])}

extern "C" __global__ void apply(const float* scores, const int* bs, const int* hs, const int* is, const int* js,
                                 int Nq, int Nk, float* out, int N{tables})
{{
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float s = scores[n];
    const int b = bs[n], h = hs[n], i = is[n], j = js[n];
    const float i_float = static_cast<float>(i), j_float = static_cast<float>(j);
    {lines}
}}
"""


def run(expression: Expression, values: dict, element: str = "float", arch: str = "compute_80", derivatives=True):
    """(value, slope, {tensor: gradient}) of float32 scores; tables lie transposed in memory among NaN."""
    kernel = parse_ptx(compile_cuda(kernel_text(expression, element, derivatives=derivatives), arch)).kernels["apply"]
    memory, count = GlobalMemory(), len(values["score"])
    uploaded = [memory.upload(np.ascontiguousarray(values["score"], "f4"))]
    uploaded += [memory.upload(np.ascontiguousarray(np.broadcast_to(values[name], count), "i4")) for name in "bhij"]
    out = memory.empty(2 * count, "f4")
    tables, sums = [], {}
    for name in expression.tensors:
        table = values["tensors"][name]
        address, strides = upload_table(memory, encoded(table, element))
        sums[name] = memory.upload(np.zeros(table.shape, "f4"))
        contiguous = [s // 4 for s in np.zeros(table.shape, "f4").strides]
        tables += [pack_table(address, table.shape, strides), pack_table(sums[name], table.shape, contiguous)]
    args = [*uploaded, values["Nq"], values["Nk"], out, count, *tables]
    launch(kernel, -(-count // BLOCK), BLOCK, args, memory)
    value, slope = memory.read(out, (2, count), "f4")
    return value, slope, {name: memory.read(at, values["tensors"][name].shape, "f4") for name, at in sums.items()}


def encoded(table: np.ndarray, element: str) -> np.ndarray:
    """The table as the device has it."""
    return to_bf16(table) if element == "bf16" else table.astype("f2" if element == "fp16" else "f4")


def upload_table(memory: GlobalMemory, table: np.ndarray) -> tuple[int, list[int]]:
    """Upload a table, its dimensions in reverse order, poison around it and between its rows; address and strides."""
    poisoned = np.full([n + 3 for n in table.shape[::-1]], -1, f"i{table.itemsize}")  # NaN in every type
    inner = poisoned[tuple(slice(1, 1 + n) for n in table.shape[::-1])]
    inner[...] = table.T.view(f"i{table.itemsize}")
    first = inner.__array_interface__["data"][0] - poisoned.__array_interface__["data"][0]
    return memory.upload(poisoned) + first, [stride // table.itemsize for stride in inner.strides[::-1]]


def expected(expression: Expression, values: dict) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """The same in float64, by the evaluation on NumPy."""
    sums = {name: np.zeros(values["tensors"][name].shape) for name in expression.tensors}
    for gradient in expression.gradients:
        shape = sums[gradient.tensor].shape
        index = [np.clip(evaluate(at, **values), 0, n - 1) for at, n in zip(gradient.index, shape, strict=True)]
        np.add.at(sums[gradient.tensor], tuple(at.astype(int) for at in index), evaluate(gradient.derivative, **values))
    return evaluate(expression, **values), evaluate(expression.slope, **values), sums


def assert_close(actual: np.ndarray, wanted: np.ndarray, what: str, tolerance: float = 1e-5) -> None:
    """Relative to the value or to 1, whichever is more; infinities and NaN as wanted."""
    with np.errstate(invalid="ignore"):
        same = (actual == wanted) | (np.isnan(actual) & np.isnan(wanted))
        error = np.where(same, 0, np.abs(actual - wanted) / np.maximum(1, np.abs(wanted)))
    assert not np.isnan(error).any() and error.max() <= tolerance, (
        f"{what}: {np.nanmax(error):.1e} off, {actual.flat[error.argmax()]} for {wanted.flat[error.argmax()]}"
    )


def assert_runs(formula: str, values: dict, element: str = "float", tolerance: float = 1e-5) -> None:
    """Value, slope and gradients of a formula, on the emulator and in float64."""
    expression = parse(formula)
    values = {**values, "score": values["score"].astype("f4").astype("f8")}
    decode = from_bf16 if element == "bf16" else np.asarray
    stored = {name: decode(encoded(table, element)).astype("f8") for name, table in values["tensors"].items()}
    actual, wanted = run(expression, values, element), expected(expression, {**values, "tensors": stored})
    assert_close(actual[0], wanted[0], formula, tolerance)
    assert_close(actual[1], wanted[1], f"slope of {formula}", tolerance)
    for name in expression.tensors:
        assert_close(actual[2][name], wanted[2][name], f"gradient of {name} in {formula}", 10 * tolerance)


FORMULAS = {
    "alibi": ALIBI,
    "softcap": softcap(30),
    "bias": BIAS,
    "window": "score if 0 <= i + Nk - Nq - j < 3 else -inf",
    "decay": "score * exp(w[h, 0] * abs(i - j)) + slope[min(i - j, 63)]",
    "buckets": "score + w[h, min(5, 1 + floor(log((abs(i - j) + 1) / 2) * 2.7))]",
    "rotary": "score * cos((i - j) * slope[h]) + sin(score * 8)",
    "blocks": "score if i // 4 == j // 4 or (i - j) % 3 == 1 or (j - i) // 5 % Nk == 2 else score / Nq",
    "powers": "score ** 3 + (1 + score ** 2) ** -0.5 + abs(score) ** 1.5 - i ** 2 / (1 + j) ** 2",
    "gate": "score * sigmoid(bias[b, h, i, j]) + log(1 + exp(-abs(score)))",
    "clamp": "max(min(score, 1.5), -slope[h]) + sign(score) * sqrt(abs(score))",
    "numbers": "score * (i * j - 3 * max(i, j)) / (Nq * Nk) + min(h, 2) - (j if i > j else -b) + sign(i - j) * abs(j)",
    "nested": "score + slope[floor(w[i, j])] * slope[h // 2]",
    "constants": "score * pi / 2 - 3 * (2 - 5) / 4 + 2 ** -1 + (2e-38 * 1e-3 + score) * 1",
    "far": "score + 1000000 * h - (64 * Nk + 2147483647) + 2000000000 * b",
    "exponents": "exp(10 * score) + 1 / score",
}


@pytest.mark.parametrize("name", FORMULAS)
def test_emitted_code_computes_the_formula(name):
    assert_runs(FORMULAS[name], random_values(3, 300))


@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_tables_in_16_bits(element):
    """The value has no rounding but the table's."""
    assert_runs("score * slope[h] + bias[b, h, i, j] - w[i, j]", random_values(4, 300), element)


def test_random_formulas_run():
    for seed in range(16):
        assert_runs(random_formula(random.Random(seed), depth=4), random_values(seed, 128), tolerance=1e-4)


@pytest.mark.parametrize("index", ["h - 2", "1000000 * (i - 2)", "floor(score * inf)", "floor(score / 0) + 7"])
def test_indexes_are_clamped(index):
    """Whatever is asked for, nothing around the tables is read, nor between their rows, nor is a sum put there."""
    assert_runs(f"score + w[{index}, j - 3] * w[j + 4, {index}]", random_values(5))


def test_functions_keep_their_bounds():
    """Relative error over the range, in units of 2^-23; sin, cos and log near 1 absolute."""
    x = np.concatenate([np.geomspace(1e-30, 1e4, 4000), np.linspace(1e-3, 10, 4000)])
    values = random_values(0, 1) | dict.fromkeys("bhij", 0) | {"tensors": {}}
    values["score"] = np.concatenate([-x, x, [0]]).astype("f4").astype("f8")
    for formula, relative, absolute in (
        ("tanh(score)", 0, 4),
        ("sigmoid(max(score, -80))", 60, 0),
        ("exp(min(max(score, -80), 80))", 60, 0),
        ("sqrt(abs(score))", 3, 0),
        ("log(abs(score))", 2, 0),
        ("3 / score", 3, 0),
        ("sin(score)", 0, 8),
        ("cos(score)", 0, 8),
    ):
        actual, _, _ = run(parse(formula), values, derivatives=False)
        wanted = evaluate(parse(formula), **values)
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(actual[~finite], wanted[~finite], formula)
        x, actual, wanted = values["score"][finite], actual[finite], wanted[finite]
        error = np.abs(actual - wanted) / (relative * np.abs(wanted) + absolute + 1e-36) * 2**23
        assert error.max() <= 1, f"{formula}: {error.max():.2f} of its bound at {x[error.argmax()]}"


@pytest.mark.parametrize("arch", ["compute_75", "compute_80"])
def test_what_is_no_number_stays_none(arch):
    """NaN goes through everything, also where sm_75 has no min that propagates it; infinities have their limits."""
    values = {**random_values(0, 3), "score": np.array([np.nan, np.inf, -np.inf]), "tensors": {}}
    for formula in (
        "tanh(score)", "sigmoid(score)", "exp(score)", "sign(score)", "abs(score)", "sqrt(score)", "min(score, 2)",
        "min(2, score)", "max(score, 2)", "max(2, score)", "min(score, -score)", "score if score == score else 7",
        "score - score", "floor(score)", "score / 3", "2 / score", "score ** 2",
    ):  # fmt: skip
        actual, _, _ = run(parse(formula), values, arch=arch, derivatives=False)
        np.testing.assert_array_equal(actual, evaluate(parse(formula), **values), formula)


def test_numbers_made_of_lengths_do_not_overflow():
    """4000 Nq and Nq Nk pass 2^31 here."""
    values = {**random_values(0, 8), "Nq": 2**20, "Nk": 2**20, "tensors": {}}
    for formula in ("score + 4000 * Nq", "score + Nq * Nk", "score - 64 * Nk + 2147483647"):
        assert_close(run(parse(formula), values, derivatives=False)[0], evaluate(parse(formula), **values), formula)


def test_comparisons_of_integers_are_exact():
    """float32 holds integers up to 2^24: four terms of a length of 2^22 are compared as floats, nine as ints."""
    values = {**random_values(0, 64), "i": 2**22 - np.arange(64), "j": 2**22 - np.arange(64)[::-1] // 2, "tensors": {}}
    for condition in (
        "9 * i < 9 * j + 1",
        "i + i + j + 1 > j + i + j",
        "i % 7 == j % 7",
        "i + 16777216 < j + 16777217",
    ):
        formula = f"score if {condition} else 0"
        actual, _, _ = run(parse(formula), values, derivatives=False)
        assert_close(actual, evaluate(parse(formula), **values), formula)


@pytest.mark.parametrize("arch", ["compute_75", "compute_90", "compute_120"])
def test_every_helper_compiles_everywhere(arch):
    formula = " + ".join(f"({formula})" for formula in FORMULAS.values() if "inf" not in formula)
    for element in ELEMENTS:
        assert "apply" in compile_cuda(kernel_text(parse(formula), element), arch)


@pytest.mark.parametrize("name", ["alibi", "softcap", "bias", "window", "decay", "rotary", "powers", "clamp"])
def test_no_score_takes_a_branch_or_local_memory(name):
    """The only branch is that of the kernel around, where the threads end."""
    ptx = compile_cuda(kernel_text(parse(FORMULAS[name])))
    assert ptx.count("bra") == 1 and ".local" not in ptx


# ---- text --------------------------------------------------------------------------------------------------------


def shown(formula: str, **asked) -> list[str]:
    """The statements, and the results as statements."""
    code = emit(parse(formula), **asked)
    lines = [*code.uniform, "--", *code.lines, f"value {code.value}"]
    return lines + [f"slope {code.slope}"] * bool(code.slope)


def test_what_is_uniform_leaves_the_loop_and_what_is_shared_has_a_name():
    assert shown(ALIBI) == [
        "const float mod0 = score_mod::read(table_slope, h);",
        "const float mod1 = static_cast<float>(Nk - Nq);",
        "--",
        "value s - mod0 * fabsf(i_float + mod1 - j_float)",
    ]
    assert shown("score + (i - j) ** 2 * slope[h]") == [
        "const float mod0 = score_mod::read(table_slope, h);",
        "--",
        "const float mod1 = i_float - j_float;",
        "value s + mod1 * mod1 * mod0",
    ]
    assert shown(softcap(30), slope=True) == [
        "--",
        "const float mod0 = score_mod::tanh(s * 0.033333335f);",
        "value 30.f * mod0",
        "slope 1.f - mod0 * mod0",
    ]


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("score + (i - j)", "s + (i_float - j_float)"),
        ("score + (j - i + 1 - 3)", "s + (-i_float - 2.f + j_float)"),
        ("score * (7 - j)", "s * (7.f - j_float)"),
        ("score if i - j < 128 else -inf", "i_float - j_float < 128.f ? s : -score_mod::infinity()"),
        ("score if i // 64 < 128 else 0", "(i >> 6) < 128 ? s : 0.f"),
        ("score if (i - j) % 8 == 0 else 0", "((i - j) & 7) == 0 ? s : 0.f"),
        ("score if i // 3 < 4 and not j == 2 else 0", "score_mod::floor_div(i, 3) < 4 && !(j_float == 2.f) ? s : 0.f"),
        ("score - (score - 1)", "s - (s - 1.f)"),
        ("score / 4 + 0", "s * 0.25f"),
        ("score + -2", "s - 2.f"),
        ("-score ** 2", "-(s * s)"),
        ("min(i, 3) + score", "score_mod::least(i_float, 3.f) + s"),
        ("score ** -0.5", "score_mod::rcp(score_mod::sqrt(s))"),
        ("1 / score + score / Nk", "score_mod::rcp(s) + s * mod0"),
        ("score ** 0", "1.f"),
        ("1 if i < j and (j < 3 or i < 2) else 0", "i_float < j_float && (j_float < 3.f || i_float < 2.f) ? 1.f : 0.f"),
    ],
)
def test_numbers_are_floats_and_no_parenthesis_is_idle(formula, value):
    assert shown(formula)[-1] == f"value {value}"


def test_gradients_of_the_tensors_named():
    formula = parse("score * w[h, i] + slope[h]")
    asked = {False: [], True: ["w", "slope"], ("slope",): ["slope"], (): []}
    for gradients, tensors in asked.items():
        assert [gradient.tensor for gradient in emit(formula, gradients=gradients).gradients] == tensors


def test_derivatives_alone_compute_no_value():
    code = emit(parse("exp(score) + 3 * score"), value=False, slope=True)
    assert (code.value, code.slope) == ("", "3.f + score_mod::exp(s)")


def test_nothing_is_emitted_for_nothing():
    code = emit(parse("score"))
    assert (code.uniform, code.lines, code.value, code.functions) == ((), (), "s", ())
    assert device_functions(code.functions) == ""


def test_only_what_is_called_is_defined():
    text = device_functions(emit(parse("tanh(score)")).functions)
    assert "float tanh(" in text and "float rcp(" in text and "float exp(" not in text and "Table" not in text
    text = device_functions(emit(parse(BIAS)).functions, ["bf16"])
    assert "struct bf16" in text and "struct fp16" not in text and "place(" not in text


def test_tables_of_wrong_shapes_are_refused():
    for shape in ((), (0,), (1, 2, 3, 4, 5)):
        with pytest.raises(ValueError, match="1 to 4 lengths"):
            pack_table(0, shape, shape)


def test_the_text_is_the_same_under_every_hash_seed():
    program = (
        "import random, sys; sys.path.insert(0, '.')\n"
        "from flashsmith.score_mod import emit, parse\n"
        "from tests.score_mod.formulas import random_formula\n"
        "for seed in range(6):\n"
        "    expression = parse(random_formula(random.Random(seed), 4))\n"
        "    print(expression.text, emit(expression, slope=True, gradients=True))\n"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(texts) == 1 and len(next(iter(texts))) > 3000


def test_shapes_cover_the_tensors():
    """The formulas' tensors have the ranks that their shapes say."""
    assert {name: len(shape) for name, shape in SHAPES.items()} == TENSORS and min(LENGTHS.values()) > 4

"""What may be written, how it is spelt, and what is refused where."""

from __future__ import annotations

import pickle
import random

import pytest
from flashsmith.errors import FlashsmithError
from flashsmith.score_mod import ALIBI, BIAS, BadScoreMod, compose, parse, softcap

from .formulas import random_formula

SPELLINGS = {
    # written: spelt
    "score+slope[h]*(j-i)": "score + slope[h] * (j - i)",
    " 30*tanh( score/30 ) ": "30 * tanh(score / 30)",
    "((score))": "score",
    "(score + 1) - (i - j)": "score + 1 - (i - j)",
    "-(-score)": "--score",
    "-(2)": "-2",
    "+score": "score",
    "(-score) ** 2": "(-score) ** 2",
    "-score ** 2": "-score ** 2",
    "(-2) ** 2 + score": "(-2) ** 2 + score",
    "score ** -.5": "score ** -0.5",
    "score if 0<=i-j<128 else-inf": "score if 0 <= i - j and i - j < 128 else -inf",
    "(score if i<j else 1) if j<4 else (2 if h<1 else 3)": "(score if i < j else 1) if j < 4 else 2 if h < 1 else 3",
    "score if not(i<j and(h<1 or b<1)) else 0": "score if not (i < j and (h < 1 or b < 1)) else 0",
    "min(score, 1, 2.5e-3)": "min(min(score, 1), 0.0025)",
    "t[(i,j)] * pi": "t[i, j] * pi",
    "score * -0.0": "score * 0.0",
    "i // 64 % 3 * score": "i // 64 % 3 * score",
    "score / (2 / h)": "score / (2 / h)",
}


@pytest.mark.parametrize("written", SPELLINGS)
def test_one_spelling_that_means_the_same(written):
    """The canonical text parses to the very expression, and is the same text again."""
    expression = parse(written)
    assert expression.text == SPELLINGS[written]
    again = parse(expression.text)
    assert again == expression and hash(again) == hash(expression) and again.text == expression.text


def test_an_integer_and_a_float_are_two_numbers():
    assert parse("score + 1") != parse("score + 1.0")
    assert parse("score + 1").text != parse("score + 1.0").text


def test_random_formulas_survive_spelling():
    for seed in range(300):
        text = random_formula(random.Random(seed))
        expression = parse(text)
        assert parse(expression.text) == expression, text


REFUSED = {
    # formula: (column of the caret, words of the message)
    "score + foo * 2": (8, "unknown name foo", "tensors as foo[index]"),
    "score + bias": (8, "unknown name bias"),
    "bias[i] + bias": (10, "tensor bias needs 1 indexes"),
    "bias[i] + bias[i, j]": (10, "2 indexes here and 1 before"),
    "bias[b, h, i, j, 0]": (0, "5 indexes", "1 to 4"),
    "score + erf(score)": (8, "unknown function erf", "tanh"),
    "tanh(score, 1)": (0, "tanh takes 1 argument, 2 given"),
    "score + min(score)": (8, "2 arguments or more, 1 given"),
    "tanh()": (0, "0 given"),
    "tanh(x=score)": (7, "no named arguments"),
    "min(*score)": (4, "one by one"),
    "score + tanh": (8, "tanh is a function: tanh(x)"),
    "score + bias[score]": (13, "an index of bias needs an integer", "floor(x)"),
    "score + bias[i / 2]": (13, "needs an integer"),
    "score + bias[i < j]": (13, "a comparison is no number"),
    "score + (i < j)": (9, "a comparison is no number"),
    "score if i else 0": (9, "a condition is needed"),
    "score and 1": (0, "a condition is needed"),
    "score // 2": (0, "// needs an integer"),
    "i % 2.0": (4, "% needs an integer"),
    "i // 0": (5, "positive literal, Nq or Nk"),
    "i // j": (5, "positive literal, Nq or Nk"),
    "score ** score": (9, "an exponent is a literal"),
    "score ** 0.3": (9, "whole or half", "exp(y * log(x))"),
    "score ** 33": (9, "from -32 to 32"),
    "score + 2147483648": (8, "at most 2147483647"),
    "score + 1e39": (8, "what float32 holds"),
    "score + 1e-39": (8, "what float32 holds"),
    "score + 1e999": (8, "what float32 holds"),
    "score + 'a'": (8, "'a' is no number"),
    "score + True": (8, "True is no number"),
    "score + 1j": (8, "1j is no number"),
    "score.real": (0, "an attribute is not allowed"),
    "score + bias.sum()": (8, "an attribute cannot be called"),
    "score + (lambda: 1)": (9, "a lambda is not allowed"),
    "(lambda: 1)() + score": (1, "a lambda cannot be called"),
    "score + [1]": (8, "a list is not allowed"),
    "score + (1, 2)": (8, "a tuple is not allowed"),
    "score + f'{score}'": (8, "a string is not allowed"),
    "score + t[1:2]": (10, "a slice is not allowed"),
    "score + t[i][j]": (8, "has no indexes"),
    "score[i]": (0, "score is no tensor"),
    "pi[i]": (0, "pi is no tensor"),
    "score + t[()]": (8, "0 indexes"),
    "score @ score": (0, "@ is not allowed"),
    "score << 2": (0, "<< is not allowed"),
    "score + ~i": (8, "~ is not allowed"),
    "score if i is j else 0": (9, "is is not allowed"),
    "score if i in j else 0": (9, "in is not allowed"),
    "(x := score)": (1, "an assignment is not allowed"),
    "score +": (7, "no expression"),
    "": (0, "no expression"),
    "score; score": (5, "no expression"),
    "score + schön": (11, "printable ASCII"),
    "score +\n1": (7, "printable ASCII"),
    "score + \x00": (8, "printable ASCII"),
    "  score + foo": (10, "unknown name foo"),
    "__import__('os').system('true')": (0, "an attribute cannot be called"),
}


@pytest.mark.parametrize("formula", REFUSED)
def test_refused_with_a_caret_under_the_place(formula):
    column, *words = REFUSED[formula]
    with pytest.raises(BadScoreMod) as caught:
        parse(formula)
    message, shown, caret = str(caught.value).splitlines()
    assert isinstance(caught.value, FlashsmithError)
    assert all(word in message for word in words), message
    assert caret.index("^") - 4 == column == caught.value.column
    assert len(shown) - 4 == len(formula.rstrip(" ")) and caret.rstrip() == caret


def test_a_long_formula_is_shown_around_its_caret():
    formula = "score" + " + 1" * 30 + " + foo" + " + 1" * 5
    with pytest.raises(BadScoreMod) as caught:
        parse(formula)
    _, shown, caret = str(caught.value).splitlines()
    assert shown[caret.index("^") :].startswith("foo") and shown.startswith("    ...") and caught.value.column == 128


def test_the_error_travels_between_processes():
    with pytest.raises(BadScoreMod) as caught:
        parse("score + foo")
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.column, copied.text) == (str(caught.value), 8, "score + foo")


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("score + " + "1 + " * 500 + "1", "2009 characters"),
        ("(" * 60 + "score" + ")" * 60 + " + 1" * 60, "deeper than 50"),
        ("-" * 60 + "score", "deeper than 50"),
        ("(" * 900 + "score" + ")" * 900, r"too many nested parentheses|deeper"),
        ("-" * 1900 + "score", "deeper than 50"),
        ("min(" + "score, " * 250 + "1)", "deeper than 50"),
        ("score if " + "i < " * 400 + "1 else 0", "deeper than 50"),
        ("score if " + "i<1 or " * 200 + "i<1 else 0", "deeper than 50"),
        ("1" * 1999, "at most 2147483647"),
        (
            "score if " + "table[i + i + i + i + i + i + i + i + i + i + i + i + i + i] < " * 29 + "1 else 0",
            "written out",
        ),
    ],
    ids=["long", "wide", "negations", "parentheses", "negations-long", "min", "chain", "or", "digits", "unfolded"],
)
def test_size_is_bounded(formula, words):
    with pytest.raises(BadScoreMod, match=words):
        parse(formula)


def test_whatever_comes_only_the_one_error_comes_back():
    """Random bytes, and random pieces of formulas, which reach deeper."""
    rng = random.Random(0)
    words = "score b h i j Nq Nk inf pi t [ ] ( ) , + - * / ** // % < <= == and or not if else min floor 1 2.5 . : ="
    pieces = words.split()
    parsed = 0
    for turn in range(6000):
        if turn % 2:
            text = bytes(rng.randrange(256) for _ in range(rng.randrange(40))).decode("latin-1")
        else:
            text = " ".join(rng.choice(pieces) for _ in range(rng.randrange(1, 9)))
        try:
            expression = parse(text)
        except BadScoreMod as error:
            assert 0 <= error.column <= len(text)
            continue
        assert parse(expression.text) == expression
        parsed += 1
    assert parsed > 50


def test_a_formula_is_a_string():
    with pytest.raises(BadScoreMod, match="a string, not int"):
        parse(3)


def test_known_formulas():
    assert parse(ALIBI).tensors == {"slope": 1} and parse(ALIBI).additive
    assert parse(BIAS).tensors == {"bias": 4} and parse(BIAS).addend.text == "bias[b, h, i, j]"
    assert softcap(30) == "30.0 * tanh(score / 30.0)" and parse(softcap(0.1)).text == softcap(0.1)
    for cap in (0, -1, float("inf"), float("nan"), 1e300):
        with pytest.raises(BadScoreMod, match="a cap is positive"):
            softcap(cap)


def test_composition_feeds_a_value_to_the_next():
    whole = compose([BIAS, softcap(5), "score if i >= j else -inf"])
    assert whole.text == "5.0 * tanh((score + bias[b, h, i, j]) / 5.0) if i >= j else -inf"
    assert compose([]).text == "score" and compose(["score - 1"]).text == "score - 1"


def test_composition_refuses_a_name_for_two_tensors():
    with pytest.raises(BadScoreMod, match="tensor bias is read by an earlier") as caught:
        compose([BIAS, "score * 2 + bias[h]"])
    assert caught.value.column == 12


def test_composition_is_bounded_too():
    with pytest.raises(BadScoreMod, match=r"deeper than 50|characters"):
        compose(["score * score + 1"] * 40)


def test_what_an_expression_depends_on():
    expression = parse("score + w[h, i - j] * Nk")
    assert expression.names == {"score", "h", "i", "j", "Nk"} and expression.tensors == {"w": 2}
    assert expression.depends_on("b", "w") and not expression.depends_on("b", "Nq")


@pytest.mark.parametrize(
    ("formula", "addend"),
    [
        ("score", "0"),
        ("score - slope[h] * j", "-(slope[h] * j)"),
        ("1 + score - w[i]", "1 - w[i]"),
        ("bias[h] + (score - 2)", "bias[h] + -2"),
        ("score + 1 if i < j else score", "1 if i < j else 0"),
        ("score if i < j else -inf", "0 if i < j else -inf"),
        ("score if i < j else 0", None),
        ("score if score < 3 else -inf", None),
        ("2 * score", None),
        ("score + score", None),
        ("1 - score", None),
        ("score + floor(score)", None),
        ("score + t[floor(score)]", None),
    ],
)
def test_additive_is_score_and_something_without_score(formula, addend):
    found = parse(formula).addend
    assert parse(formula).additive == (addend is not None)
    assert (found and found.text) == addend

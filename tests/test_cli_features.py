"""What a command line says of features: the same words at every command, and one clear line for what is no feature."""

from __future__ import annotations

import json
import shlex

import pytest
from flashsmith.cli import main
from flashsmith.cli.console import print_lines
from flashsmith.cli.features import Anchor, FeatureOptions, Lengths
from flashsmith.cli.request import problem_of
from flashsmith.spec.features import ScoreMod, Table
from flashsmith.spec.problem import Problem

from .features import FEATURES


def test_options_are_fields_of_a_problem() -> None:
    options = FeatureOptions(
        dv=64, scale=0.3, window="128,0", anchor=Anchor.top_left, lengths=Lengths.packed, sinks=True, dropout=0.1,
        score_mod="score+bias[b,h,i,j]-slope[h]*(i-j)", tables="slope:bf16:grad, bias:fp16",
    )  # fmt: skip
    tables = (Table(name="bias", rank=4, dtype="fp16"), Table(name="slope", dtype="bf16", grad=True))
    mod = ScoreMod(text="score + bias[b, h, i, j] - slope[h] * (i - j)", tables=tables)
    assert options.of_problem() == {
        "dv": 64, "scale": 0.3, "window": (128, 0), "anchor": "top-left", "lengths": "packed", "score_mod": mod,
        "sinks": True, "dropout": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "window"), [("", (None, None)), ("5,", (5, None)), (", 7", (None, 7)), ("0,0", (0, 0))]
)
def test_either_side_of_a_window_may_be_left_out(text: str, window: tuple[int | None, int | None]) -> None:
    assert FeatureOptions(window=text).of_problem()["window"] == window


@pytest.mark.parametrize("command", [("render", "forward"), ("render", "dq"), ("render", "dkdv")])
def test_commands_take_them(capsys: pytest.CaptureFixture[str], command: tuple[str, str]) -> None:
    asked = ("--gpu", "a100", "--d", "64", "--window", "128,0", "--dropout", "0.1", "--json")
    assert main([*command, *asked]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert key.startswith(f"{command[1]}_bf16_d64_causal_left_dropout_sm80")


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("--window", "128"), "--window 128: two numbers"),
        (("--window", "-1,0"), "--window -1,0: two numbers"),
        (("--dropout", "1.5"), "dropout=1.5"),
        (("--dv", "20"), "dv=20 is not served"),
        (("--anchor", "middle"), "middle"),
        (("--score-mod", "score + slope"), "\n    score + slope\n            ^"),
        (("--score-mod", "score", "--tables", "slope:grad"), "--score-mod reads no slope"),
        (("--score-mod", "score + s[h]", "--tables", "s:fp64"), "--tables s:fp64: NAME, then :fp32|fp16|bf16"),
    ],
)
def test_bad_input_is_said_and_exits_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], needle: str
) -> None:
    assert main(["render", "forward", "--gpu", "a100", *arguments]) == 2
    out, err = capsys.readouterr()
    assert needle in err and not out


@pytest.mark.parametrize("feature", FEATURES)
def test_a_problem_spells_the_options_that_ask_for_it(feature: str) -> None:
    problem = Problem(**{"dtype": "bf16", "d": 64, "Nq": 40, **FEATURES[feature]})
    words = shlex.split(problem.options)
    asked = [word for word in words if word in ("--causal", "--sinks")]
    given = {word[2:].replace("-", "_"): words[at + 1] for at, word in enumerate(words)
             if word.startswith("--") and word not in asked}  # fmt: skip
    features = FeatureOptions(
        dv=int(given["dv"]) if "dv" in given else None, window=given.get("window", ""), sinks="--sinks" in asked,
        anchor=Anchor(given.get("anchor", "bottom-right")), lengths=Lengths(given.get("lengths", "uniform")),
        score_mod=given.get("score_mod", ""), tables=given.get("tables", ""), dropout=float(given.get("dropout", 0)),
    )  # fmt: skip
    again = problem_of(given["dtype"], int(given["d"]), "--causal" in asked, features, nq=40, nk=problem.Nk)
    assert again == problem


def test_formulas_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """slope[h] is no markup."""
    print_lines("score - slope[h] * j", "[bold]")
    assert capsys.readouterr().out == "score - slope[h] * j\n[bold]\n"

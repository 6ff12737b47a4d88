"""The README's table of what is served, and what features cost, are what the library says today."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from flashsmith import paths
from flashsmith.spec.gpu import find_gpu
from flashsmith.spec.problem import Problem

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import document
import feature_costs
import support_matrix


def test_the_readme_has_todays_table() -> None:
    assert document.read(support_matrix.DOCUMENT, support_matrix.COMMAND) == support_matrix.text()


def test_a_refusal_is_a_cell() -> None:
    cells = {row[0]: row[1:] for row in support_matrix.rows()}
    assert cells["dropout"][:1] == ("yes",) and cells["dropout"][-1].startswith("no")
    assert "atomics" in cells["additive bias of any broadcast, its gradient"][3]
    assert "t4: d <= 192" in cells["fp16, plain and causal"][1]  # 64 KB hold no tile of wider heads


@pytest.mark.parametrize("feature", ["none", "softcap", "causal window of 1024 keys"])
def test_costs_in_the_document_are_todays(feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the forward, with the records that are shipped."""
    monkeypatch.delenv("FLASHSMITH_SHIPPED_DIR")
    assert any(paths.shipped_tuned_dir().glob("*.json"))
    fields = {"Nq": feature_costs.LENGTH, "Nk": feature_costs.LENGTH, "B": 2, **feature_costs.FEATURES[feature]}
    problem = Problem(dtype="bf16", d=128, **fields)
    others, tflops = feature_costs.cell("forward", problem, find_gpu("a100"), tmp_path)
    table = document.read(feature_costs.DOCUMENT, feature_costs.COMMAND)
    assert f"| {feature} | {others} | {tflops} |" in table

"""scripts/real_model.py: every arm trains the same model, and has its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import real_model
from tests.support.harness import run
from tiny_model import main as make_tiny_model

TINY = ["--documents", "60", "--layers", "6", "--hidden-size", "32", "--vocab-size", "600", "--positions", "64"]


@pytest.mark.ranks
@pytest.mark.nightly
def test_arms_train_the_same_model(tmp_path: Path) -> None:
    folder, text, file = (str(tmp_path / name) for name in ("model", "text.jsonl", "figures.json"))
    make_tiny_model([folder, text, *TINY])
    sizes = ["--tokens", "16", "--micro-batches", "4", "--batches", "2", "--slices", "4"]
    run(2, real_model.main, [folder, "--data", text, *sizes, "--json", file])
    found = json.loads(Path(file).read_text())
    rows = {row["arm"]: row for row in found["rows"]}
    assert {"parameters", "whole", "balanced", "pieces", "zero_bubble", "v", "auto"} <= rows.keys()
    assert rows["parameters"]["over_default"] == 1
    for name, row in rows.items():
        assert len(row["losses"]) == 6 and row["partition"][-1] == (21 if name in real_model.PIECES else 9)
        assert row["largest_difference_of_losses"] < (1e-5 if name in real_model.PIECES else 1e-12), name
    assert found["machine"]["transformers"] and found["settings"]["tokens"] == 16
    given = ["--arm", "uniform", "--balanced", "0", "5", "9"]
    run(2, real_model.main, [folder, "--data", text, *sizes, *given, "--json", file])
    rows = {row["arm"]: row for row in json.loads(Path(file).read_text())["rows"]}
    assert "whole" not in rows and rows["balanced"]["partition"] == [0, 5, 9]

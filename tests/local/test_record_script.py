"""scripts/record.py: the six configurations that it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_dynmo.cli.simulation.loads import CASES
from ds_dynmo.models import model_layers
from record import OWN_CHANGES, can_change, merged, prepared


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_trained_with_16_blocks(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = prepared(case, 30, tmp_path)
    assert (run.name, run.model.layers, run.steps) == (case, 16, 30) and run.record == tmp_path / f"{case}.jsonl"
    assert len(model_layers(run.model)) >= 19 and getattr(run.model, case) is not None


def test_models_that_cannot_have_16_blocks_are_not_offered() -> None:
    assert not can_change("huggingface") and can_change("gpt") and all(map(can_change, CASES))


def test_changes_are_of_known_cases_and_keep_other_keys() -> None:
    assert OWN_CHANGES.keys() <= CASES.keys()
    assert merged({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 4, "b": {"d": 5}}) == {"a": 4, "b": {"c": 2, "d": 5}}

"""scripts/record.py: the configurations that it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_dynmo.models import model_layers
from record import FILES, OWN_CHANGES, prepared
from simulation import LOAD_MODELS


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == "freezing" else pytest.mark.nightly) for case in (*LOAD_MODELS, *FILES)],
)
def test_every_case_is_trained_with_16_blocks(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = prepared(case, 30, tmp_path)
    assert (run.name, run.model.layers, run.steps) == (case, 16, 30) and run.record == tmp_path / f"{case}.jsonl"
    assert len(model_layers(run.model)) >= 19 and [own.kind for own in run.model.case] == [FILES.get(case, case)]


def test_changes_are_of_known_cases() -> None:
    assert OWN_CHANGES.keys() <= LOAD_MODELS.keys() | FILES.keys()

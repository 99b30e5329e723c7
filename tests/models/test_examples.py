"""examples/own_model.py runs as it is, only shorter; what it promises holds."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import own_model
from tests.support.harness import run

pytestmark = pytest.mark.ranks

STEPS = ["--freeze-at", "1", "--steps"]


def trained(*calls: list[str]) -> list[list[float]]:
    """Run own_model.py several times in one world, with batches of two micro-batches."""
    warnings.filterwarnings("error", message="c10d::broadcast_")
    own_model.CONFIG["gradient_accumulation_steps"] = 2
    return [own_model.train(own_model.parse(call)) for call in calls]


def resumed_on_one(folder: str, nowhere: str) -> list[list[float]]:
    with pytest.raises(SystemExit, match=r"nowhere: no checkpoint there"):
        trained([*STEPS, "4", "--resume", nowhere])
    return trained([*STEPS, "4", "--resume", folder])


def test_a_model_of_ones_own_resumes_on_fewer_stages_as_if_it_had_been_repacked(tmp_path: Path) -> None:
    saves = [*STEPS, "2", "--save", str(tmp_path)]
    repacks = [*STEPS, "4", "--repack-at", "2"]
    (saved, repacked), (_, left) = run(2, trained, saves, repacks)
    ((resumed,),) = run(1, resumed_on_one, str(tmp_path), str(tmp_path / "nowhere"))
    assert len(saved) == len(resumed) == 2
    assert repacked == saved + resumed and left == saved  # one rank left after two steps
    assert repacked[-1] < repacked[0]

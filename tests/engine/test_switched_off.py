"""``"enabled": false``: training begins where ``initial_partition`` says, and no layer moves after that."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_dynmo
from tests.support.harness import run, run_each
from tests.support.told_clock import unsteady_engine
from tests.support.training import reports_of, state

pytestmark = pytest.mark.ranks

BY_PROFILE: dict[str, Any] = {"enabled": False, "initial_partition": "profile", "interval": 1}
PLACED = (4, "initial", (0, 4, 8), (0, 7, 8))
SECONDS = [(0.001, 0.002)] * 7 + [(0.02, 0.04)]  # of layers; the best two stages are [0, 7, 8]


def build(block: dict[str, Any], stages: int) -> tuple[Any, Any]:
    return unsteady_engine(block, SECONDS, [1.0] * stages, 0.0)


def decisions(engine: Any) -> list[tuple[Any, ...]]:
    """Return the decisions, except for moves to the partition of a checkpoint."""
    reports = [report for report in reports_of(engine) if report.reason != "checkpoint"]
    return [(r.step, r.reason, r.old_partition, r.new_partition) for r in reports]


def train(block: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train, call ``model_changed`` in the middle, and ask for a move at the end."""
    engine, data = build(block, 2)
    for step in range(steps):
        if step == steps // 2:
            engine.model_changed("it says so")
        engine.train_batch(data)
    with pytest.raises(ds_dynmo.ConfigError) as refused:
        engine.rebalance()
    return {"moves": decisions(engine), "repacks": len(engine.repacks), "refused": str(refused.value)}


def test_no_layer_moves_but_to_the_partition_of_one_profile(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    repack = {"enabled": True, "max_slowdown": 0.99}
    by_profile = {**BY_PROFILE, "repack": repack, "report": str(report)}
    refused = "dynmo.enabled = false: engine.rebalance would move layers; set it to true"
    nothing, once = run_each(2, train, ({"enabled": False}, 0), (by_profile, 6))
    assert nothing == [{"moves": [], "repacks": 0, "refused": refused}] * 2
    assert once == [{"moves": [PLACED], "repacks": 0, "refused": refused}] * 2
    records = map(json.loads, report.read_text().splitlines())
    kinds = [(record["kind"], record["step"]) for record in records]
    assert kinds == [("measured", 2), ("profile", 2), ("schedule", 4), ("rebalance", 4)]


def continue_training(engine: Any) -> dict[str, Any]:
    data = itertools.repeat((torch.ones(2, 4), torch.zeros(2, 4)))
    losses = [engine.train_batch(data).item() for _ in range(5)]
    return {"decisions": decisions(engine), "partition": engine.partition, "losses": losses, "state": state(engine)}


def save(block: dict[str, Any], folder: str, saved: Sequence[int]) -> dict[str, Any]:
    """Train, save after these steps, and train on."""
    engine, data = build(block, 2)
    for step in range(1, max(saved) + 1):
        engine.train_batch(data)
        if step in saved:
            engine.save_checkpoint(folder, str(step))
    return continue_training(engine)


def load(block: dict[str, Any], folder: str, stages: int, step: int, weights_only: bool = False) -> dict[str, Any]:
    """Load what :func:`save` wrote after a step, and train on."""
    engine, _ = build(block, stages)
    engine.load_checkpoint(folder, str(step), load_module_only=weights_only)
    return continue_training(engine)


def test_a_resumed_run_keeps_the_partition_of_its_profile_or_profiles_once(tmp_path: Path) -> None:
    """It profiles where there was no decision yet, or none that it could save, or one of another run."""
    folder, elsewhere = str(tmp_path / "placed"), str(tmp_path / "elsewhere")
    placed, moved = run_each(2, save, (BY_PROFILE, folder, (1, 3, 4)), ({"interval": 3}, elsewhere, (5,)))
    assert [result["decisions"] for result in placed] == [[PLACED]] * 2 and moved[0]["partition"] == [0, 7, 8]
    calls = (folder, 2, 4), (folder, 2, 4, True), (folder, 2, 1), (elsewhere, 2, 5)
    resumed, weights_only, early, of_another = run_each(2, load, *((BY_PROFILE, *call) for call in calls))
    assert resumed == [{**result, "decisions": []} for result in placed]
    for results in (weights_only, early):  # weights alone count as a new run
        assert [result["decisions"] for result in results] == [[PLACED]] * 2
    assert [result["decisions"] for result in of_another] == [[(9, *PLACED[1:])]] * 2
    on_three = run(3, load, BY_PROFILE, folder, 3, 3)  # the decision was made, and nothing had moved yet
    assert all([(step, why) for step, why, *_ in result["decisions"]] == [(7, "initial")] for result in on_three)

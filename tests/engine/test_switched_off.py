"""``"enabled": false``: training begins where ``initial_partition`` says, and no layer moves after that."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_dynmo
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.told_clock import unsteady_engine
from tests.support.training import partition_of, reports_of, state

pytestmark = pytest.mark.ranks

BY_PROFILE: dict[str, Any] = {"enabled": False, "initial_partition": "profile", "interval": 1}
PLACED = (4, "initial", (0, 4, 8), (0, 7, 8))
SECONDS = [(0.001, 0.002)] * 7 + [(0.02, 0.04)]  # of layers; the best two stages are [0, 7, 8]


def test_it_begins_at_the_initial_partition() -> None:
    case = Case(start=(0, 7, 8), dynmo={"enabled": False, "interval": 1})
    assert [partition for _, partition in run(2, partition_of, case)] == [[0, 7, 8]] * 2


def build(block: dict[str, Any], stages: int) -> tuple[Any, Any]:
    return unsteady_engine(block, SECONDS, [1.0] * stages, 0.0)


def decisions(engine: Any) -> list[tuple[Any, ...]]:
    """Return the decisions, except for moves to the partition of a checkpoint."""
    reports = [report for report in reports_of(engine) if report.reason != "checkpoint"]
    return [(r.step, r.reason, r.old_partition, r.new_partition) for r in reports]


def train(block: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train, and call ``model_changed`` in the middle."""
    engine, data = build(block, 2)
    for step in range(steps):
        if step == steps // 2:
            engine.model_changed("it says so")
        engine.train_batch(data)
    return {"moves": decisions(engine), "repacks": len(engine.repacks)}


def test_by_profile_it_profiles_once_and_moves_once(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    repack = {"enabled": True, "max_slowdown": 0.99}
    results = run(2, train, {**BY_PROFILE, "repack": repack, "report": str(report)}, 8)
    assert results == [{"moves": [PLACED], "repacks": 0}] * 2
    records = map(json.loads, report.read_text().splitlines())
    kinds = [(record["kind"], record["step"]) for record in records]
    assert kinds == [("measured", 2), ("profile", 2), ("schedule", 4), ("rebalance", 4)]


def refusal(block: dict[str, Any]) -> str:
    """Return the error of a call that would move layers."""
    engine, _ = build(block, 2)
    with pytest.raises(ds_dynmo.ConfigError) as refused:
        engine.rebalance()
    return str(refused.value)


def test_calls_that_would_move_layers_are_refused() -> None:
    expected = "dynmo.enabled = false: engine.rebalance would move layers; set it to true"
    assert run_each(2, refusal, ({"enabled": False},), (BY_PROFILE,)) == [[expected] * 2] * 2


def continue_training(engine: Any) -> dict[str, Any]:
    data = itertools.repeat((torch.ones(2, 4), torch.zeros(2, 4)))
    losses = [engine.train_batch(data).item() for _ in range(4)]
    return {"decisions": decisions(engine), "partition": engine.partition, "losses": losses, "state": state(engine)}


def save(block: dict[str, Any], folder: str, steps: int) -> dict[str, Any]:
    """Train, save, and train on."""
    engine, data = build(block, 2)
    for _ in range(steps):
        engine.train_batch(data)
    engine.save_checkpoint(folder)
    return continue_training(engine)


def load(block: dict[str, Any], folder: str, stages: int, weights_only: bool) -> dict[str, Any]:
    """Load what :func:`save` wrote, and train on."""
    engine, _ = build(block, stages)
    engine.load_checkpoint(folder, load_module_only=weights_only)
    return continue_training(engine)


def test_a_resumed_run_keeps_the_partition_of_its_profile(tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = run(2, save, BY_PROFILE, folder, 4)
    assert [result["decisions"] for result in saved] == [[PLACED]] * 2
    resumed, weights_only = run_each(2, load, (BY_PROFILE, folder, 2, False), (BY_PROFILE, folder, 2, True))
    assert resumed == [{**result, "decisions": []} for result in saved]
    assert [result["decisions"] for result in weights_only] == [[PLACED]] * 2  # counts as a new run with these weights


def test_a_resumed_run_without_such_a_partition_profiles_once(tmp_path: Path) -> None:
    early, decided, elsewhere = (str(tmp_path / name) for name in ("early", "decided", "elsewhere"))
    assert run(2, save, BY_PROFILE, early, 1)[0]["decisions"] == [PLACED]
    assert run(2, save, BY_PROFILE, decided, 3)[0]["decisions"] == [PLACED]
    assert run(2, save, {"interval": 3}, elsewhere, 5)[0]["partition"] == [0, 7, 8]
    began, lost, moved = run_each(2, load, *((BY_PROFILE, folder, 2, False) for folder in (early, decided, elsewhere)))
    assert [result["decisions"] for result in began] == [[PLACED]] * 2
    assert [result["decisions"] for result in lost] == [[(6, *PLACED[1:])]] * 2
    assert [result["decisions"] for result in moved] == [[(9, *PLACED[1:])]] * 2
    others = run(3, load, BY_PROFILE, early, 3, False)
    assert all([(step, why) for step, why, *_ in result["decisions"]] == [(5, "initial")] for result in others)

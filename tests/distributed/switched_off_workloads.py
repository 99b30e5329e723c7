"""Runs for test_switched_off.py; every function here runs on a rank."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import ds_dynmo
from tests.distributed.decision_workloads import unsteady_engine
from tests.distributed.workloads import state

SECONDS = [(0.001, 0.002)] * 7 + [(0.02, 0.04)]  # that layers say they take: two even stages are [0, 7, 8]


def build(block: dict[str, Any], stages: int) -> tuple[Any, Any]:
    return unsteady_engine(block, SECONDS, [1.0] * stages, 0.0)


def train(block: dict[str, Any], steps: int) -> dict[str, Any]:
    """In the middle of the run the model says that it has changed."""
    engine, data = build(block, 2)
    for step in range(steps):
        if step == steps // 2:
            engine.model_changed("it says so")
        engine.train_batch(data)
    return {"moves": decisions(engine), "repacks": len(engine.repacks)}


def refusals(block: dict[str, Any]) -> list[str]:
    """Of what would move layers, or needs them to stay where they are."""
    engine, _ = build(block, 2)
    found = []
    for call in (engine.rebalance, engine.compile):
        try:
            call()
        except ds_dynmo.ConfigError as error:
            found.append(str(error))
    return found


def save(block: dict[str, Any], folder: str, steps: int) -> dict[str, Any]:
    """Train, save, train on."""
    engine, data = build(block, 2)
    for _ in range(steps):
        engine.train_batch(data)
    engine.save_checkpoint(folder)
    return go_on(engine)


def load(block: dict[str, Any], folder: str, stages: int, weights_only: bool) -> dict[str, Any]:
    """Load what :func:`save` wrote, train on."""
    engine, _ = build(block, stages)
    engine.load_checkpoint(folder, load_module_only=weights_only)
    return go_on(engine)


def go_on(engine: Any) -> dict[str, Any]:
    data = itertools.repeat((torch.ones(2, 4), torch.zeros(2, 4)))
    losses = [engine.train_batch(data).item() for _ in range(4)]
    return {"decisions": decisions(engine), "partition": engine.partition, "losses": losses, "state": state(engine)}


def decisions(engine: Any) -> list[tuple[Any, ...]]:
    """But for going where a checkpoint was saved."""
    reports = [report for report in engine.reports if report.reason != "checkpoint"]
    return [(r.step, r.reason, r.old_partition, r.new_partition) for r in reports]

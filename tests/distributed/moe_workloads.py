"""Runs for test_moe.py; every function here runs on a rank."""

from __future__ import annotations

from typing import Any

import torch

from ds_dynmo.models import MixtureOfExperts, dynamic_cases, local_layers
from tests.distributed.case_workloads import CaseRun, batches, build

# A "dynmo" block with a decision after every batch; the first finds all blocks on the second of two stages.
EVERY: dict[str, Any] = {
    "interval": 1,
    "min_improvement": 0.0,
    "profile": {"batches": 1, "warmup_batches": 0},
    "initial_partition": [0, 1, 7],
}


def experts(engine: Any) -> dict[int, MixtureOfExperts]:
    """This rank's, by layer."""
    parts = {number: getattr(layer, "mlp", None) for number, layer in local_layers(engine.module)}
    return {number: part for number, part in parts.items() if isinstance(part, MixtureOfExperts)}


def count(run: CaseRun) -> list[dict[str, Any]]:
    """After every step, per layer of this rank: choices, and the steps that the bias took."""
    engine, model = build(run)
    data, seen = batches(engine, model), []
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    for step in range(run.steps):
        for case in cases:
            case.before_batch(step)
        if step in run.moves:
            engine.rebalance(run.moves[step])
        engine.train_batch(data)
        for case in cases:
            case.after_batch(step + 1)
        engine.eval_batch(batches(engine, model, seed=1))
        seen.append(
            {
                number: (list(part.choices_per_expert), part.router.bias_steps.tolist())
                for number, part in experts(engine).items()
            }
        )
    return seen


def sum_over_replicas(run: CaseRun) -> tuple[int, list[int]]:
    engine, _ = build(run)
    summed = engine.sum_over_replicas(torch.tensor([1, 10 ** (engine.global_rank + 1)]))
    return engine.stage_id, summed.tolist()


def train(run: CaseRun) -> dict[str, Any]:
    """Trains as the "dynmo" block of ``run`` says."""
    engine, model = build(run)
    data = batches(engine, model)
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    losses = []
    for step in range(run.steps):
        for case in cases:
            case.before_batch(step)
        losses.append(engine.train_batch(data).item())
        for case in cases:
            case.after_batch(step + 1)
    signals = [layer.load_signal for layer in engine.profile.layers]
    decisions = [report for report in engine.reports if report.reason != "initial"]
    steps, moved = [report.step for report in decisions], sum(report.moved for report in decisions)
    return {"losses": losses, "steps": steps, "signals": signals, "moved": moved}

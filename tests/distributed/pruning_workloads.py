"""Runs for test_pruning.py; every function here runs on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_dynmo.models import Pruning, PruningConfig, dynamic_cases, local_layers
from ds_dynmo.models.pruning.gradual import prunable_linears
from tests.distributed.case_workloads import CaseRun, batches, build


def weights(engine: Any) -> dict[int, list[np.ndarray]]:
    """By layer, the prunable weights of this stage."""
    return {
        number: [linear.weight.detach().float().numpy().copy() for linear in prunable_linears(layer)]
        for number, layer in local_layers(engine.module)
        if prunable_linears(layer)
    }


def masks(engine: Any) -> dict[int, list[np.ndarray]]:
    """By layer, the masks of this stage."""
    return {
        number: [linear.mask.numpy().copy() for linear in prunable_linears(layer) if linear.mask is not None]
        for number, layer in local_layers(engine.module)
        if prunable_linears(layer)
    }


def prune_twice(run: CaseRun, sparsities: tuple[float, float]) -> dict[str, Any]:
    """Trains, prunes, trains, prunes, trains: weights before each pruning, masks after it, and what is not zero."""
    engine, model = build(run)
    data = batches(engine, model)
    case = Pruning(PruningConfig(), engine, num_layers=model.layers + 3, total_steps=run.steps)
    before, after = [], []
    for sparsity in sparsities:
        engine.train_batch(data)
        before.append(weights(engine))
        case.prune(sparsity)
        after.append(masks(engine))
        requested = engine._controller.reason
        engine._controller.decided(moved=False)  # nothing moves here
    right_away = nonzero(engine)
    for _ in range(2):
        engine.train_batch(data)
    return {
        "before": before,
        "after": after,
        "nonzero": [right_away, nonzero(engine)],
        "requested": requested,
        "replica": engine.grid.get_data_parallel_id(),
    }


def nonzero(engine: Any) -> dict[str, tuple[int, int]]:
    """How many elements are not zero where weights are pruned and where not, by kind: weight, master, moments."""
    found: dict[str, tuple[int, int]] = {}
    for _, layer in local_layers(engine.module):
        for linear in prunable_linears(layer):
            assert linear.mask is not None
            kept = linear.mask.flatten()
            held = {"weight": (0, linear.weight.detach().flatten()), **engine._state.state_of(linear.weight)}
            for name, value in held.items():
                if isinstance(value, torch.Tensor) and value.shape == linear.weight.shape:
                    value = (0, value.flatten())
                if isinstance(value, tuple):
                    start, part = value
                    here = kept[start : start + len(part)]
                    pruned, left = found.get(name, (0, 0))
                    found[name] = (
                        pruned + int(part[~here].count_nonzero()),
                        left + int(part[here].count_nonzero()),
                    )
    return found


def load_weights_alone(run: CaseRun, folder: str) -> list[dict[str, tuple[int, int]]]:
    """A pruned model loaded into an engine whose optimizer has moments: :func:`nonzero` before two steps and after."""
    engine, model = build(run)
    data = batches(engine, model)
    engine.train_batch(data)
    Pruning(PruningConfig(), engine, num_layers=model.layers + 3, total_steps=run.steps).prune(0.8)
    engine.save_checkpoint(folder)
    again, _ = build(run)
    for _ in range(2):
        again.train_batch(data)
    again.load_checkpoint(folder, load_module_only=True)
    case = Pruning(PruningConfig(start=0.9, end=0.95), again, num_layers=model.layers + 3, total_steps=100)
    found = [nonzero(again)]
    for step in range(2):
        case.before_batch(step)
        again.train_batch(data)
        found.append(nonzero(again))
    return found


def resume(run: CaseRun, folder: str, saved_after: int) -> dict[str, Any]:
    """Losses of a run, and of the same one that was saved and loaded into an engine of ``run.stages`` again."""
    engine, model = build(run)
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    data, losses = batches(engine, model), []
    for step in range(run.steps):
        if step == saved_after:
            engine.save_checkpoint(str(Path(folder) / "saved"))
        for case in cases:
            case.before_batch(step)
        engine._controller.decided(moved=False)
        losses.append(engine.train_batch(data).item())
    again, _ = build(run)
    again.rebalance([0, 5, 7])
    again.load_checkpoint(str(Path(folder) / "saved"))
    cases = dynamic_cases(model, again, total_steps=run.steps)
    data = batches(again, model)
    for _ in range(saved_after * again.gradient_accumulation_steps()):
        next(data)
    resumed = []
    for step in range(saved_after, run.steps):
        for case in cases:
            case.before_batch(step)
        again._controller.decided(moved=False)
        resumed.append(again.train_batch(data).item())
    return {"losses": losses[saved_after:], "resumed": resumed, "masks": (masks(engine), masks(again))}

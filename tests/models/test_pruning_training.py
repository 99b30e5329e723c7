"""Global pruning in real pipelines equals sorting the whole model, and zeros stay everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_dynmo.models import ModelConfig, Pruning, PruningConfig, RunSizes, dynamic_cases, local_layers
from ds_dynmo.models.pruning.prunable_layer import prunable_linears
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear
from tests.support import case_runs
from tests.support.case_runs import CASES, CaseRun
from tests.support.harness import run, run_each
from tests.support.huggingface_runs import GPT2, LENGTH
from tests.support.training import drop_decision

pytestmark = pytest.mark.ranks

PRUNING = CASES["pruning"]
OF_GPT2 = {"huggingface": GPT2, "sequence_length": LENGTH, "verified": False, **PRUNING}


def run_sizes(model: ModelConfig, total_steps: int) -> RunSizes:
    return RunSizes(total_steps=total_steps, num_layers=model.layers + 3, blocks=range(1, model.layers + 1))


def merged(results: list[dict[str, Any]], what: str, number: int, replica: int = 0) -> dict[int, list[Any]]:
    parts = [result[what][number] for result in results if result["replica"] == replica]
    return {layer: members for part in parts for layer, members in part.items()}


def by_sorting(weights: dict[int, list[np.ndarray]], keep: int) -> np.ndarray:
    everything = np.concatenate([weight.ravel() for layer in sorted(weights) for weight in weights[layer]])
    kept = np.zeros(len(everything), dtype=bool)
    kept[np.argsort(-np.abs(everything), kind="stable")[:keep]] = True
    return kept


def weights(engine: Any) -> dict[int, list[np.ndarray]]:
    """Return the prunable weights of this stage by layer, dense."""
    return {
        number: [linear.dense_weight().float().cpu().numpy().copy() for linear in prunable_linears(layer)]
        for number, layer in local_layers(engine.module)
        if prunable_linears(layer)
    }


def masks(engine: Any) -> dict[int, list[np.ndarray]]:
    """Return the masks of this stage by layer, in the shapes of dense weights."""
    return {
        number: [mask_of(linear).cpu().numpy().copy() for linear in prunable_linears(layer)]
        for number, layer in local_layers(engine.module)
        if prunable_linears(layer)
    }


def mask_of(linear: PrunableLinear) -> torch.Tensor:
    if not linear.is_compressed:
        assert linear.mask is not None
        return linear.mask
    assert linear.index is not None
    mask = torch.zeros(linear.shape, dtype=torch.bool, device=linear.index.device)
    mask.view(-1)[linear.index.long()] = True
    return mask


def nonzero(engine: Any) -> dict[str, tuple[int, int]]:
    """Count nonzero elements where weights are pruned and where not, by kind: weight, master weight, moments.

    What a vector of kept values left out is gone, so that it counts as zero.
    """
    found: dict[str, tuple[int, int]] = {}
    for _, layer in local_layers(engine.module):
        for linear in prunable_linears(layer):
            weight = linear.weight.detach()
            kept = (torch.ones_like(weight, dtype=torch.bool) if linear.mask is None else linear.mask).flatten()
            for name, value in {"weight": weight, **engine.stage.state.state_of(linear.weight)}.items():
                if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                    value = (0, value.flatten())
                if isinstance(value, tuple):  # a shard has a part
                    start, part = value
                    assert not len(part) or start + len(part) <= weight.numel()
                    here = kept[start : start + len(part)]
                    pruned, left = found.get(name, (0, 0))
                    counts = (int(part[where].count_nonzero()) for where in (~here, here))
                    found[name] = (pruned + next(counts), left + next(counts))
    return found


def prune_twice(run: CaseRun, sparsities: tuple[float, float]) -> dict[str, Any]:
    """Train and prune twice. Return weights before each pruning, masks after it, and counts of nonzero elements."""
    engine, model = case_runs.build(run)
    data = case_runs.batches(engine, model)
    case = Pruning(PruningConfig(), engine, run_sizes(model, run.steps))
    before, after = [], []
    for sparsity in sparsities:
        engine.train_batch(data)
        before.append(weights(engine))
        case.prune(sparsity)
        after.append(masks(engine))
        requested = str(engine.rebalancer.cycle.due.request)
        drop_decision(engine)
    right_away = nonzero(engine)
    engine.train_batch(data)
    return {
        "before": before,
        "after": after,
        "nonzero": [right_away, nonzero(engine)],
        "requested": requested,
        "replica": engine.grid.get_data_parallel_id(),
    }


@pytest.mark.parametrize(
    ("model", "stages", "replicas", "precision"),
    [
        (PRUNING, 2, 2, "bf16 zero1"),
        *(
            pytest.param(*variant, marks=pytest.mark.nightly)
            for variant in (
                (PRUNING, 1, 1, "fp32"),
                (OF_GPT2, 2, 1, "fp32"),
                (PRUNING, 4, 1, "fp32"),
                (PRUNING, 2, 1, "bf16"),
                (PRUNING, 4, 1, "bf16 zero1"),
                (PRUNING, 2, 2, "bf16"),
            )
        ),
    ],
)
def test_global_pruning_equals_sorting_the_model(
    model: dict[str, Any], stages: int, replicas: int, precision: str
) -> None:
    sparsities = (0.3, 0.85)
    expected = (3 * 12 if model is OF_GPT2 else 4 * 8) * 16 * 16
    results = run(stages * replicas, prune_twice, CaseRun(model, stages, replicas, precision), sparsities)
    for number, sparsity in enumerate(sparsities):
        weights = merged(results, "before", number)
        total = sum(weight.size for members in weights.values() for weight in members)
        assert total == expected
        for replica in range(replicas):
            masks = merged(results, "after", number, replica)
            found = np.concatenate([mask.ravel() for layer in sorted(masks) for mask in masks[layer]])
            assert np.array_equal(found, by_sorting(weights, round(total * (1 - sparsity))))
            assert found.sum() == round(total * (1 - sparsity))
    kinds = {"weight", "exp_avg", "exp_avg_sq"} | ({"master"} if "bf16" in precision else set())
    for result in results:
        assert result["requested"] == "pruning: 85.0% sparse"
        assert all(pruned == 0 for counts in result["nonzero"] for pruned, _ in counts.values())
    for number in range(2):
        found = [result["nonzero"][number] for result in results]
        left = {kind: sum(counts[kind][1] for counts in found if counts) for kind in kinds}
        assert all(left.values()) and all(counts.keys() == kinds or not counts for counts in found)


def load_weights_alone(run: CaseRun, folder: str) -> list[dict[str, tuple[int, int]]]:
    """Load a pruned model into an engine whose optimizer has moments. Return :func:`nonzero` before and after steps.

    It is pruned so little that its weights stay dense.
    """
    engine, model = case_runs.build(run)
    data = case_runs.batches(engine, model)
    engine.train_batch(data)
    Pruning(PruningConfig(), engine, run_sizes(model, run.steps)).prune(0.4)
    engine.save_checkpoint(folder)
    again, _ = case_runs.build(run)
    again.train_batch(data)
    again.load_checkpoint(folder, load_module_only=True)
    case = Pruning(PruningConfig(start=0.9, end=0.95), again, run_sizes(model, 100))
    found = [nonzero(again)]
    for step in range(2):
        case.before_batch(step)
        again.train_batch(data)
        found.append(nonzero(again))
    return found


@pytest.mark.parametrize(
    ("precision", "stages", "replicas"),
    [
        ("bf16 zero1", 1, 2),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("fp32", 2, 1), ("bf16", 2, 1))),
    ],
)
def test_pruned_weights_stay_pruned_in_an_optimizer_with_moments(
    precision: str, stages: int, replicas: int, tmp_path: Path
) -> None:
    results = run(2, load_weights_alone, CaseRun(PRUNING, stages, replicas, precision), str(tmp_path))
    wrong = [loaded["exp_avg"][0] for loaded, *_ in results]  # moments that could revive weights; a shard may have none
    assert all(wrong) if replicas == 1 else any(wrong)
    for _, *trained in results:
        assert all(counts["weight"][1] for counts in trained)
        assert all(pruned == 0 for counts in trained for pruned, _ in counts.values())


def train_pruned(run: CaseRun, refusal: str | None) -> dict[str, Any]:
    """Train a case; with a ``refusal``, weights stay dense with masks. Return losses, and dense weights at the end."""
    engine, model = case_runs.build(run)
    if refusal is not None:
        engine.keep_elements_refusal = lambda: refusal
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    data, losses = case_runs.batches(engine, model), []
    for step in range(run.steps):
        if step in run.moves:
            engine.rebalance(run.moves[step])
        for case in cases:
            case.before_batch(step)
        drop_decision(engine)
        losses.append(engine.train_batch(data).item())
    linears = [linear for _, layer in local_layers(engine.module) for linear in prunable_linears(layer)]
    return {
        "losses": losses,
        "weights": weights(engine),
        "compressed": {linear.is_compressed for linear in linears},
    }


@pytest.mark.parametrize(
    ("name", "precision"),
    [("pruning", "bf16 zero1"), pytest.param("pruning in CSR", "fp32", marks=pytest.mark.nightly)],
)
def test_vectors_train_in_a_pipeline_as_masked_weights_do(name: str, precision: str) -> None:
    """To the bit, and moved while they do. Without clipping, whose norm is summed in another order."""
    case = CaseRun(CASES[name], precision=precision, clip=0.0, steps=4)
    elsewhere = replace(case, moves={1: [0, 5, 7], 3: [0, 2, 7]})
    masked, vectors = run_each(2, train_pruned, (case, "asked for"), (elsewhere, None))
    assert masked[0]["losses"] == vectors[0]["losses"]
    ours, theirs = ({k: v for result in results for k, v in result["weights"].items()} for results in (vectors, masked))
    assert ours.keys() == theirs.keys() == {1, 2, 3, 4}
    assert all(np.array_equal(a, b) for layer in ours for a, b in zip(ours[layer], theirs[layer], strict=True))
    assert [result["compressed"] - {True} for result in vectors] == [set(), set()]
    assert all(result["compressed"] == {False} for result in masked)

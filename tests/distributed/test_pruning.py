"""Global pruning in real pipelines: exactly what sorting the whole model gives, and zeros that stay everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import pruning_workloads as work
from tests.distributed.case_workloads import CASES, CaseRun
from tests.distributed.harness import run

PRUNING = CASES["pruning"]


def merged(results: list[dict[str, Any]], what: str, number: int, replica: int = 0) -> dict[int, list[Any]]:
    parts = [result[what][number] for result in results if result["replica"] == replica]
    return {layer: members for part in parts for layer, members in part.items()}


def by_sorting(weights: dict[int, list[np.ndarray]], keep: int) -> np.ndarray:
    everything = np.concatenate([weight.ravel() for layer in sorted(weights) for weight in weights[layer]])
    kept = np.zeros(len(everything), dtype=bool)
    kept[np.argsort(-np.abs(everything), kind="stable")[:keep]] = True
    return kept


@pytest.mark.parametrize(
    ("stages", "replicas", "precision"),
    [
        (1, 1, "fp32"),
        (2, 1, "fp32"),
        (4, 1, "fp32"),
        (2, 1, "bf16"),
        (4, 1, "bf16 zero1"),
        (2, 2, "bf16 zero1"),
        (2, 2, "bf16"),
    ],
)
def test_global_pruning(stages: int, replicas: int, precision: str) -> None:
    sparsities = (0.3, 0.85)
    results = run(stages * replicas, work.prune_twice, CaseRun(PRUNING, stages, replicas, precision), sparsities)
    for number, sparsity in enumerate(sparsities):
        weights = merged(results, "before", number)
        total = sum(weight.size for members in weights.values() for weight in members)
        assert total == 4 * 8 * 16 * 16
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


@pytest.mark.parametrize(("precision", "replicas"), [("fp32", 1), ("bf16", 1), ("bf16 zero1", 2)])
def test_pruned_weights_stay_pruned_in_an_optimizer_with_moments(precision: str, replicas: int, tmp_path: Path) -> None:
    results = run(2 * replicas, work.load_weights_alone, CaseRun(PRUNING, 2, replicas, precision), str(tmp_path))
    wrong = [loaded["exp_avg"][0] for loaded, *_ in results]  # what was there to go wrong; a shard may have nothing
    assert all(wrong) if replicas == 1 else any(wrong)
    for _, *trained in results:
        assert all(counts["weight"][1] for counts in trained)
        assert all(pruned == 0 for counts in trained for pruned, _ in counts.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
@pytest.mark.parametrize("name", ["pruning", "pruning in CSR"])
def test_a_resumed_run_goes_on_as_it_was(name: str, precision: str, tmp_path: Path) -> None:
    case = CaseRun(CASES[name], precision=precision, steps=8)
    for result in run(2, work.resume, case, str(tmp_path), 4):
        assert result["resumed"] == result["losses"]
        before, after = result["masks"]
        assert before.keys() == after.keys() and all(before.values())
        for layer, masks in before.items():
            assert all(np.array_equal(a, b) for a, b in zip(masks, after[layer], strict=True))

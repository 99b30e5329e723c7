"""Simulate the throughput of a pruned model on fewer and fewer stages (paper, section 4, re-packing)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ds_dynmo.partitioners import balanced
from ds_dynmo.simulation.load_models import PruningLoad
from ds_dynmo.simulation.runs import PhaseCosts, Setting, iteration


def repack_rows(num_layers: int, stages: Sequence[int], *, seeds: int) -> list[dict[str, Any]]:
    """Make a row per sparsity and number of stages, all with as many micro-batches as the largest pipeline has."""
    load_model, largest = PruningLoad(), max(stages)
    rows = []
    begin = 0
    runs = [load_model.phases(num_layers, 0, seed=seed) for seed in range(seeds)]
    for phases in zip(*runs):
        for count in stages:
            setting = Setting.of(load_model, layers=num_layers, stages=count, replicas=1, micro_batches=4 * largest)
            costs = [PhaseCosts.of([phase], setting.forward_seconds) for phase in phases]
            seconds = [iteration(phase, balanced(phase.costs(), count), setting)[0] for phase in costs]
            tokens = statistics.fmean(setting.tokens / duration for duration in seconds)
            rows.append(
                {
                    "sparsity": load_model.sparsity(begin),
                    "iterations": phases[0].iterations,
                    "stages": count,
                    "tokens_per_second": tokens,
                    "tokens_per_second_per_rank": tokens / count,
                }
            )
        begin += phases[0].iterations
    dense = next(row["tokens_per_second"] for row in rows if row["stages"] == largest)
    return [{**row, "over_dense": row["tokens_per_second"] / dense} for row in rows]


def sustained_stages(rows: Sequence[dict[str, Any]]) -> float:
    """Average over a run the fewest stages that are as fast as all stages were with the dense model."""
    fewest: dict[float, tuple[int, int]] = {}
    for row in rows:
        if row["over_dense"] >= 1 - 1e-9:
            known = fewest.get(row["sparsity"], (row["stages"], 0))[0]
            fewest[row["sparsity"]] = (min(known, row["stages"]), row["iterations"])
    return sum(count * n for count, n in fewest.values()) / sum(n for _, n in fewest.values())

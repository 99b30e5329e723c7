"""Mixture of experts in a pipeline: token counts over batches and replicas, and decisions after every batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ds_dynmo.models import dynamic_cases
from tests.support import case_runs
from tests.support.case_runs import CASES, EVERY, SIZES, CaseRun, experts, train_and_decide
from tests.support.harness import run, run_each

pytestmark = pytest.mark.ranks

CHOICES = 3 * 2 * SIZES["sequence_length"] * 2  # micro-batches, sequences of each, tokens, experts of each token


def count(run: CaseRun) -> tuple[list[dict[int, Any]], tuple[int, list[int]]]:
    """Return, after every step and per layer of this rank, the choices and the steps of the bias; and a sum."""
    engine, model = case_runs.build(run)
    data, seen = case_runs.batches(engine, model), []
    (case,) = dynamic_cases(model, engine, total_steps=run.steps)
    summed = engine.sum_over_replicas(torch.tensor([1, 10 ** (engine.global_rank + 1)]))
    for step in range(run.steps):
        case.before_batch(step)
        if step in run.moves:
            engine.rebalance(run.moves[step])
        engine.train_batch(data)
        case.after_batch(step + 1)
        engine.eval_batch(case_runs.batches(engine, model, seed=1))
        parts = experts(engine)
        seen.append({n: (list(part.choices_per_expert), part.router.bias_steps.tolist()) for n, part in parts.items()})
    return seen, (engine.stage_id, summed.tolist())


@pytest.mark.parametrize("checkpoint_interval", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_the_bias_follows_the_counts_of_the_batch_on_all_replicas(checkpoint_interval: int) -> None:
    """Sums over replicas are per stage."""
    case = CaseRun(CASES["moe bias"], 2, 2, steps=3, checkpoint_interval=checkpoint_interval, moves={1: [0, 2, 7]})
    ranks = run(4, count, case)
    expected = {layer: [0] * 4 for layer in (2, 3, 4)}  # the first block is dense
    differ = False
    for step in range(case.steps):
        by_layer: dict[int, list[tuple[list[int], list[int]]]] = {}
        for seen, _ in ranks:
            for layer, counted in seen[step].items():
                by_layer.setdefault(layer, []).append(counted)
        assert sorted(by_layer) == [2, 3, 4]
        for layer, ((one, steps), (other, steps_there)) in by_layer.items():
            assert sum(one) == sum(other) == CHOICES
            totals = [sum(pair) for pair in zip(one, other)]
            mean = sum(totals) / 4
            expected[layer] = [
                n + (total < mean) - (total > mean) for n, total in zip(expected[layer], totals, strict=True)
            ]
            assert steps == steps_there == expected[layer]
            differ |= any((a < CHOICES / 4) != (b < CHOICES / 4) for a, b in zip(one, other))
    assert differ  # otherwise the sum over replicas would not matter
    of_stage: dict[int, list[int]] = {}
    for rank, (_, (stage, _)) in enumerate(ranks):
        of_stage.setdefault(stage, []).append(rank)
    assert sorted(map(len, of_stage.values())) == [2, 2]
    for _, (stage, numbers) in ranks:
        assert numbers == [2, sum(10 ** (rank + 1) for rank in of_stage[stage])]


FIRST = "moe sbase with capacity"  # the others in the nightly form


@pytest.mark.parametrize(
    "name",
    [FIRST, *(pytest.param(name, marks=pytest.mark.nightly) for name in CASES if name[:3] == "moe" and name != FIRST)],
)
def test_a_decision_after_every_batch_changes_nothing(name: str) -> None:
    stays = {"interval": 0, "min_improvement": 0.99}  # freezing asks for decisions by itself
    runs = [CaseRun(CASES[name], dynmo=dynmo, steps=4) for dynmo in (EVERY, stays)]
    often, never = run_each(2, train_and_decide, *((one,) for one in runs))
    assert often[0]["moved"] > 0 == never[0]["moved"]
    assert often[0]["losses"] == never[0]["losses"] and all(map(math.isfinite, often[0]["losses"]))
    assert often[0]["steps"] == [1, 2, 3, 4]
    assert often[0]["signals"] == often[1]["signals"]
    blocks = often[0]["signals"][1:-2]
    if "capacity" in name:  # every other block has experts, which drop some of their share of 2 of 4
        assert blocks[::2] == [1.0, 1.0] and all(0.3 < signal < 0.5 for signal in blocks[1::2])
    else:
        assert blocks[-1] == 0.5  # 2 of 4 experts

"""Mixture of experts in a pipeline: token counts over batches and replicas, and decisions after every batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ds_dynmo.models import dynamic_cases
from tests.support import case_runs
from tests.support.case_runs import CASES, EVERY, SIZES, CaseRun, experts, train_and_decide
from tests.support.harness import run

pytestmark = pytest.mark.ranks

BIAS = CASES["moe bias"]
CHOICES = 3 * 2 * SIZES["sequence_length"] * 2  # micro-batches, sequences of each, tokens, experts of each token


def count(run: CaseRun) -> list[dict[str, Any]]:
    """Return, after every step and per layer of this rank, the choices and the steps of the bias."""
    engine, model = case_runs.build(run)
    data, seen = case_runs.batches(engine, model), []
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    for step in range(run.steps):
        for case in cases:
            case.before_batch(step)
        if step in run.moves:
            engine.rebalance(run.moves[step])
        engine.train_batch(data)
        for case in cases:
            case.after_batch(step + 1)
        engine.eval_batch(case_runs.batches(engine, model, seed=1))
        seen.append(
            {
                number: (list(part.choices_per_expert), part.router.bias_steps.tolist())
                for number, part in experts(engine).items()
            }
        )
    return seen


@pytest.mark.parametrize("checkpoint_interval", [0, 1])
def test_the_bias_follows_the_counts_of_the_batch_on_all_replicas(checkpoint_interval: int) -> None:
    case = CaseRun(BIAS, replicas=2, steps=4, checkpoint_interval=checkpoint_interval, moves={1: [0, 2, 7]})
    ranks = run(4, count, case)
    expected = {layer: [0] * 4 for layer in (2, 3, 4)}  # the first block is dense
    differ = False
    for step in range(4):
        by_layer: dict[int, list[tuple[list[int], list[int]]]] = {}
        for rank in ranks:
            for layer, counted in rank[step].items():
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


def sum_over_replicas(run: CaseRun) -> tuple[int, list[int]]:
    engine, _ = case_runs.build(run)
    summed = engine.sum_over_replicas(torch.tensor([1, 10 ** (engine.global_rank + 1)]))
    return engine.stage_id, summed.tolist()


def test_a_sum_over_replicas_is_per_stage() -> None:
    summed = run(4, sum_over_replicas, CaseRun(BIAS, replicas=2))
    of_stage: dict[int, list[int]] = {}
    for rank, (stage, _) in enumerate(summed):
        of_stage.setdefault(stage, []).append(rank)
    assert sorted(map(len, of_stage.values())) == [2, 2]
    for stage, numbers in summed:
        assert numbers == [2, sum(10 ** (rank + 1) for rank in of_stage[stage])]


FIRST = ("moe auxiliary loss and freezing", "moe sbase with capacity", "moe bias")  # the others in the nightly form


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FIRST else pytest.mark.nightly)
        for name in CASES
        if name.startswith("moe")
    ],
)
def test_a_decision_after_every_batch_changes_nothing(name: str) -> None:
    stays = {"interval": 0, "min_improvement": 0.99}  # freezing asks for decisions by itself
    often, never = (run(2, train_and_decide, CaseRun(CASES[name], dynmo=dynmo)) for dynmo in (EVERY, stays))
    assert often[0]["moved"] > 0 == never[0]["moved"]
    assert often[0]["losses"] == never[0]["losses"] and all(map(math.isfinite, often[0]["losses"]))
    assert often[0]["steps"] == [1, 2, 3, 4, 5, 6]
    assert often[0]["signals"] == often[1]["signals"]
    blocks = often[0]["signals"][1:-2]
    if "capacity" in name:  # every other block has experts, which drop some of their share of 2 of 4
        assert blocks[::2] == [1.0, 1.0] and all(0.3 < signal < 0.5 for signal in blocks[1::2])
    else:
        assert blocks[-1] == 0.5  # 2 of 4 experts

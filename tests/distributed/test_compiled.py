"""``"compile": true``: layers run compiled, where they are and where they arrive, and moves change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.harness import run_each
from tests.distributed.support.configs import Case
from tests.distributed.support.training import (
    Warnings,
    batches,
    build,
    check_moves_changed_nothing,
    outcome_of,
    partitions,
    train_and_move,
)


def train(case: Case, moves: Sequence[Sequence[int]], steps: int, backend: str = "aot_eager") -> dict[str, Any]:
    """Train compiled: by inductor if the block says so, else by ``backend`` in a call of DeepSpeed's."""
    warnings = Warnings()
    engine = build(case)
    if not engine.dynmo.compile:
        engine.compile(backend=backend)
    assert engine.is_compiled
    evaluations = []

    def after(step: int) -> None:
        if step == 1:
            evaluations.append(engine.eval_batch(batches(engine, seed=7)).item())

    losses = train_and_move(engine, batches(engine), moves, steps, after)
    return {
        **outcome_of(engine, losses),
        "evaluations": evaluations,
        "warnings": warnings.messages,
        "compiled": engine.stage.compiled.seconds,
    }


def check_same(case: Case, moves: list[list[int]], steps: int = 4) -> None:
    still, moved = run_each(case.ranks, train, (case, [], steps), (case, moves, steps))
    check_moves_changed_nothing(still, moved)
    assert [result["evaluations"] for result in moved] == [result["evaluations"] for result in still]
    for result in still + moved:
        assert result["compiled"] > 0 and not result["warnings"]


CASES = {
    "fp32": Case(stages=2, blocks=2, dropout=True),
    "bf16 zero1 tied": Case(stages=2, precision="bf16 zero1", tied=True, replicas=2),
    "checkpointed": Case(stages=2, checkpoint_interval=2, dropout=True),
    "checkpointed not reentrant": Case(stages=2, checkpoint_interval=2, dropout=True, reentrant=False),
    "zero bubble": Case(stages=2, dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}}),
}


@pytest.mark.parametrize("name", ["fp32", *(pytest.param(name, marks=pytest.mark.fuzz) for name in [*CASES][1:])])
def test_moves_change_nothing(name: str) -> None:
    case = CASES[name]
    check_same(case, partitions(case, seed=11, count=3))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CASES)
def test_moves_change_nothing_under_inductor(name: str) -> None:
    case = CASES[name]
    check_same(replace(case, dynmo={**(case.dynmo or {}), "compile": True}), partitions(case, seed=11, count=3))

"""``"compile": true``: layers run compiled, where they are and where they arrive, and moves change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from tests.support.checkpoints import check_same, load_and_continue, save_and_continue, skewed
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import Block, Embedding, Head, scale
from tests.support.training import (
    batches,
    build,
    check_moves_changed_nothing,
    drop_decision,
    freeze,
    outcome_of,
    partitions,
    train_and_move,
)

pytestmark = pytest.mark.ranks


def train(case: Case, moves: Sequence[Sequence[int]], steps: int, backend: str = "aot_eager") -> dict[str, Any]:
    """Train compiled: by inductor if the section says so, else by ``backend`` in a call of DeepSpeed's."""
    engine = build(case)
    if not engine.dynmo.compile:
        engine.compile(backend=backend)
    assert engine.is_compiled
    evaluations = []

    def after(step: int) -> None:
        if step == 1:
            evaluations.append(engine.eval_batch(batches(engine, seed=7)).item())

    losses = train_and_move(engine, batches(engine), moves, steps, after)
    return {**outcome_of(engine, losses), "evaluations": evaluations}


CASES = {
    "fp32": Case(stages=2, blocks=2, dropout=True),
    "bf16 zero1 tied": Case(stages=2, precision="bf16 zero1", tied=True, replicas=2),
    "checkpointed": Case(stages=2, checkpoint_interval=2, dropout=True),
    "checkpointed not reentrant": Case(stages=2, checkpoint_interval=2, dropout=True, reentrant=False),
    "zero bubble": Case(stages=2, dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("by", [{}, {"compile": True}], ids=["aot_eager", "inductor"])
@pytest.mark.parametrize("name", CASES)
def test_moves_change_nothing(name: str, by: dict[str, Any]) -> None:
    case = replace(CASES[name], dynmo={"interval": 0, **(CASES[name].dynmo or {}), **by})
    moves = partitions(case, seed=11, count=3)
    still, moved = run_each(case.ranks, train, (case, [], 4), (case, moves, 4))
    check_moves_changed_nothing(still, moved)
    assert [result["evaluations"] for result in moved] == [result["evaluations"] for result in still]


class Fussy(Block):
    """Takes a path that depends on the data, which torch runs as it is."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden if hidden.detach().sum() > 0 else -hidden)


def mixed_layers(case: Case) -> list[Any]:
    """Layers that torch can trace and one that it cannot, one with two uses, and a function."""
    names = [f"{part}.{name}" for part in ("norm", "up", "down") for name in ("weight", "bias")]
    twice = TiedLayerSpec("block", Block, 3, tied_weight_attr=names)
    middle = [LayerSpec(Block, 0), LayerSpec(Fussy, 1), twice, LayerSpec(Block, 0), twice, scale]
    return [LayerSpec(Embedding, 1), *middle, LayerSpec(Head, 2)]


def train_mixed(moves: Sequence[Sequence[int]], dynmo: dict[str, Any], backend: str | None) -> dict[str, Any]:
    """Train, and freeze layers in the middle for two batches."""
    engine = build(Case(dynmo={"interval": 0, **dynmo}), mixed_layers)
    if backend is not None:
        engine.compile(backend=backend)

    def after(step: int) -> None:
        if step in (1, 3):
            freeze(engine, prefix=2 if step == 1 else 0)
            engine.model_changed("layers were frozen, or thawed")
            drop_decision(engine)

    losses = train_and_move(engine, batches(engine), moves, 6, after)
    return outcome_of(engine, losses)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_moves_change_nothing_where_layers_freeze_have_two_uses_or_cannot_be_traced(backend: str, kind: str) -> None:
    moves = [[0, 2, 8], [0, 5, 8], [0, 3, 8], [0, 6, 8], [0, 1, 8]]
    schedule = {"schedule": {"kind": kind}}
    still, moved = run_each(2, train_mixed, ([], schedule, backend), (moves, schedule, backend))
    check_moves_changed_nothing(still, moved)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_a_compiled_run_resumes_elsewhere_and_uncompiled(tmp_path: Path, precision: str) -> None:
    case = Case(stages=2, tied=True, precision=precision, dynmo={"interval": 0, "compile": True})
    saved = run(2, save_and_continue, case, str(tmp_path), skewed(2))
    for stages in (2, 3):
        check_same(saved, run(stages, load_and_continue, replace(case, stages=stages), str(tmp_path)))
    uncompiled = run(2, load_and_continue, replace(case, dynmo={"interval": 0}), str(tmp_path))
    assert uncompiled[0]["losses"] == pytest.approx(saved[0]["losses"], rel=0.05)

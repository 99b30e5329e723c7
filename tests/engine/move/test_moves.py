"""Moves: freed memory, DeepSpeed's own functions, and layers of unusual kinds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import layers_of_many_widths, layers_tied_in_the_middle
from tests.support.training import (
    batches,
    build,
    check_moves_changed_nothing,
    outcome_of,
    raw,
    state,
    train_and_move,
    train_layers,
)

pytestmark = pytest.mark.ranks


def hooked(parameter: Any) -> bool:
    """Tell whether a wrapper still refers to a parameter that left."""
    return bool(parameter._post_accumulate_grad_hooks) or hasattr(parameter, "_hp_mapping")


def departed_parameters(precision: str) -> int:
    engine = build(Case(stages=2, tied=True, precision=precision))
    data = batches(engine)
    engine.train_batch(data)
    alive = []
    for partition in ([0, 7, 8], [0, 1, 8]):
        watched = [weakref.ref(p) for p in engine.module.parameters()]
        gc.disable()
        engine.rebalance(partition)
        here = set(map(id, engine.module.parameters()))
        alive += [ref for ref in watched if ref() is not None and id(ref()) not in here and hooked(ref())]
        gc.enable()
        engine.train_batch(data)
        gc.collect()
        here = set(map(id, engine.module.parameters()))
        alive += [ref for ref in watched if ref() is not None and id(ref()) not in here]
    return len(alive)


@pytest.mark.parametrize(
    "precision",
    [
        *("fp32", "bf16 zero1"),
        *(pytest.param(other, marks=pytest.mark.nightly) for other in ("bf16", "bf16 immediate", "fp32 zero1")),
    ],
)
def test_departed_parameters_are_freed(precision: str) -> None:
    assert run(2, departed_parameters, precision) == [0, 0]


def full_state(case: Case, moves: dict[int, list[int]]) -> list[dict[str, Any]]:
    """Return what DeepSpeed's functions give for every parameter after each move or batch, by layer and name."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = build(case)
    optimizer, groups = engine.optimizer, engine.optimizer.param_groups
    data, seen = batches(engine), []
    for step in range(4):
        if step in moves:
            engine.rebalance(moves[step])
        found: dict[str, Any] = {}
        for index, module in engine.stage.layers.counted_modules().items():
            for name, parameter in module.named_parameters():
                found[f"{index}.{name}"] = raw(safe_get_full_fp32_param(parameter))
                if step:
                    for key in ("exp_avg", "exp_avg_sq"):
                        found[f"{index}.{name}/{key}"] = raw(safe_get_full_optimizer_state(parameter, key))
        seen.append(found)
        engine.train_batch(data)
    assert engine.optimizer is optimizer and engine.optimizer.param_groups is groups
    assert all(engine.param_names[parameter] for parameter in engine.module.parameters())
    return seen


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [("bf16 zero1", 2), *(pytest.param(other, 1, marks=pytest.mark.nightly) for other in ("bf16", "fp32 zero1"))],
)
def test_deepspeed_finds_the_full_state_right_after_a_move(precision: str, replicas: int) -> None:
    case = Case(stages=2, tied=True, precision=precision, replicas=replicas, groups="two")
    moves = {0: [0, 2, 8], 2: [0, 7, 8], 3: [0, 1, 8]}
    still, moved = run_each(case.ranks, full_state, (case, {}), (case, moves))
    for before, after in zip(zip(*still), zip(*moved)):  # step by step
        assert {k: v for rank in before for k, v in rank.items()} == {k: v for rank in after for k, v in rank.items()}


def stay() -> tuple[int, bool]:
    engine = build(Case(precision="bf16 zero1"))
    engine.train_batch(batches(engine))
    before, modules = state(engine), list(engine.module.forward_funcs)
    report = engine.rebalance([0, 4, 8])
    return report.bytes_moved, state(engine) == before and modules == list(engine.module.forward_funcs)


def test_a_rebalance_to_the_same_partition_changes_nothing() -> None:
    assert run(2, stay) == [(0, True)] * 2


def test_layers_between_tuples_of_different_shapes_move() -> None:
    case, moves = Case(stages=3), [[0, 1, 2, 6], [0, 3, 5, 6], [0, 2, 3, 6]]
    still, moved = run_each(3, train_layers, *((case, layers_of_many_widths, to, 4) for to in ([], moves)))
    assert [rank["partition"] for rank in moved] == [moves[-1]] * 3
    check_moves_changed_nothing(still, moved)


def train_tied(case: Case, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Train with moves, in whose commit no process group may be made; count those that this rank has at the end."""
    engine = build(case, layers_tied_in_the_middle)
    groups, new_group, commit = distributed_c10d._world.pg_map, dist.new_group, engine.migrator.commit
    before = len(groups)

    def commit_without_groups() -> Any:
        dist.new_group = lambda *_, **__: pytest.fail("a process group is made after bytes have moved")
        result = commit()
        dist.new_group = new_group
        return result

    engine.migrator.commit = commit_without_groups
    losses = train_and_move(engine, batches(engine), moves, 6)
    return {**outcome_of(engine, losses), "groups": len(groups) - before}


def test_tied_layers_come_to_one_stage_and_part() -> None:
    """Process groups of the stages that share them are made before bytes move; the two latest are kept."""
    case, moves = Case(stages=3), [[0, 1, 5, 6], [0, 3, 4, 6], [0, 1, 2, 6], [0, 1, 3, 6], [0, 4, 5, 6], [0, 3, 4, 6]]
    still, moved = run_each(3, train_tied, (case, []), (case, moves))
    assert [rank["partition"] for rank in moved] == [moves[-1]] * 3
    check_moves_changed_nothing(still, moved)
    assert [result["groups"] for result in moved] == [2, 0, 0]

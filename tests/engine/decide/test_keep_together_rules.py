"""Rules of layers that stay together hold at the start, in moves, re-packing and loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.engine.decide.decision_input import DecisionInput
from ds_dynmo.errors import ConfigError, PartitionError
from ds_dynmo.partitioners import uniform
from tests.support.checkpoints import STEPS, load_and_continue, save_and_continue, train_on
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.training import batches, build, reports_of, whole

pytestmark = pytest.mark.ranks

PAIR = {"keep_together": [[6, 7]]}
BY_HAND = {"interval": 0, **PAIR}


def begins_at(case: Case) -> dict[str, Any]:
    """Return the partition at which an engine begins, and that after a batch."""
    engine = build(case)
    first = engine.partition
    engine.train_batch(batches(engine))
    return {"first": first, "then": engine.partition, "reasons": [report.reason for report in reports_of(engine)]}


# -- where training begins ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "first"),
    [
        ({"keep_together": [[3, 4]]}, [0, 3, 8]),  # DeepSpeed's own is [0, 4, 8]
        ({"keep_together": [[3, 4]], "enabled": False}, [0, 3, 8]),
        ({"keep_together": [[0, 1]]}, [0, 4, 8]),
        ({"keep_together": ["type:^block", [3, 4]]}, [0, 6, 8]),  # layers 1 to 5 are blocks
        ({"keep_together": [[3, 4]], "initial_partition": "uniform"}, [0, 3, 6, 8]),
        # Below, the best allowed partition is not the allowed one nearest to the best.
        ({"keep_together": [[1, 2, 3, 4]], "initial_partition": "uniform"}, [0, 1, 5, 8]),
        ({"keep_together": [[4, 5]], "initial_partition": "type:block|head:4"}, [0, 6, 8]),
        ({"keep_together": [[3, 4, 5]], "initial_partition": "parameters"}, [0, 3, 6, 8]),
    ],
)
def test_the_first_partition_is_allowed(block: dict[str, Any], first: list[int]) -> None:
    stages = len(first) - 1
    found = run(stages, begins_at, Case(stages=stages, dynmo={"interval": 0, **block}))
    assert all(rank["first"] == rank["then"] == first for rank in found)
    assert found[0]["reasons"] == ([] if first == uniform(8, stages) else ["initial"])


def refused_at_the_start(case: Case) -> tuple[str, str]:
    try:
        build(case)
    except (ConfigError, PartitionError) as error:
        return type(error).__name__, str(error)
    return "built", ""


def test_rules_that_do_not_fit_are_refused_before_training() -> None:
    blocks: list[tuple[dict[str, Any], str, str]] = [
        ({"keep_together": [[6, 7, 8]]}, "ConfigError", "keep_together[0] = [6, 7, 8]: there is no layer 8"),
        ({"keep_together": ["type:Attention"]}, "ConfigError", "no layer's name matches 'Attention'"),
        ({"keep_together": ["type:("]}, "ConfigError", "is not a regular expression"),
        (
            {"keep_together": [[0, 1, 2, 3, 4, 5, 6, 7]]},
            "ConfigError",
            "makes 1 groups of the model's 8 layers, which cannot fill 2 stages",
        ),
        (
            {**PAIR, "initial_partition": [0, 7, 8]},
            "PartitionError",
            "cuts before layer 7: layers 6 (scale) and 7 (Head) stay together, dynmo.keep_together has [6, 7]",
        ),
    ]
    calls = [(Case(dynmo={"interval": 0, **block}),) for block, _, _ in blocks]
    found = run_each(2, refused_at_the_start, *calls)
    for (_, kind, words), ranks in zip(blocks, found):
        assert ranks[0] == ranks[1]
        assert ranks[0][0] == kind and words in ranks[0][1], ranks[0]


def refused_moves(case: Case, partition: Sequence[int]) -> dict[str, Any]:
    """Ask for a forbidden partition by a rebalance and by a re-packing, and train on."""
    engine = build(case)
    data, errors = batches(engine), []
    losses = [engine.train_batch(data).item()]
    before = engine.partition
    for move in (engine.rebalance, lambda to: engine.repack(partition=to), lambda to: engine.repack(engine.num_stages)):
        try:
            move(partition)
        except PartitionError as error:
            errors.append(str(error))
    assert engine.partition == before
    losses.append(engine.train_batch(data).item())
    return {"losses": losses, "errors": errors}


# -- moves, re-packing --------------------------------------------------------------------------------


def test_a_forbidden_partition_is_refused_and_training_continues() -> None:
    case = Case(dynmo=BY_HAND)
    refused, plain = run_each(2, refused_moves, (case, [0, 7, 8]), (Case(dynmo=BY_HAND), [0, 4, 8]))
    for rank in refused:
        assert len(rank["errors"]) == 2
        assert all("cuts before layer 7" in error and "has [6, 7]" in error for error in rank["errors"])
    assert refused[0]["losses"] == plain[0]["losses"]


def repack_by_hand(case: Case, sizes: Sequence[Any]) -> dict[str, Any]:
    """After each batch re-pack to the next of ``sizes``, numbers of stages or partitions. Train one more batch."""
    engine = build(case)
    data = batches(engine)
    found: dict[str, Any] = {"losses": [], "partitions": [], "errors": []}
    while engine.global_steps <= len(sizes):
        found["losses"].append(engine.train_batch(data).item())
        if engine.global_steps > len(sizes):
            break
        size = sizes[engine.global_steps - 1]
        try:
            engine.repack(partition=size) if isinstance(size, list) else engine.repack(size)
        except PartitionError as error:
            found["errors"].append(str(error))
        if engine.released:
            return found
        found["partitions"].append(engine.partition)
    return found


def test_re_packing_makes_only_allowed_cuts() -> None:
    rules = {"keep_together": [[0, 1, 2], [3, 4], [5, 6, 7]]}
    case = Case(stages=3, dynmo={"interval": 0, **rules}, start=(0, 3, 5, 8))
    sizes = [2, [0, 4, 8], 3, 1]
    ranks = run(3, repack_by_hand, case, sizes)
    found = ranks[0]
    assert [len(partition) - 1 for partition in found["partitions"]] == [2, 2, 2, 1]
    assert all(set(partition) <= {0, 3, 5, 8} for partition in found["partitions"])
    assert "cuts before layer 4" in found["errors"][0]
    assert "repack: 3 stages, there are 1 to 2 to go on with" in found["errors"][1]
    alone = run(3, repack_by_hand, case, [3] * len(sizes))
    assert found["losses"] == alone[0]["losses"]


def start_of_the_run(case: Case) -> tuple[float, float]:
    """Return the seconds that an iteration counts as at first, and those predicted for the present partition."""
    engine = build(case)
    data = batches(engine)
    while engine.profile is None:
        engine.train_batch(data)
    return engine.rebalancer.decider.cost_model.first_seconds, DecisionInput.of(
        engine.profile
    ).pipeline.iteration_seconds(engine.partition)


def test_the_target_speed_is_that_of_an_allowed_partition() -> None:
    """Only [0, 1, 8] is allowed; a balanced partition would be faster."""
    case = Case(dynmo={"interval": 0, "keep_together": [[1, 2, 3, 4, 5, 6, 7]]})
    first_seconds, as_it_is = run(2, start_of_the_run, case)[0]
    assert first_seconds == as_it_is


# -- loading ------------------------------------------------------------------------------------------


def test_a_checkpoint_with_a_forbidden_cut_is_loaded(tmp_path: Path) -> None:
    """Layers go to the nearest allowed partition, and nothing else differs."""
    case = Case(dynmo={"interval": 0})
    saved = run(2, save_and_continue, case, str(tmp_path), [0, 7, 8])
    loaded = run(2, load_and_continue, replace(case, dynmo=BY_HAND), str(tmp_path))
    assert [saved[0]["partition"], loaded[0]["partition"]] == [[0, 7, 8], [0, 6, 8]]
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


def stock_checkpoint(case: Case, folder: str, write: bool) -> dict[str, Any]:
    """Write a checkpoint without a "dynmo" section, or load it with one. Return the results of three more batches."""
    if write:
        engine = build(replace(case, dynmo=None, start=None))
        data = batches(engine)
        for _ in range(STEPS):
            engine.train_batch(data)
        engine.save_checkpoint(folder)
        return {"losses": [engine.train_batch(data).item() for _ in range(STEPS)]}
    engine = build(case)
    engine.load_checkpoint(folder)
    found = {"partition": engine.partition}
    return {**found, "losses": train_on(engine, STEPS)}


def test_a_stock_checkpoint_with_a_forbidden_cut_is_loaded(tmp_path: Path) -> None:
    """It is read at the partition where it was saved, [0, 4, 8]; then layers move on."""
    rules = {"interval": 0, "keep_together": [[3, 4]]}
    case = Case(dynmo=rules, clip=0.0)
    saved = run(2, stock_checkpoint, case, str(tmp_path), True)
    loaded = run(2, stock_checkpoint, case, str(tmp_path), False)
    assert loaded[0]["partition"] == [0, 3, 8]
    assert loaded[0]["losses"] == saved[0]["losses"]

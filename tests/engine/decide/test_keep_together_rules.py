"""Rules of layers that stay together hold at the start, in moves, re-packing and loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Return where an engine begins, where it is once there is a profile, and how fast it began by its measure."""
    engine = build(case)
    first, data = engine.partition, batches(engine)
    while engine.profile is None and engine.dynmo.enabled:
        engine.train_batch(data)
    found = {"first": first, "then": engine.partition, "reasons": [report.reason for report in reports_of(engine)]}
    if engine.profile is not None and engine.global_rank == 0:
        pipeline = DecisionInput.of(engine.profile).pipeline
        found["target"] = engine.rebalancer.decider.cost_model.first_seconds, pipeline.iteration_seconds(first)
    return found


# -- where training begins ----------------------------------------------------------------------------


FIRST: list[tuple[dict[str, Any], list[int]]] = [
    ({"keep_together": [[3, 4]], "enabled": False}, [0, 3, 8]),  # DeepSpeed's own is [0, 4, 8]
    ({"keep_together": [[1, 2, 3, 4, 5, 6, 7]]}, [0, 1, 8]),  # the only one that is allowed
    # Below, the best allowed partition is not the allowed one nearest to the best.
    ({"keep_together": [[4, 5]], "initial_partition": "type:block|head:4"}, [0, 6, 8]),
    ({"keep_together": [[3, 4, 5]], "initial_partition": "parameters"}, [0, 3, 6, 8]),
]
MORE_FIRST: list[tuple[dict[str, Any], list[int]]] = [
    ({"keep_together": [[3, 4]]}, [0, 3, 8]),
    ({"keep_together": [[0, 1]]}, [0, 4, 8]),
    ({"keep_together": ["type:^block", [3, 4]]}, [0, 6, 8]),  # layers 1 to 5 are blocks
    ({"keep_together": [[3, 4]], "initial_partition": "uniform"}, [0, 3, 6, 8]),
    ({"keep_together": [[1, 2, 3, 4]], "initial_partition": "uniform"}, [0, 1, 5, 8]),
]


@pytest.mark.parametrize("cases", [FIRST, pytest.param(MORE_FIRST, marks=pytest.mark.nightly)], ids=["some", "more"])
def test_the_first_partition_is_allowed_and_sets_the_target_speed(
    cases: list[tuple[dict[str, Any], list[int]]],
) -> None:
    for stages in (2, 3):
        here = [(block, first) for block, first in cases if len(first) == stages + 1]
        calls = [(Case(stages=stages, dynmo={"interval": 0, **block}),) for block, _ in here]
        for (block, first), ranks in zip(here, run_each(stages, begins_at, *calls)):
            assert all(rank["first"] == rank["then"] == first for rank in ranks), block
            assert ranks[0]["reasons"] == ([] if first == uniform(8, stages) else ["initial"]), block
            if first == [0, 1, 8]:  # a balanced partition would be faster
                target, as_it_is = ranks[0]["target"]
                assert target == as_it_is


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


# -- moves, re-packing --------------------------------------------------------------------------------


def repack_by_hand(case: Case, sizes: Sequence[Any], forbidden: Sequence[int] = ()) -> dict[str, Any]:
    """After each batch re-pack to the next of ``sizes``, numbers of stages or partitions. Train one more batch.

    Args:
        forbidden: a partition to ask for before that, by a rebalance and by a re-packing.
    """
    engine = build(case)
    data = batches(engine)
    found: dict[str, Any] = {"losses": [], "partitions": [], "errors": []}

    def ask(move: Callable[[Any], Any], to: Any) -> None:
        try:
            move(to)
        except PartitionError as error:
            found["errors"].append(str(error))

    for size in [*sizes, None]:
        found["losses"].append(engine.train_batch(data).item())
        if forbidden and engine.global_steps == 1:
            before = engine.partition
            ask(engine.rebalance, forbidden)
            ask(lambda to: engine.repack(partition=to), forbidden)
            assert engine.partition == before
        if size is not None:
            ask((lambda to: engine.repack(partition=to)) if isinstance(size, list) else engine.repack, size)
            if engine.released:
                return found
            found["partitions"].append(engine.partition)
    return found


def test_forbidden_partitions_are_refused_and_re_packing_makes_only_allowed_cuts() -> None:
    rules = {"keep_together": [[0, 1, 2], [3, 4], [5, 6, 7]]}
    case = Case(stages=3, dynmo={"interval": 0, **rules}, start=(0, 3, 5, 8))
    sizes = [2, [0, 4, 8], 3, 1]
    alone, ranks = run_each(3, repack_by_hand, (case, [3] * len(sizes)), (case, sizes, [0, 3, 7, 8]))
    found = ranks[0]
    assert [len(partition) - 1 for partition in found["partitions"]] == [2, 2, 2, 1]
    assert all(set(partition) <= {0, 3, 5, 8} for partition in found["partitions"])
    assert all("cuts before layer 7" in error and "has [5, 6, 7]" in error for error in found["errors"][:2])
    assert "cuts before layer 4" in found["errors"][2]
    assert "repack: 3 stages, there are 1 to 2 to go on with" in found["errors"][3] and len(found["errors"]) == 4
    assert all(rank["errors"][:2] == found["errors"][:2] for rank in ranks)
    assert found["losses"] == alone[0]["losses"]


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
    case = Case(dynmo={"interval": 0, "keep_together": [[3, 4]]}, clip=0.0)
    saved, loaded = run_each(2, stock_checkpoint, *((case, str(tmp_path), write) for write in (True, False)))
    assert loaded[0]["partition"] == [0, 3, 8]
    assert loaded[0]["losses"] == saved[0]["losses"]

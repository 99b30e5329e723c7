"""Freed ranks as further data-parallel replicas equal a job launched at that size from a checkpoint, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_dynmo.partitioners import uniform
from tests.distributed.harness import run
from tests.distributed.support.configs import Case
from tests.distributed.support.elastic import DIFFER, attributes, losses, merged
from tests.distributed.support.training import (
    batches,
    build,
    layers_of,
    micro_batch,
    sleeping_engine,
    state,
    use_virtual_clock,
)

SIZES, STEPS = {1: 2, 2: 1, 4: 3}, 5
BY_HAND = {"interval": 0, "repack": {"freed_ranks": "replicas", "release": "park"}}


def _micro_batches(replica: int, seed: int) -> Any:
    return (micro_batch(number, replica, seed) for number in itertools.count())


def train(
    case: Case,
    sizes: Mapping[int, int],
    steps: int,
    fresh_data: bool = False,
    evaluates: bool = True,
    saves: tuple[int, str] | None = None,
    evenly: bool = False,
) -> dict[str, Any]:
    """Train, and re-pack to so many stages after the steps of ``sizes``.

    Args:
        fresh_data: give each batch its own iterator, which begins where the engine says.
        saves: the step after which to save, and the folder.
        evenly: give stages equal numbers of layers, as at launch: with four replicas the order of sums depends on the
            partition.
    """
    engine = build(case)
    replica, data = engine.grid.get_data_parallel_id(), batches(engine)
    found: dict[str, Any] = {"losses": {}, "shapes": [], "before": [], "after": []}
    while engine.global_steps < steps:
        if fresh_data:
            data = (micro_batch(number, replica) for number in itertools.count(engine.micro_batches_taken))
        loss = engine.train_batch(data).item()
        found["losses"][engine.global_steps] = loss
        if engine.global_steps in sizes:
            if evaluates:
                found["before"].append(engine.eval_batch(_micro_batches(replica, seed=7)).item())
            stages = sizes[engine.global_steps]
            engine.repack(stages, partition=uniform(case.num_layers, stages) if evenly else None)
            if evaluates and not engine.released:
                found["after"].append(engine.eval_batch(_micro_batches(replica, seed=7)).item())
        if engine.released and not engine.wait_for_recall():
            return {**found, "state": {}, "attributes": {}}
        if saves is not None and engine.global_steps == saves[0]:
            engine.save_checkpoint(saves[1])
        found["shapes"].append((engine.num_stages, engine.grid.data_parallel_size, engine.micro_batches))
    found["state"], found["attributes"] = state(engine), attributes(engine)
    found["reports"] = engine.repacks
    engine.dismiss_parked()
    return found


def train_as_launched(case: Case, folder: str | None, first: int, last: int, num_replicas: int) -> dict[str, Any]:
    """Train batches ``first + 1`` to ``last`` from the checkpoint at ``first``, with the data of ``num_replicas``."""
    engine = build(case)
    if first:
        engine.load_checkpoint(folder)
    copy, replica = divmod(engine.grid.get_data_parallel_id(), num_replicas)
    own, whole = engine.micro_batches, engine.micro_batches * engine.grid.data_parallel_size // num_replicas
    losses = {}
    for step in range(first, last):
        numbers = range(step * whole + copy * own, step * whole + (copy + 1) * own)
        losses[step + 1] = engine.train_batch(iter([micro_batch(number, replica) for number in numbers])).item()
    if folder is not None:
        engine.save_checkpoint(folder)
    return {"losses": losses, "state": state(engine), "attributes": attributes(engine)}


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        pytest.param("fp32", 1, marks=pytest.mark.nightly),
        ("bf16 zero1", 1),
        pytest.param("bf16", 1, marks=pytest.mark.nightly),
        pytest.param("fp32", 2, marks=pytest.mark.nightly),
        pytest.param("bf16 zero1", 2, marks=pytest.mark.nightly),
    ],
)
def test_freed_stages_become_replicas(tmp_path: Path, precision: str, replicas: int) -> None:
    """4 stages, then two replicas of 2, four replicas of 1, and 4 again equal launches at these sizes."""
    case = Case(
        stages=4,
        replicas=replicas,
        precision=precision,
        micro_batches=4,
        tied=True,
        groups="two",
        scheduler=True,
        dynmo=BY_HAND,
    )
    repacked = run(case.ranks, train, case, {2: 2, 4: 1, 6: 4}, 8, False, True, None, True)
    first, expected = 0, {}
    for last, stages in [(2, 4), (4, 2), (6, 1), (8, 4)]:
        copies = 4 // stages
        launched = replace(case, stages=stages, replicas=replicas * copies, micro_batches=4 // copies)
        end = run(case.ranks, train_as_launched, launched, str(tmp_path), first, last, replicas)
        expected.update(losses(end))
        first = last
    assert losses(repacked) == expected
    assert merged(repacked) == merged(end)
    of_one = replicas
    assert repacked[0]["shapes"][1::2] == [(2, 2 * of_one, 2), (1, 4 * of_one, 1), (4, of_one, 4), (4, of_one, 4)]
    reports = repacked[0]["reports"]
    assert [report.replica_multiplier for report in reports] == [2, 4, 1]
    assert not any(report.released_ranks or report.recalled_ranks for report in reports)


def test_attributes_built_once_fit_two_replicas() -> None:
    case = Case(stages=4, precision="bf16 zero1", micro_batches=4, dynmo=BY_HAND)
    repacked = run(4, train, case, {1: 2}, 2, False, False)
    launched = replace(case, stages=2, replicas=2, micro_batches=2)
    built = run(4, train_as_launched, launched, None, 0, 2, 1)
    differ = {*DIFFER, "module.micro_offset"}  # it counts micro-batches of the first batch, too
    by_rank = {result["attributes"]["engine.global_rank"]: result["attributes"] for result in repacked}
    for result in built:
        expected = {name: value for name, value in result["attributes"].items() if name not in differ}
        found = by_rank[expected["engine.global_rank"]]
        assert {name: value for name, value in found.items() if name not in differ} == expected


@pytest.mark.nightly
def test_a_checkpoint_of_two_replicas_loads_in_a_launch_of_that_size(tmp_path: Path) -> None:
    case = Case(stages=4, precision="bf16 zero1", micro_batches=4, dynmo=BY_HAND)
    repacked = run(4, train, case, {1: 2}, 3, False, False, (2, str(tmp_path)))
    launched = replace(case, stages=2, replicas=2, micro_batches=2)
    resumed = run(4, train_as_launched, launched, str(tmp_path), 2, 3, 1)
    assert losses(resumed)[3] == losses(repacked)[3] and merged(resumed) == merged(repacked)


@pytest.mark.parametrize("fresh_data", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_replicas_share_the_samples_and_random_numbers_of_a_batch(fresh_data: bool) -> None:
    """Losses equal those of a run that keeps its stages, except for the order of sums."""
    case = Case(stages=4, micro_batches=4, dropout=True, dynmo=BY_HAND)
    kept = run(4, train, case, {}, STEPS)
    repacked = run(4, train, case, SIZES, STEPS, fresh_data)
    assert losses(repacked) == pytest.approx(losses(kept), rel=2e-5)
    first = repacked[0]
    assert [shape[:2] for shape in first["shapes"]] == [(2, 2), (1, 4), (1, 4), (3, 1), (3, 1)]
    assert first["before"] == pytest.approx(first["after"], rel=1e-6)  # evaluated on the same samples


def train_on_a_dataset(case: Case, sizes: Mapping[int, int], steps: int) -> dict[str, Any]:
    """Train with ``training_data``, which DeepSpeed gives only to the first and the last stage."""
    samples = [sample for number in range(40) for sample in zip(*micro_batch(number, 0))]
    engine = build(case, training_data=samples)
    losses = {}
    while engine.global_steps < steps:
        loss = engine.train_batch().item()
        losses[engine.global_steps] = loss
        if engine.global_steps in sizes:
            engine.repack(sizes[engine.global_steps])
        if engine.released and not engine.wait_for_recall():
            break
    engine.dismiss_parked()
    return {"losses": losses}


@pytest.mark.nightly
def test_replicas_share_the_samples_of_training_data() -> None:
    """DeepSpeed gives it only to the first and the last stage."""
    case = Case(stages=4, micro_batches=4, dynmo=BY_HAND)
    kept, repacked = (run(4, train_on_a_dataset, case, sizes, STEPS) for sizes in ({}, SIZES))
    assert losses(repacked) == pytest.approx(losses(kept), rel=2e-5)


def without_data_in_the_middle(case: Case) -> tuple[int, int]:
    """Train and re-pack where stages in the middle have no data iterator."""
    engine = build(case)
    data = batches(engine) if engine.is_first_stage() or engine.is_last_stage() else None
    engine.train_batch(data)
    engine.repack(2)
    if engine.released:
        return 0, 0
    engine.train_batch(data)
    engine.dismiss_parked()
    return engine.num_stages, engine.grid.data_parallel_size


def test_freed_ranks_are_parked_if_they_cannot_be_replicas() -> None:
    """A batch of 3 micro-batches cannot be halved, and a rank without data cannot read any."""
    case = Case(stages=4, micro_batches=3, dynmo=BY_HAND)
    found = run(4, train, case, {1: 2}, 2)
    assert [result["shapes"][1:] for result in found] == [[(2, 1, 3)], [], [], [(2, 1, 3)]]
    even = replace(case, micro_batches=4)
    assert run(4, without_data_in_the_middle, even) == [(2, 1), (0, 0), (0, 0), (2, 1)]


def repack_automatically(block: dict[str, Any], steps: int) -> list[tuple[int, int]]:
    """Return stages and replicas after each step, while sleeping layers become faster and slow again."""
    use_virtual_clock()
    stages = dist.get_world_size()
    engine, data = sleeping_engine(block, [0.012] * 8, stages)
    shapes = []
    while engine.global_steps < steps:
        share = {3: 0.3, 9: 1 / 0.3}.get(engine.global_steps)
        if share is not None:
            for module in layers_of(engine).values():
                module.seconds *= share
            engine.model_changed("as it was told")
        engine.train_batch(data)
        if engine.released and not engine.wait_for_recall():
            break
        shapes.append((engine.num_stages, engine.grid.data_parallel_size))
    engine.dismiss_parked()
    return shapes


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero_bubble", marks=pytest.mark.nightly)])
def test_automatic_repacking_makes_replicas_and_stages_again(schedule: str) -> None:
    """Decisions consider one pipeline. The throughput that further replicas add does not count."""
    repack = {"enabled": True, "freed_ranks": "replicas"}
    block = {"interval": 0, "profile": {"batches": 1}, "repack": repack, "schedule": {"kind": schedule}}
    shapes = run(4, repack_automatically, block, 12)
    assert len({tuple(of_rank) for of_rank in shapes}) == 1
    assert shapes[0][:3] == [(4, 1)] * 3 and shapes[0][-1] == (4, 1)
    stages, replicas = shapes[0][8]
    assert stages <= 2 and stages * replicas == 4  # 3 would be too slow by a quarter

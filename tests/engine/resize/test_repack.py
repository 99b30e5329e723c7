"""Re-packing during a run equals a restart from a checkpoint at the same steps, to the bit."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.case_runs import CASES, CaseRun
from tests.support.configs import Case
from tests.support.elastic import (
    DIFFER,
    losses,
    merged,
    train_alone,
    train_and_repack,
    train_case,
    train_through_checkpoint,
)
from tests.support.harness import run
from tests.support.training import batches, build, layers_of, sleeping_engine, use_virtual_clock

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("bf16 zero1", 2),
        *(pytest.param("fp32", replicas, marks=pytest.mark.nightly) for replicas in (1, 2)),
        pytest.param("bf16 zero1", 1, marks=pytest.mark.nightly),
    ],
)
def test_shrinking_equals_restarts_from_checkpoints(tmp_path: Path, precision: str, replicas: int) -> None:
    sizes, steps = {2: 3, 4: 2, 6: 1}, 8
    case = Case(stages=4, replicas=replicas, precision=precision, tied=precision == "fp32", groups="two")
    repacked = run(case.ranks, train_and_repack, case, sizes, steps)
    first, expected = 0, {}
    for last, stages in [(2, 4), (4, 3), (6, 2), (8, 1)]:
        smaller = Case(**{**vars(case), "stages": stages})
        end = run(smaller.ranks, train_through_checkpoint, smaller, str(tmp_path), first, last)
        expected.update(losses(end))
        first = last
    assert losses(repacked) == expected
    assert merged(repacked) == merged(end)


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("bf16 zero1", 2),
        pytest.param("fp32", 1, marks=pytest.mark.nightly),
        pytest.param("fp32", 2, marks=pytest.mark.nightly),
        pytest.param("bf16 zero1", 1, marks=pytest.mark.nightly),
        pytest.param("bf16", 1, marks=pytest.mark.nightly),
    ],
)
def test_fewer_ranks_train_as_all_would(precision: str, replicas: int) -> None:
    """4 -> 2 -> 1 stages equal a run without re-packing: learning rates, data and random numbers, too."""
    clip = 0.0 if "zero1" in precision else 1.0  # ZeRO sums the norm over its shards, which differ between stages
    case = Case(
        stages=4,
        replicas=replicas,
        precision=precision,
        tied=True,
        groups="two",
        scheduler=True,
        dropout=True,
        clip=clip,
    )
    fewer = run(case.ranks, train_and_repack, case, {2: 2, 4: 1}, 6)
    stayed = run(case.ranks, train_alone, case, 6)
    assert losses(fewer) == losses(stayed)
    assert merged(fewer) == merged(stayed)
    assert fewer[0]["evaluation"] == stayed[0]["evaluation"]
    assert {rank: result["released"] for rank, result in enumerate(fewer) if "released" in result} == {
        rank: 4 if rank >= 3 * replicas else 2 for rank in range(replicas, 4 * replicas)
    }
    assert "was released after step 2" in fewer[replicas]["refused"]
    reports = fewer[0]["reports"]
    assert [(r.old_stages, r.new_stages) for r in reports] == [(4, 2), (2, 1)]
    assert [r.released_ranks for r in reports] == [
        tuple(range(replicas, 3 * replicas)),
        tuple(range(3 * replicas, 4 * replicas)),
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
def test_attributes_built_once_fit_the_new_world(precision: str) -> None:
    """All plain attributes of engine, module, grid and optimizer equal those of an engine built at that size."""
    case = Case(stages=4, precision=precision)
    for sizes, stages in [({1: [0, 4, 8]}, 2), ({1: 1}, 1), ({1: [0, 3, 6, 8], 2: [0, 4, 8]}, 2)]:
        repacked = run(4, train_and_repack, case, sizes, 3)
        built = run(stages, train_alone, Case(stages=stages, precision=precision), 3)
        remaining = [result["attributes"] for result in repacked if result["attributes"]]
        for found, expected in zip(remaining, [result["attributes"] for result in built], strict=True):
            assert {k: v for k, v in found.items() if k not in DIFFER} == {
                k: v for k, v in expected.items() if k not in DIFFER
            }


def use_after_repacking(case: Case) -> Any:
    """Profile, decide, move and save after a re-packing."""
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    with torch.inference_mode():  # as in an evaluation; what arrives trains nevertheless
        engine.repack(2)
    if engine.released:
        return None
    for partition in ([0, 1, 8], [0, 7, 8]):
        engine.rebalance(partition)
        engine.train_batch(data)
    report = engine.rebalance()
    return len(report.new_partition) - 1, engine.profile.partition, engine.grid.pipe_parallel_size


def test_profiles_decisions_moves_and_checkpoints_work_after_a_repacking() -> None:
    found = [result for result in run(4, use_after_repacking, Case(stages=4)) if result is not None]
    assert len(found) == 2
    assert all(stages == 2 and len(profiled) == 3 and size == 2 for stages, profiled, size in found)


def repack_by_itself(
    block: dict[str, Any], milliseconds: Sequence[float], later: Mapping[int, float], steps: int
) -> Any:
    """Train sleeping layers whose seconds change by a factor after the steps of ``later``."""
    use_virtual_clock()
    stages = dist.get_world_size()
    engine, data = sleeping_engine(block, [ms / 1000 for ms in milliseconds], stages)
    sizes = {}
    while engine.global_steps < steps:
        if engine.global_steps in later:
            share = later[engine.global_steps]
            for module in layers_of(engine).values():
                module.seconds *= share
            engine.model_changed("pruned")
        engine.train_batch(data)
        if engine.released:
            return None
        sizes[engine.global_steps] = engine.num_stages
    return sizes, [(r.step, r.reason, r.old_stages, r.new_stages, r.verdict) for r in engine.repacks]


@pytest.mark.parametrize(
    ("kind", "stages"), [("1f1b", 2), ("v", 3), pytest.param("loop", 3, marks=pytest.mark.nightly)]
)
def test_automatic_repacking_shrinks(tmp_path: Path, kind: str, stages: int) -> None:
    """At 0.7 of their time layers need ``stages`` of four, and at 0.21 one. Batches with a re-packing have no trace.

    In a V and a loop stages hardly wait, so they need more of them to be as fast as at first.
    """
    path = tmp_path / "trace.json"
    block = {
        "interval": 0,
        "schedule": kind,
        "repack": {"enabled": True, "max_slowdown": 0.1},
        "trace": {"path": str(path), "steps": [1, 10]},
    }
    results = run(4, repack_by_itself, block, [8.0] * 8, {3: 0.7, 6: 0.3}, 10)
    sizes, reports = results[0]
    assert [(reason, old, new) for _, reason, old, new, _ in reports] == [
        ("pruned", 4, stages),
        ("pruned", stages, 1),
    ]
    assert (sizes[3], sizes[5], sizes[10]) == (4, stages, 1)
    traced = {
        event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["name"].startswith("step ")
    }
    assert len(traced) == 10 - len(reports)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("automatic freezing", marks=pytest.mark.nightly),
        "egeria and pruning",
        pytest.param("freezing and pruning", marks=pytest.mark.nightly),
        pytest.param("egeria", marks=pytest.mark.nightly),
        pytest.param("moe bias and freezing", marks=pytest.mark.nightly),
        pytest.param("halves, automatic freezing, pruning and qk-sparse attention", marks=pytest.mark.nightly),
    ],
)
def test_state_that_a_rank_holds_for_itself_survives(name: str) -> None:
    """Such as gradients that it has summed, a verdict that it waits for, and the number of frozen layers."""
    case_run = CaseRun(CASES[name], stages=3, steps=6)
    fewer = run(3, train_case, case_run, {1: 2, 2: 1})
    stayed = run(3, train_case, case_run, {})
    assert losses(fewer) == losses(stayed)
    assert merged(fewer) == merged(stayed)


def same_number(case: Case) -> Any:
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    report = engine.repack(partition=[0, 1, 8])
    engine.train_batch(data)
    return engine.partition, report.new_partition, report.layers_moved


def test_a_repacking_to_the_same_number_of_stages_is_a_move() -> None:
    for partition, reported, moved in run(2, same_number, Case(stages=2)):
        assert partition == [0, 1, 8] and reported == (0, 1, 8) and moved == 3


def connections_after_repacking(case: Case) -> tuple[int, int, list[str]]:
    """Return the most groups of the world before that are left, the number of those, and the names of present ones."""
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    before = [weakref.ref(group) for group in vars(engine.grid).values() if isinstance(group, dist.ProcessGroup)]
    engine.repack(2)
    if engine.released:
        return 0, len(before), []
    engine.train_batch(data)
    gc.collect()
    names = engine.migrator.make_context().references._names
    groups = [group for group in vars(engine.grid).values() if isinstance(group, dist.ProcessGroup)]
    return sum(group() is not None for group in before), len(before), [str(names.of(group)) for group in groups]


def test_groups_of_the_world_before_are_freed_and_the_present_ones_have_their_names() -> None:
    """They would keep the connections to ranks that have left, and threads."""
    for left, before, names in run(3, connections_after_repacking, Case(stages=3)):
        assert left == 0 and before > 3
        assert all(name.startswith("the PipelineModule._grid.") for name in names), names

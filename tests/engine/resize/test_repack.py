"""Re-packing during a run equals a restart from a checkpoint at the same steps, to the bit."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
)
from tests.support.harness import run
from tests.support.training import batches, build, layers_of, sleeping_engine, use_virtual_clock

pytestmark = pytest.mark.ranks


def train_saving(case: Case, folder: str) -> dict[str, Any]:
    return train_and_repack(case, {1: 2, 2: 1}, 3, folder=folder)


def restart(case: Case, folder: str, step: int) -> dict[str, Any]:
    return train_and_repack(case, {}, 3, folder=folder, first=step)


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("bf16 zero1", 1),
        *(
            pytest.param(*variant, marks=pytest.mark.nightly)
            for variant in (("bf16 zero1", 2), ("fp32", 1), ("fp32", 2))
        ),
    ],
)
def test_shrinking_equals_restarts_from_checkpoints(tmp_path: Path, precision: str, replicas: int) -> None:
    case = Case(
        stages=3, replicas=replicas, precision=precision, tied=precision == "fp32", groups="two", micro_batches=2
    )
    repacked = run(case.ranks, train_saving, case, str(tmp_path))
    for step, stages in ((1, 2), (2, 1)):
        smaller = replace(case, stages=stages)
        restarted = run(smaller.ranks, restart, smaller, str(tmp_path), step)
        assert losses(restarted) == {number: loss for number, loss in losses(repacked).items() if number > step}
    assert merged(restarted) == merged(repacked)


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("bf16 zero1", 2),
        *(
            pytest.param(*variant, marks=pytest.mark.nightly)
            for variant in (("fp32", 1), ("fp32", 2), ("bf16 zero1", 1), ("bf16", 1))
        ),
    ],
)
def test_fewer_ranks_train_as_all_would(precision: str, replicas: int) -> None:
    """3 -> 2 -> 1 stages equal a run without re-packing: learning rates, data and random numbers, too."""
    clip = 0.0 if "zero1" in precision else 1.0  # ZeRO sums the norm over its shards, which differ between stages
    case = Case(stages=3, replicas=replicas, precision=precision, tied=True, groups="two", scheduler=True, clip=clip)
    case = replace(case, dropout=True, micro_batches=2)
    fewer = run(case.ranks, train_and_repack, case, {1: 2, 2: 1}, 3)
    stayed = run(case.ranks, train_alone, case, 3)
    assert losses(fewer) == losses(stayed)
    assert merged(fewer) == merged(stayed)
    assert fewer[0]["evaluation"] == stayed[0]["evaluation"]
    first, then = range(replicas, 2 * replicas), range(2 * replicas, 3 * replicas)  # ranks that leave
    released = {rank: found["released"] for rank, found in enumerate(fewer) if "released" in found}
    assert released == {**dict.fromkeys(first, 1), **dict.fromkeys(then, 2)}
    assert "was released after step 1" in fewer[replicas]["refused"]
    reports = fewer[0]["reports"]
    assert [(report.old_stages, report.new_stages) for report in reports] == [(3, 2), (2, 1)]
    assert [report.released_ranks for report in reports] == [tuple(first), tuple(then)]


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


def groups_of(engine: Any) -> list[Any]:
    return [group for group in vars(engine.grid).values() if isinstance(group, dist.ProcessGroup)]


def use_after_repacking(case: Case) -> Any:
    """Move, profile and decide after a re-packing; return how many groups of the world before are left, too."""
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    before = [weakref.ref(group) for group in groups_of(engine)]
    with torch.inference_mode():  # as in an evaluation; what arrives trains nevertheless
        engine.repack(2)
    if engine.released:
        return None
    for partition in ([0, 1, 8], [0, 7, 8]):
        engine.rebalance(partition)
        engine.train_batch(data)
    report = engine.rebalance()
    gc.collect()
    left = sum(group() is not None for group in before)
    names = engine.migrator.make_context().references._names
    sizes = len(report.new_partition) - 1, len(engine.profile.partition) - 1, engine.grid.pipe_parallel_size
    return sizes, left, len(before), [str(names.of(group)) for group in groups_of(engine)]


def test_profiles_decisions_and_moves_work_after_a_repacking() -> None:
    """Groups of that would keep the connections to ranks that have left, and threads; the present ones have names."""
    found = [result for result in run(3, use_after_repacking, Case(stages=3)) if result is not None]
    assert len(found) == 2
    for sizes, left, before, names in found:
        assert sizes == (2, 2, 2) and left == 0 and before > 3
        assert len(names) > 3 and all(name.startswith("the PipelineModule._grid.") for name in names), names


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
    ("kind", "stages"), [("1f1b", 2), *(pytest.param(kind, 3, marks=pytest.mark.nightly) for kind in ("v", "loop"))]
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
        "trace": {"path": str(path), "steps": [1, 8]},
    }
    results = run(4, repack_by_itself, block, [8.0] * 8, {3: 0.7, 6: 0.3}, 8)
    sizes, reports = results[0]
    assert [(reason, old, new) for _, reason, old, new, _ in reports] == [
        ("pruned", 4, stages),
        ("pruned", stages, 1),
    ]
    assert (sizes[3], sizes[5], sizes[8]) == (4, stages, 1)
    traced = {
        event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["name"].startswith("step ")
    }
    assert len(traced) == 8 - len(reports)


@pytest.mark.parametrize(
    "name",
    [
        "egeria and pruning",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (
                *("automatic freezing", "freezing and pruning", "egeria", "moe bias and freezing"),
                "halves, automatic freezing, pruning and qk-sparse attention",
            )
        ),
    ],
)
def test_state_that_a_rank_holds_for_itself_survives(name: str) -> None:
    """Such as gradients that it has summed, a verdict that it waits for, and the number of frozen layers."""
    case_run = CaseRun(CASES[name], stages=3, steps=6)
    fewer = run(3, train_case, case_run, {1: 2, 2: 1})
    stayed = run(3, train_case, case_run, {})
    assert losses(fewer) == losses(stayed)
    assert merged(fewer) == merged(stayed)

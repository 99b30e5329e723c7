"""Decisions of the running engine: by iteration time, with uneven stages, under jitter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynmo.errors import PartitionError
from tests.support.harness import run, run_each
from tests.support.told_clock import unsteady_engine
from tests.support.training import Warnings, reports_of

pytestmark = pytest.mark.ranks


def train_unsteady(
    block: dict[str, Any],
    milliseconds: Sequence[tuple[float, float]],
    steps: int,
    slowdowns: Sequence[float],
    jitter: float = 0.0,
) -> tuple[Any, dict[str, Any]]:
    """Return the engine, and what became of it."""
    seconds = [(forward / 1e3, backward / 1e3) for forward, backward in milliseconds]
    engine, data = unsteady_engine(block, seconds, slowdowns, jitter)
    for step in range(steps):
        for layer in engine.module.forward_funcs:
            layer.batch = step
        engine.train_batch(data)
    return engine, {"partition": engine.partition, "reports": reports_of(engine)}


def reported(*settings: Any) -> dict[str, Any]:
    return train_unsteady(*settings)[1]


def test_makespan_decides_by_iteration_time_and_says_so() -> None:
    # No partition has a smaller bottleneck than [0, 2, 4, 6], but one stage is busy forward, the next backward.
    milliseconds = [(4.0, 0.0), (4.0, 2.0), (8.0, 0.0), (2.0, 16.0), (16.0, 0.0), (16.0, 2.0)]
    ranks = run(3, reported, {"interval": 3, "balancer": "makespan"}, milliseconds, 6, [1.0] * 3)
    report = ranks[0]["reports"][0]
    assert report.moved and report.step == 5 and report.verdict == "worth it"
    assert report.iteration_seconds_after < 0.9 * report.iteration_seconds_before
    assert all(result["partition"] == [0, 4, 5, 6] for result in ranks)
    assert report.schedule_splits is None and report.lower_bound_seconds is None
    assert report.schedule.startswith("1f1b, predicted") and 0 < report.bubble_ratio_after < 1


def uneven(folder: str, starts: Sequence[list[int]]) -> dict[str, Any]:
    """Train and save, load, and decide by hand, with another balancer, from each of ``starts`` in turn."""
    milliseconds, slowdowns = [(2.0, 4.0)] * 15, [1.0, 2.5, 1.0]
    engine, result = train_unsteady({"interval": 3, "balancer": "makespan"}, milliseconds, 10, slowdowns)
    engine.save_checkpoint(folder)
    seconds = [(forward / 1e3, backward / 1e3) for forward, backward in milliseconds]
    again, data = unsteady_engine({"interval": 0, "balancer": "diffusion"}, seconds, slowdowns, 0.0)
    again.load_checkpoint(folder)
    models = [one.rebalancer.decider.cost_model for one in (engine, again)]
    result["known"] = [(model.history.speeds, model.state_dict()) for model in models]  # on rank 0
    result["went"] = [again.partition]
    for start in starts:
        again.rebalance(start)
        for _ in range(3):  # includes one to warm up and one to profile the outcome of the move
            again.train_batch(data)
        result["went"].append(again.rebalance().new_partition)
    return result


def test_a_slow_stage_gets_fewer_layers_also_after_resuming(tmp_path: Path) -> None:
    """By makespan at intervals, and by diffusion by hand, which ignores the cost of moves."""
    result, *others = run(3, uneven, str(tmp_path), [[0, 4, 11, 15]])
    assert all(other["went"] == result["went"] for other in others)
    assert result["went"][0] == result["partition"]
    assert all(last - first <= 3 for _, first, last, _ in result["went"]), result["went"]
    (speeds, learnt), resumed = result["known"]
    assert speeds[1] == pytest.approx(0.4 * speeds[0], rel=0.01)
    assert resumed == (speeds, learnt)
    assert len(learnt["moves"]) + (learnt["moved_bytes"] is not None) == sum(r.moved for r in result["reports"])


def decide_first(block: dict[str, Any], call: str) -> dict[str, Any]:
    """Call ``engine.rebalance()`` or ``engine.repack()`` before any batch is trained."""
    milliseconds = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0]
    engine, data = unsteady_engine(block, [(ms / 1e3, 2 * ms / 1e3) for ms in milliseconds], [1.0] * 2, 0.0)
    engine.set_dataiterator(data)
    try:
        returned = getattr(engine, call)()
    except PartitionError as error:
        returned = str(error)
    result = {"returned": returned, "rebalances": engine.reports, "repacks": engine.repacks}
    result.update(steps=engine.global_steps, released=engine.released, profiled=engine.profile is not None)
    if not engine.released:
        result["partition"] = engine.partition
        engine.train_batch(data)
        result["rebalances later"] = engine.reports[len(result["rebalances"]) :]
    return result


def test_a_rebalance_without_a_profile_decides_once(tmp_path: Path) -> None:
    """A re-packing too; and one that does not fit leaves no pending decision."""
    paths = [tmp_path / name for name in ("first.jsonl", "second.jsonl")]
    *decided, refused, (stays, leaves) = run_each(
        2,
        decide_first,
        ({"interval": 1, "report": str(paths[0])}, "rebalance"),
        ({"interval": 0, "report": str(paths[1]), "profile": {"batches": 2}}, "rebalance"),
        ({"interval": 0, "memory_limit": "50B"}, "rebalance"),
        ({"interval": 1, "repack": {"max_slowdown": 0.5, "enabled": True}}, "repack"),
    )
    for steps, ranks, path in zip((1, 2), decided, paths):
        for rank, result in enumerate(ranks):
            assert result["rebalances"] == ([] if rank else [result["returned"]])
            report = result["returned"]
            assert (report.reason, report.old_partition, report.new_partition) == ("by hand", (0, 3, 6), (0, 5, 6))
            assert report.layers_moved == 2 and report.bytes_moved > 0 and report.profile_seconds > 0
            assert result["partition"] == [0, 5, 6] and result["steps"] == steps
            assert [later.reason for later in result["rebalances later"]] in ([], ["interval"][: 2 - steps])
        kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
        assert kinds[:4] == ["measured", "schedule", "rebalance", "profile"]
    for result in refused:
        assert "bytes" in result["returned"] and result["partition"] == [0, 3, 6]
        assert result["rebalances"] == result["rebalances later"] == [] and result["profiled"]
    (report,) = stays["repacks"]
    assert stays["rebalances"] == leaves["rebalances"] == leaves["repacks"] == [] and leaves["released"]
    assert report.reason == "by hand" and report == stays["returned"]
    assert report.old_partition == (0, 3, 6) and report.new_partition == (0, 6) and report.layers_moved == 3


def move_after_a_profile() -> list[Any]:
    """Move layers by hand while a profile is on its way. Return the profile after each batch, outcomes, warnings."""
    block = {"interval": 2, "migration": "background", "profile": {"batches": 1, "warmup_batches": 1}}
    engine, data = unsteady_engine(block, [(0.001, 0.002)] * 5 + [(0.005, 0.01)], [1.0] * 2, 0.0)
    found, warnings = [], Warnings()
    for step in range(1, 6):
        engine.train_batch(data)
        if step == 2:
            engine.rebalance([0, 1, 6])
        found.append(engine.profile and (engine.profile.step, engine.profile.partition))
    return [*found, [measured.step for measured in engine.measurements], warnings.messages]


def test_a_profile_of_where_layers_were_is_dropped() -> None:
    """That of batch 2 would be read after batch 3."""
    for rank, found in enumerate(run(2, move_after_a_profile)):
        assert found == [None, None, None, None, (4, (0, 1, 6)), [] if rank else [4], []]


def skip_a_layer(block: dict[str, Any], skipped: int, steps: int) -> dict[str, Any]:
    """Train a module that skips a layer in the first batches, as stochastic depth may, and rebalance."""
    engine, data = unsteady_engine(block, [(0.001, 0.002)] * 3 + [(0.005, 0.01)], [1.0] * 2, 0.0)
    module = engine.module

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        leaves_out = engine.global_steps < steps
        for position, layer in enumerate(module.forward_funcs):
            if not (leaves_out and engine.stage.layers.indices[position] == skipped):
                hidden = layer(hidden)
        return hidden

    module.forward = forward
    engine.set_dataiterator(data)
    warnings = Warnings()
    for _ in range(steps - 1):
        engine.train_batch(data)
    found = {"batches": engine.global_steps, "profile": engine.profile, "partition": engine.partition}
    try:
        engine.rebalance()
    except PartitionError as error:
        found["refused"] = str(error)
    found["steps"] = engine.global_steps
    engine.rebalance()
    return {**found, "partition later": engine.partition, "warned": [*warnings.messages]}


def test_a_layer_that_did_not_run_does_not_end_training() -> None:
    missing = "layer 1 has no measured forward seconds"
    settings = [(1, "blocking", 4), (0, "background", 3)]
    blocks = [{"interval": at, "migration": kind, "profile": {"warmup_batches": 0}} for at, kind, _ in settings]
    runs = run_each(2, skip_a_layer, *((block, 1, 4) for block in blocks))
    for results, (*_, warnings) in zip(runs, settings):
        assert len(results[0]["warned"]) == warnings and not results[1]["warned"]
        assert all(missing in text for text in results[0]["warned"])
        for result in results:
            assert result["batches"] == 3 and result["profile"] is None and result["partition"] == [0, 2, 4]
            assert missing in result["refused"] and result["steps"] == 4
            assert result["partition later"] == [0, 3, 4]


def test_jitter_moves_nothing() -> None:
    # The small layer between the stages may be on either side: jitter of 10% decides which looks better.
    milliseconds = [*[(3.0, 6.0)] * 3, (0.5, 1.0), *[(3.0, 6.0)] * 3]
    results = run(2, reported, {"interval": 2}, milliseconds, 9, [1.0] * 2, 0.1)
    assert len(results[0]["reports"]) == 4
    assert all(result["partition"] == [0, 4, 7] for result in results)

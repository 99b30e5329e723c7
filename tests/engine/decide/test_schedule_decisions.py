"""Decisions under our own schedules choose the shortest simulated iteration, and report it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_dynmo
from ds_dynmo.cli.plotting.timelines import around
from ds_dynmo.cli.run_records import read_report
from ds_dynmo.engine.decide import decider
from ds_dynmo.engine.run.schedule_in_force import with_some_split
from ds_dynmo.plan import RebalanceReport
from ds_dynmo.schedules import peak_bytes, schedule_for_equal_costs
from tests.support import told_clock
from tests.support.harness import run
from tests.support.told_clock import UnsteadyLayer, unsteady_engine
from tests.support.training import gather

pytestmark = pytest.mark.ranks

SECONDS = [(4.0, 0.0), (4.0, 2.0), (8.0, 1.0), (2.0, 16.0), (16.0, 0.5), (16.0, 2.0), (1.0, 1.0)]


class SplitLayer(UnsteadyLayer):
    """A layer whose backward pass has two parts of equal seconds."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.anchor = torch.empty(0, requires_grad=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return SplitSleep.apply(hidden, (self,), self.anchor)  # type: ignore[no-any-return]


class SplitSleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layers: tuple[SplitLayer], anchor: torch.Tensor) -> torch.Tensor:
        (layer,) = layers
        ctx.layer, ctx.weight = layer, layer.weight
        ctx.save_for_backward(hidden)
        layer.sleep(layer.forward_seconds)
        return hidden * layer.weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (hidden,) = ctx.saved_tensors
        layer = ctx.layer
        layer.sleep(layer.backward_seconds / 2)

        def weight_gradient() -> torch.Tensor:
            layer.sleep(layer.backward_seconds / 2)
            return (hidden * gradient).sum(0)

        ds_dynmo.defer_weight_gradient(ctx.weight, weight_gradient, held_bytes=hidden.nbytes)
        return gradient * ctx.weight, None, None


def decided(block: dict[str, Any]) -> Any:
    told_clock.UnsteadyLayer = SplitLayer  # type: ignore[misc]
    engine, data = unsteady_engine({"interval": 0, **block}, SECONDS, [1.0] * 3, 0.0)
    for _ in range(2):
        engine.train_batch(data)
    reports = [engine.rebalance()]
    engine.train_batch(data)
    reports.append(engine.rebalance())
    engine.train_batch(data)
    running = engine.stage.schedule.running
    given = engine.rebalancer.decider.input(engine.profile, None, assume_running_schedule=False)
    every = [(0, *inner, 7) for inner in itertools.combinations(range(1, 7), 2)]
    seconds = {partition: given.pipeline.iteration_seconds(partition) for partition in every}
    return gather((reports, seconds, engine.partition, running and running.hash))


def test_decisions_choose_the_shortest_simulated_iteration(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    block = {"schedule": {"kind": "zero_bubble"}, "min_improvement": 0.0, "report": str(report)}
    results = run(3, decided, block)[0]
    (first, again), seconds, partition, _ = results[0]
    assert all(result[1:] == results[0][1:] for result in results), "ranks differ"
    assert first.moved and tuple(partition) == first.new_partition
    shortest = min(seconds.values())
    assert seconds[tuple(partition)] == pytest.approx(shortest, rel=0.005)
    assert first.iteration_seconds_after == pytest.approx(seconds[tuple(partition)], rel=0.005)
    assert first.iteration_seconds_before > first.iteration_seconds_after >= first.lower_bound_seconds
    assert first.bubble_ratio_before > first.bubble_ratio_after > 0
    assert first.schedule_splits > 0 and first.schedule.startswith("zero_bubble")
    assert not again.moved and again.schedule_splits is not None
    assert again.iteration_seconds_before == pytest.approx(first.iteration_seconds_after)
    assert first.as_record()["schedule"] == first.schedule
    records = read_report(report)
    decisions = records.decisions
    drawn = [batch.seconds for batch in around(records, first.step)]
    assert drawn == [pytest.approx(first.iteration_seconds_before), pytest.approx(first.iteration_seconds_after)]
    assert decisions[0].order_before == schedule_for_equal_costs(3, decisions[0].order_before.micro_batches)
    for decision, found in zip(decisions, (first, again), strict=True):
        assert decision.order_after is not None and decision.order_after.splits == found.schedule_splits


def under_a_limit(report: str) -> Any:
    """What stages hold under the orders for one partition: without a limit, and with one that this order exceeds."""
    told_clock.UnsteadyLayer = SplitLayer  # type: ignore[misc]
    block = {"interval": 0, "schedule": {"kind": "zero_bubble"}, "report": report}
    engine, data = unsteady_engine(block, SECONDS, [1.0] * 3, 0.0)
    engine.train_batch(data), engine.rebalance()
    needed: list[list[int]] = []
    orders = []
    for limit in (None, 0.9):
        engine.rebalancer.decider.memory.limit = limit and int(limit * max(needed[0]))
        engine.rebalance(engine.partition)
        engine.train_batch(data)
        order, layers = engine.stage.schedule.schedule_for(engine.stage.placement, 4), engine.profile.layers
        orders.append(order)
        passes = engine.rebalancer.decider.input(engine.profile, None, assume_running_schedule=False).pipeline.passes
        held = peak_bytes(order, passes.layers.sizes(engine.stage.placement))
        owned = map(engine.stage.placement.layers_of, range(3))
        needed.append([sum(layers[i].static_bytes for i in own) + more for own, more in zip(owned, held)])
    return gather((needed, engine.rebalancer.decider.memory.limit, orders))


def test_an_order_stays_within_the_memory_limit(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    (free, limited), limit, orders = run(3, under_a_limit, str(report))[0][0]
    assert max(limited) <= limit < max(free)
    _, without_limit, within = read_report(report).decisions
    assert [without_limit.order_after, within.order_before, within.order_after] == [orders[0], *orders]
    assert orders[0] != orders[1]


def rank_0_decides() -> Any:
    """Decide where other ranks than rank 0 would fail to."""
    told_clock.UnsteadyLayer = SplitLayer  # type: ignore[misc]
    engine, data = unsteady_engine({"interval": 0, "schedule": {"kind": "zero_bubble"}}, SECONDS, [1.0] * 3, 0.0)
    engine.train_batch(data)
    decide = decider.decide
    if engine.global_rank > 0:
        decider.decide = None  # type: ignore[assignment]
    report = engine.rebalance()
    decider.decide = decide
    found = engine.stage.schedule.next(engine.stage.placement, 4)
    engine.train_batch(data)
    said = report.new_partition, report.iteration_seconds_after, report.verdict
    return gather((found.schedule.hash, found.costs, said, engine.partition, len(engine.reports)))


def test_rank_0_decides_on_the_order_and_the_costs_for_all() -> None:
    results = run(3, rank_0_decides)[0]
    assert results[0][:4] == results[1][:4] == results[2][:4]
    assert results[0][0] != schedule_for_equal_costs(3, 4).hash and results[0][1] is not None
    assert [kept for *_, kept in results] == [1, 0, 0]


def test_reports_name_1f1b_if_it_is_in_force() -> None:
    report: RebalanceReport = run(3, decided, {"min_improvement": 0.0})[0][0][0][0]
    assert report.schedule_splits is None and report.lower_bound_seconds is None
    assert report.schedule.startswith("1f1b, predicted")
    assert 0 < report.bubble_ratio_after < 1


def repacked(step: int, partition: list[int]) -> Any:
    """Re-pack after ``step``. Return, per step, the order that ran and the shortest one by the profile."""
    told_clock.UnsteadyLayer = SplitLayer  # type: ignore[misc]
    block = {"interval": 0, "schedule": {"kind": "zero_bubble"}}
    engine, data = unsteady_engine(block, SECONDS, [1.0] * 3, 0.0)
    seen, found = {}, None
    while engine.global_steps < 4:
        engine.train_batch(data)
        seen[engine.global_steps] = engine.stage.schedule.running, found and found.schedule
        if engine.global_steps == step:
            engine.rebalance()
            engine.repack(partition=partition)
        if engine.released:
            break
        if engine.profile is not None:
            given = engine.rebalancer.decider.input(engine.profile, None, assume_running_schedule=False)
            found = given.pipeline.shortest_schedule(engine.partition)
    return seen, engine.repacks, found and found.iteration_seconds


def test_after_a_repacking_the_order_comes_from_the_profile() -> None:
    results = run(3, repacked, 2, [0, 3, 7])
    seen, reports, iteration_seconds = results[0]
    (released,) = (rank for rank, result in enumerate(results) if len(result[0]) < 4)
    assert all(result[0] == seen for rank, result in enumerate(results) if rank != released)
    ran, found = seen[4]
    assert ran in (found, with_some_split(found)), "a profiled batch splits some more"
    assert found != schedule_for_equal_costs(2, 4)
    assert reports[0].iteration_seconds_after == pytest.approx(iteration_seconds)


def sent_to(partitions: list[list[int]]) -> Any:
    """Go to the first before there is a profile; by partition, the order that ran and the one to be found."""
    told_clock.UnsteadyLayer = SplitLayer  # type: ignore[misc]
    block = {"interval": 0, "schedule": {"kind": "zero_bubble"}}
    engine, data = unsteady_engine(block, SECONDS, [1.0] * 3, 0.0)
    seen, reports = [], []
    for partition in partitions:
        reports.append(engine.rebalance(partition))
        given = engine.profile and engine.rebalancer.decider.input(engine.profile, None, assume_running_schedule=False)
        engine.train_batch(data)
        found = given and given.pipeline.shortest_schedule(partition)
        seen.append((engine.stage.schedule.running, found))
        if engine.profile is None:
            engine.rebalance()
    return gather((reports, seen))


def test_an_explicit_partition_gets_its_own_order() -> None:
    partitions = [[0, 1, 2, 7], [0, 2, 5, 7], [0, 3, 4, 7]]
    results = run(3, sent_to, partitions)[0]
    reports, seen = results[0]
    assert all([ran for ran, _ in theirs] == [ran for ran, _ in seen] for _, theirs in results), "ranks differ"
    assert seen[0] == (schedule_for_equal_costs(3, 4), None) and reports[0].schedule == ""
    for report, (ran, found) in zip(reports[1:], seen[1:], strict=True):
        assert ran in (found.schedule, with_some_split(found.schedule))
        assert report.iteration_seconds_after == pytest.approx(found.iteration_seconds)
        assert report.lower_bound_seconds == pytest.approx(found.lower_bound_seconds)
        assert report.schedule_splits == found.schedule.splits and report.decide_seconds > 0

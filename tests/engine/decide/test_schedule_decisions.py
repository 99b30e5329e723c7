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
from ds_dynmo.schedules import Schedule, peak_bytes, schedule_for_equal_costs
from tests.support import told_clock
from tests.support.harness import run
from tests.support.told_clock import UnsteadyLayer, unsteady_engine

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


def trained(report: str) -> dict[str, Any]:
    """Go to a partition before there is a profile, decide twice, go to two others, keep to a limit, and re-pack."""
    told_clock.UnsteadyLayer = SplitLayer  # type: ignore[misc]
    block = {"interval": 0, "schedule": {"kind": "zero_bubble"}, "min_improvement": 0.0, "report": report}
    engine, data = unsteady_engine(block, SECONDS, [1.0] * 3, 0.0)
    result: dict[str, Any] = {"sent": [(engine.rebalance([0, 1, 2, 7]), None, None)]}

    def pipeline() -> Any:
        return engine.rebalancer.decider.input(engine.profile, None, assume_running_schedule=False).pipeline

    engine.train_batch(data)
    result["before a profile"] = engine.stage.schedule.running
    _decide_on_rank_0(engine, result)
    engine.train_batch(data)
    result["again"] = engine.rebalance()
    engine.train_batch(data)
    every = [(0, *inner, 7) for inner in itertools.combinations(range(1, 7), 2)]
    model = pipeline()
    result["seconds"] = {partition: model.iteration_seconds(partition) for partition in every}
    result["kept"] = [one.step for one in engine.reports]
    for partition in ([0, 2, 5, 7], [0, 3, 4, 7]):
        found = pipeline().shortest_schedule(partition)
        sent = engine.rebalance(partition)
        engine.train_batch(data)
        result["sent"].append((sent, engine.stage.schedule.running, found))
    result["within"] = [_under_a_limit(engine, data, None)]
    result["limit"] = int(0.9 * max(result["within"][0][1]))
    result["within"].append(_under_a_limit(engine, data, result["limit"]))
    engine.rebalancer.decider.memory.limit = None
    engine.rebalance()
    engine.repack(partition=[0, 3, 7])
    if not engine.released:
        engine.train_batch(data)
        result["repacked"] = pipeline().shortest_schedule([0, 3, 7]), engine.repacks
        engine.train_batch(data)
        result["after it"] = engine.stage.schedule.running
    return result


def _decide_on_rank_0(engine: Any, result: dict[str, Any]) -> None:
    """Decide where other ranks than rank 0 would fail to."""
    decide = decider.decide
    if engine.global_rank > 0:
        decider.decide = None  # type: ignore[assignment]
    report = result["first"] = engine.rebalance()
    decider.decide = decide
    found = engine.stage.schedule.next(engine.stage.placement, 4)
    said = report.new_partition, report.iteration_seconds_after, report.verdict
    result["decided"] = found.schedule.hash, found.costs, said, engine.partition


def _under_a_limit(engine: Any, data: Any, limit: int | None) -> tuple[Schedule, list[int]]:
    """Return the order for the present partition under a limit, and what stages hold under it."""
    engine.rebalancer.decider.memory.limit = limit
    engine.rebalance(engine.partition)
    engine.train_batch(data)
    here = engine.stage.placement
    order, layers = engine.stage.schedule.schedule_for(here, 4), engine.profile.layers
    passes = engine.rebalancer.decider.input(engine.profile, None, assume_running_schedule=False).pipeline.passes
    held = peak_bytes(order, passes.layers.sizes(here))
    owned = map(here.layers_of, range(3))
    return order, [sum(layers[i].static_bytes for i in own) + more for own, more in zip(owned, held)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report") / "report.jsonl"


@pytest.fixture(scope="module")
def ranks(path: Path) -> list[dict[str, Any]]:
    return run(3, trained, str(path))


def test_decisions_choose_the_shortest_simulated_iteration(ranks: list[dict[str, Any]], path: Path) -> None:
    first, again, seconds = (ranks[0][name] for name in ("first", "again", "seconds"))
    assert all(rank["seconds"] == seconds for rank in ranks), "ranks differ"
    assert first.moved and first.new_partition == tuple(ranks[0]["decided"][-1])
    assert seconds[first.new_partition] == pytest.approx(min(seconds.values()), rel=0.005)
    assert first.iteration_seconds_after == pytest.approx(seconds[first.new_partition], rel=0.005)
    assert first.iteration_seconds_before > first.iteration_seconds_after >= first.lower_bound_seconds
    assert first.bubble_ratio_before > first.bubble_ratio_after > 0
    assert first.schedule_splits > 0 and first.schedule.startswith("zero_bubble")
    assert not again.moved and again.schedule_splits is not None
    assert again.iteration_seconds_before == pytest.approx(first.iteration_seconds_after)
    assert first.as_record()["schedule"] == first.schedule
    records = read_report(path)
    _, *decisions = records.decisions
    drawn = [batch.seconds for batch in around(records, first.step)]
    assert drawn == [pytest.approx(first.iteration_seconds_before), pytest.approx(first.iteration_seconds_after)]
    assert decisions[0].order_before == schedule_for_equal_costs(3, decisions[0].order_before.micro_batches)
    for decision, found in zip(decisions, (first, again)):
        assert decision.order_after is not None and decision.order_after.splits == found.schedule_splits


def test_rank_0_decides_on_the_order_and_the_costs_for_all(ranks: list[dict[str, Any]]) -> None:
    digest, costs, *_ = ranks[0]["decided"]
    assert all(rank["decided"] == ranks[0]["decided"] for rank in ranks)
    assert digest != schedule_for_equal_costs(3, 4).hash and costs is not None
    assert [len(rank["kept"]) for rank in ranks] == [3, 0, 0]


def test_an_explicit_partition_gets_its_own_order(ranks: list[dict[str, Any]]) -> None:
    (begun, *_), *sent = ranks[0]["sent"]
    assert all([ran for _, ran, _ in rank["sent"][1:]] == [ran for _, ran, _ in sent] for rank in ranks), "ranks differ"
    assert ranks[0]["before a profile"] == schedule_for_equal_costs(3, 4) and begun.schedule == ""
    for report, ran, found in sent:
        assert ran in (found.schedule, with_some_split(found.schedule))
        assert report.iteration_seconds_after == pytest.approx(found.iteration_seconds)
        assert report.lower_bound_seconds == pytest.approx(found.lower_bound_seconds)
        assert report.schedule_splits == found.schedule.splits and report.decide_seconds > 0


def test_an_order_stays_within_the_memory_limit(ranks: list[dict[str, Any]], path: Path) -> None:
    (free_order, free), (order, limited) = ranks[0]["within"]
    assert max(limited) <= ranks[0]["limit"] < max(free)
    without_limit, within = read_report(path).decisions[5:7]
    assert [without_limit.order_after, within.order_before, within.order_after] == [free_order, free_order, order]
    assert free_order != order


def test_after_a_repacking_the_order_comes_from_the_profile(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank for rank in ranks if "after it" in rank)
    found, reports = first["repacked"]
    assert second["after it"] == first["after it"] and second["repacked"][0] == found
    assert first["after it"] in (found.schedule, with_some_split(found.schedule)), "a profiled batch splits some more"
    assert found.schedule != schedule_for_equal_costs(2, 4)
    assert reports[0].iteration_seconds_after == pytest.approx(found.iteration_seconds)

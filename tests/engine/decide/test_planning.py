"""How many stages a re-packing chooses, under every balancer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_dynmo.config import DynMoConfig, parse_section
from ds_dynmo.engine.decide.decision import predict
from ds_dynmo.engine.decide.decision_input import DecisionInput
from ds_dynmo.engine.resize.planning import Planner
from ds_dynmo.errors import PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import Overflow, uniform
from ds_dynmo.placement import Placement, Shape
from ds_dynmo.plan import LayerCost, Profile

BALANCERS = ["partition", "diffusion", "makespan"]
LAYERS, STAGES = 16, 8


def planner(share: float, limit: int | None = None, **section: Any) -> Planner:
    """Plan for a run whose layers took one second each at first, and now take ``share`` of it and 10 bytes each."""
    layers = (LayerCost(share / 3, 2 * share / 3, 5, 5, static_bytes=10, activation_bytes=0, input_bytes=0),) * LAYERS
    profile = Profile(7, Placement.chain(uniform(LAYERS, STAGES)), layers, micro_batches=8, batch_seconds=1.0)
    given = DecisionInput.of(profile, config=parse_section(DynMoConfig, section, "dynmo"), limit_bytes=limit)
    return Planner(given, first_seconds=given.pipeline.iteration_seconds(given.partition) / share)


@pytest.mark.parametrize("balancer", BALANCERS)
def test_equal_layers_are_spread_evenly_over_any_number_of_stages(balancer: str) -> None:
    plan = planner(1.0, balancer=balancer)
    for num_stages in range(1, STAGES + 1):
        partition = plan.onto(num_stages).placement.boundaries
        sizes = [stop - start for start, stop in zip(partition, partition[1:])]
        assert len(sizes) == num_stages and sum(sizes) == LAYERS
        assert max(sizes) == -(-LAYERS // num_stages)


@pytest.mark.parametrize("balancer", BALANCERS)
def test_it_chooses_the_fewest_stages_that_are_as_fast_as_at_first(balancer: str) -> None:
    """8 micro-batches on n stages take (n + 7) times the slowest stage: 30 s at first, 31.6 s if 5% are given up."""
    assert planner(1.0, balancer=balancer).best().num_stages == STAGES
    assert planner(0.5, balancer=balancer).best().num_stages == 3  # 10 x 6 x 0.5 = 30; on 2 it is 36
    assert planner(0.2, balancer=balancer).best().num_stages == 1  # 8 x 16 x 0.2 = 25.6
    assert planner(0.2, balancer=balancer, repack={"min_stages": 2}).best().num_stages == 2


@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize("shape", ["v", "loop"])
def test_two_chunks_per_stage_stay_two_and_one_stage_is_a_chain(shape: Shape, balancer: str) -> None:
    given = planner(0.5, balancer=balancer).given
    here = Placement.of_shape(shape, uniform(LAYERS, 8))  # 4 stages
    plan = Planner(DecisionInput.of(replace(given.profile, placement=here), config=given.config), first_seconds=40.0)
    for count in (3, 2):
        packing = plan.onto(count)
        assert (packing.placement.shape, packing.num_stages) == (shape, count)
        assert max(len(packing.placement.layers_of(stage)) for stage in range(count)) == -(-LAYERS // count)
        order = plan.given.pipeline.on(count).shortest_schedule(packing.placement)
        assert order is not None and packing.iteration_seconds == order.iteration_seconds
    assert plan.onto(1).placement == Placement.chain([0, LAYERS])
    assert (plan.best().placement.shape, plan.best().num_stages) == (shape, 2)  # 32 s of work and little waiting


@pytest.mark.parametrize("shape", ["v", "loop"])
def test_a_change_of_shape_is_predicted_by_the_orders_of_either(shape: Shape) -> None:
    """Without searches: a chain runs 1F1B, two chunks per stage their shortest order."""
    chain = Placement.chain(uniform(LAYERS, 4))
    profile = replace(planner(1.0).given.profile, placement=chain)
    pairs = Placement.of_shape(shape, uniform(LAYERS, 8))
    there = predict(DecisionInput.of(profile), pairs)
    back = predict(DecisionInput.of(replace(profile, placement=pairs)), chain)
    assert there.found is not None and there.found.schedule.owners == pairs.owners and back.found is None
    under_1f1b = DecisionInput.of(profile).pipeline.seconds_under_1f1b(chain)
    assert (there.iteration_seconds_before, back.iteration_seconds_after) == (under_1f1b, under_1f1b)
    assert there.iteration_seconds_after == back.iteration_seconds_before < under_1f1b


def splitting(planner: Planner) -> Planner:
    """Under a schedule of ours; the forward pass of a layer and both parts of its backward pass take the same."""
    layers = tuple(
        replace(cost, input_gradient_seconds=cost.forward_seconds, weight_gradient_seconds=cost.forward_seconds)
        for cost in planner.given.profile.layers
    )
    return with_given(planner, profile=replace(planner.given.profile, layers=layers), searches=True)


def with_given(planner: Planner, **values: Any) -> Planner:
    return replace(planner, given=replace(planner.given, **values))


@pytest.mark.parametrize("balancer", BALANCERS)
def test_stages_are_counted_with_the_schedule_that_will_run(balancer: str) -> None:
    """Orders of ours gain more on many stages, so three are enough under 1F1B and four under such an order."""
    dense = splitting(planner(1.0, balancer=balancer))
    first = dense.given.pipeline.iteration_seconds(dense.given.partition)
    assert first < 0.7 * dense.given.pipeline.seconds_under_1f1b(dense.given.partition)
    half = replace(splitting(planner(0.5, balancer=balancer)), first_seconds=first)
    best = half.best()
    assert best.num_stages == 4
    order = half.given.pipeline.on(4).shortest_schedule(best.placement)
    assert order is not None and order.schedule.splits and best.iteration_seconds == order.iteration_seconds
    three = half.onto(3)
    assert best.iteration_seconds <= first / 0.95 < three.iteration_seconds
    assert half.given.pipeline.on(3).seconds_under_1f1b(three.placement) < planner(0.5).first_seconds


@pytest.mark.parametrize("balancer", BALANCERS)
def test_memory_limits_keep_stages_that_throughput_would_give_up(balancer: str) -> None:
    small = planner(0.2, limit=50, balancer=balancer)  # 5 layers a stage
    assert small.best().num_stages == 4
    with pytest.raises(PartitionError, match=r"repack onto 2 stages: .*; 4 stages would do"):
        small.onto(2)


def test_a_partition_that_no_move_can_reach_is_skipped() -> None:

    def find_overflow(placement: Placement) -> Overflow | None:
        return Overflow(stage=1, peak_bytes=12, limit=10) if placement.num_stages == 3 else None

    assert planner(0.5).best().num_stages == 3
    blocked = replace(planner(0.5), find_overflow=find_overflow)
    assert blocked.best().num_stages == 4
    with pytest.raises(PartitionError, match=r"onto 3 stages: going to .* stage 1 would hold 12 .*; 4 stages would do"):
        blocked.onto(3)
    first_fit = planner(1.0, limit=60, repack={"planner": "first_fit"})
    assert first_fit.best().num_stages == 3
    assert replace(first_fit, find_overflow=find_overflow).best().num_stages == 4


def test_first_fit_decides_by_memory_alone() -> None:
    settings = {"planner": "first_fit"}
    assert planner(1.0, limit=50, repack=settings).best().num_stages == 4
    with pytest.raises(PartitionError, match=r"first_fit.* there is no memory_limit"):
        planner(1.0, repack=settings).best()


@pytest.mark.parametrize("balancer", BALANCERS)
def test_layers_that_stay_together_are_planned_together(balancer: str) -> None:
    """16 layers are in 5 groups of 4, 3, 3, 3 and 3."""
    groups = LayerGroups((0, 4, 7, 10, 13, 16))
    plan = with_given(planner(1.0, balancer=balancer), groups=groups)
    sizes = {1: 16, 2: 9, 3: 6, 4: 6, 5: 4}  # layers of the largest stage
    for count, largest in sizes.items():
        partition = plan.onto(count).placement.boundaries
        assert groups.allows(partition)
        assert max(stop - start for start, stop in zip(partition, partition[1:])) == largest
    with pytest.raises(
        PartitionError, match=r"onto 6 stages: dynmo.keep_together makes 5 groups of the model's 16 lay"
    ):
        plan.onto(6)
    light = with_given(planner(0.2, balancer=balancer), groups=groups)
    five = Placement.chain((0, 4, 7, 10, 13, 16))
    light = with_given(light, placement=five, profile=replace(light.given.profile, placement=five))
    assert groups.allows(light.best().placement.boundaries) and light.best().num_stages < 5

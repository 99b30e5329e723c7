"""Balancers, orders and memory on any shape, above all where every stage holds two chunks: a V or a loop."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import (
    LayerPasses,
    MemoryModel,
    PipelineModel,
    balanced,
    diffusion,
    makespan,
    names,
    potential,
    propose,
    register,
    registry,
)
from ds_dynmo.partitioners.metrics import loads_of
from ds_dynmo.placement import Placement, Shape, owners_of
from ds_dynmo.schedules import in_flight, lower_bound, peak_bytes, replay
from tests.partitioners.instances import (
    KINDS,
    every_partition,
    memory_of,
    pipeline_of,
    random_costs,
    random_memory,
    random_passes,
    random_start,
)

SHAPES: tuple[Shape, ...] = ("v", "loop")


def pipeline(rng: random.Random, *sizes: int) -> PipelineModel:
    return pipeline_of(random_passes(rng, *sizes, link_seconds=0.1))


# -- orders and their costs ---------------------------------------------------------------------------


def test_a_chunk_has_the_sums_of_its_layers_and_is_held_by_its_owner() -> None:
    layers = LayerPasses(*((1.0, 2.0, 4.0, 8.0),) * 4, *((1, 2, 4, 8),) * 4, frozen_layers=1)
    v = Placement.v([0, 1, 2, 3, 4])
    costs = layers.costs(v, (1.0, 2.0), link_seconds=0.5)
    assert costs.owners == (0, 1, 1, 0) and costs.frozen_chunks == 1
    assert costs.forward_seconds == (1.0, 1.0, 2.0, 8.0) and costs.backward_seconds == (0.0, 1.0, 2.0, 8.0)
    assert costs.link_seconds == (0.5, 0.0, 0.5)
    assert layers.sizes(v).activation_bytes == (1, 2, 4, 8)
    assert layers.static_of_stages(v) == [9, 6]
    loop = Placement.of([0, 1, 2, 3, 4], (0, 1, 0, 1))
    assert layers.costs(loop, (1.0, 2.0), 0.5).link_seconds == (0.5,) * 3 and layers.static_of_stages(loop) == [5, 10]


def test_no_message_stands_where_a_chunk_follows_on_its_own_stage() -> None:
    layers = replace(random_passes(random.Random(1), 4, 2, 4).layers, input_bytes=(1, 2, 4, 8))
    sizes = layers.sizes_with_messages(Placement.v([0, 1, 2, 3, 4]), standing=3)
    assert sizes.standing_bytes == (3 * 2, 3 * 2, 3 * 8, 3 * 8)


@pytest.mark.parametrize("shape", get_args(Shape))
@pytest.mark.parametrize("interval", [0, 2])
def test_orders_are_no_shorter_than_bounds_and_stay_within_limits(shape: Shape, interval: int) -> None:
    """The memory model counts what orders are searched within, so it is a safe bound of what they hold."""
    rng = random.Random(f"{shape} {interval}")
    for stages, layers in ((2, 7), (2, 7), (3, 9)):
        passes, owners = random_passes(rng, layers, stages, 6, interval, 0.1), owners_of(shape, stages)
        every = rng.sample([*every_partition(layers, len(owners))], 6)
        for partition, bound in zip(every, passes.lower_bounds(np.array(every).T, owners)):
            placement = Placement.of(partition, owners)
            found, costs, sizes = passes.shortest(placement), passes.costs(placement), passes.layers.sizes(placement)
            assert found is not None
            assert bound <= found.iteration_seconds * (1 + 1e-9)
            if not interval:
                assert bound == pytest.approx(lower_bound(costs, 6, sizes, passes.limits(placement)))
                assert bound == pytest.approx(found.lower_bound_seconds)
            assert replay(found.schedule, costs).iteration_seconds == pytest.approx(found.iteration_seconds)
            assert found.peak_bytes == peak_bytes(found.schedule, sizes)
            assert all(peak <= limit for peak, limit in zip(found.peak_bytes, passes.limits(placement)))
            limit = max(memory_of(passes, interval).bytes_per_stage(placement))
            within = replace(passes, limit_bytes=limit).shortest(placement)
            assert within is not None
            assert max(map(sum, zip(passes.layers.static_of_stages(placement), within.peak_bytes))) <= limit


def test_both_chunks_hold_what_the_first_stage_of_a_chain_does() -> None:
    memory = MemoryModel((10, 20, 30, 40), (1, 2, 3, 4), (5, 6, 7, 8), limits=(999, 999), micro_batches=4)
    assert memory.bytes_per_stage(Placement.v([0, 1, 2, 3, 4])) == [50 + in_flight(0, 2, 4) * 5, 50 + 2 * 5]
    checkpointed = replace(memory, checkpoint_interval=1)
    assert checkpointed.bytes_per_stage(Placement.v([0, 1, 2, 3, 4])) == [50 + 2 * 13 + 4, 50 + 2 * 13 + 3]
    with pytest.raises(PartitionError, match="4 layers and 2 stages, not for 4 and 4"):
        memory.bytes_per_stage(Placement.chain([0, 1, 2, 3, 4]))


def test_an_iteration_is_that_of_the_shortest_order_for_the_placement() -> None:
    given = pipeline(random.Random(4), 8, 2, 6)
    chain, v, loop = Placement.chain([0, 4, 8]), Placement.v([0, 2, 4, 6, 8]), Placement.loop([0, 2, 4, 6, 8])
    found = [given.shortest_schedule(placement) for placement in (chain, v, loop)]
    assert all(one is not None for one in found)
    assert [one.schedule.owners for one in found if one] == [(0, 1), (0, 1, 1, 0), (0, 1, 0, 1)]
    seconds = [given.iteration_seconds(placement) for placement in (chain, v, loop)]
    assert seconds == [one.iteration_seconds for one in found if one] and seconds[1] < seconds[0]
    assert given.iteration_seconds(chain) == given.iteration_seconds([0, 4, 8])
    with pytest.raises(PartitionError, match="no order without a model of passes"):
        replace(given, passes=None).iteration_seconds(v)
    assert given.passes is not None
    tight = replace(given, passes=replace(given.passes, limit_bytes=0))
    assert tight.shortest_schedule(v) is None and tight.iteration_seconds(v) == math.inf


def test_an_order_in_force_is_kept_on_its_placement_alone() -> None:
    passes = random_passes(random.Random(5), 8, 2, 6)
    v, loop = Placement.v([0, 2, 4, 6, 8]), Placement.loop([0, 2, 4, 6, 8])
    found = passes.shortest(v)
    assert found is not None
    running = replace(passes, in_force=found.schedule, in_force_over_bound=found.over_bound)
    assert running.shortest(v) == found
    other = running.shortest(loop)
    assert other is not None and other.schedule.owners == loop.owners


def test_what_moves_is_what_changes_its_stage() -> None:
    given = replace(pipeline(random.Random(6), 6, 2, 4), layer_bytes=(1, 2, 4, 8, 16, 32))
    columns = np.array([[0, 1, 2, 3, 6], [0, 1, 3, 5, 6], [0, 2, 3, 4, 6]]).T
    moved, layers = given.moved(Placement.v([0, 1, 3, 4, 6]), columns)
    assert moved.tolist() == [8, 16, 2] and layers.tolist() == [1, 1, 1]


# -- balancers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("balancer", [balanced, diffusion, makespan])
def test_results_are_valid_never_worse_reproducible_and_fit(shape: Shape, balancer: Any) -> None:
    rng = random.Random(f"{shape} 7")
    for case in range(48):
        stages = rng.choice([1, 2, 3])
        layers, owners = rng.randint(2 * stages, 2 * stages + 6), owners_of(shape, stages)
        costs, start = random_costs(rng, layers, KINDS[case % len(KINDS)]), random_start(rng, layers, 2 * stages)
        present = Placement.of(start, owners)
        memory = random_memory(rng, layers, stages) if case % 2 else None
        if memory is not None:
            needed = max(memory.bytes_per_stage(present))
            memory = replace(memory, limits=(needed,) * stages)
        options: dict[str, Any] = {"start": start, "memory": memory, "owners": owners}
        partition = balancer(costs, stages, **options)
        placement = present.at(partition)
        assert all(type(boundary) is int for boundary in partition)
        assert max(loads_of(costs, placement)) <= max(loads_of(costs, present)) * (1 + 1e-9)
        assert memory is None or max(memory.bytes_per_stage(placement)) <= max(memory.limits)
        assert partition == balancer(tuple(costs), stages, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_pair_of_neighbours_can_improve_what_diffusion_finds(shape: Shape) -> None:
    rng, ratios = random.Random(8), []
    for _ in range(15):
        costs, owners = [rng.uniform(0.5, 1.5) for _ in range(24)], owners_of(shape, 3)
        start = random_start(rng, 24, 6)
        partition = diffusion(costs, 3, start, owners=owners)
        here = loads_of(costs, Placement.of(partition, owners))
        assert potential(here) <= potential(loads_of(costs, Placement.of(start, owners)))
        assert diffusion(costs, 3, partition, owners=owners) == partition
        ratios.append(max(here) / max(loads_of(costs, Placement.of(balanced(costs, 3, owners=owners), owners))))
    assert min(ratios) >= 1 and sum(ratios) / len(ratios) < 1.06


def test_diffusion_leaves_a_start_that_does_not_fit_or_says_so() -> None:
    memory = MemoryModel((4, 4, 4, 4, 4, 4), (0,) * 6, (0,) * 6, limits=(12, 12), micro_batches=1)
    assert diffusion([1.0] * 6, 2, [0, 1, 2, 3, 6], memory=memory, owners=(0, 1, 1, 0)) != [0, 1, 2, 3, 6]
    with pytest.raises(PartitionError, match="neighbours trading layers found no partition that fits"):
        diffusion([1.0] * 6, 2, owners=(0, 1, 1, 0), memory=replace(memory, limits=(11, 11)))


@pytest.mark.parametrize("shape", get_args(Shape))
def test_makespan_goes_where_the_iteration_is_shortest(shape: Shape) -> None:
    rng, behind = random.Random(9), []
    for _ in range(4):
        stages = 3 if shape == "chain" else 2
        given, owners = pipeline(rng, 8, stages, 5), owners_of(shape, stages)
        start = [8 * chunk // len(owners) for chunk in range(len(owners) + 1)]
        chosen = makespan(list(given.layer_seconds), stages, start=start, pipeline=given, owners=owners)
        every = [given.iteration_seconds(Placement.of(other, owners)) for other in every_partition(8, len(owners))]
        mine = given.iteration_seconds(Placement.of(chosen, owners))
        behind.append(mine / min(every))
        assert mine <= given.iteration_seconds(Placement.of(start, owners))
    assert max(behind) < 1.03 and sum(behind) / len(behind) < 1.005


@pytest.mark.parametrize("shape", SHAPES)
def test_makespan_of_many_layers_is_no_worse_than_the_least_bottleneck_nor_the_start(shape: Shape) -> None:
    given, owners = pipeline(random.Random(10), 24, 4, 8), owners_of(shape, 4)
    costs, start = list(given.layer_seconds), [*range(0, 25, 3)]
    even = balanced(costs, 4, owners=owners)
    chosen = makespan(costs, 4, start=start, pipeline=given, owners=owners)
    seconds = [given.iteration_seconds(Placement.of(other, owners)) for other in (chosen, even, start)]
    assert seconds[0] == min(seconds)
    assert makespan(costs, 4, start=start, pipeline=replace(given), owners=owners) == chosen


def test_the_registered_balancers_take_the_shape_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BALANCERS", dict(registry._BALANCERS))
    groups, owners = LayerGroups((0, 1, 3, 4, 6, 7, 8)), owners_of("v", 2)
    given = pipeline(random.Random(11), 8, 2, 4)
    options: dict[str, Any] = {"start": [0, 2, 4, 6, 8], "memory": None, "pipeline": given, "speeds": None}
    for name in names():
        for keep in (None, groups):
            found = propose(name, list(given.layer_seconds), 2, **options, groups=keep, owners=owners)
            assert len(found) == 5 and (keep is None or keep.allows(found))

    @register("mine")
    def mine(costs: Any, num_stages: int, *, start: Any, memory: Any) -> list[int]:
        return [0, 4, 8]

    with pytest.raises(
        PartitionError, match=r'balancer "mine" gives boundaries of a chain, .* owns 2 chunks: .* 5 bound'
    ):
        propose("mine", [1.0] * 8, 2, **options, owners=owners)
    assert propose("mine", [1.0] * 8, 2, **{**options, "start": [0, 2, 8]}, owners=(0, 1)) == [0, 4, 8]
    with pytest.raises(
        PartitionError, match="6 groups of the model's 8 layers, which cannot fill 8 chunks: every chunk"
    ):
        propose("partition", [1.0] * 8, 4, **{**options, "start": [*range(9)]}, groups=groups, owners=owners_of("v", 4))

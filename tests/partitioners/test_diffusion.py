import pickle
import random
from typing import Any

import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import (
    DiffusionNode,
    MemoryModel,
    balanced,
    bottleneck,
    diffusion,
    diffusion_step,
    diffusion_trace,
    lemma2_bound,
    uniform,
)
from tests.partitioners.instances import (
    KINDS,
    every_partition,
    overshoot,
    partitions_that_fit,
    random_costs,
    random_memory,
    random_start,
    slowest_seconds,
)

Message = object


def nodes_of(
    costs: list[float], start: list[int], memory: MemoryModel | None = None, speeds: list[float] | None = None
) -> list[DiffusionNode]:
    return [
        DiffusionNode(
            stage,
            len(start) - 1,
            first,
            costs[first:stop],
            memory=None if memory is None else memory.of_stage(stage, first, stop),
            speed=1.0 if speeds is None else speeds[stage],
        )
        for stage, (first, stop) in enumerate(zip(start, start[1:]))
    ]


def run_round(nodes: list[DiffusionNode]) -> list[tuple[Message, Message]]:
    """Run one round over links that carry plain values only."""
    sent = [node.messages() for node in nodes]
    expected = [node.expects for node in nodes]
    for stage, node in enumerate(nodes):
        from_left = sent[stage - 1][1] if stage > 0 else None
        from_right = sent[stage + 1][0] if stage + 1 < len(nodes) else None
        assert expected[stage] == (from_left is not None, from_right is not None)
        node.receive(*pickle.loads(pickle.dumps((from_left, from_right))))
    assert sent[0][0] is None and sent[-1][1] is None
    return sent


def sorted_loads(costs: list[float], partition: tuple[int, ...]) -> list[float]:
    return sorted((sum(costs[start:stop]) for start, stop in zip(partition, partition[1:])), reverse=True)


def check_nodes(costs: list[float], start: list[int], landed: list[int], memory: Any, speeds: Any) -> float:
    """Check that nodes that only exchange messages end at the same partition. Return the bottleneck that they know."""
    nodes, rounds = nodes_of(costs, start, memory, speeds), 0
    while not nodes[0].done:
        run_round(nodes)
        rounds += 1
        assert len({node.done for node in nodes}) == 1  # all, or none
    assert {node.rounds for node in nodes} == {rounds}
    assert [*(node.extent[0] for node in nodes), nodes[-1].extent[1]] == landed
    for node in nodes:
        assert node.fits and node.end_bottleneck == nodes[0].end_bottleneck
        if speeds is None:
            assert node.start_bottleneck == bottleneck(costs, start)
            assert node.end_bottleneck == bottleneck(costs, landed)
        assert [demand.cost for demand in node.layers.demands] == costs[slice(*node.extent)]
    return nodes[0].end_bottleneck


def check(seed: int, count: int, most_layers: int) -> dict[str, int]:
    """Check what every run guarantees, with and without memory limits and speeds.

    Returns:
        How many runs began where layers fitted, led there, or found nothing that fits; how many had limits alone, or
        speeds, and of these how many missed the best partition.
    """
    kinds = "fitted", "mended", "refused", "limits", "limits missed", "speeds", "speeds missed"
    rng, seen = random.Random(seed), dict.fromkeys(kinds, 0)
    for case in range(count):
        num_layers = rng.randint(1, most_layers)
        num_stages = rng.randint(1, num_layers)
        costs, start = random_costs(rng, num_layers, KINDS[case % 6]), random_start(rng, num_layers, num_stages)
        memory = random_memory(rng, num_layers, num_stages) if case % 2 else None
        speeds = [rng.choice([0.25, 0.5, 0.8, 1.0, 2.0]) for _ in range(num_stages)] if case % 5 < 2 else None
        instance, options = (costs, start, memory, speeds), {"memory": memory, "speeds": speeds}
        if memory is not None and overshoot(memory, start) > 0:
            try:
                assert overshoot(memory, diffusion(costs, num_stages, start, **options)) <= 0, instance
                seen["mended"] += 1
            except PartitionError as error:
                assert "its limit is" in str(error)
                seen["refused"] += 1
            continue
        seen["fitted"] += memory is not None
        trace = diffusion_trace(costs, num_stages, start, **options)
        assert trace.partition == diffusion(costs, num_stages, start, **options), instance
        assert all(type(boundary) is int for boundary in trace.partition)
        seconds = [slowest_seconds(costs, each, speeds or [1.0] * num_stages) for each in trace.partitions]
        assert seconds == sorted(seconds, reverse=True), instance
        assert all(min(after - before for before, after in zip(each, each[1:])) > 0 for each in trace.partitions)
        assert memory is None or all(overshoot(memory, list(each)) <= 0 for each in trace.partitions), instance
        if speeds is None:
            least = min((cost for cost in costs if cost > 0), default=1.0)
            assert trace.rounds <= lemma2_bound(num_stages, sum(costs), least)
            changed = [place for place in range(trace.rounds) if trace.partitions[place] != trace.partitions[place + 1]]
            for place in changed[1:]:
                assert trace.potentials[place + 1] <= trace.potentials[place] * (1 + 1e-9)
                assert sorted_loads(costs, trace.partitions[place + 1]) < sorted_loads(costs, trace.partitions[place])
        known = check_nodes(costs, start, trace.partition, memory, speeds)
        if memory is None and speeds is None:
            least = bottleneck(costs, balanced(costs, num_stages))
            assert known == bottleneck(costs, trace.partition) == least, instance  # the search alone finds it
        elif num_layers <= 9:
            assert memory is not None or seconds[-1] <= known <= seconds[0]
            fitting = partitions_that_fit(every_partition(num_layers, num_stages), memory)
            best = min(slowest_seconds(costs, each, speeds or [1.0] * num_stages) for each in fitting)
            kind = "limits" if speeds is None else "speeds"
            seen[kind] += 1
            seen[f"{kind} missed"] += seconds[-1] > best * (1 + 1e-9)
    return seen


def test_it_reaches_the_smallest_bottleneck() -> None:
    """Memory limits and different speeds rarely cost it."""
    seen = check(seed=0, count=500, most_layers=9)
    assert all(seen[f"{kind} missed"] < 0.1 * seen[kind] for kind in ("limits", "speeds")), seen
    assert min(seen[kind] for kind in ("fitted", "mended", "refused", "limits", "speeds")) > 25, seen
    rng = random.Random(4)
    for kind in KINDS:  # of a long chain
        costs = random_costs(rng, 48, kind)
        found = diffusion(costs, 24, random_start(rng, 48, 24))
        assert bottleneck(costs, found) == bottleneck(costs, balanced(costs, 24)), kind


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_random_instances(seed: int) -> None:
    check(seed=300 + seed, count=2000, most_layers=14)
    check(seed=400 + seed, count=100, most_layers=60)


def test_an_ample_limit_and_equal_speeds_change_nothing() -> None:
    rng = random.Random(8)
    memory = MemoryModel((1,) * 12, (1,) * 12, (1,) * 12, limits=(10**12,) * 5, micro_batches=4)
    for _ in range(20):
        costs, start = random_costs(rng, 12, "uniform"), random_start(rng, 12, 5)
        found = diffusion(costs, 5, start)
        assert diffusion(costs, 5, start, memory=memory) == diffusion(costs, 5, start, speeds=[0.5] * 5) == found
    with pytest.raises(PartitionError, match="2 stages need 2 speeds, got 1"):
        diffusion([1.0, 1.0], 2, speeds=[1.0])


def test_information_travels_one_hop_per_round() -> None:
    rng = random.Random(7)
    for num_stages, changed in [(6, 5), (6, 0), (7, 3)]:
        costs = random_costs(rng, 4 * num_stages, "uniform")
        other = [*costs]
        other[4 * changed] *= 3
        start = uniform(len(costs), num_stages)
        one, two = nodes_of(costs, start), nodes_of(other, start)
        for round_ in range(num_stages):
            for stage, (sent, sent_other) in enumerate(zip(run_round(one), run_round(two))):
                if abs(stage - changed) > round_:
                    assert sent == sent_other, (stage, round_)


def test_a_single_stage_is_done_at_once() -> None:
    assert diffusion([1, 2, 3], 1) == [0, 3]
    assert diffusion_trace([1, 2, 3], 1).rounds == 0
    with pytest.raises(PartitionError, match="stage 0 needs 9 bytes, its limit is 8"):
        diffusion([1, 2, 3], 1, memory=MemoryModel((3,) * 3, (0,) * 3, (0,) * 3, (8,), 1))


def test_overload_passes_through_a_stage_that_is_not_lighter() -> None:
    # Between neighbours alone nothing moves: handing over a layer would only swap who is heavier.
    costs = [3, 3, 3, 3, 3, 3, 3]
    start = [0, 3, 5, 6, 7]
    assert [diffusion_step(costs[a:b], costs[b:c]) - (b - a) for a, b, c in zip(start, start[1:], start[2:])] == [0] * 3
    assert bottleneck(costs, start) == 9
    assert bottleneck(costs, diffusion(costs, 4, start)) == 6


def test_a_step_lightens_the_heavier_stage_or_moves_nothing() -> None:
    assert diffusion_step([4.0, 3.0, 1.0], [2.0]) == 1
    assert diffusion_step([4.0, 3.0], [2.0]) == 1
    assert diffusion_step([1.0], [1.0, 1.0]) == 1
    assert diffusion_step([5.0], [1.0]) == 1  # never empty
    assert diffusion_step([1.0], [0.0, 4.0, 4.0]) == 3
    assert diffusion_step([1.0], [1.0, 1.0, 1.0, 1.0], lambda left_layers: left_layers <= 2) == 2
    assert diffusion_step([1.0] * 3, [1.0] * 3, speeds=(0.5, 1.0)) == 2
    assert diffusion_step([1.0] * 3, [1.0] * 3, speeds=(1.0, 0.5)) == 4


def test_lemma_2() -> None:
    assert lemma2_bound(1, 5.0, 5.0) == 0
    assert lemma2_bound(4, 0.0, 1.0) == lemma2_bound(4, 0.5, 1.0)
    bounds = [lemma2_bound(num_stages, 100.0, 0.1) for num_stages in range(1, 40)]
    assert bounds == sorted(bounds)

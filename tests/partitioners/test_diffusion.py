import pickle
import random

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
    plain_bottleneck,
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


def lemma2(costs: list[float], num_stages: int) -> int:
    return lemma2_bound(num_stages, sum(costs), min((cost for cost in costs if cost > 0), default=1.0))


def check_run(costs: list[float], start: list[int], memory: MemoryModel | None = None) -> None:
    """Check what every run from a start that fits guarantees."""
    num_stages = len(start) - 1
    trace = diffusion_trace(costs, num_stages, start, memory=memory)
    assert trace.partition == diffusion(costs, num_stages, start, memory=memory)
    assert trace.rounds <= lemma2(costs, num_stages)
    assert all(type(boundary) is int for boundary in trace.partition)
    bottlenecks = [bottleneck(costs, partition) for partition in trace.partitions]  # also refuses empty stages
    assert all(after <= before for before, after in zip(bottlenecks, bottlenecks[1:]))
    changed = [place for place in range(trace.rounds) if trace.partitions[place] != trace.partitions[place + 1]]
    for place in changed[1:]:
        assert trace.potentials[place + 1] <= trace.potentials[place] * (1 + 1e-9)
        assert sorted_loads(costs, trace.partitions[place + 1]) < sorted_loads(costs, trace.partitions[place])
    if memory is not None:
        assert all(overshoot(memory, list(partition)) <= 0 for partition in trace.partitions)


def sorted_loads(costs: list[float], partition: tuple[int, ...]) -> list[float]:
    return sorted((sum(costs[start:stop]) for start, stop in zip(partition, partition[1:])), reverse=True)


def check_optimal(seed: int, count: int, most_layers: int) -> None:
    rng = random.Random(seed)
    for case in range(count):
        num_layers = rng.randint(1, most_layers)
        num_stages = rng.randint(1, num_layers)
        costs = random_costs(rng, num_layers, KINDS[case % len(KINDS)])
        start = random_start(rng, num_layers, num_stages)
        least = bottleneck(costs, balanced(costs, num_stages))
        nodes = nodes_of(costs, start)
        while not nodes[0].done:
            run_round(nodes)
        assert nodes[0].end_bottleneck == least, (costs, start)  # the search alone finds it
        assert bottleneck(costs, diffusion(costs, num_stages, start)) == least, (costs, start)


def test_it_reaches_the_smallest_bottleneck() -> None:
    check_optimal(seed=0, count=150, most_layers=10)
    rng = random.Random(4)
    for kind in KINDS:  # of a long chain
        costs = random_costs(rng, 48, kind)
        found = diffusion(costs, 24, random_start(rng, 48, 24))
        assert bottleneck(costs, found) == bottleneck(costs, balanced(costs, 24)), kind


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_random_instances(seed: int) -> None:
    check_optimal(seed=300 + seed, count=1000, most_layers=14)
    check_optimal(seed=400 + seed, count=60, most_layers=60)
    check_runs(seed=500 + seed, count=500)
    check_runs_within_memory(seed=600 + seed, count=1000)


def check_runs(seed: int, count: int) -> None:
    rng = random.Random(seed)
    for case in range(count):
        num_layers = rng.randint(1, 14)
        num_stages = rng.randint(1, num_layers)
        check_run(random_costs(rng, num_layers, KINDS[case % len(KINDS)]), random_start(rng, num_layers, num_stages))


def check_runs_within_memory(seed: int, count: int) -> tuple[int, int, int]:
    """Return how many starts fitted, how many runs led from one that did not to one that does, how many found none."""
    rng = random.Random(seed)
    fitted = mended = refused = 0
    for case in range(count):
        num_layers = rng.randint(1, 9)
        num_stages = rng.randint(1, num_layers)
        costs = random_costs(rng, num_layers, KINDS[case % len(KINDS)])
        memory = random_memory(rng, num_layers, num_stages)
        start = random_start(rng, num_layers, num_stages)
        if overshoot(memory, start) <= 0:
            fitted += 1
            check_run(costs, start, memory)
            continue
        try:
            assert overshoot(memory, diffusion(costs, num_stages, start, memory=memory)) <= 0
            mended += 1
        except PartitionError as error:
            assert "its limit is" in str(error)
            refused += 1
    return fitted, mended, refused


def test_what_every_run_guarantees() -> None:
    check_runs(seed=1, count=100)
    fitted, mended, refused = check_runs_within_memory(seed=2, count=250)
    assert fitted > 40 and mended > 20 and refused > 20


def test_an_ample_limit_and_equal_speeds_change_nothing() -> None:
    rng = random.Random(8)
    memory = MemoryModel((1,) * 12, (1,) * 12, (1,) * 12, limits=(10**12,) * 5, micro_batches=4)
    for _ in range(20):
        costs, start = random_costs(rng, 12, "uniform"), random_start(rng, 12, 5)
        found = diffusion(costs, 5, start)
        assert diffusion(costs, 5, start, memory=memory) == diffusion(costs, 5, start, speeds=[0.5] * 5) == found


def test_memory_limits_rarely_cost_the_optimum() -> None:
    rng = random.Random(9)
    missed = tried = 0
    while tried < 100:
        costs, memory = random_costs(rng, 8, "uniform"), random_memory(rng, 8, 3)
        start = random_start(rng, 8, 3)
        if overshoot(memory, start) <= 0:
            tried += 1
            fitting = partitions_that_fit(every_partition(8, 3), memory)
            best = min(plain_bottleneck(costs, partition) for partition in fitting)
            missed += bottleneck(costs, diffusion(costs, 3, start, memory=memory)) > best
    assert missed < 10  # of 100


def test_nodes_that_only_exchange_messages_reach_the_same_partition() -> None:
    rng = random.Random(6)
    for case in range(48):
        num_layers = rng.randint(2, 20)
        num_stages = rng.randint(2, num_layers)
        costs = random_costs(rng, num_layers, KINDS[case % len(KINDS)])
        start = random_start(rng, num_layers, num_stages)
        memory = None
        if case % 2:
            memory = MemoryModel((3,) * num_layers, (2,) * num_layers, (1,) * num_layers, (10**6,) * num_stages, 4)
        nodes = nodes_of(costs, start, memory)
        while not nodes[0].done:
            run_round(nodes)
            assert len({node.done for node in nodes}) == 1  # all, or none
        landed = [*(node.extent[0] for node in nodes), nodes[-1].extent[1]]
        assert landed == diffusion(costs, num_stages, start, memory=memory)
        for node in nodes:
            assert node.fits
            assert node.start_bottleneck == bottleneck(costs, start)
            assert node.end_bottleneck == bottleneck(costs, landed)
            assert [demand.cost for demand in node.layers.demands] == costs[slice(*node.extent)]


def test_different_stage_speeds_rarely_cost_the_optimum() -> None:
    rng = random.Random(10)
    missed = 0
    for case in range(160):
        num_layers = rng.randint(2, 10)
        num_stages = rng.randint(2, num_layers)
        costs = random_costs(rng, num_layers, KINDS[case % len(KINDS)])
        speeds = [rng.choice([0.25, 0.5, 0.8, 1.0, 2.0]) for _ in range(num_stages)]
        start = random_start(rng, num_layers, num_stages)
        memory = random_memory(rng, num_layers, num_stages) if case % 2 else None
        if memory is not None and overshoot(memory, start) > 0:
            continue
        trace = diffusion_trace(costs, num_stages, start, memory=memory, speeds=speeds)
        seconds = [slowest_seconds(costs, partition, speeds) for partition in trace.partitions]
        assert seconds == sorted(seconds, reverse=True)  # and no partition has an empty stage
        assert trace.partition == diffusion(costs, num_stages, start, memory=memory, speeds=speeds)
        if memory is not None:
            assert all(overshoot(memory, list(partition)) <= 0 for partition in trace.partitions)
            continue
        best = min(slowest_seconds(costs, partition, speeds) for partition in every_partition(num_layers, num_stages))
        missed += seconds[-1] > best * (1 + 1e-9)
        nodes = nodes_of(costs, start, speeds=speeds)
        while not nodes[0].done:
            run_round(nodes)
        assert [*(node.extent[0] for node in nodes), nodes[-1].extent[1]] == trace.partition
        assert seconds[-1] <= nodes[0].end_bottleneck <= seconds[0]
    assert missed < 8  # of 80
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

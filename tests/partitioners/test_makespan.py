"""The balancer "makespan" against simulating every partition."""

from __future__ import annotations

import importlib
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import MemoryModel, PipelineModel, balanced, makespan, simulate
from tests.partitioners.instances import every_partition, overshoot, partitions_that_fit, random_memory, random_start

MODULE = importlib.import_module("ds_dynmo.partitioners.makespan")  # the package exports a function of the same name
Instance = tuple[PipelineModel, list[int], MemoryModel | None]


def random_instance(rng: random.Random, num_layers: int, num_stages: int) -> Instance:
    forward = [rng.choice([rng.uniform(0.5, 1.5), rng.lognormvariate(0, 1)]) for _ in range(num_layers)]
    ratio = rng.choice([lambda: 2.0, lambda: rng.choice([0.0, 0.2, 2.0, 4.0]), lambda: rng.uniform(0.1, 4.0)])
    backward = [seconds * ratio() for seconds in forward]
    if rng.random() < 0.3:
        frozen = rng.randrange(num_layers)
        backward = [0.0] * frozen + backward[frozen:]
    micro_batches = rng.randint(1, 8)
    speeds = [rng.choice([1.0, 1.0, 0.5, 0.8, 1.2]) for _ in range(num_stages)] if rng.random() < 0.4 else [1.0]
    pipeline = PipelineModel(
        tuple(forward),
        tuple(backward),
        micro_batches,
        tuple(speeds * (num_stages // len(speeds))),
        layer_bytes=tuple(rng.randrange(1, 9) for _ in range(num_layers)),
        link_seconds=rng.choice([0.0, 0.0, 0.1]),
    )
    start = random_start(rng, num_layers, num_stages)
    memory = replace(random_memory(rng, num_layers, num_stages), micro_batches=micro_batches)
    return pipeline, start, memory if rng.random() < 0.5 else None


def costs_of(pipeline: PipelineModel) -> list[float]:
    return [f + b for f, b in zip(pipeline.forward_seconds, pipeline.backward_seconds)]


def plain_seconds(pipeline: PipelineModel, partition: list[int]) -> float:
    """Simulate one partition's iteration with the simulator that lists all passes."""
    ahead, back = (
        [math.fsum(seconds[a:b]) / s for a, b, s in zip(partition, partition[1:], pipeline.speeds)]
        for seconds in (pipeline.forward_seconds, pipeline.backward_seconds)
    )
    return simulate(ahead, back, pipeline.micro_batches, pipeline.link_seconds).iteration_seconds


def best_by_trying(instance: Instance) -> float | None:
    pipeline, start, memory = instance
    partitions = every_partition(len(pipeline.forward_seconds), len(start) - 1)
    fitting = partitions_that_fit(partitions, memory)
    return float(pipeline.iterations_seconds(np.array(fitting).T).min()) if fitting else None


def test_the_pipeline_model_and_the_simulator_agree() -> None:
    rng = random.Random(1)
    for _ in range(50):
        pipeline, start, _memory = random_instance(rng, 8, rng.randint(1, 5))
        assert pipeline.iteration_seconds(start) == pytest.approx(plain_seconds(pipeline, start), rel=1e-12)


@pytest.mark.parametrize(
    ("count", "everything"),
    [(500, True), *(pytest.param(2200, everything, marks=pytest.mark.nightly) for everything in (True, False))],
)
def test_within_half_a_percent_of_the_best(count: int, everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the search alone, which serves instances with too many partitions to try; here all can be tried."""
    if not everything:
        monkeypatch.setattr(MODULE, "_ALL", 0)
    rng = random.Random(2)
    gaps = []
    while len(gaps) < count:
        num_stages = rng.randint(2, 5)
        instance = random_instance(rng, rng.randint(num_stages, 10), num_stages)
        pipeline, start, memory = instance
        optimum = best_by_trying(instance)
        if optimum is None:
            with pytest.raises(PartitionError, match="no partition fits"):
                makespan(costs_of(pipeline), num_stages, start=start, memory=memory, pipeline=pipeline)
            continue
        found = makespan(costs_of(pipeline), num_stages, start=start, memory=memory, pipeline=pipeline)
        assert memory is None or overshoot(memory, found) <= 0
        gaps.append(plain_seconds(pipeline, found) / optimum - 1)
    over = [gap for gap in gaps if gap > 0.005]
    assert min(gaps) > -1e-9 and len(over) <= (0 if everything else 0.005 * len(gaps)), sorted(over)
    assert max(gaps) < 0.1


def test_larger_instances_are_never_worse_than_the_least_bottleneck() -> None:
    rng = random.Random(3)
    better = 0
    for _ in range(25):
        pipeline, start, _memory = random_instance(rng, 40, 12)
        pipeline = replace(pipeline, speeds=(1.0,) * 12)
        costs = costs_of(pipeline)
        found = plain_seconds(pipeline, makespan(costs, 12, start=start, pipeline=pipeline))
        least = plain_seconds(pipeline, balanced(costs, 12))
        assert found <= least * (1 + 1e-9)
        better += found < least * 0.99
    assert better >= 3


@pytest.mark.parametrize("everything", [True, False])
def test_equal_iterations_are_decided_by_the_fewest_moved_bytes(
    everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not everything:
        monkeypatch.setattr(MODULE, "_ALL", 0)
    # One micro-batch passes all layers in turn: no partition is better than another.
    pipeline = PipelineModel((1.0,) * 6, (2.0,) * 6, 1, (1.0,) * 3, layer_bytes=(1,) * 6)
    assert makespan([3.0] * 6, 3, start=[0, 1, 2, 6], pipeline=pipeline) == [0, 1, 2, 6]
    # Layers 2 and 3 cost nothing, so stage 0 may end anywhere from 2 to 4. It ends at 4 already.
    pipeline = PipelineModel((1.0, 1.0, 0.0, 0.0, 2.0), (0.0,) * 5, 8, (1.0, 1.0), layer_bytes=(1, 1, 9, 1, 1))
    assert makespan([1.0, 1.0, 0.0, 0.0, 2.0], 2, start=[0, 4, 5], pipeline=pipeline) == [0, 4, 5]
    assert makespan([1.0, 1.0, 0.0, 0.0, 2.0], 2, start=[0, 1, 5], pipeline=pipeline) == [0, 2, 5]


def test_no_shortest_partition_moves_fewer_bytes() -> None:
    rng = random.Random(4)
    for _ in range(80):
        pipeline, start, _memory = random_instance(rng, 7, 3)
        pipeline = replace(pipeline, forward_seconds=tuple(round(s) for s in pipeline.forward_seconds))
        pipeline = replace(pipeline, backward_seconds=tuple(2 * s for s in pipeline.forward_seconds))
        found = makespan(costs_of(pipeline), 3, start=start, pipeline=pipeline)
        seconds = plain_seconds(pipeline, found) * (1 + 1e-9)
        ties = [p for p in every_partition(7, 3) if plain_seconds(pipeline, p) <= seconds]
        assert moved_bytes(pipeline, start, found) == min(moved_bytes(pipeline, start, p) for p in ties)


def moved_bytes(pipeline: PipelineModel, old: list[int], new: list[int]) -> int:
    stage_before, stage_after = (np.searchsorted(p, range(old[-1]), side="right") for p in (old, new))
    return sum(size for size, a, b in zip(pipeline.layer_bytes, stage_before, stage_after) if a != b)


def test_partitions_by_hand() -> None:
    # With many micro-batches the slowest stage decides; with two, filling and draining: stage 0's load counts as often.
    forward, backward = (4.0, 1.0, 1.0, 1.0, 1.0), (0.0, 4.0, 2.0, 1.0, 1.0)
    few, many = (
        makespan(
            [4.0, 5.0, 3.0, 2.0, 2.0], 3, start=[0, 1, 2, 5], pipeline=PipelineModel(forward, backward, n, (1.0,) * 3)
        )
        for n in (2, 64)
    )
    assert few != many
    pipeline = PipelineModel((1.0, 2.0, 3.0), (1.0,) * 3, 4, (1.0,))
    assert makespan([2.0, 3.0, 4.0], 1, start=[0, 3], pipeline=pipeline) == [0, 3]
    assert makespan([2.0, 3.0, 4.0], 3, pipeline=replace(pipeline, speeds=(1.0,) * 3)) == [0, 1, 2, 3]
    assert makespan([4, 9, 7, 5], 3) == balanced([4, 9, 7, 5], 3), "there is no pipeline model"


def test_a_slow_stage_gets_fewer_layers() -> None:
    pipeline = PipelineModel((1.0,) * 9, (2.0,) * 9, 16, (1.0, 0.5, 1.0))
    assert makespan([3.0] * 9, 3, start=[0, 3, 6, 9], pipeline=pipeline) == [0, 4, 6, 9]


def test_iterations_of_what_are_no_partitions_are_refused() -> None:
    pipeline = PipelineModel((1.0,) * 4, (2.0,) * 4, 4, (1.0, 1.0))
    wrong: dict[str, list[Any]] = {
        "a partition in each row": [[0, 1, 4], [0, 3, 4]],
        "as many rows as boundaries": [[0, 1, 4], [0, 2, 4], [0, 3, 4]],
        "one partition": [0, 1, 4],
        "an empty stage": [[0], [0], [4]],
        "more layers": [[0], [1], [5]],
        "no integers": [[0.0], [1.0], [4.0]],
        "ragged": [[0, 0], [1], [4, 4]],
    }
    for what, partitions in wrong.items():
        with pytest.raises(PartitionError, match=r"3 boundaries from 0 to 4 in each column.*np\.transpose"):
            pytest.fail(f"{what}: {pipeline.iterations_seconds(partitions)}")
    several = [[0, 1, 4], [0, 2, 4]]
    found = pipeline.iterations_seconds(np.transpose(several))
    assert found.tolist() == [pipeline.seconds_under_1f1b(partition) for partition in several]


def test_a_model_of_another_pipeline_is_refused() -> None:
    pipeline = PipelineModel((1.0,) * 4, (1.0,) * 4, 2, (1.0, 1.0))
    with pytest.raises(PartitionError, match="for 4 layers and 2 stages, not for 5 and 2"):
        makespan([1.0] * 5, 2, pipeline=pipeline)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"speeds": (1.0, 0.0)}, "stage 1 has speed 0"),
        ({"backward_seconds": (1.0,) * 3}, "4 forward and 3 backward seconds"),
        ({"micro_batches": 0}, "0 micro-batches"),
    ]
    for values, words in refusals:
        with pytest.raises(PartitionError, match=words):
            pytest.fail(f"{words}: {replace(pipeline, **values)}")

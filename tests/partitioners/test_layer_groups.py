"""Layers that stay together: which cuts are allowed, and every balancer against all allowed partitions."""

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from ds_dynmo.errors import ConfigError, PartitionError
from ds_dynmo.layer_groups import KeepRule, LayerGroups
from ds_dynmo.partitioners import (
    DiffusionNode,
    MemoryModel,
    PipelineModel,
    balanced,
    balanced_groups,
    bottleneck,
    check_fits,
    names,
    propose,
    register,
    registry,
    uniform,
)
from ds_dynmo.placement import Placement
from ds_dynmo.plan import check_partition
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

NAMES = ["Embedding", "Block", "Norm", "Block", "Norm", "LastNorm", "Head"]


def random_groups(rng: random.Random, num_layers: int) -> LayerGroups:
    """Make groups from random runs, some of them overlapping, and from a type of layer."""
    rules: list[KeepRule] = []
    for _ in range(rng.randint(1, 2) if num_layers > 1 else 0):
        first = rng.randrange(num_layers - 1)
        rules.append(tuple(range(first, rng.randint(first + 2, min(num_layers, first + 3)))))
    kinds = rng.choices(["Block", "Norm"], [4, 1], k=num_layers)
    if "Norm" in kinds and rng.random() < 0.5:
        rules.append("type:^norm")
    return LayerGroups.of(rules, kinds)


def allowed(groups: LayerGroups, num_stages: int) -> list[list[int]]:
    return [partition for partition in every_partition(groups.num_layers, num_stages) if groups.allows(partition)]


def pipeline_of(costs: Sequence[float], speeds: Sequence[float]) -> PipelineModel:
    forward = tuple(float(cost) / 4 for cost in costs)
    backward = tuple(float(cost) - f for cost, f in zip(costs, forward))
    return PipelineModel(forward, backward, 4, tuple(speeds), tuple(range(1, len(costs) + 1)))


def choose(name: str, costs: Sequence[float], start: Sequence[int], groups: LayerGroups, **more: Any) -> list[int]:
    given = {"memory": None, "pipeline": None, "speeds": None, **more}
    return list(propose(name, costs, len(start) - 1, start=start, groups=groups, **given))


# -- allowed cuts -------------------------------------------------------------------------------------


def test_no_cut_inside_a_run_nor_before_a_type() -> None:
    assert LayerGroups.of([(5, 6)], NAMES).boundaries == (0, 1, 2, 3, 4, 5, 7)
    assert LayerGroups.of([(1, 2), (2, 3, 4)], NAMES).boundaries == (0, 1, 5, 6, 7)  # overlapping runs are one
    assert LayerGroups.of(["type:norm"], NAMES).boundaries == (0, 1, 3, 6, 7)  # anywhere in the name, ignoring case
    assert LayerGroups.of(["type:^Norm$|head"], NAMES).boundaries == (0, 1, 3, 5, 7)
    assert LayerGroups.of(["type:embed"], NAMES).single_layers  # nothing is cut before layer 0 anyway
    assert LayerGroups.of([], NAMES) == LayerGroups.single(7)


def test_a_rule_for_layers_that_do_not_exist_is_refused() -> None:
    words = r"keep_together\[1\] = \[6, 7\]: there is no layer 7, the model has layers 0 to 6"
    with pytest.raises(ConfigError, match=words):
        LayerGroups.of([(0, 1), (6, 7)], NAMES)
    words = r'keep_together\[1\] = "type:Loss": no layer\'s name matches \'Loss\'; names are .*\'LastNorm\''
    with pytest.raises(ConfigError, match=words):
        LayerGroups.of([(0, 1), "type:Loss"], NAMES)


def test_a_forbidden_cut_is_named_with_both_layers_and_the_rule() -> None:
    groups = LayerGroups.of([(5, 6), "type:norm"], NAMES)
    groups.check([0, 3, 7])
    with pytest.raises(PartitionError) as error:
        groups.check([0, 3, 6, 7])
    assert str(error.value) == (
        "partition [0, 3, 6, 7] cuts before layer 6: layers 5 (LastNorm) and 6 (Head) stay together, "
        "dynmo.keep_together has [5, 6]"
    )
    with pytest.raises(PartitionError, match=r'layers 1 \(Block\) and 2 \(Norm\) .* has "type:norm"'):
        groups.check([0, 2, 7])


def test_the_nearest_partition_moves_boundaries_least() -> None:
    rng = random.Random(1)
    for _ in range(200):
        groups = random_groups(rng, rng.randint(2, 10))
        num_stages = rng.randint(1, groups.num_groups)
        wanted = random_start(rng, groups.num_layers, num_stages)
        found = groups.nearest(wanted)
        assert groups.allows(found)
        check_partition(found, groups.num_layers, num_stages)
        least = min(moved(wanted, partition) for partition in allowed(groups, num_stages))
        assert moved(wanted, found) == least
        assert groups.unfold_partition(groups.fold_partition(found)) == found


def moved(old: Sequence[int], new: Sequence[int]) -> int:
    return sum(abs(a - b) for a, b in zip(old, new))


# -- memory -------------------------------------------------------------------------------------------


def test_groups_need_what_their_layers_need_wherever_segments_begin() -> None:
    rng = random.Random(2)
    for _ in range(150):
        groups = random_groups(rng, rng.randint(2, 9))
        num_stages = rng.randint(1, groups.num_groups)
        memory = random_memory(rng, groups.num_layers, num_stages)
        folded = memory.folded(groups)
        for stage in range(num_stages):
            furthest = folded.furthest_stops(stage)
            for first, start in enumerate(groups.boundaries):
                for last, stop in list(enumerate(groups.boundaries))[first + 1 :]:
                    assert folded.stage_bytes(stage, first, last) == memory.stage_bytes(stage, start, stop)
                    assert (last <= furthest[first]) == memory.fits(stage, start, stop)


def test_a_partition_that_does_not_fit_is_named_in_layers() -> None:
    memory = MemoryModel((1, 2, 3, 4), (0,) * 4, (0,) * 4, limits=(9, 3), micro_batches=1)
    groups = LayerGroups.of([(1, 2)], ["A", "B", "C", "D"])
    with pytest.raises(PartitionError, match=r"partition \[0, 3, 4\] does not fit: stage 1 needs 4 bytes"):
        check_fits(Placement.chain([0, 2, 3]), memory.folded(groups))


# -- balancers, against every allowed partition -------------------------------------------------------


def check_exact(seed: int, count: int, most_layers: int) -> tuple[int, int]:
    """Check with and without memory limits and speeds. Return how many instances fitted, and how many did not."""
    rng = random.Random(seed)
    met = none = 0
    for case in range(count):
        groups = random_groups(rng, rng.randint(2, most_layers))
        num_stages = rng.randint(1, groups.num_groups)
        costs = random_costs(rng, groups.num_layers, KINDS[case % len(KINDS)])
        memory = random_memory(rng, groups.num_layers, num_stages)
        speeds = [rng.choice([0.5, 1.0, 2.0]) for _ in range(num_stages)]
        start, partitions = random_start(rng, groups.num_layers, num_stages), allowed(groups, num_stages)
        found = choose("partition", costs, start, groups)
        least = min(plain_bottleneck(costs, partition) for partition in partitions)
        assert groups.allows(found) and plain_bottleneck(costs, found) <= least * (1 + 1e-12)
        assert bottleneck(costs, balanced_groups(costs, num_stages, groups)) <= least * (1 + 1e-12)
        found = choose("partition", costs, start, groups, speeds=speeds)
        slowest = min(slowest_seconds(costs, partition, speeds) for partition in partitions)
        assert slowest_seconds(costs, found, speeds) <= slowest * (1 + 1e-12)
        fitting = partitions_that_fit(partitions, memory)
        if not fitting:
            none += 1
            with pytest.raises(PartitionError) as error:
                choose("partition", costs, start, groups, memory=memory)
            nearest = [int(number) for number in re.findall(r"\d+", str(error.value).split("]")[0])]
            assert nearest in partitions
            assert overshoot(memory, nearest) == min(overshoot(memory, partition) for partition in partitions)
            continue
        met += 1
        found = choose("partition", costs, start, groups, memory=memory)
        least = min(plain_bottleneck(costs, partition) for partition in fitting)
        assert found in fitting and plain_bottleneck(costs, found) <= least * (1 + 1e-12), (costs, groups, memory)
    return met, none


def test_it_finds_the_smallest_bottleneck_of_the_allowed_partitions() -> None:
    met, none = check_exact(seed=3, count=240, most_layers=9)
    assert met > 60 and none > 20


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_smallest_bottleneck_of_the_allowed_partitions_fuzz(seed: int) -> None:
    check_exact(seed=400 + seed, count=4000, most_layers=11)


def test_makespan_finds_the_shortest_iteration_of_the_allowed_partitions() -> None:
    rng = random.Random(4)
    for _ in range(50):
        groups = random_groups(rng, rng.randint(2, 8))
        num_stages = rng.randint(1, groups.num_groups)
        costs = random_costs(rng, groups.num_layers, "lognormal")
        pipeline = pipeline_of(costs, [rng.choice([1.0, 2.0]) for _ in range(num_stages)])
        found = choose("makespan", costs, random_start(rng, groups.num_layers, num_stages), groups, pipeline=pipeline)
        least = min(pipeline.iteration_seconds(partition) for partition in allowed(groups, num_stages))
        assert groups.allows(found) and pipeline.iteration_seconds(found) <= least * (1 + 1e-8)


@pytest.mark.parametrize("name", names())
def test_every_balancer_makes_only_allowed_cuts_and_keeps_memory_limits(name: str) -> None:
    rng = random.Random(5)
    limited = 0
    for case in range(80):
        groups = random_groups(rng, rng.randint(2, 12))
        num_stages = rng.randint(1, groups.num_groups)
        costs = random_costs(rng, groups.num_layers, KINDS[case % len(KINDS)])
        start = random_start(rng, groups.num_layers, num_stages)
        pipeline = pipeline_of(costs, [1.0] * num_stages) if rng.random() < 0.5 else None
        found = choose(name, costs, start, groups, pipeline=pipeline)
        check_partition(found, groups.num_layers, num_stages)
        assert groups.allows(found) and all(type(boundary) is int for boundary in found)
        if pipeline is None:
            best = balanced_groups(costs, num_stages, groups)
            assert bottleneck(costs, found) <= bottleneck(costs, best) * (1 + 1e-12)
        memory, start = random_memory(rng, groups.num_layers, num_stages), rng.choice(allowed(groups, num_stages))
        if overshoot(memory, start) <= 0:
            limited += 1
            found = choose(name, costs, start, groups, memory=memory)
            assert groups.allows(found) and overshoot(memory, found) <= 0
            assert bottleneck(costs, found) <= bottleneck(costs, start) * (1 + 1e-12)
    assert limited > 20


def test_without_rules_layers_are_not_folded_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerGroups, "fold", None)
    for groups in (None, LayerGroups.single(4)):
        found = propose(
            "partition", [4, 9, 7, 5], 3, start=[0, 2, 3, 4], memory=None, pipeline=None, speeds=None, groups=groups
        )
        assert found == balanced([4, 9, 7, 5], 3)


def test_a_registered_balancer_sees_groups_as_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BALANCERS", dict(registry._BALANCERS))
    given: dict[str, Any] = {}

    @register("mine")
    def mine(costs: Any, num_stages: int, *, start: Any, memory: Any, pipeline: Any) -> list[int]:
        given.update(costs=costs, start=start, memory=memory, pipeline=pipeline)
        return uniform(len(costs), num_stages)

    groups = LayerGroups.of([(1, 2, 3)], ["Layer"] * 6)
    costs = [1, 2, 3, 4, 5, 6]
    memory = MemoryModel((1, 2, 3, 4, 5, 6), (6, 5, 4, 3, 2, 1), (1,) * 6, (99, 99), 2)
    found = choose("mine", costs, [0, 2, 6], groups, memory=memory, pipeline=pipeline_of(costs, [1.0, 1.0]))
    assert found == [0, 4, 6]
    assert given["costs"] == [1, 9, 5, 6] and given["start"] == [0, 1, 4]
    assert given["memory"].static_bytes == (1, 9, 5, 6) and given["memory"].activation_bytes == (6, 12, 2, 1)
    assert given["pipeline"].layer_bytes == (1, 9, 5, 6)
    assert given["pipeline"].iteration_seconds([0, 2, 4]) == pipeline_of(costs, [1, 1]).iteration_seconds([0, 4, 6])


def test_an_invalid_result_of_a_registered_balancer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BALANCERS", dict(registry._BALANCERS))
    answers: list[tuple[Any, str]] = [
        ([0, 3, 6], "from 0 to 4, for 2 stages"),
        ([0, 0, 4], "not strictly increasing"),
        ([0, 4], "should be 3 boundaries"),
        (None, "list of ints"),
    ]
    groups = LayerGroups.of([(1, 2, 3)], ["Layer"] * 6)
    for number, (answer, words) in enumerate(answers):
        register(f"wrong {number}")(lambda *args, answer=answer, **options: answer)
        with pytest.raises(PartitionError, match=f'balancer "wrong {number}", given 4 groups of layers: .*{words}'):
            pytest.fail(f"{answer}: {choose(f'wrong {number}', [1] * 6, [0, 1, 6], groups)}")


def test_more_stages_than_groups_are_refused() -> None:
    groups = LayerGroups.of([(0, 1), (2, 3)], ["Layer"] * 4)
    for name in names():
        with pytest.raises(PartitionError, match="makes 2 groups of the model's 4 layers, which cannot fill 3 stages"):
            pytest.fail(f"{name}: {choose(name, [1] * 4, [0, 1, 2, 4], groups)}")
        with pytest.raises(PartitionError, match="layer 1 costs"):
            pytest.fail(f"{name}: {choose(name, [1, -1, 1, 1], [0, 2, 4], groups)}")


# -- diffusion between neighbours ---------------------------------------------------------------------


def decide_among_neighbours(
    costs: Sequence[float], start: Sequence[int], groups: LayerGroups, memory: MemoryModel | None
) -> list[int] | None:
    """Run diffusion on stages that know only their own groups. Return None if nothing fits."""
    num_stages, partition = len(start) - 1, groups.fold_partition(start)
    nodes = []
    for stage in range(num_stages):
        own = costs[start[stage] : start[stage + 1]]
        known = memory.folded(groups).of_stage(stage, *partition[stage : stage + 2]) if memory is not None else None
        node = DiffusionNode(stage, num_stages, partition[stage], groups.fold(own, start[stage]), memory=known)
        nodes.append(node)
    while not nodes[0].done:
        sent = [node.messages() for node in nodes]
        for stage, node in enumerate(nodes):
            from_left = sent[stage - 1][1] if stage > 0 else None
            from_right = sent[stage + 1][0] if stage + 1 < num_stages else None
            assert node.expects == (from_left is not None, from_right is not None)
            node.receive(from_left, from_right)
    if not nodes[0].fits:
        return None
    return list(groups.unfold_partition([*(node.extent[0] for node in nodes), nodes[-1].extent[1]]))


def test_nodes_that_pass_groups_reach_the_same_partition() -> None:
    rng = random.Random(7)
    fitted = inner = 0
    for case in range(120):
        groups = random_groups(rng, rng.randint(2, 12))
        num_stages = rng.randint(1, groups.num_groups)
        costs = random_costs(rng, groups.num_layers, KINDS[case % len(KINDS)])
        start = groups.nearest(random_start(rng, groups.num_layers, num_stages))
        memory = random_memory(rng, groups.num_layers, num_stages) if case % 3 else None
        landed = decide_among_neighbours(costs, start, groups, memory)
        if landed is None:
            with pytest.raises(PartitionError, match="found no partition that fits"):
                choose("diffusion", costs, start, groups, memory=memory)
            continue
        fitted += 1
        inner += memory is not None and memory.checkpoint_interval > 1
        assert landed == choose("diffusion", costs, start, groups, memory=memory)
        assert groups.allows(landed) and (memory is None or overshoot(memory, landed) <= 0)
    assert fitted > 60 and inner > 8

"""Fewer stages: the paper's algorithm 2, the fewest that are fast enough, and who stays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import (
    MemoryModel,
    PipelineModel,
    balanced,
    fewest_stages,
    first_fit,
    hosts,
    pack_onto,
)
from ds_dynmo.placement import Placement, Shape, owners_of


def pipeline(seconds: Sequence[float], stages: int, micro_batches: int = 16) -> PipelineModel:
    forward = tuple(s / 3 for s in seconds)
    backward = tuple(2 * s / 3 for s in seconds)
    return PipelineModel(forward, backward, micro_batches, (1.0,) * stages)


def memory(layer_bytes: Sequence[int], limit: int, stages: int, activation_bytes: int = 0) -> MemoryModel:
    activations = (activation_bytes,) * len(layer_bytes)
    return MemoryModel(tuple(layer_bytes), activations, activations, (limit,) * stages, micro_batches=4)


# -- algorithm 2 --------------------------------------------------------------------------------------


CHAIN = Placement.chain([0, 2, 4, 6, 8])


def test_neighbours_that_fit_together_become_one_stage_down_to_the_target() -> None:
    assert first_fit(CHAIN, memory([10] * 8, 45, 4)) == Placement.chain([0, 4, 8])
    assert first_fit(CHAIN, memory([10] * 8, 39, 4)) == CHAIN
    assert first_fit(CHAIN, memory([10] * 8, 1000, 4), target=3) == Placement.chain([0, 4, 6, 8])
    assert first_fit(CHAIN, memory([10] * 8, 1000, 4)) == Placement.chain([0, 8])
    # As printed, algorithm 2 keeps counting a released source: here 1 and 2 together would leave no room for 3.
    assert first_fit(Placement.chain([0, 1, 2, 3]), memory([5, 5, 5], 10, 3)) == Placement.chain([0, 2, 3])
    # The weights of two layers fit on one of 2 stages; with 2 micro-batches in flight their activations do not.
    packed = first_fit(Placement.chain([0, 1, 2, 3]), memory([1, 1, 1], 8, 3, activation_bytes=2))
    assert packed == Placement.chain([0, 1, 3])
    with pytest.raises(PartitionError, match="target is 0"):
        first_fit(CHAIN, memory([10] * 8, 45, 4), target=0)


def test_two_stages_of_a_v_or_a_loop_merge_chunk_by_chunk() -> None:
    v, loop = (Placement.of_shape(shape, [0, 1, 3, 4, 6, 7, 8]) for shape in ("v", "loop"))
    enough = memory([10] * 8, 1000, 3)
    assert first_fit(v, enough, target=2) == Placement.v([0, 3, 4, 6, 8])
    assert first_fit(loop, enough, target=2) == Placement.loop([0, 3, 4, 7, 8])
    assert first_fit(v, enough) == first_fit(loop, enough) == Placement.chain([0, 8])
    assert first_fit(v, memory([10] * 8, 50, 3)) == Placement.v([0, 3, 4, 6, 8])
    assert first_fit(v, memory([10] * 8, 40, 3)) == v


def chosen(chooser: random.Random, shape: Shape, num_layers: int, stages: int) -> Placement:
    chunks = len(owners_of(shape, stages))
    return Placement.of_shape(shape, [0, *sorted(chooser.sample(range(1, num_layers), chunks - 1)), num_layers])


@pytest.mark.parametrize("shape", ["chain", "v"])
def test_what_it_packs_fits_and_cannot_be_packed_further(shape: Shape) -> None:
    for seed in range(20):
        chooser = random.Random(seed)
        stages = chooser.randint(2, 6)
        sizes = [chooser.randint(1, 9) for _ in range(chooser.randint(2 * stages, 14))]
        start = chosen(chooser, shape, len(sizes), stages)
        limit = max(memory(sizes, 0, stages).bytes_per_stage(start)) + chooser.randint(0, sum(sizes) // 2)
        model = memory(sizes, limit, stages)
        packed = first_fit(start, model)
        further = []
        for stage in packed.stages[:-1] if packed.num_stages > 2 else ():
            here, following = (
                [chunk for chunk, owner in enumerate(packed.owners) if owner == s] for s in (stage, stage + 1)
            )
            cuts = [max(pair) for pair in zip(here, following)]
            rest = [cut for number, cut in enumerate(packed.boundaries) if number not in cuts]
            further.append(Placement.of_shape(shape, rest))
        if packed.num_stages == 2:
            further.append(Placement.chain([0, len(sizes)]))
        needed = [max(model.on(each.num_stages).bytes_per_stage(each)) for each in (packed, *further)]
        assert needed[0] <= limit and all(each > limit for each in needed[1:]), (seed, packed)


# -- throughput ---------------------------------------------------------------------------------------


def evenly(num_layers: int) -> Callable[[int], Placement]:
    return lambda count: Placement.chain(balanced([1.0] * num_layers, count))


def test_the_fewest_stages_that_are_fast_enough() -> None:
    """A model whose layers take half their time is as fast on half of the stages."""
    dense, pruned = pipeline([1.0] * 16, 8, 64), pipeline([0.5] * 16, 8, 64)
    reference = dense.iteration_seconds(balanced([1.0] * 16, 8))
    found = fewest_stages(evenly(16), pruned, 8, within_seconds=reference)
    assert found is not None and found.num_stages == 4
    assert found.iteration_seconds <= reference
    assert fewest_stages(evenly(8), pipeline([1.0] * 8, 4), 4, within_seconds=1e-6) is None


def test_stage_counts_that_do_not_fit_are_skipped_and_there_is_a_minimum() -> None:
    model, sizes = pipeline([0.01] * 8, 4), [10] * 8

    def balance(count: int) -> Placement:
        return Placement.chain(balanced([1.0] * 8, count, memory=memory(sizes, 40, 4).on(count)))

    found = fewest_stages(balance, model, 4, within_seconds=1e9)
    assert found is not None and found.num_stages == 2
    found = fewest_stages(evenly(8), model, 4, within_seconds=1e9, least=3)
    assert found is not None and found.num_stages == 3
    for count in (0, 9):
        with pytest.raises(PartitionError, match="8 layers can be on 1 to 8 stages"):
            pytest.fail(f"{count}: {pack_onto(evenly(8), model, count)}")


# -- who stays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("present", "wanted"), [("chain", "chain"), ("v", "v"), ("loop", "loop"), ("v", "chain")])
def test_chosen_hosts_keep_the_most_bytes_in_place(present: Shape, wanted: Shape) -> None:
    for seed in range(25):
        chooser = random.Random(seed)
        before = chooser.randint(2, 6)
        after = chooser.randint(1, before)
        sizes = [chooser.randint(1, 9) for _ in range(chooser.randint(2 * before, 14))]
        old, new = chosen(chooser, present, len(sizes), before), chosen(chooser, wanted, len(sizes), after)
        kept = {}
        for choice in itertools.combinations(range(before), after):
            if choice[0] == 0 and (after == 1 or choice[-1] == before - 1):
                there = new.among(choice, before)
                stays = (old.stage_of(layer) == there.stage_of(layer) for layer in range(len(sizes)))
                kept[choice] = sum(itertools.compress(sizes, stays))
        assert kept[hosts(old, new, sizes)] == max(kept.values()), seed
    with pytest.raises(PartitionError, match="3 stages cannot be chosen from 2"):
        hosts(Placement.chain([0, 2, 4]), Placement.chain([0, 1, 2, 4]), [1] * 4)

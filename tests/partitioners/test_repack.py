"""Fewer stages: the paper's algorithm 2, the fewest that are fast enough, and who stays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import (
    MemoryModel,
    PipelineModel,
    balanced,
    fewest_stages,
    first_fit,
    fits_on,
    hosts,
    pack_onto,
)
from ds_dynmo.placement import Placement


def pipeline(seconds: Sequence[float], stages: int, micro_batches: int = 16) -> PipelineModel:
    forward = tuple(s / 3 for s in seconds)
    backward = tuple(2 * s / 3 for s in seconds)
    return PipelineModel(forward, backward, micro_batches, (1.0,) * stages)


def memory(layer_bytes: Sequence[int], limit: int, stages: int, activation_bytes: int = 0) -> MemoryModel:
    activations = (activation_bytes,) * len(layer_bytes)
    return MemoryModel(tuple(layer_bytes), activations, activations, (limit,) * stages, micro_batches=4)


# -- algorithm 2 --------------------------------------------------------------------------------------


def test_neighbours_that_fit_together_become_one_stage() -> None:
    packed = first_fit([0, 2, 4, 6, 8], fits_on(memory([10] * 8, 45, 4)))
    assert packed == (0, 4, 8)


def test_if_no_neighbours_fit_nothing_changes() -> None:
    assert first_fit([0, 2, 4, 6, 8], fits_on(memory([10] * 8, 39, 4))) == (0, 2, 4, 6, 8)


def test_it_stops_at_the_target() -> None:
    assert first_fit([0, 2, 4, 6, 8], fits_on(memory([10] * 8, 1000, 4)), target=3) == (0, 4, 6, 8)
    assert first_fit([0, 2, 4, 6, 8], fits_on(memory([10] * 8, 1000, 4))) == (0, 8)


def test_a_released_stage_is_not_counted_again() -> None:
    """As printed, algorithm 2 keeps counting a released source: here 1 and 2 together would leave no room for 3."""
    assert first_fit([0, 1, 2, 3], fits_on(memory([5, 5, 5], 10, 3))) == (0, 2, 3)


def test_activations_in_flight_count() -> None:
    """The weights of two layers fit on one of 2 stages; with 2 micro-batches in flight their activations do not."""
    assert first_fit([0, 1, 2, 3], fits_on(memory([1, 1, 1], 8, 3, activation_bytes=2))) == (0, 1, 3)


def test_a_target_below_one_is_refused() -> None:
    with pytest.raises(PartitionError, match="target is 0"):
        first_fit([0, 1, 2], lambda *_: True, target=0)


@pytest.mark.parametrize("seed", range(20))
def test_what_it_packs_fits_and_cannot_be_packed_further(seed: int) -> None:
    chooser = random.Random(seed)
    stages = chooser.randint(2, 6)
    sizes = [chooser.randint(1, 9) for _ in range(chooser.randint(stages, 14))]
    limit = chooser.randint(max(sizes) * 2, sum(sizes) + 5)
    model = memory(sizes, limit, stages)
    start = balanced(sizes, stages)
    if not all(model.fits(s, *start[s : s + 2]) for s in range(stages)):
        return
    packed = first_fit(start, fits_on(model))
    assert all(fits_on(model)(len(packed) - 1, s, *packed[s : s + 2]) for s in range(len(packed) - 1))
    for boundary in packed[1:-1]:
        merged = [b for b in packed if b != boundary]
        assert not all(fits_on(model)(len(merged) - 1, s, *merged[s : s + 2]) for s in range(len(merged) - 1))


# -- throughput ---------------------------------------------------------------------------------------


def test_the_fewest_stages_that_are_fast_enough() -> None:
    """A model whose layers take half their time is as fast on half of the stages."""
    dense, pruned = pipeline([1.0] * 16, 8, 64), pipeline([0.5] * 16, 8, 64)
    reference = dense.iteration_seconds(balanced([1.0] * 16, 8))
    found = fewest_stages(lambda n: balanced([1.0] * 16, n), pruned, 8, within_seconds=reference)
    assert found is not None and found.num_stages == 4
    assert found.iteration_seconds <= reference


def test_no_answer_if_no_number_of_stages_is_fast_enough() -> None:
    model = pipeline([1.0] * 8, 4)
    assert fewest_stages(lambda n: balanced([1.0] * 8, n), model, 4, within_seconds=1e-6) is None


def test_stage_counts_that_do_not_fit_are_skipped() -> None:
    sizes, model = [10] * 8, pipeline([0.01] * 8, 4)

    def balance(count: int) -> Sequence[int]:
        return balanced([1.0] * 8, count, memory=memory(sizes, 40, 4).on(count))

    found = fewest_stages(balance, model, 4, within_seconds=1e9)
    assert found is not None and found.num_stages == 2


def test_no_fewer_stages_than_the_minimum() -> None:
    model = pipeline([0.01] * 8, 4)
    found = fewest_stages(lambda n: balanced([1.0] * 8, n), model, 4, within_seconds=1e9, least=3)
    assert found is not None and found.num_stages == 3


@pytest.mark.parametrize("count", [0, 9])
def test_impossible_stage_counts_are_refused(count: int) -> None:
    with pytest.raises(PartitionError, match="8 layers can be on 1 to 8 stages"):
        pack_onto(lambda n: balanced([1.0] * 8, n), pipeline([1.0] * 8, 4), count)


# -- who stays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_chosen_hosts_keep_the_most_bytes_in_place(seed: int) -> None:
    chooser = random.Random(seed)
    present = chooser.randint(2, 6)
    wanted = chooser.randint(1, present)
    num_layers = chooser.randint(present, 12)
    sizes = [chooser.randint(1, 9) for _ in range(num_layers)]
    old = [0, *sorted(chooser.sample(range(1, num_layers), present - 1)), num_layers]
    new = [0, *sorted(chooser.sample(range(1, num_layers), wanted - 1)), num_layers]

    def kept(choice: Sequence[int]) -> int:
        expanded = Placement.chain(new).among(choice, present).boundaries
        return sum(
            size
            for layer, size in enumerate(sizes)
            if any(old[s] <= layer < old[s + 1] and expanded[s] <= layer < expanded[s + 1] for s in range(present))
        )

    choices = [
        choice
        for choice in itertools.combinations(range(present), wanted)
        if choice[0] == 0 and (wanted == 1 or choice[-1] == present - 1)
    ]
    chosen = hosts(old, new, sizes)
    assert chosen in choices
    assert kept(chosen) == max(map(kept, choices))


def test_more_hosts_than_stages_are_refused() -> None:
    with pytest.raises(PartitionError, match="3 stages cannot be chosen from 2"):
        hosts([0, 2, 4], [0, 1, 2, 4], [1] * 4)


def test_stages_that_are_not_chosen_are_empty() -> None:
    assert Placement.chain([0, 3, 8]).among([0, 3], 4).boundaries == (0, 3, 3, 3, 8)
    assert Placement.chain([0, 8]).among([0], 3).boundaries == (0, 8, 8, 8)

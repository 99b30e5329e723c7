"""Bytes that stages hold at the peak of a migration, calculated by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import astuple

import pytest

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import between, migration_peaks, overflow
from ds_dynmo.placement import Placement
from ds_dynmo.plan import HeldBytes, MigrationPlan, check_partition
from tests.partitioners.instances import random_start


def peaks(
    old: list[int],
    new: list[int],
    layers: list[HeldBytes],
    first_uses: Sequence[int | None],
    training_bytes: list[int] | None = None,
) -> tuple[int, ...]:
    return migration_peaks(MigrationPlan.between(old, new), layers, first_uses, training_bytes=training_bytes)


def separate(*sizes: int) -> list[HeldBytes]:
    return [HeldBytes(separate=size) for size in sizes]


def test_arriving_layers_are_held_beside_leaving_ones_until_they_change_places() -> None:
    layers = separate(10, 20, 30, 40)
    assert peaks([0, 2, 4], [0, 1, 4], layers, [0, 1, 2, 3]) == (30, 90)
    assert peaks([0, 2, 3, 4], [0, 1, 2, 4], layers, [0, 1, 2, 3]) == (30, 50, 70)
    # Stage 1 gets 20 and 30 and still has 40 and 50, which it sends.
    assert peaks([0, 3, 5, 6], [0, 1, 3, 6], separate(10, 20, 30, 40, 50, 60), range(6)) == (60, 140, 150)
    # Small tensors are held twice while they travel.
    layers[1] = HeldBytes(separate=20, staged=5)
    assert peaks([0, 2, 4], [0, 1, 4], layers, [0, 1, 2, 3]) == (35, 95)


def test_flat_weights_are_held_twice_then_one_kind_of_state_at_a_time() -> None:
    layer = HeldBytes(flat=2, shards=12, largest_shard=4, gradients=4)
    # Of 2 layers, then 1 and 3. Layers travel: 4 + 2 + 24 and 4 + 6 + 24; state: 2 + 24 + 4 and 6 + 36 + 8;
    # at rest: before 36, after 18 and 54.
    assert peaks([0, 2, 4], [0, 1, 4], [layer] * 4, [0, 1, 2, 3]) == (36, 54)
    zero1 = HeldBytes(flat=2, shards=12, largest_shard=4)
    assert peaks([0, 2, 4], [0, 1, 4], [zero1] * 4, [0, 1, 2, 3]) == (30, 50)


def test_all_state_is_held_twice_during_a_batch() -> None:
    layer = HeldBytes(flat=2, shards=12, largest_shard=4, gradients=4)
    assert peaks([0, 2, 4], [0, 1, 4], [layer] * 4, [0, 1, 2, 3], training_bytes=[18] * 4) == (36 + 14, 36 + 42)
    # Without a wrapper, gradients exist in training alone: 4 bytes that follow the layer of 10.
    layers = [HeldBytes(separate=10)] * 4
    assert peaks([0, 2, 4], [0, 1, 4], layers, [0, 1, 2, 3], training_bytes=[14] * 4) == (28, 28 + 10 + 4)
    # Of 1 layer, then 8: the new gradients are larger than the shards that were freed for them.
    layers = [HeldBytes(flat=2, shards=2, largest_shard=2, gradients=8)] * 9
    assert peaks([0, 1, 9], [0, 8, 9], layers, range(9), training_bytes=[12] * 9)[0] == 8 * 12 + 8


def test_zeros_gradients_follow_once_the_old_shards_are_freed() -> None:
    """Those of a layer that left stay in their buffer until the step."""
    layers = [HeldBytes(flat=2, shards=6, largest_shard=2)] * 10
    found = peaks([0, 1, 2, 10], [0, 2, 9, 10], layers, range(10), training_bytes=[12] * 10)
    assert found[1] == 7 * 12 + 4


def test_every_stage_rebuilds_its_flat_buffers() -> None:
    layer = HeldBytes(flat=2, shards=12, largest_shard=4)
    assert peaks([0, 2, 3, 4], [0, 1, 3, 4], [layer] * 4, [0, 1, 2, 3]) == (30, 32, 18)


def test_without_moves_nothing_is_held_twice_and_a_function_holds_nothing() -> None:
    layers = separate(10, 20, 30)
    assert peaks([0, 1, 3], [0, 1, 3], layers, [0, 1, 2]) == (10, 50)
    assert overflow(MigrationPlan.between([0, 1, 3], [0, 1, 3]), layers, [0, 1, 2], 5, [0, 0]) is None
    layers = [HeldBytes(separate=10), HeldBytes(), HeldBytes(separate=30), HeldBytes(separate=40)]
    assert peaks([0, 3, 4], [0, 1, 4], layers, [0, None, 2, 3]) == (40, 70)
    with pytest.raises(PartitionError, match="2 layers needs as many bytes and first uses, got 1 and 2"):
        peaks([0, 1, 2], [0, 1, 2], [HeldBytes()], [0, 1])


def test_tied_layers_count_once_on_a_stage_and_on_every_stage_that_has_them() -> None:
    layers, uses = separate(100, 10, 10, 100), [0, 1, 2, 0]
    assert peaks([0, 2, 4], [0, 3, 4], layers, uses) == (120, 110)
    # Both uses end on stage 0. It has the parameters already, and stage 1 keeps them until the end of the move.
    plan = MigrationPlan.between([0, 2, 4], Placement.chain([0, 4, 4], empty=[1]))
    assert migration_peaks(plan, layers, uses) == (120, 110)


def test_a_peak_exceeds_the_bytes_at_rest_only_by_what_arrives() -> None:
    rng = random.Random(1)
    for _ in range(50):
        num_stages = rng.randint(1, 5)
        layers = [HeldBytes(separate=rng.randint(0, 9)) for _ in range(12)]
        old, new = random_start(rng, 12, num_stages), random_start(rng, 12, num_stages)
        plan = MigrationPlan.between(old, new)
        for stage, peak in enumerate(migration_peaks(plan, layers, list(range(12)))):
            rest = [sum(layer.separate for layer in layers[p[stage] : p[stage + 1]]) for p in (old, new)]
            arriving = sum(layers[move.layer].separate for move in plan.moves if move.destination == stage)
            assert max(rest) <= peak <= rest[0] + arriving, (old, new, layers)


def test_a_stage_above_its_limit_is_named_if_layers_arrive() -> None:
    layers, plan = separate(10, 20, 30, 40), MigrationPlan.between([0, 2, 4], [0, 1, 4])
    found = overflow(plan, layers, [0, 1, 2, 3], 89, [30, 70])
    assert found is not None and astuple(found) == (1, 90, 89)
    assert str(found) == "stage 1 would hold 90 bytes while layers move, its limit is 89"
    assert overflow(plan, layers, [0, 1, 2, 3], 90, [30, 70]) is None
    # A stage that is above the limit already may give layers away.
    back = MigrationPlan.between([0, 1, 4], [0, 2, 4])
    assert overflow(back, layers, [0, 1, 2, 3], 50, [10, 90]) is None
    assert overflow(back, layers, [0, 1, 2, 3], 50, [10, 89]) is not None


def test_a_move_during_a_batch_needs_more() -> None:
    plan, layers = MigrationPlan.between([0, 2, 4], [0, 1, 4]), [HeldBytes(flat=2, shards=12, largest_shard=4)] * 4
    assert overflow(plan, layers, [0, 1, 2, 3], 50, [28, 28]) is None
    found = overflow(plan, layers, [0, 1, 2, 3], 50, [28, 28], training_bytes=[14] * 4)
    assert found is not None and astuple(found) == (1, 28 + 6 + 36, 50)
    found = overflow(plan, layers, [0, 1, 2, 3], 50, [28, 33], training_bytes=[14] * 4)  # 5 bytes of activations
    assert found is not None and found.peak_bytes == 28 + 6 + 36 + 5


def test_partitions_between_two_are_valid_and_approach_the_second() -> None:
    rng = random.Random(1)
    for _ in range(50):
        old, new = random_start(rng, 15, 4), random_start(rng, 15, 4)
        found = list(between(old, new))
        far = [sum(abs(here - there) for here, there in zip(each, new)) for each in found]
        assert far == sorted(far)
        for each in found:
            assert check_partition(each, 15, 4) == each
            assert all(min(a, b) <= here <= max(a, b) for a, b, here in zip(old, new, each))
        assert tuple(old) not in found and tuple(new) not in found

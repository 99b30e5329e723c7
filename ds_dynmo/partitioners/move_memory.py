"""Memory during a migration: the bytes of each stage at the peak, and whether they exceed the limit. Pure.

A migration holds old and new buffers at once, in this order:

1. Gradient buffers are freed, and arriving layers are allocated beside the present ones. A flat optimizer has the old
   flat buffer of weights and the new one, which holds the weights that stay and those that arrive.
2. Layers travel. Small tensors are packed into messages: sender and receiver hold their bytes twice meanwhile.
3. The sent layers are freed at once, at the commit.
4. The optimizer's shards follow, one kind of state after the other: old and new shards of one kind exist at once.
5. Gradient buffers are allocated again.

If a batch trains meanwhile, gradients stay, and the optimizer's shards travel with the layers: old and new shards of
all kinds exist at once. At the batch's end the gradients of arriving layers follow; those that ZeRO shards, and new
gradient buffers, once the old shards are freed. Activations are not counted, unless the caller knows them, and nor is
what the optimizer's step allocates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ds_dynmo.errors import PartitionError
from ds_dynmo.plan import HeldBytes, MigrationPlan

__all__ = ["Overflow", "between", "migration_peaks", "overflow"]


@dataclass(frozen=True)
class Overflow:
    """A stage that exceeds its limit during a migration, in bytes."""

    stage: int
    peak_bytes: int
    limit: int

    def __str__(self) -> str:
        return f"stage {self.stage} would hold {self.peak_bytes} bytes while layers move, its limit is {self.limit}"


def migration_peaks(
    plan: MigrationPlan,
    layers: Sequence[HeldBytes],
    first_uses: Sequence[int | None],
    *,
    training_bytes: Sequence[int] | None = None,
    activation_bytes: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Compute, per stage, the peak bytes of its ranks while ``plan`` is carried out.

    Args:
        layers: per layer, its bytes on a rank of its stage.
        first_uses: per layer, the first layer with the same parameters: itself unless it is tied; None for a plain
            function.
        training_bytes: per layer, its bytes in training without activations, if a batch trains while layers travel;
            None: training waits.
        activation_bytes: per stage, of a batch that trains while layers travel; None: they do not count.

    Raises:
        PartitionError: ``layers`` or ``first_uses`` do not have one value per layer of the plan.
    """
    num_layers, stages = plan.old.num_layers, plan.old.stages
    if len(layers) != num_layers or len(first_uses) != num_layers:
        raise PartitionError(
            f"a plan of {num_layers} layers needs as many bytes and first uses, got {len(layers)} and {len(first_uses)}"
        )
    before = [_owners(plan.old.layers_of(stage), first_uses) for stage in stages]
    after = [_owners(plan.new.layers_of(stage), first_uses) for stage in stages]
    sent = [move for move in plan.moves if move.layer in after[move.destination].values()]

    def peak(stage: int) -> int:
        old, new = _sum(layers, before[stage].values()), _sum(layers, after[stage].values())
        arriving = [move.layer for move in sent if move.destination == stage]
        leaving = [move.layer for move in sent if move.source == stage]
        moved = [layers[number] for number in arriving], [layers[number] for number in leaving]
        if training_bytes is None:
            return _peak(old, new, *moved)
        trains, will_train = (sum(training_bytes[n] for n in here[stage].values()) for here in (before, after))
        of_batch = {n: training_bytes[n] - layers[n].total for n in (*arriving, *leaving)}
        travel = trains + new.shards + _travelling(new, *moved)
        gradients = sum(of_batch[n] for n in arriving if _gradients_come_with(layers[n]))
        sharded = sum(of_batch[n] for n in leaving if not _gradients_come_with(layers[n]))
        activations = activation_bytes[stage] if activation_bytes is not None else 0
        return max(travel + activations, travel + gradients, will_train + old.gradients + sharded)

    return tuple(map(peak, stages))


def overflow(
    plan: MigrationPlan,
    layers: Sequence[HeldBytes],
    first_uses: Sequence[int | None],
    limit: int,
    present_bytes: Sequence[int],
    *,
    training_bytes: Sequence[int] | None = None,
) -> Overflow | None:
    """Find the stage that ``plan`` takes furthest above ``limit``; None if no stage exceeds it.

    Args:
        present_bytes: per stage, the bytes that it needs now. A stage above the limit may hold as many during the move;
            otherwise it could not give layers away. With ``training_bytes``, what is above these counts as
            activations.
        training_bytes: as in :func:`migration_peaks`.

    Raises:
        PartitionError: see :func:`migration_peaks`.
    """
    if not plan.moves:
        return None
    activations = None
    if training_bytes is not None:
        owners = [_owners(plan.old.layers_of(stage), first_uses).values() for stage in plan.old.stages]
        without = [sum(training_bytes[number] for number in here) for here in owners]
        activations = [max(0, present - rest) for present, rest in zip(present_bytes, without)]
    peaks = migration_peaks(plan, layers, first_uses, training_bytes=training_bytes, activation_bytes=activations)
    above = {stage: peak for stage, peak in enumerate(peaks) if peak > max(limit, present_bytes[stage])}
    if not above:
        return None
    worst = max(above, key=lambda stage: above[stage])
    return Overflow(worst, above[worst], limit)


def between(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the partitions strictly between ``old`` and ``new``, the nearest to ``new`` first.

    >>> list(between([0, 2, 8], [0, 5, 8]))
    [(0, 4, 8), (0, 3, 8)]
    """
    steps = max((abs(there - here) for here, there in zip(old, new)), default=0)
    for step in range(steps - 1, 0, -1):
        yield tuple(here + (2 * step * (there - here) + steps) // (2 * steps) for here, there in zip(old, new))


def _owners(here: Iterable[int], first_uses: Sequence[int | None]) -> dict[int, int]:
    """Map each first use to the first layer of ``here`` with the same parameters, which holds them."""
    owners: dict[int, int] = {}
    for layer in here:
        use = first_uses[layer]
        if use is not None:
            owners.setdefault(use, layer)
    return owners


def _sum(layers: Sequence[HeldBytes], numbers: Iterable[int]) -> HeldBytes:
    return sum((layers[number] for number in numbers), start=HeldBytes())


def _gradients_come_with(layer: HeldBytes) -> bool:
    """Return whether gradients travel with the layer; those of ZeRO, which only a batch has, follow the shards."""
    return layer.gradients > 0 or not layer.shards


def _peak(old: HeldBytes, new: HeldBytes, arriving: Sequence[HeldBytes], leaving: Sequence[HeldBytes]) -> int:
    """Compute the peak of one stage from its layers before and after, and the layers that it receives and sends."""
    travels = old.total - old.gradients + _travelling(new, arriving, leaving)
    one_kind = max(old.shards + new.largest_shard, new.shards + old.largest_shard)
    shards_staged = sum(min(layer.staged, layer.largest_shard) for layer in (*arriving, *leaving))
    return max(old.total, travels, new.separate + new.flat + one_kind + shards_staged, new.total)


def _travelling(new: HeldBytes, arriving: Sequence[HeldBytes], leaving: Sequence[HeldBytes]) -> int:
    """Count the bytes beside the old layers: the new flat buffer, arriving layers, and packed small tensors."""
    return new.flat + sum(layer.separate + layer.staged for layer in arriving) + sum(layer.staged for layer in leaving)

"""Memory during a migration: the bytes of each stage at the peak, and whether they exceed the limit. Pure.

A migration holds old and new buffers at once, in this order:

1. Gradient buffers are freed, and arriving layers are allocated beside the present ones. A flat optimizer has the old
   flat buffer of weights and the new one, which holds the weights that stay and those that arrive.
2. Layers travel. Small tensors are packed into messages: sender and receiver hold their bytes twice meanwhile.
3. The sent layers are freed at once, at the commit.
4. The optimizer's shards follow, one kind of state after the other: old and new shards of one kind exist at once.
5. Gradient buffers are allocated again.

If a batch trains meanwhile, gradient buffers stay, and the optimizer's shards travel with the layers: old and new
shards of all kinds exist at once. Activations are not counted.
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
    plan: MigrationPlan, layers: Sequence[HeldBytes], first_uses: Sequence[int | None], *, overlapped: bool = False
) -> tuple[int, ...]:
    """Compute, per stage, the peak bytes of its ranks while ``plan`` is carried out.

    Args:
        layers: per layer, its bytes on a rank of its stage.
        first_uses: per layer, the first layer with the same parameters: itself unless it is tied; None for a plain
            function.
        overlapped: a batch trains while layers travel.

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
    return tuple(
        _peak(
            _sum(layers, before[stage].values()),
            _sum(layers, after[stage].values()),
            [layers[move.layer] for move in sent if move.destination == stage],
            [layers[move.layer] for move in sent if move.source == stage],
            overlapped=overlapped,
        )
        for stage in stages
    )


def overflow(
    plan: MigrationPlan,
    layers: Sequence[HeldBytes],
    first_uses: Sequence[int | None],
    limit: int,
    present_bytes: Sequence[int],
    *,
    overlapped: bool = False,
) -> Overflow | None:
    """Find the stage that ``plan`` takes furthest above ``limit``; None if no stage exceeds it.

    Args:
        present_bytes: per stage, the bytes that it needs now. A stage above the limit may hold as many during the move;
            otherwise it could not give layers away.
        overlapped: a batch trains while layers travel.

    Raises:
        PartitionError: see :func:`migration_peaks`.
    """
    if not plan.moves:
        return None
    peaks = migration_peaks(plan, layers, first_uses, overlapped=overlapped)
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


def _peak(
    old: HeldBytes,
    new: HeldBytes,
    arriving: Sequence[HeldBytes],
    leaving: Sequence[HeldBytes],
    *,
    overlapped: bool,
) -> int:
    """Compute the peak of one stage from its layers before and after, and the layers that it receives and sends."""
    travelling = [*arriving, *leaving]
    travels = old.total + new.flat + sum(layer.separate + layer.staged for layer in arriving)
    travels += sum(layer.staged for layer in leaving)
    if overlapped:
        return max(travels + new.shards, new.total)
    travels -= old.gradients
    one_kind = max(old.shards + new.largest_shard, new.shards + old.largest_shard)
    shards_staged = sum(min(layer.staged, layer.largest_shard) for layer in travelling)
    return max(old.total, travels, new.separate + new.flat + one_kind + shards_staged, new.total)

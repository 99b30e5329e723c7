"""What stages hold at the peak of a migration, and whether that is more than they may. Pure.

A migration holds the old and the new of some things at once, in this order:

1. Layers travel, in :func:`rounds`. What was sent is freed at the end of its round, what arrives stands beside it.
   Buffers of gradients are free. Under a flat optimizer the weights lie in the stage's old flat buffer and, those that
   stay and those that arrive, in the new one as well.
2. The optimizer's shards follow, one kind of state after the other: of that kind the old and the new shards.
3. The buffers of gradients are made anew.

Small tensors travel packed together: their bytes are held once more, on both sides, while they do. Activations are
held in none of this: it happens between two batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ds_dynmo.errors import PartitionError
from ds_dynmo.plan import HeldBytes, LayerMove, MigrationPlan

__all__ = ["Overflow", "between", "migration_peaks", "overflow", "rounds"]


@dataclass(frozen=True)
class Overflow:
    """A stage that a migration takes above what it may hold, in bytes."""

    stage: int
    peak_bytes: int
    limit: int

    def __str__(self) -> str:
        return f"stage {self.stage} would hold {self.peak_bytes} bytes while layers move, its limit is {self.limit}"


def rounds(moves: Iterable[LayerMove]) -> list[list[LayerMove]]:
    """``moves`` in rounds: in each, a stage sends one layer at most and receives one at most.

    >>> moves = [LayerMove(2, 0, 1), LayerMove(3, 0, 1), LayerMove(5, 1, 2)]
    >>> [[move.layer for move in round_] for round_ in rounds(moves)]
    [[2, 5], [3]]
    """
    found: list[list[LayerMove]] = []
    for move in moves:
        free = (
            round_
            for round_ in found
            if all(move.source != other.source and move.destination != other.destination for other in round_)
        )
        chosen = next(free, None)
        if chosen is None:
            found.append([move])
        else:
            chosen.append(move)
    return found


def migration_peaks(
    plan: MigrationPlan, layers: Sequence[HeldBytes], first_uses: Sequence[int | None]
) -> tuple[int, ...]:
    """Per stage, the most bytes that its ranks hold at once while ``plan`` is carried out.

    Args:
        layers: per layer, what it holds on a rank of any stage that has it.
        first_uses: per layer, the first that uses the same parameters: itself, unless it is tied; None: a function.

    Raises:
        PartitionError: not one of each per layer of the plan.
    """
    num_layers, num_stages = plan.old[-1], len(plan.old) - 1
    if len(layers) != num_layers or len(first_uses) != num_layers:
        raise PartitionError(
            f"a plan of {num_layers} layers needs as many bytes and first uses, got {len(layers)} and {len(first_uses)}"
        )
    after = [_owners(plan.new, stage, first_uses) for stage in range(num_stages)]
    in_turn = rounds(move for move in plan.moves if move.layer in after[move.destination].values())
    return tuple(
        _peak(
            stage,
            in_turn,
            layers,
            first_uses,
            _owners(plan.old, stage, first_uses),
            after[stage],
            range(plan.old[stage], plan.old[stage + 1]),
        )
        for stage in range(num_stages)
    )


def overflow(
    plan: MigrationPlan,
    layers: Sequence[HeldBytes],
    first_uses: Sequence[int | None],
    limit: int,
    present_bytes: Sequence[int],
) -> Overflow | None:
    """The stage that ``plan`` takes furthest above ``limit``; None if it takes none above.

    Args:
        present_bytes: per stage, what it needs as it is: a stage that is above its limit may stay as high, else it
            could give nothing away.

    Raises:
        PartitionError: see :func:`migration_peaks`.
    """
    if not plan.moves:
        return None
    peaks = migration_peaks(plan, layers, first_uses)
    above = {stage: peak for stage, peak in enumerate(peaks) if peak > max(limit, present_bytes[stage])}
    if not above:
        return None
    worst = max(above, key=lambda stage: above[stage])
    return Overflow(worst, above[worst], limit)


def between(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The partitions on the way from ``old`` to ``new``, neither included, the nearest to ``new`` first.

    >>> list(between([0, 2, 8], [0, 5, 8]))
    [(0, 4, 8), (0, 3, 8)]
    """
    steps = max((abs(there - here) for here, there in zip(old, new)), default=0)
    for step in range(steps - 1, 0, -1):
        yield tuple(here + (2 * step * (there - here) + steps) // (2 * steps) for here, there in zip(old, new))


def _owners(partition: Sequence[int], stage: int, first_uses: Sequence[int | None]) -> dict[int, int]:
    """By first use, the layer that has the parameters on the stage: of a tied one its first use there."""
    owners: dict[int, int] = {}
    for layer in range(partition[stage], partition[stage + 1]):
        use = first_uses[layer]
        if use is not None:
            owners.setdefault(use, layer)
    return owners


def _peak(
    stage: int,
    in_turn: Sequence[Sequence[LayerMove]],
    layers: Sequence[HeldBytes],
    first_uses: Sequence[int | None],
    before: dict[int, int],
    after: dict[int, int],
    here: range,
) -> int:
    """Of one stage, which owns the layers ``here``."""
    old = sum((layers[layer] for layer in before.values()), start=HeldBytes())
    new = sum((layers[layer] for layer in after.values()), start=HeldBytes())
    freed = set(before) - {use for use, layer in after.items() if layer in here}  # once they are sent
    held = peak = old.own + old.flat + new.flat + old.shards
    shards_staged = 0
    for round_ in in_turn:
        leaving = [move.layer for move in round_ if move.source == stage]
        arriving = [move.layer for move in round_ if move.destination == stage]
        held += sum(layers[layer].own for layer in arriving)
        peak = max(peak, held + sum(layers[layer].staged for layer in [*leaving, *arriving]))
        held -= sum(layers[layer].own for layer in leaving if first_uses[layer] in freed)
        freed.difference_update(first_uses[layer] for layer in leaving)
        shards_staged += sum(min(layers[layer].staged, layers[layer].largest_shard) for layer in [*leaving, *arriving])
    of_one_kind = max(old.shards + new.largest_shard, new.shards + old.largest_shard)
    return max(old.total, peak, new.own + new.flat + of_one_kind + shards_staged, new.total)

"""The orders of an evaluation: forward passes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_dynmo.schedules.actions import Action, Kind

__all__ = ["forward_orders", "forward_place"]


Place = Callable[[Action], tuple[int, int]]


def forward_place(owners: Sequence[int], *, one_by_one: bool = False) -> Place:
    """Return a sort key by which every forward pass comes behind those that it depends on.

    With ``k`` chunks per stage, a stage begins a micro-batch every ``k`` passes.

    Args:
        one_by_one: a micro-batch begins when the one before has passed all chunks.
    """
    if one_by_one:
        return lambda action: (action.micro_batch, action.chunk)
    chunks_per_stage = len(owners) // (max(owners) + 1)
    return lambda action: (action.chunk + chunks_per_stage * action.micro_batch, action.chunk)


def forward_orders(owners: Sequence[int], micro_batches: int, place: Place) -> list[list[Action]]:
    """List the forward passes of each stage, sorted by ``place``.

    >>> v = [0, 1, 1, 0]
    >>> [[str(action) for action in order] for order in forward_orders(v, 2, forward_place(v))][0]
    ['F0 of chunk 0', 'F1 of chunk 0', 'F0 of chunk 3', 'F1 of chunk 3']
    """
    return [
        sorted(
            (
                Action(Kind.FORWARD, chunk, micro_batch)
                for chunk, owner in enumerate(owners)
                if owner == stage
                for micro_batch in range(micro_batches)
            ),
            key=place,
        )
        for stage in range(max(owners) + 1)
    ]

"""Diffusion where every stage holds two chunks, a V or a loop: neighbours trade at each boundary that they share.

Two neighbouring stages of a V or a loop share two boundaries, the last and the first stage of a loop one. In a round
the pairs (0, 1), (2, 3), ... or (1, 2), (3, 4), ... move them to where the heavier of the two loads is least, with no
knowledge of other stages. The last stage of a V also moves the boundary between its own chunks to their middle, so
that layers can pass it from one half of the model to the other.

A pair moves only if the heavier of its loads falls. So the sorted loads fall in lexicographic order with every move and
no bottleneck rises: the rounds end, at the latest after Lemma 2's bound. Unlike on a chain, where overload is passed on
over several stages, the result is a partition that no pair of neighbours can improve, not always the best one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners.diffusion_step import lemma2_bound
from ds_dynmo.partitioners.memory import MemoryModel, check_fits
from ds_dynmo.partitioners.metrics import Partitions, prefix_sums, sums_of_stages
from ds_dynmo.placement import Placement

__all__ = ["diffusion_of_pairs"]

_GAIN = 1e-9  # relative; a load that falls by less has not fallen


def diffusion_of_pairs(
    costs: Sequence[float], start: Placement, speeds: Sequence[float], memory: MemoryModel | None = None
) -> list[int]:
    """Balance by trades between neighbours only; the bottleneck is at most that of ``start``, if that fits.

    Args:
        costs: per layer, checked.
        start: the present placement, a V or a loop.
        speeds: per stage.

    >>> diffusion_of_pairs([1, 1, 1, 1, 1, 1, 1, 3], Placement.v([0, 2, 4, 6, 8]), (1, 1))
    [0, 1, 4, 6, 8]

    Raises:
        PartitionError: ``start`` does not fit, and trades between neighbours lead to no partition that does.
    """
    trades = _Trades(costs, start.owners, speeds, memory)
    boundaries = np.array(start.boundaries)
    smallest, total = min((cost for cost in costs if cost > 0), default=math.inf), math.fsum(costs)
    quiet = 0
    for turn in range(lemma2_bound(len(speeds), total / min(speeds), smallest / max(speeds))):
        before = boundaries
        for shared in trades.pairs[turn % 2 :: 2]:
            boundaries = trades.settled(boundaries, shared)
        quiet = 0 if (boundaries != before).any() else quiet + 1
        if quiet == 2:
            break
    partition: list[int] = boundaries.tolist()
    if memory is not None:
        try:
            check_fits(start.at(partition), memory)
        except PartitionError as error:
            raise PartitionError(f"neighbours trading layers found no partition that fits: {error}") from error
    return partition


class _Trades:
    """The trades of an instance.

    Attributes:
        pairs: per pair of neighbours, the boundaries that they share.
    """

    def __init__(
        self, costs: Sequence[float], owners: tuple[int, ...], speeds: Sequence[float], memory: MemoryModel | None
    ) -> None:
        self.owners, self.memory = owners, memory
        self._prefix = prefix_sums([float(cost) for cost in costs])
        self._speeds = np.array(speeds)[:, None]
        shared: dict[tuple[int, int], list[int]] = {}
        for boundary, pair in enumerate(zip(owners, owners[1:]), start=1):
            shared.setdefault((min(pair), max(pair)) if pair != (len(speeds) - 1, 0) else pair, []).append(boundary)
        self.pairs = list(shared.values())

    def settled(self, boundaries: Partitions, shared: Sequence[int]) -> Partitions:
        """Return the boundaries after a pair has moved those that it shares; the others stay."""
        ranges = [np.arange(boundaries[place - 1] + 1, boundaries[place + 1]) for place in shared]
        choices = np.stack(np.meshgrid(*ranges, indexing="ij")).reshape(len(shared), -1)
        candidates = np.repeat(boundaries[:, None], choices.shape[1], axis=1)
        candidates[list(shared)] = choices
        chunks = np.diff(self._prefix[candidates], axis=0)
        loads = sums_of_stages(chunks, self.owners) / self._speeds
        stages = sorted({self.owners[chunk] for place in shared for chunk in (place - 1, place)})
        heavier = loads[stages].max(axis=0)
        moved = np.abs(choices - boundaries[list(shared)][:, None]).sum(axis=0)
        here = int(moved.argmin())
        above = self._above_limits(candidates)
        if len(stages) == 1:  # the two chunks of one stage: no load changes
            heavier = np.maximum(chunks[shared[0] - 1], chunks[shared[0]])
        best = np.lexsort((moved, heavier, above))[0]
        less = above[best] < above[here] or heavier[best] < heavier[here] * (1 - _GAIN)
        return candidates[:, best] if less else boundaries

    def _above_limits(self, candidates: Partitions) -> Partitions:
        """Sum the bytes by which stages exceed their limits."""
        if self.memory is None:
            return np.zeros(candidates.shape[1], dtype=np.int64)
        needed = np.array(self.memory.bytes_of_many(candidates, self.owners))
        above: Partitions = np.maximum(needed - np.array(self.memory.limits)[:, None], 0).sum(axis=0)
        return above

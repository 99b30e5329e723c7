"""Parameters that become some of their elements: which parts of a flat buffer stay, and which replica gets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn


@dataclass(frozen=True)
class KeptElements:
    """A parameter that becomes some of its elements.

    Attributes:
        old: the parameter, of any shape.
        new: the 1-D parameter that takes its place.
        index: ascending places in the flattened ``old``, int64, on its device.
    """

    old: nn.Parameter
    new: nn.Parameter
    index: torch.Tensor

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the elements that stay of a tensor in the shape of ``old``."""
        return select(tensor, self.index)


def select(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Copy the elements of a flattened tensor at the places ``index``."""
    return tensor.detach().reshape(-1).index_select(0, index.to(tensor.device))


Part = tuple[int, torch.Tensor | None]  # a parameter: its elements, and the places of those that stay; None: all


class Compaction:
    """Which elements of one flat buffer stay, and how those are shared anew by the replicas. Alike on all of them.

    Args:
        members: the parameters in the buffer, in its order.
        old_shard, shard: elements per replica before and after.

    Attributes:
        shard: elements per replica from now on.
    """

    def __init__(self, members: Sequence[Part], replicas: int, old_shard: int, shard: int) -> None:
        self._parts = list(zip(accumulate((numel for numel, _ in members), initial=0), members))
        self._old_shard, self.shard = old_shard, shard
        before = [sum(map(len, self._ranges(0, replica * old_shard))) for replica in range(replicas + 1)]
        self._held = [range(first, last) for first, last in pairwise(before)]  # by each replica, of the new buffer

    def select(self, shard: torch.Tensor, replica: int) -> torch.Tensor:
        """Copy the elements that stay of a replica's old shard."""
        begin = replica * self._old_shard
        rows = [shard.new_empty(0)]
        for (start, (_, index)), found in zip(self._parts, self._ranges(begin, begin + self._old_shard)):
            if index is None:
                rows.append(shard[start + found.start - begin :][: len(found)])
            else:
                rows.append(shard.index_select(0, index[found.start : found.stop].to(shard.device) + (start - begin)))
        return torch.cat(rows)

    def sent(self, source: int, destination: int) -> tuple[slice, slice]:
        """Find what goes from a replica to another: where in its :meth:`select`, and where in the other's new shard."""
        held, there = self._held[source], destination * self.shard
        begin = max(held.start, there)
        end = max(begin, min(held.stop, there + self.shard))
        return slice(begin - held.start, end - held.start), slice(begin - there, end - there)

    def _ranges(self, begin: int, end: int) -> Iterator[range]:
        """Find, per part, which of the elements that stay lie in ``[begin, end)`` of the old buffer."""
        for start, (numel, index) in self._parts:
            first, last = (min(max(place - start, 0), numel) for place in (begin, end))
            if index is not None:
                first, last = torch.searchsorted(index, torch.tensor([first, last], device=index.device)).tolist()
            yield range(first, last)

"""Expert parallelism: a layer's experts are distributed over the data-parallel replicas of a stage.

Tokens travel to the replicas of their experts and back.

Of ``E`` experts and ``R`` replicas, replica ``r`` holds experts ``[r * E / R, (r + 1) * E / R)``. All replicas run the
layer in the same passes, forward, recomputed and backward, so that their collectives meet in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.models.host_numbers import integers

__all__ = ["Dispatch", "Replicas", "experts_of", "loads_of_replicas", "through_replicas"]

Table = Sequence[Sequence[int]]  # per replica, in the order of their indices, rows that it has for each expert


class Replicas:
    """The replicas of the stage that a layer is on now.

    They belong to the stage and not to the layer: a copy or an unpickled layer does not have them.

    Args:
        group: their process group; None: they are unknown.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def __reduce__(self) -> Any:
        return Replicas, ()

    @property
    def size(self) -> int:
        assert self._group is not None, "a share of a layer's experts runs where the others are"
        return dist.get_world_size(self._group)

    @property
    def index(self) -> int:
        assert self._group is not None
        return dist.get_rank(self._group)

    def gather(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Gather ``numbers`` of every replica, in the order of their indices; all have equally many. Collective."""
        mine = integers(numbers, device)
        every = mine.new_empty(self.size * len(numbers))
        dist.all_gather_into_tensor(every, mine, group=self._group)
        table: list[list[int]] = every.view(self.size, -1).tolist()
        return table

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send rows to every replica and receive some from each; the gradients go back. Collective, backward too.

        Args:
            rows: ``[sum(sent), width]``, those for replica 0 first.
            sent, received: how many rows go to each replica, and come from it.

        Returns:
            ``[sum(received), width]``, those of replica 0 first.
        """
        exchanged: torch.Tensor
        exchanged = _Exchange.apply(rows, list(sent), list(received), self._group)  # type: ignore[no-untyped-call]
        return exchanged


class _Exchange(torch.autograd.Function):
    """``all_to_all_single``, whose gradient is the same with senders and receivers swapped."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def experts_of(replica: int, replicas: int, experts: int) -> slice:
    """Return the experts that a replica holds.

    >>> experts_of(1, replicas=2, experts=6)
    slice(3, 6, None)
    """
    share = experts // replicas
    return slice(replica * share, (replica + 1) * share)


def loads_of_replicas(table: Table) -> list[int]:
    """Count the rows that the experts of each replica get.

    >>> loads_of_replicas([[5, 0, 1, 2], [1, 1, 0, 0]])
    [7, 3]
    """
    replicas, experts = len(table), len(table[0])
    shares = [experts_of(replica, replicas, experts) for replica in range(replicas)]
    return [sum(sum(row[share]) for row in table) for share in shares]


class Dispatch:
    """The way of one pass's rows to their experts and back.

    An expert finds its rows in the order of replicas, and of each replica in the order that it has them in: sums over
    them are the same in every run.

    Attributes:
        counts: rows that each expert of this replica gets, from all replicas.
    """

    def __init__(self, table: Table, replicas: Replicas, device: torch.device) -> None:
        size, mine = len(table), table[replicas.index]
        experts = len(mine)
        own = [row[experts_of(replicas.index, size, experts)] for row in table]
        self._replicas = replicas
        self._sent = [sum(mine[experts_of(replica, size, experts)]) for replica in range(size)]
        self._received = [sum(row) for row in own]
        self._order = _by_expert(own, device)
        self.counts = [sum(counts) for counts in zip(*own)]

    def to_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Send this replica's rows, those for expert 0 of all first; give its experts' likewise. Collective."""
        return self._replicas.exchange(rows, self._sent, self._received).index_select(0, self._order)

    def back(self, made: torch.Tensor) -> torch.Tensor:
        """Send what experts made of each row to the row's replica, in the order that it had. Collective."""
        return self._replicas.exchange(made.index_select(0, self._order.argsort()), self._received, self._sent)


def through_replicas(
    rows: torch.Tensor,
    table: Table,
    replicas: Replicas,
    transform: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
) -> torch.Tensor:
    """Apply all experts to this replica's rows, which travel to their expert's replica and back. Collective.

    Args:
        rows: ``[rows, width]`` by expert, those for expert 0 of all first.
        transform: the own experts' work, on rows by own expert and the number of each one's, keeping the width.

    Returns:
        ``[rows, width]``, in the order of ``rows``.
    """
    dispatch = Dispatch(table, replicas, rows.device)
    return dispatch.back(transform(dispatch.to_experts(rows), dispatch.counts))


def _by_expert(own: Table, device: torch.device) -> torch.Tensor:
    """Order the rows that arrived, sorted by replica and then expert, by expert and then replica: indices, int64."""
    counts = [count for row in own for count in row]
    experts = torch.arange(len(own[0]), device=device).repeat(len(own))
    of_rows = experts.repeat_interleave(integers(counts, device), output_size=sum(counts))
    return of_rows.argsort(stable=True)

"""One rank's part of a route: its messages and copies, of one kind of state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ds_dynmo.engine.comm.host_links import PeerTensor
from ds_dynmo.engine.move.layout import Buffer, Shard
from ds_dynmo.engine.move.route import Row

__all__ = ["Holder", "Tensors", "Transfers", "copies_of_staying", "copy_all", "copy_staying", "transfers"]


Holder = tuple[int, int]  # a rank within a tensor-parallel slice: stage, data-parallel index
Tensors = Mapping[Buffer, torch.Tensor]  # a rank's shards of one kind of state
Transfers = tuple[list[PeerTensor], list[PeerTensor]]  # sends and receives


def transfers(
    rows: Iterable[Row], holder: Holder, rank_of: Callable[[Shard], int], old: Tensors, new: Tensors
) -> Transfers:
    """List a rank's sends from its old shards, and its receives into its new ones.

    Args:
        rank_of: returns the rank that holds a shard.
    """
    sends: list[PeerTensor] = []
    receives: list[PeerTensor] = []
    for row in rows:
        if row.source[:2] == row.destination[:2]:
            continue
        if row.source[:2] == holder:
            sends.append((rank_of(row.destination), _source(row, old)))
        elif row.destination[:2] == holder:
            receives.append((rank_of(row.source), _destination(row, new)))
    return sends, receives


def copy_staying(rows: Iterable[Row], holder: Holder, old: Tensors, new: Tensors) -> None:
    """Copy the elements that stay on a rank from its old shards to its new ones."""
    copy_all(copies_of_staying(rows, holder, old, new))


def copy_all(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Carry out copies: pairs of a destination and a source."""
    for destination, source in copies:
        destination.copy_(source)


def copies_of_staying(
    rows: Iterable[Row], holder: Holder, old: Tensors, new: Tensors
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """List the copies that :func:`copy_staying` makes, as pairs of a destination and a source."""
    return [(_destination(row, new), _source(row, old)) for row in _staying(rows, holder)]


def _staying(rows: Iterable[Row], holder: Holder) -> Iterator[Row]:
    return (row for row in rows if row.source[:2] == row.destination[:2] == holder)


def _source(row: Row, old: Tensors) -> torch.Tensor:
    return old[row.source.buffer].narrow(0, row.source_offset, row.numel)


def _destination(row: Row, new: Tensors) -> torch.Tensor:
    return new[row.destination.buffer].narrow(0, row.destination_offset, row.numel)

"""One rank's part of a route: its messages and copies, of one kind of state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ds_dynmo.engine.comm.point_to_point import PeerTensor
from ds_dynmo.engine.move.layout import Buffer, Shard
from ds_dynmo.engine.move.route import Row
from ds_dynmo.engine.move.tensors import num_bytes

__all__ = ["Holder", "Tensors", "Transfers", "copy_staying", "copying_staying", "transfers"]

COPIED_BYTES = 8 << 20  # copied at a time while a batch trains

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
    for _ in copying_staying(rows, holder, old, new):
        pass


def copying_staying(rows: Iterable[Row], holder: Holder, old: Tensors, new: Tensors) -> Iterator[None]:
    """Do :meth:`copy_staying`, a bounded part per element."""
    copied = 0
    for row in rows:
        if row.source[:2] == row.destination[:2] == holder:
            source, destination = _source(row, old), _destination(row, new)
            step = COPIED_BYTES // source.element_size()
            for there, here in zip(destination.split(step), source.split(step)):
                there.copy_(here)
                copied += num_bytes(here)
                if copied >= COPIED_BYTES:
                    copied = 0
                    yield


def _source(row: Row, old: Tensors) -> torch.Tensor:
    return old[row.source.buffer].narrow(0, row.source_offset, row.numel)


def _destination(row: Row, new: Tensors) -> torch.Tensor:
    return new[row.destination.buffer].narrow(0, row.destination_offset, row.numel)

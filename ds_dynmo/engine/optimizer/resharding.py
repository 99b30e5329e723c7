"""Carry out a relayout: fill new shards from the old ones, here and on other ranks, and give the old ones back.

One kind of state goes after the other, so that of one kind at a time there are old and new shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.optimizer.flat_layout import BufferKey
from ds_dynmo.engine.optimizer.resharding_plan import Relayout

ShardOwner = tuple[int, int]  # stage, data-parallel index
Shards = dict[BufferKey, dict[str, torch.Tensor]]  # by buffer and kind of state


def exchange_shards(
    plan: Relayout,
    old: Shards,
    *,
    place: ShardOwner,
    comm: Communicator,
    rank_of: Callable[[ShardOwner], int],
    device: torch.device,
    replace: Callable[[str, Mapping[BufferKey, torch.Tensor]], None],
) -> None:
    """Collective over the ranks of a slice.

    Args:
        old: this rank's shards; emptied.
        place: this rank's.
        replace: takes the new shards of one kind of state.
    """
    for name, dtype in plan.kinds.items():
        fresh = {
            container: _room(plan, name, dtype, place, container, device)
            for container in plan.new[place[0]]
            if name in plan.group_kinds[container[0]]
        }
        _exchange_kind(plan, name, old, fresh, place, comm, rank_of)
        for tensors in old.values():
            tensors.pop(name, None)
        replace(name, fresh)


def _room(
    plan: Relayout, name: str, dtype: torch.dtype, place: ShardOwner, container: BufferKey, device: torch.device
) -> torch.Tensor:
    """A new shard; zeros where nothing will come: the padding, and what had no state."""
    buffer = plan.new[place[0]][container]
    used = min(max(sum(buffer.numel.values()) - place[1] * buffer.shard, 0), buffer.shard)
    coming = sum(
        run.numel
        for run in plan.runs
        if run.destination == place and run.new == container and name in plan.held[run.source[0], run.old]
    )
    shard = torch.empty(buffer.shard, dtype=dtype, device=device)
    shard[used if coming == used else 0 :].zero_()
    return shard


def _exchange_kind(
    plan: Relayout,
    name: str,
    old: Shards,
    fresh: Mapping[BufferKey, torch.Tensor],
    place: ShardOwner,
    comm: Communicator,
    rank_of: Callable[[ShardOwner], int],
) -> None:
    """Copy what stays while the rest travels."""
    sends, receives, copies = [], [], []
    for run in plan.runs:
        if name not in plan.held[run.source[0], run.old]:  # frozen from the start: the optimizer never saw it
            continue
        there = old[run.old][name].narrow(0, run.start_old, run.numel) if run.source == place else None
        here = fresh[run.new].narrow(0, run.start_new, run.numel) if run.destination == place else None
        if there is not None and here is not None:
            copies.append((here, there))
        elif there is not None:
            sends.append((rank_of(run.destination), there))
        elif here is not None:
            receives.append((rank_of(run.source), here))

    def local_work() -> None:
        for here, there in copies:
            here.copy_(there)

    comm.exchange(sends, receives, local_work)

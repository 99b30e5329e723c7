"""Carry out a resharding plan: fill new shards from the old ones, here and on other ranks, and free the old ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from ds_dynmo.engine.comm.point_to_point import PeerTensor, PointToPoint
from ds_dynmo.engine.optimizer.flat_layout import BufferKey, ShardOwner
from ds_dynmo.engine.optimizer.resharding_plan import ReshardingPlan

Shards = Mapping[BufferKey, dict[str, torch.Tensor]]  # by buffer and kind of state
Replace = Callable[[str, Mapping[BufferKey, torch.Tensor]], None]


class Resharding:
    """One rank's part in a :class:`ReshardingPlan`.

    Usually one kind of state goes after the other, so that there are old and new shards of one kind at a time
    (:meth:`run`). State that is to travel while a batch trains is sent ahead: all kinds are allocated at once
    (:meth:`allocate`) and handed over as :meth:`transfers`; :meth:`run` then finds it in place.

    Args:
        old: this rank's shards; each kind is taken out of them once the new shards of it are filled.
        owner: this rank.
        rank_of: the rank that holds an owner's shards.
    """

    def __init__(
        self,
        plan: ReshardingPlan,
        old: Shards,
        *,
        owner: ShardOwner,
        rank_of: Callable[[ShardOwner], int],
        device: torch.device,
    ) -> None:
        self.plan = plan
        self._old, self._owner, self._rank_of, self._device = old, owner, rank_of, device
        self._new: dict[str, dict[BufferKey, torch.Tensor]] = {}

    def allocate(self) -> None:
        """Allocate the new shards of all kinds."""
        for kind in self.plan.kinds:
            self._allocate(kind)

    def transfers(self) -> tuple[list[PeerTensor], list[PeerTensor]]:
        """List what is sent and received of the kinds whose new shards are there."""
        sends: list[PeerTensor] = []
        receives: list[PeerTensor] = []
        for kind in self._new:
            of_kind = self._transfers(kind)
            sends += of_kind[0]
            receives += of_kind[1]
        return sends, receives

    def run(self, p2p: PointToPoint, replace: Replace) -> None:
        """Fill the new shards, and give them to ``replace`` kind by kind."""
        for kind in self.plan.kinds:
            if kind in self._new:
                self._copy_staying(kind)
            else:
                self._allocate(kind)
                p2p.exchange(*self._transfers(kind), partial(self._copy_staying, kind))
            for shards in self._old.values():
                shards.pop(kind, None)
            replace(kind, self._new.pop(kind))

    def _allocate(self, kind: str) -> None:
        plan = self.plan
        self._new[kind] = {
            key: self._shard(kind, key) for key in plan.new[self._owner[0]] if kind in plan.kinds_of(key)
        }

    def _shard(self, kind: str, key: BufferKey) -> torch.Tensor:
        """Allocate a new shard; zeros where nothing will come: the padding, and what had no state."""
        plan, (stage, replica) = self.plan, self._owner
        buffer = plan.new[stage][key]
        used = min(max(sum(buffer.numel.values()) - buffer.position_of(replica) * buffer.shard, 0), buffer.shard)
        coming = sum(
            transfer.numel
            for transfer in plan.transfers
            if transfer.destination == self._owner and transfer.new == key and plan.is_held(kind, transfer)
        )
        shard = torch.empty(buffer.shard, dtype=plan.kinds[kind], device=self._device)
        shard[used if coming == used else 0 :].zero_()
        return shard

    def _transfers(self, kind: str) -> tuple[list[PeerTensor], list[PeerTensor]]:
        sends, receives = [], []
        for transfer in self.plan.transfers:
            if transfer.source == transfer.destination or not self.plan.is_held(kind, transfer):
                continue
            if transfer.source == self._owner:
                there = self._old[transfer.old][kind].narrow(0, transfer.start_old, transfer.numel)
                sends.append((self._rank_of(transfer.destination), there))
            elif transfer.destination == self._owner:
                here = self._new[kind][transfer.new].narrow(0, transfer.start_new, transfer.numel)
                receives.append((self._rank_of(transfer.source), here))
        return sends, receives

    def _copy_staying(self, kind: str) -> None:
        for transfer in self.plan.transfers:
            if transfer.source == transfer.destination == self._owner and self.plan.is_held(kind, transfer):
                old = self._old[transfer.old][kind].narrow(0, transfer.start_old, transfer.numel)
                self._new[kind][transfer.new].narrow(0, transfer.start_new, transfer.numel).copy_(old)

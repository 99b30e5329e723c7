"""Resharding: move flat optimizer state to new shards, along a route that is planned equally on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.comm.host_links import PeerTensor
from ds_dynmo.engine.comm.point_to_point import PointToPoint
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.move.carrying import (
    Holder,
    Tensors,
    Transfers,
    copies_of_staying,
    copy_all,
    copy_staying,
    transfers,
)
from ds_dynmo.engine.move.layout import Buffer, Interval, Layout, Shard, intervals_of_shards, shard_size
from ds_dynmo.engine.move.route import Route, Row
from ds_dynmo.engine.state.flat_shards import Member
from ds_dynmo.engine.state.inventory import Inventory, Scalars, check_replicas_alike, merge_scalars
from ds_dynmo.engine.state.keys import MASTER, ParamKey
from ds_dynmo.plan import MigrationPlan
from ds_dynmo.torch_private import version_of

Replace = Callable[[str, Tensors], None]


@dataclass(frozen=True)
class ReshardingPlan:
    """The route of the state of every stage.

    Attributes:
        members: the parameters that each stage will hold, in the order of their buffers.
        kinds: the kinds of state on any stage, the fp32 weights first.
        group_kinds: the kinds of a parameter group on any stage; each stage will hold all of them or none.
        held: the kinds of one buffer of one stage.
    """

    route: Route
    members: Mapping[int, Sequence[Member]]
    kinds: Mapping[str, torch.dtype]
    group_kinds: Mapping[int, set[str]]
    held: Mapping[tuple[int, Buffer], Mapping[str, torch.dtype]]
    scalars: Scalars

    def rows(self, kind: str) -> list[Row]:
        """List the rows with this kind of state. Parameters that were frozen from the start have none."""
        return [row for row in self.route.rows if kind in self.held[row.source.stage, row.source.buffer]]


def plan_resharding(
    plan: MigrationPlan,
    inventories: Sequence[Inventory],
    layers: StageLayers,
    here: RankCoordinates,
) -> ReshardingPlan:
    """Plan the changes by ``plan`` and by freezing, from the inventories of all ranks.

    For parameters that differ between replicas, a rank plans only the copies and messages of its replica.

    Args:
        layers: this rank's layers, which know the order of the parameters of any stage.
        here: this rank's coordinates.

    Raises:
        ConfigError: replicas of a stage hold other parameters.
    """
    replica = here.replica
    check_replicas_alike(inventories)
    inventories = [inventory for inventory in inventories if inventory.tp_rank == here.tp_rank]
    inventories.sort(key=lambda inventory: inventory.replica == replica)  # this replica's come last, and override
    of_stage = {inventory.stage: inventory for inventory in inventories}
    of_layer = {layer: members for inventory in inventories for layer, members in inventory.after.items()}
    groups, per_replica = inventories[0].num_groups, inventories[0].per_replica_groups
    old, new = (_LayoutBuilder(groups, per_replica, replica, here.replicas) for _ in range(2))
    members: dict[int, list[Member]] = {}
    for stage in range(here.num_stages):
        uses = layers.first_uses_at(plan.new, stage)
        members[stage] = [member for layer in uses for member in of_layer.get(layer, ())]
        new.add(stage, members[stage])
        old.add(stage, of_stage[stage].before)
    held = {(inventory.stage, buffer): kinds for inventory in inventories for buffer, kinds in inventory.kinds.items()}
    kinds = {name: dtype for of_buffer in held.values() for name, dtype in of_buffer.items()}
    group_kinds: dict[int, set[str]] = {}
    for (_, buffer), of_buffer in held.items():
        group_kinds.setdefault(buffer.group, set()).update(of_buffer)
    return ReshardingPlan(
        route=Route.between(old.layout(), new.layout()),
        members=members,
        kinds=dict(sorted(kinds.items(), key=lambda item: (item[0] != MASTER, item[0]))),
        group_kinds=group_kinds,
        held=held,
        scalars=merge_scalars(inventory.scalars for inventory in inventories),
    )


class _LayoutBuilder:
    """Builds a layout stage by stage.

    Args:
        groups: number of parameter groups.
        per_replica: groups of parameters that differ between replicas: each replica has whole buffers of these.
        replica: the replica whose buffers of these groups are in the layout.
        replicas: number of replicas that share all other buffers.
    """

    def __init__(self, groups: int, per_replica: frozenset[int], replica: int, replicas: int) -> None:
        self._buffers = [Buffer(group, detached) for group in range(groups) for detached in (False, True)]
        self._per_replica, self._replica, self._replicas = per_replica, replica, replicas
        self._intervals: dict[Shard, tuple[Interval, ...]] = {}
        self._sizes: dict[Shard, int] = {}

    def add(self, stage: int, members: Iterable[Member]) -> None:
        """Add a stage whose buffers hold ``members``, in this order."""
        parameters: dict[Buffer, list[tuple[ParamKey | None, int]]] = {buffer: [] for buffer in self._buffers}
        for member in members:
            parameters[member.buffer].append((member.key, member.numel))
        for buffer, of_buffer in parameters.items():
            replicas = [self._replica] if buffer.group in self._per_replica else range(self._replicas)
            size = shard_size(sum(numel for _, numel in of_buffer), len(replicas), detached=buffer.detached)
            for replica, intervals in zip(replicas, intervals_of_shards(of_buffer, len(replicas), size)):
                shard = Shard(stage, replica, buffer)
                self._intervals[shard] = intervals
                self._sizes[shard] = size

    def layout(self) -> Layout:
        return Layout(self._intervals, self._sizes)


def _narrow(parts: Sequence[torch.Tensor], offset: int, numel: int) -> torch.Tensor:
    """Return elements of a shard that lies in parts of memory, one after the other."""
    for part in parts:
        if offset < part.numel():
            return part.reshape(-1).narrow(0, offset, numel)
        offset -= part.numel()
    raise AssertionError(f"a shard ends {offset} elements too early")


class Resharding:
    """One rank's part in a :class:`ReshardingPlan`.

    Usually one kind of state follows the other, so that old and new shards of one kind exist at a time (:meth:`run`).
    State that travels while a batch trains is sent ahead: all kinds are allocated at once (:meth:`allocate`) and
    sent by :meth:`transfers`; :meth:`run` then only completes them.

    Args:
        old: this rank's shards; each kind is removed once its new shards are filled.
        holder: this rank.
        rank_of: returns the rank that holds a shard.
    """

    def __init__(
        self,
        plan: ReshardingPlan,
        old: Mapping[Buffer, dict[str, torch.Tensor]],
        *,
        holder: Holder,
        rank_of: Callable[[Shard], int],
        device: torch.device,
    ) -> None:
        self.plan = plan
        self._old, self._holder, self._rank_of, self._device = old, holder, rank_of, device
        self._new: dict[str, dict[Buffer, torch.Tensor]] = {}
        self._are_copied = False  # whether what stays is in the new shards
        self._versions: dict[tuple[Buffer, str], int] = {}  # of the old shards, when they were to be sent ahead

    @property
    def bytes_sent(self) -> int:
        """Bytes of all kinds of state that this rank sends."""
        leaving = (row.numel for row in self.plan.route.rows if row.source[:2] == self._holder != row.destination[:2])
        return sum(leaving) * sum(dtype.itemsize for dtype in self.plan.kinds.values())

    def allocate(self) -> None:
        """Allocate the new shards of all kinds, which are then sent ahead."""
        for kind in self.plan.kinds:
            self._allocate(kind)
        self._versions = self._present_versions()

    @property
    def has_changed_since_sent(self) -> bool:
        """Whether this rank's state was changed after :meth:`allocate`."""
        return bool(self._versions) and self._versions != self._present_versions()

    def discard_sent_ahead(self) -> None:
        """Drop what was sent ahead: :meth:`run` sends everything."""
        self._new.clear()
        self._are_copied = False
        self._versions.clear()

    def copies_of_staying(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """List the copies, of all kinds, of what stays on this rank: pairs of a destination and a source."""
        return [
            pair
            for kind in self._new
            for pair in copies_of_staying(self.plan.rows(kind), self._holder, self._old_of(kind), self._new[kind])
        ]

    def mark_copied(self) -> None:
        """Update after the copies of :meth:`copies_of_staying` were made."""
        self._are_copied = True

    def carry(self, shards: Mapping[int, Sequence[torch.Tensor]], p2p: PointToPoint) -> dict[int, list[torch.Tensor]]:
        """Move one more kind of state along the same route: this rank's shards of live buffers, per group.

        Args:
            shards: each in parts of memory, one after the other. A part is not copied if it stays whole.

        Returns:
            This rank's new shards, per group: a part per parameter, and the padding.
        """
        new, sends, receives = self.plan.route.new, list[PeerTensor](), list[PeerTensor]()
        gathered: dict[tuple[Shard, Interval], torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def memory(place: Shard, numel: int) -> torch.Tensor:
            return shards[place.buffer.group][0].new_empty(numel)

        for row, interval in self.plan.route.rows_by_interval():
            leaves, arrives = row.source[:2] == self._holder, row.destination[:2] == self._holder
            if row.source.buffer.detached or row.destination.buffer.detached or not (leaves or arrives):
                continue
            held = _narrow(shards[row.source.buffer.group], row.source_offset, row.numel) if leaves else None
            if not arrives:
                assert held is not None
                sends.append((self._rank_of(row.destination), held))
                continue
            whole = gathered.get((row.destination, interval))
            if whole is None and held is not None and row.numel == interval.numel:
                gathered[row.destination, interval] = held
                continue
            if whole is None:  # the rows of an interval fill it: Route.check
                whole = gathered[row.destination, interval] = memory(row.destination, interval.numel)
            part = whole.narrow(0, row.destination_offset - interval.offset, row.numel)
            if held is not None:
                copies.append((part, held))
            else:
                receives.append((self._rank_of(row.source), part))
        p2p.exchange(sends, receives, partial(copy_all, copies))
        return {
            place.buffer.group: [
                *(
                    gathered[place, interval]
                    if (place, interval) in gathered
                    else memory(place, interval.numel).zero_()
                    for interval in held_there
                ),
                memory(place, new.sizes[place] - new.used(place)).zero_(),
            ]
            for place, held_there in new.intervals.items()
            if place[:2] == self._holder and not place.buffer.detached
        }

    def transfers(self) -> Transfers:
        """List the sends and receives of the kinds whose new shards are allocated."""
        sends: list[PeerTensor] = []
        receives: list[PeerTensor] = []
        for kind in self._new:
            of_kind = self._transfers(kind)
            sends += of_kind[0]
            receives += of_kind[1]
        return sends, receives

    def run(self, p2p: PointToPoint, replace: Replace) -> None:
        """Fill the new shards, and pass them to ``replace``, one kind after the other."""
        for kind in self.plan.kinds:
            if kind not in self._new:
                self._allocate(kind)
                p2p.exchange(*self._transfers(kind), partial(self._copy_staying, kind))
            elif not self._are_copied:
                self._copy_staying(kind)
            for shards in self._old.values():
                shards.pop(kind, None)
            replace(kind, self._new.pop(kind))

    def _allocate(self, kind: str) -> None:
        """Allocate new shards, with zeros where nothing arrives: in the padding, and for parameters without state."""
        new, rows = self.plan.route.new, self.plan.rows(kind)
        self._new[kind] = {}
        for place, size in new.sizes.items():
            if place[:2] == self._holder and kind in self.plan.group_kinds.get(place.buffer.group, ()):
                arriving = sum(row.numel for row in rows if row.destination == place)
                shard = torch.empty(size, dtype=self.plan.kinds[kind], device=self._device)
                shard[arriving if arriving == new.used(place) else 0 :].zero_()
                self._new[kind][place.buffer] = shard

    def _transfers(self, kind: str) -> Transfers:
        return transfers(self.plan.rows(kind), self._holder, self._rank_of, self._old_of(kind), self._new[kind])

    def _copy_staying(self, kind: str) -> None:
        copy_staying(self.plan.rows(kind), self._holder, self._old_of(kind), self._new[kind])

    def _old_of(self, kind: str) -> Tensors:
        return {buffer: shards[kind] for buffer, shards in self._old.items() if kind in shards}

    def _present_versions(self) -> dict[tuple[Buffer, str], int]:
        return {
            (buffer, kind): version_of(shard) for buffer, shards in self._old.items() for kind, shard in shards.items()
        }

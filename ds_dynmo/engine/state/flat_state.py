"""Optimizer state in flat shards, and its part in a migration.

DeepSpeed's wrappers hold shards of the fp32 weights and of each moment, whose boundaries do not match layers. When
layers move, the buffers of every stage change, and with them the shards of layers that stay. So all ranks compute the
place of each interval before and after (:mod:`ds_dynmo.engine.move.route`), copy the elements that stay on a rank, and
send the others (:mod:`ds_dynmo.engine.state.resharding`).

Between two batches the wrappers hold no gradients, and a move begins only then. If a batch trains before it ends, the
gradients move too: whole ones with their layers, shards as one more kind of state along the same route.

While layers travel, a stage holds the new flat weights beside its state. Then the old weights and gradient buffers are
freed, and each kind of state in turn exists old and new. If state travels while a batch trains, all kinds exist twice.
:mod:`ds_dynmo.partitioners.move_memory` predicts this before a byte moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.deepspeed.flat_adapter import FlatOptimizerAdapter, HeldGradients, unbind
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.move.carrying import Holder, Transfers
from ds_dynmo.engine.move.layout import Shard
from ds_dynmo.engine.state.flat_shards import FlatShards
from ds_dynmo.engine.state.flat_weights import FlatWeights
from ds_dynmo.engine.state.inventory import Inventory, Scalars, merge_scalars, take_inventory
from ds_dynmo.engine.state.keys import MASTER, ParamKey
from ds_dynmo.engine.state.layer_record import LayerRecord
from ds_dynmo.engine.state.membership import Membership
from ds_dynmo.engine.state.optimizer_state import Named
from ds_dynmo.engine.state.parameter_groups import check_alike, options_of
from ds_dynmo.engine.state.pieces import FLAT, StageSlots, StatePieces, in_memory
from ds_dynmo.engine.state.planned_move import Held, PlannedMove
from ds_dynmo.engine.state.resharding import Resharding, ReshardingPlan, plan_resharding
from ds_dynmo.errors import ConfigError
from ds_dynmo.plan import HeldBytes, MigrationPlan
from ds_dynmo.torch_private import version_of
from ds_dynmo.unmarked import unmarked

COPIED_BYTES = 8 << 20  # at least so many are copied between two instructions of a batch
MOST_PARTS = 12


class _ShardChanges(NamedTuple):
    """This rank's shards after a batch during which layers travelled.

    Attributes:
        tp_rank: the rank's index on the tensor ("model") axis.
        scalars: per parameter group, what the optimizer keeps once, such as the count of steps.
        have_changed: whether state that was sent ahead has changed.
    """

    tp_rank: int
    scalars: Scalars
    have_changed: bool


class FlatState:
    """The state of a stage under ``BF16_Optimizer`` or ``DeepSpeedZeroOptimizer`` stage 1.

    Args:
        groups: per parameter group, all of its parameters on this stage, frozen ones too.
        placeholders: one element per group, for stages without parameters of the group.

    Attributes:
        shards: this rank's optimizer state.
    """

    storage = FLAT

    def __init__(
        self,
        adapter: FlatOptimizerAdapter,
        layers: StageLayers,
        comm: Communicator,
        groups: Sequence[Sequence[nn.Parameter]],
        placeholders: Sequence[nn.Parameter],
    ) -> None:
        self._adapter, self._layers, self._comm = adapter, layers, comm
        self.shards = FlatShards(adapter, layers, comm, groups, placeholders)
        self._weights = FlatWeights(self.shards, placeholders)
        self._move: PlannedMove | None = None
        self._linked = False
        self._masters_are_stale = False
        if self.shards.per_replica_groups:
            self._unshard_per_replica_groups()
        self._mark_tied()

    # -- what is held ---------------------------------------------------------------------------------

    @property
    def _stage(self) -> int:
        return self._comm.here.stage

    @property
    def replica(self) -> int:
        """This rank's data-parallel index."""
        return self._comm.here.replica

    @property
    def _holder(self) -> Holder:
        return self._stage, self.replica

    @property
    def _membership(self) -> Membership:
        return self.shards.membership

    def is_current(self) -> bool:
        """Return whether each parameter is where its ``requires_grad`` says: in the optimizer, or detached."""
        return all(self._membership.is_current(p) for p in self._layers.parameters() if p in self._membership)

    def _planned(self) -> PlannedMove:
        assert self._move is not None, "prepare comes first"
        return self._move

    def _held(self) -> Held:
        """List the parameters of the stage's layers that are in a group, in the order of the layers."""
        named = self._layers.named_parameters().items()
        return [(key, parameter) for key, parameter in named if parameter in self._membership]

    def _frozen(self) -> set[ParamKey]:
        return {key for key, parameter in self._layers.named_parameters().items() if not parameter.requires_grad}

    # -- OptimizerState -------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        return self.shards.parameters()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return self.shards.state_of(parameter)

    def state_and_gradient_bytes(self, parameter: nn.Parameter) -> int:
        return self.shards.state_and_gradient_bytes(parameter)

    def bytes_between_batches(self, parameter: nn.Parameter) -> HeldBytes:
        return self.shards.bytes_between_batches(parameter)

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        self.shards.zero_elements(parameter, where)

    def export(self, named: Named, kept: Mapping[ParamKey, torch.Tensor]) -> StatePieces:
        assert self._move is None, "layers are on their way"
        self._adapter.free_gradients()  # load follows
        return self.shards.export(kept)

    def describe(self) -> Inventory:
        if self._adapter.holds_gradients:
            raise ValueError(
                "the optimizer's flat buffers hold gradients of a batch, which do not move with layers: move them "
                "after the optimizer's step"
            )
        return self.take_inventory()

    def take_inventory(self) -> Inventory:
        """List what this rank holds, for the other ranks."""
        return take_inventory(self._layers, self.shards, self._adapter, self._comm.here)

    def prepare(
        self, plan: MigrationPlan, descriptions: Mapping[int, Inventory], *, overlapped: bool = False
    ) -> tuple[int, str]:
        """Plan all copies and messages, and allocate the next flat weights."""
        assert self._move is None, "abandon comes first"
        check_alike({rank: inventory.options for rank, inventory in descriptions.items()})
        inventories = list(descriptions.values())
        if not overlapped:
            _check_no_gradients(inventories)
        planned = plan_resharding(plan, inventories, self._layers, self._comm.here)
        resharding = self._resharding(planned)
        self._move = PlannedMove(resharding, self._held(), overlapped)
        if not overlapped:  # gradients are zero until the next batch; free memory for weights
            self._adapter.free_gradients()
        self._weights.allocate(planned.members[self._stage])
        if overlapped:
            resharding.allocate()
        return resharding.bytes_sent, planned.route.digest

    def abandon(self) -> None:
        move, self._move = self._move, None
        self._weights.abandon()
        if move is not None and not move.overlapped:
            self._wrap(self._adapter.groups, self._adapter.flats)

    def record(self, module: nn.Module) -> LayerRecord:
        groups = self._adapter.inner.param_groups
        gradients = self._move.gradients.whole if self._move and self._move.gradients else {}
        return LayerRecord.of(
            module,
            group_of=self._membership.group,
            options_of=lambda number: options_of(groups[number]),
            gradient_of=lambda parameter: gradients.get(id(parameter)),
        )

    def gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype | None:
        return self._adapter.gradient_dtype

    def recv_buffer_of(self, key: ParamKey) -> torch.Tensor | None:
        assert self._move is not None, "prepare comes first"
        return self._weights.next_view(key)

    def transfers(self) -> Transfers:
        return self._planned().resharding.transfers()

    def copying(self, staying: Mapping[int, nn.Module]) -> Iterator[None]:
        move = self._planned()
        copies, weights = move.resharding.copies_of_staying(), []
        for index, module in staying.items():
            for name, parameter in module.named_parameters():
                view = self.recv_buffer_of(ParamKey(self._layers.first_use(index), name))
                if view is not None:
                    weights.append(parameter)
                    copies.append((view, parameter.data.view(-1)))
        known = {id(parameter): _state_of_memory(parameter) for parameter in weights}
        part_bytes, copied = max(COPIED_BYTES, sum(source.nbytes for _, source in copies) // MOST_PARTS), 0
        for destination, source in copies:
            step = part_bytes // source.element_size()
            for there, here in zip(destination.split(step), source.split(step)):
                there.copy_(here)
                copied += here.nbytes
                if copied >= part_bytes:
                    copied = 0
                    yield
        move.resharding.mark_copied()
        move.copied = known

    def take_gradients(self) -> None:
        self._planned().gradients = self._adapter.export_gradients()

    def changes(self) -> _ShardChanges:
        move = self._planned()
        move.check_still_held(self._held())
        return _ShardChanges(
            tp_rank=self._comm.here.tp_rank,
            scalars={number: self.shards.scalars(number) for number in self.shards.numbers},
            have_changed=move.resharding.has_changed_since_sent,
        )

    def apply_changes(self, changes: Sequence[_ShardChanges]) -> None:
        resharding = self._planned().resharding
        of_slice = (rank.scalars for rank in changes if rank.tp_rank == self._comm.here.tp_rank)
        resharding.plan = replace(resharding.plan, scalars=merge_scalars(of_slice))
        if any(rank.have_changed for rank in changes):
            resharding.discard_sent_ahead()

    def copy_staying(self, staying: Mapping[int, nn.Module]) -> None:
        """Copy the weights of layers that stay to the next buffers."""
        copied = self._planned().copied
        for index, module in staying.items():
            for name, parameter in module.named_parameters():
                view = self.recv_buffer_of(ParamKey(self._layers.first_use(index), name))
                if view is not None:
                    unbind(parameter)
                    if copied.pop(id(parameter), None) != _state_of_memory(parameter):
                        view.copy_(parameter.data.view(-1))
                    parameter.data = view.view(parameter.shape)

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            unbind(parameter)
            self._membership.leave(parameter)

    def install_parameters(self, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerRecord]) -> None:
        move, self._move = self._planned(), None
        resharding, gradients = move.resharding, move.gradients
        assert gradients is not None or not self._adapter.holds_gradients, "take_gradients comes first"
        whole = dict(gradients.whole) if gradients is not None else {}
        for record in (record for layer in arrived.values() for record in layer.parameters.values()):
            if record.group is not None:
                self._membership.join(record.parameter, record.group)
            if record.gradient is not None:
                whole[id(record.parameter)] = record.gradient
        self._take_options(parameters, arrived)
        self._adapter.free_gradients()
        # Parameters frozen or unfrozen since the plan was made are handled by the next match_layers.
        detached = {member.key for member in resharding.plan.members[self._stage] if member.buffer.detached}
        groups, flats = self._weights.rebuild(self._layers.named_parameters(), detached)
        self._adapter.free_weights()
        self._run(resharding)
        shards = resharding.carry(gradients.shards, self._comm.p2p) if gradients and gradients.shards else {}
        self._wrap(groups, flats)
        self._adapter.import_gradients(HeldGradients(whole, shards))

    def _wrap(self, groups: list[list[nn.Parameter]], flats: list[torch.Tensor]) -> None:
        """Point DeepSpeed's wrapper at groups and buffers; the shards are in place."""
        kept = {id(parameter) for group in groups for parameter in group}
        for parameter in [p for group in self._adapter.groups for p in group if id(p) not in kept]:
            unbind(parameter)
        self._adapter.rewrap(groups, flats)
        self._linked = self._adapter.link_state()
        self._mark_tied()
        counted = {frozenset(self.shards.scalars(n)) for n in self.shards.numbers if len(self.shards.live(n)) > 1}
        assert len(counted) <= 1, (
            f"state without a count of steps: {counted}"
        )  # torch initialises state only if there is none

    def use_grid(self) -> None:
        self._adapter.use_grid(self._comm.grid, self._comm.groups.alone)

    def after_step(self) -> None:
        """Link the optimizer's state once it exists. Called after every batch."""
        if not self._linked:
            self._linked = self._adapter.link_state()

    def differs_from_layers(self) -> bool:
        return self._masters_are_stale or not self.take_inventory().is_current

    def match_layers(self) -> None:
        """Make the buffers hold exactly the parameters of the layers, in their order. Collective."""
        what = "listing what the optimizer holds"
        inventories, _ = self._comm.agree_and_gather(what, lambda: (self.take_inventory(), None), alike=str)
        every = list(inventories().values())
        if not all(inventory.is_current for inventory in every):
            self._comm.everywhere("updating what the optimizer holds", self._check_between_batches, error=ConfigError)
            _check_no_gradients(every)
            stays = MigrationPlan.between(self._layers.placement, self._layers.placement)
            planned = plan_resharding(stays, every, self._layers, self._comm.here)
            self._move = PlannedMove(self._resharding(planned), self._held(), overlapped=False)
            self.install_parameters(self._layers.parameters(), {})
        if self._masters_are_stale:
            self.shards.follow_weights()
        self._masters_are_stale = False

    def _check_between_batches(self) -> None:
        if self._move is not None or self._adapter.holds_gradients:
            raise ConfigError(
                "the optimizer's flat buffers hold gradients for the next step: freeze, thaw or change parameters "
                "between two batches, before any backward pass of yours, not in a callback of before_step or a hook"
            )

    def _take_options(self, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerRecord]) -> None:
        """Set the options of a group that was empty here, such as the learning rate, from arriving layers."""
        joining = {id(record.parameter) for layer in arrived.values() for record in layer.parameters.values()}
        for number, group in enumerate(self._adapter.inner.param_groups):
            if not any(self._membership.group(p) == number for p in parameters if id(p) not in joining):
                for layer in arrived.values():
                    group.update(layer.group_options.get(number, {}))

    def _resharding(self, plan: ReshardingPlan) -> Resharding:
        return Resharding(
            plan,
            {buffer: dict(self.shards.held(buffer)) for buffer in self.shards.buffers},
            holder=self._holder,
            rank_of=self._rank_of,
            device=self.shards.device,
        )

    def _unshard_per_replica_groups(self) -> None:
        """Hold whole buffers of parameters that differ between replicas, which DeepSpeed's constructor has sharded."""
        self._adapter.use_grid(self._comm.grid, self._comm.groups.alone)
        for number in self.shards.per_replica_groups:
            self._adapter.masters[number].data = self.shards.build_shard(number, {}, MASTER, detached=False)
        self._wrap(*self._weights.rebuild(self._layers.named_parameters(), self._frozen()))

    def _rank_of(self, shard: Shard) -> int:
        return self._comm.rank_of(shard.stage, shard.replica)

    def _run(self, resharding: Resharding) -> None:
        scalars = resharding.plan.scalars
        resharding.run(self._comm.p2p, lambda kind, fresh: self.shards.replace(kind, fresh, scalars))

    def _mark_tied(self) -> None:
        self._adapter.mark_tied(self._layers.tied_parameters())

    # -- checkpoints ----------------------------------------------------------------------------------

    def slots(self, named: Named) -> StageSlots:
        return self.shards.slots()

    def extra_optimizer_state(self) -> dict[str, Any]:
        return self.shards.extra_optimizer_state()

    def load(self, before: Named, after: Named, pieces: StatePieces | None) -> None:
        """Hold these pieces, those of frozen parameters in detached buffers.

        Without pieces, fp32 weights follow the loaded ones, and moments stay. A parameter that was replaced then starts
        without state, in the group of its predecessor.
        """
        if pieces is None:
            self._masters_are_stale = True
            for key, old in before.items():
                group = self._membership.group(old)
                if group is not None and after.get(key) is not old:
                    if key in after:
                        self._membership.join(after[key], group)
                    self._membership.leave(old)  # it is unbound when the buffers match the layers
            return
        groups = {key: self._membership.group(parameter) for key, parameter in before.items()} | pieces.groups
        stay = {id(parameter) for parameter in after.values()}
        self.drop(parameter for parameter in before.values() if id(parameter) not in stay)
        members = {key: number for key in after if (number := groups.get(key)) is not None}
        assert all(
            pieces.elements.get(key, {}).keys() <= {MASTER, *pieces.kinds.get(number, ())}
            for key, number in members.items()
        )
        self._hold([[after[key] for key in members if members[key] == n] for n in self.shards.numbers], pieces)

    def _hold(self, groups: list[list[nn.Parameter]], pieces: StatePieces) -> None:
        """Hold ``groups`` of parameters with the state in ``pieces``."""
        self.shards.membership = Membership(groups)
        for number in self.shards.numbers:
            kinds, options = pieces.kinds.get(number, set()), pieces.options.get(number, {})
            values = pieces.scalars[number] if kinds else {}
            scalars = {name: in_memory(name, value, options, self.shards.device) for name, value in values.items()}
            self.shards.load(number, pieces.elements, kinds, scalars)
            self._adapter.inner.param_groups[number].update(options)
        for parameter in (parameter for group in groups for parameter in group):
            if not parameter.requires_grad:
                parameter.data = parameter.data.clone()
        self._wrap(*self._weights.rebuild(self._layers.named_parameters(), self._frozen()))


def _check_no_gradients(inventories: Sequence[Inventory]) -> None:
    """Refuse to change the buffers while they hold gradients for the next batch.

    Raises:
        ConfigError: the same on every rank.
    """
    stages = sorted({inventory.stage for inventory in inventories if inventory.holds_gradients})
    if stages:
        raise ConfigError(
            f"stages {stages} hold gradients of a backward pass outside train_batch, which would be lost under ZeRO: "
            "call backward after this, or let layers move during the batch (rebalance(..., background=True))"
        )


def _state_of_memory(parameter: nn.Parameter) -> tuple[int, int]:
    """Return what differs once a parameter was changed in place, or lies elsewhere."""
    return version_of(parameter), unmarked(parameter).data_ptr()

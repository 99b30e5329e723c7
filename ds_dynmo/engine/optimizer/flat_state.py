"""Optimizer state in flat shards: it follows the layers by intervals, straight from the ranks that hold it.

A shard of the fp32 weights or of a moment is the unit that DeepSpeed's wrappers know, and its boundaries have
nothing to do with layers. When layers move, every stage's buffers change, and with them the shards of layers that
stay. So all ranks work out where each interval lies before and after
(:mod:`ds_dynmo.engine.optimizer.flat_layout`), copy what stays on a rank, and send the rest directly, one kind of
state after the other.

What a stage holds beside its state of before, or of after: while layers travel the new flat weights, filled
meanwhile with those that stay; once the old ones are freed, one kind of state, new and old. Buffers of gradients are
freed first and made anew last. :mod:`ds_dynmo.partitioners.move_memory` counts all of it before a byte moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.deepspeed_adapter.optimizer_wrappers import FlatWrapper, unbind
from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.engine.migration.packing import LayerContent, parameter_attributes, parameter_hooks
from ds_dynmo.engine.optimizer.flat_layout import Member, ParamOwner, shard_size
from ds_dynmo.engine.optimizer.flat_shards import FlatShards, Pieces
from ds_dynmo.engine.optimizer.membership import Membership
from ds_dynmo.engine.optimizer.parameter_groups import options_of
from ds_dynmo.engine.optimizer.resharding import exchange_shards
from ds_dynmo.engine.optimizer.resharding_plan import MASTER, Holdings, Relayout, work_out
from ds_dynmo.plan import HeldBytes, MigrationPlan


class FlatState:
    """The state of a stage under ``BF16_Optimizer`` or ``DeepSpeedZeroOptimizer`` stage 1.

    Args:
        groups: per parameter group, all of its parameters on this stage, frozen ones too.
        placeholders: one element per group that keeps a group alive where a stage has nothing of it.
    """

    def __init__(
        self,
        wrapper: FlatWrapper,
        layers: StageLayers,
        comm: Communicator,
        grid: Any,
        groups: Sequence[Sequence[nn.Parameter]],
        placeholders: Sequence[nn.Parameter],
    ) -> None:
        self._wrapper, self._layers, self._comm, self._grid = wrapper, layers, comm, grid
        self._placeholders = list(placeholders)
        self._shards = FlatShards(wrapper, layers, grid, groups)
        self._next: Relayout | None = None
        self._flats: dict[int, torch.Tensor] = {}  # per group, the weights' next flat buffer while layers move
        self._linked = False
        self._exchanged: dict[
            ParamOwner, list[Member]
        ] = {}  # of layers some of whose parameters are others since a load
        self._weights_lead = False
        self._mark_tied()

    # -- what is held ---------------------------------------------------------------------------------

    @property
    def _stage(self) -> int:
        return int(self._grid.get_stage_id())

    @property
    def members(self) -> list[list[nn.Parameter]]:
        """Per group, the parameters in its live buffer, in the buffer's order; none where it holds a placeholder."""
        return self._shards.members

    @property
    def parked(self) -> list[list[nn.Parameter]]:
        """Per group, its frozen parameters, in the order of its parked buffer."""
        return self._shards.parked

    @property
    def shard_numels(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Per group, the elements of this rank's shard of its live and of its parked buffer."""
        return self._shards.numels

    @property
    def _membership(self) -> Membership:
        return self._shards.membership

    def group_of(self, parameter: nn.Parameter) -> int | None:
        """The number of a parameter's group; None if no group has it."""
        return self._membership.group(parameter)

    def is_current(self) -> bool:
        """Is every parameter where its ``requires_grad`` says: trainable ones with the optimizer, others parked?"""
        return all(self._membership.is_current(p) for p in self._layers.parameters() if p in self._membership)

    # -- OptimizerState -------------------------------------------------------------------------------

    def trained(self) -> dict[int, nn.Parameter] | None:
        return {id(parameter): parameter for parameter in self._layers.parameters() if parameter in self._membership}

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return self._shards.state_of(parameter)

    def static_bytes(self, parameter: nn.Parameter) -> int:
        return self._shards.static_bytes(parameter)

    def held_bytes(self, parameter: nn.Parameter) -> HeldBytes:
        return self._shards.held_bytes(parameter)

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        self._shards.zero_elements(parameter, where)

    def prepare(self, plan: MigrationPlan) -> int:
        """Gather what every stage holds and work out all copies and messages."""
        self._next = None
        if not plan.moves:
            return 0
        every = self._comm.gather_or_fail("listing what the optimizer holds", self._holdings)
        self._next = work_out(plan, every, self._layers, self._grid)
        me = self._grid.get_stage_id(), self._grid.data_parallel_id
        width_bytes = sum(dtype.itemsize for dtype in self._next.kinds.values())
        return sum(run.numel * width_bytes for run in self._next.runs if run.source == me != run.destination)

    def content(self, module: nn.Module) -> LayerContent:
        parameters = list(module.parameters())
        numbers = [self._membership.group(parameter) for parameter in parameters]
        groups = self._wrapper.inner.param_groups
        return LayerContent(
            module=module,
            parameters=parameters,
            groups=numbers,
            optimizer_state=[None] * len(parameters),
            gradients=[None] * len(parameters),
            attributes=[parameter_attributes(parameter) for parameter in parameters],
            hooks=[parameter_hooks(parameter) for parameter in parameters],
            group_options={n: options_of(groups[n]) for n in numbers if n is not None},
        )

    def start(self) -> None:
        self._wrapper.free_gradients()

    def work_meanwhile(self, staying: Mapping[int, nn.Module]) -> Callable[[], None] | None:
        return partial(self._keep, staying)

    def _keep(self, staying: Mapping[int, nn.Module]) -> None:
        """Put the weights of layers that stay where they are to lie."""
        for index, module in staying.items():
            for position, parameter in enumerate(module.parameters()):
                place = self.recv_buffer_of(index, position)
                if place is not None:
                    unbind(parameter)
                    place.copy_(parameter.data.view(-1))
                    parameter.data = place.view(parameter.shape)

    def recv_buffer_of(self, index: int, position: int) -> torch.Tensor | None:
        assert self._next is not None, "prepare comes first"
        key = self._layers.unit(index), position
        for (group, parked), buffer in self._next.new[self._stage].items():
            if not parked and key in buffer.offsets:
                return self._next_flat(group, buffer.shard).narrow(0, buffer.offsets[key], buffer.numel[key])
        return None

    def _next_flat(self, group: int, shard: int) -> torch.Tensor:
        if group not in self._flats:
            self._flats[group] = self._placeholders[group].data.new_empty(shard * self._shards.count)
        return self._flats[group]

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            unbind(parameter)
            self._membership.leave(parameter)

    def settle(self, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerContent]) -> None:
        following, self._next = self._next, None
        assert following is not None, "prepare comes first"
        for content in arrived.values():
            for parameter, number in zip(content.parameters, content.groups):
                if number is not None:
                    self._membership.join(parameter, number)
        self._take_options(parameters, arrived)
        self._wrapper.free_gradients()
        groups, flats = self._rebuild_buffers(parameters)
        self._wrapper.free_weights()
        self._exchange(following)
        self._wrap(groups, flats)

    def _rebuild_buffers(
        self, parameters: Sequence[nn.Parameter]
    ) -> tuple[list[list[nn.Parameter]], list[torch.Tensor]]:
        """The groups' parameters, placeholders where there are none, and the flat buffers that they now lie in."""
        for parameter in parameters:
            if parameter in self._membership:
                unbind(parameter)
                if self._membership.follow(parameter) and not parameter.requires_grad:
                    parameter.data = parameter.data.clone()  # no longer a part of the flat weights
        live = self._membership.by_group(parameters, parked=False)
        groups = [group or [placeholder] for group, placeholder in zip(live, self._placeholders)]
        flats = [self._flatten(number, group) for number, group in enumerate(groups)]
        self._flats.clear()
        return groups, flats

    def _wrap(self, groups: list[list[nn.Parameter]], flats: list[torch.Tensor]) -> None:
        """Point DeepSpeed's wrapper at them; the shards are in place."""
        self._wrapper.rewrap(groups, flats)
        self._linked = self._wrapper.link_state()
        self._mark_tied()
        counted = {frozenset(self._shards.scalars(n)) for n in self._shards.numbers if len(self._shards.live(n)) > 1}
        assert len(counted) <= 1, f"state without a count of steps: {counted}"  # torch takes what it finds for whole

    def plan_scatter_shards(self, partition: Sequence[int], num_replicas: int) -> Relayout:
        return self._reshard(partition, num_replicas, (num_replicas, self._shards.count))

    def scatter_shards(
        self, plan: Relayout, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerContent]
    ) -> None:
        self._next = plan
        self.settle(parameters, arrived)

    def gather_shards(self, partition: Sequence[int], num_replicas: int) -> None:
        self._exchange(self._reshard(partition, num_replicas, (self._shards.count, num_replicas)))

    def _reshard(self, partition: Sequence[int], num_replicas: int, shards: tuple[int, int]) -> Relayout:
        """Other shards of the same buffers; ``num_replicas`` replicas say what is in them."""
        every = self._comm.gather_or_fail("listing what the optimizer holds", self._holdings)
        known = [holdings for holdings in every if holdings.replica < num_replicas]
        return work_out(MigrationPlan.between(partition, partition), known, self._layers, self._grid, shards)

    def rebuild_buffers(self) -> None:
        self._wrap(*self._rebuild_buffers(self._layers.parameters()))

    def use_grid(self) -> None:
        self._wrapper.use_grid(self._grid)
        self._shards.count = self._grid.data_parallel_size

    def clear(self) -> None:
        self._exchanged, self._weights_lead = {}, False
        for group in self._wrapper.groups:
            for parameter in group:
                unbind(parameter)
        self.load([], {}, {}, {})

    def forget(self) -> None:
        self._shards.forget()
        self._linked = False

    def after_step(self) -> None:
        """Called after every batch."""
        if not self._linked:
            self._linked = self._wrapper.link_state()

    def refit(self, partition: Sequence[int]) -> None:
        """Follow what was frozen or unfrozen, and weights that were loaded. Collective."""
        every = self._comm.gather_or_fail("listing what the optimizer holds", self._holdings)
        if any(m.parked != m.park for h in every for members in h.members.values() for m in members):
            self._next = work_out(MigrationPlan.between(partition, partition), every, self._layers, self._grid)
            self.settle(self._layers.parameters(), {})
        if self._weights_lead:
            self._shards.follow_weights()
        self._exchanged, self._weights_lead = {}, False

    # -- checkpoints ----------------------------------------------------------------------------------

    def extras(self) -> dict[str, Any]:
        """What DeepSpeed's files have no place for."""
        shards = self._shards
        return {
            "parked": {number: dict(shards.held((number, True))) for number in shards.numbers},
            "scalars": {number: shards.scalars(number) for number in shards.numbers},
            "options": {number: options_of(self._wrapper.inner.param_groups[number]) for number in shards.numbers},
            "kinds": {number: sorted(shards.live(number)) for number in shards.numbers},
        }

    def load(
        self,
        members: Sequence[tuple[nn.Parameter, int, Pieces]],
        kinds: Mapping[int, set[str]],
        scalars: Mapping[int, dict[str, Any]],
        options: Mapping[int, dict[str, Any]],
    ) -> None:
        """Hold this state from now on. Weights are in place; frozen parameters are parked. Not collective.

        Args:
            members: the stage's parameters with their group and the pieces of their state.
            kinds, scalars: per group that has state.
        """
        assert all(rows.keys() <= {MASTER, *kinds.get(number, ())} for _, number, rows in members)
        pieces = {id(parameter): rows for parameter, _, rows in members}
        groups: list[list[nn.Parameter]] = [[] for _ in self._placeholders]
        for parameter, number, _ in members:
            groups[number].append(parameter)
        self._shards.membership = Membership(groups)
        for number in self._shards.numbers:
            self._shards.load(number, pieces, kinds.get(number, set()), scalars[number] if kinds.get(number) else {})
            self._wrapper.inner.param_groups[number].update(options.get(number, {}))
        for parameter, _, _ in members:
            if not parameter.requires_grad:
                parameter.data = parameter.data.clone()
        self._wrap(*self._rebuild_buffers(self._layers.parameters()))

    def weights_loaded(
        self, before: Mapping[tuple[int, str], nn.Parameter], after: Mapping[tuple[int, str], nn.Parameter]
    ) -> None:
        """Weights were loaded without the optimizer's state: the fp32 weights follow, the rest stays as it is.

        A parameter that had to become another one starts without state, in the group of the one that it was.
        :meth:`refit` carries this out and has to follow.

        Args:
            before, after: the stage's parameters by layer and name, in the order of its layers.
        """
        self._weights_lead = True
        layers: dict[ParamOwner, list[tuple[nn.Parameter, nn.Parameter | None]]] = {}
        for key, parameter in before.items():
            if parameter in self._membership:
                layers.setdefault(self._layers.unit(key[0]), []).append((parameter, after.get(key)))
        position = {id(p): n for module in self._layers.modules().values() for n, p in enumerate(module.parameters())}
        for unit, pairs in layers.items():
            if all(old is new for old, new in pairs):
                continue
            members = self._exchanged[unit] = []
            for number, (old, new) in enumerate(pairs):
                if old is new:
                    members.append(self._member(old, position[id(old)]))
                    continue
                members.append(replace(self._member(old, -1 - number), park=None))
                group = self._membership.group(old)
                if new is not None and group is not None:
                    self._membership.join(new, group)
                    members.append(replace(self._member(new, position[id(new)]), parked=None))
                self.drop([old])

    def _member(self, parameter: nn.Parameter, position: int) -> Member:
        group = self._membership.group(parameter)
        assert group is not None
        return Member(
            position=position,
            numel=parameter.numel(),
            group=group,
            parked=self._membership.is_parked(parameter),
            park=not parameter.requires_grad,
        )

    def _holdings(self) -> Holdings:
        members: dict[ParamOwner, list[Member]] = {}
        for index, module in self._layers.modules().items():
            unit = self._layers.unit(index)
            members[unit] = self._exchanged.get(unit) or [
                self._member(parameter, position)
                for position, parameter in enumerate(module.parameters())
                if parameter in self._membership
            ]
        shards = self._shards
        containers = [(number, parked) for number in shards.numbers for parked in (False, True)]
        return Holdings(
            stage=self._stage,
            slice=self._grid.get_slice_parallel_rank(),
            replica=self._grid.data_parallel_id,
            num_groups=len(self._placeholders),
            members=members,
            kinds={c: {name: tensor.dtype for name, tensor in shards.held(c).items()} for c in containers},
            scalars={number: shards.scalars(number) for number in shards.numbers},
        )

    # -- carrying out ---------------------------------------------------------------------------------

    def _take_options(self, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerContent]) -> None:
        """A group that was empty here takes its options, the learning rate too, from what arrives."""
        joining_ranks = {id(p) for content in arrived.values() for p in content.parameters}
        for number, group in enumerate(self._wrapper.inner.param_groups):
            if not any(self._membership.group(p) == number for p in parameters if id(p) not in joining_ranks):
                for content in arrived.values():
                    group.update(content.group_options.get(number, {}))

    def _exchange(self, plan: Relayout) -> None:
        """Put the state where ``plan`` says."""
        exchange_shards(
            plan,
            {container: dict(self._shards.held(container)) for container in plan.old[self._stage]},
            place=(self._stage, self._grid.data_parallel_id),
            comm=self._comm,
            rank_of=lambda place: int(self._grid.stage_to_global(place[0], data=place[1])),
            device=self._shards.device,
            replace=lambda name, fresh: self._shards.replace(name, fresh, plan.scalars),
        )

    def _flatten(self, number: int, group: list[nn.Parameter]) -> torch.Tensor:
        """The weights of a group in one buffer, of which the parameters become views; some lie there already."""
        flat = self._next_flat(number, shard_size(sum(parameter.numel() for parameter in group), self._shards.count))
        offset = 0
        for parameter in group:
            view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
            if view.data_ptr() != parameter.data_ptr():
                view.copy_(parameter.data)
            parameter.data = view
            offset += parameter.numel()
        flat[offset:].zero_()
        return flat

    def _mark_tied(self) -> None:
        self._wrapper.mark_tied(self._layers.tied_parameters())

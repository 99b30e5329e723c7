"""Optimizer state in flat shards: it follows the layers by intervals, straight from the ranks that hold it.

A shard of the fp32 weights or of a moment is the unit that DeepSpeed's wrappers know, and its boundaries have
nothing to do with layers. When layers move, every stage's buffers change, and with them the shards of layers that
stay. So all ranks work out where each interval lies before and after (:mod:`ds_dynmo.engine.flat_layout`), copy
what stays on a rank, and send the rest directly, one kind of state after the other: the extra memory is one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.comm import Communicator, nothing
from ds_dynmo.engine.flat_layout import Container, Member, Unit, shard_size
from ds_dynmo.engine.layer_state import LayerContent, parameter_attributes, parameter_hooks
from ds_dynmo.engine.membership import Membership
from ds_dynmo.engine.parameter_groups import options_of
from ds_dynmo.engine.relayout import MASTER, Holdings, Relayout, work_out
from ds_dynmo.engine.shard_exchange import exchange_shards
from ds_dynmo.engine.stage import StageLayers
from ds_dynmo.engine.wrappers import FlatWrapper, unbind
from ds_dynmo.plan import MigrationPlan

Pieces = dict[str, list[tuple[int, torch.Tensor]]]  # per kind, rows of elements with the place of their first


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
        self._membership = Membership(groups)
        self._stash: dict[int, dict[str, torch.Tensor]] = {}  # per group, its parked buffer's tensors
        self._next: Relayout | None = None
        self._flats: dict[int, torch.Tensor] = {}  # per group, the weights' next flat buffer while layers move
        self._linked = False
        self._exchanged: dict[Unit, list[Member]] = {}  # of layers some of whose parameters are others since a load
        self._weights_lead = False
        self._shards = self._shards_at_launch = grid.data_parallel_size
        for number in range(len(self._placeholders)):
            self._stash[number] = self._first_stash(number)
        self._mark_tied()

    # -- what is held ---------------------------------------------------------------------------------

    @property
    def _stage(self) -> int:
        return int(self._grid.get_stage_id())

    @property
    def members(self) -> list[list[nn.Parameter]]:
        """Per group, the parameters in its live buffer, in the buffer's order; none where it holds a placeholder."""
        return self._membership.by_group(self._layers.parameters(), parked=False)

    @property
    def parked(self) -> list[list[nn.Parameter]]:
        """Per group, its frozen parameters, in the order of its parked buffer."""
        return self._membership.by_group(self._layers.parameters(), parked=True)

    @property
    def shard_numels(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Per group, the elements of this rank's shard of its live and of its parked buffer."""
        numbers = range(len(self._placeholders))
        parked = (sum(p.numel() for p in members) for members in self.parked)
        return (
            tuple(self._wrapper.masters[number].numel() for number in numbers),
            tuple(shard_size(total, self._shards, parked=True) for total in parked),
        )

    def group_of(self, parameter: nn.Parameter) -> int | None:
        """The number of a parameter's group; None if no group has it."""
        return self._membership.group(parameter)

    def is_current(self) -> bool:
        """Is every parameter where its ``requires_grad`` says: trainable ones with the optimizer, others parked?"""
        return all(self._membership.is_current(p) for p in self._layers.parameters() if p in self._membership)

    def _first_stash(self, group: int) -> dict[str, torch.Tensor]:
        """The parked buffer of parameters that were frozen from the start: their weights, and no state."""
        parameters = self.parked[group]
        shard = shard_size(sum(p.numel() for p in parameters), self._shards, parked=True)
        if not shard:
            return {}
        flat = torch.cat([p.detach().float().reshape(-1) for p in parameters])
        mine = flat[self._grid.data_parallel_id * shard :][:shard]
        stash = flat.new_zeros(shard)
        stash[: mine.numel()] = mine
        return {MASTER: stash}

    def _live(self, group: int) -> dict[str, torch.Tensor]:
        master = self._wrapper.masters[group]
        state = self._wrapper.inner.state.get(master, {})
        tensors = {name: v for name, v in state.items() if isinstance(v, torch.Tensor) and v.shape == master.shape}
        return {MASTER: master.detach(), **tensors}

    def _held(self, container: Container) -> dict[str, torch.Tensor]:
        group, parked = container
        return self._stash[group] if parked else self._live(group)

    def _scalars(self, group: int) -> dict[str, Any]:
        master = self._wrapper.masters[group]
        state = self._wrapper.inner.state.get(master, {})
        return {n: v for n, v in state.items() if not (isinstance(v, torch.Tensor) and v.shape == master.shape)}

    # -- OptimizerState -------------------------------------------------------------------------------

    def prepare(self, plan: MigrationPlan) -> int:
        """Gather what every stage holds and work out all copies and messages."""
        self._next = None
        if not plan.moves:
            return 0
        every = self._comm.gather_or_fail("listing what the optimizer holds", self._holdings)
        self._next = work_out(plan, every, self._layers, self._grid)
        me = self._grid.get_stage_id(), self._grid.data_parallel_id
        width = sum(dtype.itemsize for dtype in self._next.kinds.values())
        return sum(run.numel * width for run in self._next.runs if run.source == me != run.destination)

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

    def landing_place(self, index: int, position: int) -> torch.Tensor | None:
        assert self._next is not None, "prepare comes first"
        key = self._layers.unit(index), position
        for (group, parked), buffer in self._next.new[self._stage].items():
            if not parked and key in buffer.offsets:
                return self._next_flat(group, buffer.shard).narrow(0, buffer.offsets[key], buffer.numel[key])
        return None

    def _next_flat(self, group: int, shard: int) -> torch.Tensor:
        if group not in self._flats:
            self._flats[group] = self._placeholders[group].data.new_empty(shard * self._shards)
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
        laid_out: list[tuple[list[list[nn.Parameter]], list[torch.Tensor]]] = []
        self._exchange(following, meanwhile=lambda: laid_out.append(self._lay_out(parameters)))
        self._wrap(*laid_out[0])

    def _lay_out(self, parameters: Sequence[nn.Parameter]) -> tuple[list[list[nn.Parameter]], list[torch.Tensor]]:
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
        counted = {frozenset(self._scalars(n)) for n in range(len(groups)) if len(self._live(n)) > 1}
        assert len(counted) <= 1, f"state without a count of steps: {counted}"  # torch takes what it finds for whole

    def plan_share_out(self, partition: Sequence[int], width: int) -> Relayout:
        return self._reshard(partition, width, (width, self._shards))

    def share_out(
        self, plan: Relayout, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerContent]
    ) -> None:
        self._next = plan
        self.settle(parameters, arrived)

    def draw_in(self, partition: Sequence[int], width: int) -> None:
        self._exchange(self._reshard(partition, width, (self._shards, width)), meanwhile=nothing)

    def _reshard(self, partition: Sequence[int], width: int, shards: tuple[int, int]) -> Relayout:
        """Other shards of the same buffers; ``width`` replicas say what is in them."""
        every = self._comm.gather_or_fail("listing what the optimizer holds", self._holdings)
        known = [holdings for holdings in every if holdings.replica < width]
        return work_out(MigrationPlan.between(partition, partition), known, self._layers, self._grid, shards)

    def lay_out(self) -> None:
        self._wrap(*self._lay_out(self._layers.parameters()))

    def use_grid(self) -> None:
        self._wrapper.use_grid(self._grid)
        self._shards = self._grid.data_parallel_size

    def clear(self) -> None:
        self._exchanged, self._weights_lead = {}, False
        for group in self._wrapper.groups:
            for parameter in group:
                unbind(parameter)
        self.load([], {}, {}, {})

    def forget(self) -> None:
        for master in self._wrapper.masters:
            self._wrapper.inner.state.pop(master, None)
        for stash in self._stash.values():
            stash.clear()
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
            self._follow_weights()
        self._exchanged, self._weights_lead = {}, False

    # -- checkpoints ----------------------------------------------------------------------------------

    def extras(self) -> dict[str, Any]:
        """What DeepSpeed's files have no place for."""
        numbers = range(len(self._placeholders))
        return {
            "parked": {number: dict(self._stash[number]) for number in numbers},
            "scalars": {number: self._scalars(number) for number in numbers},
            "options": {number: options_of(self._wrapper.inner.param_groups[number]) for number in numbers},
            "kinds": {number: sorted(self._live(number)) for number in numbers},
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
        self._membership = Membership(groups)
        state = self._wrapper.inner.state
        for number in range(len(self._placeholders)):
            for parked in (False, True):
                group = (self.parked if parked else self.members)[number]
                fresh = {
                    name: self._shard(group, pieces, name, parked=parked) for name in {MASTER, *kinds.get(number, ())}
                }
                if parked:
                    self._stash[number] = {name: tensor for name, tensor in fresh.items() if tensor.numel()}
                    continue
                master = self._wrapper.masters[number]
                master.data = fresh.pop(MASTER)
                state.pop(master, None)
                if fresh:
                    state[master] = {**scalars[number], **fresh}
            self._wrapper.inner.param_groups[number].update(options.get(number, {}))
        for parameter, _, _ in members:
            if not parameter.requires_grad:
                parameter.data = parameter.data.clone()
        self._wrap(*self._lay_out(self._layers.parameters()))

    def _shard(
        self, group: Sequence[nn.Parameter], pieces: Mapping[int, Pieces], name: str, *, parked: bool
    ) -> torch.Tensor:
        """This rank's shard of one kind of state; weights where there are no pieces of the fp32 ones, zeros else."""
        size = shard_size(sum(p.numel() for p in group), self._shards, parked=parked)
        shard = torch.zeros(size, dtype=torch.float32, device=self._device)
        offset = -self._grid.data_parallel_id * size
        for parameter in group:
            rows = pieces.get(id(parameter), {}).get(name, [])
            if not rows and name == MASTER:
                rows = [(0, parameter.detach().reshape(-1))]
            for start, row in rows:
                first, last = max(offset + start, 0), min(offset + start + row.numel(), size)
                if first < last:
                    shard[first:last] = row[first - offset - start : last - offset - start]
            offset += parameter.numel()
        return shard

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
        layers: dict[Unit, list[tuple[nn.Parameter, nn.Parameter | None]]] = {}
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

    def _follow_weights(self) -> None:
        for number, stash in self._stash.items():
            for parked, group in ((False, self.members[number]), (True, self.parked[number])):
                held = stash.get(MASTER) if parked else self._wrapper.masters[number].data
                if held is not None:
                    held.copy_(self._shard(group, {}, MASTER, parked=parked))

    def static_bytes(self, parameter: nn.Parameter) -> int:
        number = self._membership.group(parameter)
        if number is None:
            return 0
        width = sum(tensor.dtype.itemsize for tensor in self._live(number).values())
        state = parameter.numel() * width // self._shards_at_launch  # of further replicas a re-packing goes back first
        if self._membership.is_parked(parameter):
            return state
        return state + parameter.nbytes + parameter.numel() * self._wrapper.gradient_bytes_per_element

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        number = self._membership.group(parameter)
        if number is None:
            return {}
        parked = self._membership.is_parked(parameter)
        offset = 0
        for other in (self.parked if parked else self.members)[number]:
            if other is parameter:
                break
            offset += other.numel()
        found: dict[str, Any] = {} if parked else dict(self._scalars(number))
        for name, tensor in self._held((number, parked)).items():
            first = offset - self._grid.data_parallel_id * tensor.numel()
            found[name] = (max(-first, 0), tensor[max(first, 0) : max(first + parameter.numel(), 0)])
        return found

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

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        parameter.detach().masked_fill_(where, 0)
        for held in self.state_of(parameter).values():
            if isinstance(held, tuple):  # this rank's part of the master weights or of a moment
                start, part = held
                part.masked_fill_(where.reshape(-1)[start : start + part.numel()], 0)

    def _holdings(self) -> Holdings:
        members: dict[Unit, list[Member]] = {}
        for index, module in self._layers.modules().items():
            unit = self._layers.unit(index)
            members[unit] = self._exchanged.get(unit) or [
                self._member(parameter, position)
                for position, parameter in enumerate(module.parameters())
                if parameter in self._membership
            ]
        numbers = range(len(self._placeholders))
        containers = [(number, parked) for number in numbers for parked in (False, True)]
        return Holdings(
            stage=self._stage,
            slice=self._grid.get_slice_parallel_rank(),
            replica=self._grid.data_parallel_id,
            num_groups=len(self._placeholders),
            members=members,
            kinds={c: {name: tensor.dtype for name, tensor in self._held(c).items()} for c in containers},
            scalars={number: self._scalars(number) for number in numbers},
        )

    # -- carrying out ---------------------------------------------------------------------------------

    def _take_options(self, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerContent]) -> None:
        """A group that was empty here takes its options, the learning rate too, from what arrives."""
        newcomers = {id(p) for content in arrived.values() for p in content.parameters}
        for number, group in enumerate(self._wrapper.inner.param_groups):
            if not any(self._membership.group(p) == number for p in parameters if id(p) not in newcomers):
                for content in arrived.values():
                    group.update(content.group_options.get(number, {}))

    def _exchange(self, plan: Relayout, meanwhile: Callable[[], None]) -> None:
        """Put the state where ``plan`` says; ``meanwhile`` is called while it travels."""
        exchange_shards(
            plan,
            {container: dict(self._held(container)) for container in plan.old[self._stage]},
            place=(self._stage, self._grid.data_parallel_id),
            comm=self._comm,
            rank_of=lambda place: int(self._grid.stage_to_global(place[0], data=place[1])),
            device=self._device,
            replace=lambda name, fresh: self._replace(name, fresh, plan),
            meanwhile=meanwhile,
        )

    def _replace(self, name: str, fresh: Mapping[Container, torch.Tensor], plan: Relayout) -> None:
        """Hold the shards of one kind of state that have arrived, in place of the old ones."""
        state = self._wrapper.inner.state
        for (number, parked), shard in fresh.items():
            if parked:
                if shard.numel():
                    self._stash[number][name] = shard
                else:
                    self._stash[number].pop(name, None)
                continue
            master = self._wrapper.masters[number]
            if name == MASTER:
                master.data = shard
                master.grad = None
            else:
                state[master][name] = shard
                for scalar, value in plan.scalars[number].items():
                    state[master].setdefault(scalar, value)

    @property
    def _device(self) -> torch.device:
        return self._wrapper.masters[0].device

    def _flatten(self, number: int, group: list[nn.Parameter]) -> torch.Tensor:
        """The weights of a group in one buffer, of which the parameters become views; some lie there already."""
        flat = self._next_flat(number, shard_size(sum(parameter.numel() for parameter in group), self._shards))
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

"""A rank's shards of optimizer state: live ones in DeepSpeed's wrapper, and detached ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.comm.point_to_point import SMALL_BYTES
from ds_dynmo.engine.deepspeed.flat_adapter import FlatOptimizerAdapter
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.move.carrying import Tensors
from ds_dynmo.engine.move.layout import Buffer, intervals_of_shards, shard_size
from ds_dynmo.engine.state.keys import MASTER, ParamKey
from ds_dynmo.engine.state.membership import Membership
from ds_dynmo.engine.state.optimizer_state import held_alone, select
from ds_dynmo.engine.state.parameter_groups import options_of
from ds_dynmo.engine.state.pieces import Elements, Slot, StageSlots, StatePieces
from ds_dynmo.plan import HeldBytes
from ds_dynmo.unmarked import unmarked


class Member(NamedTuple):
    """A parameter of a parameter group, and the buffer that holds it; ``key`` None: its layer has it no longer."""

    key: ParamKey | None
    numel: int
    buffer: Buffer


Contents = list[tuple[ParamKey | None, nn.Parameter]]  # of a buffer, in its order; None: its layer has it no longer


class FlatShards:
    """One rank's shards: per parameter group, of a live and of a detached buffer. Sizes are in elements.

    DeepSpeed's wrapper is asked which parameters lie in a live buffer, and in which order (:meth:`contents`). The
    layers may have others since, or in another order: that is how the buffers are to become (:attr:`planned`).

    Args:
        groups: per parameter group, all of its parameters on this stage, frozen ones too.
        placeholders: one element per group, which is in a live buffer that has no parameter.

    Attributes:
        membership: the group of each parameter of the stage, and the buffer that is to hold it.
        count: number of shards of a buffer, one per replica.
    """

    def __init__(
        self,
        adapter: FlatOptimizerAdapter,
        layers: StageLayers,
        comm: Communicator,
        groups: Sequence[Sequence[nn.Parameter]],
        placeholders: Sequence[nn.Parameter],
    ) -> None:
        self._adapter, self._layers, self._comm = adapter, layers, comm
        self._placeholders = list(placeholders)
        self.membership = Membership(groups)
        self.count = comm.here.replicas
        self._detached: dict[int, dict[str, torch.Tensor]] = {}
        self._in_detached: list[list[nn.Parameter]] = []  # per group, in the order of the detached buffer
        self.note_detached()
        for number in range(len(groups)):
            weights = self.build_shard(number, {}, MASTER, detached=True)  # frozen from the start: without other state
            self._detached[number] = {MASTER: weights} if weights.numel() else {}

    @property
    def numbers(self) -> range:
        """The numbers of the parameter groups."""
        return range(len(self._detached))

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers of all groups, live and detached ones."""
        return [Buffer(number, detached) for number in self.numbers for detached in (False, True)]

    @property
    def per_replica_groups(self) -> frozenset[int]:
        """The groups of parameters that differ between replicas: their buffers are not cut."""
        return self._adapter.per_replica_groups

    def count_of(self, group: int) -> int:
        """Return the number of shards of a group's buffers."""
        return 1 if group in self.per_replica_groups else self.count

    @property
    def contents(self) -> dict[Buffer, Contents]:
        """What lies in each buffer now, without placeholders; keys are the present ones."""
        key_of = {id(parameter): key for key, parameter in self._layers.named_parameters().items()}
        return {buffer: [(key_of.get(id(p)), p) for p in self._in(buffer)] for buffer in self.buffers}

    def _in(self, buffer: Buffer) -> list[nn.Parameter]:
        if buffer.detached:
            return self._in_detached[buffer.group]
        placeholder = self._placeholders[buffer.group]
        return [parameter for parameter in self._adapter.groups[buffer.group] if parameter is not placeholder]

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters in all buffers."""
        return [parameter for buffer in self.buffers for parameter in self._in(buffer)]

    def planned(self, *, detached: bool) -> list[dict[ParamKey, nn.Parameter]]:
        """List per group the parameters that its live or detached buffer is to hold, in the order of the layers."""
        return self.membership.by_group(self._layers.named_parameters(), detached=detached)

    def note_detached(self) -> None:
        """Note that the detached buffers hold what is planned."""
        self._in_detached = [[*group.values()] for group in self.planned(detached=True)]

    def groups_with_parameters(self) -> list[int]:
        """List the groups whose live buffer holds a parameter, not a placeholder."""
        return [number for number in self.numbers if self._in(Buffer(number, detached=False))]

    @property
    def numels(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Per group, the elements of this rank's shard of its live and of its detached buffer."""
        return (
            tuple(self._adapter.masters[number].numel() for number in self.numbers),
            tuple(self._size_of(Buffer(number, detached=True)) for number in self.numbers),
        )

    def slots(self) -> StageSlots:
        """List the slots of this rank's stage in DeepSpeed's files; frozen ones: in :meth:`extra_optimizer_state`."""
        slots: list[Slot] = []
        files = self.groups_with_parameters()
        for buffer, held in sorted(self.contents.items(), key=lambda entry: entry[0].detached):  # these come last
            index = files.index(buffer.group) if held and not buffer.detached else -1
            offset = 0
            for key, parameter in held:
                assert key is not None, "the buffers follow the layers before a save"
                slots.append(Slot(*key, buffer.group, index, offset, parameter.numel(), buffer.detached))
                offset += parameter.numel()
        return StageSlots(tuple(slots), *self.numels)

    @property
    def device(self) -> torch.device:
        return self._adapter.masters[0].device

    # -- by buffer ------------------------------------------------------------------------------------

    def held(self, buffer: Buffer) -> dict[str, torch.Tensor]:
        """Return this rank's shard of each kind of state."""
        return self._detached[buffer.group] if buffer.detached else self.live(buffer.group)

    def live(self, group: int) -> dict[str, torch.Tensor]:
        """Return the shards of the group's live buffer, which DeepSpeed's optimizer holds."""
        master = self._adapter.masters[group]
        state = self._adapter.inner.state.get(master, {})
        tensors = {name: v for name, v in state.items() if isinstance(v, torch.Tensor) and v.shape == master.shape}
        return {MASTER: master.detach(), **tensors}

    def scalars(self, group: int) -> dict[str, Any]:
        """Return the optimizer's state of a group except tensors of a shard's size."""
        master = self._adapter.masters[group]
        state = self._adapter.inner.state.get(master, {})
        return {n: v for n, v in state.items() if not (isinstance(v, torch.Tensor) and v.shape == master.shape)}

    def replace(self, name: str, fresh: Tensors, scalars: Mapping[int, dict[str, Any]]) -> None:
        """Replace the shards of one kind of state; set ``scalars`` of groups that have none yet."""
        state = self._adapter.inner.state
        for (number, detached), shard in fresh.items():
            if detached:
                if shard.numel():
                    self._detached[number][name] = shard
                else:
                    self._detached[number].pop(name, None)
                continue
            master = self._adapter.masters[number]
            if name == MASTER:
                master.data = shard
                master.grad = None
            else:
                state[master][name] = shard
                for scalar, value in scalars[number].items():
                    state[master].setdefault(scalar, value)

    def export(self, kept: Mapping[ParamKey, torch.Tensor]) -> StatePieces:
        """Collect what this rank's shards will hold. Collective over the replicas.

        Args:
            kept: of parameters that are reduced to some elements, the places of these when flattened.
        """
        pieces = StatePieces(scalars={number: self.scalars(number) for number in self.numbers})
        for buffer, held in self.contents.items():
            numels = {key: parameter.numel() for key, parameter in held if key is not None}
            assert len(numels) == len(held), "the buffers follow the layers first"
            left = [(key, len(kept[key]) if key in kept else numel) for key, numel in numels.items()]
            count = self.count_of(buffer.group)
            size = shard_size(sum(numel for _, numel in left), count, detached=buffer.detached)
            mine = [*intervals_of_shards(left, count, size)][self._position_in(buffer.group)]
            pieces.kinds.setdefault(buffer.group, set()).update(self.held(buffer).keys() - {MASTER})
            for name, shard in sorted(self.held(buffer).items()):
                whole = self._gather(buffer, shard)[: sum(numels.values())]
                rows = dict(zip(numels, whole.split([*numels.values()])))
                for key, start, numel, _ in mine:
                    row = select(rows[key], kept[key]) if key in kept else rows[key]
                    pieces.elements.setdefault(key, {})[name] = [(start, row.narrow(0, start, numel).clone())]
        return pieces

    def _gather(self, buffer: Buffer, shard: torch.Tensor) -> torch.Tensor:
        """Return the buffer of which ``shard`` is this rank's part. Collective over the replicas."""
        whole = shard.new_empty(self.count_of(buffer.group), shard.numel())
        here, stage = self._position_in(buffer.group), self._comm.here.stage
        whole[here] = shard
        peers = {self._comm.rank_of(stage, place): part for place, part in enumerate(whole) if place != here}
        self._comm.p2p.exchange([(rank, shard) for rank in peers], list(peers.items()))
        return whole.view(-1)

    def load(
        self, number: int, elements: Mapping[ParamKey, Elements], kinds: set[str], scalars: Mapping[str, Any]
    ) -> None:
        """Set the state of a group's parameters to ``elements``, and ``scalars`` if there is state of any kind."""
        for detached in (False, True):
            fresh = {name: self.build_shard(number, elements, name, detached=detached) for name in {MASTER, *kinds}}
            if detached:
                self._detached[number] = {name: tensor for name, tensor in fresh.items() if tensor.numel()}
                continue
            master = self._adapter.masters[number]
            master.data = fresh.pop(MASTER)
            self._adapter.inner.state.pop(master, None)
            if fresh:
                self._adapter.inner.state[master] = {**scalars, **fresh}

    def follow_weights(self) -> None:
        """Set the fp32 weights to the parameters."""
        for number, tensors in self._detached.items():
            for detached in (False, True):
                held = tensors.get(MASTER) if detached else self._adapter.masters[number].data
                if held is not None:
                    held.copy_(self.build_shard(number, {}, MASTER, detached=detached))

    def build_shard(
        self, number: int, elements: Mapping[ParamKey, Elements], name: str, *, detached: bool
    ) -> torch.Tensor:
        """Cut this rank's planned shard of one kind of state. Missing elements: parameters (fp32 weights), or 0."""
        group = self.planned(detached=detached)[number]
        size = self._size(number, group.values(), detached=detached)
        shard = torch.zeros(size, dtype=torch.float32, device=self.device)
        numels = [(key, parameter.numel()) for key, parameter in group.items()]
        for interval in list(intervals_of_shards(numels, self.count_of(number), size))[self._position_in(number)]:
            rows = elements.get(interval.key, {}).get(name, [])
            if not rows and name == MASTER:
                rows = [(0, unmarked(group[interval.key]))]
            copied = 0
            for start, values in rows:
                row = values.reshape(-1)
                first = max(interval.start, start)
                numel = min(interval.start + interval.numel, start + row.numel()) - first
                if numel > 0:
                    shard.narrow(0, interval.offset + first - interval.start, numel).copy_(row[first - start :][:numel])
                    copied += numel
            assert copied == (interval.numel if rows else 0), f"{copied} elements of {interval.key}'s {name}"
        return shard

    def _size_of(self, buffer: Buffer) -> int:
        return self._size(buffer.group, self._in(buffer), detached=buffer.detached)

    def _size(self, number: int, parameters: Iterable[nn.Parameter], *, detached: bool) -> int:
        return shard_size(sum(p.numel() for p in parameters), self.count_of(number), detached=detached)

    def _position_in(self, group: int) -> int:
        """Return the number of this rank's shard of a group's buffers."""
        return 0 if group in self.per_replica_groups else self._comm.here.replica

    def extra_optimizer_state(self) -> dict[str, Any]:
        """Collect the state for which DeepSpeed's checkpoint files have no place."""
        return {
            "detached": {number: dict(self.held(Buffer(number, detached=True))) for number in self.numbers},
            "scalars": {number: self.scalars(number) for number in self.numbers},
            "options": {number: options_of(self._adapter.inner.param_groups[number]) for number in self.numbers},
            "kinds": {number: sorted(self.live(number)) for number in self.numbers},
        }

    # -- by parameter ---------------------------------------------------------------------------------

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the start and the values of a parameter in each shard, and its group's scalars if it is live."""
        buffer = next((b for b in self.buffers if any(other is parameter for other in self._in(b))), None)
        if buffer is None:
            return {}
        earlier = itertools.takewhile(lambda other: other is not parameter, self._in(buffer))
        size = self._size_of(buffer)
        first = self._position_in(buffer.group) * size - sum(other.numel() for other in earlier)
        start, stop = (min(max(place, 0), parameter.numel()) for place in (first, first + size))
        state: dict[str, Any] = {} if buffer.detached else dict(self.scalars(buffer.group))
        for name, tensor in self.held(buffer).items():
            state[name] = (start, tensor.narrow(0, start - first if start < stop else 0, stop - start))
        return state

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        """Set these elements, and this rank's part of their state, to 0."""
        unmarked(parameter).masked_fill_(where, 0)
        for held in self.state_of(parameter).values():
            if isinstance(held, tuple):  # this rank's part of the master weights or of a moment
                start, part = held
                part.masked_fill_(where.reshape(-1)[start : start + part.numel()], 0)

    def state_and_gradient_bytes(self, parameter: nn.Parameter) -> int:
        """Count the bytes of a parameter's gradients and of this rank's share of its state, without the weight."""
        number = self.membership.group(parameter)
        if number is None:
            return 0
        width_bytes = sum(tensor.dtype.itemsize for tensor in self.live(number).values())
        state = parameter.numel() * width_bytes // self.count_of(number)
        if self.membership.is_detached(parameter):
            return state
        return state + parameter.nbytes + parameter.numel() * self._adapter.gradient_bytes_per_element

    def bytes_between_batches(self, parameter: nn.Parameter) -> HeldBytes:
        """Count the bytes of a parameter and its state on a rank between two batches."""
        number = self.membership.group(parameter)
        if number is None:
            return held_alone([parameter])
        widths = [tensor.dtype.itemsize for tensor in self.live(number).values()]
        largest = parameter.numel() * max(widths) // self.count_of(number)
        detached = self.membership.is_detached(parameter)
        return HeldBytes(
            separate=parameter.nbytes if detached else 0,
            flat=0 if detached else parameter.nbytes,
            shards=parameter.numel() * sum(widths) // self.count_of(number),
            largest_shard=largest,
            gradients=0 if detached else parameter.numel() * self._adapter.gradient_bytes_per_element,
            staged=max(size for size in (0, parameter.nbytes, largest) if size <= SMALL_BYTES),
        )

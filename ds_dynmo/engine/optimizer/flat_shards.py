"""The shards of optimizer state that a rank holds: live ones in DeepSpeed's wrapper, parked ones beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.comm.point_to_point import SMALL_BYTES, PointToPoint
from ds_dynmo.engine.deepspeed_adapter.flat_wrapper import FlatWrapper
from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.engine.optimizer.compaction import Compaction, KeptElements, Part
from ds_dynmo.engine.optimizer.flat_layout import MASTER, BufferKey, shard_size
from ds_dynmo.engine.optimizer.membership import Membership
from ds_dynmo.engine.optimizer.parameter_groups import options_of
from ds_dynmo.engine.optimizer.state import held_alone
from ds_dynmo.plan import HeldBytes

Pieces = dict[str, list[tuple[int, torch.Tensor]]]  # per kind, rows of elements with the place of their first


class FlatShards:
    """One rank's shards: per parameter group, of a live and of a parked buffer. All sizes are elements.

    Args:
        groups: per parameter group, all of its parameters on this stage, frozen ones too.

    Attributes:
        membership: which buffer each parameter of the stage lies in.
        count: the shards of a buffer, as many as there are replicas.
    """

    def __init__(
        self, wrapper: FlatWrapper, layers: StageLayers, grid: Any, groups: Sequence[Sequence[nn.Parameter]]
    ) -> None:
        self._wrapper, self._layers, self._grid = wrapper, layers, grid
        self.membership = Membership(groups)
        self.count = self._count_at_launch = int(grid.data_parallel_size)
        self._parked: dict[int, dict[str, torch.Tensor]] = {}
        for number in range(len(groups)):
            weights = self.cut(number, {}, MASTER, parked=True)  # frozen from the start: no other state
            self._parked[number] = {MASTER: weights} if weights.numel() else {}

    @property
    def numbers(self) -> range:
        """The numbers of the parameter groups."""
        return range(len(self._parked))

    @property
    def own_groups(self) -> frozenset[int]:
        """The groups whose parameters are each replica's own: their buffers are not cut."""
        return self._wrapper.own_groups

    def count_of(self, group: int) -> int:
        """Return the number of shards of a group's buffers."""
        return 1 if group in self.own_groups else self.count

    @property
    def members(self) -> list[list[nn.Parameter]]:
        """Per group, the parameters in its live buffer, in the buffer's order; none where it holds a placeholder."""
        return self.membership.by_group(self._layers.parameters(), parked=False)

    @property
    def parked(self) -> list[list[nn.Parameter]]:
        """Per group, its frozen parameters, in the order of its parked buffer."""
        return self.membership.by_group(self._layers.parameters(), parked=True)

    @property
    def numels(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Per group, the elements of this rank's shard of its live and of its parked buffer."""
        return (
            tuple(self._wrapper.masters[number].numel() for number in self.numbers),
            tuple(self._size(number, group, parked=True) for number, group in enumerate(self.parked)),
        )

    @property
    def device(self) -> torch.device:
        return self._wrapper.masters[0].device

    # -- by buffer ------------------------------------------------------------------------------------

    def held(self, key: BufferKey) -> dict[str, torch.Tensor]:
        """Return this rank's shard of each kind of state."""
        group, parked = key
        return self._parked[group] if parked else self.live(group)

    def live(self, group: int) -> dict[str, torch.Tensor]:
        """Return the shards of the group's live buffer: what DeepSpeed's optimizer holds."""
        master = self._wrapper.masters[group]
        state = self._wrapper.inner.state.get(master, {})
        tensors = {name: v for name, v in state.items() if isinstance(v, torch.Tensor) and v.shape == master.shape}
        return {MASTER: master.detach(), **tensors}

    def scalars(self, group: int) -> dict[str, Any]:
        """Return what the optimizer's state of a group has beside tensors of a shard's size."""
        master = self._wrapper.masters[group]
        state = self._wrapper.inner.state.get(master, {})
        return {n: v for n, v in state.items() if not (isinstance(v, torch.Tensor) and v.shape == master.shape)}

    def replace(
        self, name: str, fresh: Mapping[BufferKey, torch.Tensor], scalars: Mapping[int, dict[str, Any]]
    ) -> None:
        """Hold these shards of one kind of state in place of the old ones; ``scalars`` where a group has none yet."""
        state = self._wrapper.inner.state
        for (number, parked), shard in fresh.items():
            if parked:
                if shard.numel():
                    self._parked[number][name] = shard
                else:
                    self._parked[number].pop(name, None)
                continue
            master = self._wrapper.masters[number]
            if name == MASTER:
                master.data = shard
                master.grad = None
            else:
                state[master][name] = shard
                for scalar, value in scalars[number].items():
                    state[master].setdefault(scalar, value)

    def keep_elements(self, kept: Sequence[KeptElements], p2p: PointToPoint, rank_of: Callable[[int], int]) -> None:
        """Hold the state of the elements that stay alone, in shards cut anew. The old parameters are in place still.

        Args:
            rank_of: a replica's rank.
        """
        index_of = {id(entry.old): entry.index for entry in kept}
        for parked, groups in ((False, self.members), (True, self.parked)):
            for number, group in enumerate(groups):
                if any(id(parameter) in index_of for parameter in group):
                    parts = [(parameter.numel(), index_of.get(id(parameter))) for parameter in group]
                    self._compact((number, parked), parts, p2p, rank_of)

    def _compact(self, key: BufferKey, parts: Sequence[Part], p2p: PointToPoint, rank_of: Callable[[int], int]) -> None:
        size, left = (sum(numels) for numels in zip(*((n, n if i is None else len(i)) for n, i in parts)))
        old_shard, shard = (shard_size(total, self.count, parked=key[1]) for total in (size, left))
        compaction = Compaction(parts, self.count, old_shard, shard)
        mine, held = self._grid.data_parallel_id, dict(self.held(key))
        others = [replica for replica in range(self.count) if replica != mine]
        for name in sorted(held):
            row = compaction.select(held.pop(name), mine)
            fresh = row.new_zeros(shard)
            sends = [(rank_of(other), row[compaction.sent(mine, other)[0]]) for other in others]
            receives = [(rank_of(other), fresh[compaction.sent(other, mine)[1]]) for other in others]
            p2p.exchange(sends, receives)
            source, destination = compaction.sent(mine, mine)
            fresh[destination] = row[source]
            self.replace(name, {key: fresh}, {key[0]: {}})

    def load(self, number: int, pieces: Mapping[int, Pieces], kinds: set[str], scalars: Mapping[str, Any]) -> None:
        """Hold what ``pieces`` say of a group's parameters, by ``id``; ``scalars`` if there is state of any kind."""
        for parked in (False, True):
            fresh = {name: self.cut(number, pieces, name, parked=parked) for name in {MASTER, *kinds}}
            if parked:
                self._parked[number] = {name: tensor for name, tensor in fresh.items() if tensor.numel()}
                continue
            master = self._wrapper.masters[number]
            master.data = fresh.pop(MASTER)
            self._wrapper.inner.state.pop(master, None)
            if fresh:
                self._wrapper.inner.state[master] = {**scalars, **fresh}

    def forget(self) -> None:
        """Free all tensors but the wrapper's fp32 weights."""
        for master in self._wrapper.masters:
            self._wrapper.inner.state.pop(master, None)
        for tensors in self._parked.values():
            tensors.clear()

    def follow_weights(self) -> None:
        """Set the fp32 weights to what the parameters are."""
        for number, tensors in self._parked.items():
            for parked in (False, True):
                held = tensors.get(MASTER) if parked else self._wrapper.masters[number].data
                if held is not None:
                    held.copy_(self.cut(number, {}, MASTER, parked=parked))

    def cut(self, number: int, pieces: Mapping[int, Pieces], name: str, *, parked: bool) -> torch.Tensor:
        """Cut this rank's shard of one kind of state. Without pieces: the parameters as fp32 weights, else zeros."""
        group = (self.parked if parked else self.members)[number]
        size = self._size(number, group, parked=parked)
        shard = torch.zeros(size, dtype=torch.float32, device=self.device)
        offset = -self._position_in(number) * size
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

    def _size(self, number: int, group: Sequence[nn.Parameter], *, parked: bool) -> int:
        return shard_size(sum(parameter.numel() for parameter in group), self.count_of(number), parked=parked)

    def _position_in(self, group: int) -> int:
        """Return the number of this rank's shard of a group's buffers."""
        return 0 if group in self.own_groups else int(self._grid.data_parallel_id)

    def extras(self) -> dict[str, Any]:
        """Collect what DeepSpeed's checkpoint files have no place for."""
        return {
            "parked": {number: dict(self.held((number, True))) for number in self.numbers},
            "scalars": {number: self.scalars(number) for number in self.numbers},
            "options": {number: options_of(self._wrapper.inner.param_groups[number]) for number in self.numbers},
            "kinds": {number: sorted(self.live(number)) for number in self.numbers},
        }

    # -- by parameter ---------------------------------------------------------------------------------

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return a parameter's part in each shard, with where it begins, and its group's scalars if it trains."""
        number = self.membership.group(parameter)
        if number is None:
            return {}
        parked = self.membership.is_parked(parameter)
        offset = 0
        for other in (self.parked if parked else self.members)[number]:
            if other is parameter:
                break
            offset += other.numel()
        found: dict[str, Any] = {} if parked else dict(self.scalars(number))
        for name, tensor in self.held((number, parked)).items():
            first = offset - self._position_in(number) * tensor.numel()
            found[name] = (max(-first, 0), tensor[max(first, 0) : max(first + parameter.numel(), 0)])
        return found

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        """Set these elements, and what this rank holds of their state, to 0."""
        parameter.detach().masked_fill_(where, 0)
        for held in self.state_of(parameter).values():
            if isinstance(held, tuple):  # this rank's part of the master weights or of a moment
                start, part = held
                part.masked_fill_(where.reshape(-1)[start : start + part.numel()], 0)

    def static_bytes(self, parameter: nn.Parameter) -> int:
        """Count what a rank holds for a parameter beside the weight: gradient, and its share of the state."""
        number = self.membership.group(parameter)
        if number is None:
            return 0
        width_bytes = sum(tensor.dtype.itemsize for tensor in self.live(number).values())
        state = parameter.numel() * width_bytes // self._least_count(number)
        if self.membership.is_parked(parameter):
            return state
        return state + parameter.nbytes + parameter.numel() * self._wrapper.gradient_bytes_per_element

    def held_bytes(self, parameter: nn.Parameter) -> HeldBytes:
        """Count a parameter and all that a rank holds for it between two batches."""
        number = self.membership.group(parameter)
        if number is None:
            return held_alone([parameter])
        widths = [tensor.dtype.itemsize for tensor in self.live(number).values()]
        largest = parameter.numel() * max(widths) // self._least_count(number)
        parked = self.membership.is_parked(parameter)
        return HeldBytes(
            own=parameter.nbytes if parked else 0,
            flat=0 if parked else parameter.nbytes,
            shards=parameter.numel() * sum(widths) // self._least_count(number),
            largest_shard=largest,
            gradients=0 if parked else parameter.numel() * self._wrapper.gradient_bytes_per_element,
            staged=max(size for size in (0, parameter.nbytes, largest) if size <= SMALL_BYTES),
        )

    def _least_count(self, group: int) -> int:
        """Return the number of shards that counts: a re-packing gives up further replicas than the launch's first."""
        return 1 if group in self.own_groups else self._count_at_launch

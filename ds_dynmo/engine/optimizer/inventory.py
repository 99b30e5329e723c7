"""List what a rank holds in flat buffers, for the other ranks, before the buffers change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.engine.optimizer.flat_layout import BufferKey, Member, ParamOwner
from ds_dynmo.engine.optimizer.flat_shards import FlatShards
from ds_dynmo.engine.optimizer.membership import Membership

Scalars = dict[int, dict[str, Any]]  # per parameter group, what the optimizer keeps once for all of it


@dataclass(frozen=True)
class Inventory:
    """What one rank tells the others: its parameters, and the kinds of state it keeps for them.

    Attributes:
        tp_rank: the rank's index on the tensor ("model") axis.
        replica: its data-parallel index.
        kinds: per buffer, the dtypes of the fp32 weights and of the optimizer's tensors in it.
        scalars: such as the count of steps.
        own_groups: the parameter groups whose parameters are each replica's own.
    """

    stage: int
    tp_rank: int
    replica: int
    num_groups: int
    members: dict[ParamOwner, list[Member]]
    kinds: dict[BufferKey, dict[str, torch.dtype]]
    scalars: Scalars
    own_groups: frozenset[int] = frozenset()


class StageInventory:
    """Takes the inventory of a rank.

    Between a load of weights and the next resharding, parameters that became others are listed as leaving, and those
    that took their places as new.
    """

    def __init__(self, layers: StageLayers, shards: FlatShards, grid: Any) -> None:
        self._layers, self._shards, self._grid = layers, shards, grid
        self._exchanged: dict[ParamOwner, list[Member]] = {}  # of owners some of whose parameters became others

    @property
    def _membership(self) -> Membership:
        return self._shards.membership

    def take(self) -> Inventory:
        """List this rank's parameters, and the kinds of state that it holds."""
        members: dict[ParamOwner, list[Member]] = {}
        for index, module in self._layers.modules().items():
            owner = self._layers.param_owner(index)
            members[owner] = self._exchanged.get(owner) or [
                self._member(parameter, position)
                for position, parameter in enumerate(module.parameters())
                if parameter in self._membership
            ]
        shards = self._shards
        buffers = [(number, parked) for number in shards.numbers for parked in (False, True)]
        return Inventory(
            stage=int(self._grid.get_stage_id()),
            tp_rank=self._grid.get_slice_parallel_rank(),
            replica=self._grid.data_parallel_id,
            num_groups=len(shards.numbers),
            members=members,
            kinds={key: {name: tensor.dtype for name, tensor in shards.held(key).items()} for key in buffers},
            scalars={number: shards.scalars(number) for number in shards.numbers},
            own_groups=shards.own_groups,
        )

    def exchange(
        self, before: Mapping[tuple[int, str], nn.Parameter], after: Mapping[tuple[int, str], nn.Parameter]
    ) -> list[nn.Parameter]:
        """Note which parameters became others. A new one joins the group of the one whose place it takes.

        Args:
            before, after: the stage's parameters by layer and name, in the order of its layers.

        Returns:
            Those that are to leave their groups.
        """
        owners: dict[ParamOwner, list[tuple[nn.Parameter, nn.Parameter | None]]] = {}
        for key, parameter in before.items():
            if parameter in self._membership:
                owners.setdefault(self._layers.param_owner(key[0]), []).append((parameter, after.get(key)))
        position = {id(p): n for module in self._layers.modules().values() for n, p in enumerate(module.parameters())}
        leaving = []
        for owner, pairs in owners.items():
            if all(old is new for old, new in pairs):
                continue
            members = self._exchanged[owner] = []
            for number, (old, new) in enumerate(pairs):
                if old is new:
                    members.append(self._member(old, position[id(old)]))
                    continue
                members.append(replace(self._member(old, -1 - number), park=None))
                group = self._membership.group(old)
                if new is not None and group is not None:
                    self._membership.join(new, group)
                    members.append(replace(self._member(new, position[id(new)]), parked=None))
                leaving.append(old)
        return leaving

    def settled(self) -> None:
        """Forget which parameters became others: the buffers hold the new ones."""
        self._exchanged = {}

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


def merge_scalars(every: Iterable[Scalars]) -> Scalars:
    """Merge the scalars of each group, from whichever ranks have them."""
    merged: Scalars = {}
    for scalars in every:
        for number, values in scalars.items():
            merged.setdefault(number, {}).update(values)
    return merged

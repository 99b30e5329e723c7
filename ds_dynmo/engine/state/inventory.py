"""The inventory of a rank's flat buffers, for the other ranks, before the buffers change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.move.layout import Buffer
from ds_dynmo.engine.state.flat_shards import FlatShards, Member
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.optimizer_state import Named

Scalars = dict[int, dict[str, Any]]  # per parameter group, the state that the optimizer keeps once


@dataclass(frozen=True)
class Inventory:
    """The parameters of one rank, and the kinds of state that it holds for them.

    Attributes:
        tp_rank: the rank's index on the tensor ("model") axis.
        replica: the rank's data-parallel index.
        before: the parameters in its buffers, in order.
        after: the parameters that the buffers will hold, by layer.
        replaced: parameters that were replaced by others, whose state is not kept.
        kinds: per buffer, the dtypes of the fp32 weights and of the optimizer's tensors in it.
        scalars: per group, such as the count of steps.
        per_replica_groups: the parameter groups whose parameters differ between replicas.
    """

    stage: int
    tp_rank: int
    replica: int
    num_groups: int
    before: tuple[Member, ...]
    after: Mapping[int, tuple[Member, ...]]
    replaced: frozenset[ParamKey]
    kinds: Mapping[Buffer, Mapping[str, torch.dtype]]
    scalars: Scalars
    per_replica_groups: frozenset[int] = frozenset()

    @property
    def is_current(self) -> bool:
        """Whether the buffers need no change."""
        return not self.replaced and {*self.before} == {
            member for of_layer in self.after.values() for member in of_layer
        }


class StageInventory:
    """Takes the inventory of a rank.

    Between a load of weights and the next resharding, the buffers still hold parameters that were replaced.
    """

    def __init__(self, layers: StageLayers, shards: FlatShards, comm: Communicator) -> None:
        self._layers, self._shards, self._comm = layers, shards, comm
        self._replaced: frozenset[ParamKey] = frozenset()
        self._before: tuple[Member, ...] | None = None  # in the buffers; None: the layers' parameters

    def take(self) -> Inventory:
        """Return this rank's parameters and kinds of state."""
        named, shards, here = self._layers.named_parameters(), self._shards, self._comm.here
        after: dict[int, list[Member]] = {}
        for member in self._members(named, lambda parameter: not parameter.requires_grad):
            after.setdefault(member.key.layer, []).append(member)
        return Inventory(
            stage=here.stage,
            tp_rank=here.tp_rank,
            replica=here.replica,
            num_groups=len(shards.numbers),
            before=self._held(named) if self._before is None else self._before,
            after={layer: tuple(members) for layer, members in after.items()},
            replaced=self._replaced,
            kinds={
                buffer: {name: held.dtype for name, held in shards.held(buffer).items()} for buffer in shards.buffers
            },
            scalars={number: shards.scalars(number) for number in shards.numbers},
            per_replica_groups=shards.per_replica_groups,
        )

    def replace(self, before: Named, after: Named) -> list[nn.Parameter]:
        """Record which parameters were replaced. A new one joins the group of its predecessor.

        Args:
            before, after: the stage's parameters, in the order of its layers.

        Returns:
            The replaced parameters, which have to leave their groups.
        """
        membership = self._shards.membership
        replaced = {key: old for key, old in before.items() if old in membership and after.get(key) is not old}
        if replaced:
            self._before, self._replaced = self._held(before), frozenset(replaced)
        for key, old in replaced.items():
            group = membership.group(old)
            if key in after and group is not None:
                membership.join(after[key], group)
        return [*replaced.values()]

    def mark_applied(self) -> None:
        """Forget replaced parameters: the buffers now hold the new ones."""
        self._before, self._replaced = None, frozenset()

    def _held(self, named: Named) -> tuple[Member, ...]:
        return tuple(self._members(named, self._shards.membership.is_detached))

    def _members(self, named: Named, is_detached: Callable[[nn.Parameter], bool]) -> Iterator[Member]:
        for key, parameter in named.items():
            group = self._shards.membership.group(parameter)
            if group is not None:
                yield Member(key, parameter.numel(), Buffer(group, is_detached(parameter)))


def merge_scalars(of_ranks: Iterable[Scalars]) -> Scalars:
    """Merge the scalars of each group over the ranks."""
    merged: Scalars = {}
    for scalars in of_ranks:
        for number, values in scalars.items():
            merged.setdefault(number, {}).update(values)
    return merged

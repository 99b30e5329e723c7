"""The inventory of a rank's flat buffers, for the other ranks, before the buffers change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.deepspeed.flat_adapter import FlatOptimizerAdapter
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.move.layout import Buffer
from ds_dynmo.engine.state.flat_shards import FlatShards, Member
from ds_dynmo.engine.state.parameter_groups import OptionTexts, option_texts
from ds_dynmo.errors import ConfigError

Scalars = dict[int, dict[str, Any]]  # per parameter group, the state that the optimizer keeps once


@dataclass(frozen=True)
class Inventory:
    """The parameters of one rank, and the kinds of state that it holds for them.

    Attributes:
        tp_rank: the rank's index on the tensor ("model") axis.
        replica: the rank's data-parallel index.
        before: the parameters in its buffers, buffer by buffer, in order.
        after: the parameters that the buffers are to hold, by layer.
        kinds: per buffer, the dtypes of the fp32 weights and of the optimizer's tensors in it.
        scalars: per group, such as the count of steps.
        options: of each group, as text.
        holds_gradients: whether a backward pass outside a batch has left gradients.
        per_replica_groups: the parameter groups whose parameters differ between replicas.
    """

    stage: int
    tp_rank: int
    replica: int = field(repr=False)  # replicas that hold the same have the same text
    num_groups: int
    before: tuple[Member, ...]
    after: Mapping[int, tuple[Member, ...]]
    kinds: Mapping[Buffer, Mapping[str, torch.dtype]]
    scalars: Scalars
    options: OptionTexts
    holds_gradients: bool
    per_replica_groups: frozenset[int] = frozenset()

    @property
    def is_current(self) -> bool:
        """Whether each buffer holds what it is to hold, in that order."""
        after = [member for of_layer in self.after.values() for member in of_layer]
        return _by_buffer(self.before) == _by_buffer(after)


def take_inventory(
    layers: StageLayers, shards: FlatShards, adapter: FlatOptimizerAdapter, here: RankCoordinates
) -> Inventory:
    """List this rank's parameters and kinds of state."""
    contents = shards.contents
    used = [any(contents[Buffer(number, detached)] for detached in (False, True)) for number in shards.numbers]
    after: dict[int, list[Member]] = {}
    for key, parameter in layers.named_parameters().items():
        group = shards.membership.group(parameter)
        if group is not None:
            member = Member(key, parameter.numel(), Buffer(group, detached=not parameter.requires_grad))
            after.setdefault(key.layer, []).append(member)
    return Inventory(
        stage=here.stage,
        tp_rank=here.tp_rank,
        replica=here.replica,
        num_groups=len(shards.numbers),
        before=tuple(
            Member(key, parameter.numel(), buffer) for buffer, held in contents.items() for key, parameter in held
        ),
        after={layer: tuple(members) for layer, members in after.items()},
        kinds={buffer: {name: held.dtype for name, held in shards.held(buffer).items()} for buffer in shards.buffers},
        scalars={number: shards.scalars(number) for number in shards.numbers},
        options=option_texts(adapter.inner.param_groups, used),
        holds_gradients=adapter.holds_own_gradients,
        per_replica_groups=shards.per_replica_groups,
    )


def check_replicas_alike(inventories: Iterable[Inventory]) -> None:
    """Refuse replicas of a stage that hold other parameters: each has a shard of what all are to hold.

    Raises:
        ConfigError: naming the first parameter.
    """
    first: dict[tuple[int, int], Inventory] = {}
    for inventory in inventories:
        other = first.setdefault((inventory.stage, inventory.tp_rank), inventory)
        if inventory.before != other.before or inventory.after != other.after:
            here, there = ({*i.before, *chain.from_iterable(i.after.values())} for i in (inventory, other))
            keys = sorted(member.key for member in here ^ there if member.key is not None)
            what = f"layer {keys[0].layer}'s {keys[0].name} differs" if keys else "their order differs"
            raise ConfigError(
                f"replicas {other.replica} and {inventory.replica} of stage {inventory.stage} hold other parameters: "
                f"{what}. Change layers alike on every replica"
            )


def _by_buffer(members: Iterable[Member]) -> dict[Buffer, list[Member]]:
    found: dict[Buffer, list[Member]] = {}
    for member in members:
        found.setdefault(member.buffer, []).append(member)
    return found


def merge_scalars(of_ranks: Iterable[Scalars]) -> Scalars:
    """Merge the scalars of each group over the ranks."""
    merged: Scalars = {}
    for scalars in of_ranks:
        for number, values in scalars.items():
            merged.setdefault(number, {}).update(values)
    return merged

"""Plan how the flat optimizer state gets from the shards that hold it to those that will. Alike on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.engine.optimizer.flat_layout import (
    MASTER,
    Buffer,
    BufferKey,
    Transfer,
    plan_transfers,
    stage_buffers,
)
from ds_dynmo.engine.optimizer.inventory import Inventory, Scalars, merge_scalars
from ds_dynmo.plan import MigrationPlan


@dataclass(frozen=True)
class ReshardingPlan:
    """The buffers of every stage before and after, and all that is copied or sent in between.

    Attributes:
        kinds: the kinds of state that any stage holds, the fp32 weights first.
        group_kinds: those that any stage holds of a parameter group: every stage will hold all of them or none.
        held: those of one buffer of one stage.
    """

    old: dict[int, dict[BufferKey, Buffer]]
    new: dict[int, dict[BufferKey, Buffer]]
    transfers: list[Transfer]
    kinds: dict[str, torch.dtype]
    group_kinds: dict[int, set[str]]
    held: dict[tuple[int, BufferKey], dict[str, torch.dtype]]
    scalars: Scalars

    def kinds_of(self, key: BufferKey) -> set[str]:
        """Return the kinds of state that a new buffer will have."""
        return self.group_kinds[key[0]]

    def is_held(self, kind: str, transfer: Transfer) -> bool:
        """Tell whether there is such state to transfer. What was frozen from the start has none."""
        return kind in self.held[transfer.source[0], transfer.old]


def plan_resharding(
    plan: MigrationPlan,
    every: Sequence[Inventory],
    layers: StageLayers,
    grid: Any,
    shards: tuple[int, int] | None = None,
) -> ReshardingPlan:
    """Plan what changes by ``plan`` and by freezing, from the inventory of ``every`` rank.

    Of what each replica has of its own, a rank plans what its own replica copies and sends: that alone concerns it.

    Args:
        layers: this rank's, which tell the parameters' owners on any stage.
        grid: DeepSpeed's grid.
        shards: of each buffer, before and after; None: one per replica.
    """
    stages = range(grid.pipe_parallel_size)
    shards = shards or (grid.data_parallel_size, grid.data_parallel_size)
    replica = int(grid.data_parallel_id)
    every = [inventory for inventory in every if inventory.tp_rank == grid.get_slice_parallel_rank()]
    every.sort(key=lambda inventory: inventory.replica == replica)  # what is this replica's own counts here
    members = {owner: list(found) for inventory in every for owner, found in inventory.members.items()}
    held = {(inventory.stage, key): kinds for inventory in every for key, kinds in inventory.kinds.items()}
    kinds = {name: dtype for of_buffer in held.values() for name, dtype in of_buffer.items()}
    before = {stage: layers.param_owners(plan.old, stage) for stage in stages}
    after = {stage: layers.param_owners(plan.new, stage) for stage in stages}
    count, own = every[0].num_groups, every[0].own_groups
    old = {s: stage_buffers([*before[s]], members, count, shards[0], after=False, own_groups=own) for s in stages}
    new = {s: stage_buffers([*after[s]], members, count, shards[1], after=True, own_groups=own) for s in stages}
    source_of = {
        (stage, owner): stage if owner in before[stage] else plan.old.stage_of(layer)
        for stage in stages
        for owner, layer in after[stage].items()
    }
    group_kinds: dict[int, set[str]] = {}
    for (_, (number, _)), of_buffer in held.items():
        group_kinds.setdefault(number, set()).update(of_buffer)
    return ReshardingPlan(
        old=old,
        new=new,
        transfers=list(plan_transfers(old, new, source_of, shards, replica)),
        kinds=dict(sorted(kinds.items(), key=lambda item: (item[0] != MASTER, item[0]))),
        group_kinds=group_kinds,
        held=held,
        scalars=merge_scalars(inventory.scalars for inventory in every),
    )

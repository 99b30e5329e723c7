"""What every rank works out alike, from what all hold, before the flat buffers change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.engine.optimizer.flat_layout import Buffer, BufferKey, Member, ParamOwner, Transfer, runs, stage_buffers
from ds_dynmo.plan import MigrationPlan, stage_of

MASTER = "master"  # the kind of state that the fp32 weights are


@dataclass(frozen=True)
class Holdings:
    """What one rank tells the others: its parameters, and the kinds of state it keeps for them.

    Attributes:
        slice: the rank's index on the tensor ("model") axis.
        replica: its data-parallel index.
        kinds: per buffer, the dtypes of the fp32 weights and of the optimizer's tensors in it.
        scalars: per parameter group, what the optimizer keeps once for all of it (the count of steps).
    """

    stage: int
    slice: int
    replica: int
    num_groups: int
    members: dict[ParamOwner, list[Member]]
    kinds: dict[BufferKey, dict[str, torch.dtype]]
    scalars: dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Relayout:
    """The buffers of every stage before and after, and all that is copied or sent in between.

    Attributes:
        kinds: the kinds of state that any stage holds, the fp32 weights first.
        group_kinds: those that any stage holds of a parameter group: every stage will hold all of them or none.
        held: those of one buffer of one stage.
    """

    old: dict[int, dict[BufferKey, Buffer]]
    new: dict[int, dict[BufferKey, Buffer]]
    runs: list[Transfer]
    kinds: dict[str, torch.dtype]
    group_kinds: dict[int, set[str]]
    held: dict[tuple[int, BufferKey], dict[str, torch.dtype]]
    scalars: dict[int, dict[str, Any]]


def work_out(
    plan: MigrationPlan,
    every: Sequence[Holdings],
    layers: StageLayers,
    grid: Any,
    shards: tuple[int, int] | None = None,
) -> Relayout:
    """What changes by ``plan`` and by freezing, from the holdings of ``every`` rank.

    Args:
        layers: this rank's, which tell the units of any stage.
        grid: DeepSpeed's grid.
        shards: of each buffer, before and after; None: one per replica.
    """
    stages = range(grid.pipe_parallel_size)
    shards = shards or (grid.data_parallel_size, grid.data_parallel_size)
    every = [holdings for holdings in every if holdings.slice == grid.get_slice_parallel_rank()]
    members = {unit: list(found) for holdings in every for unit, found in holdings.members.items()}
    held = {(h.stage, container): kinds for h in every for container, kinds in h.kinds.items()}
    kinds = {name: dtype for of_container in held.values() for name, dtype in of_container.items()}
    before = {stage: layers.units(plan.old, stage) for stage in stages}
    after = {stage: layers.units(plan.new, stage) for stage in stages}
    count = every[0].num_groups
    old = {s: stage_buffers(list(before[s]), members, count, shards[0], after=False) for s in stages}
    new = {s: stage_buffers(list(after[s]), members, count, shards[1], after=True) for s in stages}
    source_of = {
        (stage, unit): stage if unit in before[stage] else stage_of(owner, plan.old)
        for stage in stages
        for unit, owner in after[stage].items()
    }
    scalars: dict[int, dict[str, Any]] = {}
    for holdings in every:
        for number, values in holdings.scalars.items():
            scalars.setdefault(number, {}).update(values)
    group_kinds: dict[int, set[str]] = {}
    for (_, (number, _)), of_container in held.items():
        group_kinds.setdefault(number, set()).update(of_container)
    order = dict(sorted(kinds.items(), key=lambda item: (item[0] != MASTER, item[0])))
    return Relayout(old, new, list(runs(old, new, source_of, shards)), order, group_kinds, held, scalars)

"""Read optimizer state in flat shards, saved by any number of stages and replicas.

DeepSpeed writes one file per rank with its shard of every group. A file of ds_dynmo's beside it has what that lacks:
shards of frozen parameters, and options and step counts of all groups, also of those that are empty on the rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ds_dynmo.engine.deepspeed.loss_scale import saved_loss_scale
from ds_dynmo.engine.move.layout import intervals_of_parameter, shard_size
from ds_dynmo.engine.save.importers.wanted import Wanted
from ds_dynmo.engine.save.manifest import flat_file, stage_file
from ds_dynmo.engine.save.saved_files import SavedCheckpoint
from ds_dynmo.engine.state.keys import MASTER
from ds_dynmo.engine.state.parameter_groups import options_of
from ds_dynmo.engine.state.pieces import Elements, Slot, StatePieces
from ds_dynmo.errors import CheckpointError


def read_flat(saved: SavedCheckpoint, wanted: Wanted) -> StatePieces:
    """Read what ``BF16_Optimizer`` or ``DeepSpeedZeroOptimizer`` stage 1 held for some parameters.

    Raises:
        CheckpointError: a file does not match the manifest.
    """
    pieces = StatePieces(loss_scale=saved_loss_scale(_content(saved, wanted.stage, 0)))
    places = saved.slice.slots(prefer=wanted.stage)
    sources = {wanted.stage: None}  # stages, each once, in this order
    for key, (saved_as, _) in wanted.parameters.items():
        if saved_as in places:
            source, slot = places[saved_as]
            sources[source] = None
            pieces.groups[key] = slot.group
            pieces.elements[key] = _elements(saved, source, slot, wanted)
    for number, scalars, options, kinds in _groups(saved, sources, wanted.num_groups):
        pieces.options.setdefault(number, options)
        if kinds:  # a stage may lack state that another one has
            pieces.scalars.setdefault(number, scalars)
            pieces.kinds.setdefault(number, set()).update(kinds)
    return pieces


def _elements(saved: SavedCheckpoint, stage: int, slot: Slot, wanted: Wanted) -> Elements:
    """Find the elements of one parameter in the shards of a saved stage."""
    found: Elements = {}
    for shard, interval in intervals_of_parameter(slot.key, slot.numel, slot.offset, _shard_numel(saved, stage, slot)):
        replica = wanted.replica if slot.group in wanted.per_replica_groups else shard
        stop = interval.offset + interval.numel
        for name, tensor in _tensors(saved, stage, replica, slot).items():
            if tensor.numel() < stop:
                raise CheckpointError(
                    f"{saved.path(_rank_file(saved, stage, replica))}: {name} of parameter group "
                    f"{slot.group} has {tensor.numel()} elements, expected {stop} at least: layer "
                    f"{slot.layer}'s {slot.name} under the partition {saved.manifest.placement}"
                )
            found.setdefault(name, []).append((interval.start, tensor[interval.offset : stop]))
    return found


def _shard_numel(saved: SavedCheckpoint, stage: int, slot: Slot) -> int:
    stage_slots = saved.slice.stages[stage]
    if slot.parked:
        return stage_slots.parked_numels[slot.group]
    if not saved.manifest.stock:
        return stage_slots.shard_numels[slot.group]
    total = sum(other.numel for other in stage_slots.slots if other.group == slot.group and not other.parked)
    return shard_size(total, int(saved.read(stage_file(saved.slice.numbers[stage]))["dp_world_size"]))


def _tensors(saved: SavedCheckpoint, stage: int, shard: int, slot: Slot) -> dict[str, torch.Tensor]:
    """Read one rank's shards of the group of ``slot``."""
    if slot.parked:
        parked = saved.read(flat_file(stage, shard, saved.slice_index))["parked"]
        tensors: dict[str, torch.Tensor] = parked[slot.group]
        return tensors
    masters, base = _state_dict(saved, stage, shard)
    if saved.manifest.stock:
        expected = len({other.group for other in saved.slice.stages[stage].slots if not other.parked})
        if len(masters) != expected:
            raise CheckpointError(
                f"{saved.path(_rank_file(saved, stage, shard))}: has {len(masters)} parameter groups, expected "
                f"{expected}"
            )
    values = base["state"].get(slot.index, {})
    return {MASTER: masters[slot.index], **{name: value for name, value in values.items() if _is_row(value)}}


def _groups(
    saved: SavedCheckpoint, sources: Iterable[int], num_groups: int
) -> Iterator[tuple[int, dict[str, Any], dict[str, Any], set[str]]]:
    """Read the parameter groups of stages: number, scalars, options, kinds of state beside the fp32 weights."""
    if not saved.manifest.stock:
        for source in sources:
            name = flat_file(source, 0, saved.slice_index)
            extras = saved.read(name)
            if len(extras["options"]) != num_groups:
                raise CheckpointError(
                    f"{saved.path(name)}: has {len(extras['options'])} parameter groups, expected {num_groups}"
                )
            for number, scalars in extras["scalars"].items():
                yield number, scalars, dict(extras["options"][number]), {*extras["kinds"][number]} - {MASTER}
        return
    seen: set[int] = set()
    for source, stage_slots in enumerate(saved.slice.stages):
        for slot in stage_slots.slots:
            if slot.parked or slot.group in seen:
                continue
            seen.add(slot.group)
            _, base = _state_dict(saved, source, 0)
            values = base["state"].get(slot.index, {})
            scalars = {name: value for name, value in values.items() if not _is_row(value)}
            options = options_of(base["param_groups"][slot.index])
            yield slot.group, scalars, options, values.keys() - scalars.keys()


def _state_dict(saved: SavedCheckpoint, stage: int, shard: int) -> tuple[Any, Any]:
    content = _content(saved, stage, shard)
    return content["single_partition_of_fp32_groups"], content["base_optimizer_state"]


def _content(saved: SavedCheckpoint, stage: int, shard: int) -> dict[str, Any]:
    """Read what DeepSpeed's wrapper saved of one rank."""
    name = _rank_file(saved, stage, shard)
    try:
        content: dict[str, Any] = saved.read(name)["optimizer_state_dict"]
        lacking = {"single_partition_of_fp32_groups", "base_optimizer_state"} - content.keys()
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{saved.path(name)}: holds no state of a flat optimizer: {error!r}") from error
    if lacking:
        raise CheckpointError(f"{saved.path(name)}: holds no state of a flat optimizer: lacks {sorted(lacking)}")
    return content


def _rank_file(saved: SavedCheckpoint, stage: int, shard: int) -> str:
    """Find DeepSpeed's file of a rank; its name begins with "bf16_" if weights are bf16."""
    number = saved.slice.numbers[stage]
    names = [f"{prefix}zero_pp_rank_{shard}_mp_rank_{number:02d}_optim_states.pt" for prefix in ("bf16_", "")]
    return names[0] if os.path.isfile(saved.path(names[0])) else names[1]


def _is_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1

"""Read optimizer state in flat shards, saved by any number of stages and replicas.

DeepSpeed writes one file per rank with its shard of every group. A file of ds_dynmo's beside it has what that lacks:
shards of frozen parameters, and options and step counts of all groups, also of those that are empty on the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ds_dynmo.engine.deepspeed.loss_scale import saved_loss_scale
from ds_dynmo.engine.move.layout import intervals_of_parameter
from ds_dynmo.engine.save.importers.wanted import Wanted
from ds_dynmo.engine.save.manifest import flat_file
from ds_dynmo.engine.save.saved_files import MappedFile, SavedCheckpoint
from ds_dynmo.engine.state.keys import MASTER
from ds_dynmo.engine.state.parameter_groups import options_of
from ds_dynmo.engine.state.pieces import Elements, Slot, StatePieces
from ds_dynmo.errors import CheckpointError

_MASTERS, _STATE = "single_partition_of_fp32_groups", "base_optimizer_state"  # in DeepSpeed's file of a rank


def read_flat(saved: SavedCheckpoint, wanted: Wanted) -> StatePieces:
    """Read what ``BF16_Optimizer`` or ``DeepSpeedZeroOptimizer`` stage 1 held for some parameters.

    Raises:
        CheckpointError: a file does not match the manifest.
    """
    file, content = _open(saved, wanted.stage, 0)
    pieces = StatePieces(loss_scale=file.take(saved_loss_scale(content)))
    stock = saved.manifest.stock
    groups = list(_stock_groups(saved, wanted)) if stock else []  # before elements: it checks the shards
    places = saved.slice.slots(prefer=wanted.stage)
    sources = {wanted.stage: None}  # stages, each once, in this order
    for key in wanted.parameters:
        if key in places:
            source, slot = places[key]
            sources[source] = None
            pieces.groups[key] = slot.group
            pieces.elements[key] = _elements(saved, source, slot, wanted)
    for number, scalars, options, kinds in groups if stock else _groups(saved, sources, wanted.num_groups):
        pieces.options.setdefault(number, options)
        if kinds:  # a stage may lack state that another one has
            pieces.scalars.setdefault(number, scalars)
            pieces.kinds.setdefault(number, set()).update(kinds)
    return pieces


def _elements(saved: SavedCheckpoint, stage: int, slot: Slot, wanted: Wanted) -> Elements:
    """Find the elements of one parameter in the shards of a saved stage.

    All replicas want the same elements, and each will hold a part. So each compares some shards with their checksums,
    its own if there were as many replicas.
    """
    found: Elements = {}
    of_stage = saved.slice.stages[stage]
    shard_numel = (of_stage.detached_numels if slot.detached else of_stage.shard_numels)[slot.group]
    for shard, interval in intervals_of_parameter(slot.key, slot.numel, slot.offset, shard_numel):
        replica = wanted.replica if slot.group in wanted.per_replica_groups else shard
        stop = interval.offset + interval.numel
        compares = replica % wanted.replicas == wanted.replica
        for name, tensor in _tensors(saved, stage, replica, slot, compares=compares).items():
            if tensor.numel() < stop:
                raise CheckpointError(
                    f"{saved.path(_rank_file(saved, stage, replica))}: {name} of parameter group "
                    f"{slot.group} has {tensor.numel()} elements, expected {stop} at least: layer "
                    f"{slot.layer}'s {slot.name} under the partition {saved.manifest.placement}"
                )
            found.setdefault(name, []).append((interval.start, tensor[interval.offset : stop]))
    return found


def _tensors(saved: SavedCheckpoint, stage: int, shard: int, slot: Slot, *, compares: bool) -> dict[str, torch.Tensor]:
    """Read one rank's shards of the group of ``slot``; ``compares``: with their checksums."""
    if slot.detached:
        file = saved.open(flat_file(stage, shard, saved.slice_index))
        tensors: dict[str, torch.Tensor] = file.content["detached"][slot.group]
    else:
        file, content = _open(saved, stage, shard)
        values = content[_STATE]["state"].get(slot.index, {})
        rows = {name: value for name, value in values.items() if _is_row(value)}
        tensors = {MASTER: content[_MASTERS][slot.index], **rows}
    return file.take(tensors) if compares else tensors


Group = tuple[int, dict[str, Any], dict[str, Any], set[str]]
"""Number, scalars, options, and kinds of state beside the fp32 weights."""


def _groups(saved: SavedCheckpoint, sources: Iterable[int], num_groups: int) -> Iterator[Group]:
    """Read the parameter groups of stages."""
    for source in sources:
        name = flat_file(source, 0, saved.slice_index)
        file = saved.open(name)
        extras = file.take({what: file.content[what] for what in ("options", "scalars", "kinds")})
        if len(extras["options"]) != num_groups:
            raise CheckpointError(
                f"{saved.path(name)}: has {len(extras['options'])} parameter groups, expected {num_groups}"
            )
        for number, scalars in extras["scalars"].items():
            yield number, scalars, dict(extras["options"][number]), {*extras["kinds"][number]} - {MASTER}


def _stock_groups(saved: SavedCheckpoint, wanted: Wanted) -> Iterator[Group]:
    """Read the parameter groups that any stage of stock DeepSpeed had.

    Raises:
        CheckpointError: a stage had another number.
    """
    for stage in wanted.stages_of(saved):
        file, content = _open(saved, stage, 0)
        state, groups = (content[_STATE][what] for what in ("state", "param_groups"))
        numbers = saved.slice.stages[stage].trained_groups
        if len(content[_MASTERS]) != len(numbers):
            raise CheckpointError(
                f"{saved.path(_rank_file(saved, stage, 0))}: has {len(content[_MASTERS])} parameter groups, expected "
                f"{len(numbers)}"
            )
        for index, number in enumerate(numbers):
            values = state.get(index, {})
            scalars = file.take({name: value for name, value in values.items() if not _is_row(value)})
            yield number, scalars, file.take(options_of(groups[index])), values.keys() - scalars.keys()


def _open(saved: SavedCheckpoint, stage: int, shard: int) -> tuple[MappedFile, dict[str, Any]]:
    """Open DeepSpeed's file of a rank, and find there what the wrapper saved."""
    name = _rank_file(saved, stage, shard)
    file = saved.open(name)
    try:
        content: dict[str, Any] = file.content["optimizer_state_dict"]
        lacking = {_MASTERS, _STATE} - content.keys()
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{saved.path(name)}: holds no state of a flat optimizer: {error!r}") from error
    if lacking:
        raise CheckpointError(f"{saved.path(name)}: holds no state of a flat optimizer: lacks {sorted(lacking)}")
    return file, content


def _rank_file(saved: SavedCheckpoint, stage: int, shard: int) -> str:
    """Find DeepSpeed's file of a rank; its name begins with "bf16_" if weights are bf16."""
    number = saved.slice.numbers[stage]
    names = [f"{prefix}zero_pp_rank_{shard}_mp_rank_{number:02d}_optim_states.pt" for prefix in ("bf16_", "")]
    return names[0] if saved.has(names[0]) else names[1]


def _is_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1

"""Read the state of an optimizer that DeepSpeed does not wrap: torch's dict per parameter, in the file of a stage."""

from __future__ import annotations

from typing import Any

import torch

from ds_dynmo.engine.save.importers.wanted import Wanted
from ds_dynmo.engine.save.manifest import stage_file
from ds_dynmo.engine.save.saved_files import MappedFile, SavedCheckpoint
from ds_dynmo.engine.state.parameter_groups import options_of
from ds_dynmo.engine.state.pieces import Slot, StatePieces
from ds_dynmo.errors import CheckpointError


def read_per_parameter(saved: SavedCheckpoint, wanted: Wanted) -> StatePieces:
    """Read the state of some parameters, whatever stage they were saved by.

    Raises:
        CheckpointError: a file does not match the manifest.
    """
    pieces = StatePieces(options=_options(saved, wanted, wanted.stage))
    for stage, stage_slots in enumerate(saved.slice.stages):
        if saved.manifest.stock and not {slot.group for slot in stage_slots.slots} <= pieces.options.keys():
            pieces.options.update(_options(saved, wanted, stage) | pieces.options)  # DeepSpeed drops empty groups
    places = saved.slice.slots(prefer=wanted.stage)
    for key, shape in wanted.parameters.items():
        if key not in places:
            continue
        source, slot = places[key]
        pieces.groups[key] = slot.group
        file, optimizer = _file(saved, source)
        state = file.take(optimizer["state"].get(slot.index))
        if state is not None:
            _check_shapes(state, saved.slice.shapes[slot.layer].get(slot.name), saved, source, slot)
            pieces.put(key, state, shape)
    return pieces


def _options(saved: SavedCheckpoint, wanted: Wanted, stage: int) -> dict[int, dict[str, Any]]:
    """Read the options of the parameter groups that a saved stage had."""
    file, optimizer = _file(saved, stage)
    path, groups = saved.path(_name(saved, stage)), file.take(optimizer["param_groups"])
    slots = saved.slice.stages[stage].slots
    numbers = list(range(wanted.num_groups))
    if saved.manifest.stock and len(groups) != len(numbers):
        numbers = sorted({slot.group for slot in slots})
    if len(groups) != len(numbers):
        raise CheckpointError(f"{path}: has {len(groups)} parameter groups, expected {wanted.num_groups}")
    for number, group in zip(numbers, groups):
        expected = [slot.index for slot in slots if slot.group == number]
        found = group["params"]
        if not set(expected) <= set(found) or (saved.manifest.stock and len(found) != len(expected)):
            raise CheckpointError(
                f"{path}: parameter group {number} has {len(found)} parameters, expected {len(expected)}: those of "
                f"stage {stage} under the partition {saved.manifest.placement}"
            )
    return {number: options_of(group) for number, group in zip(numbers, groups)}


def _name(saved: SavedCheckpoint, stage: int) -> str:
    return stage_file(saved.slice.numbers[stage])


def _file(saved: SavedCheckpoint, stage: int) -> tuple[MappedFile, dict[str, Any]]:
    """Open the file of a saved stage, and find there what the optimizer saved."""
    file = saved.open(_name(saved, stage))
    optimizer = file.content.get("optimizer")
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        raise CheckpointError(
            f"{saved.path(_name(saved, stage))}: holds no state of a torch optimizer; load_optimizer_states=False or "
            "load_module_only=True loads the rest"
        )
    return file, optimizer


def _check_shapes(state: Any, shape: list[int] | None, saved: SavedCheckpoint, stage: int, slot: Slot) -> None:
    """Refuse state of another shape than the parameter expected there; only ds_dynmo's manifests name it."""
    if not saved.manifest.stock or shape is None:
        return
    for what, value in state.items():
        comparable = isinstance(value, torch.Tensor) and value.dim() == len(shape)
        if comparable and any(size not in (1, expected) for size, expected in zip(value.shape, shape)):
            raise CheckpointError(
                f"{saved.path(_name(saved, stage))}: {what} of parameter {slot.index} has shape {list(value.shape)}, "
                f"expected {shape}: layer {slot.layer}'s {slot.name} under the partition "
                f"{saved.manifest.placement}"
            )

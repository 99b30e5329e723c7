"""Read the state of an optimizer that DeepSpeed does not wrap: torch's dict per parameter, in the file of a stage."""

from __future__ import annotations

from typing import Any

from ds_dynmo.engine.save.importers.wanted import Wanted
from ds_dynmo.engine.save.manifest import stage_file
from ds_dynmo.engine.save.saved_files import MappedFile, SavedCheckpoint
from ds_dynmo.engine.state.parameter_groups import options_of
from ds_dynmo.engine.state.pieces import StatePieces
from ds_dynmo.errors import CheckpointError


def read_per_parameter(saved: SavedCheckpoint, wanted: Wanted) -> StatePieces:
    """Read the state of some parameters, whatever stage they were saved by.

    Raises:
        CheckpointError: a file does not match the manifest.
    """
    pieces = StatePieces()
    for stage in wanted.stages_of(saved) if saved.manifest.stock else [wanted.stage]:
        for number, options in _options(saved, wanted, stage).items():
            pieces.options.setdefault(number, options)
    places = saved.slice.slots(prefer=wanted.stage)
    for key, shape in wanted.parameters.items():
        if key not in places:
            continue
        source, slot = places[key]
        pieces.groups[key] = slot.group
        file, optimizer = torch_optimizer(saved, source)
        state = file.take(optimizer["state"].get(slot.index))
        if state is not None:
            pieces.put(key, state, shape)
    return pieces


def _options(saved: SavedCheckpoint, wanted: Wanted, stage: int) -> dict[int, dict[str, Any]]:
    """Read the options of the parameter groups that a saved stage had."""
    file, optimizer = torch_optimizer(saved, stage)
    path, groups = saved.path(_name(saved, stage)), file.take(optimizer["param_groups"])
    of_stage = saved.slice.stages[stage]
    numbers = list(range(wanted.num_groups))
    if saved.manifest.stock and len(groups) != len(numbers):
        numbers = of_stage.trained_groups
    if len(groups) != len(numbers):
        raise CheckpointError(f"{path}: has {len(groups)} parameter groups, expected {wanted.num_groups}")
    for number, group in zip(numbers, groups):
        expected = [slot.index for slot in of_stage.slots if slot.group == number]
        found = group["params"]
        if not set(expected) <= set(found):
            raise CheckpointError(
                f"{path}: parameter group {number} has {len(found)} parameters, expected {len(expected)}: those of "
                f"stage {stage} under the partition {saved.manifest.placement}"
            )
    return {number: options_of(group) for number, group in zip(numbers, groups)}


def _name(saved: SavedCheckpoint, stage: int) -> str:
    return stage_file(saved.slice.numbers[stage])


def torch_optimizer(saved: SavedCheckpoint, stage: int) -> tuple[MappedFile, dict[str, Any]]:
    """Open the file of a saved stage, and find there what the optimizer saved."""
    file = saved.open(_name(saved, stage))
    optimizer = file.content.get("optimizer")
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        raise CheckpointError(
            f"{saved.path(_name(saved, stage))}: holds no state of a torch optimizer; load_optimizer_states=False or "
            "load_module_only=True loads the rest"
        )
    return file, optimizer

"""Read fp16 checkpoints that were saved without ZeRO, by stock DeepSpeed or an earlier ds_dynmo, into flat shards.

DeepSpeed's file of a stage has whole fp32 weights and moments: in a flat vector per parameter group
(``FP16_Optimizer``, around FusedAdam), or per parameter (``FP16_UnfusedOptimizer``, around others). A file of
ds_dynmo's beside it has the state of frozen parameters, and the options of all groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ds_dynmo.engine.deepspeed.loss_scale import saved_loss_scale
from ds_dynmo.engine.save.importers.wanted import Wanted
from ds_dynmo.engine.save.manifest import flat_file, stage_file
from ds_dynmo.engine.save.saved_files import SavedCheckpoint
from ds_dynmo.engine.state.keys import MASTER
from ds_dynmo.engine.state.parameter_groups import options_of
from ds_dynmo.engine.state.pieces import Slot, StatePieces, steps_of_groups
from ds_dynmo.errors import CheckpointError

State = dict[str, Any]  # of one parameter: its fp32 weights, and what the torch optimizer keeps for it


def read_unsharded(saved: SavedCheckpoint, wanted: Wanted) -> StatePieces:
    """Read the state of some parameters, for flat shards.

    Raises:
        CheckpointError: a file has another content, or the parameters of a group took different numbers of steps.
    """
    stages = range(len(saved.slice.stages))
    held = [entry for number in stages for entry in _states(saved, number)]
    groups = {slot.key: slot.group for slot, _ in held}
    steps_of_groups({slot.key: state["step"] for slot, state in held if "step" in state and not slot.parked}, groups)
    pieces = StatePieces(
        options=_options(saved, wanted), loss_scale=saved_loss_scale(_wrapper_state(saved, wanted.stage))
    )
    # A group that is frozen as a whole goes on from the parameter of it that took the most steps.
    for slot, state in sorted(held, key=lambda entry: (entry[0].parked, -float(entry[1].get("step", 0)))):
        rows = _rows(state)
        pieces.scalars.setdefault(slot.group, {name: value for name, value in state.items() if name not in rows})
        pieces.kinds.setdefault(slot.group, set()).update(rows.keys() - {MASTER})
    states = {slot.key: state for slot, state in held}
    for key in wanted.parameters:
        if key in states:
            pieces.groups[key] = groups[key]
            pieces.elements[key] = {name: [(0, row)] for name, row in _rows(states[key]).items()}
    return pieces


def _states(saved: SavedCheckpoint, stage: int) -> Iterator[tuple[Slot, State]]:
    """Read the state of each parameter of a saved stage."""
    slots = saved.slice.stages[stage].slots
    try:
        yield from _trained(_wrapper_state(saved, stage), [slot for slot in slots if not slot.parked])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{saved.path(_name(saved, stage))}: does not hold the fp16 optimizer's state under the partition "
            f"{saved.manifest.placement}: {error}"
        ) from error
    if not saved.manifest.stock:
        frozen = saved.read(flat_file(stage, 0, saved.slice_index))["parked"]
        yield from ((slot, frozen[slot.key]) for slot in slots if slot.parked)


def _trained(content: Mapping[str, Any], slots: list[Slot]) -> Iterator[tuple[Slot, State]]:
    """Divide what a wrapper saved of a stage among the parameters that it trained there."""
    base = content["optimizer_state_dict"]
    numbers = sorted({slot.group for slot in slots})  # DeepSpeed drops empty groups, and so did ds_dynmo
    if len(base["param_groups"]) != len(numbers):
        raise ValueError(f"{len(base['param_groups'])} parameter groups, not {len(numbers)}")
    for position, (number, group) in enumerate(zip(numbers, base["param_groups"])):
        members = [slot for slot in slots if slot.group == number]
        if "fp32_groups_flat" in content:
            flat = content["fp32_groups_flat"][position]
            values = {**base["state"].get(position, {}), MASTER: flat}
            _check(values, sum(slot.numel for slot in members))
            for slot in members:
                row = slice(slot.offset, slot.offset + slot.numel)
                yield slot, {**values, **{name: value[row] for name, value in _rows(values).items()}}
        else:
            masters = content["fp32_groups"][position]
            if len(masters) != len(members):
                raise ValueError(f"{len(masters)} parameters in parameter group {number}, not {len(members)}")
            for slot, index, master in zip(members, group["params"], masters, strict=True):
                values = {**base["state"].get(index, {}), MASTER: master}
                _check(values, slot.numel)
                yield slot, values


def _rows(state: State) -> dict[str, torch.Tensor]:
    """Select what has a value for each element."""
    shape = state[MASTER].shape
    return {n: v for n, v in state.items() if n != "step" and isinstance(v, torch.Tensor) and v.shape == shape}


def _check(state: State, numel: int) -> None:
    """Refuse other parameters, and state that mixes their elements."""
    if state[MASTER].numel() != numel:
        raise ValueError(f"fp32 weights of {state[MASTER].numel()} elements, not {numel}")
    rows = _rows(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and name not in rows:
            raise ValueError(f"{name} of shape {list(value.shape)}, not {list(state[MASTER].shape)} as the weights")


def _options(saved: SavedCheckpoint, wanted: Wanted) -> dict[int, dict[str, Any]]:
    """Read the options of the parameter groups; of stock DeepSpeed's, those that any stage has."""
    if not saved.manifest.stock:
        name = flat_file(wanted.stage, 0, saved.slice_index)
        options: dict[int, dict[str, Any]] = {n: dict(v) for n, v in saved.read(name)["options"].items()}
        if len(options) != wanted.num_groups:
            raise CheckpointError(
                f"{saved.path(name)}: has {len(options)} parameter groups, expected {wanted.num_groups}"
            )
        return options
    found: dict[int, dict[str, Any]] = {}
    for source, stage_slots in enumerate(saved.slice.stages):
        numbers = sorted({slot.group for slot in stage_slots.slots if not slot.parked})
        groups = _wrapper_state(saved, source)["optimizer_state_dict"]["param_groups"]
        for number, group in zip(numbers, groups):
            found.setdefault(number, options_of(group))
    return found


def _name(saved: SavedCheckpoint, stage: int) -> str:
    return stage_file(saved.slice.numbers[stage])


def _wrapper_state(saved: SavedCheckpoint, stage: int) -> dict[str, Any]:
    content = saved.read(_name(saved, stage)).get("optimizer")
    if not isinstance(content, dict) or "optimizer_state_dict" not in content:
        raise CheckpointError(
            f"{saved.path(_name(saved, stage))}: holds no state of an fp16 optimizer, and no file beside it shards of "
            "ZeRO; load_optimizer_states=False or load_module_only=True loads the rest"
        )
    return content

"""Write and read optimizer state of DeepSpeed's fp16 wrappers without ZeRO, which is in DeepSpeed's file of the stage.

A file of ours beside it has what that lacks: state of frozen parameters, and options of all groups, also of those that
are empty on the stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_dynmo.engine.checkpoint.layout import MASTERS, Slot, StageLayout, flat_file, stage_file
from ds_dynmo.engine.checkpoint.optimizer_files import LoadedState, Named, Saved, in_memory
from ds_dynmo.engine.deepspeed_adapter.fp16_wrapper import saved_state
from ds_dynmo.engine.deepspeed_adapter.loss_scale import saved_loss_scale, set_loss_scale_state
from ds_dynmo.engine.optimizer.master_state import MasterState
from ds_dynmo.engine.optimizer.parameter_groups import options_of
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.errors import CheckpointError


@dataclass(frozen=True)
class LoadedMasters(LoadedState):
    """Optimizer state of some parameters, fp32 weights among it.

    Attributes:
        loss_scale: state of a dynamic loss scale.
    """

    loss_scale: dict[str, Any] = field(default_factory=dict)


class MasterFiles:
    """The state of ``FP16_Optimizer`` and of ``FP16_UnfusedOptimizer``.

    Args:
        optimizer: DeepSpeed's wrapper.
    """

    kind = MASTERS

    def __init__(self, state: MasterState, optimizer: Any, device: torch.device) -> None:
        self._state, self._optimizer, self._device = state, optimizer, device

    def layout(self, named: Named) -> StageLayout:
        key_of = {id(parameter): key for key, parameter in named.items()}
        slots, index = [], 0
        for number, members in enumerate(self._state.members):
            offset = 0
            for parameter in members:
                slots.append(Slot(*key_of[id(parameter)], number, index, offset, parameter.numel()))
                index, offset = index + 1, offset + parameter.numel()
        for number, members in enumerate(self._state.parked):
            slots += [Slot(*key_of[id(p)], number, -1, 0, p.numel(), parked=True) for p in members]
        return StageLayout(tuple(slots))

    def extras(self, named: Named) -> dict[str, Any]:
        """Return the content of our file of this stage."""
        frozen = {id(parameter) for members in self._state.parked for parameter in members}
        return {
            "parked": {key: self._state.state_of(p) for key, p in named.items() if id(p) in frozen},
            "options": self._state.options,
        }

    def read(self, saved: Saved, wanted: Mapping[ParamKey, ParamKey], stage: int) -> LoadedMasters:
        loaded = LoadedMasters(options=self._options(saved, stage), loss_scale=saved_loss_scale(_content(saved, stage)))
        places = saved.layout.slots(prefer=stage)
        for key, saved_as in wanted.items():
            if saved_as not in places:
                continue
            source, slot = places[saved_as]
            loaded.groups[key] = slot.group
            options = loaded.options.get(slot.group, {})
            found = self._state_in(saved, source, slot)
            loaded.state[key] = {name: in_memory(name, value, options, self._device) for name, value in found.items()}
        return loaded

    def _state_in(self, saved: Saved, stage: int, slot: Slot) -> dict[str, Any]:
        if slot.parked:
            parked: dict[str, Any] = saved.read(flat_file(stage, 0, saved.slice_index))["parked"][slot.key]
            return parked
        live = [other.group for other in saved.layout.stages[stage].slots if not other.parked]
        group = sorted(set(live)).index(slot.group)  # DeepSpeed drops empty groups, and so do we
        row = slice(slot.offset, slot.offset + slot.numel)
        try:
            return saved_state(_content(saved, stage), group, slot.index, row)
        except (KeyError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{saved.path(_name(saved, stage))}: lacks the fp16 optimizer's state of layer {slot.layer}'s "
                f"{slot.name}, expected in parameter group {slot.group} under the partition "
                f"{saved.manifest.placement}: {error}"
            ) from error

    def _options(self, saved: Saved, stage: int) -> dict[int, dict[str, Any]]:
        expected = len(self._state.options)
        if not saved.manifest.stock:
            name = flat_file(stage, 0, saved.slice_index)
            options: dict[int, dict[str, Any]] = {n: dict(v) for n, v in saved.read(name)["options"].items()}
            if len(options) != expected:
                raise CheckpointError(f"{saved.path(name)}: has {len(options)} parameter groups, expected {expected}")
            return options
        groups = _content(saved, stage)["optimizer_state_dict"]["param_groups"]
        numbers = sorted({slot.group for slot in saved.layout.stages[stage].slots if not slot.parked})
        if len(groups) != len(numbers):
            path = saved.path(_name(saved, stage))
            raise CheckpointError(f"{path}: has {len(groups)} parameter groups, expected {len(numbers)}")
        return {number: options_of(group) for number, group in zip(numbers, groups)}

    def assemble(
        self,
        values: Mapping[ParamKey, Mapping[str, torch.Tensor]],
        steps: Mapping[ParamKey, Any],
        groups: Mapping[ParamKey, int],
        options: Mapping[int, dict[str, Any]],
    ) -> LoadedMasters:
        loaded = LoadedMasters(groups={key: groups[key] for key in values}, options=dict(options))
        for key, tensors in values.items():
            state = {**tensors, "step": steps[key]} if key in steps else dict(tensors)
            of_group = options[groups[key]]
            loaded.state[key] = {name: in_memory(name, value, of_group, self._device) for name, value in state.items()}
        return loaded

    def restore(self, before: Named, after: Named, loaded: LoadedMasters | None) -> None:
        if loaded is None:
            self._state.weights_loaded(before, after)
            return
        groups = {key: number for key, p in before.items() if (number := self._state.group(p)) is not None}
        groups.update(loaded.groups)
        members = [(p, groups[key], loaded.state.get(key, {})) for key, p in after.items() if key in groups]
        self._state.load(members, loaded.options)
        set_loss_scale_state(self._optimizer, loaded.loss_scale)


def _name(saved: Saved, stage: int) -> str:
    return stage_file(saved.layout.numbers[stage])


def _content(saved: Saved, stage: int) -> dict[str, Any]:
    optimizer = saved.read(_name(saved, stage)).get("optimizer")
    if not isinstance(optimizer, dict) or "optimizer_state_dict" not in optimizer:
        raise CheckpointError(
            f"{saved.path(_name(saved, stage))}: holds no state of an fp16 optimizer; load_optimizer_states=False or "
            "load_module_only=True loads the rest"
        )
    return optimizer

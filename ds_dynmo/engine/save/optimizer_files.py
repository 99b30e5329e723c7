"""Read the optimizer's state from a checkpoint by parameter, whatever stage and file it was written in.

Implementations of :class:`OptimizerFiles` differ in how DeepSpeed keeps and writes state. :class:`PerParameter` is for
an optimizer that DeepSpeed does not wrap: torch's dict per parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ds_dynmo.engine.save.layout import (
    PER_PARAMETER,
    Manifest,
    SliceLayout,
    Slot,
    StageLayout,
    stage_file,
)
from ds_dynmo.engine.state.flat_shards import Pieces
from ds_dynmo.engine.state.keys import MASTER, ParamKey
from ds_dynmo.engine.state.parameter_groups import options_of
from ds_dynmo.errors import CheckpointError

Named = Mapping[ParamKey, nn.Parameter]


class Saved(Protocol):
    """The files of a checkpoint. Each is checked first, and read once."""

    manifest: Manifest
    slice_index: int

    @property
    def layout(self) -> SliceLayout:
        """The layout of this rank's tensor-parallel slice."""

    def read(self, name: str) -> Any:
        """Read a file by its path in the folder; tensors are on the CPU, mapped from the file."""

    def path(self, name: str) -> str:
        """Name the file in messages."""


class OptimizerFiles(Protocol):
    """Describes, reads and restores the state of one kind of optimizer, without communication."""

    kind: str
    reads: tuple[str, ...]  # the kinds of checkpoints that it reads

    def layout(self, named: Named) -> StageLayout:
        """Describe what DeepSpeed writes of this rank's stage, whose parameters are ``named``."""

    def extras(self) -> dict[str, Any] | None:
        """Return the content of our file of this rank; None: DeepSpeed's files have everything."""

    def read(self, saved: Saved, wanted: Mapping[ParamKey, ParamKey], stage: int) -> Any:
        """Read the state of some parameters. Changes nothing.

        Args:
            wanted: per parameter, the key under which it was saved.
            stage: the saved stage whose files have the options of groups.

        Raises:
            CheckpointError: a file does not match its layout.
        """

    def assemble(
        self,
        values: Mapping[ParamKey, Mapping[str, torch.Tensor]],
        steps: Mapping[ParamKey, Any],
        groups: Mapping[ParamKey, int],
        options: Mapping[int, dict[str, Any]],
    ) -> Any:
        """Make what :meth:`restore` takes from whole tensors. Changes nothing.

        Args:
            values: per parameter of this rank, the fp32 weight and, unless it never trained, moments.
            steps: the same on every rank: per parameter of the model with moments, the count of its steps.
            groups: per parameter of the model, the number of its group.
            options: of every group.

        Raises:
            CheckpointError: the optimizer cannot hold this.
        """

    def restore(self, before: Named, after: Named, loaded: Any | None) -> None:
        """Let the optimizer update the parameters ``after`` instead of ``before``. The weights are loaded already.

        Args:
            before, after: a parameter may be another object in ``after``, or missing.
            loaded: what :meth:`read` returned; None: keep the present state.
        """


@dataclass(frozen=True)
class LoadedState:
    """Optimizer state of some parameters.

    Attributes:
        state: per parameter the optimizer's own dict; a parameter that had none is missing.
        groups: per parameter the number of its group.
        options: per group number its options.
    """

    state: dict[ParamKey, dict[Any, Any]] = field(default_factory=dict)
    groups: dict[ParamKey, int] = field(default_factory=dict)
    options: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedFlat:
    """Optimizer state of some parameters, for flat shards.

    Attributes:
        groups: per parameter the number of its group.
        pieces: per parameter and kind of state, runs of elements with the position of the first; still in their files.
        kinds, scalars: per group that has state, its kinds, and the values that the group has once, such as steps.
        options: per group.
        loss_scale: state of a dynamic loss scale (fp16), the same in every file.
    """

    groups: dict[ParamKey, int] = field(default_factory=dict)
    pieces: dict[ParamKey, Pieces] = field(default_factory=dict)
    kinds: dict[int, set[str]] = field(default_factory=dict)
    scalars: dict[int, dict[str, Any]] = field(default_factory=dict)
    options: dict[int, dict[str, Any]] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)


def steps_of_groups(steps: Mapping[ParamKey, Any], groups: Mapping[ParamKey, int]) -> dict[int, Any]:
    """Return the count of steps of each parameter group, of which all parameters took as many.

    Raises:
        CheckpointError: naming two that did not.
    """
    first: dict[int, ParamKey] = {}
    for key, step in steps.items():
        other = first.setdefault(groups[key], key)
        if steps[other] != step:
            raise CheckpointError(
                f"layer {other[0]}'s {other[1]} took {int(steps[other])} steps and layer {key[0]}'s {key[1]} "
                f"{int(step)}, but bf16 and ZeRO count steps per parameter group: both are in group {groups[key]}; "
                "load_optimizer_states=False loads the rest"
            )
    return {number: steps[key] for number, key in first.items()}


class PerParameter:
    """A torch optimizer that DeepSpeed does not wrap. Its state is in DeepSpeed's file of the stage."""

    kind = PER_PARAMETER
    reads: tuple[str, ...] = (PER_PARAMETER,)

    def __init__(self, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] = optimizer.param_groups if optimizer is not None else []
        self._device = device

    def layout(self, named: Named) -> StageLayout:
        key_of = {id(parameter): key for key, parameter in named.items()}
        slots, index = [], 0
        for number, group in enumerate(self._groups):
            offset = 0
            for parameter in group["params"]:
                if id(parameter) in key_of:
                    slots.append(Slot(*key_of[id(parameter)], number, index, offset, parameter.numel()))
                index, offset = index + 1, offset + parameter.numel()
        return StageLayout(tuple(slots))

    def extras(self) -> None:
        return None

    def read(self, saved: Saved, wanted: Mapping[ParamKey, ParamKey], stage: int) -> LoadedState:
        if self._optimizer is None:
            return LoadedState()
        loaded = LoadedState(options=self._options(saved, stage))
        places = saved.layout.slots(prefer=stage)
        for key, saved_as in wanted.items():
            if saved_as not in places:
                continue
            source, slot = places[saved_as]
            loaded.groups[key] = slot.group
            state = _file(saved, source)["state"].get(slot.index)
            if state is not None:
                _check_shapes(state, saved.layout.shapes[slot.layer].get(slot.name), saved, source, slot)
                options = loaded.options.get(slot.group, {})
                loaded.state[key] = {
                    name: in_memory(name, value, options, self._device) for name, value in state.items()
                }
        return loaded

    def _options(self, saved: Saved, stage: int) -> dict[int, dict[str, Any]]:
        path, groups = saved.path(_name(saved, stage)), _file(saved, stage)["param_groups"]
        slots = saved.layout.stages[stage].slots
        numbers = list(range(len(self._groups)))
        if saved.manifest.stock and len(groups) != len(numbers):
            numbers = sorted({slot.group for slot in slots})  # DeepSpeed drops empty groups
        if len(groups) != len(numbers):
            raise CheckpointError(f"{path}: has {len(groups)} parameter groups, expected {len(self._groups)}")
        for number, group in zip(numbers, groups):
            expected = [slot.index for slot in slots if slot.group == number]
            found = group["params"]
            if not set(expected) <= set(found) or (saved.manifest.stock and len(found) != len(expected)):
                raise CheckpointError(
                    f"{path}: parameter group {number} has {len(found)} parameters, expected {len(expected)}: those of "
                    f"stage {stage} under the partition {saved.manifest.placement}"
                )
        return {number: options_of(group) for number, group in zip(numbers, groups)}

    def assemble(
        self,
        values: Mapping[ParamKey, Mapping[str, torch.Tensor]],
        steps: Mapping[ParamKey, Any],
        groups: Mapping[ParamKey, int],
        options: Mapping[int, dict[str, Any]],
    ) -> LoadedState:
        loaded = LoadedState(options=dict(options))
        for key, tensors in values.items():
            if key in steps:
                moments = {name: value for name, value in tensors.items() if name != MASTER}
                loaded.state[key] = {
                    name: in_memory(name, value, options[groups[key]], self._device)
                    for name, value in {"step": steps[key], **moments}.items()
                }
        return loaded

    def restore(self, before: Named, after: Named, loaded: LoadedState | None) -> None:
        if self._optimizer is None:
            return
        key_of = {id(parameter): key for key, parameter in before.items()}
        numbers = {
            key_of[id(parameter)]: number
            for number, group in enumerate(self._groups)
            for parameter in group["params"]
            if id(parameter) in key_of
        }
        if loaded is not None:
            numbers.update(loaded.groups)
        state = self._optimizer.state
        for key, parameter in before.items():
            if after.get(key) is not parameter or loaded is not None:
                state.pop(parameter, None)
        for number, group in enumerate(self._groups):
            others = [parameter for parameter in group["params"] if id(parameter) not in key_of]
            group["params"] = others + [after[key] for key in after if numbers.get(key) == number]
            group.pop("param_names", None)  # torch's optional labels, by position
            if loaded is not None:
                group.update(loaded.options.get(number, {}))
        if loaded is not None:
            for key, values in loaded.state.items():
                if key in after:
                    state[after[key]] = values


def in_memory(name: str, value: Any, options: Mapping[str, Any], device: torch.device) -> Any:
    """Copy a value of a file to where torch's optimizers keep it.

    That is the device of the weights, but the CPU for a step count, unless a kernel reads it.
    """
    if not isinstance(value, torch.Tensor):
        return value
    on_cpu = name == "step" and not any(options.get(how) for how in ("capturable", "fused"))
    return value.clone() if on_cpu else value.to(device, copy=True)


def _name(saved: Saved, stage: int) -> str:
    return stage_file(saved.layout.numbers[stage])


def _file(saved: Saved, stage: int) -> dict[str, Any]:
    optimizer = saved.read(_name(saved, stage)).get("optimizer")
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        raise CheckpointError(
            f"{saved.path(_name(saved, stage))}: holds no state of a torch optimizer; load_optimizer_states=False or "
            "load_module_only=True loads the rest"
        )
    return optimizer


def _check_shapes(state: Any, shape: list[int] | None, saved: Saved, stage: int, slot: Slot) -> None:
    """Refuse state of another shape than the parameter expected there; only our manifests say which parameter it is."""
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

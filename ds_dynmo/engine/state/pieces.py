"""An optimizer's state as a value, independent of its files and of its form in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_dynmo.engine.state.keys import ParamKey

__all__ = [
    "FLAT",
    "PER_PARAMETER",
    "Elements",
    "Slot",
    "StageSlots",
    "StatePieces",
    "in_memory",
    "is_per_element",
]

PER_PARAMETER = "per parameter"
FLAT = "flat"

Elements = dict[str, list[tuple[int, torch.Tensor]]]  # per kind of state, runs of elements with their start


@dataclass(frozen=True)
class StatePieces:
    """The state of an optimizer for some parameters.

    Attributes:
        groups: per parameter, the number of its group; a missing parameter stays in its present group.
        elements: per parameter, state with one value per element. Tensors may be memory-mapped files.
        values: per parameter, other state that is kept per parameter, such as a count of steps.
        kinds, scalars: per group with state in flat buffers: the kinds of state besides fp32 weights, and values that
            are kept once, such as a count of steps.
        options: per group, such as the learning rate.
        loss_scale: state of a dynamic loss scale (fp16); empty: there is none.
    """

    groups: dict[ParamKey, int] = field(default_factory=dict)
    elements: dict[ParamKey, Elements] = field(default_factory=dict)
    values: dict[ParamKey, dict[str, Any]] = field(default_factory=dict)
    kinds: dict[int, set[str]] = field(default_factory=dict)
    scalars: dict[int, dict[str, Any]] = field(default_factory=dict)
    options: dict[int, dict[str, Any]] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)

    def put(self, key: ParamKey, state: Mapping[str, Any], shape: Sequence[int]) -> None:
        """Add the state that torch's optimizer holds for a parameter of ``shape``."""
        per_element = {name for name, value in state.items() if is_per_element(name, value, shape)}
        self.elements[key] = {name: [(0, state[name])] for name in state if name in per_element}
        self.values[key] = {name: value for name, value in state.items() if name not in per_element}


def is_per_element(name: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether ``value``, of an optimizer's state, has one number per element of a parameter of ``shape``."""
    return name != "step" and isinstance(value, torch.Tensor) and list(value.shape) == list(shape)


def in_memory(name: str, value: Any, options: Mapping[str, Any], device: torch.device) -> Any:
    """Copy a value from a file to the device on which torch's optimizers keep it.

    That is the device of the weights, or the CPU for a step count, unless a kernel reads it.
    """
    if not isinstance(value, torch.Tensor):
        return value
    on_cpu = name == "step" and not any(options.get(how) for how in ("capturable", "fused"))
    return value.clone() if on_cpu else value.to(device, copy=True)


# -- where it lies in DeepSpeed's files ----------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """The place of one parameter's optimizer state in the files of one saved stage.

    Attributes:
        layer: number of the layer; for a layer that is tied whole, of its first use in the model.
        name: the parameter's name inside the layer.
        group: number of its parameter group.
        index: position in the optimizer's ``state_dict``, counted over the groups.
        offset: of its first element in the flat vector of its group, which is the concatenation of all shards.
        numel: number of its elements.
        detached: it lies in the detached buffer of its group (:class:`Membership`); ``index`` has no meaning.
    """

    layer: int
    name: str
    group: int
    index: int
    offset: int
    numel: int
    detached: bool = False

    @property
    def key(self) -> ParamKey:
        return ParamKey(self.layer, self.name)


@dataclass(frozen=True)
class StageSlots:
    """The contents of the optimizer files of one saved stage.

    Attributes:
        slots: of the stage's parameters.
        shard_numels: per group, the elements of one data-parallel rank's shard; () if state is not sharded.
        detached_numels: the same for the detached buffers.
    """

    slots: tuple[Slot, ...]
    shard_numels: tuple[int, ...] = ()
    detached_numels: tuple[int, ...] = ()

    @property
    def trained_groups(self) -> list[int]:
        """The numbers of the groups that have parameters which the optimizer sees: stock DeepSpeed drops others."""
        return sorted({slot.group for slot in self.slots if not slot.detached})

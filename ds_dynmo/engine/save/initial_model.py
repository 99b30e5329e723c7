"""Describe the model as it was when the engine was constructed, the same on every rank.

A checkpoint restores what changed in a layer at run time since it was built. Everything else comes from the user's
code: a dropout rate that was raised before resuming stays, and so do layers that were frozen before loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.move.object_graph import MODULE_MACHINERY
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.state.pieces import StageSlots
from ds_dynmo.files.digests import digest
from ds_dynmo.placement import Placement

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)

IsShared = Callable[[Any], bool]


def never_shared(value: Any) -> bool:
    """Return False for any value: the layer shares nothing with others."""
    return False


@dataclass(frozen=True)
class LayerOrigin:
    """One layer as it was built.

    Attributes:
        shapes: of its parameters, by name.
        aliases: the first name of a parameter, by each further name.
        trainable: ``requires_grad`` of its parameters, by name.
        state: shapes of the tensors in its ``state_dict``, by name; None for extra state.
        dtypes: of its parameters and buffers, by name.
        precision: dtype that the engine trains in, and of parameters that the layer gets later.
        attributes: per submodule path, a digest of each plain attribute.
    """

    shapes: dict[str, list[int]]
    aliases: dict[str, str]
    trainable: dict[str, bool]
    state: dict[str, list[int] | None]
    dtypes: dict[str, torch.dtype]
    precision: torch.dtype
    attributes: dict[str, dict[str, str]]

    @classmethod
    def of(cls, module: nn.Module, precision: torch.dtype, is_shared: IsShared = never_shared) -> LayerOrigin:
        named = dict(module.named_parameters())
        return cls(
            shapes={name: list(parameter.shape) for name, parameter in named.items()},
            aliases=aliases_of(module),
            trainable={name: parameter.requires_grad for name, parameter in named.items()},
            state={
                name: list(value.shape) if isinstance(value, torch.Tensor) else None
                for name, value in module.state_dict().items()
            },
            dtypes={name: tensor.dtype for name, tensor in [*named.items(), *module.named_buffers()]},
            precision=precision,
            attributes={
                path: {name: digest(value) for name, value in plain_attributes(sub, is_shared)}
                for path, sub in module.named_modules()
            },
        )

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter or buffer in this engine, unless it is changed at run time."""
        return self.dtypes.get(name, self.precision)


@dataclass(frozen=True)
class InitialModelSpec:
    """The whole model as it was built.

    Attributes:
        placement: at construction.
        layers: every layer with a module; a tied one under its first use. Of this rank's tensor-parallel slice.
        slots: what DeepSpeed would write of this rank's stage at that placement.
    """

    placement: Placement
    layers: dict[int, LayerOrigin]
    slots: StageSlots

    @classmethod
    def of(cls, stage: StageContext, precision: torch.dtype, is_shared: IsShared) -> InitialModelSpec:
        """Gather the descriptions of all layers. Collective.

        Args:
            precision: dtype that the engine trains in.
            is_shared: says which values do not belong to a layer alone.
        """
        mine = stage.comm.here.tp_rank
        stage.comm.enter("initialize")
        modules = {} if stage.comm.here.replica else stage.layers.counted_modules()  # others have the same
        described = {index: LayerOrigin.of(module, precision, is_shared) for index, module in modules.items()}
        every = stage.comm.gather_objects((mine, described))
        of_slice = [found for slice_index, found in every if slice_index == mine]
        whole = {index: origin for found in of_slice for index, origin in found.items()}
        return cls(stage.placement, dict(sorted(whole.items())), _slots(stage))

    def with_optimizer(self, stage: StageContext) -> InitialModelSpec:
        """Describe an optimizer that was configured later, unless layers have moved since construction."""
        return replace(self, slots=_slots(stage)) if stage.placement == self.placement else self


def _slots(stage: StageContext) -> StageSlots:
    return stage.state.slots(stage.layers.named_parameters())


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Find the first name of each parameter that has several, by its further names."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}


def plain_attributes(module: nn.Module, is_shared: IsShared) -> Iterator[tuple[str, Any]]:
    """Find the attributes of a module that are numbers, strings, tensors or plain containers of them.

    Args:
        is_shared: says which containers and tensors do not belong to the layer alone. They come from the user's code.
    """
    for name, value in vars(module).items():
        if name not in MODULE_MACHINERY and _is_plain(value) and not (_can_change(value) and is_shared(value)):
            yield name, value


def _can_change(value: Any) -> bool:
    return isinstance(value, torch.Tensor | list | dict | set)


def _is_plain(value: Any) -> bool:
    if type(value) is torch.Tensor:
        laid_out = value.layout in (torch.strided, torch.sparse_csr)
        return laid_out and not value.requires_grad and not value.is_meta
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return type(value) in _SCALARS

"""Uses of a tied key that DeepSpeed did not build: of several on one stage it builds only the first.

If the uses are of different classes, DeepSpeed trains the program only if every use is on another stage. Here the
module of each use is built, so that the program trains at any partition, on one stage too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import utils as ds_utils
from torch import nn

from ds_dynmo.engine.deepspeed.module import layer_specs, layers_of_stage
from ds_dynmo.engine.deepspeed.ties import SeparateUses, of_several_classes, tied_weight, uses_by_key
from ds_dynmo.engine.move.object_graph import copy_of_modules
from ds_dynmo.engine.move.pickling import random_state_kept
from ds_dynmo.errors import ConfigError


@dataclass(frozen=True)
class BuiltParameter:
    """A parameter of a use that DeepSpeed did not build.

    Attributes:
        name: its layer and name, for messages.
        parameter: in no parameter group that was made of DeepSpeed's module.
        copy_of: the tied weight that it is a copy of; None: it is not tied.
    """

    name: str
    parameter: nn.Parameter
    copy_of: nn.Parameter | None


def build_missing(model: PipelineModule) -> dict[int, nn.Module]:
    """Build the modules that DeepSpeed did not build on this stage, where uses of a key differ in class, by layer."""
    specs, built = layer_specs(model), {}
    for uses in uses_by_key(specs).values():
        here = [use for use in uses if use in layers_of_stage(model)]
        if of_several_classes(specs, uses):
            built.update({use: _build(model, use) for use in here[1:]})
    return built


def _build(model: PipelineModule, index: int) -> nn.Module:
    with random_state_kept():
        if model.seed_layers:
            (model.seed_fn or ds_utils.set_random_seed)(model.base_seed + index)
        module: nn.Module = layer_specs(model)[index].build()
    of_model = {id(parameter) for parameter in model.parameters()}
    shares = any(id(parameter) in of_model for parameter in module.parameters())
    return copy_of_modules(module) if shares else module  # built around the very weights that the first use has


def attach(
    model: PipelineModule, built: Mapping[int, nn.Module], ties: Mapping[str, SeparateUses]
) -> list[BuiltParameter]:
    """Put the modules ``built`` into the PipelineModule, with the tied weights of the first use on the stage.

    Returns:
        Their parameters.
    """
    attached: list[BuiltParameter] = []
    specs, here = layer_specs(model), layers_of_stage(model)
    for index, module in built.items():
        spec, tie = specs[index], ties[str(specs[index].key)]
        first = min(use for use in tie.uses if use in here)
        tied = [tied_weight(model.tied_modules[tie.key], name) for name in specs[first].tied_weight_attr]
        model.add_module(str(index), module)
        use = module if spec.forward_fn is None else partial(spec.forward_fn, module)
        model.forward_funcs[here.index(index)] = use
        copy_of = {}
        for name, weight in zip(spec.tied_weight_attr, tied, strict=True):
            copy = tied_weight(module, name)
            copy.data.copy_(weight.data)
            copy_of[id(copy)] = weight
        attached += [BuiltParameter(f"layer {index}: {n}", p, copy_of.get(id(p))) for n, p in module.named_parameters()]
    return attached


def join_groups(optimizer: torch.optim.Optimizer, built: Sequence[BuiltParameter]) -> None:
    """Add built parameters to the optimizer: copies to the group of their weight, others to the only group.

    Raises:
        ConfigError: a parameter has no group; the optimizer is as it was.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    joining: list[tuple[int, nn.Parameter]] = []
    for entry in (entry for entry in built if id(entry.parameter) not in group_of):
        if entry.copy_of is not None:
            if id(entry.copy_of) in group_of:
                joining.append((group_of[id(entry.copy_of)], entry.parameter))
        elif len(groups) == 1:
            joining.append((0, entry.parameter))
        elif entry.parameter.requires_grad:
            raise ConfigError(
                f"{entry.name} is in none of the {len(groups)} parameter groups: DeepSpeed did not build the layer, as "
                "an earlier one tied by the same key is on its stage. Construct the PipelineModule with each on a "
                "stage of its own, or leave model_parameters out"
            )
    for number, parameter in joining:
        groups[number]["params"].append(parameter)
        groups[number].pop("param_names", None)  # optional labels of torch's, by position

"""Checks that the optimizer trains exactly the trainable parameters of the layers of this stage."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.move.description import path_text
from ds_dynmo.engine.move.object_graph import walk
from ds_dynmo.errors import ConfigError


def check_same(optimizer: Any, configured: Any) -> None:
    """Refuse another optimizer than the one that the engine was configured with, whose state would move.

    Raises:
        ValueError: naming both.
    """
    if optimizer is not configured:
        raise ValueError(
            f"engine.optimizer is another {type(optimizer).__name__} than the {type(configured).__name__} that the "
            "engine was configured with, whose state would be left behind: set it by "
            "engine._configure_optimizer(optimizer, parameters), or give it to initialize"
        )


def check_complete(held: Iterable[nn.Parameter], layers: StageLayers) -> None:
    """Refuse layers with a parameter that is to train, but is not among those that the optimizer holds.

    Raises:
        ValueError: naming the first one.
    """
    known = set(map(id, held))
    for index, module in layers.modules().items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ValueError(
                    f"layer {index}: {name} requires a gradient and is in no parameter group of the optimizer: add it "
                    "to one, or freeze it (requires_grad = False)"
                )


def check_foreign(
    held: Iterable[nn.Parameter],
    pipeline: PipelineModule,
    layers: StageLayers,
    known: Container[nn.Parameter] = (),
) -> list[nn.Parameter]:
    """Refuse an optimizer that trains a parameter of no layer of this stage: it would not move, nor be saved.

    Args:
        held: by the optimizer.
        known: parameters that layers have had.

    Returns:
        Parameters that a layer has dropped, and to which nothing in a layer refers any more: they train no longer.

    Raises:
        ConfigError: naming the first one.
    """
    here = set(map(id, layers.parameters()))
    foreign = {id(parameter): parameter for parameter in held if id(parameter) not in here and parameter.requires_grad}
    if not foreign:
        return []
    named = [*pipeline.named_parameters(), *_of_given_modules(layers)]
    place = next((name for name, parameter in named if id(parameter) in foreign), None)
    if place is not None:
        raise ConfigError(
            f"the optimizer trains {place}, which is in no layer of this stage: only what layers have moves and is "
            "saved with them. Make what has it a layer, such as a last one before the loss; or freeze it "
            "(requires_grad = False), or leave it out of the parameters for the optimizer"
        )
    for index, module in layers.modules().items():
        for path, value in walk([((), module)], lambda _: True):
            if id(value) in foreign:
                raise ConfigError(
                    f"layer {index}: {path_text(path)} is a parameter that the optimizer trains, but the layer has it "
                    "registered no longer, so that it would stay behind: register it (module.name = parameter)"
                )
    for parameter in foreign.values():
        if parameter not in known:
            raise ConfigError(
                f"the optimizer trains a parameter of shape {list(parameter.shape)} that is in no layer of this stage. "
                "Layers that moved have other parameters than before: take them from engine.module.parameters()"
            )
    return [*foreign.values()]


def _of_given_modules(layers: StageLayers) -> Iterator[tuple[str, nn.Parameter]]:
    """List the parameters of layers that were given as modules, wherever they are now."""
    given = ((index, layers.spec(index)) for index in range(layers.num_layers))
    for index, module in given:
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters():
                yield f"layer {index}'s {name}", parameter


TiedGroups = dict[tuple[str, int], set[int | None]]  # by tie key and number of the weight: groups; None: no group


def groups_of_ties(optimizer: torch.optim.Optimizer, layers: StageLayers) -> TiedGroups:
    """Map each tied weight of this stage to its parameter groups."""
    number = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    tied: TiedGroups = {}
    for key, weights in layers.tied_by_key():
        for position, weight in enumerate(weights):
            tied.setdefault((key, position), set()).add(number.get(id(weight)))
    return tied


def refuse_ties_apart(of_ranks: Sequence[TiedGroups]) -> None:
    """Refuse a weight of tied layers whose copies are in different groups: they would diverge.

    Args:
        of_ranks: :func:`groups_of_ties` of each rank; groups have the same numbers on all ranks.

    Raises:
        ConfigError: naming the key; the same on every rank.
    """
    whole: TiedGroups = {}
    for tied in of_ranks:
        for weight, groups in tied.items():
            whole.setdefault(weight, set()).update(groups)
    for (key, position), groups in sorted(whole.items()):
        if len(groups) > 1:
            raise ConfigError(
                f"weight {position} of the layers tied by the key {key!r} is in different parameter groups where they "
                f"are: {sorted(map(str, groups))}. Its copies would part: put it into one group"
            )

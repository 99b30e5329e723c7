"""Checks before every move that the optimizer trains exactly the trainable parameters of this stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.state.optimizer_state import OptimizerState
from ds_dynmo.errors import ConfigError


def check(optimizer: Any, configured: Any, layers: StageLayers, state: OptimizerState) -> None:
    """Refuse an optimizer that is not the one whose state would move, or that trains other parameters.

    Args:
        optimizer: the engine's present optimizer.
        configured: the engine's optimizer when it was configured, whose state is ``state``.

    Raises:
        ValueError: names the optimizer, or the first parameter that is trainable but not in it, or in it but not here.
    """
    if optimizer is not configured:
        raise ValueError(
            f"engine.optimizer is another {type(optimizer).__name__} than the {type(configured).__name__} that the "
            "engine was configured with, whose state would be left behind: set it by "
            "engine._configure_optimizer(optimizer, parameters), or give it to initialize"
        )
    trained = state.trained()
    if trained is None:
        return
    here = set()
    for name, parameter in _named(layers):
        here.add(id(parameter))
        if parameter.requires_grad and id(parameter) not in trained:
            raise ValueError(
                f"{name} requires a gradient and is in no parameter group of the optimizer: add it to one, or "
                "freeze it (requires_grad = False)"
            )
    foreign = [parameter for number, parameter in trained.items() if number not in here and parameter.requires_grad]
    if foreign:
        raise ValueError(
            f"the optimizer trains a parameter of shape {list(foreign[0].shape)} that is in no layer of this stage"
        )


def refuse_strangers(optimizer: torch.optim.Optimizer, layers: StageLayers) -> None:
    """Refuse an optimizer with parameters that no layer of this stage has.

    Raises:
        ConfigError: naming the first one's shape.
    """
    here = {id(parameter) for parameter in layers.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in here]
    if foreign:
        raise ConfigError(
            f"the optimizer holds a parameter of shape {list(foreign[0].shape)} that is in no layer of this stage. "
            "Layers that moved have other parameters than before: take them from engine.module.parameters()"
        )


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


def _named(layers: StageLayers) -> Iterator[tuple[str, nn.Parameter]]:
    for index, module in layers.modules().items():
        for name, parameter in module.named_parameters():
            yield f"layer {index}: {name}", parameter

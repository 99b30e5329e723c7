"""Check before every move that the optimizer trains exactly what is trainable on this stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.optimizer_state import OptimizerState
from ds_dynmo.engine.stage import StageLayers
from ds_dynmo.errors import ConfigError


def check(optimizer: Any, configured: Any, layers: StageLayers, state: OptimizerState) -> None:
    """Refuse an optimizer that is not the one whose state would move, or that trains other parameters.

    Args:
        optimizer: the engine's, as it is now.
        configured: the engine's when it was configured, whose state is ``state``.

    Raises:
        ValueError: naming the optimizer, or the first parameter that is trainable here and not in it, or the reverse.
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


def strangers(optimizer: torch.optim.Optimizer, layers: StageLayers) -> list[list[int]]:
    """The shapes of the optimizer's parameters that no layer of this stage has."""
    here = {id(parameter) for parameter in layers.parameters()}
    return [list(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in here]


def refuse_strangers(every: Sequence[list[list[int]]]) -> None:
    """Refuse what :func:`strangers` found on any rank; the same error on all.

    Raises:
        ConfigError: naming the first shape on each rank that has one.
    """
    found = {rank: shapes[0] for rank, shapes in enumerate(every) if shapes}
    if found:
        raise ConfigError(
            f"the optimizer holds parameters that are in no layer of their stage: of shape {found} (by rank). Layers "
            "that moved have other parameters than before: take them from engine.module.parameters()"
        )


def _named(layers: StageLayers) -> Iterator[tuple[str, nn.Parameter]]:
    for index, module in layers.modules().items():
        for name, parameter in module.named_parameters():
            yield f"layer {index}: {name}", parameter

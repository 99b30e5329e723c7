"""The bytes of the layers of a stage, and tables of numbers per layer that are reduced over the ranks.

Two totals count a layer's bytes on a rank. :func:`training_bytes` is for the memory limit: it includes the gradients of
a running batch. :func:`bytes_between_batches` is for the memory of a move: it counts gradients that exist at that time,
and is split by the kind of memory, because a move replaces one kind after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, fields
from enum import IntEnum, auto

import torch
from deepspeed.utils import logger
from torch import nn

from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.move.tensors import num_bytes
from ds_dynmo.engine.state.optimizer_state import OptimizerState, held_alone
from ds_dynmo.plan import HeldBytes


class SummaryColumn(IntEnum):
    """Columns of the row after the last layer. Tables of sizes have ``FAILED`` only."""

    BATCH = 0
    FAILED = auto()
    MOVES = auto()
    LINK = auto()


def failed(table: torch.Tensor) -> bool:
    """Return whether the maximum of all ranks' tables holds a failure."""
    return bool(table[-1, SummaryColumn.FAILED])


def per_layer(layers: StageLayers, number: Callable[[nn.Module], float]) -> torch.Tensor:
    """Call ``number`` on this stage's modules; return ``[num_layers]``, float64, zeros for other layers."""
    numbers = torch.zeros(layers.num_layers, dtype=torch.float64, device="cpu")
    for index in layers.indices:
        module = layers.local_module(index)
        if module is not None:
            numbers[index] = number(module)
    return numbers


def held_table(layers: StageLayers, state: OptimizerState) -> torch.Tensor:
    """Return a table of the bytes of this rank's layers, now and in training.

    Returns:
        ``[num_layers + 1, columns]``, float64 on the CPU, zeros for layers on other ranks. If this rank fails, the
        table has a mark that :func:`failed` finds in the maximum of all ranks' tables.
    """
    table = torch.zeros(layers.num_layers + 1, len(fields(HeldBytes)) + 1, dtype=torch.float64, device="cpu")
    try:
        for index in layers.indices:
            module = layers.local_module(index)
            if module is not None:
                table[index] = torch.tensor(
                    [*astuple(bytes_between_batches(module, state)), training_bytes(module, state)], device="cpu"
                )
    except Exception as error:  # any error of a user's tensor; other ranks have to know
        logger.error(f"layers {[*layers.indices]}: cannot tell what they hold: {error!r}")
        table[-1, SummaryColumn.FAILED] = 1.0
    return table


def held_from(table: torch.Tensor) -> tuple[tuple[HeldBytes, ...], tuple[int, ...]]:
    """Read the held and static bytes of each layer from the maximum of all ranks' :func:`held_table`."""
    rows = [list(map(int, row)) for row in table[:-1].tolist()]
    return tuple(HeldBytes(*row[:-1]) for row in rows), tuple(row[-1] for row in rows)


def bytes_between_batches(module: nn.Module, state: OptimizerState) -> HeldBytes:
    """Count the bytes that a layer holds on this rank between two batches."""
    of_parameters = (state.bytes_between_batches(parameter) for parameter in module.parameters())
    return sum(of_parameters, start=held_alone(module.buffers()))


def trainable_parameters(module: nn.Module) -> int:
    """Count the elements that require a gradient."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def training_bytes(module: nn.Module, state: OptimizerState) -> int:
    """Count the bytes of a layer's weights, buffers, gradients and optimizer state while a batch trains."""
    total = sum(num_bytes(buffer) for buffer in module.buffers())
    return total + sum(num_bytes(p) + state.state_and_gradient_bytes(p) for p in module.parameters())

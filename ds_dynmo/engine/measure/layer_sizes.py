"""Reduction of the measurements of all stages to one profile of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, fields

import torch
from deepspeed.utils import logger
from torch import nn

from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.measure.profiler import Profiler
from ds_dynmo.engine.move.tensors import num_bytes
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.state.optimizer_state import OptimizerState, held_alone
from ds_dynmo.errors import MigrationError, PartitionError
from ds_dynmo.placement import Placement
from ds_dynmo.plan import HeldBytes, LayerCost, Profile

_FORWARD, _BACKWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _DEFERRED = range(5)
_PARAMETERS, _TRAINABLE, _STATIC, _ACTIVATION, _INPUT, _OUTPUT, _SIGNAL, _MEASURED, _WORKSPACE, _HELD = range(5, 15)
_COLUMNS = _HELD + len(fields(HeldBytes))
_BATCH, _FAILED, _MOVES = 0, 1, 2  # columns of the row after the last layer


def gather_profile(stage: StageContext, profiler: Profiler, move_seconds: float) -> tuple[Profile, float]:
    """Reduce the measurements of all ranks to one profile, and move seconds to their maximum. Collective.

    Args:
        move_seconds: of the moves since the last profile, on this rank.

    Raises:
        PartitionError: on every rank; a layer was not measured on any rank.
        MigrationError: on every rank, harmless; a rank failed to size its layers.
    """
    table = stage_costs(stage.layers, profiler, stage.state, move_seconds)
    stage.comm.max_over_world(table)
    if failed(table):
        raise MigrationError("a rank could not tell what its layers cost. No layer has moved", harmless=True)
    counters, first_uses = stage.counters, stage.layers.first_uses()
    profile = profile_from(table, stage.placement, counters.steps, counters.micro_batches, first_uses)
    return profile, float(table[-1, _MOVES])


def stage_costs(layers: StageLayers, profiler: Profiler, state: OptimizerState, move_seconds: float) -> torch.Tensor:
    """Return a table of this rank's measurements of its layers.

    Args:
        move_seconds: of the moves since the last table, on this rank.

    Returns:
        ``[num_layers + 1, columns]``, float64 on the CPU, zeros for layers on other ranks. If this rank fails, the
        table has a mark that :func:`failed` finds in the maximum of all ranks' tables.
    """
    try:
        return _stage_costs(layers, profiler, state, move_seconds)
    except Exception as error:  # any error of a user's load_signal; other ranks have to know
        logger.error(f"layers {[*layers.indices]}: cannot tell what they cost: {error!r}")
        table = torch.zeros(layers.num_layers + 1, _COLUMNS, dtype=torch.float64)
        table[-1, _FAILED] = 1.0
        return table


def _stage_costs(layers: StageLayers, profiler: Profiler, state: OptimizerState, move_seconds: float) -> torch.Tensor:
    samples = profiler.samples
    table = torch.zeros(layers.num_layers + 1, _COLUMNS, dtype=torch.float64)
    for index in layers.indices:
        row = table[index]
        row[_FORWARD], row[_BACKWARD] = samples.forward_seconds(index), samples.backward_seconds(index)
        row[_INPUT_GRADIENT], row[_WEIGHT_GRADIENT] = samples.part_seconds(index)
        row[_DEFERRED] = samples.deferred_bytes.get(index, 0)
        row[_MEASURED] = float(bool(samples.forward[index]))
        row[_ACTIVATION] = samples.activation_bytes.get(index, 0)
        if index == layers.num_layers - 1:
            row[_ACTIVATION] += samples.loss_bytes
        row[_INPUT] = samples.input_bytes.get(index, 0)
        row[_OUTPUT] = samples.output_bytes.get(index, 0)
        module = layers.local_module(index)
        if module is not None:
            row[_PARAMETERS] = sum(p.numel() for p in module.parameters())
            row[_TRAINABLE] = trainable_parameters(module)
            row[_STATIC] = static_bytes(module, state)
            row[_HELD:] = torch.tensor(astuple(held_bytes(module, state)))
            signal = getattr(module, "load_signal", None)
            row[_SIGNAL] = 1.0 + float(signal()) if signal is not None else 0.0
            workspace = getattr(module, "workspace_bytes", None)
            row[_WORKSPACE] = int(workspace()) if workspace is not None else 0
    table[-1, _BATCH] = profiler.batch_seconds
    table[-1, _MOVES] = move_seconds
    return table


def failed(table: torch.Tensor) -> bool:
    """Return whether the maximum of all ranks' tables holds a failure."""
    return bool(table[-1, _FAILED])


def profile_from(
    table: torch.Tensor,
    placement: Placement,
    step: int,
    micro_batches: int,
    first_uses: Sequence[int | None] = (),
) -> Profile:
    """Build the profile from the elementwise maximum of all ranks' tables, so that the slowest replica counts.

    Args:
        first_uses: per layer, as in :class:`LayerCost`; (): unknown.

    Raises:
        PartitionError: a layer was not measured on any rank.
    """
    costs = []
    for index, row in enumerate(table[:-1].tolist()):
        if not row[_MEASURED]:
            raise PartitionError(f"layer {index} has no measured forward seconds: it did not run in the profiled batch")
        costs.append(
            LayerCost(
                forward_seconds=row[_FORWARD],
                backward_seconds=row[_BACKWARD],
                parameters=int(row[_PARAMETERS]),
                trainable_parameters=int(row[_TRAINABLE]),
                static_bytes=int(row[_STATIC]),
                activation_bytes=int(row[_ACTIVATION]),
                input_bytes=int(row[_INPUT]),
                load_signal=row[_SIGNAL] - 1.0 if row[_SIGNAL] else None,
                held=HeldBytes(*map(int, row[_HELD:])),
                first_use=first_uses[index] if first_uses else None,
                input_gradient_seconds=row[_INPUT_GRADIENT],
                weight_gradient_seconds=row[_WEIGHT_GRADIENT],
                deferred_bytes=int(row[_DEFERRED]),
                output_bytes=int(row[_OUTPUT]),
                workspace_bytes=int(row[_WORKSPACE]),
            )
        )
    return Profile(step, placement, tuple(costs), micro_batches, float(table[-1, _BATCH]))


def per_layer(layers: StageLayers, number: Callable[[nn.Module], float]) -> torch.Tensor:
    """Call ``number`` on this stage's modules; return ``[num_layers]``, float64, zeros for other layers."""
    numbers = torch.zeros(layers.num_layers, dtype=torch.float64)
    for index in layers.indices:
        module = layers.local_module(index)
        if module is not None:
            numbers[index] = number(module)
    return numbers


def held_table(layers: StageLayers, state: OptimizerState) -> torch.Tensor:
    """Return a table like :func:`stage_costs` of the bytes of this rank's layers, now and in training."""
    table = torch.zeros(layers.num_layers + 1, len(fields(HeldBytes)) + 1, dtype=torch.float64)
    try:
        for index in layers.indices:
            module = layers.local_module(index)
            if module is not None:
                table[index] = torch.tensor([*astuple(held_bytes(module, state)), static_bytes(module, state)])
    except Exception as error:  # any error of a user's tensor; other ranks have to know
        logger.error(f"layers {[*layers.indices]}: cannot tell what they hold: {error!r}")
        table[-1, _FAILED] = 1.0
    return table


def held_from(table: torch.Tensor) -> tuple[tuple[HeldBytes, ...], tuple[int, ...]]:
    """Read the held and static bytes of each layer from the maximum of all ranks' :func:`held_table`."""
    rows = [list(map(int, row)) for row in table[:-1].tolist()]
    return tuple(HeldBytes(*row[:-1]) for row in rows), tuple(row[-1] for row in rows)


def held_bytes(module: nn.Module, state: OptimizerState) -> HeldBytes:
    """Count the bytes that a layer holds on this rank between two batches."""
    return sum((state.held_bytes(parameter) for parameter in module.parameters()), start=held_alone(module.buffers()))


def trainable_parameters(module: nn.Module) -> int:
    """Count the elements that require a gradient."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def static_bytes(module: nn.Module, state: OptimizerState) -> int:
    """Count the bytes of a layer's weights, buffers, gradients and optimizer state."""
    total = sum(num_bytes(buffer) for buffer in module.buffers())
    return total + sum(num_bytes(p) + state.static_bytes(p) for p in module.parameters())

"""Reduction of the measurements of all stages to one profile of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from enum import IntEnum, auto

import torch
from deepspeed.utils import logger

from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.measure.layer_sizes import (
    SummaryColumn,
    bytes_between_batches,
    failed,
    trainable_parameters,
    training_bytes,
)
from ds_dynmo.engine.measure.profiler import Profiler, Samples
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.state.optimizer_state import OptimizerState
from ds_dynmo.errors import MigrationError, PartitionError
from ds_dynmo.placement import Placement
from ds_dynmo.plan import HeldBytes, LayerCost, Profile


class LayerColumn(IntEnum):
    """Columns of the rows of layers. Those of :class:`HeldBytes` begin at ``HELD``."""

    FORWARD = 0
    BACKWARD = auto()
    INPUT_GRADIENT = auto()
    WEIGHT_GRADIENT = auto()
    DEFERRED = auto()
    PARAMETERS = auto()
    TRAINABLE = auto()
    STATIC = auto()
    ACTIVATION = auto()
    INPUT = auto()
    OUTPUT = auto()
    SIGNAL = auto()
    MEASURED = auto()
    WORKSPACE = auto()
    HELD = auto()


COLUMNS = LayerColumn.HELD + len(fields(HeldBytes))


class PostedProfile:
    """A profile whose measurements are being reduced to rank 0. Construction is collective, and waits for none.

    Args:
        move_seconds: of the moves since the last profile, on this rank.
    """

    def __init__(self, stage: StageContext, profiler: Profiler, move_seconds: float) -> None:
        self._comm, self._placement = stage.comm, stage.placement
        self._step, self._micro_batches = stage.counters.steps, stage.counters.micro_batches
        self._first_uses = stage.layers.first_uses()
        table = measurement_table(stage.layers, profiler, stage.state, move_seconds)
        table[-1, SummaryColumn.LINK] = _link_seconds(stage, profiler)
        self._posted = stage.comm.post_max_to_first(table)

    def read(self) -> tuple[Profile, float]:
        """Wait on rank 0 for the profile, and for move seconds, of which the maximum counts. A thread may call this.

        Raises:
            PartitionError: a layer was not measured on any rank.
            MigrationError: harmless; a rank failed to size its layers.
        """
        table = self._comm.read_max_on_first(self._posted)
        assert table is not None, "rank 0 reads"
        if failed(table):
            raise MigrationError("a rank could not tell what its layers cost. No layer has moved", harmless=True)
        profile = profile_from(table, self._placement, self._step, self._micro_batches, self._first_uses)
        return profile, float(table[-1, SummaryColumn.MOVES])


def _link_seconds(stage: StageContext, profiler: Profiler) -> float:
    """Measure a message between stages, once in a world; 0.0 if no order depends on it. Collective over a pipeline."""
    here, forms = stage.comm.here, stage.forms
    if not stage.schedule.may_choose_schedule or here.num_stages == 1 or not forms.are_known(training=True):
        return 0.0
    known = [
        forms.activations(True, boundary) for boundary in range(here.num_stages - 1)
    ]  # those of this stage's neighbours
    links = stage.comm.groups.neighbours(loop=stage.placement.shape == "loop")
    return links.message_seconds([form.num_bytes if form is not None else 0 for form in known], profiler.clock)


def measurement_table(
    layers: StageLayers, profiler: Profiler, state: OptimizerState, move_seconds: float
) -> torch.Tensor:
    """Return a table of this rank's measurements of its layers.

    Args:
        move_seconds: of the moves since the last table, on this rank.

    Returns:
        ``[num_layers + 1, columns]``, float64 on the CPU, zeros for layers on other ranks. If this rank fails, the
        table has a mark that :func:`failed` finds in the maximum of all ranks' tables.
    """
    try:
        return _measurement_table(layers, profiler, state, move_seconds)
    except Exception as error:  # any error of a user's load_signal; other ranks have to know
        logger.error(f"layers {[*layers.indices]}: cannot tell what they cost: {error!r}")
        table = torch.zeros(layers.num_layers + 1, COLUMNS, dtype=torch.float64, device="cpu")
        table[-1, SummaryColumn.FAILED] = 1.0
        return table


def _measurement_table(
    layers: StageLayers, profiler: Profiler, state: OptimizerState, move_seconds: float
) -> torch.Tensor:
    samples = profiler.samples
    table = torch.zeros(layers.num_layers + 1, COLUMNS, dtype=torch.float64, device="cpu")
    for index in layers.indices:
        table[index] = torch.tensor(_row(index, layers, samples, state), dtype=torch.float64, device="cpu")
    table[-1, SummaryColumn.BATCH] = profiler.batch_seconds
    table[-1, SummaryColumn.MOVES] = move_seconds
    return table


def _row(index: int, layers: StageLayers, samples: Samples, state: OptimizerState) -> list[float]:
    """Return the measurements of one layer of this rank."""
    row = [0.0] * COLUMNS
    row[LayerColumn.FORWARD], row[LayerColumn.BACKWARD] = (
        samples.forward_seconds(index),
        samples.backward_seconds(index),
    )
    row[LayerColumn.INPUT_GRADIENT], row[LayerColumn.WEIGHT_GRADIENT] = samples.part_seconds(index)
    row[LayerColumn.DEFERRED] = samples.deferred_bytes.get(index, 0)
    row[LayerColumn.MEASURED] = bool(samples.forward[index])
    row[LayerColumn.ACTIVATION] = samples.activation_bytes.get(index, 0)
    if index == layers.num_layers - 1:
        row[LayerColumn.ACTIVATION] += samples.loss_bytes
    row[LayerColumn.INPUT] = samples.input_bytes.get(index, 0)
    row[LayerColumn.OUTPUT] = samples.output_bytes.get(index, 0)
    module = layers.local_module(index)
    if module is not None:
        row[LayerColumn.PARAMETERS] = sum(p.numel() for p in module.parameters())
        row[LayerColumn.TRAINABLE] = trainable_parameters(module)
        row[LayerColumn.STATIC] = training_bytes(module, state)
        row[LayerColumn.HELD :] = astuple(bytes_between_batches(module, state))
        signal = getattr(module, "load_signal", None)
        # Ranks without the layer have 0, and the maximum of all ranks counts: so 0 means that there is no signal.
        row[LayerColumn.SIGNAL] = 1.0 + float(signal()) if signal is not None else 0.0
        workspace = getattr(module, "workspace_bytes", None)
        row[LayerColumn.WORKSPACE] = int(workspace()) if workspace is not None else 0
    return row


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
        if not row[LayerColumn.MEASURED]:
            raise PartitionError(f"layer {index} has no measured forward seconds: it did not run in the profiled batch")
        costs.append(
            LayerCost(
                forward_seconds=row[LayerColumn.FORWARD],
                backward_seconds=row[LayerColumn.BACKWARD],
                parameters=int(row[LayerColumn.PARAMETERS]),
                trainable_parameters=int(row[LayerColumn.TRAINABLE]),
                static_bytes=int(row[LayerColumn.STATIC]),
                activation_bytes=int(row[LayerColumn.ACTIVATION]),
                input_bytes=int(row[LayerColumn.INPUT]),
                load_signal=row[LayerColumn.SIGNAL] - 1.0 if row[LayerColumn.SIGNAL] else None,
                held=HeldBytes(*map(int, row[LayerColumn.HELD :])),
                first_use=first_uses[index] if first_uses else None,
                input_gradient_seconds=row[LayerColumn.INPUT_GRADIENT],
                weight_gradient_seconds=row[LayerColumn.WEIGHT_GRADIENT],
                deferred_bytes=int(row[LayerColumn.DEFERRED]),
                output_bytes=int(row[LayerColumn.OUTPUT]),
                workspace_bytes=int(row[LayerColumn.WORKSPACE]),
            )
        )
    summary = table[-1].tolist()
    return Profile(
        step,
        placement,
        tuple(costs),
        micro_batches,
        summary[SummaryColumn.BATCH],
        link_seconds=summary[SummaryColumn.LINK],
    )

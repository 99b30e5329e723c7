"""Access of dynamic models to the gradients of a batch before the optimizer's step: zero or measure them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.state import clipping


def zero_gradients(stage: StageContext, elements: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Set elements of the batch's gradients to 0. Use in ``engine.before_step``, before the norm for clipping.

    Not collective, but every replica has to make the same call.

    Args:
        elements: parameters of this stage, each with a bool tensor of its shape: where to set its gradient to 0.
    """
    reduced = stage.optimizer.gradients()
    for parameter, where in elements:
        gradient = reduced.get(id(parameter))
        if gradient is None:
            continue
        if gradient.numel() < parameter.numel():  # this rank's part
            held = stage.state.state_of(parameter).values()
            start = next(part[0] for part in held if isinstance(part, tuple))
            where = where.reshape(-1)[start : start + gradient.numel()]
        gradient.masked_fill_(where.reshape(gradient.shape), 0)


def gradient_magnitudes(stage: StageContext) -> torch.Tensor:
    """Sum the magnitudes of the gradients that this rank counts, per layer of the model.

    Summed over all ranks, each element of each gradient counts once. In fp16 the sums are divided by the loss scale;
    in a batch whose step will be skipped they may be infinite or NaN.

    Returns:
        fp64 ``[num_layers]`` on the CPU; 0 for a layer that is on or counts on another rank, or is frozen.
    """
    adapter, norm, reduced = stage.optimizer.adapter, stage.optimizer.norm, stage.optimizer.gradients()
    sharded = adapter is not None and adapter.shards_gradients
    magnitudes = clipping.gradient_magnitudes(
        stage.layers.counted_modules(),
        stage.layers.num_layers,
        norm.coordinates if sharded else norm.replica_coordinates,
        stage.comm.device,
        lambda parameter: reduced.get(id(parameter)),
    )
    return magnitudes.cpu() / stage.optimizer.loss_scale()

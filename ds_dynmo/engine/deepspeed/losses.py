"""The loss of a batch, which DeepSpeed's last stage broadcasts (read in DeepSpeed 0.19.8, runtime/pipe/engine.py)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.pipe import engine as deepspeeds

from ds_dynmo.engine.comm.posted import Posted


def share_loss(
    engine: Any, aggregate: Callable[[], Any], post: Callable[[torch.Tensor, int, Any], Posted]
) -> torch.Tensor:
    """Run DeepSpeed's ``_aggregate_total_loss`` without waiting for its broadcast. Collective.

    Stages before the last get tensors that wait where they are read, in place of DeepSpeed's copies of its own buffer,
    which it makes while the broadcast is under way. So what arrives has another buffer.

    Args:
        aggregate: that method.
        post: posts a broadcast of a tensor from a rank in a group.
    """
    posted: list[Posted] = []

    def broadcast(tensor: torch.Tensor, src: int, group: Any) -> None:
        posted.append(post(tensor if engine.is_last_stage() else torch.empty_like(tensor), src, group))

    waiting, deepspeeds.dist.broadcast = deepspeeds.dist.broadcast, broadcast
    try:
        loss: torch.Tensor = aggregate()
    finally:
        deepspeeds.dist.broadcast = waiting
    if engine.is_last_stage():
        return loss
    (received,) = posted
    engine.dp_group_loss = received.element(0)
    if engine.agg_additional_losses is not None:
        names = enumerate(engine.agg_additional_losses, start=2)
        engine.agg_additional_losses = OrderedDict((name, received.element(index)) for index, name in names)
    return received.element(1)

"""The loss of a batch, which DeepSpeed's last stage broadcasts (read in DeepSpeed 0.19.8, runtime/pipe/engine.py)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_dynmo.engine.comm.posted import PostedBroadcast


def share_loss(
    engine: Any, aggregate: Callable[[], Any], post: Callable[[torch.Tensor, int, Any], PostedBroadcast]
) -> torch.Tensor:
    """Share the loss as DeepSpeed's ``_aggregate_total_loss`` does, without waiting for its broadcast. Collective.

    Stages before the last get tensors that wait where they are read.

    Args:
        aggregate: that method; the last stage sums by it.
        post: posts a broadcast of a tensor from a rank in a group.
    """
    last, group = engine._loss_stage_global_rank(), engine.grid.get_pipe_parallel_group()
    if engine.is_last_stage():
        with _without_broadcast(engine):
            loss: torch.Tensor = aggregate()
        additional = engine.agg_additional_losses or {}
        post(torch.stack([engine.dp_group_loss, loss, *additional.values()]).float(), last, group)
        return loss
    names = engine.module.get_additional_losses()
    received = post(torch.empty(2 + len(names or ()), dtype=torch.float32, device=engine.device), last, group)
    engine.dp_group_loss = received.element(0)
    if names is not None:
        numbered = enumerate(names, start=2)
        engine.agg_additional_losses = OrderedDict((name, received.element(index)) for index, name in numbered)
    return received.element(1)


@contextmanager
def _without_broadcast(engine: Any) -> Iterator[None]:
    """Let DeepSpeed aggregate losses as with one stage: without a broadcast."""
    before, engine.is_pipe_parallel = engine.is_pipe_parallel, False
    try:
        yield
    finally:
        engine.is_pipe_parallel = before

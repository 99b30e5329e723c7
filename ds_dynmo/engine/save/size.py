"""Estimate the size of a checkpoint before there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.comm.replicas import is_per_replica
from ds_dynmo.engine.move.tensors import num_bytes
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.state.pieces import FLAT


def expected_bytes(stage: StageContext, *, exclude_frozen: bool) -> int:
    """Estimate the bytes of a checkpoint's weights, buffers and optimizer state. Collective.

    An optimizer has no state before its first step, so the state is taken to be what it is for most: two values of each
    element in a group with ``betas``, one in a group with ``momentum``.
    """
    first, flat = stage.comm.here.replica == 0, stage.state.storage == FLAT

    def copies(parameter: nn.Parameter) -> int:
        """Count the files of this rank that hold a parameter: those of the first replica, and those of each."""
        return first + is_per_replica(parameter)

    mine = 0
    for module in stage.layers.modules_that_run().values():
        weights = [p for p in module.parameters() if p.requires_grad or not exclude_frozen]
        mine += sum(copies(weight) * num_bytes(weight) for weight in weights)
        mine += sum(num_bytes(buffer) for buffer in module.buffers() if first)
    for group in stage.optimizer.inner.param_groups if stage.optimizer.inner is not None else ():
        values = flat + _values_per_element(group)  # a flat shard holds the fp32 weights too
        trained = [p for p in group["params"] if p.requires_grad]
        mine += values * sum((1 if flat else copies(p)) * num_bytes(p) for p in trained)
    stage.comm.enter("estimating the size of a checkpoint")
    return int(stage.comm.sum_over_world(torch.tensor([mine], dtype=torch.int64, device="cpu")).item())


def _values_per_element(group: Mapping[str, Any]) -> int:
    """Return the values that an optimizer keeps of each element in a group, after its options."""
    return 2 if "betas" in group else int(bool(group.get("momentum")))

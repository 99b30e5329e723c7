"""Sums over data-parallel replicas, and parameters that differ between them.

A layer marks such a parameter, as of each replica's share of its experts, with ``parameter.replica_own = True``. It is
neither broadcast at the start nor averaged over replicas. After the backward passes of a batch, its gradient has to be
the sum over the samples of all replicas. The layer gets the process group of the replicas by a method
``use_replicas(group)``, which is called when the engine is built, before the optimizer, and again on each stage where
the layer arrives. The group belongs to the stage: it must not be pickled or copied with the layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def sum_over_replicas(grid: Any, device: torch.device, numbers: torch.Tensor) -> torch.Tensor:
    """Sum elementwise over the replicas of this stage, on the device of ``numbers``. Collective over them.

    Args:
        grid: DeepSpeed's ``PipelineParallelGrid``.
        device: the engine's device.
    """
    moved = numbers.to(device, copy=True)
    dist.all_reduce(moved, group=grid.get_data_parallel_group())
    return moved.to(numbers.device)


def is_per_replica(parameter: nn.Parameter) -> bool:
    """Return whether a parameter differs between replicas."""
    return bool(getattr(parameter, "replica_own", False))


def has_per_replica(module: nn.Module) -> bool:
    """Return whether a module has a parameter that differs between replicas."""
    return any(map(is_per_replica, module.parameters()))


def per_replica_shapes(module: nn.Module) -> list[list[int]]:
    """List the shapes of the parameters of a module that differ between replicas."""
    return [list(parameter.shape) for parameter in module.parameters() if is_per_replica(parameter)]


def use_replicas(modules: Iterable[nn.Module], group: Any) -> None:
    """Pass the group of this stage's replicas to every layer part that has ``use_replicas``.

    Raises:
        ConfigError: a layer cannot be shared out over so many replicas.
    """
    for module in modules:
        use = getattr(module, "use_replicas", None)
        if use is not None:
            use(group)

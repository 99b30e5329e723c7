"""The mean over all trained tokens of a batch, for data of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from ds_dynmo.engine.comm.replicas import sum_over_replicas
from ds_dynmo.errors import ConfigError

__all__ = ["weigh_by_tokens"]

NO_LABEL = -100  # torch's cross_entropy leaves it out


def weigh_by_tokens(
    iterator: Iterator[Any] | None, engine: Any, *, micro_batches: int | None = None
) -> Iterator[Any] | None:
    """Let every trained token of a batch weigh the same, however many its micro-batch has.

    Labels become ``(labels, tokens)``. ``tokens``, fp32 ``[]``, is how many labels of the whole batch are not -100, on
    all replicas, per micro-batch. A loss function that divides the *sum* of its tokens' losses by it makes the mean of
    the batch's micro-batches, which DeepSpeed trains, the mean over all tokens:
    :func:`~ds_dynmo.models.language_model_loss` does.

    A batch is read ahead, and its tokens are summed over the replicas of each stage that reads data: each of them has
    to.

    Args:
        iterator: of micro-batches ``(inputs, labels)``. None, as on a stage that reads no data: the result is None.
        micro_batches: of a batch; None: those of a training batch, ``engine.micro_batches``.

    Raises:
        ConfigError: where a batch is read: labels are no tensor.
    """
    return None if iterator is None else _weighed(iterator, engine, micro_batches)


def _weighed(iterator: Iterator[Any], engine: Any, micro_batches: int | None) -> Iterator[Any]:
    while batch := list(islice(iterator, micro_batches or engine.micro_batches)):
        counted = torch.tensor([sum(_count(labels) for _, labels, *_ in batch)], device="cpu")
        total = int(sum_over_replicas(engine.grid, engine.device, counted))
        every = len(batch) * engine.grid.get_data_parallel_world_size()
        tokens = torch.tensor(max(total, 1) / every, dtype=torch.float32, device="cpu")
        for inputs, labels, *others in batch:
            yield inputs, (labels, tokens), *others


def _count(labels: Any) -> int:
    if labels is None:  # of a stage that does not use them
        return 0
    if not isinstance(labels, torch.Tensor):
        raise ConfigError(
            f"weigh_by_tokens: labels of a micro-batch are a {type(labels).__name__}: should be a tensor with "
            f"{NO_LABEL} where nothing is trained, the second of (inputs, labels); what a function given to "
            "engine.set_batch_fn makes of each, map(function, iterator) makes before"
        )
    return int((labels != NO_LABEL).sum())

"""Messages between stages that are split over tensor-parallel slices: each sends a part of the first tensor.

Slices have equal activations, so one copy per stage is enough. DeepSpeed does the same (``pipe_partitioned``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.engine.comm.message_forms import Content
from ds_dynmo.unmarked import unmarked


class MessageSlices:
    """Splits the first tensor of messages over the slices of a stage, and gathers it.

    Args:
        grid: DeepSpeed's ``PipelineParallelGrid``.
    """

    def __init__(self, grid: Any) -> None:
        self._group = grid.get_slice_parallel_group()
        self._count, self._rank = int(grid.slice_parallel_size), int(grid.get_slice_parallel_rank())

    def own(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replace the first tensor by this slice's part of its elements, padded to equal parts."""
        if not tensors:
            return []
        flat = unmarked(tensors[0]).reshape(-1)
        size = self._part(flat.numel())
        padded = torch.nn.functional.pad(flat, (0, self._count * size - flat.numel()))
        return [padded[self._rank * size : (self._rank + 1) * size].clone(), *tensors[1:]]

    def content(self, content: Content) -> Content:
        """Return shapes and dtypes of :meth:`own` for those of whole tensors."""
        if not content:
            return ()
        (shape, dtype), *others = content
        return ((torch.Size([self._part(prod(shape))]), dtype), *others)

    def whole(self, tensors: Sequence[torch.Tensor], content: Content) -> list[torch.Tensor]:
        """Gather the first tensor from all slices. Collective over them."""
        if not tensors:
            return []
        shape = content[0][0]
        gathered = tensors[0].new_empty(self._count * len(tensors[0]))
        dist.all_gather_into_tensor(gathered, tensors[0], group=self._group)
        return [gathered[: prod(shape)].view(shape), *tensors[1:]]

    def _part(self, elements: int) -> int:
        return -(-elements // self._count)

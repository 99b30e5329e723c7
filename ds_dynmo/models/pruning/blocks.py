"""Products by a weight that is pruned in square blocks: batched dense products of the blocks that are left.

The values are in the order of the flattened weight, as :mod:`.kernels` has them. Blocks that are above each other, or
beside each other, share rows of the input. So a band of blocks is one matrix, and all bands are one batched product,
which torch has in every dtype and on every device. Bands of fewer blocks are padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ds_dynmo.models.pruning.kernels import Kernel, Shape

__all__ = ["blocks", "largest_in_blocks", "places_of_blocks"]


@dataclass(frozen=True)
class _Bands:
    """Where the elements of each band are.

    Attributes:
        places: ``[bands, side, width]``: in the vector of values, or its length where there is none (padding).
        features: ``[bands, width]``: the feature of the other side that each column of a band is multiplied by.
    """

    places: torch.Tensor
    features: torch.Tensor

    def times(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Multiply the bands by the rows ``[features, tokens]`` that they share: ``[bands * side, tokens]``."""
        held = torch.cat([values, values.new_zeros(1)])[self.places]
        return torch.bmm(held, self._of(rows)).flatten(0, 1)

    def gradients(self, gradient: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Multiply ``[bands * side, tokens]`` by the same rows: the gradients ``[count]`` of the values."""
        bands, side, _ = self.places.shape
        made = torch.bmm(gradient.view(bands, side, -1), self._of(rows).transpose(1, 2))
        result = made.new_empty(count + 1)
        result[self.places] = made  # all paddings go to the last
        return result[:count]

    def _of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self.features.flatten()).unflatten(0, self.features.shape)


class _Blocks(Kernel):
    """Computes ``Y^T``, ``dX^T`` and ``dW`` band by band. The input is transposed once and kept so."""

    def __init__(self, side: int) -> None:
        self._side = side

    def kept(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.t().contiguous()

    def outputs(self, kept: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        return _across(index, shape, self._side).times(values, kept).t().contiguous()

    def of_rows(self, gradient: torch.Tensor, values: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        return _down(index, shape, self._side).times(values, gradient.t().contiguous()).t().contiguous()

    def of_values(self, gradient: torch.Tensor, kept: torch.Tensor, index: torch.Tensor, shape: Shape) -> torch.Tensor:
        return _across(index, shape, self._side).gradients(gradient.t().contiguous(), kept, len(index))


@cache
def blocks(side: int) -> Kernel:
    """Give the kernel for blocks of ``side`` rows and columns; both sides of the weight are multiples of it."""
    return _Blocks(side)


def places_of_blocks(index: torch.Tensor, shape: Shape, side: int) -> torch.Tensor:
    """Find where the elements of each block that is left are in the vector of values.

    Args:
        index: int32 ``[kept]``, ascending places in the flattened weight.

    Returns:
        int64 ``[blocks, side, side]``, blocks in the order of their first elements.
    """
    widths, starts = _widths(index, shape, side)
    band = torch.repeat_interleave(torch.arange(len(widths), device=index.device), widths // side)
    width, start = widths[band], starts[band]
    first_blocks = (widths // side).cumsum(0) - widths // side
    corner = start + (torch.arange(len(band), device=index.device) - first_blocks[band]) * side
    within = torch.arange(side, device=index.device)
    return corner[:, None, None] + within[None, :, None] * width[:, None, None] + within[None, None, :]


def largest_in_blocks(weight: torch.Tensor, index: torch.Tensor | None, shape: Shape, side: int) -> torch.Tensor:
    """Find the largest magnitude in each block of a dense weight, or of the values at ``index``: ``[blocks]``."""
    if index is None:
        outputs, inputs = shape
        return weight.view(outputs // side, side, inputs // side, side).abs().amax((1, 3)).flatten()
    return weight.abs()[places_of_blocks(index, shape, side)].amax((1, 2))


def _widths(index: torch.Tensor, shape: Shape, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the columns that each band of ``side`` rows has left, and find where its values begin."""
    outputs, inputs = shape
    bounds = torch.arange(outputs // side + 1, dtype=torch.int32, device=index.device) * (side * inputs)
    starts = torch.searchsorted(index, bounds)
    return starts.diff() // side, starts[:-1]


def _across(index: torch.Tensor, shape: Shape, side: int) -> _Bands:
    """Find the bands of blocks beside each other, which share outputs."""
    widths, starts = _widths(index, shape, side)
    column = torch.arange(int(widths.max()), device=index.device)
    is_there = column < widths[:, None]
    first_row = (starts[:, None] + column).masked_fill_(~is_there, len(index))
    row = torch.arange(side, device=index.device)
    places = first_row[:, None, :] + row[None, :, None] * widths[:, None, None]
    features = torch.cat([index % shape[1], index.new_zeros(1)])[first_row]
    return _Bands(places.masked_fill_(~is_there[:, None, :], len(index)), features)


def _down(index: torch.Tensor, shape: Shape, side: int) -> _Bands:
    """Find the bands of blocks above each other, which share inputs, transposed."""
    places = places_of_blocks(index, shape, side)
    corners = index[places[:, 0, 0]]
    bands, rows = corners % shape[1] // side, corners // shape[1]
    bands, order = bands.sort(stable=True)
    lengths = torch.bincount(bands, minlength=shape[1] // side)
    number = torch.arange(int(lengths.max()), device=index.device)
    is_there = number < lengths[:, None]
    found = (lengths.cumsum(0) - lengths)[:, None] + number
    found = torch.cat([order, order.new_full((1,), len(order))])[found.masked_fill_(~is_there, len(order))]
    padded = torch.cat([places, places.new_full((1, side, side), len(index))])[found]  # [bands, blocks, row, column]
    first_rows = torch.cat([rows, rows.new_zeros(1)])[found]
    features = first_rows[:, :, None] + torch.arange(side, device=index.device)
    return _Bands(padded.permute(0, 3, 1, 2).flatten(2), features.flatten(1))

"""Prunable linear layers as the engine leaves them."""

from __future__ import annotations

from torch import nn

from ds_dynmo.models.pruning.sparse_linear import PrunableLinear


def compress(linear: PrunableLinear) -> None:
    """Replace the parameter by the vector of the kept values, as the engine does."""
    places = linear.kept_places()
    linear.use_values(linear.index_at(places))
    linear.weight = nn.Parameter(linear.weight.detach().view(-1)[places])

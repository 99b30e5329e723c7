"""The gradient norm that clipping uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.state.clipping import gradient_norm, scale_gradients


def test_sparse_gradients_count_as_dense_ones() -> None:
    """Rows that were looked up twice, in one pass or in two, count with their sum."""
    norms = []
    for sparse in (False, True):
        layer = nn.Embedding(5, 3, _weight=torch.ones(5, 3), sparse=sparse)
        for ids in ([1, 1, 4], [4, 2]):
            (layer(torch.tensor(ids)) * torch.arange(1.0, 1.0 + len(ids)).unsqueeze(1)).sum().backward()
        norms.append(
            gradient_norm({0: layer}, 1, RankCoordinates(), lambda x: x, torch.device("cpu"), lambda p: p.grad)
        )
        scale_gradients(layer.parameters(), norms[-1], max_norm=0.5)
        assert layer.weight.grad is not None and layer.weight.grad.is_sparse == sparse
        norms.append(
            gradient_norm({0: layer}, 1, RankCoordinates(), lambda x: x, torch.device("cpu"), lambda p: p.grad)
        )
    assert norms[:2] == pytest.approx([(3 * (3**2 + 2**2 + 4**2)) ** 0.5, 0.5])
    assert norms[2:] == norms[:2]


def test_weights_that_differ_between_replicas_count_on_all_of_them() -> None:
    """With two replicas of a layer, a weight that both share counts once; of a weight of their own, both count."""
    table = torch.zeros(1, 1, 2, dtype=torch.float64)
    layers = []
    for own in (3.0, 4.0):
        layer = nn.Module()
        layer.shared, layer.own = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        layer.own.replica_own = True  # type: ignore[attr-defined]
        layer.shared.grad, layer.own.grad = torch.tensor([12.0]), torch.tensor([own])
        layers.append(layer)

    def gather(squares: torch.Tensor) -> torch.Tensor:
        return table.add_(squares)

    for replica, layer in enumerate(layers):
        place = RankCoordinates(replica=replica, replicas=2)
        norm = gradient_norm({0: layer}, 1, place, gather, torch.device("cpu"), lambda p: p.grad)
    assert norm == pytest.approx(13.0)

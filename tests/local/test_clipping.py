"""The norm that gradients are clipped by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_dynmo.engine.clipping import gradient_norm, scale_gradients


def test_sparse_gradients_count_as_dense_ones_do() -> None:
    """Rows that were looked up twice, in one pass and in two, count with their sum."""
    norms = []
    for sparse in (False, True):
        layer = nn.Embedding(5, 3, _weight=torch.ones(5, 3), sparse=sparse)
        for ids in ([1, 1, 4], [4, 2]):
            (layer(torch.tensor(ids)) * torch.arange(1.0, 1.0 + len(ids)).unsqueeze(1)).sum().backward()
        norms.append(gradient_norm({0: layer}, 1, (0, 1), lambda x: x, torch.device("cpu"), lambda p: p.grad))
        scale_gradients(layer.parameters(), norms[-1], max_norm=0.5)
        assert layer.weight.grad is not None and layer.weight.grad.is_sparse == sparse
        norms.append(gradient_norm({0: layer}, 1, (0, 1), lambda x: x, torch.device("cpu"), lambda p: p.grad))
    assert norms[:2] == pytest.approx([(3 * (3**2 + 2**2 + 4**2)) ** 0.5, 0.5])
    assert norms[2:] == norms[:2]

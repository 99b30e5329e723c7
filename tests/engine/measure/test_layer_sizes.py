"""Layer sizes, and profiles made from measured samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_dynmo.engine.decide.decision_input import DecisionInput, memory_model
from ds_dynmo.engine.measure import layer_sizes, profile_reduction
from ds_dynmo.engine.state.optimizer_state import PerParameterState
from ds_dynmo.errors import PartitionError
from ds_dynmo.placement import Placement


def test_a_layer_that_did_not_run_is_named() -> None:
    table = torch.zeros(3, profile_reduction.COLUMNS, dtype=torch.float64)
    table[0, profile_reduction.LayerColumn.MEASURED] = 1.0
    with pytest.raises(PartitionError, match="layer 1"):
        profile_reduction.profile_from(table, (0, 1, 2), step=1, micro_batches=2)
    table[1, profile_reduction.LayerColumn.MEASURED] = 1.0  # it ran, but too fast for the clock
    assert profile_reduction.profile_from(table, (0, 1, 2), step=1, micro_batches=2).layers[1].seconds == 0.0


def test_training_bytes() -> None:
    layer = nn.Linear(3, 4)
    layer.register_buffer("mask", torch.ones(4, dtype=torch.bool))
    weights = (12 + 4) * 4
    assert layer_sizes.training_bytes(layer, PerParameterState(None)) == 2 * weights + 4
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert layer_sizes.training_bytes(layer, PerParameterState(optimizer)) == 3 * weights + 4
    layer.requires_grad_(False)
    assert layer_sizes.training_bytes(layer, PerParameterState(optimizer)) == 2 * weights + 4
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(4).to_sparse_csr(), requires_grad=False)
    assert layer_sizes.training_bytes(sparse, PerParameterState(None)) == 5 * 8 + 4 * 8 + 4 * 4
    embedding = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)
    embedding(torch.tensor([3, 3, 5])).sum().backward()
    optimizer.step()
    rows = 3 * (8 + 2 * 4)  # one term per lookup in the sparse momentum: its index and two floats
    assert layer_sizes.training_bytes(embedding, PerParameterState(optimizer)) == 2 * 8 * 2 * 4 + rows


def test_the_largest_workspace_is_taken_off_the_limit_of_every_stage() -> None:
    table = torch.zeros(4, profile_reduction.COLUMNS, dtype=torch.float64)
    table[:, profile_reduction.LayerColumn.MEASURED] = 1.0
    table[:3, profile_reduction.LayerColumn.WORKSPACE] = torch.tensor([0.0, 30.0, 20.0])
    profile = profile_reduction.profile_from(table, Placement.chain((0, 2, 3)), step=1, micro_batches=2)
    limits = [memory.limits for limit in (100, 10) if (memory := memory_model(profile, limit, 0)) is not None]
    assert limits == [(70, 70), (0, 0)]
    passes = DecisionInput.of(profile, limit_bytes=100, searches=True).pipeline.passes
    assert passes is not None and passes.limit_bytes == 70

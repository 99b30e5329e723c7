"""A stage builds an empty layer for one that arrives."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn

from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers


class Pipeline(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer_specs = [layer]
        self.parts, self.stage_id = [0, 1], 0

    def topology(self) -> PipeDataParallelTopology:
        return PipeDataParallelTopology(num_pp=1, num_dp=1)


def test_a_layer_given_as_a_module_is_built_without_values_when_it_returns() -> None:
    """It has only buffers, which are on "meta" since it left."""
    left = nn.BatchNorm1d(3, affine=False).to("meta")
    pipeline: Any = Pipeline(left)
    shell = StageLayers(pipeline).build(0)
    assert isinstance(shell, nn.BatchNorm1d) and shell is not left

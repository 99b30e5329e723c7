"""What checkpoints tell DeepSpeed's converter."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.layer_list import LayerList
from ds_dynmo.engine.save.context import universal_info
from ds_dynmo.errors import ConfigError
from ds_dynmo.placement import Placement

INFO, REPLICATED = "universal_checkpoint_info", "pipeline_replicated_parameter_patterns"
SPECS = [
    TiedLayerSpec("embedding", nn.Linear, 1, 1, bias=False),
    LayerSpec(nn.Linear, 1, 1),
    TiedLayerSpec("middle", nn.Linear, 1, 1, bias=False),
    TiedLayerSpec("middle", nn.Linear, 1, 1, bias=False),
    TiedLayerSpec("embedding", nn.Linear, 1, 1, bias=False),
]


def info(boundaries: list[int], client_state: dict[str, Any] | None = None, module: Any = None) -> Any:
    engine: Any = SimpleNamespace(save_zero_checkpoint=True, module=module)
    layers, placement = LayerList(SPECS), Placement.chain(boundaries)
    stage: Any = SimpleNamespace(layers=layers, placement=placement, replicas_differ=False)
    return universal_info(engine, stage, client_state or {})[INFO]


def test_only_weights_of_the_first_stage_are_taken_from_it() -> None:
    """The converter skips what the patterns match on every later stage."""
    for boundaries, expected in (([0, 1, 5], ["embedding"]), ([0, 3, 5], ["embedding", "middle"])):
        names = [f"tied_modules.{key}.weight" for key in ("embedding", "middle")]
        matched = [name for name in names if any(re.match(pattern, name) for pattern in info(boundaries)[REPLICATED])]
        assert matched == [f"tied_modules.{key}.weight" for key in expected]


def test_patterns_of_the_user_are_kept_beside_ours() -> None:
    given = {"parameter_with_row_parallelism_patterns": [r"\d+\.down"], REPLICATED: ["mine"]}
    for found in (info([0, 1, 5], {INFO: given}), info([0, 1, 5], module=SimpleNamespace(**{INFO: given}))):
        assert found["parameter_with_row_parallelism_patterns"] == [r"\d+\.down"]
        assert "mine" in found[REPLICATED] and len(found[REPLICATED]) == 2
        assert "universal_checkpoint_version" not in found  # its absence has a meaning of its own
    assert info([0, 1, 5])["universal_checkpoint_version"] >= 0.2


def test_patterns_that_are_no_dict_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"universal_checkpoint_info = \['norm'\]: has to be a dict"):
        info([0, 1, 5], {INFO: ["norm"]})

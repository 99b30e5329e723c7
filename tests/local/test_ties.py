"""Which uses of a tied key share one module, which are separate layers, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.ties import UseDescription, separate_uses, tied_weight
from ds_dynmo.errors import ConfigError

SPECS: list[Any] = [
    TiedLayerSpec("embed", nn.Embedding, 5, 3),
    LayerSpec(nn.ReLU),
    TiedLayerSpec("embed", nn.Linear, 3, 5, tied_weight_attr=["weight"]),
]


def found(layer: int, name: str = "weight", **changed: Any) -> UseDescription:
    use = UseDescription(
        layer=layer,
        names=(name,),
        shapes=((5, 3),),
        complete=True,
        same_class=True,
        same_arguments=True,
        problem=None,
    )
    return replace(use, **changed)


def decide(*uses: UseDescription) -> Any:
    return separate_uses([[use] for use in uses], SPECS)


def test_equal_uses_share_one_module() -> None:
    assert decide(found(0), found(2)) == {}


@pytest.mark.parametrize(
    ("differs", "alike"),
    [
        ({"same_class": False}, False),
        ({"same_arguments": False}, True),
        ({"complete": False}, True),
        ({"complete": False, "same_arguments": False}, False),
    ],
)
def test_uses_that_differ_are_separate_layers(differs: dict[str, bool], alike: bool) -> None:
    tie = decide(found(0, **differs), found(2, "head.weight", **differs))["embed"]
    assert tie.weights == {0: ("weight",), 2: ("head.weight",)} and tie.uses == [0, 2] and tie.num_weights == 1
    assert tie.alike == alike


def test_one_class_that_deepspeed_built_once_stays_one_module() -> None:
    assert decide(found(0, complete=False, same_arguments=False)) == {}


def test_uses_without_a_common_weight_are_refused() -> None:
    other = {"same_class": False}
    with pytest.raises(ConfigError, match=r"'embed'.*other shapes.*0: \[\[5, 3\]\].*2: \[\[3, 5\]\]"):
        decide(found(0, **other), found(2, shapes=((3, 5),), **other))
    with pytest.raises(ConfigError, match=r"'embed'.*layer 2 \(Head\): no such weight"):
        decide(found(0, **other), found(2, problem="layer 2 (Head): no such weight", **other))


def test_a_tied_weight_is_a_parameter() -> None:
    layer = nn.Sequential(nn.Linear(3, 5))
    assert tied_weight(layer, "0.weight") is layer[0].weight
    layer.again = layer[0].weight.detach().t()
    with pytest.raises(TypeError, match="'again' is no parameter of it but a Tensor"):
        tied_weight(layer, "again")
    with pytest.raises(AttributeError):
        tied_weight(layer, "1.weight")
    assert isinstance(layer.again, torch.Tensor)

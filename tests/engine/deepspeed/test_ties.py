"""Which uses of a tied key are one module, and which are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.deepspeed.ties import check_uses, untied_parameters
from ds_dynmo.errors import ConfigError

EMBEDDING = partial(TiedLayerSpec, "embed", nn.Embedding, 5, 3)


def with_last(last: Any) -> list[Any]:
    return [EMBEDDING(), LayerSpec(nn.ReLU), last]


def test_uses_of_one_class_share_one_module() -> None:
    check_uses(with_last(EMBEDDING(forward_fn=lambda layer, hidden: hidden @ layer.weight.t())))
    check_uses(with_last(TiedLayerSpec("another", nn.Linear, 3, 5)))


@pytest.mark.parametrize(
    ("last", "differs"),
    [
        (TiedLayerSpec("embed", nn.Linear, 5, 3), "the classes differ, Embedding and Linear"),
        (TiedLayerSpec("embed", nn.Embedding, 5, 4), "Embedding is built from different arguments"),
        (EMBEDDING(_weight=torch.ones(2)), "Embedding is built from different arguments"),
        (EMBEDDING(tied_weight_attr="other"), r"tied_weight_attr differs, \['weight'\] and \['other'\]"),
    ],
)
def test_uses_that_would_be_different_modules_are_refused(last: Any, differs: str) -> None:
    """The error shows the two lines to write."""
    with pytest.raises(ConfigError, match=rf"layers 0 and 2, tied by the key 'embed': {differs}") as error:
        check_uses(with_last(last))
    first, second = str(error.value).splitlines()[1:]
    assert first.strip() == "TiedLayerSpec('embed', Embedding, ..., tied_weight_attr=['weight'])"
    assert "forward_fn=lambda layer, hidden: torch.nn.functional.linear(hidden, layer.weight)" in second


def test_a_tied_weight_is_a_parameter() -> None:
    layer = nn.Sequential(nn.Linear(3, 5))
    layer.again = layer[0].weight.detach().t()

    def untied(name: str) -> list[str]:
        return [
            name for name, _ in untied_parameters(layer, TiedLayerSpec("tie", nn.Sequential, tied_weight_attr=name))
        ]

    assert untied("0.weight") == ["0.bias"]
    with pytest.raises(TypeError, match="'again' is no parameter of it but a Tensor"):
        untied("again")
    with pytest.raises(AttributeError):
        untied("1.weight")

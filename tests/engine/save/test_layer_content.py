"""What a checkpoint stores of a layer, and which files of a layer are refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from ds_dynmo.engine.save.initial_model import LayerOrigin
from ds_dynmo.engine.save.layer_content import (
    LoadedLayer,
    check_left_out,
    check_state,
    digests_of_frozen,
    extras_of,
    install,
    present_shapes,
)
from ds_dynmo.engine.state.pieces import in_memory
from ds_dynmo.errors import CheckpointError

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, 2))
        self.bias = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(3))


def origin_of(layer: nn.Module) -> LayerOrigin:
    return LayerOrigin.of(layer, torch.float32)


def loaded(layer: Layer, *left_out: str) -> LoadedLayer:
    extras = extras_of(layer, origin_of(Layer()), weights=False)
    return LoadedLayer({name: value for name, value in layer.state_dict().items() if name not in left_out}, extras)


def check(layer: nn.Module, content: LoadedLayer, **flags: Any) -> None:
    options: dict[str, Any] = {"strict": True, "frozen_excluded": False, **flags}
    check_state(content, origin_of(Layer()), present_shapes(layer), path="some file", **options)


def test_only_a_layers_own_elements_are_saved() -> None:
    layer = Layer()
    flat = torch.zeros(100_000)
    layer.weight.data = flat[:8].view(4, 2)
    layer.scale = layer.weight.detach()[0]
    layer.kept = [{"top": layer.weight.detach()[:2]}]
    layer.again = layer.kept[0]["top"]
    found = extras_of(layer, origin_of(Layer()), weights=True)
    file = io.BytesIO()
    torch.save(found, file)
    assert file.tell() < 20_000
    attributes = found["attributes"][""]
    assert attributes["kept"][0]["top"] is attributes["again"]
    assert torch.equal(found["weights"]["weight"], layer.weight)


def test_a_buffer_of_the_state_dict_is_not_written_again() -> None:
    layer, here = Layer(), Layer()
    layer.scale = torch.arange(2.0)  # of another shape than built
    layer.register_buffer("shared", torch.ones(2))
    layer.register_buffer("late", torch.ones(5), persistent=False)
    layer.same = layer.shared
    extras = extras_of(layer, origin_of(Layer()), weights=False, all_buffers=False)
    assert extras["buffers"][""]["scale"] == [2]
    content = LoadedLayer(layer.state_dict(), extras)
    check(here, content)
    install(here, content, origin_of(Layer()), CPU, strict=True)
    assert torch.equal(here.scale, layer.scale) and torch.equal(here.late, layer.late)
    assert here.scale.data_ptr() != layer.scale.data_ptr()
    assert here.same.untyped_storage().data_ptr() == here.shared.untyped_storage().data_ptr()
    for state in ({"scale": torch.ones(3)}, {"scale": 1.0}):
        with pytest.raises(CheckpointError, match=r"some file: scale .*expected (a tensor of shape )?\[2\]"):
            check(Layer(), LoadedLayer({**content.state, **state}, extras))
    del content.state["scale"]
    with pytest.raises(CheckpointError, match=r"some file: lacks \['scale'\]"):
        check(Layer(), content)
    here = Layer()
    install(here, content, origin_of(Layer()), CPU, strict=False)
    assert torch.equal(here.scale, torch.ones(3))


def test_a_second_name_of_a_parameter_needs_its_submodule() -> None:
    named = Layer()
    named.inner = nn.Module()
    named.inner.again = named.weight
    check(Layer(), loaded(Layer()))
    with pytest.raises(CheckpointError, match=r"some file: the layer has no submodule \['inner'\]"):
        check(Layer(), loaded(named))


def test_a_missing_weight_is_never_invented() -> None:
    for flags in ({"strict": False}, {"frozen_excluded": True}):
        narrow, here = Layer(width=3), Layer(width=3)
        narrow.weight.requires_grad_(False)
        content = loaded(narrow, "weight")
        with pytest.raises(CheckpointError, match=r"lacks weight, which had shape \[3, 2\]; .* has \[4, 2\]"):
            pytest.fail(f"{flags}: {check(Layer(), content, **flags)}")
        here.weight.data.fill_(7)
        check(here, content, **flags)
        install(here, content, origin_of(Layer()), CPU, strict=flags.get("strict", True))
        assert torch.equal(here.weight, torch.full((3, 2), 7.0)) and not here.weight.requires_grad


def test_a_weight_of_another_shape_keeps_hooks_and_marks() -> None:
    saved, here, calls = Layer(width=3), Layer(), list[str]()
    saved.bias.data = saved.bias.data.double()
    for parameter in here.parameters():
        parameter.register_hook(lambda gradient: calls.append("tensor"))
        parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
        parameter.group_name, parameter._hp_mapping = "decay", "DeepSpeed's"  # type: ignore[attr-defined]
    install(here, loaded(saved), origin_of(Layer()), CPU, strict=True)
    assert here.weight.shape == (3, 2) and here.bias.dtype == torch.double
    (here.weight.sum() + here.bias.sum()).backward()
    assert sorted(calls) == ["accumulated"] * 2 + ["tensor"] * 2
    assert [vars(parameter) for parameter in here.parameters()] == [{"group_name": "decay"}] * 2


def test_a_buffer_of_another_shape_is_refused_without_extras() -> None:
    here = Layer()
    here.scale = torch.ones(5)
    stock = LoadedLayer(dict(Layer().state_dict()), None)
    with pytest.raises(CheckpointError, match=r"scale has shape \[3\], expected \[5\]"):
        check(here, stock)
    check(Layer(), stock)


def test_step_counts_are_on_the_device_that_torch_expects() -> None:
    meta = torch.device("meta")
    for options, device in (({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")):
        assert in_memory("step", torch.tensor(3.0), options, meta).device.type == device, options
        assert in_memory("mu_product", torch.tensor(3.0), options, meta).device.type == "meta", options


def test_a_frozen_weight_that_was_left_out_has_to_be_the_same() -> None:
    saved, same, other, rounded = (Layer() for _ in range(4))
    for layer in (saved, same, other, rounded):
        layer.weight.requires_grad_(False)
    left_out = digests_of_frozen(saved)
    assert left_out.keys() == {"weight"}
    other.weight.data[0, 0] += 1e-6
    rounded.bfloat16()
    check_left_out(same, left_out, "some file")
    for layer in (other, rounded, nn.Linear(2, 2, bias=False).requires_grad_(False)):
        with pytest.raises(CheckpointError, match=r"lacks weight, which was frozen and left out.* other values"):
            check_left_out(layer, left_out, "some file")

"""What a layer refers to but does not own is found before it moves, whatever holds it."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_dynmo.engine.move.names import Names
from ds_dynmo.engine.move.object_graph import walk
from ds_dynmo.engine.move.packing import PackedLayer, pack
from ds_dynmo.engine.move.references import References
from ds_dynmo.engine.state.optimizer_state import PerParameterState


class Pipeline(nn.Module):
    """The attributes of a PipelineModule that names need."""

    def __init__(self, specs: list[Any], **attributes: Any) -> None:
        super().__init__()
        self._layer_specs = specs
        vars(self).update(attributes)


class Layer(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        vars(self).update(attributes)


class Thing:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Private:
    __slots__ = ("__held",)

    def __init__(self, held: Any) -> None:
        self.__held = held


HOLDERS: Mapping[str, Callable[[Any], Any]] = {
    "list": lambda held: [held],
    "deque": lambda held: deque([held]),
    "set": lambda held: {held},
    "key": lambda held: {held: 1},
    "private slot": Private,
}


def names_of(layers: list[Layer], specs: list[Any] | None = None, **attributes: Any) -> References:
    pipeline: Any = Pipeline(specs or [LayerSpec(Layer) for _ in layers], **attributes)
    return References(pipeline, lambda: dict(enumerate(layers)), lambda value: [value])


def packed(layer: Layer, names: References) -> PackedLayer:
    return pack(PerParameterState(None).record(layer), type(layer), names)


@pytest.mark.parametrize("how", HOLDERS)
def test_objects_that_layers_share_without_a_name_are_refused(how: str) -> None:
    shared = Thing()
    layers = [Layer(held=HOLDERS[how](shared)) for _ in range(2)]
    with pytest.raises(TypeError, match=r"held.*, a .*Thing, is shared with layer 1"):
        packed(layers[0], names_of(layers))


@pytest.mark.parametrize("how", HOLDERS)
def test_another_layers_weight_is_refused(how: str) -> None:
    other = Layer()
    layers = [Layer(held=HOLDERS[how](other.weight)), other]
    with pytest.raises(TypeError, match=r"held.* is weight of layer 1"):
        packed(layers[0], names_of(layers))


def test_another_layers_weight_is_refused_in_layers_given_as_modules() -> None:
    other = Layer()
    layers = [Layer(held=[other.weight]), other]
    with pytest.raises(TypeError, match=r"held\[0\] is weight of layer 1"):
        packed(layers[0], names_of(layers, list(layers)))


def test_shared_objects_that_hold_named_ones_are_refused_too() -> None:
    grid, settings = Thing(lock=threading.Lock()), Thing()
    shared = Thing(grid=grid, settings=settings)
    layers = [Layer(held=shared), Layer(held=shared)]
    with pytest.raises(TypeError, match=r"held, a .*Thing, is shared with layer 1"):
        packed(layers[0], names_of(layers, grid=grid, settings=settings))


class Grouped(Layer):
    """A layer with what every rank has of its own, as a process group."""

    def __init__(self) -> None:
        super().__init__(group=Thing(lock=threading.Lock(), timeout=[1.0]))


def test_what_only_an_unpicklable_attribute_holds_stays_with_it() -> None:
    layers = [Grouped(), Grouped()]
    vars(layers[1]).update(group=layers[0].group, kept=layers[0].group.timeout)
    assert packed(layers[0], names_of(layers, [LayerSpec(Grouped) for _ in layers])).num_bytes == 16
    with pytest.raises(TypeError, match=r"kept, a builtins\.list, is shared with layer 0"):
        packed(layers[1], names_of(layers, [LayerSpec(Grouped) for _ in layers]))


def test_an_unpicklable_name_is_refused_before_anything_is_sent() -> None:
    class Local:
        """Cannot be pickled."""

    argument = {Local: [1]}
    layers = [Layer(held=argument[Local]) for _ in range(2)]
    with pytest.raises(AttributeError, match="Local"):
        packed(layers[0], names_of(layers, [LayerSpec(Layer, argument) for _ in layers]))


def test_a_data_set_of_the_loss_function_is_not_searched() -> None:
    few, many = [Thing() for _ in range(10)], [Thing() for _ in range(10_001)]
    names = names_of([Layer()], loss_fn=Thing(few=few, many=many))
    assert names.is_shared(few[0]) and names.is_shared(many) and not names.is_shared(many[0])


HOOK = functools.partial(torch.mul, 1)
ANGLES = nn.Module()
ANGLES.register_buffer("angles", torch.arange(3.0))


def test_a_module_in_the_programs_globals_is_named_with_its_buffers() -> None:
    layers = [Layer(), Layer()]
    for layer in layers:
        layer.angles = ANGLES
    found = names_of(layers).outside(layers[0], {}).references
    assert [(id_, str(reference.name)) for id_, reference in found.items()] == [(id(ANGLES), f"{__name__}.ANGLES")]


class Singleton:
    instance = Thing()


def test_what_a_class_holds_for_all_its_instances_is_named() -> None:
    layer = Layer(context=Singleton.instance)  # the only one of its stage, so no other layer shows that it is shared
    [reference] = names_of([layer]).outside(layer, {}).references.values()
    assert str(reference.name) == f"{__name__}.Singleton.instance"


def test_globals_are_searched_only_for_what_may_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = []
    monkeypatch.setattr(Names, "in_globals", lambda _, objects, layer: wanted.extend(objects.values()) or {})
    layers, mark = [Layer(), Layer()], Thing()
    vars(layers[0].weight)["number"] = 3
    packed(layers[0], names_of(layers))
    assert wanted == []
    vars(layers[1].weight)["mark"] = mark
    layers[1].weight.register_hook(HOOK)
    packed(layers[1], names_of(layers))
    assert mark in wanted and HOOK in wanted


def test_globals_are_searched_once_for_all_layers_that_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def counting(roots: Any, enter: Any, depth: Any = None, **more: Any) -> Any:
        searched.append(depth)
        return walk(roots, enter, depth, **more)

    layers = [Layer(angles=ANGLES), Layer(angles=ANGLES)]
    names = names_of(layers)
    monkeypatch.setattr("ds_dynmo.engine.move.names.walk", counting)
    with names.globals_kept():
        first = names.outside(layers[0], {}).references
        once = len(searched)
        assert once and names.outside(layers[1], {}).references.keys() == first.keys() == {id(ANGLES)}
        assert len(searched) == once
    monkeypatch.setitem(globals(), "ANGLES", None)  # afterwards they may be others
    monkeypatch.setitem(globals(), "MOVED", vars(layers[0])["angles"])
    again = names.outside(layers[0], {}).references.values()
    assert [str(reference.name) for reference in again] == [f"{__name__}.MOVED"]


LAYERS: list[Layer] = []


@pytest.mark.parametrize(
    ("peek", "expected"),
    [(lambda layer: layer, "a part of layer 1"), (lambda layer: layer.weight, "weight of layer 1")],
)
def test_another_layer_in_the_programs_globals_is_refused(peek: Any, expected: str) -> None:
    """The program keeps its layers in a list, and one of them refers to its neighbour."""
    other = Layer()
    layers = [Layer(peer=[peek(other)]), other]
    LAYERS[:] = [peek(layer) for layer in layers]
    with pytest.raises(TypeError, match=rf"peer\[0\] is {expected}"):
        names_of(layers).outside(layers[0], {})
    LAYERS.clear()


@pytest.mark.parametrize(
    ("peek", "expected"),
    [
        (lambda layer: layer, "the layer itself"),
        (lambda layer: layer.weight, "weight"),
        (lambda layer: layer.weight.detach()[1:], "weight"),
    ],
)
@pytest.mark.parametrize("how", ["list", "set"])
def test_a_layer_that_stays_may_hold_no_part_of_one_that_leaves(how: str, peek: Any, expected: str) -> None:
    leaves = Layer()
    stays = Layer(held=HOLDERS[how](peek(leaves)))
    names = names_of([stays, leaves])
    names.check_left_behind({0: stays})
    with pytest.raises(TypeError, match=rf"layer 0 stays and its held.* is {expected} of layer 1"):
        names.check_left_behind({1: leaves})


def test_a_layer_that_stays_may_hold_what_both_share() -> None:
    angles = torch.arange(3.0)
    layers = [Layer(held=[angles]), Layer()]
    layers[1].register_buffer("angles", angles)
    names_of(layers, [LayerSpec(Layer, angles) for _ in layers]).check_left_behind({1: layers[1]})


def test_a_rank_attribute_may_hold_anything() -> None:
    layers = [Layer(), Layer()]
    layers[0].peers = layers[1:]  # type: ignore[assignment]
    pipeline: Any = Pipeline([LayerSpec(Layer), LayerSpec(Layer)])
    names = References(pipeline, lambda: dict(enumerate(layers)), lambda value: [value], ["peers"])
    names.check_left_behind({1: layers[1]})

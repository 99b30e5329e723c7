"""What a layer refers to but does not own is found before it moves, whatever holds it."""

from __future__ import annotations

import functools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.engine.move.left_behind import Reader
from ds_dynmo.engine.move.packing import PackedLayer, pack
from ds_dynmo.engine.move.references import References
from ds_dynmo.engine.state.optimizer_state import PerParameterState


class Pipeline(nn.Module):
    """The attributes of a PipelineModule that names need."""

    def __init__(self, specs: list[Any], **attributes: Any) -> None:
        super().__init__()
        self._layer_specs = specs
        self.tied_modules = nn.ModuleDict()
        vars(self).update(attributes)


class Layer(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        vars(self).update(attributes)


class Thing:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self, *_: Any) -> Any:
        return self.layer.weight.sum()


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
    return pack(PerParameterState(None).record(layer), names)


@pytest.mark.parametrize("how", HOLDERS)
def test_objects_that_layers_share_without_a_name_are_refused(how: str) -> None:
    shared = Thing()
    layers = [Layer(held=HOLDERS[how](shared)) for _ in range(2)]
    with pytest.raises(TypeError, match=r"held.*, a .*Thing, is shared with layer 1"):
        packed(layers[0], names_of(layers))


def test_an_object_that_layers_share_later_is_refused_by_the_next_walk() -> None:
    held = Thing()
    layers = [Layer(held=held), Layer()]
    names = names_of(layers)
    with names.walked_once():
        packed(layers[0], names)
    vars(layers[1])["held"] = held
    with names.walked_once(), pytest.raises(TypeError, match="is shared with layer 1"):
        packed(layers[0], names)


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


@pytest.mark.parametrize("peek", [lambda layer: [layer], lambda layer: layer.forward, lambda layer: {1: layer.weight}])
def test_parts_of_a_layer_on_another_stage_are_refused(peek: Any) -> None:
    other = Layer()
    layers = [Layer(held=peek(other)), other]
    pipeline: Any = Pipeline(list(layers))
    names = References(pipeline, lambda: {0: layers[0]}, lambda value: [value])
    with pytest.raises(TypeError, match=r"held.* is (weight of )?layer 1: a layer does not take another's weights"):
        packed(layers[0], names)


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


def test_the_pipeline_and_the_engine_are_those_of_the_rank_where_a_layer_arrives() -> None:
    ranks: list[Any] = [(Pipeline([LayerSpec(Layer)]), Thing()) for _ in range(2)]
    here, there = ranks
    layer = Layer(held=[*here])
    leaves, arrives = (
        References(pipeline, lambda: {0: layer}, lambda value: [value], engine=engine)
        for pipeline, engine in (here, there)
    )
    found = list(leaves.outside(layer, {}).references.values())
    assert [str(reference.name) for reference in found] == ["the PipelineModule", "the engine"]
    assert all(arrives.resolve(one, torch.device("cpu")) is held for one, held in zip(found, there, strict=True))


class Singleton:
    instance = Thing()


SETTINGS = {"sizes": Thing()}


@pytest.mark.parametrize("shared", [Singleton.instance, SETTINGS["sizes"]], ids=["of a class", "in a global dict"])
def test_what_the_program_holds_deeper_than_in_its_globals_is_refused_with_the_remedy(shared: Thing) -> None:
    layers = [Layer(context=[shared]), Layer(context=shared)]
    with pytest.raises(TypeError) as refusal:
        packed(layers[1], names_of(layers))
    expected = (
        "layer 1's context, a tests.engine.move.test_references.Thing, is shared with layer 0 and would become a copy"
    )
    assert str(refusal.value).startswith(expected)
    assert '"rank_attributes": ["context"] in the "dynmo" section' in str(refusal.value)
    pipeline: Any = Pipeline([LayerSpec(Layer) for _ in layers])
    names = References(pipeline, lambda: dict(enumerate(layers)), lambda value: [value], ["context"])
    assert packed(layers[1], names).num_bytes == 16
    found = names.outside(layers[1], {})
    assert not found.references and found.rank_attributes == {id(layers[1]): frozenset({"context"})}


def test_a_mark_on_a_parameter_cannot_belong_to_the_rank() -> None:
    shared = Thing()
    layers = [Layer(), Layer(held=shared)]
    vars(layers[0].weight)["mark"] = shared
    with pytest.raises(TypeError, match=r"layer 0's weight\.marks\['mark'\], .* is shared with layer 1.*module$"):
        packed(layers[0], names_of(layers))


@pytest.mark.parametrize(
    ("peek", "expected"),
    [(lambda layer: layer, "a part of layer 1"), (lambda layer: layer.weight, "weight of layer 1")],
)
def test_another_layer_in_the_programs_globals_is_refused(
    peek: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program keeps a layer in a global variable, and its neighbour refers to it."""
    other = Layer()
    layers = [Layer(peer=[peek(other)]), other]
    monkeypatch.setitem(globals(), "OTHER", peek(other))
    with pytest.raises(TypeError, match=rf"peer\[0\] is {expected}"):
        names_of(layers).outside(layers[0], {})


@pytest.mark.parametrize(
    ("peek", "expected"),
    [
        (lambda layer: layer, "layer 1"),
        (lambda layer: layer.weight, "weight of layer 1"),
        (lambda layer: layer.weight.detach()[1:], "weight of layer 1"),
    ],
)
@pytest.mark.parametrize("how", ["list", "set"])
def test_a_layer_that_stays_may_hold_no_part_of_one_that_leaves(how: str, peek: Any, expected: str) -> None:
    leaves = Layer()
    stays = Layer(held=HOLDERS[how](peek(leaves)))
    names = names_of([stays, leaves])
    names.left_behind.check([stays])
    with pytest.raises(TypeError, match=rf"layer 0 stays and its held.* is {expected}, which"):
        names.left_behind.check([leaves])


def test_a_layer_that_stays_may_hold_what_both_share() -> None:
    angles = torch.arange(3.0)
    layers = [Layer(held=[angles]), Layer()]
    layers[1].register_buffer("angles", angles)
    names_of(layers, [LayerSpec(Layer, angles) for _ in layers]).left_behind.check([layers[1]])


BOX: dict[str, Any] = {}


class Penalty(nn.Module):
    """A loss that holds something in an attribute."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = [held]

    def forward(self, outputs: Any, labels: Any) -> Any:
        return outputs - labels + self.held[0].sum()


def penalty(outputs: Any, labels: Any, held: Any = None) -> Any:
    return outputs - labels + sum(p.sum() for layer in BOX["layers"] for p in layer.parameters()) + (held or 0)


READERS: Mapping[str, Callable[[Layer], Any]] = {
    "global": lambda layer: BOX.update(layers=[nn.Sequential(layer)]) or penalty,
    "default": lambda layer: functools.partial(penalty, held=layer.weight.detach()[1:]),
    "closure": lambda layer: lambda *_: layer.weight.sum(),
    "module": lambda layer: Penalty(layer.weight),
    "object": lambda layer: Thing(layer=layer).method,
    "attribute": lambda layer: lambda *_: Thing(layer=layer).layer and layer.weight.shape,
}


@pytest.mark.parametrize("how", READERS)
def test_a_loss_may_use_no_part_of_a_layer_that_leaves(how: str) -> None:
    BOX.clear()
    layers = [Layer(), Layer()]
    names, function = names_of(layers), READERS[how](layers[1])
    loss, callback = Reader("loss_fn", function, "remedy"), Reader("callback", function, "remedy", of_closure=True)
    names.left_behind.check(layers[:1], [loss, callback])
    with pytest.raises(TypeError, match=r"loss_fn uses .*layer 1, which leaves: remedy"):
        names.left_behind.check(layers[1:], [loss])
    if how == "object":  # it may ask for its layers anew in each call
        names.left_behind.check(layers[1:], [callback])
    else:
        with pytest.raises(TypeError, match=r"callback uses .*layer 1, which leaves: remedy"):
            names.left_behind.check(layers[1:], [callback])


class Borrowing(Layer):
    def forward(self, hidden: Any) -> Any:
        return self.borrowed(hidden) + self.weight.sum()

    def borrowed(self, hidden: Any) -> Any:
        return hidden + BOX["layers"][0].weight


@pytest.mark.parametrize("leaving", [[0], [1], [0, 1]])
def test_code_of_a_layer_may_use_no_part_of_another_by_a_global_variable(leaving: list[int]) -> None:
    layers = [Layer(), Borrowing(), Layer()]
    BOX["layers"] = layers[:1]
    names = names_of(layers)
    names.left_behind.check(layers[2:])
    with pytest.raises(
        TypeError, match=r"Borrowing.forward of layer 1 uses .*, which is layer 0, and would not find it"
    ):
        names.left_behind.check([layers[number] for number in leaving])
    BOX["layers"] = [Layer()]
    names.left_behind.check([layers[number] for number in leaving])


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_each_layer_of_a_class_may_use_no_part_of_another(leaving: int) -> None:
    layers = [Borrowing(), Layer(), Borrowing(), Layer()]
    BOX["layers"] = layers[:1]  # the first one's own
    names = names_of(layers)
    names.left_behind.check([layers[1], layers[3]])
    if leaving != 1:
        with pytest.raises(TypeError, match=r"Borrowing.forward of layer 2 uses .*, which is layer 0"):
            names.left_behind.check([layers[leaving]])
    BOX["layers"] = layers[1:2]
    with pytest.raises(TypeError, match=r"Borrowing.forward of layer [02] uses .*, which is layer 1"):
        names.left_behind.check([layers[leaving]])


def mapped(folder: Path, **options: Any) -> Any:
    numpy.ones(4, dtype=numpy.float32).tofile(folder / "table")
    return numpy.memmap(folder / "table", dtype=numpy.float32, mode="r+", **options)


WOULD_BE_COPIES: Mapping[str, tuple[Callable[[Layer, Path], Any], str]] = {
    "parameter": (
        lambda layer, _: [layer.weight.share_memory_() is None],
        r"weight lies in memory that processes share",
    ),
    "attribute": (lambda layer, _: [torch.ones(2).share_memory_()], r"held\[0\] lies in memory that processes share"),
    "file": (lambda layer, folder: mapped(folder), r"held, a numpy.memmap, lies in a file"),
    "view of a file": (
        lambda layer, folder: numpy.asarray(mapped(folder))[1:],
        r"held, a numpy.ndarray, lies in a file",
    ),
    "weight": (lambda layer, _: layer.weight.detach().numpy(), r"held, a numpy.ndarray, is the memory of a tensor"),
    "view": (
        lambda layer, _: [array := numpy.ones(4), array[1:]],
        r"held\[1\], a numpy.ndarray, shares memory with held",
    ),
}


@pytest.mark.parametrize("how", WOULD_BE_COPIES)
def test_memory_that_would_arrive_as_a_copy_is_refused(how: str, tmp_path: Path) -> None:
    layer, (make, message) = Layer(), WOULD_BE_COPIES[how]
    vars(layer)["held"] = make(layer, tmp_path)
    with pytest.raises(TypeError, match=message):
        packed(layer, names_of([layer]))


def test_arrays_of_their_own_are_not_refused(tmp_path: Path) -> None:
    layer = Layer(part=numpy.ones(4)[1:], whole=numpy.ones((2, 2)), empty=numpy.ones(0))
    layer.stays = Thing(lock=threading.Lock(), table=mapped(tmp_path))  # with what cannot be sent
    pipeline: Any = Pipeline([LayerSpec(Layer)])
    names = References(pipeline, lambda: {0: layer}, lambda value: [value])
    assert not names.outside(layer, {}).references


class Drawing(Layer):
    of_class = random.Random(1)


RANDOM = {"numpy": numpy.random.default_rng(1)}


def test_generators_that_layers_share_belong_to_the_rank() -> None:
    given, own, of_function, of_loss, of_tie = (torch.Generator() for _ in range(5))
    layers = [Layer(generator=given, own=own), Drawing(generators=[given, RANDOM["numpy"]])]

    def jitter(hidden: Any) -> Any:
        return torch.rand(hidden.shape, generator=of_function)

    tied = TiedLayerSpec("tie", Layer, forward_fn=functools.partial(torch.rand, generator=of_tie))
    specs = [LayerSpec(Layer, given, own), LayerSpec(Drawing, [given]), jitter, tied]
    names = names_of(layers, specs, loss_fn=Thing(generator=of_loss))
    shared = names.shared_generators()
    expected = {
        "layers[0].module_args[0]": given,
        "layers[2].<variable 0>": of_function,
        "layers[3].forward_fn.keywords['generator']": of_tie,
        "the PipelineModule.loss_fn.generator": of_loss,
        f"{__name__}.Drawing.of_class": Drawing.of_class,
        f"{__name__}.RANDOM['numpy']": RANDOM["numpy"],
    }
    assert {name: shared[name] for name in expected} == expected and own not in shared.values()
    assert {str(held.name) for held in names.outside(layers[0], {}).references.values()} == {"layers[0].module_args[0]"}
    referred = {str(held.name) for held in names.outside(layers[1], {}).references.values()}
    assert referred == {"layers[0].module_args[0]", f"{__name__}.RANDOM['numpy']"}


def test_a_generator_that_only_one_rank_has_does_not_belong_to_the_ranks() -> None:
    pipeline: Any = Pipeline([LayerSpec(Layer)])
    names = References(pipeline, lambda: {}, lambda value: [value, type(value)()])
    assert not names.shared_generators()


def test_a_global_generator_that_was_made_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    names = names_of([layer])
    monkeypatch.setitem(globals(), "LATER", random.Random(1))
    vars(layer)["generator"] = globals()["LATER"]
    with pytest.raises(TypeError, match=r"generator is .*LATER, a random generator that was made after initialize"):
        packed(layer, names)
    layer.generator = random.Random(1)
    assert packed(layer, names).num_bytes == 16


@pytest.mark.parametrize("swaps", [False, True])
def test_memory_of_a_layer_that_left_is_freed_in_every_mode_of_torch(swaps: bool) -> None:
    layer = Layer()
    layer.register_buffer("table", torch.ones(3))
    layer.register_parameter("quantized", nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False))
    kept = weakref.ref(layer.weight)  # torch swaps no parameter that has one
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        names_of([layer]).free_memory(layer)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(tensor.is_meta for tensor in (*layer.parameters(), layer.table)) and not kept()
    assert [parameter.requires_grad for parameter in layer.parameters()] == [True, False]


def test_a_rank_attribute_may_hold_anything() -> None:
    layers = [Layer(), Layer()]
    layers[0].peers = layers[1:]  # type: ignore[assignment]
    pipeline: Any = Pipeline([LayerSpec(Layer), LayerSpec(Layer)])
    names = References(pipeline, lambda: dict(enumerate(layers)), lambda value: [value], ["peers"])
    names.left_behind.check([layers[1]])

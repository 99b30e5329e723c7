"""Layers as programs make them arrive as what they are, to the bit, or stay where they are and say why."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.ao.quantization import FakeQuantize
from torch.fx import symbolic_trace

from ds_dynmo.errors import MigrationError
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import WIDTH, Block, Embedding, Head
from tests.support.training import (
    batches,
    build,
    check_moves_changed_nothing,
    layers_of,
    outcome_of,
    raw,
    train_and_move,
)

pytestmark = pytest.mark.ranks

Tensor = torch.Tensor


# -- layers that travel -------------------------------------------------------------------------------


def forward(layer: Block, hidden: Tensor) -> Tensor:
    """Stand in for a class's ``forward``, as patches of attention do."""
    return hidden + layer.down(torch.tanh(layer.up(layer.norm(hidden)))) / 2


def negative(child: nn.Linear, hidden: Tensor) -> Tensor:
    return -nn.functional.linear(hidden, child.weight, child.bias)


def double_output(layer: Block, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 1.5


def scaled(method: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def call(layer: Any, hidden: Tensor) -> Tensor:
        return method(layer, hidden) * 0.75

    return call


class Activated(Block):
    """A block whose activation is an attribute."""

    activation: Callable[[Tensor], Tensor]

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.activation(self.up(self.norm(hidden))))

    def chosen(self, hidden: Tensor) -> Tensor:
        return torch.sigmoid(hidden)


class PrivateMethod(Activated):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.activation = self.__gelu

    def __gelu(self, hidden: Tensor) -> Tensor:
        return nn.functional.gelu(hidden)


class DecoratedMethod(Activated):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.activation = self.decorated

    @scaled
    def decorated(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden)


class InheritedMethod(Activated):
    renamed = negative

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.activation = super().chosen

    def chosen(self, hidden: Tensor) -> Tensor:
        raise AssertionError("not the one that was chosen")


class Quantized(Activated):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.activation = FakeQuantize(quant_min=0, quant_max=255)  # type: ignore[assignment]
        self.limits = torch.finfo(torch.float32), torch.iinfo(torch.int8)
        self.operator = torch.ops.aten.relu.default
        self.places = [torch.per_channel_affine, torch.device("cpu"), torch.channels_last, torch.Size([1])]


class Counter:
    """Counts the layer's passes, and refers back to the layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.passes = layer, 0


class BackReference(Activated):
    """A layer that cannot be pickled, with an object that can be and whose state counts."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.counter = Counter(self)
        self.activation = lambda hidden: torch.tanh(hidden) * (1 + self.counter.passes % 5)
        self.up.register_forward_hook(double_output.__get__(self))

    def forward(self, hidden: Tensor) -> Tensor:
        self.counter.layer.counter.passes += 1  # type: ignore[union-attr]
        return super().forward(hidden)


class Noisy(Block):
    """A layer with random numbers of its own."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.generator = torch.Generator().manual_seed(index)
        self.others = [random.Random(index), np.random.default_rng(index), np.random.RandomState(index)]

    def forward(self, hidden: Tensor) -> Tensor:
        factor = sum(generator.uniform(0.0, 0.1) for generator in self.others)
        noise = torch.rand(hidden.shape, generator=self.generator, dtype=hidden.dtype).to(hidden.device)
        return super().forward(hidden) * (1 + factor) + 0.1 * noise


class Traced(Activated):
    """A layer with a graph, that is given as a module."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.activation = symbolic_trace(nn.Sequential(nn.Tanh(), nn.Softsign()))


class Engaged(Activated):
    """A layer that asks the engine, which the program sets."""

    engines: list[Any]

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.activation = torch.sigmoid

    def forward(self, hidden: Tensor) -> Tensor:
        [engine] = self.engines
        assert engine.stage.layers.local_module(engine.partition[engine.stage_id]) is not None
        return super().forward(hidden) * (1 + engine.global_steps)


class HookedByLambda(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.handle = self.up.register_forward_hook(lambda module, inputs, output: output * 1.25)
        nn.utils.parametrizations.weight_norm(self.down)


def patch(layer: nn.Module, index: int) -> None:
    """Do to a layer what programs do after ``initialize``."""
    if index == 1:
        layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]
    elif index == 2:
        layer.up.forward = negative.__get__(layer.up)  # type: ignore[attr-defined]
        layer.down.register_forward_hook(types.MethodType(double_output, layer))  # type: ignore[union-attr]


KINDS = [Block, Block, PrivateMethod, DecoratedMethod, InheritedMethod, Quantized, BackReference, HookedByLambda, Noisy]
KINDS += [Traced, Engaged]
LAYERS = len(KINDS) + 2


def specs(_: Case) -> list[Any]:
    blocks = [kind(i) if kind is Traced else LayerSpec(kind, i) for i, kind in enumerate(KINDS)]
    return [LayerSpec(Embedding, 1), *blocks, LayerSpec(Head, 2)]


def train(case: Case, moves: list[list[int]]) -> dict[str, Any]:
    engine = build(case, specs)
    for index, layer in layers_of(engine).items():
        patch(layer, index)
        if isinstance(layer, Engaged):
            layer.engines = [engine]
    return outcome_of(engine, train_and_move(engine, batches(engine), moves, 4))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16 zero1", marks=pytest.mark.nightly)])
def test_layers_arrive_as_they_left(precision: str) -> None:
    case = Case(start=(0, 7, LAYERS), precision=precision)
    moves = [[0, 1, LAYERS], [0, LAYERS - 1, LAYERS], [0, 1, LAYERS]]
    still, moved = run_each(2, train, (case, []), (case, moves))
    check_moves_changed_nothing(still, moved)


# -- all that a layer may have become -----------------------------------------------------------------


def draw() -> list[float]:
    return [torch.rand(1).item(), random.random(), np.random.rand()]


class Everything(Block):
    """A layer that holds one of everything. It draws random numbers whenever it is built, pickled, loaded or copied."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        self.extra = random.random()

    def __getstate__(self) -> dict[str, Any]:
        draw()
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        draw()
        super().__setstate__(state)

    def get_extra_state(self) -> dict[str, float]:
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.extra = state["extra"]


class BuiltAgain(Everything):
    """One that cannot be pickled, so that it is built where it arrives. Only its extra state says what it holds."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.set_extra_state({"extra": self.extra})

    def get_extra_state(self) -> dict[str, float]:
        return {"extra": self.held()}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.held = lambda: state["extra"]


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def change_everything(layer: Any) -> None:
    layer.table = nn.Parameter(torch.randn(3, 2, dtype=torch.float64).t(), requires_grad=False)
    layer.mask[2] = False
    layer.scratch.fill_(5.0)
    layer.set_extra_state({"extra": 9.0})
    layer.training = layer.down.training = False
    layer.note = {"kept": [1, 2]}
    layer.corner = layer.up.weight.detach()[1:]  # a view
    layer.up.weight.mark = "marked"
    layer.up.weight.register_hook(halve)
    layer.norm.bias.grad = torch.arange(float(WIDTH), device=layer.norm.bias.device)


def everything_in(layer: Any) -> dict[str, Any]:
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers()), "corner": layer.corner}
    return {
        "tensors": {n: (t.shape, t.dtype, t.stride(), t.requires_grad, raw(t)) for n, t in tensors.items()},
        "gradients": {n: raw(p.grad) for n, p in layer.named_parameters() if p.grad is not None},
        "saved": list(layer.state_dict()),
        "modes": [part.training for part in layer.modules()],
        "values": (
            layer.get_extra_state(),
            layer.note,
            layer.up.weight.mark,
            list(layer.up.weight._backward_hooks.values()),
        ),
        "view": layer.corner.data_ptr() - layer.up.weight.data_ptr(),
    }


def send_everything(kind: type[nn.Module]) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Move a layer from stage 0 to stage 1. Return what it is, and what this rank's generators then draw."""
    engine = build(Case(start=(0, 2, 3)), lambda _: [LayerSpec(Embedding, 1), LayerSpec(kind, 1), LayerSpec(Head, 2)])
    engine.train_batch(batches(engine))
    found: dict[str, Any] = {}
    if engine.stage_id == 0:
        change_everything(layers_of(engine)[1])
        found = everything_in(layers_of(engine)[1])
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    engine.rebalance([0, 1, 3])
    draws = torch.rand(1).item(), random.random(), np.random.rand()
    return found or everything_in(layers_of(engine)[1]), draws


@pytest.mark.parametrize("kind", [Everything, BuiltAgain])
def test_a_layer_arrives_as_what_it_has_become(kind: type[nn.Module]) -> None:
    (left, draws), (arrived, draws_there) = run(2, send_everything, kind)
    assert arrived == left
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    assert draws == draws_there == (torch.rand(1).item(), random.random(), np.random.rand())


# -- layers that do not travel ------------------------------------------------------------------------


class Delegating:
    """An object that asks another for what it lacks, and asks for ever while it has none."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Settings(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Failure(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


class Forgetful:
    """An object that loses an attribute without saying so."""

    __slots__ = ("kept", "lost")

    def __init__(self) -> None:
        self.kept, self.lost = 1, 2

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Forgetful._made, (self.kept, getattr(self, "lost", None))

    @staticmethod
    def _made(kept: int, lost: int | None) -> Forgetful:
        new = Forgetful.__new__(Forgetful)
        new.kept = kept
        return new


def add_settings(layer: nn.Module) -> None:
    settings = Settings(width=3)
    settings.source = "file"
    layer.settings = settings  # type: ignore[assignment]


def only_here(layer: nn.Module) -> None:
    """Give a layer an object of a class that the other rank lacks."""
    module = types.ModuleType("only_on_this_rank")
    sys.modules[module.__name__] = module
    exec("class Thing: pass", vars(module))
    layer.thing = vars(module)["Thing"]()  # type: ignore[assignment]


def replace_lambda(layer: nn.Module) -> None:
    layer.activation = lambda hidden: torch.sin(hidden)  # type: ignore[assignment]


def patch_by_lambda(layer: nn.Module) -> None:
    old = layer.forward
    layer.forward = lambda hidden: old(hidden) * 0.5  # type: ignore[method-assign]


def hook_by_lambda(layer: nn.Module) -> None:
    layer.up.register_forward_hook(lambda module, inputs, output: output * 2)  # type: ignore[union-attr]


class Lambda(Activated):
    """A layer with a lambda."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.activation = lambda hidden: torch.tanh(hidden)


REFUSED: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "delegating": (lambda layer: setattr(layer, "proxy", Delegating(layer.up)), "proxy"),
    "settings": (add_settings, "settings"),
    "exception": (lambda layer: setattr(layer, "failure", Failure(3, "no")), "failure"),
    "forgetful": (lambda layer: setattr(layer, "forgetful", Forgetful()), "forgetful"),
    "only here": (only_here, "only_on_this_rank"),
    "hook": (hook_by_lambda, "up._forward_hooks[0]"),
    "forward": (patch_by_lambda, "forward"),
    "lambda": (replace_lambda, "activation"),
    "csc": (lambda layer: setattr(layer, "odd", torch.eye(2).to_sparse_csc()), "torch.sparse_csc"),
    "given": (patch_by_lambda, "forward"),
}


@contextmanager
def undone(layer: nn.Module) -> Iterator[None]:
    """Let ``layer`` be afterwards what it was."""
    parts = [(part, dict(vars(part))) for part in layer.modules()]
    tables = [(table, dict(table)) for _, own in parts for table in own.values() if isinstance(table, dict)]
    yield
    for part, own in parts:
        vars(part).clear()
        vars(part).update(own)
    for table, held in tables:
        table.clear()
        table.update(held)


def refused_specs(_: Case) -> list[Any]:
    return [LayerSpec(Embedding, 1), Block(0), LayerSpec(Lambda, 1), LayerSpec(Block, 2), LayerSpec(Head, 2)]


def refuse(moves: bool) -> dict[str, Any]:
    """Train, and before each batch make a layer one that cannot be sent, as which it then must not be sent."""
    engine = build(Case(start=(0, 3, 5)), refused_specs)
    data, losses, found = batches(engine), [], {}
    for name, (change, _) in REFUSED.items():
        losses.append(engine.train_batch(data).item())
        if not moves:
            continue
        layer = layers_of(engine).get(1 if name == "given" else 2, nn.Module())
        with undone(layer):
            if engine.stage_id == 0:
                change(layer)
            try:
                engine.rebalance([0, 1, 5])
            except MigrationError as error:
                found[name] = (error.harmless, str(error))
    if moves:
        engine.rebalance([0, 1, 5])
    return {**outcome_of(engine, losses), "found": found}


def test_layers_that_would_not_arrive_as_they_left_stay() -> None:
    still, moved = run_each(2, refuse, (False,), (True,))
    check_moves_changed_nothing(still, moved)
    for rank in moved:
        assert rank["found"].keys() == REFUSED.keys()
        for name, (harmless, message) in rank["found"].items():
            assert harmless and REFUSED[name][1] in message and "No layer has moved" in message, (name, message)


# -- callbacks for layers that arrive -----------------------------------------------------------------


def complete(engine: Any, number: int, layer: nn.Module) -> None:
    """Patch a layer as the program did; ``layers`` tells on which ranks it was called."""
    if isinstance(layer, Block):
        patch_by_lambda(layer)
        hook_by_lambda(layer)


def train_completed(moves: list[list[int]]) -> dict[str, Any]:
    engine = build(Case(start=(0, 3, 5)), refused_specs)
    for number, layer in layers_of(engine).items():
        complete(engine, number, layer)
    engine.on_layer_arrival(partial(complete, engine))
    return outcome_of(engine, train_and_move(engine, batches(engine), moves, 4))


def test_a_callback_sets_again_what_cannot_be_sent() -> None:
    still, moved = run_each(2, train_completed, ([],), ([[0, 1, 5], [0, 4, 5], [0, 1, 5]],))
    check_moves_changed_nothing(still, moved)


def incomplete() -> tuple[bool, str]:
    engine = build(Case(start=(0, 3, 5)), refused_specs)
    for layer in layers_of(engine).values():
        if isinstance(layer, Block):
            patch_by_lambda(layer)
    engine.on_layer_arrival(lambda number, layer: None)
    engine.train_batch(batches(engine))
    with pytest.raises(MigrationError) as refusal:
        engine.rebalance([0, 1, 5])
    return refusal.value.harmless, str(refusal.value)


def test_a_callback_that_leaves_something_out_is_refused() -> None:
    [results] = run_each(2, incomplete, ())
    for harmless, message in results:
        assert harmless and "forward of a" in message and "is not there" in message


# -- a parameter group for each parameter -------------------------------------------------------------


def train_in_groups(precision: str, moves: list[list[int]]) -> dict[str, Any]:
    """Train with a group for each parameter, of which the stages have different numbers, and a scheduler."""
    case = Case(precision=precision, groups="each", scheduler=True)
    engine = build(case)
    losses = train_and_move(engine, batches(engine), moves, 3)
    return {**outcome_of(engine, losses), "groups": len(engine.optimizer.param_groups)}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16 zero1"])
def test_equal_parameter_groups_are_one(precision: str) -> None:
    moves = [[0, 1, 8], [0, 7, 8]]
    still, moved = run_each(2, train_in_groups, (precision, []), (precision, moves))
    check_moves_changed_nothing(still, moved)
    assert {rank["groups"] for rank in moved} == {2}

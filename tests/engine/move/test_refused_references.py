"""References that a move would break are refused by name; attributes of the rank stay on the rank."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy
import pytest
import torch
from deepspeed.pipe import LayerSpec

from ds_dynmo.errors import ConfigError, MigrationError
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import Block, Embedding, Head, loss, scale
from tests.support.training import Warnings, batches, build, layers_of

pytestmark = pytest.mark.ranks


class Counter:
    """An object of the program that no other rank can find by name."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()


@functools.cache
def the_counter() -> Counter:
    return Counter()


class Counting(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.counter = the_counter()
        self.peeks: list[Any] = []


COUNTERS: dict[str, Counter] = {}


class CountingInADict(Counting):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        COUNTERS["the"] = self.counter


class CountingInAClass(Counting):
    held: Counter

    def __init__(self, index: int) -> None:
        super().__init__(index)
        CountingInAClass.held = self.counter


class Peeking(Block):
    """A block that may refer to anything."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.peeks: list[Any] = []


class Declared(Counting):
    rank_attributes = ("counter",)


class BuiltOnce(Block):
    """A block that cannot be pickled, whose constructor draws and then fails when it is built again."""

    fails = False

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.function = lambda hidden: hidden
        if self.fails:
            random.random(), numpy.random.rand(), torch.rand(1)
            raise RuntimeError("built once before")


KINDS = {
    "counter": Counting,
    "in a global dict": CountingInADict,
    "in a class": CountingInAClass,
    "declared": Declared,
    "constructor": BuiltOnce,
}
SHARED = "layer 2's counter, a tests.engine.move.test_refused_references.Counter, is shared with layer 1"
PARTITIONS = {1: [0, 7], 2: [0, 4, 7]}  # by stages; measured times would move other layers from run to run


def random_states() -> list[str]:
    return [repr(random.getstate()), repr(numpy.random.get_state()), repr(torch.get_rng_state().tolist())]


def move_or_refuse(how: str, rank_attributes: tuple[str, ...]) -> dict[str, Any]:
    """Move layers that share a counter, or that refer to a tensor of another layer or to one without values."""
    kind = KINDS.get(how, Peeking)
    case = Case(stages=2, blocks=4, dynmo={"interval": 0, "rank_attributes": list(rank_attributes)})
    engine = build(
        case, lambda _: [LayerSpec(Embedding, 1), *[LayerSpec(kind, i) for i in range(5)], LayerSpec(Head, 2)]
    )
    if kind is Peeking and engine.stage_id == 0:
        weight, layer = layers_of(engine)[1].up.weight, layers_of(engine)[2]
        peeks = {"weight": weight, "view": {"of": weight.detach()[0]}, "meta": torch.empty(3, device="meta")}
        if how == "left behind":
            layers_of(engine)[1].peeks.append(layer.up.weight)
        else:
            layer.peeks.append(peeks[how])
    data = batches(engine)
    losses = [engine.train_batch(data).item()]
    BuiltOnce.fails = True
    before = random_states()
    try:
        engine.rebalance([0, 2, 7])
        message, harmless = "moved", False
    except MigrationError as error:
        message, harmless = str(error), error.harmless
    drawn = random_states() != before
    losses.append(engine.train_batch(data).item())
    counters = [m.counter for m in layers_of(engine).values() if isinstance(m, Counting)]
    return {
        "message": message,
        "harmless": harmless,
        "drawn": drawn,
        "partition": engine.partition,
        "counters": [counter is the_counter() for counter in counters],
        "losses": losses,
    }


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("counter", SHARED),
        ("in a global dict", SHARED),
        ("in a class", SHARED),
        ("counter", '"rank_attributes": ["counter"] in the "dynmo" section'),
        ("weight", "peeks[0] is up.weight of layer 1"),
        ("view", "peeks[0]['of'] is up.weight of layer 1"),
        ("meta", "peeks[0] is on the meta device"),
        ("left behind", "layer 1 stays and its peeks[0] is up.weight of layer 2"),
        ("constructor", "built once before"),
    ],
)
@pytest.mark.every_variant
def test_references_that_would_become_copies_are_refused_by_name(how: str, expected: str) -> None:
    rank = 1 if how == "constructor" else 0  # the receiver builds a layer that cannot be pickled
    for found in run(2, move_or_refuse, how, ()):
        assert expected in found["message"] and f"failed on ranks [{rank}], first with" in found["message"]
        assert found["harmless"] and found["partition"] == [0, 4, 7]
        assert len(found["losses"]) == 2 and not found["drawn"]


def repack_or_refuse() -> tuple[bool, str, int]:
    """Re-pack to one stage, first with a layer that cannot leave.

    Returns:
        Whether the refusal was harmless, in the same world; its message; and the stages in the end.
    """
    specs = [LayerSpec(Embedding, 1), *[LayerSpec(Peeking, i) for i in range(5)], LayerSpec(Head, 2)]
    engine = build(Case(stages=2, blocks=4, dynmo={"interval": 0}), lambda _: specs)
    data = batches(engine)
    engine.train_batch(data)
    held = [layer.peeks for layer in layers_of(engine).values() if isinstance(layer, Peeking)]
    for peeks in held:
        peeks.append(torch.empty(3, device="meta"))
    with pytest.raises(MigrationError) as refused:
        engine.repack(1)
    harmless = refused.value.harmless and not engine.stage.comm.worlds_left
    for peeks in held:
        peeks.clear()
    engine.train_batch(data)
    engine.repack(1)
    if not engine.released:
        engine.train_batch(data)
    return harmless, str(refused.value), engine.num_stages


def test_layers_that_cannot_leave_are_refused_before_the_old_world_ends() -> None:
    (harmless, message, stages), _ = run(2, repack_or_refuse)
    assert "peeks[0] is on the meta device" in message and harmless and stages == 1


@pytest.mark.parametrize(
    ("how", "block"),
    [("counter", ("counter",)), ("in a global dict", ("counter",)), ("in a class", ("counter",)), ("declared", ())],
)
def test_attributes_of_the_rank_stay_on_the_rank(how: str, block: tuple[str, ...]) -> None:
    for found in run(2, move_or_refuse, how, block):
        assert found["message"] == "moved" and found["partition"] == [0, 2, 7]
        assert found["counters"] and all(found["counters"])


# -- functions that no layer holds --------------------------------------------------------------------


class Counts:
    """An entry of the layer list whose state comes into being in training."""

    calls = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden * (1 + self.calls % 3)


class Borrowed(Block):
    def transposed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.down.weight.mT @ self.up.weight.mT


PENALIZED: dict[str, torch.nn.Module] = {}


def penalty(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return loss(logits, labels) + sum(p.square().sum() for layer in PENALIZED.values() for p in layer.parameters())


def specs_with(how: str) -> list[Any]:
    block = Borrowed(3)
    functions = {"counts": Counts(), "bound method": block.transposed}
    function = functions.get(how, scale)
    return [LayerSpec(Embedding, 1), block, *(LayerSpec(Block, i) for i in range(4)), function, LayerSpec(Head, 2)]


def move_what_others_use(how: str, moves: bool, background: bool) -> dict[str, Any]:
    """Train, and try to move a layer that something else uses, or a function that has changed."""
    PENALIZED.clear()
    try:
        engine = build(Case(stages=2, start=(0, 4, 8)), lambda _: specs_with(how))
    except ConfigError as error:
        return {"message": str(error)}
    message, warnings = "moved", Warnings()
    if how == "loss" and engine.is_last_stage():
        PENALIZED["first of the stage"] = layers_of(engine)[4]
        engine.module.loss_fn = penalty
    if how == "callback" and engine.is_last_stage():
        weight = layers_of(engine)[4].up.weight
        engine.before_step(lambda: weight.grad.mul_(0.5))
    data, losses = batches(engine), []
    for step in range(3):
        if moves and step == 1:
            try:
                engine.rebalance([0, 7, 8], background=background)
            except MigrationError as error:
                message = str(error)
        losses.append(engine.train_batch(data).item())
    said = [*warnings.messages, message] if background else [message]
    return {"message": "".join(said), "losses": losses, "partition": engine.partition}


USED = {
    "bound method": "layers[6] (Borrowed.transposed) is no nn.Module and uses self.down.weight, which is down.weight",
    "counts": "layers[6] is no nn.Module and reads self.calls, which changed in training",
    "loss": "loss_fn uses PENALIZED['first of the stage'], which is layer 4, which leaves",
    "callback": "of before_step uses weight, which is up.weight of layer 4, which leaves",
}


def test_what_a_function_uses_does_not_leave_it() -> None:
    calls = [(how, *flags) for how in USED for flags in ((False, False), (True, False), (True, True))]
    found = dict(zip(calls, run_each(2, move_what_others_use, *calls), strict=True))
    for (how, moves, background), results in found.items():
        if how == "bound method":
            assert all(USED[how] in result["message"] for result in results)
        elif moves:
            assert USED[how] in results[0]["message"], (how, background, results[0]["message"])
            assert [result["partition"] for result in results] == [[0, 4, 8]] * 2
            assert results[0]["losses"] == found[how, False, False][0]["losses"]

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


COUNTERS: dict[str, Counter] = {}


class Peeking(Block):
    """A block that may refer to anything."""

    fails = False

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.peeks: list[Any] = []


class BuiltOnce(Peeking):
    """A block that cannot be pickled, whose constructor draws and then fails when it is built again."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.function = lambda hidden: hidden
        if self.fails:
            random.random(), numpy.random.rand(), torch.rand(1)
            raise RuntimeError("built once before")


class Counting(Block):
    """A block with two counters, one of which its class declares to be the rank's."""

    rank_attributes = ("declared",)
    held: Counter

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.counter = self.declared = the_counter()


SHARED = "layer 2's counter, a tests.engine.move.test_refused_references.Counter, is shared with layer 1"
REFUSED = {
    "counter": [SHARED, '"rank_attributes": ["counter"] in the "dynmo" section'],
    "view": ["peeks[0]['of'] is up.weight of layer 1"],
    "meta": ["peeks[0] is on the meta device"],
    "left behind": ["layer 1 stays and its peeks[0] is up.weight of layer 2"],
    "constructor": ["built once before"],
}


def random_states() -> list[str]:
    return [repr(random.getstate()), repr(numpy.random.get_state()), repr(torch.get_rng_state().tolist())]


def refer(how: str, stays: Any, leaves: Any) -> None:
    """Let two layers share a counter, or one refer to a tensor of the other, or to one without values."""
    if how == "left behind":
        stays.peeks.append(leaves.up.weight)
    elif how == "view":
        leaves.peeks.append({"of": stays.up.weight.detach()[0]})
    elif how == "meta":
        leaves.peeks.append(torch.empty(3, device="meta"))
    elif how == "counter":
        stays.counter = leaves.counter = the_counter()


def forget(*layers: Any) -> None:
    """Undo what :func:`refer` did."""
    for layer in layers:
        layer.peeks.clear()
        vars(layer).pop("counter", None)


def move_and_be_refused(moves: bool) -> tuple[dict[str, Any], list[float], list[int]]:
    """Train, and before each batch try to move a layer that cannot; in the end move it. Return what was said."""
    kinds = [Peeking, BuiltOnce, *[Peeking] * 3]
    specs = [LayerSpec(Embedding, 1), *(LayerSpec(kind, i) for i, kind in enumerate(kinds)), LayerSpec(Head, 2)]
    engine = build(Case(stages=2, blocks=4), lambda _: specs)
    data, losses, found = batches(engine), [], {}
    here = layers_of(engine)
    for how in REFUSED:
        losses.append(engine.train_batch(data).item())
        if not moves:
            continue
        if engine.stage_id == 0:
            refer(how, here[1], here[2])
        Peeking.fails = how == "constructor"
        before = random_states()
        with pytest.raises(MigrationError) as refusal:
            engine.rebalance([0, 2, 7])
        found[how] = (str(refusal.value), refusal.value.harmless and random_states() == before, engine.partition)
        Peeking.fails = False
        if engine.stage_id == 0:
            forget(here[1], here[2])
        del refusal
    if moves:
        engine.rebalance([0, 2, 7])
    return found, [*losses, engine.train_batch(data).item()], engine.partition


def test_references_that_would_become_copies_are_refused_by_name() -> None:
    still, moved = run_each(2, move_and_be_refused, (False,), (True,))
    for found, losses, partition in moved:
        assert losses == still[0][1] and partition == [0, 2, 7] and found.keys() == REFUSED.keys()
        for how, (message, harmless, stayed) in found.items():
            rank = 1 if how == "constructor" else 0  # the receiver builds a layer that cannot be pickled
            for expected in [*REFUSED[how], f"failed on ranks [{rank}], first with"]:
                assert expected in message, how
            assert harmless and stayed == [0, 4, 7], how


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


def move_counters() -> tuple[list[int], list[bool]]:
    """Move layers whose counters belong to the rank, and are also in a global dict and in a class."""
    COUNTERS["the"] = Counting.held = the_counter()
    specs = [LayerSpec(Embedding, 1), *[LayerSpec(Counting, i) for i in range(5)], LayerSpec(Head, 2)]
    engine = build(Case(blocks=4, dynmo={"interval": 0, "rank_attributes": ["counter"]}), lambda _: specs)
    data = batches(engine)
    engine.train_batch(data)
    engine.rebalance([0, 2, 7])
    engine.train_batch(data)
    held = [one for m in layers_of(engine).values() if isinstance(m, Counting) for one in (m.counter, m.declared)]
    return engine.partition, [counter is the_counter() for counter in held]


def test_attributes_of_the_rank_stay_on_the_rank() -> None:
    for partition, own in run(2, move_counters):
        assert partition == [0, 2, 7] and own and all(own)


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


def move_what_others_use(how: str, moves: bool) -> dict[str, Any]:
    """Train, and try to move a layer that something else uses, or a function that has changed."""
    PENALIZED.clear()
    engine = build(Case(stages=2, start=(0, 4, 8)), lambda _: specs_with(how))
    warnings = Warnings()
    if how == "loss" and engine.is_last_stage():
        PENALIZED["first of the stage"] = layers_of(engine)[4]
        engine.module.loss_fn = penalty
    if how == "callback" and engine.is_last_stage():
        weight = layers_of(engine)[4].up.weight
        engine.before_step(lambda: weight.grad.mul_(0.5))
    data, losses, message = batches(engine), [], ""
    for step in range(3):
        if moves and step == 0:  # it has not run yet, and changes in this batch
            engine.rebalance([0, 7, 8], background=True)
        if moves and step == 1:
            with pytest.raises(MigrationError) as refusal:
                engine.rebalance([0, 7, 8])
            message = str(refusal.value)
        if moves and step == 2:
            engine.rebalance([0, 7, 8], background=True)
        losses.append(engine.train_batch(data).item())
    return {"said": message, "warned": "".join(warnings.messages), "losses": losses, "partition": engine.partition}


USED = {
    "counts": "layers[6] is no nn.Module and reads self.calls, which changed in training",
    "loss": "loss_fn uses PENALIZED['first of the stage'], which is layer 4, which leaves",
    "callback": "of before_step uses weight, which is up.weight of layer 4, which leaves",
}


def test_what_a_function_uses_does_not_leave_it() -> None:
    found = iter(run_each(2, move_what_others_use, *((how, moves) for how in USED for moves in (False, True))))
    for how, still, moved in zip(USED, found, found, strict=True):
        assert USED[how] in moved[0]["said"] and USED[how] in moved[0]["warned"], (how, moved[0])
        assert [rank["partition"] for rank in moved] == [[0, 4, 8]] * 2, how
        assert moved[0]["losses"] == still[0]["losses"], how


def refused_at_initialize() -> str:
    with pytest.raises(ConfigError) as refusal:
        build(Case(stages=2), lambda _: specs_with("bound method"))
    return str(refusal.value)


def test_a_function_that_holds_a_layers_weights_is_refused_at_initialize() -> None:
    expected = "layers[6] (Borrowed.transposed) is no nn.Module and uses self.down.weight, which is down.weight"
    assert all(expected in message for message in run(2, refused_at_initialize))

"""What layers share with others is the destination's own after a move, as if they had been built there: no copy."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.errors import MigrationError
from tests.distributed.harness import run, run_each
from tests.distributed.support.configs import Case
from tests.distributed.support.models import WIDTH, Block, Embedding, Head, seeded
from tests.distributed.support.training import (
    batches,
    build,
    check_moves_changed_nothing,
    layers_of,
    outcome_of,
    train_and_move,
)

STEPS = 6
MOVES = [[0, 1, 7], [0, 5, 7], [0, 2, 7], [0, 6, 7], [0, 3, 7]]
_GLOBAL_ARGS: Namespace | None = None


def get_args() -> Namespace:
    assert _GLOBAL_ARGS is not None
    return _GLOBAL_ARGS


class MegatronBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._args = get_args()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self._args.scale


def megatron(case: Case) -> list[Any]:
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = Namespace(scale=1.0, rank=torch.distributed.get_rank())
    return [LayerSpec(Embedding, 1), *[LayerSpec(MegatronBlock, i) for i in range(5)], LayerSpec(Head, 2)]


class WholeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        with torch.device("meta"):
            self.blocks = nn.ModuleList([Block(i) for i in range(5)])


class DecoderPipe(nn.Module):
    def __init__(self, model: WholeModel, index: int) -> None:
        super().__init__()
        original = model.blocks[index]
        original.to_empty(device="cpu")
        for number, parameter in enumerate(original.parameters()):
            parameter.data.copy_(seeded(parameter.shape, 10 * index + number))
        self.orig = original
        self.model = [model]  # in a list, so that it is no submodule

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.orig(hidden) * self.model[0].scale  # type: ignore[no-any-return]


_models: list[WholeModel] = []  # of this rank's program, which changes it


def whole_model(case: Case) -> list[Any]:
    _models[:] = [WholeModel()]
    specs = [LayerSpec(DecoderPipe, _models[0], i) for i in range(5)]
    return [LayerSpec(Embedding, 1), *specs, LayerSpec(Head, 2)]


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.1, 1.0, WIDTH), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.angles.cos().to(hidden.dtype)


class RotaryBlock(Block):
    def __init__(self, index: int, rotary: Rotary, settings: dict[str, float]) -> None:
        super().__init__(index)
        self.rotary = rotary
        self.settings = settings

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rotary(super().forward(hidden)) * self.settings["scale"]  # type: ignore[no-any-return]


_settings: list[dict[str, float]] = []


def shared_part(case: Case) -> list[Any]:
    _settings[:] = [{"scale": 1.0}]
    rotary = Rotary()
    return [Embedding(1), *[RotaryBlock(i, rotary, _settings[0]) for i in range(5)], Head(2)]


def shared_part_in_specs(case: Case) -> list[Any]:
    _settings[:] = [{"scale": 1.0}]
    rotary = Rotary()
    specs = [LayerSpec(RotaryBlock, i, rotary, _settings[0]) for i in range(5)]
    return [LayerSpec(Embedding, 1), *specs, LayerSpec(Head, 2)]


MODELS: dict[str, Callable[[Case], list[Any]]] = {
    "megatron": megatron,
    "whole_model": whole_model,
    "shared_part": shared_part,
    "shared_part_in_specs": shared_part_in_specs,
}


class SettledEmbedding(Embedding):
    def __init__(self, seed: int, settings: dict[str, float]) -> None:
        super().__init__(seed)
        self.settings = settings


def settled_head(embedding: SettledEmbedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.weight.t() * embedding.settings["scale"]


def tied_with_settings(case: Case) -> list[Any]:
    _settings[:] = [{"scale": 1.0}]
    tie = partial(TiedLayerSpec, "tie", SettledEmbedding, 1, _settings[0], tied_weight_attr="weight")
    return [tie(), *[LayerSpec(Block, i) for i in range(5)], tie(forward_fn=settled_head)]


MODELS["tied_with_settings"] = tied_with_settings


class AroundModule(nn.Module):
    """A tied layer around a module that the program made."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.inner(hidden))


def back(layer: AroundModule, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + hidden @ layer.inner.weight.t() + layer.inner.bias


def _around_a_module(first: type, last: type, **options: Any) -> list[Any]:
    _settings[:] = [{"scale": 1.0}]
    inner = nn.Linear(WIDTH, WIDTH)
    for number, parameter in enumerate(inner.parameters()):
        parameter.data.copy_(seeded(parameter.shape, number))
    tied = ["inner.weight", "inner.bias"]
    tie = TiedLayerSpec("tie", first, inner, tied_weight_attr=tied)
    tied_to_it = TiedLayerSpec("tie", last, inner, tied_weight_attr=tied, **options)
    blocks = [LayerSpec(Block, i) for i in range(3)]
    return [LayerSpec(Embedding, 1), blocks[0], tie, blocks[1], tied_to_it, blocks[2], LayerSpec(Head, 2)]


def tied_around_a_module(case: Case) -> list[Any]:
    return _around_a_module(AroundModule, AroundModule, forward_fn=back)


MODELS["tied_around_a_module"] = tied_around_a_module


class BackAroundModule(AroundModule):
    """Of another class, so that it is a module of its own."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return back(self, hidden)


def tied_classes_around_a_module(case: Case) -> list[Any]:
    return _around_a_module(AroundModule, BackAroundModule)


MODELS["tied_classes_around_a_module"] = tied_classes_around_a_module


def change(what: str) -> None:
    """What the program changes in mid-run, on every rank."""
    if what == "megatron":
        get_args().scale = 0.5
    elif what == "whole_model":
        _models[0].scale = 0.5
    else:
        _settings[0]["scale"] = 0.5


def train(what: str, precision: str, moves: list[list[int]]) -> dict[str, Any]:
    """Train, moving after every batch; what layers share is changed in the middle."""
    engine = build(Case(stages=2, blocks=4, precision=precision), MODELS[what])

    def after(step: int) -> None:
        if step == 2:
            change(what)

    losses = train_and_move(engine, batches(engine), moves, STEPS, after)
    parts = [part for module in layers_of(engine).values() for part in module.modules()]
    rotaries = {id(part) for part in parts if isinstance(part, Rotary)}
    return {**outcome_of(engine, losses), "rotaries": len(rotaries)}


@pytest.mark.parametrize(
    ("what", "precision"),
    [
        *((what, "fp32") for what in MODELS),
        *(
            pytest.param(what, precision, marks=() if what in models else pytest.mark.fuzz)
            for precision, models in {
                "bf16": ("megatron", "tied_with_settings"),
                "bf16 zero1": ("shared_part", "tied_around_a_module"),
            }.items()
            for what in MODELS
        ),
    ],
)
def test_a_move_at_every_step_changes_nothing(what: str, precision: str) -> None:
    still, moved = run_each(2, train, (what, precision, []), (what, precision, MOVES))
    check_moves_changed_nothing(still, moved)
    if what.startswith("shared_part"):
        assert [r["rotaries"] for r in moved] == [1, 1]


def _set_back(what: str) -> None:
    if what == "megatron":
        get_args().scale = 1.0
    elif what == "whole_model":
        _models[0].scale = 1.0
    else:
        _settings[0]["scale"] = 1.0


def save_and_load(what: str, stages: int, folder: str) -> list[float]:
    """Save at two stages, after what is shared was changed and layers moved, and go on; or load at so many stages."""
    engine = build(Case(stages=stages, blocks=4), MODELS[what])
    data = batches(engine)
    if stages == 2:
        for move in MOVES[:2]:
            engine.train_batch(data)
            engine.rebalance(move)
        change(what)
        engine.save_checkpoint(folder)
    else:
        change(what)
        engine.load_checkpoint(folder)
        for _ in range(2 * engine.micro_batches):
            next(data)
    losses = [engine.train_batch(data).item() for _ in range(2)]
    _set_back(what)
    return [*losses, engine.train_batch(data).item()]


@pytest.mark.parametrize("what", MODELS)
def test_saved_and_loaded_at_another_number_of_stages(what: str, tmp_path: Path) -> None:
    went_on = run(2, save_and_load, what, 2, str(tmp_path))
    loaded = run(3, save_and_load, what, 3, str(tmp_path))
    assert loaded[0] == went_on[0]


class Counter:
    """Made by the program where no other rank finds it."""

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


class Peeking(Block):
    """May refer to anything."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.peeks: list[Any] = []


class Declared(Counting):
    rank_attributes = ("counter",)


KINDS = {"counter": Counting, "declared": Declared}


def move_or_refuse(how: str, rank_attributes: tuple[str, ...]) -> dict[str, Any]:
    """Layers 1 to 5 share a counter, or layer 2 refers to a tensor that is not its own, or 1 to one of layer 2's."""
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
    try:
        engine.rebalance([0, 2, 7])
        message, harmless = "moved", False
    except MigrationError as error:
        message, harmless = str(error), error.harmless
    losses.append(engine.train_batch(data).item())
    counters = [m.counter for m in layers_of(engine).values() if isinstance(m, Counting)]
    return {
        "message": message,
        "harmless": harmless,
        "partition": engine.partition,
        "counters": [counter is the_counter() for counter in counters],
        "losses": losses,
    }


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("counter", "counter, a tests.distributed.test_sharing.Counter, is shared with layer 1"),
        ("weight", "peeks[0] is up.weight of layer 1"),
        ("view", "peeks[0]['of'] is up.weight of layer 1"),
        ("meta", "peeks[0] is on the meta device"),
        ("left behind", "layer 1 stays and its peeks[0] is up.weight of layer 2"),
    ],
)
def test_what_would_be_a_copy_is_refused_by_name(how: str, expected: str) -> None:
    for found in run(2, move_or_refuse, how, ()):
        assert expected in found["message"] and found["message"].startswith("ranks [0] could not get")
        assert found["harmless"] and found["partition"] == [0, 4, 7]
        assert len(found["losses"]) == 2


def _refusal_to_repack(engine: Any, stages: int, stay: bool) -> tuple[bool, str]:
    """Of layers that refer to a tensor without values; ``stay``: on the first stage alone."""
    layers = [layer for layer in layers_of(engine).values() if isinstance(layer, Peeking)]
    held = [layer.peeks for layer in layers if not (stay and engine.stage_id)]
    for peeks in held:
        peeks.append(torch.empty(3, device="meta"))
    try:
        engine.repack(stages)
    except MigrationError as error:
        return error.harmless, str(error)
    finally:
        for peeks in held:
            peeks.clear()
    return False, "repacked"


def repack_or_refuse(freed_ranks: str) -> dict[str, Any]:
    """To one of two stages and back, with layers that cannot leave, and with these mended: messages, copies."""
    dynmo = {"interval": 0, "repack": {"release": "park", "freed_ranks": freed_ranks}}
    specs = [LayerSpec(Embedding, 1), *[LayerSpec(Peeking, i) for i in range(5)], LayerSpec(Head, 2)]
    engine = build(Case(stages=2, blocks=4, micro_batches=4, dynmo=dynmo), lambda _: specs)
    data, refusals = batches(engine), []
    for stages in (1, 2):
        engine.train_batch(data)
        if freed_ranks == "replicas" or stages == 2:  # what stays of one stage is copied, or does not leave
            refusals.append(_refusal_to_repack(engine, stages, stay=stages == 1))
        engine.train_batch(data)
        engine.repack(stages)
        if engine.released:
            engine.wait_for_recall()
            break
    engine.train_batch(data)
    return {"refusals": refusals, "stages": engine.num_stages, "copies": engine.repacks[0].copies}


@pytest.mark.parametrize(("freed_ranks", "times", "copies"), [("release", 1, 1), ("replicas", 2, 2)])
def test_what_cannot_leave_is_refused_before_a_world_is_given_up(freed_ranks: str, times: int, copies: int) -> None:
    first, *_ = run(2, repack_or_refuse, freed_ranks)
    assert first["stages"] == 2 and first["copies"] == copies and len(first["refusals"]) == times
    for harmless, message in first["refusals"]:
        assert harmless and "peeks[0] is on the meta device" in message


@pytest.mark.parametrize(("how", "block"), [("counter", ("counter",)), ("declared", ())])
def test_attributes_that_belong_to_the_rank(how: str, block: tuple[str, ...]) -> None:
    for found in run(2, move_or_refuse, how, block):
        assert found["message"] == "moved" and found["partition"] == [0, 2, 7]
        assert found["counters"] and all(found["counters"])


def train_on_one_stage(changes: bool) -> list[float]:
    """Both uses of a tied layer on one stage; what they share is changed in the middle, or not."""
    engine = build(Case(stages=1, blocks=4), tied_with_settings)
    data = batches(engine)
    losses = [engine.train_batch(data).item()]
    if changes:
        _settings[0]["scale"] = 0.5
    return [*losses, engine.train_batch(data).item()]


def test_a_later_use_of_a_tied_layer_shares_what_the_first_does() -> None:
    [[same], [changed]] = run_each(1, train_on_one_stage, (False,), (True,))
    assert same[0] == changed[0] and same[1] != changed[1]

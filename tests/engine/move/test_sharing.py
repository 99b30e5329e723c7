"""After a move, what a layer shares with others is the destination's own object, as if built there, not a copy."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import WIDTH, Block, Embedding, Head, seeded
from tests.support.training import batches, build, check_moves_changed_nothing, layers_of, outcome_of, train_and_move

pytestmark = pytest.mark.ranks

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
        self.model = [model]  # in a list, so that it is not a submodule

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.orig(hidden) * self.model[0].scale  # type: ignore[no-any-return]


_models: list[WholeModel] = []  # this rank's, which the program changes


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
    """A tied layer around a module that the program built."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.inner(hidden))


def back(layer: AroundModule, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + hidden @ layer.inner.weight.t() + layer.inner.bias


def tied_around_a_module(case: Case) -> list[Any]:
    _settings[:] = [{"scale": 1.0}]
    inner = nn.Linear(WIDTH, WIDTH)
    for number, parameter in enumerate(inner.parameters()):
        parameter.data.copy_(seeded(parameter.shape, number))
    tie = partial(TiedLayerSpec, "tie", AroundModule, inner, tied_weight_attr=["inner.weight", "inner.bias"])
    blocks = [LayerSpec(Block, i) for i in range(3)]
    return [LayerSpec(Embedding, 1), blocks[0], tie(), blocks[1], tie(forward_fn=back), blocks[2], LayerSpec(Head, 2)]


MODELS["tied_around_a_module"] = tied_around_a_module


def change(what: str) -> None:
    """Change shared objects during the run, on every rank."""
    if what == "megatron":
        get_args().scale = 0.5
    elif what == "whole_model":
        _models[0].scale = 0.5
    else:
        _settings[0]["scale"] = 0.5


def train(what: str, precision: str, moves: list[list[int]]) -> dict[str, Any]:
    """Train, move after every batch, and change what layers share in the middle."""
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
        ("shared_part", "bf16 zero1"),
        *(pytest.param(what, "bf16", marks=pytest.mark.nightly) for what in MODELS),
        *(pytest.param(what, "bf16 zero1", marks=pytest.mark.nightly) for what in MODELS if what != "shared_part"),
    ],
)
@pytest.mark.every_variant
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
    """Save at two stages after changes and moves, and continue; or load at another number of stages and continue."""
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
def test_a_run_resumes_at_another_number_of_stages(what: str, tmp_path: Path) -> None:
    went_on = run(2, save_and_load, what, 2, str(tmp_path))
    loaded = run(3, save_and_load, what, 3, str(tmp_path))
    assert loaded[0] == went_on[0]


def train_on_one_stage(changes: bool) -> list[float]:
    """Train both uses of a tied layer on one stage, with or without a change of what they share."""
    engine = build(Case(stages=1, blocks=4), tied_with_settings)
    data = batches(engine)
    losses = [engine.train_batch(data).item()]
    if changes:
        _settings[0]["scale"] = 0.5
    return [*losses, engine.train_batch(data).item()]


def test_a_later_use_of_a_tied_layer_shares_the_firsts_objects() -> None:
    [[same], [changed]] = run_each(1, train_on_one_stage, (False,), (True,))
    assert same[0] == changed[0] and same[1] != changed[1]

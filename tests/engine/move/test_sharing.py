"""After a move, what a layer shares with others is the destination's own object, as if built there, not a copy."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import WIDTH, Block, Embedding, seeded
from tests.support.training import batches, build, check_moves_changed_nothing, layers_of, outcome_of, train_and_move

pytestmark = pytest.mark.ranks

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


class WholeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        with torch.device("meta"):
            self.blocks = nn.ModuleList([Block(i) for i in range(2)])


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


class SettledEmbedding(Embedding):
    def __init__(self, seed: int, settings: dict[str, float]) -> None:
        super().__init__(seed)
        self.settings = settings


def settled_head(embedding: SettledEmbedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.weight.t() * embedding.settings["scale"]


class AroundModule(nn.Module):
    """A tied layer around a module that the program built."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.inner(hidden))


def back(layer: AroundModule, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + hidden @ layer.inner.weight.t() + layer.inner.bias


def tied_ends() -> list[Any]:
    tie = partial(TiedLayerSpec, "ends", SettledEmbedding, 1, _settings[0], tied_weight_attr="weight")
    return [tie(), tie(forward_fn=settled_head)]


def sharing(case: Case) -> list[Any]:
    """Return 12 layers: two of each kind, which share what the program's globals, modules or layer specs hold."""
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = Namespace(scale=1.0, rank=torch.distributed.get_rank())
    _models[:], _settings[:] = [WholeModel()], [{"scale": 1.0}]
    given, in_specs, inner = Rotary(), Rotary(), nn.Linear(WIDTH, WIDTH)
    for number, parameter in enumerate(inner.parameters()):
        parameter.data.copy_(seeded(parameter.shape, number))
    around = partial(TiedLayerSpec, "around", AroundModule, inner, tied_weight_attr=["inner.weight", "inner.bias"])
    first, last = tied_ends()
    pairs = [
        [
            LayerSpec(MegatronBlock, index),
            LayerSpec(DecoderPipe, _models[0], index),
            RotaryBlock(2 + index, given, _settings[0]),
            LayerSpec(RotaryBlock, 4 + index, in_specs, _settings[0]),
        ]
        for index in range(2)
    ]
    return [first, *pairs[0], around(), *pairs[1], around(forward_fn=back), last]


def set_scale(scale: float) -> None:
    """Change shared objects, on every rank."""
    get_args().scale = _models[0].scale = _settings[0]["scale"] = scale


MOVES = [[0, 1, 12], [0, 11, 12], [0, 8, 12], [0, 10, 12]]  # the last brings two of a kind to their like


def train(case: Case, moves: list[list[int]], folder: str | None = None) -> dict[str, Any]:
    """Train 5 batches, and move after each. Change what layers share after the second and the fourth.

    Args:
        folder: to save to after the second change; with more than two stages, to load from there.
    """
    engine = build(case, sharing)
    data, first = batches(engine), 0
    if case.stages > 2:
        set_scale(0.5)
        engine.load_checkpoint(folder)
        first = 2
        for _ in range(first * engine.micro_batches):
            next(data)

    def after(step: int) -> None:
        if first + step == 1:
            set_scale(0.5)
            if folder is not None:
                engine.save_checkpoint(folder)
        if first + step == 3:
            set_scale(1.0)

    losses = train_and_move(engine, data, moves, 5 - first, after)
    blocks = [layer for layer in layers_of(engine).values() if isinstance(layer, RotaryBlock)]
    return {**outcome_of(engine, losses), "rotaries": len({id(block.rotary) for block in blocks})}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16 zero1"])
def test_what_layers_share_is_one_object_after_moves_and_at_another_number_of_stages(
    precision: str, tmp_path: Path
) -> None:
    case = Case(stages=2, blocks=9, precision=precision, clip=0.0)
    still, moved = run_each(2, train, (case, []), (case, MOVES, str(tmp_path)))
    check_moves_changed_nothing(still, moved)
    assert [rank["rotaries"] for rank in moved] == [2, 0]
    loaded = run(3, train, replace(case, stages=3), [], str(tmp_path))
    assert loaded[0]["losses"] == still[0]["losses"][2:]


def train_on_one_stage(changes: bool) -> list[float]:
    """Train both uses of a tied layer on one stage, with or without a change of what they share."""
    _settings[:] = [{"scale": 1.0}]
    first, last = tied_ends()
    engine = build(Case(stages=1), lambda _: [first, *(LayerSpec(Block, index) for index in range(2)), last])
    data = batches(engine)
    losses = [engine.train_batch(data).item()]
    if changes:
        _settings[0]["scale"] = 0.5
    return [*losses, engine.train_batch(data).item()]


def test_a_later_use_of_a_tied_layer_shares_the_firsts_objects() -> None:
    [[same], [changed]] = run_each(1, train_on_one_stage, (False,), (True,))
    assert same[0] == changed[0] and same[1] != changed[1]

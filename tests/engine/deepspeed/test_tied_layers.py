"""Uses of one tied key are one module, also where ``tied_weight_attr`` does not name all of its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import LanguageModelPipeline, ModelConfig, model_layers
from tests.support.checkpoints import load_and_continue, pipeline, save_and_continue, train_on
from tests.support.configs import Case, config
from tests.support.harness import RankError, run, run_each
from tests.support.models import SEQUENCE, VOCABULARY, WIDTH, Block, Embedding, Head, loss, module_of, scale, seeded
from tests.support.training import (
    batches,
    build,
    check_moves_changed_nothing,
    layers_of,
    outcome_of,
    train_and_move,
    whole,
)
from tests.support.under_schedules import check_as_under_1f1b

pytestmark = pytest.mark.ranks

nightly = partial(pytest.param, marks=pytest.mark.nightly)
HEAD = LayerSpec(Head, 2)


class Positioned(nn.Module):
    """As in Megatron, the head is the embedding's class with a function around it, and uses only its weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.word = nn.Embedding.from_pretrained(seeded((VOCABULARY, WIDTH), seed), freeze=False)
        self.position = nn.Embedding(SEQUENCE, WIDTH)  # drawn on each stage, so not alike before stages share it

    @property
    def word_embeddings_weight(self) -> nn.Parameter:
        return self.word.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word(tokens) + self.position.weight


def logits(layer: Positioned, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden, layer.word.weight)


def megatron(case: Case) -> list[Any]:
    tie = partial(TiedLayerSpec, "embed", Positioned, 1, tied_weight_attr="word_embeddings_weight")
    return [tie(), *[LayerSpec(Block, index) for index in range(case.blocks)], scale, tie(forward_fn=logits)]


class Up(nn.Module):
    """A product with a weight, and a gain of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((WIDTH, WIDTH), seed))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden @ self.weight) * self.gain


def back(layer: Up, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + torch.tanh(hidden @ layer.weight.t())


def whole_up(layer: Up, hidden: torch.Tensor) -> torch.Tensor:
    return layer(hidden)


class Gated(Up):
    """Both of its parameters are tied. Its own use trains the weight alone; the other one the gain too, if ``on``."""

    on = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden @ self.weight)


def gated(layer: Gated, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * layer.gain if layer.on else hidden


def in_the_middle(
    case: Case, first: Callable[..., Any] | None, second: Callable[..., Any] | None, kind: type[Up] = Up
) -> list[Any]:
    """Return layers of which two use one weight; they move, come to one stage and part again."""
    attributes = ["weight", "gain"] if kind is Gated else "weight"
    tie = partial(TiedLayerSpec, "up", kind, 3, tied_weight_attr=attributes)
    blocks = [LayerSpec(Block, index) for index in range(4)]
    return [LayerSpec(Embedding, 1), tie(forward_fn=first), *blocks[:2], tie(forward_fn=second), *blocks[2:], HEAD]


WAYS: dict[str, Callable[[Case], list[Any]]] = {
    "megatron": megatron,
    "first whole": partial(in_the_middle, first=None, second=back),
    "last whole": partial(in_the_middle, first=back, second=None),
    "both train the gain": partial(in_the_middle, first=None, second=whole_up),
    "both whole": partial(in_the_middle, first=None, second=None),
    "one use trains": partial(in_the_middle, first=None, second=gated, kind=Gated),
}


def train(case: Case, way: str, moves: Sequence[Sequence[int]], background: bool = False) -> dict[str, Any]:
    """Train 5 batches, and go to the next of ``moves`` after each; where so said, every other in the background."""
    engine = build(case, WAYS[way])
    data, losses, norms = batches(engine), [], []
    for step in range(5):
        losses.append(engine.train_batch(data).item())
        if moves and step < 4:
            engine.rebalance(moves[step], background=background and step % 2 > 0)
        for module in engine.stage.layers.modules_that_run().values():
            if isinstance(module, Gated):
                module.on = step % 3 > 0
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    return {**outcome_of(engine, losses), "norms": norms, "evaluated": engine.eval_batch(data).item()}


def check_same(case: Case, way: str, moves: Sequence[Sequence[int]], background: bool = False) -> None:
    still, moved = run_each(case.ranks, train, (case, way, []), (case, way, moves, background))
    check_moves_changed_nothing(still, moved)
    assert moved[0]["partition"] == moves[-1]
    for what in ("norms", "evaluated"):
        assert [rank[what] for rank in moved] == [rank[what] for rank in still]


@pytest.mark.parametrize(
    ("way", "precision", "replicas"),
    [
        ("last whole", "bf16 zero1", 1),
        nightly("first whole", "fp32", 1),
        nightly("first whole", "bf16 zero1", 2),
        nightly("last whole", "fp32", 2),
        nightly("first whole", "bf16", 1),
    ],
)
def test_uses_that_move_come_to_one_stage_and_part(way: str, precision: str, replicas: int) -> None:
    case = Case(stages=3, clip=0.5, groups="two", precision=precision, replicas=replicas)
    check_same(case, way, [[0, 5, 7, 8], [0, 1, 2, 8], [0, 1, 7, 8], [0, 4, 5, 8]])


@pytest.mark.parametrize(("precision", "replicas"), [("bf16", 1), nightly("fp32", 1), nightly("bf16 zero1", 2)])
def test_tied_ends_of_a_model_stay_equal(precision: str, replicas: int) -> None:
    case = Case(stages=2, clip=0.5, precision=precision, replicas=replicas)
    check_same(case, "megatron", [[0, 1, 8], [0, 6, 8], [0, 7, 8], [0, 4, 8]])


@pytest.mark.parametrize("precision", ["bf16", nightly("fp32"), nightly("bf16 zero1")])
def test_a_use_without_a_gradient_counts_as_zeros(precision: str) -> None:
    """Also in the batches in which no use of the gain has one."""
    case = Case(stages=2, clip=0.05, precision=precision)
    check_same(case, "one use trains", [[0, 5, 8], [0, 2, 8], [0, 6, 8], [0, 3, 8]], background=True)


def losses_of(which: str, case: Case, way: str) -> list[float]:
    return train_on(pipeline(which, case, WAYS[way]), 0)


def test_stock_trains_the_same() -> None:
    """Without clipping, because DeepSpeed's norm is that of the first stage."""
    stock, ours = run_each(2, losses_of, *((which, Case(clip=0.0), "megatron") for which in ("stock", "ours")))
    assert stock == ours


def norms(case: Case) -> list[float]:
    """Return the gradient norm of the first batch, by the engine and by torch for the model on one rank."""
    engine = build(case, WAYS["first whole"])
    engine.train_batch(batches(engine))
    specs = WAYS["first whole"](case)
    layers = [spec.build() for spec in specs]
    layers[4] = partial(back, layers[1])
    data = batches(engine)
    for _ in range(case.micro_batches):
        hidden, labels = next(data)
        for layer in layers:
            hidden = layer(hidden)
        (loss(hidden, labels) / case.micro_batches).backward()
    gradients = [p.grad for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters()]
    return [float(engine.get_global_grad_norm()), float(torch.stack([g.norm() for g in gradients]).norm())]


def test_every_weight_counts_once_in_clipping() -> None:
    cases = [Case(stages=2, clip=0.01, precision=precision) for precision in ("fp32", "fp32 zero1")]
    for case, ranks in zip(cases, run_each(2, norms, *((case,) for case in cases))):
        for engine, whole_model in ranks:
            assert engine == pytest.approx(whole_model, rel=1e-5), case


@pytest.mark.parametrize(
    ("precision", "saved_on", "loaded_on"),
    [("bf16 zero1", 2, 1), ("bf16 zero1", 1, 2), nightly("fp32", 2, 1), nightly("fp32", 1, 2)],
)
def test_a_run_resumes_to_and_from_one_stage(tmp_path: Path, precision: str, saved_on: int, loaded_on: int) -> None:
    case = Case(stages=saved_on, precision=precision, groups="two", clip=0.0)
    saved = run(saved_on, save_and_continue, case, str(tmp_path), None, megatron)
    loaded = run(loaded_on, load_and_continue, replace(case, stages=loaded_on), str(tmp_path), 1, megatron)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "way", "moves"),
    [
        (
            Case(stages=3, clip=0.5, groups="two"),
            "first whole",
            [[0, 2, 3, 8], [0, 5, 7, 8], [0, 1, 2, 8], [0, 6, 7, 8]],
        ),
        (Case(clip=0.5, precision="bf16"), "megatron", [[0, 6, 8], [0, 1, 8], [0, 4, 8], [0, 2, 8]]),
    ],
)
def test_they_train_under_our_schedules(case: Case, way: str, moves: list[list[int]]) -> None:
    check_as_under_1f1b(case.stages, train, case, way, moves)


# -- a forward_fn that asks the PipelineModule for the tied module -------------------------------------


class NeoX(PipelineModule):
    """As in GPT-NeoX, the head's function mentions the model's own embedding; where it ``reads``, it uses that too."""

    def __init__(self, reads: bool) -> None:
        self.reads = reads

        def head(embedding: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            if self.reads:
                assert self.tied_modules.embed.weight.width == WIDTH
                return F.linear(hidden, self.tied_modules.embed.weight)
            return F.linear(hidden, embedding.weight)

        tie = partial(TiedLayerSpec, "embed", Marked, 1)
        last = LayerSpec(nn.Linear, VOCABULARY, VOCABULARY)
        layers = [tie(), *[LayerSpec(Block, index) for index in range(4)], tie(forward_fn=head), last]
        super().__init__(layers, num_stages=2, loss_fn=loss, partition_method="uniform")


class Marked(Embedding):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight.width = WIDTH  # type: ignore[attr-defined]


def train_neox(reads: bool, precision: str, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    torch.manual_seed(0)
    module = NeoX(reads)
    settings = config(Case(clip=0.5, precision=precision))
    engine = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]

    def after(step: int) -> None:
        held = [layer for layer in layers_of(engine).values() if isinstance(layer, Marked)]
        assert [*module.tied_modules.values()] == held[:1]

    losses = train_and_move(engine, batches(engine), moves, 5, after)
    return outcome_of(engine, losses)


@pytest.mark.parametrize("precision", ["bf16 zero1", nightly("fp32"), nightly("bf16")])
def test_a_function_may_read_the_ranks_own_use(precision: str) -> None:
    """It trains as one that mentions it and reads its argument, also where the uses come to one stage and part."""
    moves = [[0, 6, 7], [0, 2, 7], [0, 6, 7], [0, 4, 7]]
    still, moved = run_each(2, train_neox, (False, precision, []), (True, precision, moves))
    check_moves_changed_nothing(still, moved)


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "stages"), [("bf16 zero1", 2), ("fp32", 1), nightly("bf16", 1), nightly("fp32", 2)]
)
def test_a_use_that_trains_what_is_not_tied_is_refused(precision: str, stages: int) -> None:
    case = Case(stages=stages, precision=precision)
    with pytest.raises(RankError, match=r"ConfigError: layer 4 trains gain, which tied_weight_attr of its key 'up'"):
        run(stages, train, case, "both train the gain", [])


def refuse(case: Case, way: str, decays: bool, more: dict[str, Any], *messages: str) -> None:
    """Check the error of initialize.

    Args:
        decays: whether a weight decays on the first stage and not on the last.
        more: blocks of DeepSpeed's configuration.
    """
    module = module_of(case, WAYS[way])
    decay = 0.1 if module.stage_id == 0 and decays else 0.0
    groups = [{"params": list(module.parameters()), "weight_decay": decay}]
    with pytest.raises(ConfigError) as raised:
        ds_dynmo.initialize(model=module, model_parameters=groups, config={**config(case), **more})
    assert all(message in str(raised.value) for message in messages)


def test_initialize_refuses_ties_that_would_part() -> None:
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    run_each(
        *(2, refuse),
        (Case(), "megatron", True, {}, "is in different parameter groups where they are: ['0', '1']"),
        (Case(), "both whole", True, {}, "layers [1, 4], tied by the key 'up', run the whole module", "['gain']"),
        (
            *(Case(precision="fp16 zero1"), "megatron", False, sums),
            "grad_accum_dtype is not the model's precision, with layers tied by the key 'embed'",
        ),
    )


# -- torch --------------------------------------------------------------------------------------------


def warnings_of_tied_weights() -> tuple[bool, list[str]]:
    """Return whether a language model's first weight is tied, and what torch warns of in a backward pass through it."""
    layers = model_layers(ModelConfig(layers=1, hidden_size=8, heads=2, sequence_length=4, tied_embedding=True))
    module = LanguageModelPipeline(layers, num_stages=2)
    weight = next(iter(module.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weight.sum().backward()
    return bool(module.tied_comms) and weight.grad is not None, [str(warning.message) for warning in caught]


def test_torch_does_not_warn_of_the_tied_weights_of_a_language_model() -> None:
    assert run(2, warnings_of_tied_weights) == [(True, [])] * 2

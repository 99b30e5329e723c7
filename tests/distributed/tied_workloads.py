"""Runs for test_tied_classes.py: layers of different classes tied by one key; every function here runs on a rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.checkpoint.constants import PIPELINE_REPLICATED_PARAMETER_PATTERNS, UNIVERSAL_CHECKPOINT_INFO
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.engine.checkpoint.universal import universal_info
from ds_dynmo.errors import CheckpointError, ConfigError
from tests.distributed import checkpoint_workloads, workloads
from tests.distributed.workloads import VOCABULARY, WIDTH, Block, Case, Embedding, Head, batches, build, seeded


def table(seed: int, rows: int = VOCABULARY) -> nn.Embedding:
    return nn.Embedding.from_pretrained(seeded((rows, WIDTH), seed), freeze=False)


class EmbeddingLayer(nn.Module):
    """As in SparkJiao's pipeline of LLaMA: the tied weight has a second name."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed_tokens = table(seed)
        self.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(tokens)


class LanguageModelHead(nn.Module):
    """Has the weight by another second name."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight.data.copy_(seeded((VOCABULARY, WIDTH), seed))
        self.weight = self.lm_head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.lm_head.weight)


class Enter(nn.Module):
    """As in gdGPT: the tied weight is found by a property."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed_tokens = table(seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(tokens)

    @property
    def weight(self) -> nn.Parameter:
        return self.embed_tokens.weight


class Exit(nn.Module):
    """Has the weight by the same name, and a norm of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed_tokens = table(seed)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(hidden), self.embed_tokens.weight)

    @property
    def weight(self) -> nn.Parameter:
        return self.embed_tokens.weight


class NamedExit(nn.Module):
    """Has the weight by another name, and a norm of its own before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight.data.copy_(seeded((VOCABULARY, WIDTH), seed))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(hidden))


class Terminal(nn.Module):
    """As in gdGPT's Bloom: one class for both ends, a norm of its own in each."""

    def __init__(self, seed: int, is_first: bool) -> None:
        super().__init__()
        self.word_embeddings = table(seed)
        self.layernorm = nn.LayerNorm(WIDTH)
        self.is_first = is_first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            return self.layernorm(self.word_embeddings(inputs))
        return F.linear(self.layernorm(inputs), self.word_embeddings.weight)

    @property
    def word_embeddings_weight(self) -> nn.Parameter:
        return self.word_embeddings.weight


class Positioned(nn.Module):
    """As in Megatron: the head's use is the embedding's class with a function around it, and needs its weight alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.word = table(seed)
        self.position = table(seed + 1, rows=workloads.SEQUENCE)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word(tokens) + self.position.weight


def logits(layer: Positioned, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ layer.word.weight.t()


def halved(layer: NamedExit, hidden: torch.Tensor) -> torch.Tensor:
    return layer(hidden) / 2


class Up(nn.Module):
    """For the middle of a model, where layers move: a product with the weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((WIDTH, WIDTH), seed))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden @ self.weight) * self.gain


class Back(nn.Module):
    """A product with the same weight, transposed, and parameters of its own before and after it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.data.copy_(seeded((WIDTH, WIDTH), seed))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(self.norm(hidden))


def ends(first: Any, last: Any) -> Callable[[Case], list[Any]]:
    def make(case: Case) -> list[Any]:
        return [first, *[LayerSpec(Block, index) for index in range(case.blocks)], workloads.scale, last]

    return make


WAYS: dict[str, Callable[[Case], list[Any]]] = {
    "sparkjiao": ends(
        TiedLayerSpec("weight", EmbeddingLayer, seed=1, tied_weight_attr="weight"),
        TiedLayerSpec("weight", LanguageModelHead, seed=2, tied_weight_attr="weight"),
    ),
    "other attribute": ends(
        TiedLayerSpec("weight", EmbeddingLayer, 1, tied_weight_attr="embed_tokens.weight"),
        TiedLayerSpec("weight", LanguageModelHead, 2, tied_weight_attr="lm_head.weight"),
    ),
    "gdgpt": ends(
        TiedLayerSpec("embed", Enter, 1, tied_weight_attr="weight"),
        TiedLayerSpec("embed", Exit, 2, tied_weight_attr="weight"),
    ),
    "gdgpt, other name": ends(
        TiedLayerSpec("embed", Enter, 1, tied_weight_attr="weight"),
        TiedLayerSpec("embed", NamedExit, 2, tied_weight_attr="lm_head.weight"),
    ),
    "gdgpt, one class": ends(
        TiedLayerSpec("embed", Terminal, 1, is_first=True, tied_weight_attr="word_embeddings_weight"),
        TiedLayerSpec("embed", Terminal, 2, is_first=False, tied_weight_attr="word_embeddings_weight"),
    ),
    "function around": ends(
        TiedLayerSpec("embed", Enter, 1, tied_weight_attr="weight"),
        TiedLayerSpec("embed", NamedExit, 2, forward_fn=halved, tied_weight_attr="lm_head.weight"),
    ),
    "megatron": ends(
        TiedLayerSpec("embed", Positioned, 1, tied_weight_attr="word.weight"),
        TiedLayerSpec("embed", Positioned, 1, forward_fn=logits, tied_weight_attr="word.weight"),
    ),
}


def in_the_middle(case: Case) -> list[Any]:
    """Two keys, whose uses are between other layers: they move, meet and part."""
    return [
        LayerSpec(Embedding, 1),
        TiedLayerSpec("a", Up, 3, tied_weight_attr="weight"),
        LayerSpec(Block, 1),
        TiedLayerSpec("b", Back, 4, tied_weight_attr=["inner.weight", "inner.bias"]),
        TiedLayerSpec("a", Back, 5, tied_weight_attr="inner.weight"),
        LayerSpec(Block, 2),
        TiedLayerSpec("b", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"]),
        LayerSpec(Head, 2),
    ]


WAYS["in the middle"] = in_the_middle
APART = (0, 3, 4, 6, 8)  # of :func:`in_the_middle`: every use of a key on another stage


def train(case: Case, way: str, moves: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
    """Train ``steps`` batches, going to the next of ``moves`` after each."""
    engine = build(case, WAYS[way])
    data, waiting = batches(engine), list(moves)
    losses, norms, evaluations = [], [], []
    for _ in range(steps):
        losses.append(engine.train_batch(data).item())
        norms.append(engine.get_global_grad_norm())
        if waiting:
            engine.rebalance(waiting.pop(0))
        evaluations.append(engine.eval_batch(batches(engine, seed=7)).item())
    return {
        "losses": losses,
        "norms": [float(norm) for norm in norms if norm is not None],
        "evaluations": evaluations,
        "state": workloads.state(engine),
        "moved": sum(report.layers_moved for report in engine.reports),
        "replica": engine.grid.get_data_parallel_id(),
    }


# -- checkpoints --------------------------------------------------------------------------------------


def save_and_go_on(case: Case, way: str, folder: str) -> dict[str, Any]:
    return checkpoint_workloads.save_and_go_on(case, folder, None, WAYS[way])


def load_and_go_on(case: Case, way: str, folder: str, trained: int) -> dict[str, Any]:
    return checkpoint_workloads.load_and_go_on(case, folder, trained, WAYS[way])


def save_as(which: str, case: Case, way: str, folder: str) -> Any:
    return checkpoint_workloads.save_as(which, case, folder, WAYS[way])


def load_as(which: str, case: Case, way: str, folder: str) -> Any:
    return checkpoint_workloads.load_as(which, case, folder, WAYS[way])


def load_stock_weights(case: Case, way: str, folder: str) -> Any:
    return checkpoint_workloads.load_stock_weights(case, folder, WAYS[way])


def refuse(case: Case, way: str, folders: Sequence[str], steps: int) -> dict[str, Any]:
    """Load from each of ``folders``, which all are another model's, and train on as if nothing had been."""
    engine = build(case, WAYS[way])
    data = batches(engine)
    losses = [engine.train_batch(data).item()]
    before, messages = workloads.state(engine), []
    for folder in folders:
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            messages.append(str(error))
    unchanged = workloads.state(engine) == before
    losses += [engine.train_batch(data).item() for _ in range(steps - 1)]
    return {"messages": messages, "unchanged": unchanged, "losses": losses}


def losses_of(which: str, case: Case, way: str) -> list[float]:
    return checkpoint_workloads.train_on(checkpoint_workloads.pipeline(which, case, WAYS[way]), 0)


# -- what is one and what is not ----------------------------------------------------------------------


def norms(case: Case, way: str) -> list[float]:
    """The norm of the first batch's gradients, as the engine counts it and as torch does of the model on one rank."""
    engine = build(case, WAYS[way])
    engine.train_batch(batches(engine))
    layers = [spec.build() if isinstance(spec, LayerSpec) else spec for spec in WAYS[way](case)]
    layers[-1].lm_head.weight = layers[0].embed_tokens.weight
    data = batches(engine)
    for _ in range(case.micro_batches):
        hidden, labels = next(data)
        for layer in layers:
            hidden = layer(hidden)
        (workloads.loss(hidden, labels) / case.micro_batches).backward()
    found = {id(p): p.grad for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters()}
    whole = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    return [float(engine.get_global_grad_norm()), float(whole)]


def freeze_one_use(case: Case, way: str) -> tuple[str, bool]:
    """Freeze the tied weight in the head alone, then in all uses: the message, and whether it stays as it is then."""
    engine = build(case, WAYS[way])
    data, message = batches(engine), ""
    engine.train_batch(data)
    for frozen in ({7}, {0, 7}):
        freeze(engine, frozen)
        try:
            engine.model_changed("frozen")
        except ConfigError as error:
            message = str(error)
    weights = engine._layers.tied_weights(7 * engine.is_last_stage())
    before = [workloads.raw(weight) for weight in weights]
    for _ in range(2):
        engine.train_batch(data)
    return message, len(before) == 1 and before == [workloads.raw(weight) for weight in weights]


def freeze(engine: Any, uses: set[int]) -> None:
    for index in uses & set(range(engine._layers.start, engine._layers.stop)):
        for weight in engine._layers.tied_weights(index):
            weight.requires_grad_(False)


def freeze_untold(case: Case, way: str) -> str:
    """Freeze the tied weight everywhere and train on without a word."""
    engine = build(case, WAYS[way])
    freeze(engine, {0, 7})
    try:
        engine.train_batch(batches(engine))
    except ConfigError as error:
        return str(error)
    return "trained"


def marks(case: Case, way: str, move: Sequence[int] | None = None) -> list[tuple[str, bool, bool]]:
    """Per parameter of this stage: is it marked as a copy, and does DeepSpeed's conversion leave it out?"""
    engine = build(case, WAYS[way])
    if move is not None:
        engine.rebalance(move)
    info = universal_info(engine)[UNIVERSAL_CHECKPOINT_INFO]
    patterns = info[PIPELINE_REPLICATED_PARAMETER_PATTERNS]
    return [
        (name, parameter.ds_pipe_replicated, any(re.match(pattern, name) for pattern in patterns))
        for name, parameter in engine.module.named_parameters()
    ]


def repack(case: Case, way: str, sizes: dict[int, int], steps: int) -> dict[str, Any]:
    """Train ``steps`` batches, on as many stages as ``sizes`` says after some; those released wait to come back."""
    engine = build(case, WAYS[way])
    data, losses = batches(engine), {}
    while engine.global_steps < steps:
        loss = engine.train_batch(data).item()
        losses[engine.global_steps] = loss
        wanted = sizes.get(engine.global_steps)
        if wanted is not None:
            engine.repack(wanted)
        if engine.released and not engine.wait_for_recall():
            return {"losses": losses, "state": {"shards": {}}, "replica": 0}
    found = {"losses": losses, "state": workloads.state(engine), "replica": engine.grid.get_data_parallel_id()}
    engine.dismiss_parked()
    return found


def groups_apart(case: Case, way: str) -> str:
    """A tied weight that decays on the first stage and not on the last; what initialize says."""
    torch.manual_seed(0)
    layers = WAYS[way](case)
    module = PipelineModule(layers=layers, num_stages=case.stages, loss_fn=workloads.loss, partition_method="uniform")
    decay = 0.1 if module.stage_id == 0 else 0.0
    groups = [{"params": list(module.parameters()), "weight_decay": decay}]
    try:
        ds_dynmo.initialize(model=module, model_parameters=groups, config=workloads.config(case))
    except ConfigError as error:
        return str(error)
    return "taken"

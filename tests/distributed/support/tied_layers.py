"""Layers of different classes that share weights, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from tests.distributed.support.configs import Case
from tests.distributed.support.models import SEQUENCE, VOCABULARY, WIDTH, Block, Embedding, Head, scale, seeded

ENDS = ["sparkjiao", "other attribute", "gdgpt", "gdgpt, other name", "gdgpt, one class", "function around", "megatron"]
FIRST = ("gdgpt, one class", "function around")  # tested with every wrapper; the others only in the nightly form


def table(seed: int, rows: int = VOCABULARY) -> nn.Embedding:
    return nn.Embedding.from_pretrained(seeded((rows, WIDTH), seed), freeze=False)


class EmbeddingLayer(nn.Module):
    """As in SparkJiao's LLaMA pipeline, the tied weight has a second name."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed_tokens = table(seed)
        self.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(tokens)


class LanguageModelHead(nn.Module):
    """Has the weight under a different second name."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight.data.copy_(seeded((VOCABULARY, WIDTH), seed))
        self.weight = self.lm_head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.lm_head.weight)


class Enter(nn.Module):
    """As in gdGPT, a property returns the tied weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed_tokens = table(seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(tokens)

    @property
    def weight(self) -> nn.Parameter:
        return self.embed_tokens.weight


class Exit(nn.Module):
    """Has the weight under the same name, and its own norm."""

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
    """Has the weight under another name, after its own norm."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight.data.copy_(seeded((VOCABULARY, WIDTH), seed))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(hidden))


class Terminal(nn.Module):
    """As in gdGPT's Bloom, one class serves for both ends, each with its own norm."""

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
    """As in Megatron, the head is the embedding's class with a function around it, and uses only its weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.word = table(seed)
        self.position = table(seed + 1, rows=SEQUENCE)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word(tokens) + self.position.weight


def logits(layer: Positioned, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ layer.word.weight.t()


def halved(layer: NamedExit, hidden: torch.Tensor) -> torch.Tensor:
    return layer(hidden) / 2


class Up(nn.Module):
    """A product with the weight, for the middle of a model, where layers move."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((WIDTH, WIDTH), seed))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden @ self.weight) * self.gain


class Back(nn.Module):
    """A product with the transposed weight, between parameters of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.data.copy_(seeded((WIDTH, WIDTH), seed))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(self.norm(hidden))


def ends(first: Any, last: Any) -> Callable[[Case], list[Any]]:
    def make(case: Case) -> list[Any]:
        return [first, *[LayerSpec(Block, index) for index in range(case.blocks)], scale, last]

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
    """Return layers with two tie keys, whose uses move, come to one stage and part again."""
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

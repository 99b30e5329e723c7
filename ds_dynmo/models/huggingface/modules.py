"""The pipeline layers around the parts of a Hugging Face causal language model.

Each holds one module of the library's as ``part`` and does what the library's model does around it: positions, causal
mask, router loss. Between layers there is what a :class:`~ds_dynmo.models.stream.Stream` packs. Where a model has
a router loss, ``auxiliary`` is fp32 ``[2, experts]`` until the head makes the loss of it: the library's loss is a
product of means over the tokens of all layers, no sum over layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.models.stream import Activations, Stream

__all__ = [
    "DecoderLayer",
    "FinalNorm",
    "OutputHead",
    "PositionEmbedding",
    "Rotary",
    "RouterLoss",
    "TokenEmbedding",
    "tied_logits",
]


class Parts(Protocol):
    """Where the library's modules come from."""

    def build(self, layer: int) -> nn.Module:
        """Build the module of pipeline layer ``layer`` with its weights."""

    def build_rotary(self) -> nn.Module | None:
        """Build the rotary positions of every decoder layer; None: the model has learned ones."""


@dataclass(frozen=True)
class RouterLoss:
    """The library's ``load_balancing_loss_func``, summed up layer by layer.

    ``experts * sum_e f_e P_e`` times ``coefficient``, with ``f_e`` the choices of expert ``e`` per token and ``P_e``
    its mean router probability, both over the tokens of all decoder layers (Switch Transformer, equations 4 to 6).

    Attributes:
        experts: of a decoder layer.
        top_k: experts that a token is sent to.
        layers: decoder layers of the model.
        coefficient: the config's ``router_aux_loss_coef``.
        router: path of the router in a decoder layer; its first output are logits ``[tokens, experts]``.
    """

    experts: int
    top_k: int
    layers: int
    coefficient: float
    router: str

    def start(self, device: torch.device) -> torch.Tensor:
        """Give the sums before the first layer, fp32 ``[2, experts]``: choices, probabilities."""
        return torch.zeros(2, self.experts, device=device)

    def add(self, sums: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Add one more layer to the sums."""
        probabilities = logits.softmax(dim=-1)
        chosen = probabilities.topk(self.top_k, dim=-1).indices
        choices = F.one_hot(chosen, self.experts).sum(dim=(0, 1)).float()
        return sums + torch.stack((choices, probabilities.float().sum(dim=0)))

    def loss(self, sums: torch.Tensor, tokens: int) -> torch.Tensor:
        """Compute the loss of a micro-batch of ``tokens`` tokens, fp32 ``[1]``."""
        choices, probabilities = (sums / (self.layers * tokens)).unbind()
        return (self.coefficient * ((choices * probabilities).sum() * self.experts)).reshape(1)


class TokenEmbedding(nn.Module):
    """Token numbers int64 ``[batch, sequence]`` to ``[batch, sequence, hidden]``; the head's weights too where tied."""

    def __init__(self, parts: Parts, layer: int, router_loss: RouterLoss | None) -> None:
        super().__init__()
        self.router_loss = router_loss
        self.part = parts.build(layer)

    def forward(self, tokens: torch.Tensor) -> Activations:
        auxiliary = None if self.router_loss is None else self.router_loss.start(tokens.device)
        return Stream(self.part(tokens), auxiliary).pack()


class PositionEmbedding(nn.Module):
    """Adds learned positions, and drops out (GPT-2). A layer of its own: a tied embedding holds tied weights alone."""

    def __init__(self, parts: Parts, layer: int, dropout: float) -> None:
        super().__init__()
        self.part = parts.build(layer)
        self.dropout = nn.Dropout(dropout)

    def forward(self, activations: Activations) -> Activations:
        stream = Stream.unpack(activations)
        return replace(stream, hidden=self.dropout(stream.hidden + self.part(_positions(stream.hidden)))).pack()


class DecoderLayer(nn.Module):
    """One decoder layer of the library's.

    Args:
        window: a token attends to so many tokens up to itself; None: to all of them.
        router_loss: what it adds to in training; None: nothing.
    """

    is_block: ClassVar[bool] = True

    def __init__(self, parts: Parts, layer: int, window: int | None, router_loss: RouterLoss | None) -> None:
        super().__init__()
        self.window = window
        self.router_loss = router_loss
        self.part = parts.build(layer)
        rotary = parts.build_rotary()
        self.rotary = None if rotary is None else Rotary(rotary)

    def forward(self, activations: Activations) -> Activations:
        stream = Stream.unpack(activations)
        positions = _positions(stream.hidden)
        rotary = {} if self.rotary is None else {"position_embeddings": self.rotary(stream.hidden, positions)}
        call = {"attention_mask": self._mask(stream.hidden), "position_ids": positions, **rotary}
        if self.router_loss is None or stream.auxiliary is None or not self.training:
            return replace(stream, hidden=self.part(stream.hidden, **call)).pack()
        with _outputs_of(self.part.get_submodule(self.router_loss.router)) as routed:
            hidden = self.part(stream.hidden, **call)
        (logits, *_) = routed[0]
        return replace(stream, hidden=hidden, auxiliary=self.router_loss.add(stream.auxiliary, logits)).pack()

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """bool ``[1, 1, sequence, sequence]``, True where a token attends; None: causal, which the library knows."""
        length = hidden.shape[1]
        if self.window is None or length <= self.window:
            return None
        ones = torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden.device)
        return ones.tril().triu(1 - self.window)


class FinalNorm(nn.Module):
    """The norm before the head."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.part = parts.build(layer)

    def forward(self, activations: Activations) -> Activations:
        stream = Stream.unpack(activations)
        return replace(stream, hidden=self.part(stream.hidden)).pack()


class OutputHead(nn.Module):
    """``[batch, sequence, hidden]`` to logits ``[batch, sequence, vocabulary]``, and the router loss if any."""

    def __init__(self, parts: Parts, layer: int, router_loss: RouterLoss | None) -> None:
        super().__init__()
        self.router_loss = router_loss
        self.part = parts.build(layer)

    def forward(self, activations: Activations) -> Activations:
        return _outputs(self.part, self.router_loss, activations)


def tied_logits(embedding: TokenEmbedding, activations: Activations) -> Activations:
    """Compute what :class:`OutputHead` does, with the embedding's weights."""
    weight = embedding.get_parameter("part.weight")
    return _outputs(lambda hidden: F.linear(hidden, weight), embedding.router_loss, activations)


def _outputs(
    head: Callable[[torch.Tensor], torch.Tensor], router_loss: RouterLoss | None, activations: Activations
) -> Activations:
    stream = Stream.unpack(activations)
    logits = head(stream.hidden)
    if router_loss is None or stream.auxiliary is None:
        return logits
    batch, sequence, _ = stream.hidden.shape
    return logits, router_loss.loss(stream.auxiliary, batch * sequence)


class Rotary(nn.Module):
    """The library's rotary positions, whose frequencies stay fp32 when the layer becomes bf16.

    The library keeps them fp32 in a bf16 model. ``module.bfloat16()``, DeepSpeed's way, would round them, and angles
    at position 1000 would be wrong by more than a radian.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, ``[1, sequence, head width]`` each, in the dtype of ``hidden``."""
        cos, sin = self.rotary(hidden, positions)
        return cos, sin

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotary:
        exact = dict(self.rotary.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self.rotary, name, buffer.to(getattr(self.rotary, name).device))
        return self


@contextmanager
def _outputs_of(module: nn.Module) -> Iterator[list[Any]]:
    """Collect what ``module`` gives inside, call by call."""
    found: list[Any] = []
    handle = module.register_forward_hook(lambda module, inputs, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()


def _positions(hidden: torch.Tensor) -> torch.Tensor:
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)

"""The pipeline layers around the parts of a Hugging Face causal language model.

Each holds one module of transformers as ``part``. What transformers' model computes between them is computed by the
:class:`~ds_dynmo.models.huggingface.stubbed_model.StubbedModel` that all layers share. Between layers there is what a
:class:`~ds_dynmo.models.stream.Stream` packs, and behind it the model's inputs beside the tokens, unchanged. Where a
model has a router loss, ``auxiliary`` is fp32 ``[2, experts]`` until the head makes the loss of it: transformers' loss
is a product of means over the tokens of all layers, no sum over layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.halves import Half
from ds_dynmo.models.huggingface.lora import plain_name
from ds_dynmo.models.huggingface.source import Source
from ds_dynmo.models.stream import Activations, Stream

__all__ = [
    "DecoderLayer",
    "DecoderNorm",
    "InputEmbedding",
    "LMHead",
    "PositionEmbedding",
    "RouterLoss",
    "check_inputs",
    "pack",
    "tied_logits",
    "unpack",
    "with_router_loss",
]

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RouterLoss:
    """Transformers' ``load_balancing_loss_func``, summed up layer by layer.

    ``experts * sum_e f_e P_e`` times ``coefficient``, with ``f_e`` the choices of expert ``e`` per token and ``P_e``
    its mean router probability, both over the tokens of all decoder layers (Switch Transformer, equations 4 to 6).
    Tokens that an attention mask leaves out do not count.

    Attributes:
        experts: of a decoder layer.
        top_k: experts that a token is sent to.
        layers: decoder layers with a router.
        coefficient: the config's ``router_aux_loss_coef``.
        router: path of the router in a decoder layer.
        output: where logits ``[tokens, experts]`` are among its outputs.
    """

    experts: int
    top_k: int
    layers: int
    coefficient: float
    router: str
    output: int = 0

    def start(self, device: torch.device) -> torch.Tensor:
        """Return the sums before the first layer, fp32 ``[2, experts]``: choices, probabilities."""
        return torch.zeros(2, self.experts, device=device)

    def add(self, sums: torch.Tensor, logits: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Add one more layer to the sums.

        Args:
            mask: 0 for tokens that do not count, ``[batch, sequence]``.
        """
        logits = logits.reshape(-1, self.experts)
        probabilities = logits.softmax(dim=-1)
        chosen = F.one_hot(probabilities.topk(self.top_k, dim=-1).indices, self.experts)
        if mask is None:
            return sums + torch.stack((chosen.sum(dim=(0, 1)).float(), probabilities.float().sum(dim=0)))
        counts = mask.flatten().unsqueeze(1).float()
        return sums + torch.stack(
            ((chosen.sum(dim=1) * counts).sum(dim=0), (probabilities.float() * counts).sum(dim=0))
        )

    def loss(self, sums: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
        """Compute the loss of a micro-batch of ``tokens`` tokens, fp32 ``[1]``."""
        choices, probabilities = (sums / (self.layers * tokens)).unbind()
        return (self.coefficient * ((choices * probabilities).sum() * self.experts)).reshape(1)


class InputEmbedding(nn.Module):
    """Token numbers int64 ``[batch, sequence]`` to ``[batch, sequence, hidden]``; the head's weights too where tied."""

    def __init__(self, source: Source, layer: int, router_loss: RouterLoss | None, *, tied: bool = False) -> None:
        super().__init__()
        self.router_loss = router_loss
        self.inputs = source.inputs
        self.positions = source.positions
        self.part = source.build(layer)
        self.stubbed = source.stubbed
        self.has_input_transform = source.has_input_transform
        self.has_output_transform = tied and source.has_output_transform

    def forward(self, tokens: Activations) -> Activations:
        check_inputs(tokens, ("tokens", *self.inputs), self.positions)
        ids, inputs = _beside(tokens, self.inputs)
        assert isinstance(ids, torch.Tensor)
        hidden = self.part(ids)
        if self.has_input_transform:
            hidden = self.stubbed.enter(hidden, inputs, training=self.training)
        auxiliary = None if self.router_loss is None else self.router_loss.start(ids.device)
        return pack(Stream(hidden, auxiliary), inputs)


class PositionEmbedding(nn.Module):
    """Adds learned positions, and drops out (GPT-2). A layer of its own: a tied embedding holds tied weights alone."""

    def __init__(self, source: Source, layer: int, dropout: float) -> None:
        super().__init__()
        self.inputs = source.inputs
        self.part = source.build(layer)
        self.dropout = nn.Dropout(dropout)

    def forward(self, activations: Activations) -> Activations:
        stream, inputs = unpack(activations, self.inputs)
        hidden, positions = stream.hidden, inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        return pack(replace(stream, hidden=self.dropout(hidden + self.part(positions))), inputs)


class DecoderLayer(nn.Module):
    """One transformers decoder layer, or a half of one.

    Args:
        block: its number among the decoder layers.
        router_loss: what it adds to in training; None: nothing.
        half: None: it is whole.
    """

    is_block: ClassVar[bool] = True

    def __init__(
        self, source: Source, layer: int, block: int, router_loss: RouterLoss | None, half: Half | None = None
    ) -> None:
        super().__init__()
        self.block = block
        self.router_loss = router_loss
        self.inputs = source.inputs
        self.part = source.build(layer, half)
        self.stubbed = source.stubbed
        exact = source.exact_buffers(layer)
        self.exact = [name for name, _ in self.part.named_buffers() if plain_name(name) in exact]

    @property
    def compiled_parts(self) -> tuple[str, ...]:
        """What of it is compiled: how its arguments are found, torch cannot trace."""
        return ("part",)

    def forward(self, activations: Activations) -> Activations:
        stream, inputs = unpack(activations, self.inputs)
        args, kwargs = self.stubbed.arguments(self.block, stream.hidden, inputs)
        loss = self.router_loss
        if loss is None or stream.auxiliary is None or not self.training:
            return pack(replace(stream, hidden=_hidden(self.part(*args, **kwargs))), inputs)
        with _outputs_of(self.part.get_submodule(loss.router)) as routed:
            hidden = _hidden(self.part(*args, **kwargs))
        found = routed[0]
        logits = found[loss.output] if isinstance(found, tuple) else found
        auxiliary = loss.add(stream.auxiliary, logits, inputs.get("attention_mask"))
        return pack(replace(stream, hidden=hidden, auxiliary=auxiliary), inputs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DecoderLayer:
        """Convert as ``nn.Module`` does, but for dtypes of buffers that transformers keeps in fp32."""
        with _keeping_dtypes(self.part, self.exact):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class DecoderNorm(nn.Module):
    """The norm before the head."""

    def __init__(self, source: Source, layer: int) -> None:
        super().__init__()
        self.inputs = source.inputs
        self.part = source.build(layer)

    def forward(self, activations: Activations) -> Activations:
        stream, inputs = unpack(activations, self.inputs)
        return pack(replace(stream, hidden=self.part(stream.hidden)), inputs)


class LMHead(nn.Module):
    """``[batch, sequence, hidden]`` to logits ``[batch, sequence, vocabulary]``, and the router loss if any."""

    def __init__(self, source: Source, layer: int, router_loss: RouterLoss | None) -> None:
        super().__init__()
        self.router_loss = router_loss
        self.inputs = source.inputs
        self.part = source.build(layer)
        self.stubbed, self.has_output_transform = source.stubbed, source.has_output_transform

    def forward(self, activations: Activations) -> Activations:
        return _outputs(self.part, self, activations)


def tied_logits(embedding: InputEmbedding, activations: Activations) -> Activations:
    """Compute what :class:`LMHead` does, with the embedding's weights."""
    return _outputs(_Tied(embedding.get_parameter("part.weight")), embedding, activations)


@dataclass(frozen=True)
class _Tied:
    """Stands for transformers' output embedding."""

    weight: torch.Tensor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)


def _outputs(
    head: Callable[[torch.Tensor], torch.Tensor], layer: InputEmbedding | LMHead, activations: Activations
) -> Activations:
    stream, inputs = unpack(activations, layer.inputs)
    logits = layer.stubbed.logits(stream.hidden, head) if layer.has_output_transform else head(stream.hidden)
    return with_router_loss(logits, layer.router_loss, stream, inputs)


def with_router_loss(
    outputs: torch.Tensor, router_loss: RouterLoss | None, stream: Stream, inputs: Inputs
) -> Activations:
    """Return the model's outputs, and the router loss if any."""
    if router_loss is None or stream.auxiliary is None:
        return outputs
    batch, sequence, _ = stream.hidden.shape
    mask = inputs.get("attention_mask")
    return outputs, router_loss.loss(stream.auxiliary, batch * sequence if mask is None else mask.sum())


def check_inputs(inputs: Activations, names: tuple[str, ...], positions: int | None, remedy: str = "") -> None:
    """Refuse a micro-batch with other tensors than ``names``, or sequences longer than the model's ``positions``.

    Raises:
        ConfigError: with both numbers.
    """
    given = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if len(given) != len(names):
        expected, remedy = " and ".join(names), remedy or "inputs of huggingface.layers"
        raise ConfigError(f"a micro-batch has {len(given)} tensors: should be {expected} ({remedy})")
    if positions is not None and given[0].shape[1] > positions:
        raise ConfigError(f"sequences of {given[0].shape[1]} tokens: the model has {positions} positions")


def _beside(activations: Activations, names: tuple[str, ...]) -> tuple[Activations, Inputs]:
    """Split off the model's inputs beside the tokens."""
    if not names:
        return activations, {}
    first, inputs = activations[: -len(names)], activations[-len(names) :]
    return first[0] if len(first) == 1 else first, dict(zip(names, inputs, strict=True))


def unpack(activations: Activations, names: tuple[str, ...]) -> tuple[Stream, Inputs]:
    """Read what :func:`pack` returned; ``names`` are those of the model's inputs beside the tokens."""
    own, inputs = _beside(activations, names)
    return Stream.unpack(own), inputs


def _hidden(output: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"a decoder layer gives a {type(output).__name__}: more than hidden states goes on to the next")
    return output


def pack(stream: Stream, inputs: Mapping[str, torch.Tensor]) -> Activations:
    """Return the tensors that go on to the next layer: those of the stream, and behind them the model's inputs."""
    own = stream.pack()
    if not inputs:
        return own
    return (*((own,) if isinstance(own, torch.Tensor) else own), *inputs.values())


@contextmanager
def _outputs_of(module: nn.Module) -> Iterator[list[Any]]:
    """Collect what ``module`` gives inside, call by call."""
    found: list[Any] = []
    handle = module.register_forward_hook(lambda module, inputs, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def _keeping_dtypes(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let buffers ``names`` of ``module`` have the values and dtypes that they have now, if they are converted."""
    exact = {name: module.get_buffer(name) for name in names}
    yield
    for name, buffer in exact.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        setattr(owner, leaf, buffer.to(getattr(owner, leaf).device))

"""Early exit: tokens leave the model where an exit is sure of them (paper, section 2, early exit).

All exits use the final norm and the output head, tied over the stages (:class:`ExitHead`). At an exit both are
constants: the exit's loss trains the blocks before it, and only the final use trains norm and head. A gradient from
three or more uses would be summed in an order that depends on the partition.

:mod:`ds_dynmo.models.early_exit.blocks` has the blocks that tokens leave, :mod:`ds_dynmo.models.early_exit.criteria`
who leaves when, with the sources.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.models.case import DynamicCase, RunSizes
from ds_dynmo.models.early_exit.blocks import ExitBlock, leave_after
from ds_dynmo.models.early_exit.config import EarlyExitConfig
from ds_dynmo.models.early_exit.criteria import confident, largest_probability, softmax_margin
from ds_dynmo.models.gpt import TokenEmbedding, embed
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.layer_numbers import local_layers
from ds_dynmo.models.stream import Activations, Stream
from ds_dynmo.models.vocabulary import NO_LABEL

__all__ = ["EarlyExit", "ExitHead", "exit_layers"]


class ExitHead(TokenEmbedding):
    """The final norm and the output head (and tied embedding), for the end of the model and every exit.

    DeepSpeed all-reduces tied gradients over stages, so each stage must produce one: :class:`_ZeroGradients` adds
    zeros.

    Args:
        seed_key: what the weight is drawn by: 0, the embedding's, if they are tied; else the head's own.

    Attributes:
        leaving: whether tokens may leave (see "start"). A buffer, bool: uses of a tied layer on one stage share
            buffers, and no other attributes. Training does not wait for its value.
    """

    leaving: torch.Tensor

    def __init__(self, config: GPTConfig, exits: EarlyExitConfig, seed_key: int) -> None:
        super().__init__(config, seed_key)
        self.exits = exits
        self.loss_weights = exits.loss_weights(config.layers)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.register_buffer("leaving", torch.tensor(exits.start == 0))

    def exit(self, activations: Activations, *, depth: int) -> Activations:
        """Run the exit after ``depth`` blocks: add its loss, in training, and let confident tokens leave.

        The loss is the mean cross entropy of the true next tokens, over the tokens that have one. Those that ran in
        the block before have their logits computed. A token that leaves here would get the same logits at every later
        exit, so its loss there is added here.
        """
        stream = Stream.unpack(activations)
        hidden, auxiliary, tokens, exited = stream.hidden, stream.auxiliary, stream.tokens, stream.exited
        assert auxiliary is not None and tokens is not None and exited is not None
        hidden = self._all_get_gradients(hidden)
        by_head = self.exits.confidence != "state"  # else the block before has decided
        leaves = by_head and (self.training or (self.exits.evaluation and bool(self.leaving)))
        if not (self.training or leaves):
            return replace(stream, hidden=hidden).pack()

        sequence = hidden.shape[1]
        index = ((exited == 0) | (exited == depth)).flatten().nonzero().squeeze(1)
        rows = hidden.flatten(0, 1).index_select(0, index)
        predicted = self._predict(rows)
        if leaves:
            leave = confident(self.exits, self._confidence(predicted), index % sequence, sequence)
            exited = leave_after(exited, index, leave & self.leaving, depth)
        if self.training:
            left = exited.flatten().index_select(0, index) > 0
            auxiliary = auxiliary + self._loss(predicted, tokens, index, left, depth)
        return replace(stream, hidden=hidden, auxiliary=auxiliary, exited=exited).pack()

    def _predict(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute log-probabilities, fp32 ``[tokens, vocabulary]``, by norm and head as they are."""
        weight, bias = self.norm.weight.detach(), self.norm.bias.detach()
        normed = F.layer_norm(rows, self.norm.normalized_shape, weight, bias, self.norm.eps)
        return F.linear(normed, self.weight.detach()).float().log_softmax(dim=-1)

    @torch.no_grad()
    def _confidence(self, predicted: torch.Tensor) -> torch.Tensor:
        return largest_probability(predicted) if self.exits.method == "adpc" else softmax_margin(predicted)

    def _loss(
        self, predicted: torch.Tensor, tokens: torch.Tensor, index: torch.Tensor, left: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Compute the exit's part of the training loss; ``left`` is True where a token of ``index`` leaves here.

        A token that leaves here counts for the later exits too. The last depth is left out: the output layer computes
        its own loss for all tokens.
        """
        labels = F.pad(tokens[:, 1:], (0, 1), value=NO_LABEL).flatten().index_select(0, index)
        count = max(tokens[:, 1:].numel(), 1)
        losses = F.nll_loss(predicted, labels, ignore_index=NO_LABEL, reduction="none")
        later = sum(weight for other, weight in self.loss_weights.items() if depth < other < max(self.loss_weights))
        return (losses * (self.loss_weights[depth] + later * left)).sum() / count

    def forward(self, activations: Activations) -> Activations:
        """Compute logits ``[batch, sequence, vocabulary]``, also of tokens that left, beside the exits' losses.

        In training also the weight of the logits' own loss, fp32 ``[1]``: with the exits' weights it makes 1.
        """
        stream = Stream.unpack(activations)
        assert stream.auxiliary is not None
        logits = F.linear(self.norm(self._all_get_gradients(stream.hidden)), self.weight)
        if not self.training:
            return logits, stream.auxiliary
        return logits, stream.auxiliary, torch.full_like(stream.auxiliary, self.loss_weights[max(self.loss_weights)])

    def embed(self, tokens: torch.Tensor) -> Activations:
        """Embed ``tokens`` as :class:`TokenEmbedding` does."""
        stream = Stream.unpack(embed(self.weight, tokens, self.layer_outputs))
        return replace(stream, hidden=self._all_get_gradients(stream.hidden)).pack()

    def _all_get_gradients(self, hidden: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = _ZeroGradients.apply(hidden, *self.parameters())  # type: ignore[no-untyped-call]
        return passed


class _ZeroGradients(torch.autograd.Function):
    """Passes hidden states through, and gives parameters gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = [torch.zeros_like(p) if needed else None for p, needed in zip(ctx.parameters, ctx.needs_input_grad[1:])]
        return (gradients[0], *zeros)


def exit_layers(config: GPTConfig, exits: EarlyExitConfig) -> list[LayerSpec]:
    """List the layers: embedding, blocks, exits after those of ``exits.depths``, final norm and head as one.

    Exits and head are one ``TiedLayerSpec`` key, "embedding" with ``tied_embedding`` and then the embedding too, else
    "head". Weights are drawn as those of the model without exits.
    """
    seed_key = 0 if config.tied_embedding else config.layers + 2
    names = ["weight", "norm.weight", "norm.bias"]
    key = "embedding" if config.tied_embedding else "head"
    head = partial(TiedLayerSpec, key, ExitHead, config, exits, seed_key, tied_weight_attr=names)
    layers = [head(forward_fn=ExitHead.embed) if config.tied_embedding else LayerSpec(TokenEmbedding, config, 0)]
    for depth in range(1, config.layers + 1):
        layers.append(LayerSpec(ExitBlock, config, exits, depth))
        if depth in exits.exit_depths(config.layers):
            layers.append(head(forward_fn=partial(ExitHead.exit, depth=depth)))
    return [*layers, head()]  # without a function: checkpoints hold the state of the tied layer that has none


class EarlyExit(DynamicCase):
    """Lets tokens leave from the step on that the configuration says, the last step at the latest, and ever after."""

    name = "early_exit"

    def __init__(self, config: EarlyExitConfig, engine: Any, sizes: RunSizes) -> None:
        super().__init__(engine)
        self._first_step = min(round(config.start * sizes.total_steps), sizes.total_steps - 1)
        self._begun = config.start == 0

    def before_batch(self, step: int) -> None:
        """Set whether tokens may leave this stage's layers, and call ``model_changed`` if that is new."""
        begins = not self._begun and step >= self._first_step
        self._begun = self._begun or begins
        for _, layer in local_layers(self.engine.module):
            if isinstance(layer, ExitBlock):
                layer.leaving = self._begun
            elif isinstance(layer, ExitHead):
                layer.leaving.fill_(self._begun)
        if begins:
            self.engine.model_changed("early exit: confident tokens leave from now on")

    def state_dict(self) -> dict[str, Any]:
        """Return whether tokens leave: in a run of more steps, "start" would fall on a later one."""
        return {"begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._begun = state["begun"]

"""Mixture of Depths: some blocks take only the tokens that their router gives the largest weights (paper, section 2).

Raposo et al., "Mixture-of-Depths: Dynamically allocating compute in transformer-based language models" (2024). Choosing
the top-k of a whole sequence looks at later tokens. That is how it trains; for causal use a small predictor learns
which tokens are among them from each token alone.

With a capacity the load of a layer never changes: that is the static form, and the default. With a threshold of the
router's weights it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_dynmo.models.batch_counts import CountsPerBatch, is_recomputing
from ds_dynmo.models.gpt import INIT_STD, Block, init_linear
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.mixture_of_depths.config import MixtureOfDepthsConfig, tokens_of
from ds_dynmo.models.seeding import generator_for

_ALIGNED = 8  # elements: 16 bytes in bf16, what products of experts need (grouped_linear)

__all__ = ["MixtureOfDepthsBlock", "Predictor", "routed_block", "top_tokens"]


class MixtureOfDepthsBlock(CountsPerBatch, Block):
    """A block for some of the tokens: ``x + r f(x)`` on those, ``x`` on all others (Raposo et al., equation 1).

    ``f(x)`` is what the block adds to ``x``, so that the residual is there once; the factor ``r``, the router's
    weight, gives the router its gradient. The tokens that are taken attend to each other alone, in their order and at
    their positions.

    Args:
        config, block_number, attention, mlp: as in :class:`~ds_dynmo.models.gpt.Block`.
        depths: the case's section.

    Attributes:
        sampling: as in :class:`MixtureOfDepthsConfig`.
        tokens_taken: tokens of the last training batch that it took, on this rank.
        tokens: all tokens that were counted there.
    """

    def __init__(
        self,
        config: GPTConfig,
        block_number: int,
        depths: MixtureOfDepthsConfig,
        attention: Callable[[Any, torch.Generator], nn.Module] | None = None,
        mlp: Callable[[Any, torch.Generator], nn.Module] | None = None,
    ) -> None:
        super().__init__(config, block_number, attention, mlp)
        generator = generator_for("mixture of depths", config.seed, block_number)
        self.depths = depths
        self.sampling = depths.sampling
        self.router = init_linear(config.hidden_size, 1, INIT_STD, generator)
        self.predictor = Predictor(config, depths, generator) if depths.sampling == "predictor" else None
        self.sequence_length = config.sequence_length
        self.tokens_taken: torch.Tensor | None = None
        self.tokens = 0

    def transform(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the block to tokens that it chooses; give its auxiliary loss too, with the predictor's, or None.

        Args:
            hidden: ``[batch, sequence, hidden]``, tokens in the order of their positions.
            positions: int64 ``[sequence]`` or ``[batch, sequence]``.
        """
        with torch.autocast(hidden.device.type, enabled=False):  # in bf16 many would be the same
            weights = F.linear(hidden.float(), self.router.weight.float()).squeeze(-1)
        positions = positions.expand(hidden.shape[:2])
        if not self.training and self.sampling != "topk":
            return self._on_members(hidden, weights, positions, self._members_causally(hidden, weights))[0], None
        if self.depths.threshold is None:
            chosen = top_tokens(weights, tokens_of(self.depths.capacity, hidden.shape[1]))
            members = torch.zeros_like(weights, dtype=torch.bool).scatter(1, chosen, True)
            changed, auxiliary = self._on_tokens(hidden, weights, positions, chosen)
        else:
            members = self._members_by_threshold(weights, self.depths.threshold)
            changed, auxiliary = self._on_members(hidden, weights, positions, members)
        if not self.training:
            return changed, auxiliary
        if not is_recomputing():
            self._count(members)
        if self.predictor is not None and self.router.weight.requires_grad:  # a frozen block has nothing to learn
            loss = self.depths.predictor_coefficient * self.predictor.loss(hidden, members)
            auxiliary = loss if auxiliary is None else auxiliary + loss
        return changed, auxiliary

    def _on_tokens(
        self, hidden: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the block at ``chosen``, int64 ``[batch, k]``, increasing in every sequence."""
        batch, sequence, width = hidden.shape
        flat = (chosen + sequence * torch.arange(batch, device=chosen.device).unsqueeze(1)).flatten()
        taken = hidden.reshape(-1, width).index_select(0, flat).view(batch, -1, width)
        made, auxiliary = super().transform(taken, positions.gather(1, chosen))
        change = (weights.gather(1, chosen).unsqueeze(-1) * (made - taken)).to(hidden.dtype)
        # No token comes twice, so that the order of additions does not matter.
        return hidden.reshape(-1, width).index_add(0, flat, change.view(-1, width)).view_as(hidden), auxiliary

    def _on_members(
        self, hidden: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the block at ``members``, bool ``[batch, sequence]``, one sequence at a time.

        The auxiliary loss is the mean of the sequences', None if no sequence has any.
        """
        parts, losses = [], []
        for number, taken in enumerate(members):
            one = slice(number, number + 1)
            chosen = taken.nonzero().view(1, -1)
            part = hidden[one]
            if chosen.numel():
                part, loss = self._on_tokens(part, weights[one], positions[one], chosen)
                losses += [] if loss is None else [loss]
            parts.append(part)
        return torch.cat(parts), torch.stack(losses).sum(dim=0) / len(parts) if losses else None

    def _members_by_threshold(self, weights: torch.Tensor, threshold: float) -> torch.Tensor:
        """Choose the tokens with the largest weights: as many as are above the threshold, within the bounds."""
        sequence = weights.shape[1]
        least, most = (tokens_of(bound, sequence) for bound in (self.depths.min_capacity, self.depths.max_capacity))
        counts = (weights > threshold).sum(dim=1, keepdim=True).clamp(least, most)
        order = top_order(weights)
        ranks = torch.empty_like(order).scatter(1, order, torch.arange(sequence, device=order.device).expand_as(order))
        return ranks < counts

    def _members_causally(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Choose each token without those after it."""
        if self.sampling == "threshold":
            assert self.depths.threshold is not None, "its sampling needs it"
            return weights > self.depths.threshold
        assert self.predictor is not None, "its sampling needs it"
        taken: torch.Tensor = self.predictor(hidden) > 0
        return taken

    def _count(self, members: torch.Tensor) -> None:
        taken = members.sum()  # stays on the accelerator until it is read
        if self.begins_batch() or self.tokens_taken is None:
            self.tokens_taken, self.tokens = torch.zeros_like(taken), 0
        self.tokens_taken = self.tokens_taken + taken
        self.tokens += members.numel()

    def load_signal(self) -> float:
        """Return the paper's ``r_i t_i`` (section 2, mixture of depths) over all tokens, the share that it takes.

        As it was in the last training batch; before the first, as it will be at the configured length. Times what
        other cases leave of the block. The paper counts attention as linear in its tokens like the rest.
        """
        most = self.depths.capacity if self.depths.threshold is None else self.depths.max_capacity
        expected = tokens_of(most, self.sequence_length) / self.sequence_length
        return super().load_signal() * (expected if self.tokens_taken is None else int(self.tokens_taken) / self.tokens)


class Predictor(nn.Module):
    """Predicts from a token alone whether its block's router will have it among the largest of the sequence.

    Raposo et al., section 3.5, the second of the two ways. Nothing before it gets a gradient.
    """

    def __init__(self, config: GPTConfig, depths: MixtureOfDepthsConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.expand = init_linear(config.hidden_size, depths.predictor_size, INIT_STD, generator)
        self.decide = init_linear(depths.predictor_size, 1, INIT_STD, generator)
        # Only the first is used. The others fill up: experts that lie behind in a flat buffer have to begin aligned.
        self.bias = nn.Parameter(torch.zeros(_ALIGNED - depths.predictor_size % _ALIGNED))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits, fp32 ``[batch, sequence]``, of ``[batch, sequence, hidden]``: above 0, the token is taken."""
        logits: torch.Tensor = self.decide(F.gelu(self.expand(hidden.detach()))) + self.bias[0]
        return logits.squeeze(-1).float()

    def loss(self, hidden: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
        """Compute the mean binary cross entropy, fp32 ``[1]``, of being in ``members``, bool ``[batch, sequence]``."""
        return F.binary_cross_entropy_with_logits(self(hidden), members.float()).view(1)


def top_tokens(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Find where the ``count`` largest weights of each sequence are, in increasing order; of equal ones the first.

    Args:
        weights: ``[batch, sequence]``.

    Returns:
        int64 ``[batch, count]``.

    >>> top_tokens(torch.tensor([[0.5, 0.9, 0.5, 0.1, 0.5]]), 3)
    tensor([[0, 1, 2]])
    """
    return top_order(weights)[:, :count].sort(dim=1).values


def top_order(weights: torch.Tensor) -> torch.Tensor:
    """Order each sequence by weight, the largest first; of equal ones the first."""
    return weights.detach().sort(dim=1, descending=True, stable=True).indices  # topk takes any of equal ones


def routed_block(
    model: GPTConfig, config: MixtureOfDepthsConfig, block_number: int, parts: dict[str, Any]
) -> list[LayerSpec] | None:
    """Specify block ``block_number``, counted from 1, if it is a routed one."""
    if not config.routes(block_number):
        return None
    return [LayerSpec(MixtureOfDepthsBlock, model, block_number, config, **parts)]

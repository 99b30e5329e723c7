"""Mixture of Depths: some blocks take only the tokens that their router gives the largest weights (paper, section 2).

Raposo et al., "Mixture-of-Depths: Dynamically allocating compute in transformer-based language models" (2024). Choosing
the top-k of a whole sequence looks at later tokens. That is how it trains; for causal use a small predictor learns
which tokens are among them from each token alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from torch import nn

from ds_dynmo.models.gpt import Block
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.transformer import INIT_STD, init_linear

__all__ = ["MixtureOfDepthsBlock", "MixtureOfDepthsConfig", "Predictor", "top_tokens"]

OF_THE_PREDICTOR = ("predictor_size", "predictor_coefficient")


class MixtureOfDepthsConfig(BaseModel):
    """The "mod" block. The defaults are the paper's best: an eighth of the tokens in every second block."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    capacity: float = Field(
        default=0.125,
        gt=0,
        le=1,
        description="tokens that a routed block takes, as a fraction of a sequence; at least 1",
    )
    every: int = Field(default=2, ge=1, description="every so many blocks one is routed, the last of them; 1: all are")
    sampling: Literal["topk", "predictor"] = Field(
        default="predictor",
        description="who chooses at evaluation; only the predictor's choice does not depend on later tokens",
    )
    predictor_size: int = Field(default=32, ge=1, description="width of the predictor's hidden layer")
    predictor_coefficient: float = Field(default=0.01, gt=0, description="of the predictor's loss in the total")

    @field_validator(*OF_THE_PREDICTOR)
    @classmethod
    def _of_this_sampling(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if info.data.get("sampling") == "topk" and value != cls.model_fields[info.field_name].default:
            raise ValueError('is used by sampling "predictor" only, this is "topk"')
        return value

    def routes(self, block: int) -> bool:
        """Is block number ``block``, counted from 1, a routed one?

        >>> [block for block in range(1, 7) if MixtureOfDepthsConfig(every=2).routes(block)]
        [2, 4, 6]
        """
        return block % self.every == 0

    def tokens(self, sequence: int) -> int:
        """Count the tokens that a routed block takes in training: at least 1, halves rounded to even."""
        return max(1, round(self.capacity * sequence))


class MixtureOfDepthsBlock(Block):
    """A block for some of the tokens: ``x + r f(x)`` on those, ``x`` on all others (Raposo et al., equation 1).

    ``f(x)`` is what the block adds to ``x``, so that the residual is there once; the factor ``r``, the router's
    weight, gives the router its gradient. The tokens that are taken attend to each other alone, in their order and at
    their positions.

    Args:
        config, layer, attention, mlp: as in :class:`~ds_dynmo.models.gpt.Block`.
        depths: the "mod" block.

    Attributes:
        sampling: as in :class:`MixtureOfDepthsConfig`.
        routed_share: the share of the tokens that it took in the last training batch.
    """

    def __init__(
        self,
        config: GPTConfig,
        layer: int,
        depths: MixtureOfDepthsConfig,
        attention: Callable[[Any, torch.Generator], nn.Module] | None = None,
        mlp: Callable[[Any, torch.Generator], nn.Module] | None = None,
    ) -> None:
        super().__init__(config, layer, attention, mlp)
        generator = generator_for("mixture of depths", config.seed, layer)
        self.depths = depths
        self.sampling = depths.sampling
        self.router = init_linear(config.hidden_size, 1, INIT_STD, generator)
        self.predictor = Predictor(config, depths, generator) if depths.sampling == "predictor" else None
        self.routed_share = depths.tokens(config.sequence_length) / config.sequence_length

    def load_signal(self) -> float:
        """The paper's ``r_i t_i`` (section 2, mixture of depths) over all tokens: the share that the block takes.

        As it was in the last training batch; before the first, as it will be at the configured length. Times what
        other cases leave of the block. The paper counts attention as linear in its tokens like the rest.
        """
        return super().load_signal() * self.routed_share

    def transform(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the block to tokens that it chooses; give its auxiliary loss too, with the predictor's, or None.

        Args:
            hidden: ``[batch, sequence, hidden]``, tokens in the order of their positions.
            positions: int64 ``[sequence]`` or ``[batch, sequence]``.
        """
        with torch.autocast(hidden.device.type, enabled=False):  # in bf16 many would be the same
            weights = F.linear(hidden.float(), self.router.weight.float()).squeeze(-1)
        positions = positions.expand(hidden.shape[:2])
        if not self.training and self.sampling == "predictor":
            return self._where_predicted(hidden, weights, positions), None
        chosen = top_tokens(weights, self.depths.tokens(hidden.shape[1]))
        changed, auxiliary = self._on_tokens(hidden, weights, positions, chosen)
        if not self.training:
            return changed, auxiliary
        self.routed_share = chosen.shape[1] / hidden.shape[1]
        if self.predictor is not None and self.router.weight.requires_grad:  # a frozen block has nothing to learn
            loss = self.depths.predictor_coefficient * self.predictor.loss(hidden, chosen)
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

    def _where_predicted(self, hidden: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply the block where the predictor says so, to any number of tokens, one sequence at a time."""
        assert self.predictor is not None, "its sampling needs it"
        parts = []
        for number, taken in enumerate(self.predictor(hidden) > 0):
            one = slice(number, number + 1)
            chosen = taken.nonzero().view(1, -1)
            part = hidden[one]
            if chosen.numel():
                part, _ = self._on_tokens(part, weights[one], positions[one], chosen)
            parts.append(part)
        return torch.cat(parts)


class Predictor(nn.Module):
    """Predicts from a token alone whether its block's router will have it among the largest of the sequence.

    Raposo et al., section 3.5, the second of the two ways. Nothing before it gets a gradient.
    """

    def __init__(self, config: GPTConfig, depths: MixtureOfDepthsConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.expand = init_linear(config.hidden_size, depths.predictor_size, INIT_STD, generator)
        self.decide = init_linear(depths.predictor_size, 1, INIT_STD, generator)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[batch, sequence, hidden]`` to logits, fp32 ``[batch, sequence]``: above 0, the token is taken."""
        return (self.decide(F.gelu(self.expand(hidden.detach()))) + self.bias).squeeze(-1).float()

    def loss(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Compute the mean binary cross entropy, fp32 ``[1]``, of being in ``chosen``, int64 ``[batch, k]``."""
        logits = self(hidden)
        members = torch.zeros_like(logits).scatter(1, chosen, 1.0)
        return F.binary_cross_entropy_with_logits(logits, members).view(1)


def top_tokens(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Find where the ``count`` largest weights of each sequence are, in increasing order; of equal ones the first.

    Args:
        weights: ``[batch, sequence]``.

    Returns:
        int64 ``[batch, count]``.

    >>> top_tokens(torch.tensor([[0.5, 0.9, 0.5, 0.1, 0.5]]), 3)
    tensor([[0, 1, 2]])
    """
    order = weights.detach().sort(dim=1, descending=True, stable=True).indices  # topk takes any of equal ones
    return order[:, :count].sort(dim=1).values

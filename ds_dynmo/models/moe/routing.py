"""Route tokens to experts by token choice: each token takes its best ``top_k`` (paper, section 2, MoE).

What keeps experts about equally busy is one of three: Mixtral's auxiliary loss, S-BASE's assignment by optimal
transport (Sinkhorn), or DeepSeek's bias without a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.models.gpt import INIT_STD, init_linear
from ds_dynmo.models.host_numbers import counts_of
from ds_dynmo.models.moe.config import MoEConfig

__all__ = ["Router", "Routing", "load_balancing_loss", "sinkhorn"]

LEAST_AFFINITY = 1e-100  # relative to a row's largest, so that Sinkhorn never divides by zero


@dataclass(frozen=True)
class Routing:
    """The experts that :class:`Router` chose.

    Attributes:
        experts: int64 ``[tokens, top_k]``, best first.
        gates: the weights of the experts' outputs, fp32 ``[tokens, top_k]``.
        auxiliary: the auxiliary loss, fp32 ``[1]``.
    """

    experts: torch.Tensor
    gates: torch.Tensor
    auxiliary: torch.Tensor | None = None


class Router(nn.Module):
    """Computes affinities of tokens to experts, and each token's choices, in fp32 whatever the hidden states' dtype.

    - "aux_loss" (Mixtral): the ``top_k`` of a softmax over all experts, weighted by it, renormalised.
    - "sbase" (S-BASE): in training the ``top_k`` of the Sinkhorn-scaled affinities, weighted by the plain softmax over
      all experts (``top_k`` 1: the sigmoid), no gradient through the selection. In evaluation the best of each token:
      there is no batch to balance over, and a token must not depend on later ones.
    - "bias" (DeepSeek): the ``top_k`` of score + bias, weighted by the scores, renormalised.

    A single choice (``top_k`` 1) is not renormalised: a gate that is always 1 would teach the router nothing.

    Attributes:
        bias_steps: with routing "bias", int64 ``[experts]``: how often each expert's bias went up less how often down.
    """

    bias_steps: torch.Tensor

    def __init__(self, config: MoEConfig, hidden_size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.affinity = init_linear(hidden_size, config.experts, INIT_STD, generator)
        if config.routing == "bias":  # a number of steps is exact in every precision
            self.register_buffer("bias_steps", torch.zeros(config.experts, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> Routing:
        """Route ``tokens``, ``[tokens, hidden]``. There is an auxiliary loss in training with routing "aux_loss"."""
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.affinity.weight.float())
        return {"aux_loss": self._mixtral, "sbase": self._sbase, "bias": self._deepseek}[self.config.routing](logits)

    def _mixtral(self, logits: torch.Tensor) -> Routing:
        experts = logits.detach().topk(self.config.top_k, dim=-1).indices
        auxiliary = None
        if self.training:
            auxiliary = self.config.auxiliary_coefficient * load_balancing_loss(logits.softmax(dim=-1), experts)
        return Routing(experts, _renormalised(logits.log_softmax(dim=-1), experts), auxiliary)

    def _sbase(self, logits: torch.Tensor) -> Routing:
        affinities = logits.detach()
        if self.training:
            affinities = sinkhorn(
                affinities, tolerance=self.config.sinkhorn_tolerance, iterations=self.config.sinkhorn_iterations
            )
        experts = affinities.topk(self.config.top_k, dim=-1).indices
        weights = logits.sigmoid() if self.config.top_k == 1 else logits.softmax(dim=-1)
        return Routing(experts, weights.gather(-1, experts))

    def _deepseek(self, logits: torch.Tensor) -> Routing:
        log_scores = F.logsigmoid(logits) if self.config.scores == "sigmoid" else logits.log_softmax(dim=-1)
        experts = (log_scores.detach().exp() + self.bias).topk(self.config.top_k, dim=-1).indices
        return Routing(experts, _renormalised(log_scores, experts))

    @property
    def bias(self) -> torch.Tensor:
        """Added to the scores for the selection, fp32 ``[experts]``."""
        return self.bias_steps * self.config.bias_rate

    def balance(self, choices: Sequence[int]) -> None:
        """Update the biases after a batch as DeepSeek does: ``b += rate * sign(mean - count)``.

        Args:
            choices: per expert, how many tokens of the batch chose it, on all replicas.
        """
        counts = torch.tensor(choices, device=self.bias_steps.device)
        self.bias_steps += (counts.sum() - len(choices) * counts).sign()


def _renormalised(log_scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Divide each chosen expert's score by the sum of those chosen; in logarithms, as scores may come out as 0."""
    chosen = log_scores.gather(-1, experts)
    return chosen.exp() if chosen.shape[-1] == 1 else chosen.softmax(dim=-1)


def load_balancing_loss(probabilities: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Compute Mixtral's auxiliary loss ``E * sum_i f_i P_i`` of a layer and micro-batch; ``top_k`` for equal experts.

    ``f_i`` is the fraction of tokens that choose expert ``i`` (over all ``i`` they sum to ``top_k``), without gradient;
    ``P_i`` the mean probability of expert ``i``.

    Args:
        probabilities: ``[tokens, experts]``.
        experts: int64 ``[tokens, top_k]``.

    Returns:
        fp32 ``[1]``.
    """
    num_tokens, num_experts = probabilities.shape
    fractions = counts_of(experts, num_experts) / num_tokens
    return num_experts * (fractions * probabilities.mean(dim=0)).sum().reshape(1)


def sinkhorn(logits: torch.Tensor, *, tolerance: float, iterations: int) -> torch.Tensor:
    """Scale rows and columns of ``exp(logits)`` in turn until every token gives 1 and every expert takes its share.

    Args:
        logits: ``[tokens, experts]``, without gradient.
        tolerance: the most that a row's sum may be off by in the end. Columns are exact.
        iterations: after which it ends at the latest.

    Returns:
        float64 ``[tokens, experts]``: rows sum to 1, columns to tokens / experts.
    """
    affinities = logits.double()
    affinities = (affinities - affinities.amax(dim=1, keepdim=True)).exp().clamp_min(LEAST_AFFINITY)
    share = affinities.shape[0] / affinities.shape[1]
    sums = affinities.sum(dim=1)
    for _ in range(iterations):
        rows = 1 / sums
        columns = share / (rows @ affinities)
        sums = affinities @ columns
        if ((rows * sums - 1).abs().max() <= tolerance).item():
            break
    return rows.unsqueeze(1) * affinities * columns

"""Mixture of experts: tokens go to some of a layer's feed-forward networks (paper, section 2, MoE).

Their weights are ``[experts, ...]``. A rank holds those of all experts; with ``expert_parallel`` a slice, its share of
what the data-parallel replicas hold together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.batch_counts import CountsPerBatch, is_recomputing
from ds_dynmo.models.case import DynamicCase, RunSizes
from ds_dynmo.models.gpt import INIT_STD, init_normal, residual_std
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.host_numbers import counts_of
from ds_dynmo.models.layer_numbers import local_layers
from ds_dynmo.models.moe.config import MoEConfig
from ds_dynmo.models.moe.expert_parallel import Replicas, experts_of, loads_of_replicas, through_replicas
from ds_dynmo.models.moe.grouped_linear import grouped_linear
from ds_dynmo.models.moe.routing import Router

__all__ = ["MixtureOfExperts", "RouterBiasUpdate", "expert_parts"]


class MixtureOfExperts(CountsPerBatch):
    """``sum of gate * expert(x)`` over the experts that a token chose; an expert is two linear layers with a GELU.

    With a ``capacity_factor`` an expert takes at most ``ceil(capacity_factor * top_k * tokens / experts)`` choices of a
    micro-batch in training: first choices before second ones, earlier tokens before later ones. The others are
    dropped: they add nothing to the residual stream. With ``expert_parallel`` that goes for the tokens of each replica,
    so that dropping does not depend on which replica has the experts.

    Attributes:
        expand: ``[experts, mlp_ratio * hidden, hidden]``; of experts that are distributed over replicas, this one's.
        contract: ``[experts, hidden, mlp_ratio * hidden]``, likewise.
        choices_per_expert: how many tokens of the last training batch, on this rank, chose each expert of all.
        tokens_per_expert: how many of them it took; the same without capacity.
        busiest_tokens: tokens of the busiest replica of each micro-batch, summed over the last training batch.
        mean_choices: choices in the last training batch, the mean over the replicas that hold the experts.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator, *, moe: MoEConfig) -> None:
        super().__init__()
        width = config.mlp_ratio * config.hidden_size
        self.num_experts = moe.experts
        self.expert_parallel = moe.expert_parallel
        self.top_k = moe.top_k
        self.capacity_factor = moe.capacity_factor
        self.router = Router(moe, config.hidden_size, generator)
        self.expand = nn.Parameter(torch.empty(moe.experts, width, config.hidden_size))
        self.contract = nn.Parameter(torch.empty(moe.experts, config.hidden_size, width))
        init_normal(self.expand, INIT_STD, generator)
        init_normal(self.contract, residual_std(config), generator)
        self._replicas = Replicas()
        self._count_from_zero()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Apply the experts to ``[batch, sequence, hidden]``; return the router's auxiliary loss, fp32 ``[1]``, too."""
        tokens = hidden.flatten(0, -2)
        routing = self.router(tokens)
        choices = routing.experts.t().flatten()  # all first choices, then all second ones: what capacity goes by
        chosen = counts_of(choices, self.num_experts).tolist()
        order = choices.argsort(stable=True)
        taken = chosen
        if self.capacity_factor is not None and self.training:  # else a token's way would depend on later ones
            capacity = math.ceil(Fraction(str(self.capacity_factor)) * len(choices) / self.num_experts)
            order = torch.cat([of_expert[:capacity] for of_expert in order.split(chosen)])
            taken = [min(count, capacity) for count in chosen]
        shared = len(self.expand) < self.num_experts
        everyone = self._replicas.gather([*taken, len(choices)], hidden.device) if shared else [[*taken, len(choices)]]
        table = [row[:-1] for row in everyone]
        if self.training and not is_recomputing():
            if self.begins_batch():
                self._count_from_zero()
            self._count(chosen, taken)
            self.busiest_tokens += max(loads_of_replicas(table))
            self.mean_choices += sum(row[-1] for row in everyone) / len(everyone)

        # Every place is read once: index_select's gradient then has one addend each, the same in any order.
        rows = tokens.repeat(self.top_k, 1).index_select(0, order)
        outputs = through_replicas(rows, table, self._replicas, self._experts) if shared else self._experts(rows, taken)
        placed = outputs.new_zeros(len(choices), outputs.shape[1]).index_copy(0, order, outputs)
        gates = routing.gates.t().unsqueeze(-1)
        mixed = (placed.view(self.top_k, *tokens.shape) * gates).sum(dim=0).to(hidden.dtype).view_as(hidden)
        return mixed if routing.auxiliary is None else (mixed, routing.auxiliary)

    def _experts(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Apply the experts here to ``rows``, ``[rows, hidden]``, sorted by expert; ``counts``: rows of each."""
        return grouped_linear(F.gelu(grouped_linear(rows, self.expand, counts)), self.contract, counts)

    def load_signal(self) -> float:
        """Return the paper's load of a worker as a share: ``L_j = sum_{e on j} sum_{t in R^-1(e)} c_e`` (section 2).

        It is that of the busiest replica, over its load if every token went to every expert: tokens taken by its
        experts, over experts times the tokens of a replica. For the last training batch; the same on all replicas.

        Replicas wait for one another in every micro-batch, so the largest ``L_j`` of each counts. For a rank that has
        all experts, and where replicas share the work evenly, it is ``top_k / experts`` (as before any batch) times
        what capacity leaves of the choices.
        """
        share = self.busiest_tokens / self.mean_choices if self.mean_choices else 1.0
        return share * self.top_k / self.num_experts

    def _count_from_zero(self) -> None:
        self.choices_per_expert = [0] * self.num_experts
        self.tokens_per_expert = [0] * self.num_experts
        self.busiest_tokens, self.mean_choices = 0, 0.0

    def _count(self, chosen: list[int], taken: list[int]) -> None:
        self.choices_per_expert = [sum(pair) for pair in zip(self.choices_per_expert, chosen)]
        self.tokens_per_expert = [sum(pair) for pair in zip(self.tokens_per_expert, taken)]

    def use_replicas(self, group: Any) -> None:
        """Set the data-parallel replicas of the present stage. The engine calls this after every move.

        With ``expert_parallel``, the first call leaves this replica's share of the experts, as they were initialised.

        Args:
            group: the process group of the stage's replicas.

        Raises:
            ConfigError: the experts cannot be shared out evenly.
        """
        if not self.expert_parallel:
            return
        self._replicas = Replicas(group)
        size = self._replicas.size
        if self.num_experts % size:
            raise ConfigError(
                f"model.case.expert_parallel = true: {self.num_experts} experts (model.case.experts) cannot be shared "
                f"out evenly over {size} data-parallel replicas"
            )
        if size == 1:
            return
        for weights in (self.expand, self.contract):
            if len(weights) == self.num_experts:
                weights.data = weights.data[experts_of(self._replicas.index, size, self.num_experts)].clone()
            weights.replica_own = True  # type: ignore[attr-defined]


class RouterBiasUpdate(DynamicCase):
    """Updates the routers' biases after each batch, if routing is "bias"; skips frozen layers."""

    name = "moe"

    def __init__(self, config: MoEConfig, engine: Any, sizes: RunSizes) -> None:
        super().__init__(engine)
        self._config = config
        self._num_layers = sizes.num_layers

    def after_batch(self, steps_done: int) -> None:
        """Update the biases, with routing "bias", by the choices in all micro-batches of all replicas."""
        if self._config.routing != "bias":
            return
        choices = torch.zeros(self._num_layers, self._config.experts, dtype=torch.int64)
        for number, layer in self._local_moe():
            choices[number] = torch.tensor(layer.choices_per_expert)
        choices = self.engine.sum_over_replicas(choices)  # they hold the same layers
        for number, layer in self._local_moe():
            if layer.router.affinity.weight.requires_grad:  # a frozen layer must not change
                layer.router.balance(choices[number].tolist())

    def _local_moe(self) -> Iterator[tuple[int, MixtureOfExperts]]:
        for number, layer in local_layers(self.engine.module):
            part = getattr(layer, "mlp", None)
            if isinstance(part, MixtureOfExperts):
                yield number, part


def expert_parts(model: GPTConfig, config: MoEConfig, block_number: int) -> dict[str, Any]:
    """Return parts of block ``block_number``, counted from 1: arguments of :class:`~ds_dynmo.models.gpt.Block`."""
    return {"mlp": partial(MixtureOfExperts, moe=config)} if block_number in config.blocks(model.layers) else {}

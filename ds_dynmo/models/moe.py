"""Mixture of experts: tokens go to some of a layer's feed-forward networks (paper, section 2, MoE).

All experts of a layer are on the rank that has the layer; their weights are ``[experts, ...]``, so that some of the
experts are a slice of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.models.case import DynamicCase
from ds_dynmo.models.gpt import INIT_STD, GPTConfig, init_normal, residual_std
from ds_dynmo.models.grouped_linear import grouped_linear
from ds_dynmo.models.local_layers import local_layers
from ds_dynmo.models.recomputation import is_recomputing
from ds_dynmo.models.routing import MoEConfig, Router

__all__ = ["ExpertBalance", "MixtureOfExperts"]


class MixtureOfExperts(nn.Module):
    """``sum of gate * expert(x)`` over the experts that a token chose; an expert is two linear layers with a GELU.

    With a ``capacity_factor`` an expert takes at most ``ceil(capacity_factor * top_k * tokens / experts)`` choices of a
    micro-batch: first choices before second ones, earlier tokens before later ones. The others are dropped: they add
    nothing to the residual stream.

    Attributes:
        expand: ``[experts, mlp_ratio * hidden, hidden]``.
        contract: ``[experts, hidden, mlp_ratio * hidden]``.
        choices_per_expert: how many tokens of the last training batch, on this rank, chose each expert.
        tokens_per_expert: how many of them it took; the same without capacity.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator, *, moe: MoEConfig) -> None:
        super().__init__()
        width = config.mlp_ratio * config.hidden_size
        self.top_k = moe.top_k
        self.capacity_factor = moe.capacity_factor
        self.router = Router(moe, config.hidden_size, generator)
        self.expand = nn.Parameter(torch.empty(moe.experts, width, config.hidden_size))
        self.contract = nn.Parameter(torch.empty(moe.experts, config.hidden_size, width))
        init_normal(self.expand, INIT_STD, generator)
        init_normal(self.contract, residual_std(config), generator)
        self.start_batch()

    @property
    def num_experts(self) -> int:
        return len(self.expand)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``[batch, sequence, hidden]`` to the same; with an auxiliary loss, fp32 ``[1]``, where the router has one."""
        tokens = hidden.flatten(0, -2)
        routing = self.router(tokens)
        choices = routing.experts.t().flatten()  # all first choices, then all second ones: what capacity goes by
        chosen = torch.bincount(choices, minlength=self.num_experts).tolist()
        order = choices.argsort(stable=True)
        taken = chosen
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * len(choices) / self.num_experts)
            order = torch.cat([of_expert[:capacity] for of_expert in order.split(chosen)])
            taken = [min(count, capacity) for count in chosen]
        if self.training and not is_recomputing():
            self._count(chosen, taken)

        # Every place is read once: index_select's gradient then has one addend each, the same in any order.
        rows = tokens.repeat(self.top_k, 1).index_select(0, order)
        outputs = grouped_linear(F.gelu(grouped_linear(rows, self.expand, taken)), self.contract, taken)
        placed = outputs.new_zeros(len(choices), outputs.shape[1]).index_copy(0, order, outputs)
        gates = routing.gates.t().unsqueeze(-1)
        mixed = (placed.view(self.top_k, *tokens.shape) * gates).sum(dim=0).to(hidden.dtype).view_as(hidden)
        return mixed if routing.auxiliary is None else (mixed, routing.auxiliary)

    def load_signal(self) -> float:
        """The paper's load of the worker that has all experts of this layer, ``L = sum_e sum_{t in R^-1(e)} c_e``
        (section 2, MoE), over the work of sending every token to every expert: tokens taken by the experts in the last
        training batch, over experts times tokens. Without capacity that is ``top_k / experts``, as before any batch.
        """
        choices = sum(self.choices_per_expert)
        share = sum(self.tokens_per_expert) / choices if choices else 1.0
        return share * self.top_k / self.num_experts

    def start_batch(self) -> None:
        """From here on tokens are counted anew."""
        self.choices_per_expert = [0] * self.num_experts
        self.tokens_per_expert = [0] * self.num_experts

    def _count(self, chosen: list[int], taken: list[int]) -> None:
        self.choices_per_expert = [sum(pair) for pair in zip(self.choices_per_expert, chosen)]
        self.tokens_per_expert = [sum(pair) for pair in zip(self.tokens_per_expert, taken)]


class ExpertBalance(DynamicCase):
    """Counts tokens batch by batch, and with routing "bias" updates the biases of layers that train after each."""

    name = "moe"

    def __init__(self, config: MoEConfig, engine: Any, *, num_layers: int) -> None:
        super().__init__(engine)
        self._config = config
        self._num_layers = num_layers

    def before_batch(self, step: int) -> None:
        """Lets the layers count anew."""
        for _, layer in self._local_moe():
            layer.start_batch()

    def after_batch(self, steps_done: int) -> None:
        """Routing "bias": one update by what the whole batch chose: all micro-batches, all replicas."""
        if self._config.routing != "bias":
            return
        choices = torch.zeros(self._num_layers, self._config.experts, dtype=torch.int64)
        for number, layer in self._local_moe():
            choices[number] = torch.tensor(layer.choices_per_expert)
        choices = self.engine.sum_over_replicas(choices)  # they hold the same layers
        for number, layer in self._local_moe():
            if layer.router.affinity.weight.requires_grad:  # a frozen layer is to stay the function that it is
                layer.router.balance(choices[number].tolist())

    def _local_moe(self) -> Iterator[tuple[int, MixtureOfExperts]]:
        for number, layer in local_layers(self.engine.module):
            part = getattr(layer, "mlp", None)
            if isinstance(part, MixtureOfExperts):
                yield number, part

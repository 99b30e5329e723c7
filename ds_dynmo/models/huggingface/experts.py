"""Decoder layers with experts: what they take is counted, and data-parallel replicas can share them out.

Transformers' module of a layer's experts stays as it is, and computes, whatever its kind. Hooks count what it is given.
Where experts are distributed over replicas, hooks give it the rows of its own experts, from all replicas, and send the
results back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.batch_counts import CountsPerBatch, is_recomputing
from ds_dynmo.models.huggingface.halves import Half
from ds_dynmo.models.huggingface.modules import DecoderLayer, RouterLoss
from ds_dynmo.models.huggingface.outline import Experts
from ds_dynmo.models.huggingface.source import Source
from ds_dynmo.models.moe.expert_parallel import Dispatch, Replicas, experts_of, loads_of_replicas
from ds_dynmo.models.stream import Activations

__all__ = ["MoEDecoderLayer", "keep_share"]


def keep_share(module: nn.Module, share: slice, count: int) -> None:
    """Leave ``share`` of ``count`` experts in transformers' ``module`` of them, if it does not have just these."""
    kept = share.stop - share.start
    for weights in module.parameters():
        if len(weights) == count > kept:
            weights.data = weights.data[share].clone()
    module.num_experts = kept


class MoEDecoderLayer(CountsPerBatch, DecoderLayer):
    """A decoder layer with experts, or the half that has them.

    A batch begins with a call of ``train()``, as DeepSpeed's ``train_batch`` does; what is recomputed for the backward
    pass is not counted again.

    Attributes:
        choices: how many tokens of the last training batch, on this rank, chose each expert of all; None before it.
        busiest: tokens of the busiest replica of each micro-batch, summed over the last training batch.
        mean: tokens of a replica there, the mean over those that hold the experts.
    """

    def __init__(
        self,
        source: Source,
        layer: int,
        block: int,
        router_loss: RouterLoss | None,
        half: Half | None = None,
        *,
        experts: Experts,
    ) -> None:
        super().__init__(source, layer, block, router_loss, half)
        self.experts = experts
        self._unread = (source, layer) if source.reads_later else None
        self._replicas = Replicas()
        self.choices: torch.Tensor | None = None
        self.busiest, self.mean = 0, 0.0

    @property
    def compiled_parts(self) -> tuple[str, ...]:
        """Nothing: hooks note which experts are chosen, by the data."""
        return ()

    def use_replicas(self, group: Any) -> None:
        """Set the data-parallel replicas of the present stage. The engine calls this after every move.

        Where experts are distributed over replicas, the first call leaves this replica's share, or reads it.

        Args:
            group: the process group of the stage's replicas.

        Raises:
            ConfigError: the experts cannot be shared out evenly.
        """
        if not self.experts.parallel:
            return
        self._replicas = Replicas(group)
        count, size = self.experts.count, self._replicas.size
        if count % size:
            raise ConfigError(
                f"expert_parallel: {count} experts ({self.experts.key}) cannot be shared out evenly over {size} "
                "data-parallel replicas"
            )
        module, share = self._module, experts_of(self._replicas.index, size, count)
        if self._unread is not None:
            (source, layer), self._unread = self._unread, None
            source.read_experts(self.part, layer, share)
        keep_share(module, share, count)
        if size > 1:
            for weights in module.parameters():
                weights.replica_own = True  # type: ignore[attr-defined]

    def forward(self, activations: Activations) -> Activations:
        assert self._unread is None, "experts are read when an engine tells the layer its replicas"
        with self._hooked(_ExpertPass(self, self._replicas if self._shared else None)):
            return super().forward(activations)

    def load_signal(self) -> float:
        """Return the paper's load of a worker, as :meth:`ds_dynmo.models.moe.layer.MixtureOfExperts.load_signal` does.

        0.0 if no parameter of this layer trains.
        """
        if not any(parameter.requires_grad for parameter in self.parameters()):
            return 0.0
        share = self.busiest / self.mean if self.mean else 1.0
        return share * self.experts.top_k / self.experts.count

    def count(self, choices: torch.Tensor, busiest: int, mean: float) -> None:
        """Count a micro-batch of training."""
        if self.begins_batch() or self.choices is None:
            self.choices, self.busiest, self.mean = torch.zeros_like(choices), 0, 0.0
        self.choices = self.choices + choices
        self.busiest += busiest
        self.mean += mean

    @property
    def _module(self) -> nn.Module:
        return self.part.get_submodule(self.experts.path)

    @property
    def _shared(self) -> bool:
        """Whether other replicas have some of the experts."""
        return any(len(weights) < self.experts.count for weights in self._module.parameters())

    @contextmanager
    def _hooked(self, one: _ExpertPass) -> Iterator[None]:
        """Register ``one`` as hooks of transformers' module in the body: a layer that moves or is saved has none."""
        handles = [self._module.register_forward_pre_hook(one.before), self._module.register_forward_hook(one.after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MoEDecoderLayer:
        """Convert as ``nn.Module`` does. Experts that are still to be read take no memory on any device."""
        unread = [] if self._unread is None else [(weights, weights.shape) for weights in self._module.parameters()]
        for weights, _ in unread:
            weights.data = weights.data.new_empty(0)
        super()._apply(fn, recurse)
        for weights, shape in unread:
            weights.data = weights.data.new_empty(()).expand(shape)
        return self


class _ExpertPass:
    """What is done around transformers' experts in one pass of a layer.

    Args:
        replicas: that share the layer's experts; None: all are here.
    """

    def __init__(self, layer: MoEDecoderLayer, replicas: Replicas | None) -> None:
        self._layer, self._replicas = layer, replicas

    def before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...] | None:
        """Count choices. Where experts are shared, replace what the module is given by all rows for its experts."""
        hidden, chosen, self._weights = inputs
        layer, chosen = self._layer, chosen.flatten()
        counts = layer.training and not is_recomputing()
        choices = chosen.new_zeros(layer.experts.count).scatter_add(0, chosen, torch.ones_like(chosen))
        if self._replicas is None:
            if counts:
                layer.count(choices, len(chosen), len(chosen))
            return None
        table = self._replicas.gather(choices.tolist(), hidden.device)
        if counts:
            layer.count(choices, max(loads_of_replicas(table)), sum(map(sum, table)) / len(table))
        self._dispatch = Dispatch(table, self._replicas, hidden.device)
        self._order = chosen.argsort(stable=True)
        top_k = self._weights.shape[1]
        rows = hidden.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1).index_select(0, self._order)
        return self._for_module(self._dispatch.to_experts(rows), list(self._dispatch.counts))

    def after(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Take the results of shared experts back and add up each token's, weighted, as transformers does."""
        if self._replicas is None:
            return output
        made = self._dispatch.back(output[: sum(self._dispatch.counts)])
        placed = torch.zeros_like(made).index_copy(0, self._order, made) * self._weights.flatten().unsqueeze(1)
        summed: torch.Tensor = placed.view(*self._weights.shape, -1).sum(dim=1).to(output.dtype)
        return summed

    def _for_module(self, rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, ...]:
        """Make of ``rows``, sorted by expert, tokens that chose one expert each, with weight 1.

        There is one at least. So experts that nobody chose get gradients, zeros, as with all experts in one place, and
        the backward pass sends what it has, nothing, back to the other replicas, which wait for it.
        """
        if not len(rows):
            rows, counts[0] = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), 1
        every = torch.arange(len(counts), device=rows.device)
        numbers = every.repeat_interleave(torch.tensor(counts, device=rows.device))
        return rows, numbers.unsqueeze(1), self._weights.new_ones(len(rows), 1)

"""Gradual global magnitude pruning (paper, section 2, parameter pruning, and Algorithm 1; Zhu and Gupta, 2017).

At a few steps of the run the smallest weights of the whole model are set to zero, for good: their gradients, fp32
master weights and optimizer state are zero from then on, or gone where the parameter becomes the vector of kept values.
The linear weights of all blocks are pruned; embedding, norms and head are not. Magnitudes are compared in compute
precision, bf16 under bf16: those weights are the same on every replica, while fp32 master weights may be sharded. Among
equal magnitudes, of which bf16 has many, layer and position decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import logger
from torch import nn

from ds_dynmo.models.case import DynamicCase, RunSizes
from ds_dynmo.models.gpt import Block
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.half_blocks import AttentionHalf, BlockTypes, FeedForwardHalf, block_layers
from ds_dynmo.models.layer_numbers import local_layers
from ds_dynmo.models.pruning.config import PruningConfig
from ds_dynmo.models.pruning.magnitude import Linears, select_largest
from ds_dynmo.models.pruning.prunable_layer import PrunableLayer, prunable_linears
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear

__all__ = [
    "PrunableAttentionHalf",
    "PrunableBlock",
    "PrunableFeedForwardHalf",
    "Pruning",
    "prunable_block",
    "pruning_steps",
    "scheduled_sparsity",
]


def scheduled_sparsity(config: PruningConfig, pruning: int) -> float:
    """Compute Zhu and Gupta's ``S_t`` at pruning number ``pruning``, 0 to ``times``.

    >>> [round(scheduled_sparsity(PruningConfig(), pruning), 4) for pruning in range(5)]
    [0.0, 0.5203, 0.7875, 0.8859, 0.9]
    """
    change = config.initial_sparsity - config.final_sparsity
    return config.final_sparsity + change * (1 - pruning / config.times) ** 3


def pruning_steps(config: PruningConfig, total_steps: int) -> dict[int, float]:
    """List the steps, counted from 0, before which there is a pruning, and to what sparsity.

    The last pruning is before the last step at the latest. Of several that fall on one step the last counts.

    >>> pruning_steps(PruningConfig(start=0.25, end=0.75, times=2, final_sparsity=0.5), total_steps=8)
    {2: 0.0, 4: 0.4375, 6: 0.5}
    """
    distance = (config.end - config.start) / config.times
    steps = [round((config.start + pruning * distance) * total_steps) for pruning in range(config.times + 1)]
    return {min(step, total_steps - 1): scheduled_sparsity(config, pruning) for pruning, step in enumerate(steps)}


class Pruning(DynamicCase):
    """Prunes the model on schedule. It has no state of its own: a resumed run finds what is pruned in the layers.

    Masks may have been loaded without the optimizer's moments; those of pruned weights are zeroed before a batch.
    """

    name = "pruning"

    def __init__(self, config: PruningConfig, engine: Any, sizes: RunSizes) -> None:
        super().__init__(engine)
        self._num_layers = sizes.num_layers
        self._steps = pruning_steps(config, sizes.total_steps)
        self._loaded = True  # layers may have been, before this was built
        self._told = False
        engine.before_step(self._zero_gradients)

    def prune(self, sparsity: float) -> None:
        """Keep ``round(N (1 - sparsity))`` of the model's ``N`` prunable weights; pruned ones stay pruned. Collective.

        Args:
            sparsity: in [0, 1).
        """
        linears = local_linears(self.engine.module)
        every = [linear for members in linears.values() for linear in members]
        sizes = [sum(linear.size for linear in every), sum(linear.kept for linear in every)]
        total, left = self.engine.sum_over_stages(torch.tensor(sizes, dtype=torch.float64)).tolist()
        keep = min(round(total * (1 - sparsity)), int(left))
        selection = select_largest(
            linears, keep, num_layers=self._num_layers, sum_over_stages=self.engine.sum_over_stages
        )
        for number, members in linears.items():
            for linear, mask in zip(members, selection.masks(number, members), strict=True):
                linear.prune(mask)
                self.engine.zero_elements(linear.weight, ~mask)
        self._shrink(every)
        self.engine.model_changed(f"pruning: {sparsity:.1%} sparse")

    def _shrink(self, linears: Sequence[PrunableLinear]) -> None:
        """Make vectors of the kept values of those weights that are smaller so. Collective."""
        refusal = self.engine.keep_elements_refusal()
        if refusal is not None:
            if not self._told:
                logger.warning(f"pruning: weights stay dense, with zeros, and take the memory of dense ones: {refusal}")
            self._told = True
            return
        smaller = [linear for linear in linears if linear.mask is not None and linear.would_shrink(linear.kept)]
        kept = [(linear, "weight", linear.kept_places()) for linear in smaller]
        indices = [linear.index_at(places) for linear, _, places in kept]
        self.engine.keep_elements(kept)
        for linear, index in zip(smaller, indices):
            linear.use_values(index)

    def before_batch(self, step: int) -> None:
        """Prune if that is due, and tell the engine."""
        if self._loaded:
            self._zero_loaded()
            self._loaded = False
        sparsity = self._steps.get(step, 0.0)
        if sparsity:
            self.prune(sparsity)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Note that layers were loaded; this has no state of its own."""
        self._loaded = True

    def _zero_loaded(self) -> None:
        """Zero optimizer state where loaded weights are pruned, and shrink those of a checkpoint that held masks."""
        linears = [linear for members in local_linears(self.engine.module).values() for linear in members]
        for weight, pruned in self._pruned(lambda linear: True):
            self.engine.zero_elements(weight, pruned)
        self._shrink(linears)

    def _zero_gradients(self) -> None:
        """Zero the gradients of pruned weights; where there is an index they are 0 already, or not there."""
        self.engine.zero_gradients(self._pruned(lambda linear: linear.is_compressed or not linear.computes_sparse))

    def _pruned(self, of: Callable[[PrunableLinear], bool]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Iterate over parameters of this stage that have pruned elements, and where."""
        for members in local_linears(self.engine.module).values():
            for linear in members:
                if linear.mask is not None and of(linear):
                    yield linear.weight, ~linear.mask


class _Prunable(PrunableLayer, Block):
    """Mixin before a Block class."""

    def load_signal(self) -> float:
        """Return the paper's ``p_i``, the share of this layer's prunable weights that is left; 0.0 if none trains."""
        return super().load_signal() * self.share_kept


class PrunableBlock(_Prunable, Block):
    """A :class:`~ds_dynmo.models.gpt.Block` that can be pruned."""


class PrunableAttentionHalf(_Prunable, AttentionHalf):
    """An :class:`~ds_dynmo.models.half_blocks.AttentionHalf` that can be pruned."""


class PrunableFeedForwardHalf(_Prunable, FeedForwardHalf):
    """A :class:`~ds_dynmo.models.half_blocks.FeedForwardHalf` that can be pruned."""


def prunable_block(
    model: GPTConfig, config: PruningConfig, block_number: int, parts: dict[str, Any]
) -> list[LayerSpec]:
    """Specify block ``block_number``, counted from 1, with ``parts`` that can be pruned."""
    types = BlockTypes(PrunableBlock, PrunableAttentionHalf, PrunableFeedForwardHalf)
    return block_layers(model, block_number, types, csr_from=config.csr_from, **parts)


def local_linears(module: PipelineModule) -> Linears:
    """List :func:`prunable_linears` by layer number, for every layer of this stage that has any."""
    found = {number: prunable_linears(layer) for number, layer in local_layers(module)}
    return {number: linears for number, linears in found.items() if linears}

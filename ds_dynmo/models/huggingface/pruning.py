"""Decoder layers of Hugging Face models whose linear layers can be pruned.

The library's decoder layer computes, with prunable linear layers in place of its ``nn.Linear`` and GPT-2's ``Conv1D``,
that have the same parameters under the same names. Whether it calls these, and looks at their weights nowhere else, is
tried on a tiny model.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.configs import library_module
from ds_dynmo.models.huggingface.experts import MoEDecoderLayer
from ds_dynmo.models.huggingface.modules import DecoderLayer
from ds_dynmo.models.huggingface.source import Source
from ds_dynmo.models.pruning.kernels import Shape
from ds_dynmo.models.pruning.prunable_layer import PrunableLayer
from ds_dynmo.models.pruning.sparse_linear import PrunableConv1D, PrunableLinear

__all__ = ["PrunableDecoderLayer", "PrunableMoEDecoderLayer", "check_prunable", "prunable_shapes"]


class _PrunableLibraryLayer(PrunableLayer):
    @classmethod
    def prunable_kinds(cls) -> Mapping[type[nn.Module], type[PrunableLinear]]:
        return _kinds()


class PrunableDecoderLayer(_PrunableLibraryLayer, DecoderLayer):
    """A :class:`~ds_dynmo.models.huggingface.modules.DecoderLayer` that can be pruned."""

    def load_signal(self) -> float:
        """Return the paper's ``p_i``, the share of this layer's prunable weights that is left; 0.0 if none trains."""
        return self.share_kept if any(parameter.requires_grad for parameter in self.parameters()) else 0.0


class PrunableMoEDecoderLayer(_PrunableLibraryLayer, MoEDecoderLayer):
    """A :class:`~ds_dynmo.models.huggingface.experts.MoEDecoderLayer` that can be pruned, but for packed experts.

    Its load signal is that of its experts.
    """


def check_prunable(source: Source, label: str) -> None:
    """Refuse a model that cannot be pruned.

    Raises:
        ConfigError: with the remedy.
    """
    if source.adapters is not None:
        raise ConfigError(
            f"{label}: peft: cannot be combined with pruning: the base is frozen, and merged adapters would fill its "
            "zeros: merge them first (export with merge), and prune that model"
        )
    if any(experts is not None and experts.parallel for experts in source.experts):
        raise ConfigError(
            f"{label}: expert_parallel: cannot be combined with pruning, which needs equal weights on all replicas: "
            "should be false"
        )
    if not any(prunable_shapes(block) for block in source.blocks):
        kind = source.config.model_type
        raise ConfigError(f"{label}: model_type {kind}: pruning: its decoder layers have no nn.Linear: leave it out")


def prunable_shapes(block: nn.Module) -> dict[str, Shape]:
    """List the shapes of the weights of transformers' decoder layer that can be pruned, by their names in it."""
    kinds = tuple(_kinds())
    linears = {f"{path}.weight": one for path, one in block.named_modules() if type(one) in kinds}
    return {name: (one.weight.shape[0], one.weight.shape[1]) for name, one in linears.items()}


def _kinds() -> Mapping[type[nn.Module], type[PrunableLinear]]:
    return {nn.Linear: PrunableLinear, library_module("pytorch_utils").Conv1D: PrunableConv1D}

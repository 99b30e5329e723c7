"""What a pipeline layer has of a part of a Hugging Face model, where it does not have all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from ds_dynmo.torch_private import parameters_of

__all__ = ["Rows", "Share"]


class Share(Protocol):
    """Rows of the vocabulary, or a :class:`~ds_dynmo.models.huggingface.halves.Half` of a decoder layer."""

    @property
    def rows(self) -> range | None:
        """Rows of each tensor; None: all."""

    def of(self, part: nn.Module) -> nn.Module:
        """Leave this share of ``part``, which may be without memory, or have the share's tensors already."""


@dataclass(frozen=True)
class Rows:
    """Some rows of the embedding, or of the head; where ``modules_to_save`` has a copy, of that too."""

    rows: range

    def of(self, part: nn.Module) -> nn.Module:
        """Leave these rows of ``part``."""
        rows = self.rows
        for module in part.modules():
            for name, tensor in list(module.named_parameters(recurse=False)):
                if len(tensor) > len(rows):
                    own = tensor.detach()[rows.start : rows.stop].clone()
                    parameters_of(module)[name] = nn.Parameter(own, tensor.requires_grad)
            if isinstance(module, nn.Embedding):
                padding = module.padding_idx
                module.num_embeddings = len(rows)
                module.padding_idx = padding - rows.start if padding is not None and padding in rows else None
            elif isinstance(module, nn.Linear):
                module.out_features = len(rows)
        return part

"""The pipeline of a language model, which reports its loss and its auxiliary losses apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule

from ds_dynmo.models.gpt import language_model_losses
from ds_dynmo.models.stream import Activations, Labels

__all__ = ["AUXILIARY_LOSS", "LANGUAGE_MODEL_LOSS", "LanguageModelPipeline"]

LANGUAGE_MODEL_LOSS = "language_model_loss"
AUXILIARY_LOSS = "auxiliary_loss"


class LanguageModelPipeline(PipelineModule):
    """A ``PipelineModule`` that trains by :func:`~ds_dynmo.models.language_model_loss` and reports its two parts.

    After a batch ``engine.get_additional_losses()`` has them on every rank, means over the batch, by
    :data:`LANGUAGE_MODEL_LOSS`, the mean cross entropy of its output, and :data:`AUXILIARY_LOSS`, what training adds to
    it: 0 where that is nothing, below 0 where exits make better predictions than the output. ``train_batch`` returns
    their sum.

    Args:
        layers: see :func:`~ds_dynmo.models.model_layers`.
        settings: further arguments of ``PipelineModule``.
    """

    def __init__(self, layers: Sequence[LayerSpec], **settings: Any) -> None:
        with torch.no_grad():  # else torch warns of gradients through DeepSpeed's broadcast of tied parameters
            super().__init__(layers=layers, loss_fn=self._loss, **settings)
        nothing = torch.zeros(())
        self._reported = {LANGUAGE_MODEL_LOSS: nothing, AUXILIARY_LOSS: nothing}

    def _loss(self, outputs: Activations, labels: Labels) -> torch.Tensor:
        loss, auxiliary = language_model_losses(outputs, labels)
        added = torch.zeros_like(loss) if auxiliary is None else auxiliary
        self._reported = {LANGUAGE_MODEL_LOSS: loss.detach(), AUXILIARY_LOSS: added.detach()}
        return loss if auxiliary is None else loss + auxiliary

    def get_additional_losses(self) -> dict[str, torch.Tensor]:
        """Return both parts. DeepSpeed asks after each micro-batch on the last stage, elsewhere for the names alone."""
        return self._reported

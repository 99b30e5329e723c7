"""Decide when a token leaves at an exit: the measures of confidence and their thresholds.

Sources: CALM, Schuster et al., "Confident Adaptive Language Modeling", NeurIPS 2022, section 3; ADP-C, Liu et al.,
"Anytime Dense Prediction with Confidence Adaptivity", ICLR 2022.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ds_dynmo.models.early_exit.config import EarlyExitConfig

__all__ = [
    "calm_threshold",
    "confident",
    "largest_probability",
    "softmax_margin",
    "state_similarity",
]

ADPC_THRESHOLD = 0.998  # Liu et al.
CALM_THRESHOLD = 0.9


def calm_threshold(level: float, positions: torch.Tensor, length: int) -> torch.Tensor:
    """Compute CALM's ``clip(0.9 level + 0.1 exp(-4 t / T), 0, 1)``, fp32: tokens that many later ones see need more.

    Args:
        positions: ``t``, ints of any shape.
        length: ``T``, how long the sequence is.
    """
    return (0.9 * level + 0.1 * torch.exp(-4 * positions.float() / length)).clamp(0, 1)


def softmax_margin(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Compute CALM's softmax confidence, ``[tokens]``: the largest probability less the second largest."""
    first, second = log_probabilities.topk(2, dim=-1).values.exp().unbind(dim=-1)
    return first - second


def largest_probability(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Compute ADP-C's confidence, ``[tokens]``."""
    return log_probabilities.amax(dim=-1).exp()


def state_similarity(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Compute CALM's hidden-state saturation, fp32 ``[tokens]``: the cosine of states before and after a block."""
    return F.cosine_similarity(before.float(), after.float(), dim=-1)


def confident(exits: EarlyExitConfig, confidence: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """Decide which tokens leave, bool ``[tokens]``, by their confidence and positions, both ``[tokens]``."""
    if exits.method == "adpc":
        return confidence > (ADPC_THRESHOLD if exits.threshold is None else exits.threshold)
    level = CALM_THRESHOLD if exits.threshold is None else exits.threshold
    return confidence >= calm_threshold(level, positions, length)

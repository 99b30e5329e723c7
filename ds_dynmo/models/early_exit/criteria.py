"""When a token leaves at an exit: the "early_exit" block, and the measures of confidence.

Sources: CALM, Schuster et al., "Confident Adaptive Language Modeling", NeurIPS 2022, section 3; ADP-C, Liu et al.,
"Anytime Dense Prediction with Confidence Adaptivity", ICLR 2022.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

__all__ = [
    "EarlyExitConfig",
    "calm_threshold",
    "largest_probability",
    "softmax_margin",
    "state_similarity",
]

ADPC_THRESHOLD = 0.998  # Liu et al.
CALM_THRESHOLD = 0.9


class EarlyExitConfig(BaseModel):
    """The "early_exit" block."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    method: Literal["calm", "adpc"] = Field(description="whose confidence, threshold and weights of the losses")
    depths: tuple[int, ...] | None = Field(
        default=None,
        validate_default=True,
        description="after how many blocks there are exits, such as [3, 6, 9]; null, calm only: after all but the last",
    )
    confidence: Literal["softmax", "state"] | None = Field(
        default=None,
        description="calm only, null is softmax: the two largest probabilities' difference, or the cosine similarity "
        "of the states before and after the last block",
    )
    threshold: float | None = Field(
        default=None, ge=0, le=1, description="of confidence; null: 0.9 with calm, which lets it decay, 0.998 with adpc"
    )
    start: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="from that fraction of the steps on, the last step at the latest, tokens leave",
    )
    evaluation: bool = Field(default=True, description="do tokens leave in evaluations too")

    @field_validator("depths", mode="before")
    @classmethod
    def _increasing(cls, depths: Any, info: ValidationInfo) -> tuple[int, ...] | None:
        if depths is None:
            if info.data.get("method") == "adpc":
                raise ValueError("adpc needs depths, a list of numbers of blocks such as [3, 6, 9]")
            return None
        if not isinstance(depths, list | tuple) or not depths or any(type(d) is not int or d < 1 for d in depths):
            raise ValueError("should be null or a list of numbers of blocks, each 1 or more")
        if any(later <= earlier for earlier, later in zip(depths, depths[1:])):
            raise ValueError("should increase")
        return tuple(depths)

    @field_validator("confidence")
    @classmethod
    def _of_calm(cls, confidence: str | None, info: ValidationInfo) -> str | None:
        if confidence is not None and info.data.get("method") == "adpc":
            raise ValueError("adpc has one of its own, the largest probability; should be null")
        return confidence

    def exits(self, blocks: int) -> tuple[int, ...]:
        """List after how many of ``blocks`` blocks there are exits."""
        return tuple(range(1, blocks)) if self.depths is None else self.depths

    def loss_weights(self, blocks: int) -> dict[int, float]:
        """Weigh the losses of the exits and of the last block, by depth; together 1.

        CALM: by depth, ``i / sum of j`` over exits and last block. ADP-C: all the same.

        >>> EarlyExitConfig(method="calm", depths=(2, 3)).loss_weights(5)
        {2: 0.2, 3: 0.3, 5: 0.5}
        """
        depths = (*self.exits(blocks), blocks)
        if self.method == "adpc":
            return dict.fromkeys(depths, 1 / len(depths))
        return {depth: depth / sum(depths) for depth in depths}

    def confident(self, confidence: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Decide which tokens leave, bool ``[tokens]``, by their confidence and positions, both ``[tokens]``."""
        if self.method == "adpc":
            return confidence > (ADPC_THRESHOLD if self.threshold is None else self.threshold)
        return confidence >= calm_threshold(
            CALM_THRESHOLD if self.threshold is None else self.threshold, positions, length
        )


def calm_threshold(level: float, positions: torch.Tensor, length: int) -> torch.Tensor:
    """Compute CALM's ``clip(0.9 level + 0.1 exp(-4 t / T), 0, 1)``, fp32: tokens that many later ones see need more.

    Args:
        positions: ``t``, ints of any shape.
        length: ``T``, how long the sequence is.
    """
    return (0.9 * level + 0.1 * torch.exp(-4 * positions.float() / length)).clamp(0, 1)


def softmax_margin(log_probabilities: torch.Tensor) -> torch.Tensor:
    """CALM's softmax confidence: largest minus second largest probability, ``[tokens]``."""
    first, second = log_probabilities.topk(2, dim=-1).values.exp().unbind(dim=-1)
    return first - second


def largest_probability(log_probabilities: torch.Tensor) -> torch.Tensor:
    """ADP-C's confidence, ``[tokens]``."""
    return log_probabilities.amax(dim=-1).exp()


def state_similarity(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """CALM's hidden-state saturation: cosine of the states before and after a block, fp32 ``[tokens]``."""
    return F.cosine_similarity(before.float(), after.float(), dim=-1)

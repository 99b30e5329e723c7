"""The section of early exit in the JSON, ``"case": {"kind": "early_exit"}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_dynmo.models.case import CaseConfig, LayerOutputs

if TYPE_CHECKING:
    from ds_dynmo.models.config import ModelConfig

__all__ = ["EarlyExitConfig"]


class EarlyExitConfig(CaseConfig):
    """Early exit: confident tokens leave."""

    apart_from: ClassVar = {
        "freezing": "it counts layers without exits",
        "moe": "blocks that tokens leave have one feed-forward part",
        "pruning": "blocks that tokens leave have no weights that can be pruned",
        "sparse_attention": "tokens that left are attended to by all that remain",
        "mod": "both choose a block's tokens",
    }
    crosses_documents: ClassVar = True

    kind: Literal["early_exit"] = Field(default="early_exit", description='"early_exit": confident tokens leave')
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
    evaluation: bool = Field(default=True, description="true: tokens leave in evaluations too")

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

    def exit_depths(self, blocks: int) -> tuple[int, ...]:
        """List the depths of the exits: after how many of ``blocks`` blocks each of them is."""
        return tuple(range(1, blocks)) if self.depths is None else self.depths

    def loss_weights(self, blocks: int) -> dict[int, float]:
        """Weigh the losses of the exits and of the last block, by depth; together 1.

        CALM: by depth, ``i / sum of j`` over exits and last block. ADP-C: all the same.

        >>> EarlyExitConfig(method="calm", depths=(2, 3)).loss_weights(5)
        {2: 0.2, 3: 0.3, 5: 0.5}
        """
        depths = (*self.exit_depths(blocks), blocks)
        if self.method == "adpc":
            return dict.fromkeys(depths, 1 / len(depths))
        return {depth: depth / sum(depths) for depth in depths}

    @property
    def layer_outputs(self) -> LayerOutputs:
        """See :attr:`CaseConfig.layer_outputs`."""
        return "exits"

    @property
    def follows_steps(self) -> bool:
        """See :attr:`CaseConfig.follows_steps`."""
        return self.start > 0

    def check(self, model: ModelConfig) -> None:
        """See :meth:`CaseConfig.check`."""
        if model.split_blocks:
            raise ValueError("cannot be combined with split_blocks: tokens leave after whole blocks")
        if model.num_vocabulary_slices:
            raise ValueError("cannot be combined with vocabulary_slices: each exit needs all logits at once")
        exits = self.exit_depths(model.layers)
        if not exits or exits[-1] >= model.layers:
            last = exits[-1] if exits else 1
            raise ValueError(f"has an exit after block {last}, exits lie before the last of {model.layers} (layers)")

"""The section of a mixture of experts in the JSON, ``"case": {"kind": "moe"}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_dynmo.models.case import CaseConfig, LayerOutputs

if TYPE_CHECKING:
    from ds_dynmo.models.config import ModelConfig

__all__ = ["MoEConfig"]

OF_ONE_ROUTING = {
    "auxiliary_coefficient": "aux_loss",
    "sinkhorn_tolerance": "sbase",
    "sinkhorn_iterations": "sbase",
    "scores": "bias",
    "bias_rate": "bias",
}

MULTIPLE = 8  # torch's grouped products want rows of 16 bytes or multiples; in 2 bytes per value


class MoEConfig(CaseConfig):
    """A mixture of experts, each as wide as the dense feed-forward layer, ``mlp_ratio * hidden_size``."""

    kind: Literal["moe"] = Field(default="moe", description='"moe": experts in place of feed-forward layers')
    experts: int = Field(default=8, ge=2, description="experts of a layer")
    top_k: int = Field(default=2, ge=1, description="experts that a token goes to")
    routing: Literal["aux_loss", "sbase", "bias"] = Field(default="aux_loss", description="what balances the experts")
    capacity_factor: float | None = Field(
        default=None,
        gt=0,
        description="an expert takes that multiple of an even share of a micro-batch's choices; null: all, dropless",
    )
    expert_parallel: bool = Field(
        default=False,
        description="experts are distributed over the data-parallel replicas: experts has to be a multiple of these",
    )
    dense_blocks: int = Field(default=0, ge=0, description="leading blocks that stay dense")
    every: int = Field(default=1, ge=1, description="after the dense blocks, every `every`-th block has experts")
    auxiliary_coefficient: float = Field(default=0.02, ge=0, description="of the auxiliary loss, as in Mixtral")
    sinkhorn_tolerance: float = Field(
        default=1e-4, gt=0, lt=1, description="Sinkhorn stops when every token's row sum is within this of 1"
    )
    sinkhorn_iterations: int = Field(default=100, ge=1, description="most scalings of rows and columns")
    scores: Literal["sigmoid", "softmax"] = Field(
        default="sigmoid", description="function from router logits to the scores that the bias is added to"
    )
    bias_rate: float = Field(default=1e-3, gt=0, description="what an expert's bias changes by after each batch")

    @field_validator("top_k")
    @classmethod
    def _enough_experts(cls, top_k: int, info: ValidationInfo) -> int:
        experts = info.data.get("experts")  # absent if it is invalid
        if experts is not None and top_k > experts:
            raise ValueError(f"should be at most the number of experts, {experts}")
        return top_k

    @field_validator(*OF_ONE_ROUTING)
    @classmethod
    def _of_this_routing(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        routing, owner = info.data.get("routing"), OF_ONE_ROUTING[info.field_name]
        if routing not in (None, owner) and value != cls.model_fields[info.field_name].default:
            raise ValueError(f'is used by routing "{owner}" only, this is "{routing}"')
        return value

    @property
    def layer_outputs(self) -> LayerOutputs:
        """See :attr:`CaseConfig.layer_outputs`."""
        return "auxiliary" if self.routing == "aux_loss" else "hidden"

    @property
    def distributes_experts(self) -> bool:
        """See :attr:`CaseConfig.distributes_experts`."""
        return self.expert_parallel

    def blocks(self, num_blocks: int) -> list[int]:
        """List the blocks, counted from 1, that have experts.

        >>> MoEConfig(every=2).blocks(6), MoEConfig(dense_blocks=2).blocks(6)
        ([2, 4, 6], [3, 4, 5, 6])
        """
        return list(range(self.dense_blocks + self.every, num_blocks + 1, self.every))

    def check(self, model: ModelConfig) -> None:
        """See :meth:`CaseConfig.check`."""
        if not self.blocks(model.layers):
            raise ValueError(
                f"leaves no block with experts: dense_blocks {self.dense_blocks}, every {self.every}, "
                f"the model has {model.layers} (layers)"
            )
        if model.hidden_size % MULTIPLE:
            raise ValueError(
                f"experts need a hidden_size that is a multiple of {MULTIPLE}, this is {model.hidden_size}"
            )

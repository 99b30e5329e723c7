"""The section of mixture of depths in the JSON, ``"case": {"kind": "mod"}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_dynmo.models.case import CaseConfig, LayerOutputs

if TYPE_CHECKING:
    from ds_dynmo.models.config import ModelConfig

__all__ = ["MixtureOfDepthsConfig"]

OF_THE_PREDICTOR = ("predictor_size", "predictor_coefficient")


OF_THE_THRESHOLD = ("min_capacity", "max_capacity")


CAPACITY = 0.125  # Raposo et al.


class MixtureOfDepthsConfig(CaseConfig):
    """Mixture of depths. The defaults are the paper's best: an eighth of the tokens in every second block."""

    apart_from: ClassVar = {"pruning": "a routed block has no weights that can be pruned"}
    crosses_documents: ClassVar = True

    kind: Literal["mod"] = Field(default="mod", description='"mod": mixture of depths, blocks that take some tokens')
    capacity: float = Field(
        default=CAPACITY,
        gt=0,
        le=1,
        description="tokens that a routed block takes, as a fraction of a sequence, at least 1",
    )
    threshold: float | None = Field(
        default=None,
        description="a routed block takes the tokens with a larger router weight, from min_capacity to max_capacity; "
        "null: as many as capacity says",
    )
    min_capacity: float = Field(default=0.03125, gt=0, le=1, description="with threshold: takes at least so many")
    max_capacity: float = Field(default=0.5, gt=0, le=1, description="with threshold: takes at most so many")
    every: int = Field(
        default=2, ge=1, description="every `every`-th block is routed (blocks `every`, 2 `every`, ...); 1: all"
    )
    sampling: Literal["topk", "predictor", "threshold"] = Field(
        default="predictor",
        description="who chooses at evaluation: the router as in training, the predictor, or the threshold without its "
        "bounds; the choice of the last two does not depend on later tokens",
    )
    predictor_size: int = Field(default=32, ge=1, description="width of the predictor's hidden layer")
    predictor_coefficient: float = Field(default=0.01, gt=0, description="of the predictor's loss in the total")

    @field_validator("threshold")
    @classmethod
    def _instead_of_capacity(cls, threshold: float | None, info: ValidationInfo) -> float | None:
        if threshold is not None and info.data.get("capacity") != CAPACITY:
            raise ValueError("cannot be combined with capacity: min_capacity and max_capacity bound it")
        return threshold

    @field_validator(*OF_THE_THRESHOLD)
    @classmethod
    def _of_the_threshold(cls, bound: float, info: ValidationInfo) -> float:
        assert info.field_name is not None
        if info.data.get("threshold") is None and bound != cls.model_fields[info.field_name].default:
            raise ValueError("is used with threshold only, this is null")
        least = info.data.get("min_capacity")
        if info.field_name == "max_capacity" and least is not None and bound < least:
            raise ValueError(f"should be at least min_capacity, {least}")
        return bound

    @field_validator(*OF_THE_PREDICTOR)
    @classmethod
    def _of_this_sampling(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        sampling = info.data.get("sampling", "predictor")
        if sampling != "predictor" and value != cls.model_fields[info.field_name].default:
            raise ValueError(f'is used by sampling "predictor" only, this is "{sampling}"')
        return value

    @field_validator("sampling")
    @classmethod
    def _has_a_threshold(cls, sampling: str, info: ValidationInfo) -> str:
        if sampling == "threshold" and "threshold" in info.data and info.data["threshold"] is None:
            raise ValueError("needs a threshold, this is null")
        return sampling

    def routes(self, block_number: int) -> bool:
        """Return whether block ``block_number``, counted from 1, is a routed one.

        >>> [number for number in range(1, 7) if MixtureOfDepthsConfig(every=2).routes(number)]
        [2, 4, 6]
        """
        return block_number % self.every == 0

    @property
    def layer_outputs(self) -> LayerOutputs:
        """See :attr:`CaseConfig.layer_outputs`."""
        return "auxiliary" if self.sampling == "predictor" else "hidden"

    def check(self, model: ModelConfig) -> None:
        """See :meth:`CaseConfig.check`."""
        if model.split_blocks:
            raise ValueError(
                "cannot be combined with split_blocks: a routed block takes its tokens through both halves at once"
            )
        if self.every > model.layers:
            raise ValueError(f"every {self.every} blocks one is routed (every), the model has {model.layers} (layers)")
        if model.distributes_experts and (self.threshold is not None or self.sampling == "predictor"):
            raise ValueError(
                'only sampling "topk" without threshold can be combined with expert_parallel: else replicas would not '
                "run their experts equally often in an evaluation"
            )


def tokens_of(capacity: float, sequence: int) -> int:
    """Count the tokens that a block of this capacity takes of a sequence: at least 1, halves rounded to even.

    >>> tokens_of(0.125, 256)
    32
    """
    return max(1, round(capacity * sequence))

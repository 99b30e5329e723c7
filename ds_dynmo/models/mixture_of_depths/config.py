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
    capacity: float | tuple[float, ...] = Field(
        default=CAPACITY,
        description="tokens that a routed block takes, as a fraction of a sequence, at least 1; a list has one for "
        "each routed block",
    )
    schedule: tuple[tuple[float, float], ...] | None = Field(
        default=None,
        description="[[fraction, capacity], ...]: from that fraction of the steps on, routed blocks have that "
        "capacity, before the first that of the key capacity",
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

    @field_validator("capacity", mode="before")
    @classmethod
    def _one_or_a_list(cls, capacity: Any) -> float | tuple[float, ...]:
        if not isinstance(capacity, list | tuple):
            return _checked(capacity)
        if not capacity:
            raise ValueError("should be a capacity, or a list with one for each routed block")
        return tuple(_checked(each) for each in capacity)

    @field_validator("schedule", mode="before")
    @classmethod
    def _pairs(cls, schedule: Any, info: ValidationInfo) -> tuple[tuple[float, float], ...] | None:
        if schedule is None:
            return None
        if not isinstance(schedule, list | tuple) or not schedule:
            raise ValueError("should be null or a list of [fraction of the steps, capacity], one or more")
        for entry in schedule:
            if not isinstance(entry, list | tuple) or len(entry) != 2:
                raise ValueError(f"should hold pairs [fraction of the steps, capacity], not {entry}")
            if type(entry[0]) not in (int, float) or not 0 <= entry[0] < 1:
                raise ValueError(f"should have fractions of the steps in [0, 1), not {entry[0]}")
            _checked(entry[1])
        fractions = [fraction for fraction, _ in schedule]
        if any(later <= earlier for earlier, later in zip(fractions, fractions[1:])):
            raise ValueError(f"should have increasing fractions of the steps, not {fractions}")
        if isinstance(info.data.get("capacity"), tuple):
            raise ValueError("cannot be combined with a list of capacities: it gives one to all routed blocks")
        return tuple((float(fraction), float(capacity)) for fraction, capacity in schedule)

    @field_validator("threshold")
    @classmethod
    def _instead_of_capacity(cls, threshold: float | None, info: ValidationInfo) -> float | None:
        if threshold is not None and (info.data.get("capacity") != CAPACITY or info.data.get("schedule") is not None):
            raise ValueError("cannot be combined with capacity or schedule: min_capacity and max_capacity bound it")
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

    def capacity_of(self, block_number: int) -> float:
        """Return the capacity of routed block ``block_number`` at first; with a threshold, the most it takes."""
        if self.threshold is not None:
            return self.max_capacity
        return self.capacity[block_number // self.every - 1] if isinstance(self.capacity, tuple) else self.capacity

    def scheduled_capacity(self, step: int, total_steps: int) -> float:
        """Return the schedule's capacity in step ``step``, counted from 0. All have begun by the last step.

        >>> config = MixtureOfDepthsConfig(capacity=1.0, schedule=[[0.5, 0.25], [0.99, 0.125]])
        >>> [config.scheduled_capacity(step, 4) for step in range(4)]
        [1.0, 1.0, 0.25, 0.125]
        """
        assert self.schedule is not None and isinstance(self.capacity, float)
        last = total_steps - 1
        due = [capacity for fraction, capacity in self.schedule if step >= min(round(fraction * total_steps), last)]
        return due[-1] if due else self.capacity

    @property
    def layer_outputs(self) -> LayerOutputs:
        """See :attr:`CaseConfig.layer_outputs`."""
        return "auxiliary" if self.sampling == "predictor" else "hidden"

    @property
    def follows_steps(self) -> bool:
        """See :attr:`CaseConfig.follows_steps`."""
        return self.schedule is not None

    def check(self, model: ModelConfig) -> None:
        """See :meth:`CaseConfig.check`."""
        if model.split_blocks:
            raise ValueError(
                "cannot be combined with split_blocks: a routed block takes its tokens through both halves at once"
            )
        if self.every > model.layers:
            raise ValueError(f"every {self.every} blocks one is routed (every), the model has {model.layers} (layers)")
        routed = model.layers // self.every
        if isinstance(self.capacity, tuple) and len(self.capacity) != routed:
            raise ValueError(
                f"capacity lists {len(self.capacity)} capacities, the model has {routed} routed blocks "
                f"(layers {model.layers}, every {self.every})"
            )
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


def _checked(capacity: Any) -> float:
    if type(capacity) not in (int, float) or not 0 < capacity <= 1:
        raise ValueError(f"should have capacities greater than 0 and less than or equal to 1, not {capacity}")
    return float(capacity)

"""The section of layer freezing in the JSON, ``"case": {"kind": "freezing"}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_dynmo.config.section import Section
from ds_dynmo.models.case import CaseConfig

if TYPE_CHECKING:
    from ds_dynmo.models.config import ModelConfig

__all__ = ["AutoFreezeConfig", "EgeriaConfig", "FreezingConfig"]

Schedule = tuple[tuple[float, int], ...]


class AutoFreezeConfig(Section):
    """When gradients are compared: the "automatic" object of the case."""

    interval: float = Field(default=0.1, gt=0, le=1, description="between two decisions, as a fraction of the steps")
    start: float = Field(default=0.2, ge=0, lt=1, description="before the first decision, as a fraction of the steps")


class EgeriaConfig(Section):
    """Egeria's criterion: the "egeria" object of the case.

    Egeria bounds the slope of the plasticity itself, whose scale differs between models; here the bound is relative.
    """

    interval: float = Field(
        default=0.02, gt=0, le=1, description="between two references and evaluations, as a fraction of the steps"
    )
    delay: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="from the batch that is evaluated to the verdict taking effect, as a fraction of the steps; at "
        "most interval",
    )
    start: float = Field(default=0.1, ge=0, lt=1, description="before the first reference, as a fraction of the steps")
    window: int = Field(default=4, ge=2, description="evaluations in a moving average, and averages in a slope")
    threshold: float = Field(
        default=0.05,
        gt=0,
        description="a block is frozen when abs(slope per evaluation) of its moving average is below this share of the "
        "largest average that it had",
    )
    learning_rate_factor: float = Field(
        default=10.0, gt=1, description="a fall of the learning rate by this unfreezes all, and halves the window"
    )

    @field_validator("delay")
    @classmethod
    def _before_the_next(cls, delay: float, info: ValidationInfo) -> float:
        interval = info.data.get("interval")  # absent if it is invalid
        if interval is not None and delay > interval:
            raise ValueError(f"should be at most interval, {interval}")
        return delay


class FreezingConfig(CaseConfig):
    """Layer freezing, by exactly one of "schedule", "automatic" and "egeria"."""

    for_huggingface: ClassVar = True

    kind: Literal["freezing"] = Field(default="freezing", description='"freezing": a prefix of the model is frozen')
    schedule: Schedule | None = Field(
        default=None,
        description="[[fraction, blocks], ...]: from that fraction of the steps on, so many leading blocks are frozen",
    )
    automatic: AutoFreezeConfig | None = Field(default=None, description="AutoFreeze's criterion; {} for its defaults")
    egeria: EgeriaConfig | None = Field(
        default=None, validate_default=True, description="Egeria's criterion; {} for its defaults"
    )

    @property
    def most_blocks(self) -> int:
        """The most blocks that the schedule freezes; 0 without one."""
        return max((blocks for _, blocks in self.schedule or ()), default=0)

    @property
    def follows_steps(self) -> bool:
        """See :attr:`CaseConfig.follows_steps`."""
        return True

    @field_validator("schedule", mode="before")
    @classmethod
    def _pairs(cls, schedule: Any) -> Schedule | None:
        if schedule is None:
            return None
        if not isinstance(schedule, list | tuple) or not schedule:
            raise ValueError("should be null or a list of [fraction of the steps, blocks], one or more")
        for entry in schedule:
            if not isinstance(entry, list | tuple) or len(entry) != 2:
                raise ValueError(f"should hold pairs [fraction of the steps, blocks], not {entry}")
            fraction, blocks = entry
            if type(fraction) not in (int, float) or not 0 <= fraction < 1:
                raise ValueError(f"should have fractions of the steps in [0, 1), not {fraction}")
            if type(blocks) is not int or blocks < 0:
                raise ValueError(f"should have numbers of blocks of 0 or more, not {blocks}")
        fractions = [fraction for fraction, _ in schedule]
        if any(later <= earlier for earlier, later in zip(fractions, fractions[1:])):
            raise ValueError(f"should have increasing fractions of the steps, not {fractions}")
        return tuple((float(fraction), blocks) for fraction, blocks in schedule)

    @field_validator("egeria")
    @classmethod
    def _one_of_them(cls, egeria: EgeriaConfig | None, info: ValidationInfo) -> EgeriaConfig | None:
        if not info.data.keys() >= {"schedule", "automatic"}:  # one is invalid
            return egeria
        if sum(way is not None for way in (info.data["schedule"], info.data["automatic"], egeria)) != 1:
            raise ValueError('exactly one of "schedule", "automatic" and "egeria" should be given')
        return egeria

    def check(self, model: ModelConfig) -> None:
        """See :meth:`CaseConfig.check`. Layers of a Hugging Face model are checked when they are built."""
        if self.schedule is None and model.distributes_experts:
            raise ValueError(
                "only schedule can be combined with expert_parallel: automatic and egeria look at weights, of which "
                "every replica has others"
            )
        if model.peft is not None:
            raise ValueError("cannot be combined with peft: the base would train when it thaws")
        if self.egeria is not None and any(case.kind == "sparse_attention" for case in model.case):
            raise ValueError("egeria cannot be combined with sparse_attention: its references draw other patterns")
        if self.egeria is not None and model.split_blocks:
            raise ValueError("egeria cannot be combined with split_blocks: it compares whole blocks with references")
        if model.huggingface is not None:
            return
        if model.tied_embedding:
            raise ValueError("would freeze the head with the embedding: needs tied_embedding = false")
        if self.most_blocks > model.layers:
            raise ValueError(f"schedule freezes {self.most_blocks} blocks, the model has {model.layers} (layers)")

"""The interfaces of a case: its section in the JSON, and the object that changes a model between batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ds_dynmo.config.section import Section

if TYPE_CHECKING:
    from ds_dynmo.models.config import ModelConfig

__all__ = ["CaseConfig", "DynamicCase", "LayerOutputs", "RunSizes"]

LayerOutputs = Literal["hidden", "auxiliary", "exits"]


class CaseConfig(Section):
    """The section of a case: "case" in the "model" section, or an object of the list there.

    A module with such a class imports no torch, so that a configuration can be checked anywhere.

    Attributes:
        kind: selects the class; a field of each subclass.
        apart_from: kinds that the case cannot be combined with, and why.
        for_huggingface: whether a Hugging Face model can have the case.
        crosses_documents: whether tokens attend across packed documents.
    """

    kind: str
    apart_from: ClassVar[Mapping[str, str]] = {}
    for_huggingface: ClassVar[bool] = False
    crosses_documents: ClassVar[bool] = False

    @property
    def layer_outputs(self) -> LayerOutputs:
        """What layers return because of the case; see :attr:`ds_dynmo.models.GPTConfig.layer_outputs`."""
        return "hidden"

    @property
    def distributes_experts(self) -> bool:
        """Whether data-parallel replicas hold different experts."""
        return False

    @property
    def follows_steps(self) -> bool:
        """Whether the model changes at fractions of the run's steps."""
        return False

    def check(self, model: ModelConfig) -> None:
        """Check that the case fits the model's sizes and its other cases.

        Args:
            model: has valid keys, and every case in ``model.case``.

        Raises:
            ValueError: it does not; with both numbers, or the case that it cannot be combined with.
        """


@dataclass(frozen=True)
class RunSizes:
    """Numbers of a run that dynamic cases depend on.

    Attributes:
        total_steps: of the run; schedules are fractions of it.
        num_layers: of the layer list.
        blocks: the numbers of the blocks in the layer list.
        layers_per_block: 2 if a block's halves are layers, else 1.
    """

    total_steps: int
    num_layers: int
    blocks: range
    layers_per_block: int = 1


class DynamicCase:
    """An object that changes a model between batches. Every rank makes the same calls in the same order.

    Args:
        engine: returned by :func:`ds_dynmo.initialize`.

    Attributes:
        name: the case's kind.
    """

    name: ClassVar[str]

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def before_batch(self, step: int) -> None:
        """Change the model before step ``step``, counted from 0, and tell the engine (``model_changed``)."""

    def after_batch(self, steps_done: int) -> None:
        """Update the case after a batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return state that a resumed run needs and no layer holds, as plain JSON values, the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""

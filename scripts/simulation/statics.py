"""Static partitions that can be known before training. Every comparison starts from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynmo.partitioners import PipelineModel, balanced, imbalance, uniform

STATIC = "static_uniform"
STATICS = (STATIC, "static_parameters", "static_profiled")
DENSE = "dense"


@dataclass(frozen=True)
class Statics:
    """The static partitions of a model, with predictions from a profile of the model before it changes.

    Attributes:
        partitions: by the names in :data:`STATICS`.
        seconds: predicted, of an iteration.
        imbalances: the paper's equation 2.
    """

    partitions: dict[str, tuple[int, ...]]
    seconds: dict[str, float]
    imbalances: dict[str, float]

    @classmethod
    def known(cls, pipeline: PipelineModel, trainable: Sequence[float]) -> Statics:
        """Partition the model as it is before it changes; ``trainable``: parameters of each layer, in any unit."""
        costs = list(pipeline.layer_seconds)
        stages = len(pipeline.speeds)
        partitions = {
            "static_uniform": tuple(uniform(len(costs), stages)),
            "static_parameters": tuple(balanced(trainable, stages)),
            "static_profiled": tuple(balanced(costs, stages)),
        }
        return cls(
            partitions,
            {arm: pipeline.iteration_seconds(partition) for arm, partition in partitions.items()},
            {arm: imbalance(costs, partition) for arm, partition in partitions.items()},
        )

    @property
    def best(self) -> str:
        """The arm of the shortest predicted iteration."""
        return min(STATICS, key=lambda arm: self.seconds[arm])

    @property
    def alike(self) -> dict[str, str]:
        """The static arms whose partition an earlier arm has, and that arm."""
        first = {partition: arm for arm, partition in reversed(self.partitions.items())}
        return {arm: first[partition] for arm, partition in self.partitions.items() if first[partition] != arm}

    def start(self, arm: str) -> tuple[int, ...]:
        """Return the partition at which ``arm`` begins: a static arm's, uniform for the dense model, else the best."""
        if arm == DENSE:
            return self.partitions[STATIC]
        return self.partitions[arm if arm in STATICS else self.best]

    def lines(self) -> list[str]:
        """Describe them, one line each."""
        return [
            f"{label(arm)} {list(self.partitions[arm])}: predicted iteration {self.seconds[arm]:.3f} s, imbalance "
            f"{self.imbalances[arm]:.2f}{', best: where all others start' if arm == self.best else ''}"
            for arm in STATICS
        ]


def label(arm: str) -> str:
    """Return the name of ``arm`` in tables."""
    return arm.replace("_", " ") if arm in STATICS else arm

"""Static partitions that can be known before training. Every comparison starts from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynmo.partitioners import PipelineModel, balanced, imbalance, uniform
from ds_dynmo.placement import Shape, owners_of

STATIC = "static_uniform"
PARAMETERS = "static_parameters"  # DeepSpeed's default
STATICS = (STATIC, PARAMETERS, "static_profiled")
DENSE = "dense"
SHAPES: dict[str, Shape] = {"v": "v", "loop": "loop"}  # by schedule; all others begin as a chain


@dataclass(frozen=True)
class Statics:
    """The static partitions of whole layers, with predictions from a profile of the model before it changes.

    Attributes:
        partitions: by the names in :data:`STATICS`, in whole layers.
        seconds: predicted, of an iteration.
        imbalances: the paper's equation 2.
        layer_seconds: of the profile, of the layers that others move, by which two chunks per stage are balanced.
        whole: where whole layers begin among them, and where the last one ends.
    """

    partitions: dict[str, tuple[int, ...]]
    seconds: dict[str, float]
    imbalances: dict[str, float]
    layer_seconds: tuple[float, ...]
    whole: tuple[int, ...]

    @classmethod
    def known(
        cls,
        pipeline: PipelineModel,
        trainable: Sequence[float],
        layer_seconds: Sequence[float] | None = None,
        whole: Sequence[int] | None = None,
    ) -> Statics:
        """Partition the model as it is before it changes.

        Args:
            pipeline: of whole layers.
            trainable: parameters of each, in any unit.
            layer_seconds, whole: of the layers that others move; None: whole ones.
        """
        costs = list(pipeline.layer_seconds)
        stages = len(pipeline.speeds)
        partitions = {
            "static_uniform": tuple(uniform(len(costs), stages)),
            PARAMETERS: tuple(balanced(trainable, stages)),
            "static_profiled": tuple(balanced(costs, stages)),
        }
        return cls(
            partitions,
            {arm: pipeline.iteration_seconds(partition) for arm, partition in partitions.items()},
            {arm: imbalance(costs, partition) for arm, partition in partitions.items()},
            tuple(costs if layer_seconds is None else layer_seconds),
            tuple(range(len(costs) + 1) if whole is None else whole),
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

    def start(self, arm: str, shape: Shape = "chain") -> tuple[int, ...]:
        """Return the partition at which ``arm`` begins.

        That is a static arm's, uniform for the dense model, else the best; with two chunks per stage the balanced one.
        """
        if arm in STATICS or arm == DENSE:
            return self.partitions[STATIC if arm == DENSE else arm]
        best = self.partitions[self.best]
        if shape == "chain":
            return tuple(self.whole[layer] for layer in best)
        stages = len(best) - 1
        return tuple(balanced(self.layer_seconds, stages, owners=owners_of(shape, stages)))

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

"""The seconds of layers, of stages and of an iteration: the model that balancers and decisions simulate.

Seconds of layers are those on a stage of speed 1. A stage takes the sum of its layers' seconds over its speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_dynmo.errors import PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners.checks import check_costs, check_speeds
from ds_dynmo.partitioners.metrics import loads_of, prefix_sums, sums_of_many
from ds_dynmo.partitioners.passes import PassModel
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import FoundSchedule, iteration_seconds, replay

__all__ = ["PipelineModel"]

Floats = npt.NDArray[np.float64]
AnyPlacement = Placement | Sequence[int]  # boundaries alone are those of a chain
_TIE = 1e-9  # relative difference below which two iterations take the same time


@dataclass(frozen=True)
class PipelineModel:
    """The time of an iteration under any partition, and the bytes that a change of partition moves.

    Attributes:
        forward_seconds, backward_seconds: per layer and micro-batch, on a stage of speed 1.
        micro_batches: per iteration.
        speeds: per stage; a layer takes its seconds over the stage's speed.
        layer_bytes: per layer, the bytes that move with it; (): unknown.
        link_seconds: of a message between neighbours; one number, or one per boundary.
        passes: the model of passes under split schedules; None: DeepSpeed's 1F1B is the only schedule.

    Raises:
        PartitionError: values for different numbers of layers, invalid seconds or speeds, or no micro-batch.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    micro_batches: int
    speeds: tuple[float, ...]
    layer_bytes: tuple[int, ...] = ()
    link_seconds: float | tuple[float, ...] = 0.0
    passes: PassModel | None = None

    def __post_init__(self) -> None:
        check_costs(self.forward_seconds), check_costs(self.backward_seconds)
        check_speeds(self.speeds, len(self.speeds))
        sizes = (
            len(self.forward_seconds),
            len(self.backward_seconds),
            len(self.layer_bytes) or len(self.forward_seconds),
        )
        if len(set(sizes)) != 1 or self.micro_batches < 1:
            raise PartitionError(
                f"a pipeline model needs forward and backward seconds (and bytes, if any) of each layer and at least 1 "
                f"micro-batch, got {sizes[0]} forward and {sizes[1]} backward seconds, {len(self.layer_bytes)} layers' "
                f"bytes and {self.micro_batches} micro-batches"
            )

    def check_shape(self, num_layers: int, num_stages: int) -> None:
        """Refuse a model of other layers or stages.

        Raises:
            PartitionError: with both numbers.
        """
        if len(self.forward_seconds) != num_layers or len(self.speeds) != num_stages:
            raise PartitionError(
                f"the pipeline model is for {len(self.forward_seconds)} layers and {len(self.speeds)} stages, "
                f"not for {num_layers} and {num_stages}"
            )

    def on(self, num_stages: int) -> PipelineModel:
        """Return a model of ``num_stages`` stages of speed 1, all links as slow as the slowest one.

        Models are cached per number of stages, together with the orders that they have found.
        """
        if num_stages not in self._on:
            slowest = max(self.link_seconds, default=0.0) if isinstance(self.link_seconds, tuple) else self.link_seconds
            passes = self.passes.on(num_stages) if self.passes is not None else None
            self._on[num_stages] = replace(self, speeds=(1.0,) * num_stages, link_seconds=slowest, passes=passes)
        return self._on[num_stages]

    def folded(self, groups: LayerGroups) -> PipelineModel:
        """Return a model whose layers are ``groups``.

        Raises:
            PartitionError: the groups are of another number of layers.
        """
        self.check_shape(groups.num_layers, len(self.speeds))
        return replace(
            self,
            forward_seconds=tuple(groups.fold(self.forward_seconds)),
            backward_seconds=tuple(groups.fold(self.backward_seconds)),
            layer_bytes=groups.fold_ints(self.layer_bytes or (1,) * groups.num_layers),
            passes=self.passes.folded(groups) if self.passes is not None else None,
        )

    @cached_property
    def layer_seconds(self) -> tuple[float, ...]:
        """Forward and backward seconds together, per layer and micro-batch, on a stage of speed 1."""
        return tuple(f + b for f, b in zip(self.forward_seconds, self.backward_seconds))

    def stage_loads(self, placement: AnyPlacement) -> list[float]:
        """Compute the seconds per micro-batch of each stage."""
        return loads_of(self.layer_seconds, self._placed(placement), self.speeds)

    def iteration_seconds(self, placement: AnyPlacement) -> float:
        """Simulate the iteration under one placement and its shortest schedule; ``inf`` if no order fits a V or loop.

        Raises:
            PartitionError: ``placement`` is none of these layers and stages, or no chain and there are no ``passes``.
        """
        placement = self._placed(placement)
        found = self.shortest_schedule(placement)
        if found is not None:
            return found.iteration_seconds
        return math.inf if _has_pairs(placement) else self.seconds_under_1f1b(placement)

    def expected_seconds(self, placement: AnyPlacement) -> float:
        """Simulate the iteration as :meth:`iteration_seconds`, but where no order fits a V or loop, that which runs.

        Raises:
            PartitionError: as :meth:`iteration_seconds`.
        """
        placement, seconds = self._placed(placement), self.iteration_seconds(placement)
        if seconds < math.inf or self.passes is None:
            return seconds
        return replay(self.passes.for_equal_costs(placement), self.passes.costs(placement)).iteration_seconds

    def shortest_schedule(self, placement: AnyPlacement) -> FoundSchedule | None:
        """Find the shortest split schedule under one placement.

        Returns:
            None for DeepSpeed's 1F1B, which only a chain runs: there is no other schedule, there is one stage, no order
            fits, or 1F1B is as short and may be chosen.

        Raises:
            PartitionError: as :meth:`iteration_seconds`.
        """
        placement = self._placed(placement)
        if _has_pairs(placement):
            if self.passes is None:
                raise PartitionError(f"placement {placement} has no order without a model of passes")
            return self.passes.shortest(placement)
        if self.passes is None or len(self.speeds) == 1:
            return None
        found = self.passes.shortest(placement)
        if found is None or not self.passes.may_stay:
            return found
        return found if found.iteration_seconds < self.seconds_under_1f1b(placement) * (1 - _TIE) else None

    @property
    def work_seconds(self) -> float:
        """A lower bound of the iteration in seconds, under any partition and schedule: no stage ever waits."""
        layers = self.layer_seconds if self.passes is None else self.passes.layers.least_seconds
        return self.micro_batches * math.fsum(layers) / math.fsum(self.speeds)

    def seconds_under_1f1b(self, placement: AnyPlacement) -> float:
        """Simulate the iteration under a chain and DeepSpeed's 1F1B.

        Raises:
            PartitionError: ``placement`` is no chain of these layers and stages.
        """
        return float(self.iterations_seconds(np.asarray(self._placed(placement).boundaries)[:, None])[0])

    def iterations_seconds(self, partitions: npt.NDArray[np.int64]) -> Floats:
        """Simulate the iterations under many partitions and DeepSpeed's 1F1B, ``[how many]``.

        Args:
            partitions: ``[num_stages + 1, how many]``, a partition in each column.

        Raises:
            PartitionError: another shape, or a column that is no partition of these layers and stages.
        """
        self._check_columns(partitions)
        forward, backward = self.stages_seconds(partitions)
        return iteration_seconds(forward, backward, self.micro_batches, self.link_seconds)

    def stages_seconds(self, partitions: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Compute the forward and backward seconds of each stage, ``[num_stages, how many]``."""
        speeds = np.asarray(self.speeds)[:, None]
        forward = sums_of_many(self.forward_seconds, partitions) / speeds
        return forward, sums_of_many(self.backward_seconds, partitions) / speeds

    def _placed(self, placement: AnyPlacement) -> Placement:
        """Return a placement of these layers and stages; boundaries alone are those of a chain."""
        if not isinstance(placement, Placement):
            placement = Placement.chain(placement, num_layers=len(self.forward_seconds), num_stages=len(self.speeds))
        self.check_shape(placement.num_layers, placement.num_stages)
        return placement

    def _check_columns(self, partitions: npt.NDArray[np.int64]) -> None:
        num_layers, num_stages = len(self.forward_seconds), len(self.speeds)
        try:
            given: npt.NDArray[Any] = np.asarray(partitions)
        except ValueError:  # rows of unlike lengths
            given = np.empty(0)
        if (
            given.ndim != 2
            or len(given) != num_stages + 1
            or given.dtype.kind not in "iu"
            or (given[0] != 0).any()
            or (given[-1] != num_layers).any()
            or (given[1:] <= given[:-1]).any()
        ):
            raise PartitionError(
                f"partitions of shape {given.shape}: should have {num_stages + 1} boundaries from 0 to {num_layers} in "
                "each column, increasing ints: of a list of partitions np.transpose"
            )

    @cached_property
    def _on(self) -> dict[int, PipelineModel]:
        return {}

    def moved(self, old: Placement, partitions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
        """Count the bytes and the layers that change stage from ``old`` to each of many partitions of its owners."""
        sizes, before = prefix_sums(self.layer_bytes or (1,) * old.num_layers), np.asarray(old.boundaries)
        kept_bytes = kept_layers = np.zeros(partitions.shape[1], dtype=np.int64)
        for chunk, owner in enumerate(old.owners):
            for other in (place for place, stage in enumerate(old.owners) if stage == owner):
                low = np.maximum(before[other], partitions[chunk])
                high = np.maximum(low, np.minimum(before[other + 1], partitions[chunk + 1]))
                kept_bytes, kept_layers = kept_bytes + sizes[high] - sizes[low], kept_layers + high - low
        return sizes[-1] - kept_bytes, old.num_layers - kept_layers


def _has_pairs(placement: Placement) -> bool:
    """Return whether stages own two chunks: no chain."""
    return placement.num_chunks > placement.num_stages

"""Plans of re-packings: the stages and moves that lead to a placement on another number of stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynmo.errors import PartitionError, counted
from ds_dynmo.partitioners import hosts
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan


@dataclass(frozen=True)
class JobStages:
    """The stages of the job that are at work, and those that can be recalled.

    Attributes:
        at_work: stages of the first replicas, in order, then those of each extra copy in the same order.
        replica_multiplier: number of copies.
        parked: stages that can be recalled.
        last: the last stage of the launch.
    """

    at_work: tuple[int, ...]
    replica_multiplier: int
    parked: tuple[int, ...]
    last: int

    @property
    def most(self) -> int:
        """The largest possible number of stages: those at work and, with the launch's last stage, the parked ones.

        The last of several stages reads the data, which the launch's last stage has from the start.
        """
        has_last = self.last in (*self.at_work, *self.parked)
        return len(self.at_work) + (len(self.parked) if has_last else 0)

    def with_parked(self, wanted: int) -> tuple[int, ...]:
        """Choose ``wanted`` stages: those at work, then parked ones, the launch's last stage first.

        Raises:
            PartitionError: there are too few.
        """
        if wanted > self.most:
            raise PartitionError(f"repack: {counted(wanted, 'stage')}, there are 1 to {self.most} to go on with")
        parked = sorted(self.parked, key=lambda stage: (stage != self.last, stage))
        return tuple(sorted((*self.at_work, *parked[: wanted - len(self.at_work)])))


@dataclass(frozen=True)
class RepackPlan:
    """The moves of layers to another number of stages.

    Attributes:
        stages: of the job, in the order of the world in which layers move.
        staying: the stages with layers afterwards, by index.
        migration: of layers, between ``stages``.
    """

    stages: tuple[int, ...]
    staying: tuple[int, ...]
    migration: MigrationPlan

    @property
    def freed(self) -> list[int]:
        """The stages without layers afterwards, by index."""
        return list(self.migration.leaving)

    @property
    def placement(self) -> Placement:
        """The placement afterwards, on the stages with layers."""
        return self.migration.new.without_empty_stages()

    def stages_of_copies(self, replica_multiplier: int) -> list[int]:
        """Return the freed stages, by index, that become extra replicas of the staying ones, in order."""
        return self.freed[: (replica_multiplier - 1) * len(self.staying)]


def plan_repack(job: JobStages, old: Placement, new: Placement, layer_bytes: Sequence[int] | None = None) -> RepackPlan:
    """Plan the re-packing from ``old``, of the first replicas, to ``new``, over another number of stages.

    Args:
        layer_bytes: per layer, the bytes that move with it; None: the same for all.

    Raises:
        PartitionError: there are too few stages.
    """
    stages, wanted = job.at_work, new.num_stages
    if wanted > len(stages):
        stages = job.with_parked(wanted)
    elif job.replica_multiplier > 1:
        stages = tuple(sorted(stages))
    owners = [stages.index(stage) for stage in job.at_work[: old.num_stages]]
    spread = old.among(owners, len(stages))
    if wanted == len(stages):
        staying = tuple(range(wanted))
    else:
        staying = hosts(spread.boundaries, new.boundaries, layer_bytes or [1] * old.num_layers)
    return between(stages, spread, new, staying)


def between(stages: tuple[int, ...], old: Placement, new: Placement, staying: Sequence[int]) -> RepackPlan:
    """Plan the re-packing from ``old``, over ``stages``, to ``new``, over those at ``staying``."""
    return RepackPlan(stages, tuple(staying), MigrationPlan.between(old, new.among(staying, len(stages))))

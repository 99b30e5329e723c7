"""The position of one rank in the job: its stage, its data-parallel replica and its tensor-parallel slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GroupPlace:
    """The place of a rank, if all ranks are divided into groups of one kind.

    Attributes:
        group: number of its group.
        index, size: its place among the group's ranks, and their number.
    """

    group: int
    index: int
    size: int


@dataclass(frozen=True)
class RankCoordinates:
    """The position of one rank in the present world.

    Attributes:
        rank, world_size: global rank, and number of ranks.
        stage, num_stages: pipeline stage, and number of stages.
        replica, replicas: data-parallel index, and number of replicas.
        tp_rank, tp_size: tensor-parallel index, and number of slices.
    """

    rank: int = 0
    world_size: int = 1
    stage: int = 0
    num_stages: int = 1
    replica: int = 0
    replicas: int = 1
    tp_rank: int = 0
    tp_size: int = 1

    @classmethod
    def of(cls, grid: Any) -> RankCoordinates:
        """Read the coordinates from DeepSpeed's ``PipelineParallelGrid``."""
        return cls(
            rank=int(grid.get_global_rank()),
            world_size=int(grid.world_size),
            stage=int(grid.get_stage_id()),
            num_stages=int(grid.pipe_parallel_size),
            replica=int(grid.get_data_parallel_id()),
            replicas=int(grid.data_parallel_size),
            tp_rank=int(grid.get_slice_parallel_rank()),
            tp_size=int(grid.slice_parallel_size),
        )

    @property
    def in_world(self) -> GroupPlace:
        """The place among all ranks."""
        return GroupPlace(0, self.rank, self.world_size)

    @property
    def in_pipeline(self) -> GroupPlace:
        """The place among the stages of this replica and slice."""
        return GroupPlace(self.replica * self.tp_size + self.tp_rank, self.stage, self.num_stages)

    @property
    def in_slice_of_stage(self) -> GroupPlace:
        """The place among the replicas of this slice of the stage."""
        return GroupPlace(self.stage * self.tp_size + self.tp_rank, self.replica, self.replicas)

    @property
    def in_stage(self) -> GroupPlace:
        """The place among the replicas and slices of this stage."""
        return GroupPlace(self.stage, self.replica * self.tp_size + self.tp_rank, self.replicas * self.tp_size)

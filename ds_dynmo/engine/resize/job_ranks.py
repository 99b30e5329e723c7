"""The ranks of the job: at work, parked and released."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from deepspeed.runtime.pipe.topology import ProcessTopology

from ds_dynmo.engine.resize import parking
from ds_dynmo.engine.resize.release import RankLocation
from ds_dynmo.engine.resize.repack_plan import JobStages
from ds_dynmo.engine.resize.world import World, launch_store, store_part
from ds_dynmo.engine.stage import StageContext


class JobRanks:
    """Tracks the job's ranks; the same on every rank at work. Construction is collective.

    Args:
        topology: of the launch.

    Attributes:
        world: the ranks at work.
        parked: stages that can be recalled, in order.
        released: whether this rank is not at work.
        locations: of each rank, by its rank at the launch.
    """

    def __init__(self, stage: StageContext, topology: ProcessTopology) -> None:
        comm = stage.comm
        job: str = comm.broadcast_object(uuid.uuid4().hex)  # a launcher may start a job again on the same store
        store = launch_store(stage.config.timeout_seconds)
        self.world = World(topology, store_part(store, job))
        self.parked: tuple[int, ...] = ()
        self.released = False
        here = RankLocation.here(self.world.launch_rank, str(comm.device))
        self.locations: list[RankLocation] = comm.gather_objects(here)

    @property
    def stages(self) -> JobStages:
        """The stages at work, and those that can be recalled."""
        world = self.world
        return JobStages(world.launch_stages_at_work, world.replica_multiplier, self.parked, world.last_stage)

    def park(self, stages: Sequence[int]) -> None:
        """Add stages that can be recalled."""
        self.parked = tuple(sorted([*self.parked, *stages]))

    def unpark(self, stages: Sequence[int]) -> None:
        """Remove stages that were recalled or do not answer."""
        self.parked = tuple(stage for stage in self.parked if stage not in stages)

    def released_and_staying(self) -> tuple[list[RankLocation], list[RankLocation]]:
        """List the ranks released for good, and those at work or parked."""
        present = self.world.launch_ranks((*self.world.launch_stages_at_work, *self.parked))
        released = [at for at in self.locations if at.rank not in present]
        return released, [at for at in self.locations if at.rank in present]

    def have_exited(self, locations: Sequence[RankLocation]) -> bool:
        """Return whether the processes of all these released ranks have announced their end."""
        return parking.have_exited(self.world.store, [location.rank for location in locations])

    def dismiss(self) -> None:
        """End the wait of all ranks that are not at work: they will not be recalled. Rank 0 does this."""
        if self.world.launch_rank != 0:
            return
        at_work = self.world.launch_ranks(self.world.launch_stages_at_work)
        parking.dismiss(self.world.store, [at.rank for at in self.locations if at.rank not in at_work])
        self.parked = ()

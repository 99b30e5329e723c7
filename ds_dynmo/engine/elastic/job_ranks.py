"""Know the ranks of the job: those at work, those that are parked, and those that joined from other launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.engine.elastic import job_spec, parking
from ds_dynmo.engine.elastic.job_spec import JobSpec
from ds_dynmo.engine.elastic.join_client import JoinedJob
from ds_dynmo.engine.elastic.join_server import AdmittedLaunch, JoinServer, ready_key
from ds_dynmo.engine.elastic.release import RankLocation
from ds_dynmo.engine.elastic.repack_plan import JobStages, in_order
from ds_dynmo.engine.elastic.secret import check_launch, secret_for
from ds_dynmo.engine.elastic.world import World, launch_store, store_part
from ds_dynmo.engine.stage import StageContext


class JobRanks:
    """Keeps track of the job's ranks, alike on every rank at work. Construction is collective.

    Attributes:
        world: the ranks at work.
        parked: stages of the job that can be called: parked ones, and those that joined.
        has_new: ranks have joined since the last decision.
        released: this rank is not at work.
        locations: where each rank runs, by its rank at the launch.
        job_name: a name that no other job has.
        secret: that the job shares with ranks that join; None where none can join.
        launch_store: the store of this process's own launch.
    """

    def __init__(self, stage: StageContext) -> None:
        engine, comm = stage.engine, stage.comm
        self._comm, self._timeout_seconds = comm, stage.config.timeout_seconds
        self.job_name: str = comm.broadcast_object(job_spec.new_job_name())
        self.secret = secret_for(stage.config.repack)
        if self.secret is not None:
            check_launch(self.secret, comm.gather_bytes, engine.global_rank)
        self._join_server: JoinServer | None = None
        self.launch_store = launch_store(self._timeout_seconds)
        self.world = World(engine.module.topology(), store_part(self.launch_store, self.job_name))
        self.parked: tuple[int, ...] = ()
        self.released = self.has_new = False
        here = RankLocation.here(self.world.launch_rank, str(engine.device))
        self.locations: dict[int, RankLocation] = dict(enumerate(comm.gather_objects(here)))

    @property
    def stages(self) -> JobStages:
        """The stages at work, and those that can be called."""
        world = self.world
        return JobStages(world.stages, world.replica_multiplier, self.parked, world.last_stage)

    def park(self, stages: Sequence[int]) -> None:
        """Add stages that can be called."""
        self.parked = in_order([*self.parked, *stages], self.world.last_stage)

    def unpark(self, stages: Sequence[int]) -> None:
        """Drop stages that were called, or that do not answer."""
        self.parked = tuple(stage for stage in self.parked if stage not in stages)

    def released_and_staying(self) -> tuple[list[RankLocation], list[RankLocation]]:
        """List the ranks of this launch that were released for good, and all ranks that are at work or parked.

        A launch that joined gives its own ranks back.
        """
        present = set(self.world.launch_ranks((*self.world.stages, *self.parked)))
        locations = self.locations.values()
        released = [at for at in locations if at.rank not in present and not self.world.has_joined(at.rank)]
        return released, [at for at in locations if at.rank in present]

    def have_exited(self, locations: Sequence[RankLocation]) -> bool:
        """Have the processes of these released ranks said that they end?"""
        return parking.have_exited(self.world.store, [location.rank for location in locations])

    def dismiss(self) -> None:
        """Tell all ranks that are not at work that nobody will call them any more. Rank 0 does this."""
        if self.world.launch_rank != 0:
            return
        if self._join_server is not None:
            job_spec.withdraw_job(self.launch_store)
            self._add(self._join_server.close())
        at_work = self.world.launch_ranks(self.world.stages)
        parking.dismiss(self.world.store, [rank for rank in self.locations if rank not in at_work])
        self.parked = ()

    # -- ranks of other launches ----------------------------------------------------------------------

    def accept_joins(self, job: JobSpec, num_layers: int, warn: Callable[[str], None]) -> None:
        """Let ranks of other launches join from now on, where ``dynmo.repack.accept_joins`` says so."""
        if self.secret is None or self.world.launch_rank != 0:
            return
        connection = BoundedStore(self.launch_store.raw.clone(), self._timeout_seconds)
        self._join_server = JoinServer(
            store_part(connection, self.job_name),
            self.job_name,
            self.secret,
            job,
            ranks_per_stage=len(self.world.launch_ranks([0])),
            most_stages=num_layers,
            timeout_seconds=self._timeout_seconds,
            warn=warn,
        )
        self._join_server.start()
        job_spec.publish_job(self.launch_store, self.job_name)

    def update_job(self, describe: Callable[[], JobSpec]) -> None:
        """Replace the spec that launches are given from now on when they ask to join."""
        if self._join_server is not None:
            self._join_server.update_job(describe())

    def admit(self) -> tuple[int, ...]:
        """Add the launches that have joined meanwhile, and return their ranks. Collective."""
        if self.secret is None:
            return ()
        launches: list[AdmittedLaunch] = []
        if self._join_server is not None:
            present = (*self.world.stages, *self.parked)
            joined = sum(stage > self.world.last_stage for stage in present)
            launches = self._join_server.ready_launches(joined)
        launches = self._comm.broadcast_object(launches)
        self._add(launches)
        return tuple(location.rank for launch in launches for location in launch.locations)

    def _add(self, launches: Sequence[AdmittedLaunch]) -> None:
        for launch in launches:
            self.park(launch.stages)
            self.locations.update({location.rank: location for location in launch.locations})
            self.has_new = True

    def become_part_of(self, job: JoinedJob) -> None:
        """Take this rank's number in the job that its launch has joined, and say there that it can be called."""
        self.job_name = job.name
        self.world.join(job.axes, job.first_stage + self.world.launch_stage, job.store)
        self.world.store.set(ready_key(self.world.launch_rank), "")

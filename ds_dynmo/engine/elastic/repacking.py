"""Carry out a re-packing: layers off the stages that leave, or onto those that come back, and a new world around it.

Layers move as in any rebalance, in the larger of the two worlds, to or from stages that own none. Before that nothing
has changed and any failure leaves training as it was; from then on a failure is fatal, and says so.
"""

from __future__ import annotations

import atexit
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.comm.bounded import BoundedStore, within
from ds_dynmo.engine.elastic import job_snapshot, joining, newcomer, parking
from ds_dynmo.engine.elastic.admission import Admissions, Arrival, ready_key
from ds_dynmo.engine.elastic.copying import copy_stage
from ds_dynmo.engine.elastic.data import DataPosition
from ds_dynmo.engine.elastic.job_snapshot import JobSnapshot
from ds_dynmo.engine.elastic.release import Place
from ds_dynmo.engine.elastic.secret import check_launch, check_members, secret_for
from ds_dynmo.engine.elastic.world import World, forget_batch, launch_store, part_of, refit_deepspeed
from ds_dynmo.engine.migration.migrate import migrate, rehearse
from ds_dynmo.engine.serialization.objects import from_bytes
from ds_dynmo.errors import ConfigError, MigrationError, PartitionError
from ds_dynmo.partitioners import hosts, with_empty
from ds_dynmo.plan import MigrationPlan


@dataclass(frozen=True)
class RepackResult:
    """What a re-packing came to; ranks as numbered at the launch, seconds on this rank."""

    released_ranks: tuple[int, ...] = ()
    recalled_ranks: tuple[int, ...] = ()
    layers_moved: int = 0
    bytes_moved: int = 0
    migrate_seconds: float = 0.0
    world_seconds: float = 0.0


class Repacker:
    """One rank's part in giving stages back and taking them again.

    Attributes:
        world: the processes that take part.
        parked: stages of the job that can be called: parked ones, and those that joined.
        joining ranks: ranks have joined since the last decision.
        joined: this rank offered itself to another job than it was launched with, which has not called it yet.
        places: where each rank runs.
        states: what a rank that comes back has to know of the job, by name.
        data: where this rank is in its data.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._name: str = engine._comm.broadcast_object(joining.new_name())
        self._secret = secret_for(engine.dynmo.repack)
        if self._secret is not None:
            check_launch(self._secret, engine._comm.gather_bytes, engine.global_rank)
        self._admissions: Admissions | None = None
        self._launch_store = launch_store(engine.dynmo.timeout_seconds)
        self.world = World(engine.module.topology(), part_of(self._launch_store, self._name))
        self.parked: tuple[int, ...] = ()
        self.joining_ranks = self.joined = False
        place = Place.here(self.world.launch_rank, str(engine.device))
        self.places: dict[int, Place] = dict(enumerate(engine._comm.gather_objects(place)))
        self.states: dict[str, Any] = {}
        grid = engine.grid
        self.data = DataPosition(engine, replica=grid.get_data_parallel_id(), replicas=grid.data_parallel_size)

    @property
    def most_stages(self) -> int:
        """How many stages there can be: those at work, those that are parked, and those that joined.

        The last of several reads the data: the launch's last stage does, which has read it from the start, or one
        that joined.
        """
        has_last = any(stage >= self.world.last_stage for stage in (*self.world.stages, *self.parked))
        return len(self.world.stages) + (len(self.parked) if has_last else 0)

    def gone_and_staying(self) -> tuple[list[Place], list[Place]]:
        """Where the ranks of this launch run that were released for good, and all that are at work or wait.

        What a launch that joined runs on is its own to give back.
        """
        here = set(self.world.launch_ranks((*self.world.stages, *self.parked)))
        gone = [
            place for place in self.places.values() if place.rank not in here and not self.world.has_joined(place.rank)
        ]
        return gone, [place for place in self.places.values() if place.rank in here]

    def have_exited(self, places: Sequence[Place]) -> bool:
        """Do the processes of these released ranks end?"""
        return parking.all_end(self.world.store, [place.rank for place in places])

    def dismiss(self) -> None:
        """On rank 0: tell all ranks that take no part that nobody will call them any more."""
        if self.world.launch_rank == 0:
            if self._admissions is not None:
                joining.withdraw(self._launch_store)
                self._add(self._admissions.close())
            at_work = self.world.launch_ranks(self.world.stages)
            parking.dismiss(self.world.store, [rank for rank in self.places if rank not in at_work])
            self.parked = ()

    # -- ranks of another launch ----------------------------------------------------------------------

    def announce(self) -> None:
        """Ranks of other launches can join from now on, where they may at all. The engine is complete."""
        engine, world = self._engine, self.world
        if self._secret is None or world.launch_rank != 0:
            return
        self._admissions = Admissions(
            part_of(BoundedStore(self._launch_store.raw.clone(), engine.dynmo.timeout_seconds), self._name),
            self._name,
            self._secret,
            joining.job_of(engine, world),
            ranks_of_stage=len(world.launch_ranks([0])),
            most_stages=engine._layers.num_layers,
            timeout_seconds=engine.dynmo.timeout_seconds,
            warn=engine._warn,
        )
        self._admissions.start()
        joining.announce(self._launch_store, self._name)

    def optimizer_changed(self) -> None:
        """Ranks of other launches have to have the new one from now on."""
        if self._admissions is not None:
            self._admissions.describe(joining.job_of(self._engine, self.world))

    def admit(self) -> tuple[int, ...]:
        """Stages that have joined meanwhile can be called from now on; the ranks of these. Collective."""
        if self._secret is None:
            return ()
        arrivals: list[Arrival] = []
        if self._admissions is not None:
            at_hand = (*self.world.stages, *self.parked)
            arrivals = self._admissions.arrived(sum(stage > self.world.last_stage for stage in at_hand))
        arrivals = self._engine._comm.broadcast_object(arrivals)
        self._add(arrivals)
        return tuple(place.rank for arrival in arrivals for place in arrival.places)

    def _add(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self.parked = tuple(self.world.in_order([*self.parked, *arrival.stages]))
            self.places.update({place.rank: place for place in arrival.places})
            self.joining_ranks = True

    def join(self, where: Any) -> None:
        """Give up this launch's own world, and wait to be called by the job at ``where``. Collective.

        Raises:
            ConfigError: there is none, or it does something else or does not know the secret. Nothing has changed.
        """
        engine, world, secret = self._engine, self.world, self._secret
        if secret is None:
            raise ConfigError("engine.join: dynmo.repack.accept_joins = false: set it to true, in the job too")
        own, patience = joining.job_of(engine, world), engine.dynmo.timeout_seconds
        job = newcomer.enter(where, own, self.places[world.launch_rank], world, engine._comm, secret, patience)
        with no_way_back("joining failed after this launch had given up its layers", "Launch it anew"):
            self.dismiss()  # who joined this launch meanwhile, or was parked: nobody would ever call it
            engine._layers.clear(engine._names.empty)
            engine._state.clear()
            self._end()
            self._let_go()
            self._name = job.name
            world.join(job.axes, job.first_stage + world.launch_stage, job.store)
            self.joined = True
            world.store.set(ready_key(world.launch_rank), "")

    # -- fewer ----------------------------------------------------------------------------------------

    def shrink(self, new: tuple[int, ...], *, park: bool, replica_multiplier: int = 1) -> RepackResult:
        """Go on with ``new``, over fewer stages; the others are released, to be called back if ``park``.

        Args:
            replica_multiplier: so many times the launch's replicas go on, on stages that are freed.

        Raises:
            MigrationError: harmless; a stage has no memory for it, or a layer cannot be sent.
        """
        plan, _ = self._plan_of_fewer(self._engine.partition, new)
        self._engine._check_room(plan)
        if replica_multiplier > 1:
            self._rehearse(plan, self.world.stages, copies=True)
        return self._shrink(new, park=park, replica_multiplier=replica_multiplier)

    def _plan_of_fewer(self, old: Sequence[int], new: tuple[int, ...]) -> tuple[MigrationPlan, Sequence[int]]:
        """From ``old`` to ``new``, over fewer stages, and the stages that go on."""
        profile = self._engine.profile
        sizes = [cost.static_bytes for cost in profile.layers] if profile else [1] * old[-1]
        places = hosts(old, new, sizes)
        present = range(len(old) - 1)
        leaving = [stage for stage in present if stage not in places]
        target = with_empty(new, places, len(present))
        return MigrationPlan.between(old, target, leaving=leaving, joining=_without_layers(old)), places

    def _shrink(self, new: tuple[int, ...], *, park: bool, replica_multiplier: int) -> RepackResult:
        engine, world = self._engine, self.world
        plan, places = self._plan_of_fewer(engine.partition, new)
        leaving = sorted(plan.leaving)
        copying = leaving[: (replica_multiplier - 1) * len(places)]
        began = time.perf_counter()
        job = job_snapshot.describe_job(engine, self.data, self.states)
        moved_bytes = self._migrate(plan)
        moved = time.perf_counter()
        gone = tuple(world.stages[stage] for stage in leaving if stage not in copying)
        at_work = [world.stages[place] for place in (*places, *copying)]
        stays, copies_others = engine.stage_id in places, engine.stage_id in copying
        with no_way_back():
            self._end()
            if park:
                self.parked = tuple(world.in_order([*self.parked, *gone]))
            if stays or copies_others:
                self._begin(at_work, world.generation + 1, replica_multiplier)
                if stays:
                    engine._layers.renumber(new, engine.stage_id)
                else:
                    engine._state.forget()
                if replica_multiplier > 1:
                    with self._who_is_gone():
                        copy_stage(engine._migration_context(), new, world.launch_replicas)
                else:
                    engine._layers.tie(engine.grid, engine._comm.tied_group)
                self._stages_changed(new)
                if self.states:
                    job_snapshot.load_states(from_bytes(engine._comm.broadcast_object(job), engine.device), self.states)
            else:
                self._let_go()
                if not park:
                    atexit.register(parking.say_that_it_ends, world.store, world.launch_rank)
        return RepackResult(
            released_ranks=world.launch_ranks(gone),
            layers_moved=len(plan.moves),
            bytes_moved=moved_bytes,
            migrate_seconds=moved - began,
            world_seconds=time.perf_counter() - moved,
        )

    def _let_go(self) -> None:
        """This rank is released: nothing of the model is left on its accelerator."""
        engine = self._engine
        engine._state.forget()
        forget_batch(engine)
        engine.loss = engine.total_loss = engine.total_additional_losses = None
        engine._profile = None
        engine.released = True
        gc.collect()  # parameters are held by cycles through what DeepSpeed binds on them
        get_accelerator().empty_cache()

    # -- more -----------------------------------------------------------------------------------------

    def grow(self, new: tuple[int, ...], first_seconds: float | None = None) -> RepackResult:
        """Go on with ``new``, over more stages, some of which are called back. Called by those at work.

        Args:
            first_seconds: see :class:`JobSnapshot`.

        Raises:
            MigrationError: harmless; a stage has no memory for it, a layer cannot be sent, or a parked rank does not
                answer.
        """
        world = self.world
        stages = self._with_parked(len(new) - 1)
        back = tuple(stage for stage in stages if stage not in world.stages)
        old = self._among(stages)
        plan = MigrationPlan.between(old, new, joining=_without_layers(old))
        self._engine._check_room(plan)
        self._rehearse(plan, stages)
        began = time.perf_counter()
        job = job_snapshot.describe_job(self._engine, self.data, self.states)
        call = parking.Call(world.generation + 1, tuple(stages))
        self._call(back, call)
        with no_way_back():
            self._gather_shards()
            self._end()
            self.parked = tuple(stage for stage in self.parked if stage not in back)
            done = self._enlarge(call, JobSnapshot(old, new, self.parked, self.places, first_seconds, job))
        whole_seconds = time.perf_counter() - began
        return replace(
            done, recalled_ranks=world.launch_ranks(back), world_seconds=whole_seconds - done.migrate_seconds
        )

    def answer(self, call: parking.Call) -> None:
        """The part in :meth:`grow` of a rank that was called back."""
        self._engine.released, self.joined, self.joining_ranks = False, False, False
        with no_way_back():
            self._enlarge(call, None)

    def _with_parked(self, wanted: int) -> list[int]:
        """The stages of the job to go on with: those at work, and of the parked ones those first that can be last."""
        if wanted > self.most_stages:
            raise PartitionError(f"repack: {wanted} stages, there are 1 to {self.most_stages} to go on with")
        missing = wanted - len(self.world.stages)
        last = self.world.last_stage
        parked = sorted(self.parked, key=lambda stage: (stage != last, stage < last, stage))
        return self.world.in_order([*self.world.stages, *parked[:missing]])

    def _call(self, back: Sequence[int], call: parking.Call) -> None:
        """Rank 0 calls the parked ranks; every rank learns whether they answered."""
        launch_ranks, silent = self.world.launch_ranks(back), []
        if self._engine.global_rank == 0:
            half = self._engine.dynmo.timeout_seconds / 2
            silent = parking.post(self.world.store, launch_ranks, call, timeout_seconds=half)
        silent = self._engine._comm.broadcast_object(silent)
        if silent:
            lost = {stage for stage in back if set(self.world.launch_ranks([stage])) & set(silent)}
            self.parked = tuple(stage for stage in self.parked if stage not in lost)
            raise MigrationError(
                f"ranks {silent} (as numbered at the launch) are parked but do not answer, and are given up. "
                "No layer has moved",
                harmless=True,
            )

    def _enlarge(self, call: parking.Call, standing: JobSnapshot | None) -> RepackResult:
        """Enter the larger world and move layers onto the stages that came back; None: this rank was away."""
        engine = self._engine
        away = standing is None
        self._begin(call.stages, call.generation)
        standing = engine._comm.broadcast_object(standing)
        assert standing is not None
        job = from_bytes(standing.job, engine.device)
        if away:
            job_snapshot.learn(engine, self.data, job)
            self.parked, self.places = standing.parked, standing.places
        engine._layers.renumber(standing.old, engine.stage_id)
        plan = MigrationPlan.between(standing.old, standing.new, joining=_without_layers(standing.old))
        began = time.perf_counter()
        moved_bytes = self._migrate(plan)
        migrate_seconds = time.perf_counter() - began
        self._stages_changed(standing.new)
        if standing.first_seconds is not None:
            engine._cost_model.first_seconds = standing.first_seconds
        job_snapshot.load_states(job, self.states)
        return RepackResult(layers_moved=len(plan.moves), bytes_moved=moved_bytes, migrate_seconds=migrate_seconds)

    # -- further replicas -----------------------------------------------------------------------------

    def replica_multiplier_for(self, num_stages: int) -> int:
        """How many times the launch's replicas could go on over so many stages, on the ranks that are at work.

        Once where half of the stages are not free, a batch cannot be shared out evenly, a rank has no data of its own
        to read, or replicas have parameters of their own. Collective.
        """
        engine, world = self._engine, self.world
        micro_batches = engine.micro_batches * world.replica_multiplier
        most = len(world.stages) // num_stages
        fitting = [times for times in range(2, most + 1) if micro_batches % times == 0]
        if not fitting or engine._replicas_would_differ or not world.has_replica_axis:
            return 1
        return fitting[-1] if all(engine._comm.gather_objects(self.data.can_read)) else 1

    def merge_replicas(self, new: tuple[int, ...], *, park: bool, replica_multiplier: int) -> RepackResult:
        """Like :meth:`shrink`, where there are further replicas: onto any number of the stages that are at work.

        Raises:
            MigrationError: harmless; a stage has no memory for it, or a layer cannot be sent.
        """
        stages = self.world.in_order(self.world.stages)
        old = self._among(stages)
        spreads = len(new) == len(old)
        plan = MigrationPlan.between(old, new, joining=_without_layers(old)) if spreads else None
        plan = plan or self._plan_of_fewer(old, new)[0]
        self._engine._check_room(plan)
        self._rehearse(plan, stages, copies=replica_multiplier > 1)
        began = time.perf_counter()
        with no_way_back():
            self._unfold()
            unfold_seconds = time.perf_counter() - began
            done = self._spread(new) if spreads else self._shrink(new, park=park, replica_multiplier=replica_multiplier)
        return replace(done, world_seconds=done.world_seconds + unfold_seconds)

    def _unfold(self) -> None:
        """Further replicas give up their layers: all ranks at work are stages of one pipeline, most of them empty."""
        engine, world = self._engine, self.world
        stages = world.in_order(world.stages)
        old = self._among(stages)
        self._gather_shards()
        self._end()
        self._begin(stages, world.generation + 1)
        engine._layers.renumber(old, engine.stage_id)
        engine._state.rebuild_buffers()

    def _spread(self, new: tuple[int, ...]) -> RepackResult:
        """Move layers to ``new``, over all stages there are, some of which have none."""
        engine = self._engine
        plan = MigrationPlan.between(engine.partition, new, joining=_without_layers(engine.partition))
        began = time.perf_counter()
        moved_bytes = self._migrate(plan)
        migrate_seconds = time.perf_counter() - began
        self._stages_changed(new)
        return RepackResult(layers_moved=len(plan.moves), bytes_moved=moved_bytes, migrate_seconds=migrate_seconds)

    def _among(self, stages: Sequence[int]) -> tuple[int, ...]:
        """The present partition, on the stages of the first replicas among ``stages`` of the job."""
        engine = self._engine
        places = [stages.index(stage) for stage in self.world.stages[: engine.num_stages]]
        return with_empty(engine.partition, places, len(stages))

    def _gather_shards(self) -> None:
        """The launch's replicas hold everything again, and nobody else holds anything."""
        engine, world = self._engine, self.world
        if world.replica_multiplier == 1:
            return
        with self._who_is_gone():
            engine._state.gather_shards(tuple(engine.partition), world.launch_replicas)
        if world.copy:
            engine._layers.clear(engine._names.empty)
            engine._state.clear()

    # -- both -----------------------------------------------------------------------------------------

    def _migrate(self, plan: MigrationPlan) -> int:
        """The bytes that moved."""
        with self._who_is_gone():
            return migrate(plan, self._engine._migration_context())

    def _rehearse(self, plan: MigrationPlan, stages: Sequence[int], *, copies: bool = False) -> None:
        """``plan`` is for these ``stages`` of the job, and carried out when the present world has ended."""
        stage = stages.index(self.world.launch_stage)
        rehearse(plan, replace(self._engine._migration_context(), stage=stage), copies=copies)

    @contextmanager
    def _who_is_gone(self) -> Iterator[None]:
        """Where layers or state are on their way, a fatal error says which ranks do not answer any more."""
        try:
            yield
        except Exception as error:
            if isinstance(error, MigrationError) and error.harmless:
                raise
            # A rank that is alive may notice as late as at the end of its own time-out.
            silent = self.world.silent(1.5 * self._engine.dynmo.timeout_seconds)
            if not silent:
                raise
            raise MigrationError(
                f"ranks {silent} (as numbered at the launch) do not answer any more: {error}"
            ) from error

    def _end(self) -> None:
        self._engine._comm.all_done()
        self.world.end()

    def _begin(self, stages: Sequence[int], generation: int, replica_multiplier: int = 1) -> None:
        """A new world, and everything that was built from the old one, on a rank that goes on."""
        engine = self._engine
        patience = engine.dynmo.timeout_seconds

        def begin() -> None:
            refit_deepspeed(
                engine,
                self.world.begin(stages, generation, timeout_seconds=patience, replica_multiplier=replica_multiplier),
            )

        within(patience + self.world.timeout_seconds, begin)
        forget_batch(engine)
        engine._comm.connect("repack")
        if self._secret is not None:
            name = f"{self._name}/{generation}"
            check_members(self._secret, engine._comm.gather_bytes, engine.global_rank, name)
        engine._state.use_grid()
        self._share_batch()

    def _share_batch(self) -> None:
        """Copies of a replica share its batch, which stays as large as it was."""
        engine, world = self._engine, self.world
        if world.replica_multiplier == self.data.replica_multiplier:
            return
        self.data.replica_multiplier, self.data.copy = world.replica_multiplier, world.copy
        engine.set_train_batch_size(engine.train_batch_size())
        if engine._wrapper is not None:
            engine._wrapper.accumulate(engine.micro_batches)

    def _stages_changed(self, partition: tuple[int, ...]) -> None:
        """What was learnt of the stages is of others now; what was learnt of the layers holds."""
        engine = self._engine
        engine._cost_model.stages_changed()
        engine._move_seconds = 0.0
        if engine._profile is not None:
            engine._profile = replace(engine._profile, partition=partition, micro_batches=engine.micro_batches)
        engine._layers_moved()
        engine._controller.decided(moved=True)


def _without_layers(partition: Sequence[int]) -> list[int]:
    return [stage for stage in range(len(partition) - 1) if partition[stage] == partition[stage + 1]]


@contextmanager
def no_way_back(
    what: str = "the re-packing failed after layers had begun to move or the ranks had parted",
    remedy: str = "Resume the job from its last checkpoint, with as many stages as are left",
) -> Iterator[None]:
    """From here on an error is fatal, whatever it says itself."""
    try:
        yield
    except Exception as error:
        raise MigrationError(f"{what}: {error}. {remedy}") from error

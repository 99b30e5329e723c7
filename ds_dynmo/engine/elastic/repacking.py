"""Carry out a re-packing: layers off the stages that leave, or onto those that come back, and a new world around it.

Layers move as in any rebalance, in the larger of the two worlds, to or from stages that own none. Before that nothing
has changed and any failure leaves training as it was; from then on a failure is fatal, and says so.
"""

from __future__ import annotations

import atexit
import gc
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.checkpoint.progress import counters_of, restore_counters
from ds_dynmo.engine.elastic import parking
from ds_dynmo.engine.elastic.release import Place
from ds_dynmo.engine.elastic.world import World, forget_batch, refit_deepspeed
from ds_dynmo.engine.migration import migrate
from ds_dynmo.engine.parameter_groups import options_of
from ds_dynmo.errors import MigrationError, PartitionError
from ds_dynmo.partitioners import hosts, with_empty
from ds_dynmo.plan import MigrationPlan


@dataclass(frozen=True)
class Done:
    """What a re-packing came to; ranks as numbered at the launch, seconds on this rank."""

    released_ranks: tuple[int, ...] = ()
    recalled_ranks: tuple[int, ...] = ()
    layers_moved: int = 0
    bytes_moved: int = 0
    migrate_seconds: float = 0.0
    world_seconds: float = 0.0


@dataclass(frozen=True)
class Standing:
    """How things stand when stages come back.

    Attributes:
        old: boundaries, with those stages empty; ``new``: as they are to be.
        parked: stages of the launch that stay parked.
        job: pickled, all that the ranks count alike.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]
    parked: tuple[int, ...]
    job: bytes


_COUNTED = (  # of DeepSpeed 0.19.8's engine and of ours, alike on every rank
    "global_steps",
    "global_samples",
    "skipped_steps",
    "_global_grad_norm",
    "_profile",
    "_trainable",
    "_prefix",
)


class Repacker:
    """One rank's part in giving stages back and taking them again."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.world = World(engine.module.topology())
        self.parked: tuple[int, ...] = ()  # stages of the launch, those that can be called back
        place = Place.here(self.world.home, str(engine.device))
        self.places: list[Place] = engine._comm.gather_objects(place)  # by rank at the launch
        self.states: dict[str, Any] = {}  # what a rank that comes back has to know of the job, by name
        self._behind: tuple[Any, int] | None = None  # an iterator, and the micro-batches that others took meanwhile

    @property
    def most_stages(self) -> int:
        """How many stages there can be: those at work, and those that are parked.

        Only the launch's last stage can be the last of several: it has read the data from the start.
        """
        has_last = self.world.last_stage in (*self.world.stages, *self.parked)
        return len(self.world.stages) + (len(self.parked) if has_last else 0)

    def idle_and_busy(self) -> tuple[list[Place], list[Place]]:
        """Where the ranks run that take no part now, and those that do."""
        at_work = set(self.world.homes(self.world.stages))
        idle = [place for place in self.places if place.rank not in at_work]
        return idle, [place for place in self.places if place.rank in at_work]

    def have_ended(self, places: Sequence[Place]) -> bool:
        """Do the processes of these released ranks end?"""
        return parking.all_end(self.world.store, [place.rank for place in places])

    def dismiss(self) -> None:
        """On rank 0: tell all ranks that take no part that nobody will call them any more."""
        if self.world.home == 0:
            parking.dismiss(self.world.store, [place.rank for place in self.idle_and_busy()[0]])
            self.parked = ()

    def catch_up(self, data_iter: Any) -> None:
        """Before a batch: what the others took from the data while this rank was away is skipped here.

        Only where this rank reads data, and from the very iterator that it read from before.
        """
        if self._behind is None:
            return
        iterator, count = self._behind
        engine = self._engine
        if engine.is_first_stage() or engine.is_last_stage():
            self._behind = None
            if data_iter is None or data_iter is iterator:
                for _ in range(count):
                    next(iterator)

    # -- fewer ----------------------------------------------------------------------------------------

    def shrink(self, new: tuple[int, ...], *, park: bool) -> Done:
        """Go on with ``new``, over fewer stages; the others are released, to be called back if ``park``."""
        engine, world = self._engine, self.world
        present = engine.num_stages
        profile = engine.profile
        sizes = [cost.static_bytes for cost in profile.layers] if profile else [1] * engine._layers.num_layers
        places = hosts(engine.partition, new, sizes)
        leaving = [stage for stage in range(present) if stage not in places]
        plan = MigrationPlan.between(engine.partition, with_empty(new, places, present), leaving=leaving)
        began = time.perf_counter()
        job = self._gather_job()
        moved_bytes = migrate(plan, engine._site())
        moved = time.perf_counter()
        gone = tuple(world.stages[stage] for stage in leaving)
        stays = engine.stage_id in places
        with _no_way_back():
            self._end()
            if park:
                self.parked = tuple(sorted((*self.parked, *gone)))
            if stays:
                self._begin([world.stages[place] for place in places], world.generation + 1)
                engine._layers.renumber(new, engine.stage_id)
                engine._layers.tie(engine.grid, engine._comm.tied_group)
                self._stages_changed(new)
                self._load_states(pickle.loads(job))
            else:
                self._let_go()
                if not park:
                    atexit.register(parking.say_that_it_ends, world.store, world.home)
        return Done(
            released_ranks=world.homes(gone),
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

    def grow(self, new: tuple[int, ...]) -> Done:
        """Go on with ``new``, over more stages, some of which are called back. Called by those at work."""
        engine, world = self._engine, self.world
        stages = self._with_parked(len(new) - 1)
        back = tuple(stage for stage in stages if stage not in world.stages)
        old = with_empty(engine.partition, [stages.index(stage) for stage in world.stages], len(stages))
        began = time.perf_counter()
        job = self._gather_job()
        call = parking.Call(world.generation + 1, tuple(stages))
        self._call(back, call)
        with _no_way_back():
            self._end()
            self.parked = tuple(stage for stage in self.parked if stage not in back)
            done = self._enlarge(call, Standing(old, new, self.parked, job))
        whole_seconds = time.perf_counter() - began
        return replace(done, recalled_ranks=world.homes(back), world_seconds=whole_seconds - done.migrate_seconds)

    def answer(self, call: parking.Call) -> None:
        """The part in :meth:`grow` of a rank that was called back."""
        self._engine.released = False
        with _no_way_back():
            self._enlarge(call, None)

    def _with_parked(self, wanted: int) -> list[int]:
        """The stages of the launch to go on with: those at work, and of the parked ones the launch's last stage first.

        The last stage reads the data, and has read it before.
        """
        if wanted > self.most_stages:
            raise PartitionError(f"repack: {wanted} stages, there are 1 to {self.most_stages} to go on with")
        missing = wanted - len(self.world.stages)
        last = [stage for stage in self.parked if stage == self.world.last_stage]
        others = [stage for stage in self.parked if stage not in last]
        return sorted([*self.world.stages, *(last + others)[:missing]])

    def _call(self, back: Sequence[int], call: parking.Call) -> None:
        """Rank 0 calls the parked ranks; every rank learns whether they answered."""
        homes, silent = self.world.homes(back), []
        if self._engine.global_rank == 0:
            half = self._engine.dynmo.timeout_seconds / 2
            silent = parking.post(self.world.store, homes, call, timeout_seconds=half)
        silent = self._engine._comm.gather_objects(silent)[0]
        if silent:
            lost = {stage for stage in back if set(self.world.homes([stage])) & set(silent)}
            self.parked = tuple(stage for stage in self.parked if stage not in lost)
            raise MigrationError(
                f"ranks {silent} (as numbered at the launch) are parked but do not answer, and are given up. "
                "No layer has moved",
                harmless=True,
            )

    def _enlarge(self, call: parking.Call, standing: Standing | None) -> Done:
        """Enter the larger world and move layers onto the stages that came back; None: this rank was away."""
        engine = self._engine
        away = standing is None
        self._begin(call.stages, call.generation)
        standing = engine._comm.gather_objects(standing)[0]
        assert standing is not None
        job = pickle.loads(standing.job)
        if away:
            self._learn(job)
            self.parked = standing.parked
        engine._layers.renumber(standing.old, engine.stage_id)
        joining = [stage for stage in range(engine.num_stages) if standing.old[stage] == standing.old[stage + 1]]
        plan = MigrationPlan.between(standing.old, standing.new, joining=joining)
        began = time.perf_counter()
        moved_bytes = migrate(plan, engine._site())
        migrate_seconds = time.perf_counter() - began
        self._stages_changed(standing.new)
        self._load_states(job)
        return Done(layers_moved=len(plan.moves), bytes_moved=moved_bytes, migrate_seconds=migrate_seconds)

    def _gather_job(self) -> bytes:
        """:meth:`_job` of rank 0, pickled: while all that takes part is still together, and a failure is harmless."""
        every = self._engine._comm.gather_or_fail("telling how the job stands", lambda: pickle.dumps(self._job()))
        job: bytes = every[0]
        return job

    def _job(self) -> dict[str, Any]:
        """What a rank that comes back cannot know: all that the ranks count alike. States may be gathered for it."""
        engine = self._engine
        optimizer, scheduler = engine.basic_optimizer, engine.lr_scheduler
        counted = {name: getattr(engine, name) for name in _COUNTED}
        return {
            "attributes": {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in counted.items()},
            "batch_size": engine.train_batch_size(),
            "counters": counters_of(engine),
            "options": [options_of(group) for group in optimizer.param_groups] if optimizer else [],
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "states": {name: holder.state_dict() for name, holder in self.states.items()},
        }

    def _learn(self, job: dict[str, Any]) -> None:
        engine = self._engine
        per_micro_batch = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
        missed = max(0, job["attributes"]["global_samples"] - engine.global_samples) // per_micro_batch
        if engine.train_batch_size() != job["batch_size"]:
            engine.set_train_batch_size(job["batch_size"])
        if engine.data_iterator is not None:
            before = self._behind[1] if self._behind is not None and self._behind[0] is engine.data_iterator else 0
            self._behind = (engine.data_iterator, before + missed)
        for name, value in job["attributes"].items():
            setattr(engine, name, value)
        restore_counters(engine, job["counters"], same_partition=True)
        for group, options in zip(engine.basic_optimizer.param_groups if job["options"] else (), job["options"]):
            group.update(options)
        if job["scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(job["scheduler"])

    def _load_states(self, job: dict[str, Any]) -> None:
        """On every rank, as when a job is resumed: what a rank kept of them for itself went with it."""
        for name, holder in self.states.items():
            holder.load_state_dict(job["states"][name])

    # -- both -----------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._engine._comm.all_done()
        self.world.end()

    def _begin(self, stages: Sequence[int], generation: int) -> None:
        """A new world, and everything that was built from the old one, on a rank that goes on."""
        engine = self._engine
        topology = self.world.begin(stages, generation, timeout_seconds=engine.dynmo.timeout_seconds)
        refit_deepspeed(engine, topology)
        forget_batch(engine)
        engine._comm.connect("repack")
        engine._state.use_grid()

    def _stages_changed(self, partition: tuple[int, ...]) -> None:
        """What was learnt of the stages is of others now; what was learnt of the layers holds."""
        engine = self._engine
        engine._experience.stages_changed()
        engine._move_seconds = 0.0
        if engine._profile is not None:
            engine._profile = replace(engine._profile, partition=partition)
        engine._layers_moved()
        engine._controller.decided(moved=True)


@contextmanager
def _no_way_back() -> Iterator[None]:
    """From here on an error is fatal, whatever it says itself."""
    try:
        yield
    except Exception as error:
        raise MigrationError(
            f"the re-packing failed after layers had begun to move or the ranks had parted: {error}. Resume the job "
            "from its last checkpoint, with as many stages as are left"
        ) from error

"""The parts of an engine, and who is given what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.balancing.balancer import Balancer
from ds_dynmo.engine.checkpoint.checkpointer import Checkpointer
from ds_dynmo.engine.checkpoint.progress import Progress
from ds_dynmo.engine.elastic.repacker import Repacker
from ds_dynmo.engine.files import check_writable
from ds_dynmo.engine.migration.context import MigrationContext
from ds_dynmo.engine.migration.migrator import Migrator
from ds_dynmo.engine.migration.references import References
from ds_dynmo.engine.pipeline.executor import Executor
from ds_dynmo.engine.pipeline.random_streams import LayerStreams
from ds_dynmo.engine.pipeline.rng_trackers import TrackedStates
from ds_dynmo.engine.pipeline.trainable import TrainableLayers
from ds_dynmo.engine.profiling.profiler import CpuClock, EventClock, Profiler
from ds_dynmo.engine.profiling.trace import Tracer
from ds_dynmo.engine.reporting import Reporter
from ds_dynmo.engine.training_step import TrainingStep
from ds_dynmo.engine.validation import check_sharing, layer_groups


@dataclass(frozen=True)
class Parts:
    """What an engine with a "dynmo" block is composed of, beside its stage.

    Attributes:
        reporter: keeps reports, and writes them.
        profiler: measures the layers of this stage.
        migrator: moves layers.
        balancer: decides where they go.
        trainable: which layers have something to train.
        executor: what schedules run inside.
        checkpointer: writes and reads checkpoints.
        repacker: goes on with fewer ranks, or with more.
        step: trains a batch.
        tracked_states: of random number generators, by name.
    """

    reporter: Reporter
    profiler: Profiler
    migrator: Migrator
    balancer: Balancer
    trainable: TrainableLayers
    executor: Executor
    checkpointer: Checkpointer
    repacker: Repacker
    step: TrainingStep
    tracked_states: TrackedStates


def build_parts(engine: Any, config: DynMoConfig) -> Parts:
    """Compose ``engine``, whose stage is there. Collective.

    Raises:
        ConfigError: on every rank; layers share parameters, a file cannot be written, or what is frozen cannot be.
    """
    stage, is_first_rank = engine.stage, engine.global_rank == 0
    groups = layer_groups(config, engine.module)
    check_writable(config.report, "dynmo.report", stage.comm, writes=is_first_rank)
    reporter = Reporter(config, is_first_rank, engine.monitor)
    check_sharing(stage.layers, stage.comm)
    names = References(engine.module, stage.layers.modules, stage.comm.gather_objects, config.rank_attributes)
    stage.layers.split_uses()
    stage.connect_replicas()
    on_accelerator = get_accelerator().device_name() != "cpu"
    clock = EventClock(get_accelerator()) if on_accelerator else CpuClock()
    profiler = Profiler(clock, size_every_pass=config.memory_limit is not None)
    migrator = Migrator(partial(MigrationContext.of, stage, names))
    balancer = Balancer(
        stage,
        groups=groups,
        profiler=profiler,
        reporter=reporter,
        migrate=migrator.migrate,
        train=lambda: engine.train_batch(),
        replica_multiplier=lambda: engine.repacker.world.replica_multiplier,
    )
    tracked_states = TrackedStates(stage.comm.gather_over_slices)
    streams = None
    if config.randomness.per_layer:
        seed = engine.module.base_seed if config.randomness.seed is None else config.randomness.seed
        streams = LayerStreams(seed, engine.grid.get_data_parallel_id(), tracked_states)
    trainable = TrainableLayers(stage)
    progress = Progress(engine, balancer, trainable)
    checkpointer = Checkpointer(
        engine, stage, names, balancer, trainable, progress, generation=lambda: engine.repacker.world.generation
    )
    tracer = None
    if config.trace is not None:
        tracer = Tracer(
            config.trace,
            stage,
            clock,
            warn=reporter.warn,
            world=lambda: (engine.released, engine.repacker.world.generation),
        )
    executor = Executor(
        stage, trainable, profiler, tracer, streams, first_micro_batch=lambda: engine.repacker.data.first_of_batch
    )
    trainable.agree("initialize")
    stage.comm.enter("initialize")

    def mute() -> None:
        """Another rank reports from now on, of another job."""
        reporter.mute()
        if tracer is not None:
            tracer.mute()

    repacker = Repacker(
        stage,
        balancer,
        migrator,
        reporter,
        initial_model=lambda: checkpointer.origin,
        progress=progress,
        save_checkpoint=lambda folder, tag: engine.save_checkpoint(folder, tag=tag),
        on_join=mute,
    )
    stage.optimizer.changed.subscribe("ranks of other launches need the same", lambda _: repacker.optimizer_changed())
    step = TrainingStep(
        stage,
        trainable=trainable,
        executor=executor,
        profiler=profiler,
        balancer=balancer,
        repacker=repacker,
        reporter=reporter,
        tracer=tracer,
    )
    return Parts(
        reporter, profiler, migrator, balancer, trainable, executor, checkpointer, repacker, step, tracked_states
    )

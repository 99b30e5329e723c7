"""The construction of an engine's components, each with its dependencies."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.decide.reporter import Reporter
from ds_dynmo.engine.deepspeed.module import DEFAULT_BASE_SEED, layer_specs
from ds_dynmo.engine.measure.profiler import Profiler, device_clock
from ds_dynmo.engine.measure.trace import Tracer
from ds_dynmo.engine.move.background import BackgroundMove
from ds_dynmo.engine.move.migration_context import MigrationContext
from ds_dynmo.engine.move.migrator import Migrator
from ds_dynmo.engine.move.references import References
from ds_dynmo.engine.resize.repacker import Repacker
from ds_dynmo.engine.resize.world import World
from ds_dynmo.engine.run.executor import Executor
from ds_dynmo.engine.run.random_streams import LayerStreams
from ds_dynmo.engine.run.rng_trackers import SharedGenerators, TrackedStates
from ds_dynmo.engine.run.trainable import TrainableLayers
from ds_dynmo.engine.save.checkpointer import Checkpointer
from ds_dynmo.engine.save.progress import EngineProgress
from ds_dynmo.engine.training_step import TrainingStep
from ds_dynmo.engine.validation import layer_groups


@dataclass(frozen=True)
class Components:
    """The components of an engine with a "dynmo" section, besides its stage.

    Attributes:
        reporter: keeps reports and writes them.
        profiler: measures the layers of this stage.
        migrator: moves layers.
        rebalancer: decides when and where layers move.
        trainable: the trainable layers on which the ranks have agreed.
        executor: runs every batch.
        checkpointer: writes and reads checkpoints.
        repacker: continues with fewer ranks.
        step: trains a batch, then rebalances or re-packs if that is due.
        tracked_states: named random states that layers fork.
    """

    reporter: Reporter
    profiler: Profiler
    migrator: Migrator
    rebalancer: Rebalancer
    trainable: TrainableLayers
    executor: Executor
    checkpointer: Checkpointer
    repacker: Repacker
    step: TrainingStep
    tracked_states: TrackedStates


def build_components(engine: Any, config: DynMoConfig) -> Components:
    """Build the components of ``engine``, whose stage exists. Collective.

    Raises:
        ConfigError: on every rank; a file cannot be written, or a tie is frozen in part.
    """
    stage = engine.stage
    groups = layer_groups(config, layer_specs(engine.module), engine.num_stages)
    reporter = Reporter(config, stage.comm, is_first_rank=stage.comm.here.rank == 0, monitor=engine.monitor)
    references = _prepare_layers(engine, config)
    world, clock = World(stage.comm, engine.module.topology(), config.timeout_seconds), device_clock()
    moves_are_limited = config.migration.kind == "background" and get_accelerator().device_name() != "cpu"
    profiler = Profiler(clock, size_every_pass=config.memory_limit is not None or moves_are_limited)
    migrator = Migrator(partial(MigrationContext.of, stage, references))
    rebalancer = Rebalancer(
        stage,
        groups=groups,
        profiler=profiler,
        reporter=reporter,
        migrate=migrator.migrate,
        background=BackgroundMove(migrator, stage),
        lacks_data=lambda: engine.data_iterator is None and (engine.is_first_stage() or engine.is_last_stage()),
    )
    trainable = TrainableLayers(stage)
    states = TrackedStates(stage.comm.gather_over_slices)
    states.add("the program", SharedGenerators(references.shared_generators))
    streams = _random_streams(engine, config, states, reporter)
    run = stage.comm.broadcast_object(uuid.uuid4().hex)
    progress = EngineProgress(engine, rebalancer, streams, reporter.inform, run)
    checkpointer = Checkpointer(engine, stage, references, rebalancer, trainable, progress, reporter)
    tracer = Tracer(config.trace, stage, clock, reporter) if config.trace is not None else None
    executor = Executor(engine, stage, trainable, profiler, tracer, streams)
    trainable.agree("initialize")
    repacker = Repacker(
        engine,
        stage,
        rebalancer,
        migrator,
        reporter,
        world,
        save_checkpoint=engine.save_checkpoint,
        wait_for_save=checkpointer.wait,
    )
    step = TrainingStep(stage, trainable, executor, profiler, rebalancer, repacker, reporter, tracer)
    return Components(
        reporter=reporter,
        profiler=profiler,
        migrator=migrator,
        rebalancer=rebalancer,
        trainable=trainable,
        executor=executor,
        checkpointer=checkpointer,
        repacker=repacker,
        step=step,
        tracked_states=states,
    )


def _prepare_layers(engine: Any, config: DynMoConfig) -> References:
    """Prepare the layers of this stage for moves. Collective.

    Returns:
        The references of layers to objects that they do not own, with the names of these objects.
    """
    stage = engine.stage
    references = References(
        engine.module, stage.layers.modules, stage.comm.gather_over_pipeline, config.rank_attributes, engine
    )
    stage.layers_moved.subscribe(
        "names are of the process groups before", lambda moved: references.update() if moved.stages_changed else None
    )
    stage.layers.split_uses()
    stage.connect_replicas()
    return references


def _random_streams(engine: Any, config: DynMoConfig, states: TrackedStates, reporter: Reporter) -> LayerStreams | None:
    """Build the layers' random streams; None: layers use the rank's generators. Collective."""
    if not config.randomness.per_layer:
        return None
    comm = engine.stage.comm
    seed, of_user, source = comm.broadcast_object(_seed(engine, config))
    reporter.inform(f"DynMo: random numbers of layers are of seed {seed}, {source}")
    return LayerStreams(seed, comm.here.replica, states, seed_of_user=of_user)


def _seed(engine: Any, config: DynMoConfig) -> tuple[int, bool, str]:
    """Return the seed of the run, whether the user chose it for layers, and where it is from."""
    if config.randomness.seed is not None:
        return config.randomness.seed, True, "dynmo.randomness.seed"
    if engine.module.base_seed != DEFAULT_BASE_SEED:
        return engine.module.base_seed, True, "the PipelineModule's base_seed"
    return torch.initial_seed(), False, "rank 0's torch.initial_seed()"

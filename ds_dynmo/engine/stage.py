"""The stage of one rank: the only interface between the engine and its components.

The components are the rebalancer, migrator, repacker, checkpointer and profiler. Each gets the stage and its other
dependencies at construction, and DeepSpeed's engine only if it runs, rebuilds or saves DeepSpeed's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine import validation
from ds_dynmo.engine.comm import replicas
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.comm.message_forms import KnownForms
from ds_dynmo.engine.deepspeed.counters import TrainingCounters
from ds_dynmo.engine.deepspeed.module import layer_specs, layers_of_stage, modules_of
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.deepspeed.settings import sums_whole, waits_for_norm
from ds_dynmo.engine.deepspeed.ties import share_whole_modules
from ds_dynmo.engine.events import EngineEvent, LayersMoved, Timeline
from ds_dynmo.engine.move.functions import check_functions
from ds_dynmo.engine.move.sharing import Extent, check_not_shared, parameter_extents
from ds_dynmo.engine.run.chunks import StageChunks
from ds_dynmo.engine.run.compiled_layers import CompiledLayers
from ds_dynmo.engine.run.deferred_step import DeferredStep
from ds_dynmo.engine.run.readings import Readings
from ds_dynmo.engine.run.schedule_in_force import ScheduleInForce
from ds_dynmo.engine.state.clipping import ModelNorm
from ds_dynmo.engine.state.optimizer_binding import OptimizerBinding
from ds_dynmo.engine.state.optimizer_state import OptimizerState
from ds_dynmo.errors import ConfigError
from ds_dynmo.placement import Placement

_SAME_SHAPES = "parameters that are each replica's own (replica_own) have one shape on all replicas, with bf16 or ZeRO"


@dataclass(frozen=True)
class StageContext:
    """One rank's stage in an engine with a "dynmo" section. It exists once DeepSpeed has placed the model.

    Attributes:
        config: the "dynmo" section.
        comm: all communication of ds_dynmo.
        layers: of this stage.
        chunks: the runs of these layers.
        optimizer: the engine's optimizer and its state.
        counters: of steps, samples and micro-batches trained.
        replicas_differ: whether some parameters differ between data-parallel replicas.
        layers_moved: published when layers are in place after a move, a re-packing or a load.
        parameters_replaced: published on every rank after parameters of layers that stayed were replaced on any rank.
        timeline: marks of the engine's phases.
        schedule: the schedule in force.
        compiled: runs layers compiled, if configured.
        forms: of messages between stages.
        readings: of data, by this rank.
        deferred_step: the optimizer's step of a batch at whose end layers change places.
        on_arrival: the user's callbacks for layers that arrive, called with number and module.
        before_step: the user's callbacks before the optimizer's step.
        before_release: the user's callbacks before ranks are released.
    """

    config: DynMoConfig
    comm: Communicator
    layers: StageLayers
    chunks: StageChunks
    optimizer: OptimizerBinding
    counters: TrainingCounters
    replicas_differ: bool
    layers_moved: EngineEvent[LayersMoved] = field(default_factory=EngineEvent)
    parameters_replaced: EngineEvent[None] = field(default_factory=EngineEvent)
    timeline: Timeline = field(default_factory=Timeline)
    schedule: ScheduleInForce = field(default_factory=ScheduleInForce)
    compiled: CompiledLayers = field(default_factory=CompiledLayers)
    forms: KnownForms = field(default_factory=KnownForms)
    readings: Readings = field(default_factory=Readings)
    deferred_step: DeferredStep = field(default_factory=DeferredStep)
    on_arrival: list[Callable[[int, nn.Module], None]] = field(default_factory=list)
    before_step: list[Callable[[], None]] = field(default_factory=list)
    before_release: list[Callable[[], None]] = field(default_factory=list)

    @property
    def state(self) -> OptimizerState:
        """The optimizer's state of the layers of this stage."""
        return self.optimizer.state

    @property
    def placement(self) -> Placement:
        """The present placement of all layers."""
        return self.layers.placement

    @property
    def partition(self) -> tuple[int, ...]:
        """The boundaries of :attr:`placement`."""
        return self.placement.boundaries

    def placement_change_text(self, new: Placement) -> str:
        """Return the present and the new placement as text, for comparison between ranks."""
        return f"{self.placement} -> {new}"

    def connect_replicas(self) -> None:
        """Pass the process group of this stage's replicas to the layers that ask for it."""
        replicas.use_replicas(self.layers.every_module(), self.comm.grid.get_data_parallel_group())

    def publish_move(self, *, stages_changed: bool = False) -> None:
        """Call the subscribers of :attr:`layers_moved`, in order. Collective if ``stages_changed``."""
        self.layers_moved.publish(LayersMoved(self.placement, self.counters.steps, stages_changed))


def stage_of(engine: Any, comm: Communicator, config: DynMoConfig, model: Any) -> StageContext:
    """Build the stage of an engine whose constructor is about to place ``model``. Collective.

    Raises:
        ConfigError: on every rank, if a rank has another "dynmo" section or a layer that cannot be moved, layers share
            a parameter without being tied, or a function of the layer list holds weights.
    """
    comm.enter("initialize")
    of_rank_0 = comm.broadcast_object(config)
    flat = engine.zero_optimization() or engine.bfloat16_enabled()

    def check() -> list[Extent]:
        validation.check_section(config, of_rank_0)
        replicas.use_replicas(model.modules(), comm.grid.get_data_parallel_group())
        validation.check_layers(model, flat=flat, sums_whole=sums_whole(engine))
        check_functions(layer_specs(model), model.tied_modules)
        return parameter_extents(layer_specs(model), dict(modules_of(model, layers_of_stage(model))))

    extents = comm.everywhere("initialize", check, error=ConfigError)
    if flat:
        shapes_of = partial(replicas.per_replica_shapes, model)
        comm.everywhere(_SAME_SHAPES, shapes_of, same=str, compared_in=comm.here.in_slice_of_stage, error=ConfigError)
    gathered = comm.gather_over_pipeline((replicas.has_per_replica(model), extents))
    check_not_shared(chain.from_iterable(extents for _, extents in gathered))
    differ = any(has_per_replica for has_per_replica, _ in gathered)
    share_whole_modules(model)
    layers = StageLayers(model)
    comm.groups.adopt_tied(layers.tied_groups(comm.grid))
    norm = ModelNorm(layers, comm, replicas_differ=differ)
    stage = StageContext(
        config=config,
        comm=comm,
        layers=layers,
        chunks=StageChunks(model, layers),
        optimizer=OptimizerBinding(engine, layers, comm, norm),
        counters=TrainingCounters(engine),
        replicas_differ=differ,
        timeline=Timeline(comm.operation),
        schedule=ScheduleInForce(
            config.schedule,
            use_1f1b_until_decided=config.memory_limit is not None or model.activation_checkpoint_interval > 0,
            stages_synchronise_per_batch=waits_for_norm(engine),
        ),
    )
    if config.compile:
        stage.compiled.switch_on()
    stage.layers_moved.subscribe("layers that arrived have other replicas", lambda _: stage.connect_replicas())
    return stage

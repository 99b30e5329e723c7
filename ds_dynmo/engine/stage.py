"""The stage of one rank: the only interface between the engine and its parts.

The parts are the balancer, migrator, repacker, checkpointer and profiler. Each is given the stage, and what else it
needs, when it is constructed. None of them reaches into the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine import validation
from ds_dynmo.engine.comm import replicas
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.deepspeed.missing_uses import attach, build_missing
from ds_dynmo.engine.deepspeed.module import layer_specs
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.deepspeed.settings import sums_whole, waits_for_norm
from ds_dynmo.engine.deepspeed.ties import find_uses, own_uses
from ds_dynmo.engine.events import AroundSchedule, Event, LayersMoved, Timeline
from ds_dynmo.engine.run.compiled_layers import CompiledLayers
from ds_dynmo.engine.run.gradient_flags import GradientFlags
from ds_dynmo.engine.split.steps import ScheduleInForce
from ds_dynmo.engine.state.clipping import ModelNorm
from ds_dynmo.engine.state.optimizer_binding import OptimizerBinding
from ds_dynmo.engine.state.optimizer_state import OptimizerState
from ds_dynmo.errors import ConfigError
from ds_dynmo.placement import Placement


class DeepSpeedPipeline(Protocol):
    """DeepSpeed's part of a pipeline engine, under DeepSpeed's names.

    Attributes:
        module: the ``PipelineModule``.
        grid: the ``PipelineParallelGrid``.
        global_steps, global_samples: batches and samples trained on.
        micro_batches: of a batch, on each rank.
        num_stages, stage_id: stages of the pipeline, and the number of this rank's.
        global_rank, world_size: this rank's number in the present world, and the size of that.
        optimizer: the optimizer, or DeepSpeed's wrapper around it.
        basic_optimizer: the optimizer inside the wrapper.
        data_iterator: where this rank reads its data; None: it reads none.
        training_data: the data set given to ``initialize``; None: it was given none.
    """

    module: Any
    grid: Any
    device: torch.device
    global_steps: int
    global_samples: int
    micro_batches: int
    num_stages: int
    stage_id: int
    global_rank: int
    world_size: int
    optimizer: Any
    basic_optimizer: Any
    lr_scheduler: Any
    data_iterator: Any
    training_data: Any
    is_pipe_partitioned: bool
    using_bf16_optimizer: bool

    def is_first_stage(self) -> bool: ...

    def is_last_stage(self) -> bool: ...

    def train_batch_size(self) -> int: ...

    def set_train_batch_size(self, train_batch_size: int) -> None: ...

    def train_micro_batch_size_per_gpu(self) -> int: ...

    def deepspeed_io(self, dataset: Any, *, data_sampler: Any) -> Any: ...

    def set_dataloader(self, loader: Any) -> None: ...


@dataclass(frozen=True)
class StageContext:
    """One rank's stage, in an engine with a "dynmo" block. It exists once DeepSpeed has placed the model.

    Attributes:
        engine: DeepSpeed's part of the engine.
        config: the "dynmo" block.
        comm: all our communication.
        layers: of this stage.
        optimizer: the engine's, and its state.
        replicas_differ: each data-parallel replica has parameters of its own.
        replicas_would_differ: so it would be with several replicas.
        layers_moved: published once layers are in place after a move, a re-packing or a load.
        parameters_replaced: published on every rank once parameters of layers that stayed were replaced on any.
        around_schedule: the context managers that the schedule of every batch runs inside.
        timeline: where parts mark what they do, for a trace.
        schedule: in which order passes run.
        compiled: runs the layers compiled, where that is asked for.
        gradient_flags: which tensors between stages get a gradient.
        on_arrival: callbacks of the user's for layers that arrive, called with their number and module.
    """

    engine: DeepSpeedPipeline
    config: DynMoConfig
    comm: Communicator
    layers: StageLayers
    optimizer: OptimizerBinding
    replicas_differ: bool
    replicas_would_differ: bool
    layers_moved: Event[LayersMoved] = field(default_factory=Event)
    parameters_replaced: Event[None] = field(default_factory=Event)
    around_schedule: AroundSchedule = field(default_factory=AroundSchedule)
    timeline: Timeline = field(default_factory=Timeline)
    schedule: ScheduleInForce = field(default_factory=ScheduleInForce)
    compiled: CompiledLayers = field(default_factory=CompiledLayers)
    gradient_flags: GradientFlags = field(default_factory=GradientFlags)
    on_arrival: list[Callable[[int, nn.Module], None]] = field(default_factory=list)

    @property
    def state(self) -> OptimizerState:
        """The optimizer's state of the layers of this stage."""
        return self.optimizer.state

    @property
    def placement(self) -> Placement:
        """Where all layers of the model are."""
        return self.layers.placement

    @property
    def partition(self) -> tuple[int, ...]:
        """The boundaries of :attr:`placement`."""
        return self.placement.boundaries

    def route_to(self, new: Placement) -> str:
        """Say from where to where layers go, for ranks to compare."""
        return f"{self.placement} -> {new}"

    def connect_replicas(self) -> None:
        """Give the layers of this stage that ask for it the process group of their data-parallel replicas."""
        replicas.use_replicas(self.layers.every_module(), self.engine.grid.get_data_parallel_group())

    def publish_move(self, *, stages_changed: bool = False) -> None:
        """Publish that layers have moved."""
        self.layers_moved.publish(LayersMoved(self.placement, self.engine.global_steps, stages_changed))


def stage_of(engine: Any, config: DynMoConfig, model: Any) -> StageContext:
    """Make the stage of an engine whose constructor is about to place ``model``. Collective.

    Raises:
        ConfigError: on every rank, if one has another "dynmo" block or a layer that cannot be moved.
    """
    comm = Communicator(engine.mpu, engine.device, config.timeout_seconds)
    comm.enter("initialize")
    problem = validation.other_block(config, comm.broadcast_object(config))
    problem, built, uses = problem or _unsupported(engine, model), {}, []
    try:
        built = build_missing(model)
        uses = find_uses(model, built)
    except Exception as error:  # whatever a user's layer raises: the others have to hear of it
        problem = problem or f"a layer that DeepSpeed did not build, as it is tied to one before: {error!r}"
    place = (engine.mpu.get_stage_id(), engine.mpu.get_slice_parallel_rank())
    own = (place, replicas.own_shapes(model))
    every = comm.gather_objects((problem, own, replicas.shares_out(model), uses, bool(built)))
    validation.check_layers(problem for problem, *_ in every)
    if engine.zero_optimization() or engine.bfloat16_enabled():
        replicas.refuse_uneven(own for _, own, *_ in every)
    differ = any(shapes for _, (_, shapes), *_ in every)
    ties = own_uses((uses for *_, uses, _ in every), layer_specs(model))
    of_others = attach(model, built, ties) if any(builds for *_, builds in every) else None
    layers = StageLayers(model, ties)
    norm = ModelNorm(engine, layers, comm, replicas_differ=differ)
    stage = StageContext(
        engine=engine,
        config=config,
        comm=comm,
        layers=layers,
        optimizer=OptimizerBinding(engine, layers, comm, norm, of_others),
        replicas_differ=differ,
        replicas_would_differ=any(shares for _, _, shares, *_ in every),
        schedule=ScheduleInForce(
            config.schedule,
            cautious=config.memory_limit is not None or model.activation_checkpoint_interval > 0,
            batches_wait=waits_for_norm(engine),
        ),
        compiled=CompiledLayers(log=config.log),
    )
    if config.compile:
        stage.compiled.switch_on()
    stage.layers_moved.subscribe("layers that arrived have other replicas", lambda _: stage.connect_replicas())
    return stage


def _unsupported(engine: Any, model: Any) -> str | None:
    """Connect the layers of this stage to their replicas, and say why they cannot be moved; None: they can be."""
    try:
        replicas.use_replicas(model.modules(), engine.mpu.get_data_parallel_group())
    except ConfigError as error:
        return str(error)
    flat = engine.zero_optimization() or engine.bfloat16_enabled()
    return validation.unsupported_layers(model, flat=flat, sums_whole=sums_whole(engine))

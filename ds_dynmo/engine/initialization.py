"""``ds_dynmo.initialize``: ``deepspeed.initialize`` with a "dynmo" section in its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_dynmo import partitioners
from ds_dynmo.config import DynMoConfig, read_dynmo_config
from ds_dynmo.engine import validation
from ds_dynmo.engine.comm.communicator import check_hosts
from ds_dynmo.engine.decide.cycle import Reason, Request
from ds_dynmo.engine.deepspeed.engine_class import engine_class as built_upon
from ds_dynmo.engine.deepspeed.instruction_map import check_schedules, checked_instructions
from ds_dynmo.engine.deepspeed.logs import warning_once
from ds_dynmo.engine.deepspeed.module import layer_specs
from ds_dynmo.engine.deepspeed.pipeline_module import is_dual_pipe_v, num_stages_of, use_as_v
from ds_dynmo.engine.deepspeed.probe import check_deepspeed
from ds_dynmo.engine.deepspeed.settings import check_settings
from ds_dynmo.engine.deepspeed.shm_operator import warn_of_shm_operator
from ds_dynmo.engine.deepspeed.ties import check_uses
from ds_dynmo.engine.engine import DynMoPipelineEngine
from ds_dynmo.engine.measure import layer_sizes
from ds_dynmo.engine.resize.release import check_policy
from ds_dynmo.engine.run.compiled_layers import check_compiler
from ds_dynmo.engine.run.rng_trackers import check_trackers
from ds_dynmo.engine.versions import newer_than_tested
from ds_dynmo.placement import Placement, owners_of
from ds_dynmo.torch_private import check_torch


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    engine_class: Any = None,
) -> tuple[DynMoPipelineEngine, Any, Any, Any]:
    """Build an engine that re-balances itself: the arguments and the four results of ``deepspeed.initialize``.

    Args:
        model: a ``deepspeed.pipe.PipelineModule``.
        config: as for DeepSpeed (a dict, a path, or ``args.deepspeed_config``), with an optional "dynmo" section:
            see :class:`ds_dynmo.DynMoConfig`. Without the section the engine behaves like DeepSpeed's. With it, fp32
            gradients are clipped by the norm of all layers instead of the first stage's, even without
            "gradient_clipping", since DeepSpeed clips at 1.0 unless the key is 0.0.
        engine_class: a subclass of DeepSpeed's ``PipelineEngine`` as the base of the engine, or ``functools.partial``
            of one with additional keyword arguments; None: ``deepspeed.PipelineEngine``.

    Returns:
        ``engine, optimizer, training_dataloader, lr_scheduler``.

    Raises:
        ConfigError: a wrong section, module, precision, optimizer, engine class or feature, or a DeepSpeed without the
            names that ds_dynmo relies on; nothing has been created or touched. Or a layer that cannot be moved, or a
            section that differs between ranks, on every rank; the optimizer is untouched.
        PartitionError: more stages than layers, an empty stage, or an invalid initial partition.
    """
    dynmo = _checked_block(validation.load_config(args, config, config_params), model, optimizer, lr_scheduler)
    if dynmo is not None and is_dual_pipe_v(model):
        use_as_v(model)
    of_user = built_upon(engine_class or deepspeed.PipelineEngine)
    if dynmo is not None:
        check_schedules()
        checked_instructions(of_user.func)
    with _constructing(partial(of_user, dynmo=dynmo)):
        engine, used_optimizer, loader, scheduler = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=config,
            mesh_param=mesh_param,
            config_params=config_params,
        )
    warn_of_shm_operator()
    if engine.global_rank == 0 and (newer := newer_than_tested()) is not None:
        warning_once(newer)
    if dynmo is not None:
        if engine.global_rank == 0 and (missing := engine.stage.optimizer.missing()) is not None:
            logger.warning(f"{missing}; until then train_batch is refused")
        with engine.stage.comm.operation("initialize"):
            _go_to_first_partition(engine, dynmo)
            engine.stage.chunks.loss_stage = engine.stage.placement.owners[-1]
    return engine, used_optimizer, loader, scheduler


def _checked_block(settings: dict[str, Any], model: Any, optimizer: Any, lr_scheduler: Any) -> DynMoConfig | None:
    """Read the "dynmo" section, and refuse incompatible settings before anything is created.

    Args:
        settings: the whole DeepSpeed configuration.

    Returns:
        The section; None without one: then only ``model`` is checked.

    Raises:
        ConfigError, PartitionError: see :func:`initialize`.
    """
    dynmo = read_dynmo_config(settings)
    if dynmo is None:
        validation.check_module(model)
        return None
    validation.check_module(model)
    check_configuration(dynmo, settings, optimizer, lr_scheduler)
    validation.check_partitioned_activations(settings, model)
    check_uses(layer_specs(model))
    validation.check_initial_partition(dynmo, layer_specs(model), num_stages_of(model))
    validation.check_shapes(dynmo, model)
    check_hosts(dynmo.timeout_seconds)
    if dynmo.compile:
        check_compiler(get_accelerator().get_compile_backend(), "dynmo.compile = true")
    return dynmo


def check_configuration(
    dynmo: DynMoConfig, settings: dict[str, Any], optimizer: Any = None, lr_scheduler: Any = None
) -> None:
    """Refuse settings that are incompatible with any model and any number of ranks.

    Args:
        settings: the whole DeepSpeed configuration, of which DeepSpeed does not read what ``optimizer`` and
            ``lr_scheduler`` take the place of.

    Raises:
        ConfigError: see :func:`initialize`.
    """
    check_packages()
    given = {"optimizer": optimizer, "scheduler": lr_scheduler}
    settings = {key: value for key, value in settings.items() if given.get(key) is None}
    check_settings(settings)
    validation.check_training(settings, optimizer)
    validation.check_features(settings)
    partitioners.check_signature(dynmo.balancer)
    check_policy(dynmo.repack)
    if dynmo.randomness.per_layer:
        check_trackers()


@cache
def check_packages() -> None:
    """Refuse a DeepSpeed or a torch without the names that this package relies on. Looked up once per process.

    Raises:
        ConfigError: names what is missing.
    """
    check_deepspeed()
    check_torch()


def _go_to_first_partition(engine: DynMoPipelineEngine, dynmo: DynMoConfig) -> None:
    """Move layers to the initial partition. Collective."""
    here = engine.stage.placement
    shape = validation.shape_of(dynmo, here.num_stages)
    if here.shape != "chain" and dynmo.initial_partition in (None, "profile"):  # a DualPipeVModule stays
        return
    boundaries = _first_partition(engine, dynmo, owners_of(shape, here.num_stages))
    first = Placement.of_shape(shape, boundaries, num_layers=here.num_layers, num_stages=here.num_stages)
    first = engine.rebalancer.nearest_allowed(first)
    if first != here:
        engine.rebalancer.move_to_partition(first.boundaries, Request(Reason.INITIAL), what="initialize")


def _first_partition(engine: DynMoPipelineEngine, dynmo: DynMoConfig, owners: tuple[int, ...]) -> Sequence[int]:
    """Return the boundaries of ``dynmo.initial_partition``. Collective.

    Without one, layers stay where DeepSpeed has built them; where a stage holds two chunks, these have equally many.
    """
    first, layers, stages = dynmo.initial_partition, engine.stage.layers, engine.num_stages
    groups = engine.rebalancer.decider.groups
    if first in (None, "profile") and len(owners) == stages:
        return engine.partition
    if first in (None, "profile", "uniform"):
        even = partitioners.uniform(layers.num_layers, len(owners))
        return partitioners.balanced_groups([1] * layers.num_layers, stages, groups, start=even, owners=owners)
    if first == "parameters":
        counts = engine.stage.comm.max_over_world(layer_sizes.per_layer(layers, layer_sizes.trainable_parameters))
        return partitioners.balanced_groups(counts.tolist(), stages, groups, owners=owners)
    if isinstance(first, str):
        weights = validation.type_costs(layer_specs(engine.module), first)
        return partitioners.balanced_groups(weights, stages, groups, owners=owners)
    assert first is not None
    return first


@contextmanager
def _constructing(engine_class: Any) -> Iterator[None]:
    """Let ``deepspeed.initialize`` construct ``engine_class``, for which it has no argument (DeepSpeed 0.19.8)."""
    original = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = engine_class
    try:
        yield
    finally:
        deepspeed.PipelineEngine = original

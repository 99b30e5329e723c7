"""DeepSpeed's pipeline engine, mended where its numbers depend on which layers a stage has, or where it fails.

All of it holds with ``"enabled": false`` too: the baseline of every comparison. Without a "dynmo" block nothing here
differs from DeepSpeed (read in 0.19.8). With one most runs do, if only because DeepSpeed clips gradients at 1.0 unless
told 0.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine import validation
from ds_dynmo.engine.comm import replicas
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.deepspeed_adapter.optimizer_wrappers import Bf16Wrapper, FlatWrapper, flat_wrapper
from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.engine.deepspeed_adapter.tied_layers import BuiltParameter, attach, build_missing, join_groups
from ds_dynmo.engine.deepspeed_adapter.ties import OwnUses, find_uses, own_uses
from ds_dynmo.engine.optimizer import trained_parameters
from ds_dynmo.engine.optimizer.clipping import (
    RankCoordinates,
    counts,
    gradient_norm,
    scale_gradients,
    sharded_norm,
)
from ds_dynmo.engine.optimizer.flat_state import FlatState
from ds_dynmo.engine.optimizer.parameter_groups import Placeholders, complete_groups, in_order
from ds_dynmo.engine.optimizer.state import OptimizerState, PerParameterState
from ds_dynmo.errors import ConfigError

GradientOf = Callable[[nn.Parameter], torch.Tensor | None]


class PatchedPipelineEngine(PipelineEngine):
    """Parameter groups, clipping and timers that do not depend on the partition."""

    _comm: Any
    _wrapper: FlatWrapper | None = None
    _members: list[list[nn.Parameter]]
    _configured: Any = None  # the optimizer that the state below is of
    _timers_started: set[str]
    _ties: dict[str, OwnUses]
    _built: list[BuiltParameter] | None = None  # of layers that DeepSpeed did not build on some stage
    _replicas_differ = False  # does the model have parameters that are each replica's own?
    _replicas_would_differ = False  # or would it have some if there were several replicas?

    def __init__(self, *args: Any, dynmo: DynMoConfig | None, **kwargs: Any) -> None:
        self.__dict__["dynmo"] = dynmo  # super().__init__ calls what is overridden here
        self.__dict__["_comm"] = None
        self.__dict__["_members"] = []
        self.__dict__["_timers_started"] = set()
        self.__dict__["_ties"] = {}
        super().__init__(*args, **kwargs)
        self._layers = StageLayers(self.module, self._ties)
        if dynmo is not None:
            self._layers.mark_copies()
            self._connect()
            self._state = self._optimizer_state()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's ``compile``; refused where layers can move."""
        if self.dynmo is not None and (self.dynmo.enabled or self.dynmo.initial_partition == "profile"):
            other = "dynmo.enabled = false" if self.dynmo.enabled else 'dynmo.initial_partition to other than "profile"'
            raise ConfigError(
                "engine.compile: it compiles the layers of a stage where they are, and those that move would arrive "
                f"uncompiled; compile inside the layers (torch.compile), or set {other}"
            )
        super().compile(*args, **kwargs)

    # -- layers ---------------------------------------------------------------------------------------

    def _configure_distributed_model(self, model: Any) -> None:
        """As DeepSpeed does, once no stage holds a layer that cannot be moved: every rank has to say no, or none."""
        if self.dynmo is not None:
            self._connect()
            self._comm.enter("initialize")
            problem = validation.other_block(self.dynmo, self._comm.broadcast_object(self.dynmo))
            problem, built, uses = problem or self._unsupported(model), {}, []
            try:
                built = build_missing(model)
                uses = find_uses(model, built)
            except Exception as error:  # whatever a user's layer raises: the others have to hear of it
                problem = problem or f"a layer that DeepSpeed did not build, as it is tied to one before: {error!r}"
            facts = (problem, replicas.has_own(model), replicas.shares_out(model), uses, bool(built))
            every = self._comm.gather_objects(facts)
            validation.check_layers(problem for problem, *_ in every)
            self._replicas_differ = any(differ for _, differ, *_ in every)
            self._replicas_would_differ = any(shares for _, _, shares, *_ in every)
            self._ties = own_uses((uses for *_, uses, _ in every), model._layer_specs)
            if any(builds for *_, builds in every):
                self._built = attach(model, built, self._ties)
        super()._configure_distributed_model(model)

    def _unsupported(self, model: Any) -> str | None:
        """Connect the layers of this stage to their replicas; what keeps them from being moved, in words."""
        try:
            replicas.use_replicas(model.modules(), self.mpu.get_data_parallel_group())
        except ConfigError as error:
            return str(error)
        return validation.unsupported_layers(model, flat=self.zero_optimization() or self.bfloat16_enabled())

    def _use_replicas(self) -> None:
        """Connect the layers of this stage, others than before, to their replicas."""
        replicas.use_replicas(self._layers.every_module(), self.grid.get_data_parallel_group())

    def _broadcast_model(self) -> None:
        """As DeepSpeed does, but for parameters that are a replica's own."""
        kept = [(p, p.detach().clone()) for p in self.module.parameters() if replicas.is_own(p)]
        super()._broadcast_model()
        for parameter, own in kept:
            parameter.data.copy_(own)

    def _get_gradients_for_reduction(self) -> tuple[list[Any], dict[str, list[Any]]]:
        """As DeepSpeed gathers them, once per batch, to be averaged; a replica's own are made means here."""
        gradients, of_experts = super()._get_gradients_for_reduction()
        if not self._replicas_differ:
            return gradients, of_experts
        reduced = [p for p in self.module.parameters() if p.requires_grad and p.numel()]
        for parameter in filter(replicas.is_own, reduced):
            parameter.grad.div_(self.grid.get_data_parallel_world_size())
        return [g for p, g in zip(reduced, gradients, strict=True) if not replicas.is_own(p)], of_experts

    # -- optimizer ------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._comm is None:
            self._comm = Communicator(self.mpu, self.device, self.dynmo.timeout_seconds)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        """Build the optimizer as DeepSpeed does, but keep every parameter group on every rank, empty ones too.

        DeepSpeed calls it in its constructor. Programs that need other parameter groups than they can name before call
        it themselves, after ``initialize``: from then on that optimizer follows the layers.
        """
        if self.dynmo is None:
            super()._configure_optimizer(client_optimizer, model_parameters)
            return
        late = "_layers" in self.__dict__
        parameters = model_parameters or [{"params": []}]  # a stage with nothing to train: torch wants a group
        if isinstance(client_optimizer, torch.optim.Optimizer):
            optimizer = client_optimizer
        elif client_optimizer is not None:
            optimizer = client_optimizer(parameters)
        else:
            optimizer = self._configure_basic_optimizer(parameters)
        if not model_parameters:
            optimizer.param_groups.clear()
        flat = self.zero_optimization() or self.bfloat16_enabled()
        validation.check_optimizer(optimizer, flat=flat)
        self._connect()
        scheduler = self.client_lr_scheduler
        self._comm.enter("initialize")
        if late:
            strangers = trained_parameters.strangers(optimizer, self._layers)
            trained_parameters.refuse_strangers(self._comm.gather_objects(strangers))
        complete_groups(optimizer, None if callable(scheduler) else scheduler, self._comm.gather_objects)
        if self._built is not None and not late:
            validation.check_layers(self._comm.gather_objects(join_groups(optimizer, self._built)))
            self._built = None
        ties = trained_parameters.groups_of_ties(optimizer, StageLayers(self.module, self._ties))
        trained_parameters.refuse_ties_apart(self._comm.gather_objects(ties))
        groups = list(optimizer.param_groups)
        self._members = [list(group["params"]) for group in groups]
        if flat:
            in_order(optimizer, StageLayers(self.module, self._ties).parameters())
            self._placeholders = Placeholders(optimizer, self.param_names, self.get_data_types()[0], self.device)
        super()._configure_optimizer(optimizer, model_parameters)
        optimizer.param_groups[:] = groups  # DeepSpeed drops the empty ones
        if late:
            self._follow_optimizer()

    def _follow_optimizer(self) -> None:
        """Let go of the optimizer before, if there was one: this one is to follow the layers from now on."""
        if self._wrapper is not None:
            self._wrapper.release()
            self._wrapper = None
        self._state = self._optimizer_state()

    def _check_optimizer(self) -> None:
        """Refuse to move layers unless the optimizer trains exactly what is trainable here.

        Raises:
            ValueError: naming the optimizer, or the first parameter.
        """
        trained_parameters.check(self.optimizer, self._configured, self._layers, self._state)

    def _optimizer_state(self) -> OptimizerState:
        """What follows the layers when they move; DeepSpeed's wrapper is made to clip by the whole model's norm."""
        self._configured = self.optimizer
        wrapper = flat_wrapper(self.optimizer) if self.basic_optimizer is not None else None
        if wrapper is None:  # DeepSpeed wraps no optimizer too, under bf16
            self._members.clear()
            return PerParameterState(self.basic_optimizer)
        if isinstance(wrapper, Bf16Wrapper):
            wrapper.clip_by(self._norm_of_sums)
        else:
            wrapper.clip_by(self._norm_of_shards)
        self._wrapper = wrapper
        groups, self._members = self._members, []  # no departed parameter is to live on here
        state = FlatState(wrapper, self._layers, self._comm, self.grid, groups, self._placeholders.parameters)
        wrapper.hide(lambda: state.members)
        return state

    def _get_zero_param_shapes(self) -> list[Any]:
        """DeepSpeed's (0.19.8) table for checkpoints, without placeholders."""
        shapes: list[Any] = super()._get_zero_param_shapes()
        if self._wrapper is None:
            return shapes
        return [group for group in shapes if not group.keys() & set(self._placeholders.names.values())]

    def _name_parameters(self) -> None:
        """In place: DeepSpeed's wrappers hold the same dict."""
        self.param_names.clear()
        self.param_names.update({parameter: name for name, parameter in self.module.named_parameters()})
        if self._wrapper is not None:
            self.param_names.update(self._placeholders.names)

    def _reentrant_checkpointing(self) -> bool:
        return self.module.activation_checkpoint_func is not ds_checkpointing.non_reentrant_checkpoint

    # -- clipping -------------------------------------------------------------------------------------

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm of the whole model (DeepSpeed's counts the first stage only)."""
        if self.dynmo is None:
            super().clip_fp32_gradients()
            return
        norm = self._gradient_norm(lambda parameter: parameter.grad)
        scale_gradients(self.module.parameters(), norm, self.gradient_clipping())
        self._global_grad_norm = norm

    def _gradient_norm(self, gradient_of: GradientOf) -> float:
        modules, count = self._layers.counted_modules(), self._layers.num_layers
        place = RankCoordinates(self.grid.get_slice_parallel_rank(), self.grid.slice_parallel_size)
        sum_over_all = self._comm.sum_over_model
        if self._replicas_differ:
            place = replace(place, replica=self.grid.get_data_parallel_id(), replicas=self.grid.data_parallel_size)
            sum_over_all = self._comm.sum_over_world
        return gradient_norm(modules, count, place, sum_over_all, self.device, self._counted_once(gradient_of))

    def _counted_once(self, gradient_of: GradientOf) -> GradientOf:
        """``gradient_of``, but None for a weight that is counted with the module that has it first in the model."""
        copies = {id(parameter) for parameter in self._layers.later_copies()}
        return (lambda p: None if id(p) in copies else gradient_of(p)) if copies else gradient_of

    def _norm_of_sums(self) -> float:
        assert self._wrapper is not None
        gradients = {id(parameter): gradient for parameter, gradient in self._wrapper.gradients()}
        return self._gradient_norm(lambda parameter: gradients.get(id(parameter)))

    def _norm_of_shards(self) -> float:
        assert self._wrapper is not None
        mine = RankCoordinates(self.grid.get_slice_parallel_rank(), self.grid.slice_parallel_size)
        modules = self._layers.counted_modules().values()
        counted = {id(p) for module in modules for p in module.parameters() if counts(p, mine)}
        counted -= {id(p) for p in self._layers.later_copies()}
        gradients = [gradient for p, gradient in self._wrapper.gradients() if id(p) in counted]
        return sharded_norm(gradients, self._comm.sum_over_world, self.device)

    # -- timers ---------------------------------------------------------------------------------------

    # DeepSpeed 0.19.8 with wall_clock_breakdown starts and stops its backward timers twice in a pipeline, once in the
    # pipeline's instruction and once in a hook, and fails on the second: the outer one counts.

    def _start_timers(self, timer_names: list[str]) -> None:
        if self.dynmo is not None:
            timer_names = [name for name in timer_names if not self.timers(name).started_]
            self._timers_started.update(timer_names)
        super()._start_timers(timer_names)

    def _stop_timers(self, timer_names: list[str]) -> None:
        if self.dynmo is not None:
            timer_names = [name for name in timer_names if name in self._timers_started]
            self._timers_started.difference_update(timer_names)
        super()._stop_timers(timer_names)

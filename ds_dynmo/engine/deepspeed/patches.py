"""Patches of DeepSpeed's pipeline engine: methods that replace its methods or wrap them (read in DeepSpeed 0.19.8).

They fix what depends on which layers a stage has, and what fails. All of them hold with
``"enabled": false`` too: the baseline of every comparison. Without a "dynmo" section nothing differs from DeepSpeed.
With one most runs do, if only because DeepSpeed clips gradients at 1.0 unless told 0.0.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.utils.debug import debug_clear_module_and_param_names, debug_extract_module_and_param_names

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.comm import replicas
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.deepspeed.checkpointing import checkpoint_any_input
from ds_dynmo.engine.deepspeed.instruction_map import check_steps, is_deepspeeds
from ds_dynmo.engine.deepspeed.losses import share_loss
from ds_dynmo.engine.events import LayersMoved
from ds_dynmo.engine.run.compiled_layers import backend_of_call
from ds_dynmo.engine.stage import StageContext, stage_of
from ds_dynmo.engine.state.clipping import scale_gradients
from ds_dynmo.errors import ConfigError
from ds_dynmo.unmarked import unmarked


class PatchedPipelineEngine(PipelineEngine):
    """DeepSpeed's engine with parameter groups, clipping and timers that do not depend on the partition.

    Attributes:
        dynmo: the "dynmo" section; None: every method is DeepSpeed's.
        stage: the state that ds_dynmo's components work on; only with a "dynmo" section.
    """

    dynmo: Any
    stage: StageContext
    _timers_started: set[str]
    _until_initialized: ExitStack
    _micro_batches_read = 0  # in this batch or evaluation

    def __init__(self, *args: Any, dynmo: DynMoConfig | None, **kwargs: Any) -> None:
        self.__dict__["dynmo"] = dynmo  # super().__init__ calls what is overridden here
        self.__dict__["_timers_started"] = set()
        super().__init__(*args, **kwargs)
        if dynmo is not None:
            checkpoint_any_input(self.module)
            self.stage.optimizer.follow()
            self.stage.layers_moved.subscribe("DeepSpeed keeps what belongs to the layers before", self._forget_layers)
            self.stage.parameters_replaced.subscribe("DeepSpeed keeps graphs with the parameters", self._forget_layers)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile layer by layer, as ``"compile": true`` of "dynmo" does; without a "dynmo" section as DeepSpeed does.

        Raises:
            ConfigError: an argument that this does not honour; nothing has changed.
        """
        if self.dynmo is None:
            super().compile(*args, **kwargs)
        else:
            self.stage.compiled.switch_on(backend_of_call(*args, **kwargs))

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called, or the "dynmo" section asks for it."""
        return bool(super().is_compiled if self.dynmo is None else self.stage.compiled)

    # -- layers ---------------------------------------------------------------------------------------

    def _configure_distributed_model(self, model: Any) -> None:
        """Set up the module as DeepSpeed does, but refuse on every rank if any holds a layer that cannot be moved."""
        if self.dynmo is not None:
            comm = Communicator(self.mpu, self.device, self.dynmo.timeout_seconds)
            self._until_initialized.enter_context(comm.operation("initialize"))
            self.stage = stage_of(self, comm, self.dynmo, model)
        super()._configure_distributed_model(model)

    def _broadcast_model(self) -> None:
        """Broadcast the model as DeepSpeed does, but for parameters that differ between replicas."""
        kept = [(p, unmarked(p).clone()) for p in self.module.parameters() if replicas.is_per_replica(p)]
        super()._broadcast_model()
        for parameter, value in kept:
            parameter.data.copy_(value)

    def _get_gradients_for_reduction(self) -> tuple[list[Any], dict[str, list[Any]]]:
        """List the gradients to average as DeepSpeed does, once per batch; divide those of one replica instead."""
        gradients, of_experts = super()._get_gradients_for_reduction()
        if self.dynmo is None or not self.stage.replicas_differ:
            return gradients, of_experts
        reduced = [p for p in self.module.parameters() if p.requires_grad and p.numel()]
        for parameter in filter(replicas.is_per_replica, reduced):
            parameter.grad.div_(self.grid.get_data_parallel_world_size())
        return [g for p, g in zip(reduced, gradients, strict=True) if not replicas.is_per_replica(p)], of_experts

    # -- optimizer ------------------------------------------------------------------------------------

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        """Build the optimizer as DeepSpeed does, but keep every parameter group on every rank, empty ones too.

        DeepSpeed calls it in its constructor. Programs that need other parameter groups than they can name before call
        it themselves, after ``initialize``: from then on that optimizer follows the layers.
        """
        if self.dynmo is None:
            super()._configure_optimizer(client_optimizer, model_parameters)
            return
        given = client_optimizer if client_optimizer is not None else self._configure_basic_optimizer
        with self.stage.optimizer.configuring(given, model_parameters) as optimizer:
            super()._configure_optimizer(optimizer, model_parameters)

    def _get_zero_param_shapes(self) -> list[Any]:
        """Return DeepSpeed's table for checkpoints, without placeholders."""
        shapes: list[Any] = super()._get_zero_param_shapes()
        return shapes if self.dynmo is None else self.stage.optimizer.without_placeholders(shapes)

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm of the whole model (DeepSpeed's counts the first stage only)."""
        if self.dynmo is None:
            super().clip_fp32_gradients()
            return
        norm = self.stage.optimizer.norm.of(lambda parameter: parameter.grad)
        scale_gradients(self.module.parameters(), norm, self.gradient_clipping())
        self._global_grad_norm = norm

    # -- a batch --------------------------------------------------------------------------------------

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """Run a training batch, or the forward passes of an evaluation, in ds_dynmo's order of passes.

        Raises:
            ConfigError: the steps are the user's, or data are refused; another batch may follow.
        """
        if self.dynmo is None:
            super()._exec_schedule(pipe_schedule)
            return
        try:
            check_steps(pipe_schedule, training=torch.is_grad_enabled())
            self._micro_batches_read = 0
            self._run_batch(pipe_schedule.num_micro_batches)
        except ConfigError:
            if (timer := self.timers(TRAIN_BATCH_TIMER)).started_:
                timer.stop()
            raise

    def _run_batch(self, micro_batches: int) -> None:
        """Run it by the engine's components, which are built upon this class."""
        raise NotImplementedError

    def is_last_stage(self) -> bool:
        """Return whether this stage holds the model's last chunk, or held it in the latest batch, and so the loss."""
        loss_stage = self.stage.chunks.loss_stage if "stage" in vars(self) else None
        return bool(super().is_last_stage()) if loss_stage is None else loss_stage == self.stage_id

    def _loss_stage_global_rank(self) -> int:
        """Return the rank that computes the loss, or did so in the latest batch."""
        loss_stage = self.stage.chunks.loss_stage if "stage" in vars(self) else None
        return int(super()._loss_stage_global_rank()) if loss_stage is None else self.stage.comm.rank_of(loss_stage)

    def _backward_prologue_per_tensor(self, grad: Any) -> Any:
        """Scale gradients as DeepSpeed does where the loss is, but not those that another chunk of its stage gets."""
        active = None if self.dynmo is None else self.stage.chunks.active
        return grad if active is not None and not active.is_last else super()._backward_prologue_per_tensor(grad)

    def set_dataiterator(self, iterator: Any) -> None:
        """Store an iterator as DeepSpeed does; on the last stage also where the loss is on another one.

        That stage reads its data all the same, so that they are right when the loss comes back to it.
        """
        super().set_dataiterator(iterator)
        if self.dynmo is not None and self.stage_id == self.num_stages - 1:
            self.training_dataloader, self.data_iterator = None, iterator

    def _next_batch(self) -> Any:
        """Read a micro-batch as DeepSpeed does.

        Raises:
            StopIteration: as in DeepSpeed, the data ended; this one says where. Ranks of other stages read none: they
                wait until this one ends.
            ConfigError: this rank was given no data.
        """
        if self.dynmo is None:
            return super()._next_batch()
        training = self.module.training
        try:
            batch = super()._next_batch()
        except StopIteration as ended:
            read, wanted = self._micro_batches_read, self.micro_batches
            raise StopIteration(
                f"batch {self.global_steps + 1}: the data ended after {read} of its {wanted} micro-batches, so no step "
                "was taken: give train_batch an iterator that goes on, such as deepspeed.utils.RepeatingLoader(loader)"
                if training
                else f"an evaluation: the data ended, micro-batch {read + 1} is missing: give eval_batch a new iterator"
            ) from ended
        if batch is None:
            stage = "first stage" if self.is_first_stage() else "last stage"
            raise ConfigError(
                f"rank {self.global_rank}, the {stage}, has no data: {'train_batch' if training else 'eval_batch'} "
                "needs an iterator on the first and the last stage, or initialize needs training_data"
            )
        self._micro_batches_read += 1
        self.stage.readings.saw(batch)
        return batch

    def _aggregate_total_loss(self) -> Any:
        """Share the loss as DeepSpeed does, and show in a trace how long that waits.

        Unless ``dynmo.schedule.kind`` is "1f1b" nothing waits: stages that are done begin the next batch.
        """
        aggregate = super()._aggregate_total_loss
        if self.dynmo is None:
            return aggregate()
        with self.stage.timeline.phase("loss", "share the loss"):
            if not self.stage.schedule.may_choose_schedule or not is_deepspeeds(aggregate):
                return aggregate()
            return share_loss(self, aggregate, self.stage.comm.post)

    def reset_activation_shape(self) -> None:
        """Let stages announce the shapes of messages anew, as DeepSpeed does, and which tensors get a gradient."""
        super().reset_activation_shape()
        if self.dynmo is not None:
            self.stage.forms.forget()

    def _forget_layers(self, _: LayersMoved | None) -> None:
        """Free what DeepSpeed keeps of the layers that this stage had."""
        self.stage.forms.forget()
        debug_clear_module_and_param_names()
        debug_extract_module_and_param_names(self.module)

    # -- timers ---------------------------------------------------------------------------------------

    # With wall_clock_breakdown DeepSpeed starts and stops its backward timers twice in a pipeline, once in the
    # pipeline's instruction and once in a hook, and fails on the second: the outer one counts. Without it no timer has
    # a name here.

    def _start_timers(self, timer_names: list[str]) -> None:
        if timer_names and self.dynmo is not None:
            timer_names = [name for name in timer_names if not self.timers(name).started_]
            self._timers_started.update(timer_names)
        super()._start_timers(timer_names)

    def _stop_timers(self, timer_names: list[str]) -> None:
        if timer_names and self.dynmo is not None:
            timer_names = [name for name in timer_names if name in self._timers_started]
            self._timers_started.difference_update(timer_names)
        super()._stop_timers(timer_names)

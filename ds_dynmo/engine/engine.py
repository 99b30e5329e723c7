"""The pipeline engine that re-balances itself: the methods for users and models. Each calls one component."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, overload

import torch
from torch import nn

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.components import Components, build_components
from ds_dynmo.engine.decide.cycle import Reason, Request
from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.deepspeed.instruction_map import checked_instructions
from ds_dynmo.engine.deepspeed.module import modules_of
from ds_dynmo.engine.deepspeed.patches import PatchedPipelineEngine
from ds_dynmo.engine.guards import at_work, check_at_work, doing, where_layers_may_move
from ds_dynmo.engine.measure.profiler import Profiler
from ds_dynmo.engine.move.migrator import Migrator
from ds_dynmo.engine.resize.repacker import Repacker
from ds_dynmo.engine.save.applying import LoadOptions
from ds_dynmo.engine.save.checkpointer import Checkpointer
from ds_dynmo.engine.save.writing import SaveOptions
from ds_dynmo.engine.state import gradients, kept_elements
from ds_dynmo.errors import ConfigError
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MeasuredReport, Profile, RebalanceReport, RepackReport


class DynMoPipelineEngine(PatchedPipelineEngine):
    """DeepSpeed's ``PipelineEngine`` with a re-partition step. :func:`ds_dynmo.initialize` builds it.

    Attributes:
        dynmo: the "dynmo" section; None: the configuration has none, and this is DeepSpeed's engine, without
            components.
        profiler, rebalancer, migrator, repacker, checkpointer: see :class:`Components`.
    """

    profiler: Profiler
    rebalancer: Rebalancer
    migrator: Migrator
    repacker: Repacker
    checkpointer: Checkpointer
    _components: Components

    def __init__(self, *args: Any, dynmo: DynMoConfig | None, **kwargs: Any) -> None:
        with ExitStack() as self.__dict__["_until_initialized"]:
            super().__init__(*args, dynmo=dynmo, **kwargs)
            if dynmo is None:
                return
            components = self._components = build_components(self, dynmo)
        self.profiler, self.rebalancer, self.migrator = components.profiler, components.rebalancer, components.migrator
        self.repacker, self.checkpointer = components.repacker, components.checkpointer

    # -- training -------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train a batch by DeepSpeed's or the user's ``train_batch``; then profile, decide and move if that is due.

        Raises:
            ReleasedError: this rank was released: it has no layers any more.
            ConfigError: there is no optimizer, layers were frozen without :meth:`model_changed`, an instruction is the
                user's, or an error ended the batch before; nothing was trained. Or ``train_batch`` did not run the
                engine's batch.
            RankLostError: a rank has died, was stopped, or cannot be reached.
        """
        positional = args if data_iter is None and not args else (data_iter, *args)  # a user's may take no argument
        train = partial(super().train_batch, *positional, **kwargs)
        if self.dynmo is None:
            return train()
        check_at_work(self, "train_batch")
        checked_instructions(self)
        self.stage.optimizer.check_given()
        with self.stage.comm.operation(f"batch {self.global_steps + 1}"):
            self.checkpointer.before_batch()
            return self._components.step.run(train)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch by DeepSpeed's ``eval_batch``.

        Raises:
            ConfigError: an error ended the batch before.
        """
        evaluate = partial(super().eval_batch, *args, **kwargs)
        if self.dynmo is None:
            return evaluate()
        with doing(self, "eval_batch"):
            checked_instructions(self)
            self._components.executor.check()
            self.stage.layers.tied_aliases.refresh(training=False)
            return evaluate()

    def _run_batch(self, micro_batches: int) -> None:
        """Run a training batch; without gradients, the forward passes of an evaluation."""
        executor = self._components.executor
        (executor.train if torch.is_grad_enabled() else executor.evaluate)(micro_batches)

    # -- balancing ------------------------------------------------------------------------------------

    @property
    def partition(self) -> list[int]:
        """The current boundaries: stage ``s`` owns layers ``[p[s], p[s + 1])``."""
        return [int(boundary) for boundary in self.module.parts]

    @property
    def chunks(self) -> tuple[range, ...]:
        """The numbers of this rank's layers, one range per chunk."""
        placement = Placement.chain(self.module.parts) if self.dynmo is None else self.stage.placement
        return placement.chunks_of(self.stage_id)

    def layers(self) -> dict[int, nn.Module]:
        """Map the numbers of this rank's layers to their modules, in the order in which they run.

        The result is valid until layers move. Plain functions are left out. All uses of a tied layer map to its module.

        Raises:
            ReleasedError: this rank was released.
        """
        if self.dynmo is not None:
            check_at_work(self, "layers")
        return dict(modules_of(self.module, chain.from_iterable(self.chunks)))

    @property
    def profile(self) -> Profile | None:
        """The latest profile, the same on every rank; None before the first."""
        return None if self.dynmo is None else self.rebalancer.profile

    @property
    def reports(self) -> list[RebalanceReport]:
        """The latest decisions, 1,000 at most, including those that moved nothing; [] on other ranks than rank 0.

        ``dynmo.report`` has all.
        """
        return [] if self.dynmo is None else [*self._components.reporter.rebalances]

    @property
    def measurements(self) -> list[MeasuredReport]:
        """The measurements of the first profile of a run, and of the first after each move: as for :attr:`reports`."""
        return [] if self.dynmo is None else [*self._components.reporter.measurements]

    def write_record(self, record: dict[str, Any]) -> None:
        """Append a record to ``dynmo.report`` on rank 0, as a line of JSON; do nothing without a report.

        All records are written in one place, so there is one warning of a full disk.
        """
        if self.dynmo is not None:
            self._components.reporter.write(record)

    @overload
    def rebalance(self, partition: Sequence[int] | None = None) -> RebalanceReport: ...

    @overload
    def rebalance(self, partition: Sequence[int] | None = None, *, background: bool) -> RebalanceReport | None: ...

    @where_layers_may_move
    def rebalance(self, partition: Sequence[int] | None = None, *, background: bool = False) -> RebalanceReport | None:
        """Move layers now. Collective: every rank calls it between the same two batches.

        A decision by hand must improve by ``min_improvement``. The cost of the move does not count.

        Args:
            partition: the new boundaries; None: decide from the latest profile. If there is no profile yet, batches are
                trained first, on the engine's data iterator, until there is one.
            background: whether to move while the next batch trains.

        Returns:
            The report, on every rank; None if layers move with the next batch, after which :attr:`reports` has it.

        Raises:
            PartitionError: ``partition`` is invalid or cuts a group of ``keep_together``, or no partition meets the
                memory limit. Nothing has changed.
            MigrationError: see its message; nothing has changed unless it says that layers had begun to move. Harmless,
                with both numbers, if the move takes a rank above the memory limit.
            ConfigError: the configuration has no "dynmo" section, or ``enabled`` is false.
            CheckpointError: a save in the background has failed.
        """
        self.checkpointer.check()
        if partition is None:
            return self.rebalancer.decide_on_request(self.train_batch, background=background)
        return self.rebalancer.move_to_partition(partition, Request(Reason.EXPLICIT), background=background)

    @at_work
    def on_layer_arrival(self, callback: Callable[[int, nn.Module], None]) -> None:
        """Call ``callback(number, layer)`` for each layer that arrives on this rank. Call this on every rank.

        The callback sets what cannot be sent: a lambda, or a hook that is a closure. It runs before anything moves: the
        layer is complete, but its tensors have no values yet, and the move may still be refused. If the layer then
        differs from the one sent, the move is refused.
        """
        self.stage.on_arrival.append(callback)

    def model_changed(self, reason: str) -> None:
        """Report that the model's work just changed: the next batch is profiled and a decision follows.

        Collective: call it on every rank between the same two batches. Call it also after layers were frozen or
        unfrozen (``requires_grad``).
        """
        if self.dynmo is None:
            return
        with doing(self, "model_changed"):
            self._components.trainable.agree("model_changed")
            self.rebalancer.model_changed(reason)

    @at_work
    def add_rng_tracker(self, name: str, tracker: Any) -> None:
        """Add a tracker of random states, which then are separate for each layer: :meth:`TrackedStates.add`.

        Every rank makes the same call, between two batches. Trackers of Megatron and DeepSpeed are found without it.
        """
        self._components.tracked_states.add(name, tracker)

    # -- fewer ranks ----------------------------------------------------------------------------------

    @property
    def released(self) -> bool:
        """Whether this rank's accelerator was handed back."""
        return self.dynmo is not None and self.repacker.released

    @where_layers_may_move
    def repack(self, num_stages: int | None = None, *, partition: Sequence[int] | None = None) -> RepackReport:
        """Continue with fewer ranks; see :meth:`Repacker.repack`. Collective."""
        self.rebalancer.settle()
        return self.repacker.repack(num_stages, partition=partition, train=self.train_batch)

    @property
    def repacks(self) -> list[RepackReport]:
        """The latest re-packings, including those by hand that found nothing better: as for :attr:`reports`."""
        return [] if self.dynmo is None else [*self._components.reporter.repacks]

    @property
    def micro_batches_taken(self) -> int:
        """The number of micro-batches of this rank's data trained so far: a resumed script's data continues there."""
        return int(self.global_samples // (self.train_micro_batch_size_per_gpu() * self.grid.data_parallel_size))

    @at_work
    def before_release(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on every rank before each re-packing that releases ranks, while all are at work.

        It collects what this rank would take with it, and may be collective. If it raises, nothing has moved. Every
        rank makes the same call.
        """
        self.stage.before_release.append(callback)

    # -- for dynamic models -----------------------------------------------------------------

    @at_work
    def before_step(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on this rank in every batch, between the reduction of gradients and the step."""
        self.stage.before_step.append(callback)

    @at_work
    def sum_over_stages(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum a tensor elementwise over the stages of this rank's pipeline. Collective."""
        return self.stage.comm.sum_over_stages(numbers)

    @at_work
    def sum_over_replicas(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum a tensor elementwise over the data-parallel replicas of this rank's stage. Collective."""
        return self.stage.comm.sum_over_replicas(numbers)

    @at_work
    def sum_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum a tensor elementwise over all ranks, replicas too. Collective."""
        return self.stage.comm.sum_over_world(numbers)

    @at_work
    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        """Set elements of a parameter of this stage to 0, with their fp32 master weights and optimizer state.

        If their gradients stay 0, an elementwise optimizer keeps them at exactly 0. Call it between batches, on every
        replica alike; it is not collective. ``where``: bool in the parameter's shape.
        """
        self.stage.state.zero_elements(parameter, where)

    @at_work
    def keep_elements(self, kept: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> None:
        """Reduce parameters to some of their elements, as 1-D parameters. Collective.

        A new parameter replaces ``getattr(module, name)`` in its module, its parameter group and the optimizer's state.
        Values, gradients, fp32 master weights and moments of the kept elements are unchanged; memory of the others is
        freed.

        Args:
            kept: modules of this stage, each with the name of a parameter and the places of the elements to keep:
                ascending, in the flattened parameter. Every replica passes the same; a stage may pass none.

        Raises:
            ConfigError: on every rank, with the first problem; nothing has changed.
        """
        self.rebalancer.settle()
        kept_elements.keep_elements(self.stage, kept, is_moving=self.migrator.is_moving)

    @at_work
    def keep_elements_refusal(self) -> str | None:
        """Return why :meth:`keep_elements` would refuse the optimizer; None: it would not."""
        return kept_elements.refusal(self.stage)

    @at_work
    def zero_gradients(self, elements: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Set elements of a batch's gradients to 0, on every replica alike: :func:`gradients.zero_gradients`."""
        gradients.zero_gradients(self.stage, elements)

    @at_work
    def gradient_magnitudes(self) -> torch.Tensor:
        """Sum the magnitudes of this rank's gradients per layer: :func:`gradients.gradient_magnitudes`."""
        return gradients.gradient_magnitudes(self.stage)

    # -- checkpoints ----------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint that loads at any partition. It is complete or does not appear. Collective.

        With ``"checkpoint": "background"`` in the section, return once the state is copied to host memory. A failure to
        write it is raised by the next batch that notices, or the next call here or of :meth:`wait_for_save`.

        Raises:
            CheckpointError: on every rank; earlier checkpoints are untouched.
        """
        arguments = (save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)
        if self.dynmo is None:
            return bool(super().save_checkpoint(*arguments))
        with doing(self, "save_checkpoint"):
            return self.checkpointer.save(SaveOptions(*arguments))

    @at_work
    def checkpoint_bytes(self, exclude_frozen_parameters: bool = False) -> int:
        """Estimate the bytes of a checkpoint, also before the optimizer has state. Collective."""
        return self.checkpointer.expected_bytes(exclude_frozen=exclude_frozen_parameters)

    def wait_for_save(self) -> None:
        """Wait until no checkpoint is being written in the background. Collective.

        Raises:
            CheckpointError: on every rank; the last one could not be written. Earlier checkpoints are untouched.
        """
        if self.dynmo is not None:
            with self.stage.comm.operation("wait_for_save"):
                self.checkpointer.wait()

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        newest_whole: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of any partition and any number of stages and replicas. Collective.

        The tensor-parallel degree must be the saved one, as each slice reads its files. With the saved number of
        stages, layers move to the saved partition, if ``memory_limit`` allows it; otherwise they stay. No code in a
        file is run.

        Args:
            newest_whole: where the checkpoint that is asked for is damaged or missing, load that of the others which
                was written last and can be loaded.

        Raises:
            CheckpointError: on every rank; the engine is as it was, unless the message says otherwise.
            MigrationError: see its message; a layer cannot be moved to the saved partition.
            ConfigError: ``custom_load_fn`` was given, which pipelines do not support; or ``newest_whole`` without the
                section.
        """
        flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        if self.dynmo is None:
            if newest_whole:
                raise ConfigError('newest_whole: needs a "dynmo" section: stock DeepSpeed writes no checksums')
            return super().load_checkpoint(load_dir, tag, *flags, custom_load_fn)  # type: ignore[no-any-return]
        with doing(self, "load_checkpoint"):
            if custom_load_fn is not None:
                raise ConfigError("custom_load_fn: a pipeline's layers are loaded one by one, as in DeepSpeed")
            self.rebalancer.settle()
            return self.checkpointer.load(load_dir, tag, LoadOptions(*flags), newest_whole=newest_whole)

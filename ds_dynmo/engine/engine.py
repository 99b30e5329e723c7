"""The pipeline engine that re-balances itself: what users and models call. Each call goes to one part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.balancing.balancer import Balancer
from ds_dynmo.engine.balancing.trigger import Reason, Request
from ds_dynmo.engine.checkpoint.applying import LoadOptions
from ds_dynmo.engine.checkpoint.checkpointer import Checkpointer
from ds_dynmo.engine.deepspeed_adapter import buffers
from ds_dynmo.engine.deepspeed_adapter.patches import PatchedPipelineEngine
from ds_dynmo.engine.elastic.job_snapshot import Stateful
from ds_dynmo.engine.elastic.repacker import Repacker
from ds_dynmo.engine.guards import at_work, check_at_work, where_layers_may_move
from ds_dynmo.engine.migration.migrator import Migrator
from ds_dynmo.engine.optimizer import gradients
from ds_dynmo.engine.parts import Parts, build_parts
from ds_dynmo.engine.profiling.profiler import Profiler
from ds_dynmo.errors import ConfigError
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MeasuredReport, Profile, RebalanceReport, RepackReport


class DynMoPipelineEngine(PatchedPipelineEngine):
    """DeepSpeed's ``PipelineEngine`` with a re-partition step. Built by :func:`ds_dynmo.initialize`.

    Attributes:
        dynmo: the "dynmo" block; None without one, and then this is DeepSpeed's engine and has no parts.
        profiler, balancer, migrator, repacker, checkpointer: its parts, as :class:`Parts` describes them.
    """

    profiler: Profiler
    balancer: Balancer
    migrator: Migrator
    repacker: Repacker
    checkpointer: Checkpointer
    _parts: Parts

    def __init__(self, *args: Any, dynmo: DynMoConfig | None, **kwargs: Any) -> None:
        super().__init__(*args, dynmo=dynmo, **kwargs)
        if dynmo is None:
            return
        parts = self._parts = build_parts(self, dynmo)
        self.profiler, self.balancer, self.migrator = parts.profiler, parts.balancer, parts.migrator
        self.repacker, self.checkpointer = parts.repacker, parts.checkpointer
        parts.repacker.accept_joins()

    # -- training -------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's ``train_batch``, or that of the user's engine; at every interval a rebalance follows.

        Raises:
            ReleasedError: this rank was released: it has no layers any more.
            ConfigError: layers were frozen and the engine was not told, or an instruction of the user's cannot do
                what frozen layers need; nothing was trained. Or no schedule of the engine's was run.
        """
        given = args if data_iter is None and not args else (data_iter, *args)  # as given: the user's may take none
        train = partial(super().train_batch, *given, **kwargs)
        if self.dynmo is None:
            return train()
        check_at_work(self, "train_batch")
        self.repacker.data.before_batch(data_iter)
        return self._parts.step.run(train)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's ``eval_batch``."""
        evaluate = partial(super().eval_batch, *args, **kwargs)
        if self.dynmo is None:
            return evaluate()
        check_at_work(self, "eval_batch")
        self.stage.layers.refresh_tied_aliases(training=False)
        buffers.forget_total_loss(self)
        if len(args) > 5 or kwargs.get("num_micro_batches") is not None:
            return evaluate()
        return self.repacker.data.evaluate_part(args[0] if args else kwargs.get("data_iter"), evaluate)

    # -- balancing ------------------------------------------------------------------------------------

    @property
    def partition(self) -> list[int]:
        """Current boundaries: stage ``s`` owns layers ``[p[s], p[s + 1])``."""
        return [int(bound) for bound in self.module.parts]

    @property
    def chunks(self) -> tuple[range, ...]:
        """The numbers of this rank's layers, a range for each chunk that it owns."""
        placement = Placement.chain(self.module.parts) if self.dynmo is None else self.stage.placement
        return placement.chunks_of(self.stage_id)

    @property
    def profile(self) -> Profile | None:
        """The latest profile, the same on every rank; None before the first."""
        return None if self.dynmo is None else self.balancer.profile

    @property
    def reports(self) -> list[RebalanceReport]:
        """Every decision so far, moved or not."""
        return [] if self.dynmo is None else self._parts.reporter.rebalances

    @property
    def measurements(self) -> list[MeasuredReport]:
        """What was measured under each partition: the first profile of a run and the first after each move."""
        return [] if self.dynmo is None else self._parts.reporter.measurements

    @where_layers_may_move
    def rebalance(self, partition: Sequence[int] | None = None) -> RebalanceReport:
        """Move layers now. Collective: every rank calls it between the same two batches.

        What is decided by hand has to be better by ``min_improvement``, but is not weighed against the cost of moving.

        Args:
            partition: exactly where to go; None: decide from the latest profile as at an interval. If there is no
                profile yet, batches are trained first, on the data iterator that the engine has, until there is.

        Raises:
            PartitionError: ``partition`` is invalid, it cuts what ``keep_together`` keeps together, or no partition
                meets the memory limit. Nothing has changed.
            MigrationError: see its message; nothing has changed unless it says that layers had begun to move. Harmless,
                with both numbers, where the move takes a rank above the memory limit.
            ConfigError: the configuration has no "dynmo" block, or one that is switched off.
        """
        if partition is None:
            return self.balancer.rebalance_by_hand(self.train_batch)
        return self.balancer.rebalance_to(self.stage.placement.at(partition), Request(Reason.EXPLICIT))

    def model_changed(self, reason: str) -> None:
        """A dynamic model says that its work just changed: the next batch is profiled and a decision follows.

        Collective: call it on every rank between the same two batches. It is also how the engine learns that
        layers were frozen or unfrozen (``requires_grad``).
        """
        if self.dynmo is None:
            return
        check_at_work(self, "model_changed")
        self._parts.trainable.agree("model_changed")
        self.balancer.model_changed(reason)

    @at_work
    def add_rng_tracker(self, name: str, tracker: Any) -> None:
        """Make the random states of a tracker each layer's own, as Megatron's and DeepSpeed's are without a call.

        Every rank makes the same call, between two batches: :meth:`TrackedStates.add`.
        """
        self._parts.tracked_states.add(name, tracker)

    # -- fewer ranks, or more -------------------------------------------------------------------------

    @property
    def released(self) -> bool:
        """True on a rank whose accelerator was handed back."""
        return self.dynmo is not None and self.repacker.released

    @where_layers_may_move
    def repack(self, num_stages: int | None = None, *, partition: Sequence[int] | None = None) -> RepackReport:
        """Go on with fewer ranks, or take parked ones back: :meth:`Repacker.repack`. Collective, between two batches.

        Args:
            num_stages: how many to go on with; None: as many as ``dynmo.repack`` finds best.
            partition: exactly the boundaries to go to.
        """
        return self.repacker.repack(num_stages, partition=partition, train=self.train_batch)

    @property
    def repacks(self) -> list[RepackReport]:
        """Every re-packing so far; of those by hand also the ones that found nothing better."""
        return [] if self.dynmo is None else self._parts.reporter.repacks

    @property
    def micro_batches_taken(self) -> int:
        """How many micro-batches of this rank's data were trained on: where a script's own data goes on.

        ``global_steps`` times the launch's ``micro_batches``, however many replicas share a batch now.
        """
        return int(self.global_steps * self.micro_batches) if self.dynmo is None else self.repacker.data.taken

    def wait_for_recall(self) -> bool:
        """On a released rank, or one that joined: wait until it is called, True, or until the job has ended, False.

        True at once on a rank that was not released, False at once where released ranks are not parked.
        """
        return not self.released or self.repacker.wait_for_recall()

    @where_layers_may_move
    def join(self, job: Any) -> None:
        """Offer the ranks of this launch to a running job, as stages that it can call: :meth:`Repacker.join`.

        ``job``: "HOST:PORT", its MASTER_ADDR and MASTER_PORT, or the ``torch.distributed.Store`` of its launch.
        """
        self.repacker.join(job)

    @where_layers_may_move
    def most_stages(self) -> int:
        """How many stages :meth:`repack` can go on with now: at work, parked or joined. Collective."""
        return self.repacker.most_stages()

    def dismiss_parked(self) -> None:
        """Tell parked ranks that the job has ended: ``wait_for_recall`` gives False. Rank 0 does so at its exit too."""
        if self.dynmo is not None:
            self.repacker.dismiss_parked()

    @at_work
    def share_state(self, name: str, holder: Stateful) -> None:
        """Let re-packings carry on ``holder``, whose ``state_dict()`` is the same on every rank; it may be collective.

        After each, all ranks load it, those that came back too, as when a job is resumed. Every rank calls this alike.
        """
        self.repacker.share_state(name, holder)

    # -- what a dynamic model may ask -----------------------------------------------------------------

    @at_work
    def before_step(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on this rank in every batch, between the reduction of gradients and the step."""
        self._parts.executor.before_step(callback)

    @at_work
    def sum_over_stages(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise sum of a tensor over the stages of this rank's pipeline. Collective."""
        return self.stage.comm.sum_over_stages(numbers)

    @at_work
    def sum_over_replicas(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise sum of a tensor over the data-parallel replicas of this rank's stage. Collective."""
        return self.stage.comm.sum_over_replicas(numbers)

    @at_work
    def sum_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise sum of a tensor over all ranks, replicas too. Collective."""
        return self.stage.comm.sum_over_world(numbers)

    @at_work
    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        """Set elements of a parameter of this stage to 0, with their fp32 master weights and optimizer state.

        Where the gradient is 0 from then on too, an elementwise optimizer keeps them at exactly 0. Between batches;
        not collective, but every replica has to make the same call. ``where``: bool in the parameter's shape.
        """
        self.stage.state.zero_elements(parameter, where)

    @at_work
    def zero_gradients(self, elements: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Set elements of a batch's gradients to 0, on every replica alike: :func:`gradients.zero_gradients`."""
        gradients.zero_gradients(self.stage, elements)

    @at_work
    def gradient_magnitudes(self) -> torch.Tensor:
        """Per layer, this rank's share of its gradients' magnitudes: :func:`gradients.gradient_magnitudes`."""
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
        """DeepSpeed's ``save_checkpoint``, atomically, with what loading at another partition needs. Collective.

        Raises CheckpointError on every rank; the checkpoints that were there are as they were.
        """
        arguments = (save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)
        if self.dynmo is None:
            return bool(super().save_checkpoint(*arguments))
        check_at_work(self, "save_checkpoint")
        return self.checkpointer.save(*arguments)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """DeepSpeed's ``load_checkpoint``, of any partition, number of stages and of replicas. Collective.

        The tensor-parallel degree has to be the one that was saved: each slice reads its own files.
        With as many stages as saved, layers go where they were saved; otherwise they stay where they are. No code in
        a file is run.

        Raises:
            CheckpointError: on every rank; the engine is as it was, unless the message says otherwise.
            MigrationError: harmless; to go where layers were saved takes a rank above the memory limit.
            ConfigError: a ``custom_load_fn``, which pipelines do not take.
        """
        flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        if self.dynmo is None:
            return super().load_checkpoint(load_dir, tag, *flags, custom_load_fn)  # type: ignore[no-any-return]
        check_at_work(self, "load_checkpoint")
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn: a pipeline's layers are loaded one by one, as in DeepSpeed")
        return self.checkpointer.load(load_dir, tag, LoadOptions(*flags))

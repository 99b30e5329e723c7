"""The pipeline engine that re-balances itself: wiring of profiler, controller, migration and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from deepspeed.utils.debug import debug_clear_module_and_param_names, debug_extract_module_and_param_names

from ds_dynmo import partitioners
from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine import checkpoint
from ds_dynmo.engine.balancing import trigger
from ds_dynmo.engine.balancing.decentralized import decide_among_neighbours
from ds_dynmo.engine.balancing.policy import CostModel, Decision, accept_move, costs_and_speeds, decide, predict
from ds_dynmo.engine.comm import replicas
from ds_dynmo.engine.deepspeed_adapter.checkpointing import checkpoint_any_input
from ds_dynmo.engine.elastic import ElasticEngine
from ds_dynmo.engine.files import check_writable
from ds_dynmo.engine.migration.migrate import MigrationContext, migrate
from ds_dynmo.engine.migration.references import References
from ds_dynmo.engine.pipeline import frozen_prefix, instructions
from ds_dynmo.engine.pipeline.random_streams import LayerStreams
from ds_dynmo.engine.pipeline.rng_trackers import TrackedStates
from ds_dynmo.engine.profiling import layer_sizes
from ds_dynmo.engine.profiling.profiler import CpuClock, EventClock, Profiler
from ds_dynmo.engine.profiling.trace import Tracer
from ds_dynmo.engine.reporting import Reporter, rebalance_report
from ds_dynmo.engine.validation import check_sharing, layer_groups
from ds_dynmo.errors import ConfigError, MigrationError, PartitionError
from ds_dynmo.plan import MeasuredReport, MigrationPlan, Profile, RebalanceReport, check_partition


class DynMoPipelineEngine(ElasticEngine):
    """DeepSpeed's ``PipelineEngine`` with a re-partition step. Built by :func:`ds_dynmo.initialize`.

    Attributes:
        dynmo: the "dynmo" block; None without one, and then this is DeepSpeed's engine.
        released: True on a rank whose accelerator was handed back.
    """

    _INSTRUCTION_MAP: Mapping[type, Any]  # the class's or the user's; while a schedule runs, what carries it out
    _streams: LayerStreams | None = None
    loss: Any

    def __init__(self, *args: Any, dynmo: DynMoConfig | None, **kwargs: Any) -> None:
        super().__init__(*args, dynmo=dynmo, **kwargs)
        if dynmo is None:
            return
        self._layer_groups = layer_groups(dynmo, self.module)
        self._controller = trigger.Controller(dynmo)
        self._cost_model = CostModel()
        self._move_seconds = 0.0
        clock = EventClock(get_accelerator()) if _has_events() else CpuClock()
        self._profiler = Profiler(clock, size_every_pass=dynmo.memory_limit is not None)
        check_writable(dynmo.report, "dynmo.report", self._comm, writes=self.global_rank == 0)
        self._reporter = Reporter(dynmo, self.global_rank == 0, self.monitor)
        self._profile: Profile | None = None
        self._profile_seconds = 0.0
        self._last_move_step: int | None = None
        self._failure: Exception | None = None
        self._waits_for_profile = False
        self._prefix = 0
        self._trainable: list[bool] = []
        self._tied_trainable: list[list[float]] = []
        self._composed_of: dict[type, Any] | None = None
        self._schedule_ran = False  # in this batch
        checkpoint_any_input(self.module)
        check_sharing(self._layers, self._comm)
        self._names = References(self.module, self._layers.modules, self._comm.gather_objects, dynmo.rank_attributes)
        self._layers.split_uses()
        self._use_replicas()
        self._tracked_states = TrackedStates(self._comm.gather_over_slices)
        if dynmo.randomness.per_layer:
            seed = self.module.base_seed if dynmo.randomness.seed is None else dynmo.randomness.seed
            self._streams = LayerStreams(seed, self.grid.get_data_parallel_id(), self._tracked_states)
        self._origin = checkpoint.InitialModelSpec.of(self)
        self._tracer = Tracer(dynmo.trace, self, clock, self._reporter.warn) if dynmo.trace is not None else None
        self.stage.optimizer.changed.subscribe("checkpoints, joins and instructions name it", self._optimizer_changed)
        self._agree_on_trainable("initialize")
        self._comm.enter("initialize")
        self.repacker = self._build_repacker()
        self.repacker.accept_joins()

    # -- public ---------------------------------------------------------------------------------------

    @property
    def partition(self) -> list[int]:
        """Current boundaries: stage ``s`` owns layers ``[p[s], p[s + 1])``."""
        return [int(bound) for bound in self.module.parts]

    @property
    def profile(self) -> Profile | None:
        """The latest profile, the same on every rank; None before the first."""
        return None if self.dynmo is None else self._profile

    @property
    def reports(self) -> list[RebalanceReport]:
        """Every decision so far, moved or not."""
        return [] if self.dynmo is None else self._reporter.rebalances

    @property
    def measurements(self) -> list[MeasuredReport]:
        """What was measured under each partition: the first profile of a run and the first after each move."""
        return [] if self.dynmo is None else self._reporter.measurements

    def rebalance(self, partition: Sequence[int] | None = None) -> RebalanceReport:
        """Move layers now. Collective: every rank calls it between the same two batches.

        What is decided by hand has to be better by ``min_improvement``, but is not weighed against the cost of moving.

        Args:
            partition: exactly where to go; None: decide from the latest profile as at an interval. If there is no
                profile yet, batches are trained first, on the data iterator that the engine has, until there is.

        Raises:
            PartitionError: ``partition`` is none, it cuts what ``keep_together`` keeps together, or no partition meets
                the memory limit. Nothing has changed.
            MigrationError: see its message; nothing has changed unless it says that layers had begun to move. Harmless,
                with both numbers, where the move takes a rank above the memory limit.
            ConfigError: the configuration has no "dynmo" block, or one that is switched off.
        """
        self._require_enabled("rebalance")
        if partition is not None:
            new = check_partition(partition, self._layers.num_layers, self.num_stages)
            self._layer_groups.check(new)
            self._comm.enter("rebalance")
            return self._go_to(new, reason="explicit")
        profile_seconds = self._train_until_profiled() if self._profile is None else 0.0
        report = self._rebalance("by hand", profile_seconds)
        self._reporter.profiled(self._profile)
        return report

    def model_changed(self, reason: str) -> None:
        """A dynamic model says that its work just changed: the next batch is profiled and a decision follows.

        Collective: call it on every rank between the same two batches. It is also how the engine learns that
        layers were frozen or unfrozen (``requires_grad``).
        """
        if self.dynmo is None:
            return
        self._require_block("model_changed")
        self._agree_on_trainable("model_changed")
        self._profiler.forget(batches_too=True)
        self._cost_model.model_changed()
        self._controller.model_changed(reason)

    def add_rng_tracker(self, name: str, tracker: Any) -> None:
        """Make the random states of a tracker each layer's own, as Megatron's and DeepSpeed's are without a call.

        Every rank makes the same call, between two batches. See :mod:`ds_dynmo.engine.pipeline.rng_trackers`.

        Args:
            name: what tells it from other trackers, the same in every run.
            tracker: has ``get_states()``, a dict from a name to a state (the tensor that a generator's ``get_state``
                gives, or a ``torch.Generator``), and ``set_states(states)``.

        Raises:
            ConfigError: it has not, another one has this name, or the configuration has no "dynmo" block.
        """
        self._require_block("add_rng_tracker")
        self._tracked_states.add(name, tracker)

    def train_batch(self, data_iter: Any = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's ``train_batch``, or that of the user's engine; at every interval a rebalance follows.

        Raises:
            ReleasedError: this rank was released: it has no layers any more.
            ConfigError: layers were frozen and the engine was not told, or an instruction of the user's cannot do
                what frozen layers need; nothing was trained. Or the batch came to no :meth:`_exec_schedule`.
        """
        given = args if data_iter is None and not args else (data_iter, *args)  # as given: the user's may take none
        train = partial(super().train_batch, *given, **kwargs)
        if self.dynmo is None:
            return train()
        self._require_block("train_batch")
        self.repacker.data.before_batch(data_iter)
        if self._tracer is not None and self._tracer.wants(self.global_steps + 1):
            with self._tracer.batch(self):
                return self._train_batch(train)
        return self._train_batch(train)

    def _train_batch(self, train: Callable[[], Any]) -> Any:
        self._check_trainable()
        self._layers.refresh_tied_aliases(training=True)
        self._schedule_ran = False
        if self._controller.profile_batch(self.global_steps + 1):
            with self._profiler.batch(self.module, self._layers.indices, self.is_last_stage()):
                loss = train()
        else:
            began = time.perf_counter()
            loss = train()
            if self._controller.warm:
                self._profiler.batch_took(time.perf_counter() - began)
        if not self._schedule_ran:
            raise ConfigError(
                "train_batch or _exec_schedule was replaced on the engine by a function that does not come to the "
                "engine's own _exec_schedule: instructions ran without what moving layers needs. Call it, or override "
                "it in a class given as engine_class"
            )
        self._batch_done()
        if not self._waits_for_profile:
            self._reporter.profiled(self._profile)
        return loss

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's ``eval_batch``."""
        if self.dynmo is not None:
            self._require_block("eval_batch")
            self._layers.refresh_tied_aliases(training=False)
            self.total_loss = self.total_additional_losses = None  # DeepSpeed would add outputs to an earlier loss
        evaluate = partial(super().eval_batch, *args, **kwargs)
        if self.dynmo is None or len(args) > 5 or kwargs.get("num_micro_batches") is not None:
            return evaluate()
        return self.repacker.data.evaluate_part(args[0] if args else kwargs.get("data_iter"), evaluate)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's ``save_checkpoint``, atomically, with what loading at another partition needs. Collective.

        Raises:
            CheckpointError: on every rank; the checkpoints that were there are as they were.
        """
        if self.dynmo is not None:
            self._require_block("save_checkpoint")
        arguments = (save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)
        return bool(super().save_checkpoint(*arguments)) if self.dynmo is None else checkpoint.save(self, *arguments)

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
            found: tuple[str | None, dict[str, Any] | None] = super().load_checkpoint(
                load_dir, tag, *flags, custom_load_fn
            )
            return found
        self._require_block("load_checkpoint")
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn: a pipeline's layers are loaded one by one, as in DeepSpeed")
        return checkpoint.load(self, load_dir, tag, checkpoint.LoadOptions(*flags))

    def allowed(self, partition: Sequence[int]) -> tuple[int, ...]:
        """The nearest partition that ``dynmo.keep_together`` allows: ``partition``, or another one, which is logged."""
        nearest = self._layer_groups.nearest(partition)
        if nearest != tuple(partition):
            try:
                self._layer_groups.check(partition)
            except PartitionError as error:
                self._reporter.inform(f"DynMo: goes to {list(nearest)}, since {error}")
        return nearest

    def start_at(self, partition: Sequence[int]) -> None:
        """Go to the partition that training begins at. Called once, by :func:`ds_dynmo.initialize`. Collective."""
        self._comm.enter("initialize")
        self._go_to(
            check_partition(partition, self._layers.num_layers, self.num_stages), reason="initial", decides=False
        )

    # -- a batch --------------------------------------------------------------------------------------

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """Run a batch, training or evaluation; every layer draws from a stream of its own."""
        if self.dynmo is None:
            super()._exec_schedule(pipe_schedule)
            return
        training = torch.is_grad_enabled()
        with ExitStack() as around:
            if self._streams is not None:
                first = self.repacker.data.first_of_batch if training else 0
                numbers = self._layers.random_streams()
                batch = self._streams.batch(
                    self.module, numbers, step=self.global_steps, training=training, first_micro_batch=first
                )
                around.enter_context(batch)
            around.enter_context(self._instructions_in_force(training))
            super()._exec_schedule(pipe_schedule)
        self._schedule_ran = True

    @contextmanager
    def _instructions_in_force(self, training: bool) -> Iterator[None]:
        """While a schedule runs, ``_INSTRUCTION_MAP`` holds what carries it out; at other times it is the user's."""
        found = self._composed()
        if training and self._profiler.measures:
            found = instructions.marked(found, backward=self._prefix < self._layers.run.stop)
        if training and self._tracer is not None and self._tracer.records:
            found = self._tracer.recorded(found)
        on_engine = self.__dict__.get("_INSTRUCTION_MAP")
        self._INSTRUCTION_MAP = found
        try:
            yield
        finally:
            replaced = self._INSTRUCTION_MAP is not found
            if on_engine is None:
                del self._INSTRUCTION_MAP
            else:
                self._INSTRUCTION_MAP = on_engine
        if replaced:
            raise ConfigError("_INSTRUCTION_MAP was set on the engine while a batch ran: set it between two batches")

    def _composed(self) -> instructions.Instructions:
        """The instructions of a batch as they are at present, made anew only where one has changed."""
        present = dict(self._INSTRUCTION_MAP)
        if present != self._composed_of:
            self._composition = instructions.compose(
                present,
                self._layers,
                self._prefix,
                accumulates=self.using_bf16_optimizer,
                calls_back=bool(self._step_callbacks),
                streams=self._streams,
            )
            self._composed_of = present
        return self._composition

    def _batch_done(self) -> None:
        self.stage.optimizer.after_step()
        self._controller.batch_done(self.global_steps)
        batches = self._profiler.batches
        outcome, decision = self._controller.outcome_due(batches), self._controller.decision_due(batches)
        if not outcome and not decision:
            return
        try:
            self._profile_seconds = self._gather_profile()
        except (PartitionError, MigrationError) as error:
            if isinstance(error, MigrationError) and not error.harmless:
                raise
            self._stay(error)
            return
        assert self._profile is not None
        if outcome:
            self._reporter.measured(trigger.measured(self._profile, self._last_move_step), self.global_samples)
            self._controller.outcome_recorded()
        if decision and not self._waits_for_profile:
            reason = self._controller.reason or "interval"
            repacks = self.dynmo.enabled and self.dynmo.repack.enabled
            if not (repacks and self._repacked(reason)):
                self._rebalance_or_stay(reason, self._profile_seconds)

    def _repacked(self, reason: str) -> bool:
        """An automatic re-packing, where the planner finds that fewer ranks will do, or that more are needed."""
        try:
            return self.repacker.repack_if_better(reason)
        except (PartitionError, MigrationError) as error:
            if isinstance(error, MigrationError) and not error.harmless:
                raise
            self._reporter.warn(f"DynMo step {self.global_steps}: not re-packed: {error}")
            return False

    def _rebalance_or_stay(self, reason: str, profile_seconds: float) -> None:
        """An automatic decision: where none is possible, on every rank alike, training goes on as it is."""
        try:
            self._rebalance(reason, profile_seconds)
        except (PartitionError, MigrationError) as error:
            if isinstance(error, MigrationError) and not error.harmless:
                raise
            self._stay(error)

    def _stay(self, error: Exception) -> None:
        self._failure = error
        self._reporter.warn(f"DynMo step {self.global_steps}: no layer was moved: {error}")
        self._profiler.forget()
        self._controller.decided(moved=False)

    def _gather_profile(self) -> float:
        """Make the profile of what was measured, and return the seconds that it took here. Collective.

        Raises:
            PartitionError: a layer did not run; on every rank.
            MigrationError: a rank cannot tell what its layers cost; on every rank, harmless.
        """
        began = time.perf_counter()
        self._comm.enter("rebalance")
        table = layer_sizes.stage_costs(self._layers, self._profiler, self._state, self._move_seconds)
        self._comm.max_over_world(table)
        if layer_sizes.failed(table):
            raise MigrationError("a rank could not tell what its layers cost. No layer has moved", harmless=True)
        uses = self._layers.first_uses()
        self._profile = layer_sizes.profile_from(
            table, self._layers.placement, self.global_steps, self.micro_batches, uses
        )
        whole = self.repacker.of_whole_batch(self._profile)
        self._cost_model.profiled(whole, layer_sizes.move_seconds(table), self._layer_groups)
        self._move_seconds = 0.0
        self._profiler.forget()
        return time.perf_counter() - began

    def _train_until_profiled(self) -> float:
        """Train until there is a profile, decide nothing, and return the seconds that gathering it took. Collective."""
        self._comm.enter("rebalance")
        edge = self.is_first_stage() or self.is_last_stage()
        lacking = torch.tensor([float(edge and self.data_iterator is None)])
        if self._comm.max_over_world(lacking).item():
            raise MigrationError(
                "rebalance: there is no profile yet and no data to train on. Train a batch first", harmless=True
            )
        self._controller.request("by hand")
        self._failure, self._waits_for_profile = None, True
        try:
            while self._profile is None:
                self.train_batch()
                if self._failure is not None:
                    raise self._failure
        finally:
            self._waits_for_profile = False
            self._controller.decided(moved=False)  # whoever waited decides
        return self._profile_seconds

    # -- decide and migrate ---------------------------------------------------------------------------

    def _rebalance(self, reason: str, profile_seconds: float = 0.0) -> RebalanceReport:
        assert self._profile is not None
        began = time.perf_counter()
        self._comm.enter("rebalance")
        limit = self._memory_limit_bytes()
        try:
            decision = self._decide(self._profile, limit, automatic=reason not in ("initial", "by hand"))
        except (PartitionError, MigrationError):
            raise  # the same on every rank
        except Exception as error:  # a balancer of the user's own that fails here: the others have to hear of it
            logger.error(f"rank {self.global_rank} cannot decide where layers go: {error!r}")
            self._comm.agree(None)
            raise AssertionError("no plan cannot be agreed on") from error
        self._cost_model.decided(decision)
        decide_seconds = time.perf_counter() - began
        return self._go_to(
            decision.partition,
            reason=reason,
            decision=decision,
            profile_seconds=profile_seconds,
            decide_seconds=decide_seconds,
        )

    def _decide(self, profile: Profile, limit: int | None, *, automatic: bool) -> Decision:
        memory = trigger.memory_model(profile, limit, self.module.activation_checkpoint_interval)
        given = self._cost_model.decision_input(profile, tuple(self.partition), smoothed=automatic)
        tradeoff = self._cost_model.move_tradeoff(self._controller.batches_to_gain) if automatic else None
        if not self.dynmo.decentralized:
            return decide(given, self.dynmo, memory, tradeoff, self._layer_groups)
        costs, speeds = costs_and_speeds(given, self.dynmo)
        own_costs = [costs[index] for index in self._layers.indices]
        speed = speeds[self.stage_id] if speeds else 1.0
        proposed = decide_among_neighbours(
            own_costs, given.current, memory, self.stage_id, self._comm, speed=speed, groups=self._layer_groups
        )
        return accept_move(given, proposed, self.dynmo, memory, tradeoff, self._layer_groups)

    def _go_to(
        self,
        new: tuple[int, ...],
        *,
        reason: str,
        decides: bool = True,
        decision: Decision | None = None,
        profile_seconds: float = 0.0,
        decide_seconds: float = 0.0,
    ) -> RebalanceReport:
        """``decides``: what else was about to be decided no longer is."""
        plan = MigrationPlan.between(self.partition, new)
        check = partial(self._check_room, decided=decision is not None)
        if decision is None and self._profile is not None:
            decision = predict(self._cost_model.decision_input(self._profile, plan.old.boundaries, smoothed=False), new)
        began = time.perf_counter()
        moved_bytes = migrate(plan, self._migration_context(), check)
        if plan.moves:
            self._layers_moved()
        migrate_seconds = time.perf_counter() - began
        if plan.moves and self._profile is not None:
            self._cost_model.moved(self._profile, plan)
            self._move_seconds += migrate_seconds
        if decides:
            self._controller.decided(bool(plan.moves))
        elif plan.moves:
            self._controller.moved()
        report = rebalance_report(
            plan,
            decision,
            step=self.global_steps,
            reason=reason,
            bytes_moved=moved_bytes,
            seconds=(profile_seconds, decide_seconds, migrate_seconds),
            load_signals=tuple(layer.load_signal for layer in self._profile.layers) if self._profile else (),
        )
        self._reporter.rebalanced(report, self.global_samples)
        return report

    def _migration_context(self) -> MigrationContext:
        return MigrationContext(
            self.stage_id,
            self._layers,
            self._names,
            self._state,
            self.grid,
            self.device,
            self._comm,
            check=self.stage.optimizer.check,
            rebuilt=self.stage.optimizer.name_parameters,
        )

    def _use_replicas(self) -> None:
        """Connect the layers of this stage, others than before, to their replicas."""
        replicas.use_replicas(self._layers.every_module(), self.grid.get_data_parallel_group())

    def _layers_moved(self) -> None:
        """Make everything in the engine that depends on the stage's layers right again."""
        self._use_replicas()
        self._last_move_step = self.global_steps
        self._profiler.forget(batches_too=True)
        self.reset_activation_shape()
        for buffers in self.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)
        self.loss = self.loss.detach() if isinstance(self.loss, torch.Tensor) else None  # its graph holds old layers
        debug_clear_module_and_param_names()
        debug_extract_module_and_param_names(self.module)
        self._set_instructions()

    def _check_room(self, plan: MigrationPlan, *, decided: bool = False) -> None:
        """Before a byte moves: does every rank have the memory that ``plan`` takes while it is carried out? Collective.

        Args:
            decided: from a profile, which says what stages need as they are, activations too.

        Raises:
            MigrationError: harmless, on every rank: the plan takes one above ``memory_limit``.
        """
        limit = self._memory_limit_bytes()
        if limit is None:
            return
        table = self._comm.max_over_world(layer_sizes.held_table(self._layers, self._state))
        if layer_sizes.failed(table):
            raise MigrationError("a rank could not tell what its layers hold. No layer has moved", harmless=True)
        held, static = layer_sizes.held_from(table)
        present = [sum(static[index] for index in plan.old.layers_of(stage)) for stage in plan.old.stages]
        if decided and self._profile is not None:
            memory = trigger.memory_model(self._profile, limit, self.module.activation_checkpoint_interval)
            assert memory is not None
            runs = map(plan.old.run_of, plan.old.stages)
            present = [memory.stage_bytes(stage, run.start, run.stop) for stage, run in enumerate(runs)]
        found = partitioners.overflow(plan, held, self._layers.first_uses(), limit, present)
        if found is not None:
            raise MigrationError(
                f"from {plan.old} to {plan.new}, {found} (dynmo.memory_limit). No layer has moved",
                harmless=True,
            )

    def _memory_limit_bytes(self) -> int | None:
        """The least of all ranks' limits; what a fraction is a fraction of may differ between them."""
        limit = self.dynmo.memory_limit
        if not isinstance(limit, float):
            return limit
        mine = torch.tensor([-limit * get_accelerator().total_memory()], dtype=torch.float64)
        return int(-self._comm.max_over_world(mine).item())

    # -- frozen layers --------------------------------------------------------------------------------

    def _agree_on_trainable(self, what: str) -> None:
        """Every rank learns which layers of the model have something to train."""
        self._comm.enter(what)
        flags = self._comm.max_over_world(
            layer_sizes.per_layer(self._layers, lambda module: float(frozen_prefix.trains(module)))
        )
        trainable = flags.bool().tolist()
        frozen_prefix.check_ties(self._layers, trainable)
        tied = frozen_prefix.tied_weights_that_train(self._layers)
        if tied.numel():
            self._comm.max_over_world(tied)
            frozen_prefix.check_tied_weights(self._layers, tied.tolist())
        prefix = frozen_prefix.frozen_prefix(trainable)
        instructions.check(self._INSTRUCTION_MAP, prefix, partitioned=self.is_pipe_partitioned)
        self.stage.optimizer.refit(self.partition)
        self._trainable, self._tied_trainable, self._prefix = trainable, tied.tolist(), prefix
        self._set_instructions()

    def _optimizer_changed(self, _: None) -> None:
        self._origin = self._origin.with_optimizer(self)
        self.repacker.optimizer_changed()
        self._set_instructions()

    def _check_trainable(self) -> None:
        if not self.stage.optimizer.is_current():
            raise ConfigError(
                "parameters were frozen or unfrozen: call engine.model_changed(reason) on every rank afterwards, so "
                "that the optimizer stops or starts to update them"
            )
        frozen_prefix.check_unchanged(self._layers, self._trainable, self._tied_trainable)
        instructions.check(self._INSTRUCTION_MAP, self._prefix, partitioned=self.is_pipe_partitioned)

    def _set_instructions(self) -> None:
        self._composed_of = None


def _has_events() -> bool:
    return get_accelerator().device_name() != "cpu"

"""One batch, from its data to a move: train, profile, decide, migrate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ds_dynmo.engine.decide.cycle import Request
from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.decide.reporter import Reporter
from ds_dynmo.engine.measure.profiler import Profiler
from ds_dynmo.engine.measure.trace import Tracer
from ds_dynmo.engine.resize.repacker import Repacker
from ds_dynmo.engine.run.executor import REPLACED, Executor
from ds_dynmo.engine.run.trainable import TrainableLayers
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import ConfigError, MigrationError, PartitionError, raise_unless_harmless


class TrainingStep:
    """Trains a batch, then rebalances or re-packs if that is due.

    Args:
        tracer: None: batches are not traced.
    """

    def __init__(
        self,
        stage: StageContext,
        trainable: TrainableLayers,
        executor: Executor,
        profiler: Profiler,
        rebalancer: Rebalancer,
        repacker: Repacker,
        reporter: Reporter,
        tracer: Tracer | None,
    ) -> None:
        self._stage, self._trainable, self._executor, self._profiler = stage, trainable, executor, profiler
        self._rebalancer, self._repacker, self._reporter, self._tracer = rebalancer, repacker, reporter, tracer

    def run(self, train: Callable[[], Any]) -> Any:
        """Train a batch by ``train``; then re-pack or rebalance, if a decision is due. Collective.

        Raises:
            ConfigError: layers were frozen without ``engine.model_changed``, or an error ended the batch before;
                nothing was trained. Or ``train`` did not run the engine's batch.
        """
        self._executor.check()
        with self._tracer.batch() if self._tracer is not None else nullcontext():
            self._trainable.check()
            self._rebalancer.begin_move()
            self._stage.layers.tied_aliases.refresh(training=True)
            try:
                loss = self._train(train)
            except BaseException:
                self._rebalancer.interrupt_move()
                raise
            self._stage.optimizer.after_step()
            self._rebalancer.end_move()
            request = self._rebalancer.after_batch()
            if request is None or not self._repack(request):
                if request is not None:
                    self._rebalancer.decide_and_move_or_stay(request)
                self._rebalancer.post_profile()
            self._rebalancer.report_profile()
            return loss

    def _train(self, train: Callable[[], Any]) -> Any:
        """Train a batch, and profile it if that is due."""
        self._executor.ran = False
        if self._rebalancer.cycle.profiles_batch(self._stage.counters.steps + 1):
            with self._executor.profiled():
                loss = train()
        else:
            with self._profiler.timed() if self._rebalancer.cycle.warm else nullcontext():
                loss = train()
        if not self._executor.ran:
            raise ConfigError(REPLACED)
        return loss

    def _repack(self, request: Request) -> bool:
        """Continue with fewer ranks if the planner finds that better; return whether it did."""
        if not (self._stage.config.enabled and self._stage.config.repack.enabled):
            return False
        try:
            return self._repacker.repack_if_better(request)
        except (PartitionError, MigrationError) as error:
            raise_unless_harmless(error)
            self._reporter.warn(f"DynMo step {self._stage.counters.steps}: not re-packed: {error}")
            return False

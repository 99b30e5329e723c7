"""The context of a batch's schedule: the functions of its instructions, and the random numbers of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ds_dynmo.engine.deepspeed.buffers import sent_as_they_are
from ds_dynmo.engine.deepspeed.instruction_map import Instructions, checked_instructions, instructions_in_force
from ds_dynmo.engine.deepspeed.module import LayerWrapper, layers_through
from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline
from ds_dynmo.engine.events import LayersMoved
from ds_dynmo.engine.measure.profiler import Profiler
from ds_dynmo.engine.measure.trace import Tracer
from ds_dynmo.engine.run import instructions
from ds_dynmo.engine.run.frozen_prefix import has_backward_work
from ds_dynmo.engine.run.random_streams import LayerStreams
from ds_dynmo.engine.run.trainable import TrainableLayers
from ds_dynmo.engine.split.scheduled import ScheduledBatches
from ds_dynmo.engine.stage import StageContext


class Executor:
    """Installs a batch's instructions, layer wrappers and random streams around DeepSpeed's ``_exec_schedule``.

    Attributes:
        ran: whether a schedule has run in this batch; the code that starts a batch sets it to False.

    Args:
        engine: DeepSpeed's engine, whose schedule runs.
        tracer: None: batches are not traced.
        streams: random numbers per layer; None: layers use the rank's generators.
    """

    def __init__(
        self,
        engine: DeepSpeedPipeline,
        stage: StageContext,
        trainable: TrainableLayers,
        profiler: Profiler,
        tracer: Tracer | None,
        streams: LayerStreams | None,
    ) -> None:
        self._engine, self._stage, self._trainable = engine, stage, trainable
        self._profiler, self._tracer, self._streams = profiler, tracer, streams
        self._composed_for: tuple[dict[type, Any], int, bool, bool] | None = None
        self._composition: Instructions = {}
        self._scheduled = ScheduledBatches(engine, stage)
        stage.schedule.is_profiled = lambda: profiler.measures
        self.ran = False
        stage.around_schedule.add(self._around)
        stage.layers_moved.subscribe("instructions depend on the stage's layers", self._recompose)
        stage.optimizer.changed.subscribe("instructions depend on how it takes gradients", self._recompose)

    def profiled(self) -> AbstractContextManager[None]:
        """Measure the layers of the batch inside."""
        return self._profiler.batch(self._engine.module, self._stage.layers.indices, self._engine.is_last_stage())

    def before_step(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on this rank in every batch, between the reduction of gradients and the step."""
        self._stage.before_step.append(callback)
        self._recompose()

    @contextmanager
    def _around(self, training: bool) -> Iterator[None]:
        steps = self._stage.schedule.running if training else None
        with (
            self._stage.compiled.batch(self._stage.layers.modules_that_run()),
            layers_through(self._engine.module, self._wrappers(training)),
            sent_as_they_are(self._engine),
            self._scheduled.batch(steps) if steps is not None else nullcontext(),
            instructions_in_force(self._engine, self._instructions(training, steps is not None)),
        ):
            yield
        self.ran = True

    def _wrappers(self, training: bool) -> list[LayerWrapper]:
        """Return the wrappers of layers, the innermost first: the profiler, so that it does not time random streams."""
        wrappers: list[LayerWrapper] = [self._profiler.wrap] if training and self._profiler.measures else []
        if self._streams is not None:
            numbers, step = self._stage.layers.random_streams(), self._stage.counters.steps
            self._streams.begin(numbers, step=step, training=training)
            wrappers.append(self._streams.wrap)
        return wrappers

    def _instructions(self, training: bool, scheduled: bool) -> Instructions:
        """Return the instructions of a batch: the composed ones, within marks of the profiler and of the trace."""
        composed = self._composed(scheduled)
        self._scheduled.gradients.observe = self._profiler.deferred if self._profiler.measures else None
        if training and self._profiler.measures:
            backward = has_backward_work(self._stage.layers.indices, self._trainable.prefix)
            composed = instructions.marked(composed, self._profiler, backward=backward)
        if training and self._tracer is not None and self._tracer.records:
            composed = self._tracer.recorded(composed)
        return self._stage.deferred_step.polled(composed) if training else composed

    def _composed(self, scheduled: bool) -> Instructions:
        """Compose the instructions of a batch; again only if something has changed."""
        present, prefix = dict(checked_instructions(self._engine)), self._trainable.prefix
        step = self._stage.deferred_step
        if (present, prefix, scheduled, step.is_deferred) != self._composed_for:
            self._composition = instructions.compose(
                present,
                self._stage.layers,
                prefix,
                accumulates=self._engine.using_bf16_optimizer,
                around_step=step.around_step if step.is_deferred else None,
                callbacks=self._stage.before_step,
                streams=self._streams,
                flags=self._stage.gradient_flags,
                scheduled=self._scheduled if scheduled else None,
            )
            self._composed_for = present, prefix, scheduled, step.is_deferred
        return self._composition

    def _recompose(self, _: LayersMoved | None = None) -> None:
        self._composed_for = None
        self._scheduled.forget_shapes()

"""Run a batch: the actions of a schedule, one after the other, and then the three instructions at its end.

An action is a pass of one micro-batch through one chunk of layers. All that depends on the pass (random streams,
deferred weight gradients, measurements, the trace, messages) is told the chunk and the micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe import schedule as deepspeeds
from torch.autograd.graph import get_gradient_edge

from ds_dynmo.engine.comm.links import LinkPlan, Links, Post
from ds_dynmo.engine.comm.message_forms import Content, Lane, MessageForm, MessageKind
from ds_dynmo.engine.comm.slices import MessageSlices
from ds_dynmo.engine.deepspeed import passes
from ds_dynmo.engine.deepspeed.instruction_map import checked_instructions
from ds_dynmo.engine.deepspeed.module import LayerWrapper
from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline
from ds_dynmo.engine.measure.profiler import Profiler
from ds_dynmo.engine.measure.trace import Tracer
from ds_dynmo.engine.run import messages, split_modules
from ds_dynmo.engine.run.chunks import Chunk, HeldPass
from ds_dynmo.engine.run.data_check import DataCheck
from ds_dynmo.engine.run.hidden_changes import CountHiddenChanges
from ds_dynmo.engine.run.link_plans import evaluation_plan, link_plan
from ds_dynmo.engine.run.random_streams import LayerStreams
from ds_dynmo.engine.run.trainable import TrainableLayers
from ds_dynmo.engine.run.weight_gradients import Pass, WeightGradients
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import ConfigError
from ds_dynmo.schedules import Action, Kind, first_batch
from ds_dynmo.schedules.forward_only import forward_orders, forward_place
from ds_dynmo.unmarked import unmarked

_logger = logging.getLogger("DynMo")
_NOTHING = nullcontext()
REPLACED = (
    "train_batch or _exec_schedule was replaced on the engine by a function that does not call the engine's own "
    "_exec_schedule: a batch ran without what moving layers needs. Call it, or override it in a class given as "
    "engine_class"
)
UNFINISHED = (
    "a batch ended in an error on this rank: gradients and messages of its passes may still be there, so another one "
    "would be wrong. Resume the job from its last checkpoint; if the data ended, give an iterator that goes on, such "
    "as deepspeed.utils.RepeatingLoader(loader)"
)


class Executor:
    """Runs the batches of one stage.

    Attributes:
        ran: whether all of a batch has run; the code that starts one sets it to False.

    Args:
        engine: DeepSpeed's engine.
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
        self._slices = MessageSlices(stage.comm.grid) if engine.is_pipe_partitioned else None
        as_sent = self._slices.content if self._slices is not None else None
        self._links = Links(stage.forms, self._connect, engine.device, as_sent)
        self._data = DataCheck(stage)
        self._gradients = WeightGradients()
        self._planned: tuple[Any, ...] = ()  # schedule, costs and stage of the latest plan
        self._plan: LinkPlan = {}
        self._logged = self._told_of_strides = False
        self.ran = False
        self._unfinished = False  # whether a batch may have left gradients or messages
        stage.schedule.is_profiled = lambda: profiler.measures
        # of the running batch:
        self._training = True
        self._first_number = 0  # of its first micro-batch, counted from the start of the run
        self._inside: frozenset[int] = frozenset()  # boundaries between two chunks of one stage
        self._split: frozenset[Pass] = frozenset()  # passes whose backward part is in two
        self._held: dict[Pass, HeldPass] = {}
        self._handed: dict[tuple[Lane, int], tuple[list[torch.Tensor], MessageForm]] = {}  # within this stage
        self._loaded: dict[int, Any] = {}  # inputs that were read ahead, by micro-batch
        self._labels: dict[int, Any] = {}  # likewise

    def profiled(self) -> AbstractContextManager[None]:
        """Measure the layers of the batch inside."""
        return self._profiler.batch(self._engine.module, self._stage.chunks.holds_last)

    # -- a batch --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse another batch after one that an error ended.

        Raises:
            ConfigError: it may have left gradients or messages.
        """
        if self._unfinished:
            raise ConfigError(UNFINISHED)

    def train(self, micro_batches: int) -> None:
        """Run a training batch, and the optimizer's step."""
        schedule, costs = self._stage.schedule.next(self._stage.placement, micro_batches)
        here = self._stage.comm.here.stage
        if schedule.num_chunks > schedule.num_stages and not self._stage.forms.are_known(training=True):
            schedule = first_batch(schedule)
        if self._planned != (schedule, costs, here):
            self._planned, self._plan = (schedule, costs, here), link_plan(schedule, here, costs)
        with (
            self._reading(micro_batches, training=True),
            self._batch(schedule.owners, self._plan, training=True),
            self._splitting(schedule.orders[here]),
        ):
            for action in schedule.orders[here]:
                self._carry_out(action)
                self._stage.deferred_step.poll()
            self._end()
        self._stage.deferred_step.run(self._stage.timeline)
        self._over()

    def evaluate(self, micro_batches: int) -> None:
        """Run the forward passes of an evaluation."""
        owners, here = self._stage.placement.owners, self._stage.comm.here.stage
        several = len(owners) > self._stage.placement.num_stages
        place = forward_place(owners, one_by_one=several and not self._stage.forms.are_known(training=False))
        orders = forward_orders(owners, micro_batches, place)
        plan = evaluation_plan(owners, orders, here, place)
        with self._reading(micro_batches, training=False), self._batch(owners, plan, training=False):
            for action in orders[here]:
                self._carry_out(action)
        self._over()

    @contextmanager
    def _batch(self, owners: tuple[int, ...], plan: LinkPlan, *, training: bool) -> Iterator[None]:
        self._unfinished = training
        stage, engine = self._stage, self._engine
        self._training = training
        self._inside = frozenset(n for n, (one, next_one) in enumerate(pairwise(owners)) if one == next_one)
        self._first_number = passes.begin_batch(engine)
        dynamic = engine.dynamic_shape
        try:
            with (
                stage.compiled.batch(stage.layers.modules_that_run()),
                stage.chunks.running(self._wrappers(training)) as self._chunks,
                self._links.batch(plan, training=training, dynamic=dynamic),
            ):
                yield
        finally:
            self._held, self._handed = {}, {}
            self._split = frozenset()

    def _over(self) -> None:
        """Note that all of a batch has run, the optimizer's step too."""
        self.ran, self._unfinished = True, False

    def _connect(self) -> Post:
        return self._stage.comm.groups.neighbours(loop=self._stage.placement.shape == "loop").post

    def _wrappers(self, training: bool) -> list[LayerWrapper]:
        """Return the wrappers of layers, the innermost first. The profiler does not time random streams."""
        wrappers: list[LayerWrapper] = [self._watched] if training else []
        if training and self._profiler.measures:
            wrappers.append(self._profiler.wrap)
        if self._streams is not None:
            streams, step = self._stage.layers.random_streams(), self._stage.counters.steps
            self._streams.begin(streams, step=step, training=training)
            wrappers.append(self._streams.wrap)
        return wrappers

    def _watched(self, index: int, layer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Let the ``forward_fn`` of a tied layer defer weight gradients too: it runs outside of the module."""
        spec = self._stage.layers.spec(index)
        if not isinstance(spec, TiedLayerSpec) or spec.forward_fn is None:
            return layer
        return split_modules.watched(layer, self._stage.layers.modules_that_run()[index])

    @contextmanager
    def _splitting(self, order: Sequence[Action]) -> Iterator[None]:
        """Let layers defer the weight gradients of the passes that ``order`` splits."""
        self._split = frozenset((chunk, batch) for kind, chunk, batch in order if kind == Kind.INPUT_GRADIENT)
        if not self._split:
            yield
            return
        self._gradients.observe = self._profiler.deferred if self._profiler.measures else None
        modules = [module for layer in self._stage.layers.modules_that_run().values() for module in layer.modules()]
        with self._gradients.splitting(modules):
            yield
            if not self._logged:
                self._log_layers_without_deferred_gradients()

    def _carry_out(self, action: Action) -> None:
        kind, number, micro_batch = action
        chunk = self._chunks[number]
        self._stage.chunks.activate(chunk)
        if kind == Kind.FORWARD:
            self._forward(chunk, action)
        elif kind == Kind.WEIGHT_GRADIENT:
            self._weight_gradient(chunk, micro_batch)
        else:
            self._backward(chunk, action)

    # -- passes ---------------------------------------------------------------------------------------

    def _forward(self, chunk: Chunk, action: Action) -> None:
        micro_batch, engine = action.micro_batch, self._engine
        held = HeldPass()
        if chunk.is_first or chunk.number == engine.num_stages - 1:
            inputs = self._load(micro_batch)
        self._unfinished = self._training or engine.num_stages > 1
        if not chunk.is_first:
            tensors, form = self._receive(Lane(MessageKind.ACTIVATION, chunk.number - 1), micro_batch)
            inputs = messages.arranged(held.entrance.enter(tensors, form), form)
        is_split = (chunk.number, micro_batch) in self._split
        with (
            self._phase("forward", "forward", micro_batch, chunk.number),
            self._measured(Kind.FORWARD, chunk),
            self._drawing(micro_batch, recomputes=False),
            self._gradients.forward_pass(split=True) if is_split else _NOTHING,
        ):
            outputs = passes.forward(engine, inputs, self._first_number + micro_batch)
            if chunk.is_last:
                held.loss = passes.loss_of(engine, outputs, self._labels.pop(micro_batch, None))
        if not chunk.is_last:
            self._send_activations(chunk, micro_batch, outputs, held)
        if self._goes_back(chunk):
            self._held[chunk.number, micro_batch] = held

    def _backward(self, chunk: Chunk, action: Action) -> None:
        kind, number, micro_batch = action
        held = self._held.pop((number, micro_batch), HeldPass())
        gradients: list[torch.Tensor] = []
        if not chunk.is_last:
            gradients, _ = self._receive(Lane(MessageKind.GRADIENT, number), micro_batch, held.gradients)
        if self._goes_back(chunk):
            in_two = kind == Kind.INPUT_GRADIENT
            what = "input gradient" if in_two else "backward"
            with (
                self._phase("backward", what, micro_batch, number),
                self._measured(kind, chunk),
                self._drawing(micro_batch, recomputes=True),
                self._gradients.first_part((number, micro_batch)) if in_two else _NOTHING,
            ):
                self._run_backward(held, gradients)
            self._accumulate_uses()
        if not chunk.is_first:
            self._send_gradients(chunk, micro_batch, held)

    def _run_backward(self, held: HeldPass, gradients: Sequence[torch.Tensor]) -> None:
        engine = self._engine
        if held.loss is not None:
            passes.backward_from_loss(engine, held.loss)
        else:
            pairs = [(edge, grad) for edge, grad in zip(held.outputs, gradients, strict=True) if edge is not None]
            if pairs:
                passes.backward_from(engine, [edge for edge, _ in pairs], [gradient for _, gradient in pairs])

    def _weight_gradient(self, chunk: Chunk, micro_batch: int) -> None:
        if not self._goes_back(chunk):
            return
        deferred = self._gradients.second_part((chunk.number, micro_batch))
        with (
            self._phase("weight gradient", "weight gradient", micro_batch, chunk.number),
            self._measured(Kind.WEIGHT_GRADIENT, chunk),
        ):
            if deferred:
                passes.backward_from_each(self._engine, deferred.roots())
                self._accumulate_uses()

    def _accumulate_uses(self) -> None:
        """Add what tied aliases got in a pass to their sums, as BF16_Optimizer does for all other parameters."""
        aliases = self._stage.layers.tied_aliases
        if aliases and self._engine.using_bf16_optimizer:
            aliases.accumulate_gradients(passes.accumulation_dtype(self._engine))

    def _goes_back(self, chunk: Chunk) -> bool:
        """Return whether a backward pass has work in this chunk: it reaches behind the frozen prefix."""
        return self._training and chunk.layers.stop > self._trainable.prefix

    def _measured(self, kind: Kind, chunk: Chunk) -> AbstractContextManager[None]:
        if not (self._training and self._profiler.measures):
            return _NOTHING
        return self._profiler.measure_pass(kind, chunk.layers, has_loss=chunk.is_last)

    def _drawing(self, micro_batch: int, *, recomputes: bool) -> AbstractContextManager[None]:
        """Let the layers of the pass inside draw from the random streams of its micro-batch."""
        return _NOTHING if self._streams is None else self._streams.running(micro_batch, recomputes=recomputes)

    def _phase(
        self, category: str, what: str, micro_batch: int, chunk: int | None = None
    ) -> AbstractContextManager[None]:
        """Show a part of an action in a trace."""
        if self._tracer is None or not self._tracer.records:
            return _NOTHING
        return self._tracer.phase(category, what, micro_batch, chunk)

    # -- data and messages ----------------------------------------------------------------------------

    @contextmanager
    def _reading(self, micro_batches: int, *, training: bool) -> Iterator[None]:
        """Read the data of the batch inside, and compare what the stages read where that is due."""

        def read_ahead() -> None:
            self._stage.chunks.loss_stage = self._stage.placement.owners[-1]
            try:
                self._loaded[0] = self._load(0)
            except Exception as error:  # its pass raises it: others are told what this stage has read
                self._loaded[0] = error

        try:
            measures = training and self._profiler.measures
            with self._data.batch(micro_batches, training=training, profiled=measures, load=read_ahead):
                yield
        finally:
            self._loaded, self._labels = {}, {}

    def _load(self, micro_batch: int) -> Any:
        """Read a micro-batch, on the first stage and the last, for the first of their chunks.

        So where there are no more data, both know before they have run a pass. Labels are kept for the last chunk.
        """
        if micro_batch in self._loaded:
            if isinstance(loaded := self._loaded.pop(micro_batch), Exception):
                raise loaded
            return loaded
        with self._phase("load", "load", micro_batch):
            inputs, labels = passes.load_micro_batch(self._engine)
        if self._stage.chunks.holds_last:
            self._labels[micro_batch] = labels
        return inputs

    def _send_activations(self, chunk: Chunk, micro_batch: int, outputs: Any, held: HeldPass) -> None:
        last_layer = chunk.layers[-1]
        tensors = messages.sendable(outputs, last_layer)
        goes_back = self._goes_back(chunk)
        flags = [goes_back and tensor.requires_grad for tensor in tensors]
        lane = Lane(MessageKind.ACTIVATION, chunk.number)
        form = self._agreed(lane, MessageForm.of(tensors, flags, in_tuple=isinstance(outputs, tuple)), last_layer)
        held.gradients = form.gradients
        held.outputs = [
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor, flag in zip(tensors, form.flags)
            if flag
        ]
        self._send(lane, micro_batch, form.packed(tensors), form)

    def _send_gradients(self, chunk: Chunk, micro_batch: int, held: HeldPass) -> None:
        gradients, lane = held.entrance.gradients(chunk.layers[-1]), Lane(MessageKind.GRADIENT, chunk.number - 1)
        form = self._agreed(lane, MessageForm.of_gradients(gradients), chunk.layers[-1])
        self._send(lane, micro_batch, messages.packed_gradients(gradients, form), form)

    def _agreed(self, lane: Lane, form: MessageForm, last_layer: int) -> MessageForm:
        """Return the form in which a message is sent: the one that both sides know, if there is one."""
        known = None if self._engine.dynamic_shape else self._stage.forms.get(self._training, lane)
        agreed = messages.checked(form, known, last_layer)
        if agreed.strides != form.strides and not self._told_of_strides:
            self._told_of_strides = True
            _logger.warning(messages.other_strides(form, agreed, lane.kind, last_layer))
        return agreed

    def _send(self, lane: Lane, micro_batch: int, tensors: list[torch.Tensor], form: MessageForm) -> None:
        if lane.boundary in self._inside:
            if lane.kind is MessageKind.ACTIVATION:  # gradients are in memory of their own
                tensors = [unmarked(tensor).clone() for tensor in tensors]
            self._handed[lane, micro_batch] = tensors, form
            return
        with self._message("send", lane, micro_batch):
            self._links.send(lane, self._slices.own(tensors) if self._slices else tensors, form)

    def _receive(
        self, lane: Lane, micro_batch: int, gradients: Content | None = None
    ) -> tuple[list[torch.Tensor], MessageForm]:
        """Take what another chunk sent.

        Args:
            gradients: shapes and dtypes of a gradient message.
        """
        if lane.boundary in self._inside:
            sent, form = self._handed.pop((lane, micro_batch))
        else:
            with self._message("receive", lane, micro_batch):
                sent, form = self._links.receive(lane, gradients)
                if self._slices is not None:
                    sent = self._slices.whole(sent, form.content)
        return form.unpacked(sent), form

    def _message(self, category: str, lane: Lane, micro_batch: int) -> AbstractContextManager[None]:
        """Show a message in a trace and in DeepSpeed's timers."""
        what = lane.kind.name.lower()
        phase = self._phase(category, what, micro_batch, lane.boundary)
        timer = passes.message_timer(self._engine, category, what)
        return phase if timer is None else _timed(phase, timer)

    # -- the end of a batch ---------------------------------------------------------------------------

    def _end(self) -> None:
        """Reduce the gradients, and step: by DeepSpeed's functions or the user's."""
        stage, engine = self._stage, self._engine
        instructions = checked_instructions(engine)
        with stage.timeline.phase("reduce", "reduce tied gradients"):
            stage.layers.add_uses(passes.gradient_attribute(engine), accumulated=engine.using_bf16_optimizer)
            instructions[deepspeeds.ReduceTiedGrads](engine)
        with stage.timeline.phase("reduce", "reduce gradients"):
            instructions[deepspeeds.ReduceGrads](engine)
        with CountHiddenChanges() if stage.deferred_step.is_deferred else _NOTHING:
            for callback in stage.before_step:
                callback()
        step: Callable[[], None] = partial(instructions[deepspeeds.OptimizerStep], engine)
        if not stage.deferred_step.keep(step):
            with stage.timeline.phase("optimizer step", "optimizer step"):
                step()

    def _log_layers_without_deferred_gradients(self) -> None:
        """Log, once, the layers of this stage that have weight matrices but defer no gradient."""
        self._logged = True
        here = self._stage.comm.here
        if not self._stage.config.log or here.replica or here.tp_rank:
            return
        without = [
            f"{index} ({type(layer).__name__})"
            for index, layer in self._stage.layers.modules().items()
            if index > 0 and self._defers_nothing(layer)  # layer 0 sends no gradient back
        ]
        if without:
            _logger.info(
                f"schedule: backward passes of layer {', '.join(without)} always run in one: "
                "see docs/schedules.md, split backward passes"
            )

    def _defers_nothing(self, layer: Any) -> bool:
        weights = [weight for weight in layer.parameters() if weight.requires_grad and weight.ndim > 1]
        return bool(weights) and not any(weight in self._gradients.hidden for weight in weights)


@contextmanager
def _timed(phase: AbstractContextManager[None], timer: Any) -> Iterator[None]:
    with phase:
        timer.start()
        yield
        timer.stop()

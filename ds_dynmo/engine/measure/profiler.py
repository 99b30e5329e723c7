"""Measure the forward and backward seconds of every layer, inside the running pipeline, on the user's own batches.

A pass (one micro-batch forward or backward) is a list of *marks*: a time, and the layer that owns the time from there
on.

- Forward: a mark before and after each layer.
- Backward: a mark when the gradient of a layer's output is complete (a tensor hook). The last mark is set when the
  gradient of the stage's or segment's input is complete.

So recomputation under activation checkpointing, reentrant or not, counts as its layer's backward seconds. Time between
layers, such as the bookkeeping of checkpointing, is no layer's, nor is what a layer does for all of its stage; the loss
counts as the last layer's.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_dynmo.engine.measure.saved_bytes import loss_through, saved_for_backward, state_of
from ds_dynmo.schedules import Kind
from ds_dynmo.stage_work import measured_by
from ds_dynmo.torch_private import version_of
from ds_dynmo.unmarked import register_hook

Mark = tuple[Any, int | None]
_RECENT = 7  # batches, profiled or not, whose median counts as the seconds of a batch
Layer = Callable[[Any], Any]


class CpuClock:
    """Seconds of a monotonic clock."""

    def now(self) -> Any:
        return time.perf_counter()

    def seconds_between(self, times: Sequence[Any]) -> list[float]:
        """Return the seconds from each time to the next."""
        return [after - before for before, after in zip(times, times[1:])]


class EventClock:
    """Events on the accelerator's current stream, read at the end, so that nothing synchronises per layer."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def now(self) -> Any:
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, times: Sequence[Any]) -> list[float]:
        """Return the seconds from each time to the next, once the last has passed."""
        if times:
            times[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in zip(times, times[1:])]


def device_clock() -> CpuClock | EventClock:
    """Return the clock that DeepSpeed's accelerator asks for: the host's on a CPU and where events cannot be timed."""
    return CpuClock() if get_accelerator().use_host_timers() else EventClock(get_accelerator())


_Seconds = dict[int, list[float]]


def _seconds_by_kind() -> dict[Kind, _Seconds]:
    return {kind: defaultdict(list) for kind in Kind}


@dataclass
class Samples:
    """The measurements of one stage by layer number; lists have one entry per micro-batch.

    Attributes:
        seconds: per kind of pass; a micro-batch's backward pass is in one list, or in two.
        deferred_bytes: that a layer holds between the two parts, per micro-batch.
        loss_bytes: that the loss saves for its backward pass, on the last stage, per micro-batch.
    """

    seconds: dict[Kind, _Seconds] = field(default_factory=_seconds_by_kind)
    deferred_bytes: dict[int, int] = field(default_factory=dict)
    activation_bytes: dict[int, int] = field(default_factory=dict)
    input_bytes: dict[int, int] = field(default_factory=dict)
    output_bytes: dict[int, int] = field(default_factory=dict)
    loss_bytes: int = 0
    batches: int = 0

    def forward_seconds(self, index: int) -> float:
        """Return the :func:`typical` seconds per micro-batch."""
        return typical(self.forward[index])

    @property
    def forward(self) -> _Seconds:
        """Seconds of forward passes."""
        return self.seconds[Kind.FORWARD]

    @property
    def backward(self) -> _Seconds:
        """Seconds of backward passes in one."""
        return self.seconds[Kind.BACKWARD]

    def backward_seconds(self, index: int) -> float:
        """Return the :func:`typical` seconds per micro-batch; 0 for a layer without backward work.

        If every pass was in two parts, return the sum of both.
        """
        return typical(self.backward[index]) if self.backward[index] else sum(self.part_seconds(index))

    def part_seconds(self, index: int) -> tuple[float, float]:
        """Return the :func:`typical` seconds of the two parts; 0 if no pass was split."""
        first, second = (self.seconds[kind][index] for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT))
        return typical(first), typical(second)


def typical(seconds: Sequence[float]) -> float:
    """Average without the largest and the smallest eighth; of three values or more at least one of each is left out.

    It is a mean, because a stage takes the sum over its micro-batches: a layer with work in half of them costs half as
    much, which a median of many would miss. Stalls of the machine are in what is left out: no single value counts.

    >>> typical([1.0] * 3 + [50.0]), typical([0.0, 4.0, 0.0, 4.0]), typical([])
    (1.0, 2.0, 0.0)
    """
    cut = max(len(seconds) // 8, len(seconds) > 2)
    kept = sorted(seconds)[cut : len(seconds) - cut]
    return statistics.fmean(kept) if kept else 0.0


class Profiler:
    """Measures the layers of one stage during one batch at a time.

    Args:
        clock: a :class:`CpuClock` or :class:`EventClock`.
        size_every_pass: count the bytes saved for backward in every micro-batch and keep the maximum, instead of in the
            first micro-batch of a profile. This takes about 5% of a batch. It matters if memory is limited and layers
            do more work in some micro-batches than in others.

    Attributes:
        clock: as given.
        samples: the measurements of the present profile.
        measures: whether a batch is being measured.
    """

    def __init__(self, clock: Any, *, size_every_pass: bool = False) -> None:
        self.clock = clock
        self._size_every_pass = size_every_pass
        self.samples = Samples()
        self._recent: deque[tuple[Any, Any]] = deque(maxlen=_RECENT)  # begin and end of batches, by the clock
        self._last = -1  # layer of the chunk
        self._has_loss = False
        self.measures = False
        self._in_pass = False
        self._backward = False
        self._owner: int | None = None
        self._paused: list[int | None] = []  # owners to resume; the last is resumed first
        self._marks: list[Mark] = []
        self._passes: list[tuple[Kind, list[Mark]]] = []
        self._deferred_bytes: Counter[int] = Counter()  # of this pass
        self._entered: dict[int, torch.Tensor] = {}  # inputs of the stage or a segment in this pass

    def forget(self, *, batches_too: bool = False) -> None:
        """Start a new profile; ``batches_too``: discard the batch-time history as well."""
        self.samples = Samples()
        if batches_too:
            self._recent.clear()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the batch inside. The accelerator is asked only when :attr:`batch_seconds` is."""
        began = self.clock.now()
        yield
        self._recent.append((began, self.clock.now()))

    @property
    def batch_seconds(self) -> float:
        """The median over the latest batches, which ignores single stalls."""
        seconds: list[float] = [self.clock.seconds_between(batch)[0] for batch in self._recent]
        return statistics.median(seconds)

    @property
    def batches(self) -> int:
        """The number of batches in the present profile."""
        return self.samples.batches

    @contextmanager
    def batch(self, module: Any, has_loss: bool) -> Iterator[None]:
        """Measure the batch inside, whose layers run through :meth:`wrap`.

        Args:
            module: the PipelineModule.
            has_loss: whether this stage computes the loss.
        """
        self._passes, self.measures = [], True
        try:
            with self.timed(), loss_through(module, self._sized_loss) if has_loss else nullcontext(), measured_by(self):
                yield
        finally:
            self.measures = False
        self._entered = {}
        self._read()
        self.samples.batches += 1

    @contextmanager
    def measure_pass(self, kind: Kind, layers: Sequence[int], *, has_loss: bool) -> Iterator[None]:
        """Measure the pass of a micro-batch inside.

        Args:
            layers: of the chunk.
            has_loss: whether the loss follows.
        """
        self._last, self._has_loss = max(layers, default=-1), has_loss
        self._backward, self._marks, self._entered = kind is not Kind.FORWARD, [], {}
        self._deferred_bytes = Counter()
        begins_at_last = kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        self._mark(self._last if begins_at_last else None)
        self._in_pass = True
        try:
            yield
        finally:
            self._in_pass = False
        self._mark(None)
        self._passes.append((kind, self._marks))
        for index, held_bytes in self._deferred_bytes.items():
            self.samples.deferred_bytes[index] = max(self.samples.deferred_bytes.get(index, 0), held_bytes)
        self._backward = False

    def deferred(self, compute: Callable[[], torch.Tensor], held_bytes: int) -> Callable[[], torch.Tensor]:
        """Mark the deferred ``compute`` as work of the layer whose gradients are now computed.

        Args:
            held_bytes: of its inputs.
        """
        owner = self._owner
        if owner is None or not self._in_pass:
            return compute
        self._deferred_bytes[owner] += held_bytes

        def marked() -> torch.Tensor:
            if self._in_pass:
                self._mark(owner)
            return compute()

        return marked

    def pause(self) -> None:
        """Stop counting time for the current layer: it works for its whole stage."""
        self._paused.append(self._owner)
        if self._in_pass:
            self._mark(None)

    def resume(self) -> None:
        """Count time as before the last :meth:`pause` again."""
        owner = self._paused.pop()
        if self._in_pass:
            self._mark(owner)

    # -- marks ----------------------------------------------------------------------------------------

    def _mark(self, owner: int | None) -> None:
        self._owner = owner
        self._marks.append((self.clock.now(), owner))

    def wrap(self, index: int, layer: Layer) -> Layer:
        """Wrap the layer of a number, so that it marks the start and end of its work."""

        def marked(inputs: Any) -> Any:
            if not self._in_pass:  # a user's code runs it outside of passes
                return layer(inputs)
            before = self._owner
            arriving = _tensors(inputs)
            versions = {id(tensor): version_of(tensor) for tensor in arriving}
            self._mark(index)
            try:
                outputs = self._sized(index, layer, inputs)
            finally:
                is_loss_next = self._has_loss and index == self._last and not self._backward
                self._mark(index if is_loss_next else before)
            if torch.is_grad_enabled():
                self._watch_entering(arriving)
                for tensor in _tensors(outputs):
                    # An unchanged input is watched already, for the layer that computed it.
                    changed = versions.get(id(tensor)) != version_of(tensor)
                    if tensor.requires_grad and changed and _is_passing(tensor):
                        register_hook(tensor, partial(self._gradient_complete, index))
            return outputs

        return marked

    def _gradient_complete(self, index: int, gradient: torch.Tensor) -> None:
        if self._backward and (self._owner is None or index < self._owner):
            self._mark(index)

    def _watch_entering(self, inputs: Sequence[torch.Tensor]) -> None:
        """End the first layer's backward work once the gradients of all inputs of the stage or segment are complete."""
        fresh = [t for t in inputs if t.is_leaf and t.requires_grad and id(t) not in self._entered and _is_passing(t)]
        if not fresh:
            return
        self._entered.update({id(tensor): tensor for tensor in fresh})
        incomplete = len(fresh)

        def complete(gradient: torch.Tensor) -> None:
            nonlocal incomplete
            incomplete -= 1
            if self._backward and incomplete == 0:
                self._mark(None)

        for tensor in fresh:
            register_hook(tensor, complete)

    # -- bytes ----------------------------------------------------------------------------------------

    def _sized(self, index: int, layer: Layer, inputs: Any) -> Any:
        """Run the layer; if it builds a graph, count the bytes that it saves for backward."""
        if index not in self.samples.input_bytes:
            self.samples.input_bytes[index] = sum(tensor.nbytes for tensor in _tensors(inputs))
        known = index in self.samples.activation_bytes and not self._size_every_pass
        if known or not torch.is_grad_enabled():
            outputs = layer(inputs)
        else:
            with saved_for_backward(state_of(layer)) as saved:
                outputs = layer(inputs)
            self.samples.activation_bytes[index] = max(self.samples.activation_bytes.get(index, 0), saved.take())
        if index not in self.samples.output_bytes:
            self.samples.output_bytes[index] = sum(tensor.nbytes for tensor in _tensors(outputs))
        return outputs

    def _sized_loss(self, loss_fn: Callable[..., Any], outputs: Any, labels: Any) -> Any:
        """Compute the loss, and count the bytes that it saves for its backward pass."""
        if (self.samples.loss_bytes and not self._size_every_pass) or not torch.is_grad_enabled():
            return loss_fn(outputs, labels)
        with saved_for_backward([*state_of(loss_fn), *_tensors(outputs)]) as saved:
            loss = loss_fn(outputs, labels)
        self.samples.loss_bytes = max(self.samples.loss_bytes, saved.take())
        return loss

    # -- reading --------------------------------------------------------------------------------------

    def _read(self) -> None:
        spent: dict[int, float] = defaultdict(float)
        last = self.samples.forward
        for kind, marks in self._passes:
            durations = self.clock.seconds_between([when for when, _ in marks])
            for (_, owner), seconds in zip(marks, durations):
                if owner is not None:
                    spent[owner] += seconds
            last = self.samples.seconds[kind]
            for index, seconds in spent.items():
                last[index].append(seconds)
            spent.clear()
        for index, seconds in spent.items():  # of the user's instructions after the last pass
            if last[index]:
                last[index][-1] += seconds
            else:
                last[index].append(seconds)
        self._passes = []


def _is_passing(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of one micro-batch, and no weight that layers pass on, which would keep a hook."""
    return not (tensor.is_leaf and isinstance(tensor, nn.Parameter))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for tensor in value if isinstance(tensor, torch.Tensor)] if isinstance(value, tuple | list) else []

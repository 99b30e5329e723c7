"""Seconds and bytes that the profiler attributes to layers, with a clock that the layers advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_dynmo.engine.deepspeed.module import runs_shown
from ds_dynmo.engine.measure.profiler import CpuClock, EventClock, Profiler, device_clock, typical
from ds_dynmo.schedules import Kind
from ds_dynmo.stage_work import work_of_the_stage


class Clock:
    """A clock that only layers advance."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def seconds_between(self, times: Sequence[float]) -> list[float]:
        return [b - a for a, b in zip(times, times[1:])]


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, forward: float, backward: float) -> torch.Tensor:
        ctx.clock, ctx.backward_seconds = clock, backward
        ctx.save_for_backward(x)
        clock.time += forward
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        _ = ctx.saved_tensors  # starts the recomputation under non-reentrant checkpointing
        ctx.clock.time += ctx.backward_seconds
        return gradient * 2.0, None, None, None


class Layer(nn.Module):
    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, (forward, backward)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Spend.apply(x * self.weight, self.clock, *self.seconds)  # type: ignore[no-any-return]


class Embed(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.table = nn.Embedding(5, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return Spend.apply(self.table(tokens), self.clock, 1.0, 2.0)  # type: ignore[no-any-return]


class Pair(nn.Module):
    """Takes and returns a tuple whose second member passes through."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, both: Any) -> Any:
        return self.inner(both[0]), both[1]


def module_like(layers: Sequence[Any]) -> Any:
    return SimpleNamespace(forward_funcs=list(layers), _local_start=0, _local_stop=len(layers))


@contextmanager
def measuring(profiler: Profiler, module: Any, layers: Sequence[int], *, has_loss: bool) -> Iterator[None]:
    """Measure a batch, as the executor does."""
    runs = [range(layers[0], layers[-1] + 1)]
    with profiler.batch(module, has_loss), runs_shown(module, runs, [profiler.wrap]) as show:
        show(0)
        yield


def measure(
    clock: Clock, layers: list[Callable[..., Any]], x: Any, run: Callable[[list[Any], Any], Any], start: int = 4
) -> Profiler:
    profiler = Profiler(clock)
    module, numbers = module_like(layers), range(start, start + len(layers))
    for _ in range(2):
        with measuring(profiler, module, numbers, has_loss=False):
            with profiler.measure_pass(Kind.FORWARD, numbers, has_loss=False):
                outputs = run(module.forward_funcs, x)
            clock.time += 100.0  # time between passes belongs to no layer
            with profiler.measure_pass(Kind.BACKWARD, numbers, has_loss=False):
                total = outputs if isinstance(outputs, torch.Tensor) else sum(t.sum() for t in outputs)
                total.sum().backward()
        assert module.forward_funcs == list(layers)
    return profiler


def plain(layers: list[Any], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def seconds(profiler: Profiler, count: int, start: int = 4) -> list[tuple[float, float]]:
    samples = profiler.samples
    return [(samples.forward_seconds(i), samples.backward_seconds(i)) for i in range(start, start + count)]


class MakesTable(Layer):
    """Makes a table that all layers of its stage use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with work_of_the_stage():
            self.clock.time += 30.0
        return super().forward(x)


class MakesTableOfTable(MakesTable):
    """Makes a table out of another, whose code says by itself that it works for the stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with work_of_the_stage():
            with work_of_the_stage():
                self.clock.time += 20.0
            self.clock.time += 10.0
        return super().forward(x)


def checkpointed(segment: int, *, reentrant: bool) -> Callable[[list[Any], Any], Any]:
    """Run layers with each ``segment`` of them recomputed."""

    def run(layers: list[Any], x: Any) -> Any:
        for first in range(0, len(layers), segment):
            part = layers[first : first + segment]
            x = checkpoint(lambda y, part=part: plain(part, y), x, use_reentrant=reentrant)
        return x

    return run


def seconds_of(
    make: Callable[[Clock], list[Callable[..., Any]]], x: Any, run: Callable[[list[Any], Any], Any] = plain
) -> list[tuple[float, float]]:
    """Return the seconds of each layer, forward and backward."""
    clock = Clock()
    layers = make(clock)
    profiler = measure(clock, layers, x, run)
    assert profiler.batches == 2
    return seconds(profiler, len(layers))


def three(clock: Clock) -> list[Callable[..., Any]]:
    return [Layer(clock, 1.0, 3.0), Layer(clock, 2.0, 5.0), Layer(clock, 4.0, 7.0)]


def test_each_layer_gets_its_own_seconds() -> None:
    """Also with integer inputs, functions and identities, in place, between tuples, and where one is frozen."""

    def of_tokens(clock: Clock) -> list[Callable[..., Any]]:
        return [Embed(clock), lambda x: x, lambda x: x * 3.0, Layer(clock, 2.0, 5.0), lambda x: x.mul_(2.0)]

    def in_place(clock: Clock) -> list[Callable[..., Any]]:
        return [Layer(clock, 1.0, 3.0), lambda x: x.add_(1.0), Layer(clock, 2.0, 5.0)]

    def one_is_frozen(clock: Clock) -> list[Callable[..., Any]]:
        return [Layer(clock, 1.0, 3.0).requires_grad_(False), Layer(clock, 2.0, 5.0)]

    both = (torch.ones(2, 3, requires_grad=True), torch.ones(2, requires_grad=True))
    assert seconds_of(three, torch.ones(2, 3, requires_grad=True)) == [(1.0, 3.0), (2.0, 5.0), (4.0, 7.0)]
    found = seconds_of(of_tokens, torch.tensor([1, 2]))
    assert found == [(1.0, 2.0), (0.0, 0.0), (0.0, 0.0), (2.0, 5.0), (0.0, 0.0)]
    assert seconds_of(in_place, torch.ones(2, 3)) == [(1.0, 3.0), (0.0, 0.0), (2.0, 5.0)]
    assert seconds_of(lambda clock: [*map(Pair, three(clock))], both) == [(1.0, 3.0), (2.0, 5.0), (4.0, 7.0)]
    assert seconds_of(one_is_frozen, torch.ones(2, 3)) == [(1.0, 0.0), (2.0, 5.0)]


def test_recomputation_belongs_to_backward_and_its_bookkeeping_to_no_layer() -> None:
    class Bookkeeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
            ctx.clock = clock
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            ctx.clock.time += 50.0
            return gradient, None

    clock, x = Clock(), torch.ones(2, 3, requires_grad=True)

    def with_bookkeeping(layers: list[Any], x: Any) -> Any:
        for layer in layers:
            x = checkpoint(layer, Bookkeeping.apply(x, clock), use_reentrant=True)
        return x

    for segment, reentrant in product((1, 2, 3), (True, False)):
        found = seconds_of(three, x, checkpointed(segment, reentrant=reentrant))
        assert found == [(1.0, 4.0), (2.0, 7.0), (4.0, 11.0)], (segment, reentrant)
    assert seconds(measure(clock, three(clock), x, with_bookkeeping), 3) == [(1.0, 4.0), (2.0, 7.0), (4.0, 11.0)]


def test_work_for_the_whole_stage_is_no_layers() -> None:
    x = torch.ones(3, requires_grad=True)
    for kind in (MakesTable, MakesTableOfTable):

        def make(clock: Clock, kind: type[Layer] = kind) -> list[Callable[..., Any]]:
            return [kind(clock, 1.0, 2.0), Layer(clock, 3.0, 4.0)]

        assert seconds_of(make, x) == [(1.0, 2.0), (3.0, 4.0)], kind
        assert seconds_of(make, x, checkpointed(2, reentrant=False)) == [(1.0, 3.0), (3.0, 7.0)], kind


def test_nothing_stays_hooked_to_a_weight_that_layers_pass_on() -> None:
    clock = Clock()
    layer = Layer(clock, 1.0, 3.0)
    measure(
        clock,
        [layer, Pair(Layer(clock, 2.0, 5.0))],
        torch.ones(2, 3),
        lambda funcs, x: funcs[1]((funcs[0](x), layer.weight)),
    )
    measure(clock, [lambda x: (layer(x), layer.weight)], torch.ones(2, 3), plain)
    assert not layer.weight._backward_hooks


def test_the_loss_counts_as_the_last_layers() -> None:
    clock = Clock()
    profiler = Profiler(clock)
    module = module_like([Layer(clock, 1.0, 3.0)])
    with measuring(profiler, module, [0], has_loss=True), profiler.measure_pass(Kind.FORWARD, [0], has_loss=True):
        module.forward_funcs[0](torch.ones(2, 3))
        clock.time += 10.0
    assert profiler.samples.forward_seconds(0) == 11.0


def test_activation_bytes_exclude_weights() -> None:
    clock = Clock()
    linear = nn.Linear(3, 5)
    x = torch.ones(2, 3, requires_grad=True)
    samples = measure(clock, [linear, torch.tanh], x, plain).samples
    assert samples.activation_bytes == {4: 2 * 3 * 4, 5: 2 * 5 * 4}
    assert samples.input_bytes == {4: 2 * 3 * 4, 5: 2 * 5 * 4}


def test_counting_activation_bytes_keeps_checkpointing_working() -> None:
    inner, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(2, 3, requires_grad=True)
    profiler = measure(Clock(), [inner], x, checkpointed(1, reentrant=False))
    reference = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        inner(reference).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, reference.grad)
    assert profiler.samples.activation_bytes[4] == 2 * 3 * 4 * 2


def test_what_is_freed_at_once_counts_all_the_same() -> None:
    """Under checkpointing nobody keeps what a layer saves: the next storage may come to have the same address."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x * 1.0).square()  # saves a new tensor each time
        return x

    x = torch.ones(1000, requires_grad=True)
    samples = measure(Clock(), [doubled], x, checkpointed(1, reentrant=False)).samples
    assert samples.activation_bytes == {4: 4 * 1000 * 4}


@pytest.mark.parametrize("loss_fn", [lambda y, t: (y - t).square().mean(), nn.MSELoss()], ids=["function", "module"])
def test_what_the_loss_saves_is_counted(loss_fn: Any) -> None:
    module = nn.Module()
    module.forward_funcs, module.loss_fn, module._local_start, module._local_stop = [nn.Linear(3, 5)], loss_fn, 0, 1
    x, target = torch.ones(2, 3, requires_grad=True), torch.ones(2, 5)
    profiler = Profiler(Clock())
    for has_loss in (False, True):
        pass_of_0 = profiler.measure_pass(Kind.FORWARD, [0], has_loss=has_loss)
        with measuring(profiler, module, [0], has_loss=has_loss), pass_of_0:
            module.loss_fn(module.forward_funcs[0](x), target)
        assert module.loss_fn is loss_fn
        assert bool(profiler.samples.loss_bytes) == has_loss
    # the difference; or, of a module, the target, as outputs count by themselves
    assert profiler.samples.loss_bytes == 2 * 5 * 4
    assert profiler.samples.output_bytes == {0: 2 * 5 * 4}


def test_activation_bytes_are_those_of_the_micro_batch_that_saves_most_or_of_the_first() -> None:
    for every, rows_counted in ((True, 4), (False, 1)):
        rows = [1, 4, 2]
        module = module_like([lambda x, rows=rows: (x[: rows.pop(0)].clone() ** 2).sum()])
        profiler = Profiler(Clock(), size_every_pass=every)
        with measuring(profiler, module, [0], has_loss=True):
            for _ in range(3):
                with profiler.measure_pass(Kind.FORWARD, [0], has_loss=True):
                    module.forward_funcs[0](torch.ones(4, 2, requires_grad=True))
        assert profiler.samples.activation_bytes == {0: rows_counted * 2 * 4}, every


def test_the_mean_of_a_layer_excludes_outliers() -> None:
    for found, expected in (
        ([], 0.0),
        ([3.0], 3.0),
        ([1.0, 2.0], 1.5),
        ([0.0, 0.0, 4.0, 4.0], 2.0),  # work in half of the micro-batches
        ([1.0, 1.0, 50.0], 1.0),  # a stall of the machine
        ([1.0] * 4 + [50.0, 1.0, 1.0], 1.0),
        ([1.0] * 7 + [50.0], 1.0),
        ([0.0] * 9 + [2.0] * 7, 10 / 12),
    ):
        assert typical(found) == pytest.approx(expected), found


def test_a_stalled_batch_does_not_count_as_typical() -> None:
    clock = Clock()
    profiler = Profiler(clock)
    module = SimpleNamespace(forward_funcs=[])
    for seconds in (0.5, 0.5, 0.5):
        with profiler.timed():
            clock.time += seconds
    with profiler.batch(module, has_loss=True):
        pass  # takes no time; other batches take half a second
    assert profiler.batches == 1 and profiler.batch_seconds == 0.5
    profiler.forget()
    assert profiler.batches == 0 and profiler.batch_seconds == 0.5
    profiler.forget(batches_too=True)
    with profiler.timed():
        clock.time += 0.25
    assert profiler.batch_seconds == 0.25


class QueueingDevice:
    """An accelerator, and its clock: it begins to work when its events are read, and the host only queues work."""

    def __init__(self) -> None:
        self.queue: list[float | list[float]] = []

    def now(self) -> list[float]:
        event: list[float] = []
        self.queue.append(event)
        return event

    def seconds_between(self, times: Sequence[list[float]]) -> list[float]:
        seconds = 0.0
        for item in self.queue:
            if isinstance(item, list):
                item[:] = [seconds]
            else:
                seconds += item
        return [after[0] - before[0] for before, after in zip(times, times[1:])]


def test_the_seconds_of_a_batch_are_those_of_the_device() -> None:
    for profiled in (True, False):
        device = QueueingDevice()
        profiler, module = Profiler(device), SimpleNamespace(forward_funcs=[])
        for seconds in (2.0, 4.0, 8.0):
            with profiler.batch(module, has_loss=False) if profiled else profiler.timed():
                device.queue.append(seconds)
        assert profiler.batch_seconds == 4.0, profiled


def test_the_accelerator_says_which_clock_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_accelerator(), "device_name", lambda: "some device")
    for host_timers, expected in ((True, CpuClock), (False, EventClock)):
        monkeypatch.setattr(get_accelerator(), "use_host_timers", lambda host_timers=host_timers: host_timers)
        assert type(device_clock()) is expected

"""Channels over a simulated backend, which runs what two ranks send each other in order: a thread per stage."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ds_dynmo.engine.comm.channels import Channels, LaneKey, LinkPlan, MessageKind, Operation
from ds_dynmo.engine.split.messages import link_plan, receives, sends
from ds_dynmo.errors import ConfigError
from ds_dynmo.schedules import (
    Action,
    PassBytes,
    PassCosts,
    Schedule,
    best_schedule,
    one_f_one_b,
    one_f_one_b_limit,
    schedule_for_equal_costs,
)
from tests.support.split_orders import gradient_first_1f1b, zb_h1

Sizes = Callable[[MessageKind, int], list[int]]  # of the tensors of a message, by kind and micro-batch


@dataclass(eq=False)
class Work:
    """Operations that were posted together."""

    backend: StrictBackend
    operations: Sequence[Operation]
    is_done: bool = False

    def wait(self) -> None:
        self.backend.wait(self)


@dataclass
class StrictBackend:
    """Groups of operations of two stages are over in the order in which each posts them, and only with their like.

    Attributes:
        running: stages that are not done.
        failure: what went wrong; all stages raise it.
        both_ways: how many groups had messages in both directions.
        kept: per stage, the sent tensors that are alive.
        most_kept: at a time, on one stage.
    """

    running: int
    failure: Exception | None = None
    both_ways: int = 0
    kept: defaultdict[int, weakref.WeakSet[torch.Tensor]] = field(default_factory=lambda: defaultdict(weakref.WeakSet))
    most_kept: int = 0
    condition: threading.Condition = field(default_factory=threading.Condition)
    queues: dict[tuple[int, int], deque[Work]] = field(default_factory=dict)
    waiting: set[Work] = field(default_factory=set)

    def post(self, here: int, there: int, operations: Sequence[Operation]) -> list[Work]:
        work = Work(self, list(operations))
        with self.condition:
            self.kept[here].update(tensor for is_sent, tensor in operations if is_sent)
            self.most_kept = max(self.most_kept, len(self.kept[here]))
            self.queues.setdefault((here, there), deque()).append(work)
            mine, theirs = (self.queues.setdefault(key, deque()) for key in ((here, there), (there, here)))
            while mine and theirs:
                self._carry_out(mine.popleft(), theirs.popleft())
            self.condition.notify_all()
        return [work]

    def _carry_out(self, one: Work, other: Work) -> None:
        for work, peer in ((one, other), (other, one)):
            sent = [tensor for is_sent, tensor in work.operations if is_sent]
            wanted = [tensor for is_sent, tensor in peer.operations if not is_sent]
            if [(t.shape, t.dtype) for t in sent] != [(t.shape, t.dtype) for t in wanted]:
                self.failure = RuntimeError(f"{sent} are sent, {len(wanted)} tensors are received")
                return
            for tensor, content in zip(wanted, sent, strict=True):
                tensor.copy_(content)
        self.both_ways += len({is_sent for is_sent, _ in one.operations}) == 2
        one.is_done = other.is_done = True
        one.operations = other.operations = ()

    def wait(self, work: Work) -> None:
        with self.condition:
            self.waiting.add(work)
            self._check()
            self.condition.wait_for(lambda: work.is_done or self.failure is not None)
            self.waiting.discard(work)
            if self.failure is not None:
                raise self.failure

    def ended(self, failure: Exception | None) -> None:
        with self.condition:
            self.running -= 1
            self.failure = self.failure or failure
            self._check()

    def _check(self) -> None:
        if self.waiting and len(self.waiting) == self.running and not any(work.is_done for work in self.waiting):
            self.failure = self.failure or RuntimeError("stages wait for each other")
        self.condition.notify_all()


def content(kind: MessageKind, chunk: int, micro_batch: int) -> int:
    """What a message of ``chunk`` is filled with."""
    return 10_000 * kind.value + 100 * chunk + micro_batch


class Stage:
    """Runs a stage's actions as the executor does, without layers."""

    def __init__(self, number: int, backend: StrictBackend) -> None:
        self.channels = Channels(lambda stage: stage, lambda: lambda *args: backend.post(number, *args))
        self._number = number

    def batch(self, schedule: Schedule, plan: LinkPlan, sizes: Sizes, alike: bool) -> None:
        with self.channels.batch(plan, alike=alike):
            for action in schedule.orders[self._number]:
                source, target = receives(action, schedule), sends(action, schedule)
                if source is not None:
                    self._receive(action, *source, sizes)
                if target is not None:
                    self._send(action, *target, sizes)

    def _receive(self, action: Action, stage: int, kind: MessageKind, sizes: Sizes) -> None:
        with self.channels.receiving(kind, stage):
            for size in sizes(kind, action.micro_batch):
                tensor = torch.zeros(size, dtype=torch.int64)
                self.channels.recv(tensor, stage)
                chunk = action.chunk + (-1 if kind is MessageKind.ACTIVATION else 1)
                assert set(tensor.tolist()) == {content(kind, chunk, action.micro_batch)}

    def _send(self, action: Action, stage: int, kind: MessageKind, sizes: Sizes) -> None:
        with self.channels.sending(kind, stage):
            for size in sizes(kind, action.micro_batch):
                tensor = torch.full((size,), content(kind, action.chunk, action.micro_batch))
                self.channels.send(tensor, stage)


def run(*batches: tuple[Schedule, Sizes, Sequence[LinkPlan]], alike: bool = True) -> StrictBackend:
    """Run batches in turn, on a thread per stage; each with the sizes of its messages, and a plan for each stage."""
    backend = StrictBackend(batches[0][0].num_stages)
    stages = [Stage(number, backend) for number in range(batches[0][0].num_stages)]

    def of_stage(number: int) -> None:
        failure = None
        try:
            for schedule, sizes, plans in batches:
                stages[number].batch(schedule, plans[number], sizes, alike)
        except Exception as error:
            failure = error
        backend.ended(failure)

    threads = [threading.Thread(target=of_stage, args=(number,), daemon=True) for number in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if backend.failure is not None:
        raise backend.failure
    return backend


def plans(schedule: Schedule, costs: PassCosts | None = None) -> list[LinkPlan]:
    return [link_plan(schedule, stage, costs) for stage in range(schedule.num_stages)]


def same(kind: MessageKind, micro_batch: int) -> list[int]:
    return [6, 2] if kind is MessageKind.ACTIVATION else [6]


def announced(kind: MessageKind, micro_batch: int) -> list[int]:
    """As DeepSpeed: the first message says how all look."""
    return [*([9] if kind is MessageKind.ACTIVATION and micro_batch == 0 else []), *same(kind, micro_batch)]


def without_gradients(kind: MessageKind, micro_batch: int) -> list[int]:
    return [] if kind is MessageKind.GRADIENT else same(kind, micro_batch)


def changing(kind: MessageKind, micro_batch: int) -> list[int]:
    return [3, 5 + micro_batch // 3]


COSTS = PassCosts.chain([1, 2, 1, 1.5], [1, 1, 2, 1], [0.5, 1, 1, 2], link_seconds=0.4)
SCHEDULES: dict[str, tuple[Schedule, PassCosts | None]] = {
    "1F1B, 2 stages": (one_f_one_b(2, 6), None),
    "gradient first, 6 stages": (gradient_first_1f1b(6, 9), None),
    "ZB-H1, 1 micro-batch": (zb_h1(3, 1), None),
    "ZB-H1": (zb_h1(5, 8), None),
    "equal costs": (schedule_for_equal_costs(4, 12), None),
    "uneven costs": (
        best_schedule(COSTS, 8, PassBytes.equal(4), one_f_one_b_limit(PassBytes.equal(4), 8)).schedule,
        COSTS,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_come_to_the_right_micro_batch(name: str) -> None:
    """Each stage asserts what it receives (``Stage._receive``); one that fails or waits forever fails ``run``."""
    schedule, costs = SCHEDULES[name]
    planned, sizes = plans(schedule, costs), (announced, same, same, announced, without_gradients, same)
    run(*[(schedule, each, planned) for each in sizes])
    run(*[(schedule, changing, planned)] * 2, alike=False)


def test_one_micro_batch_after_the_other() -> None:
    """The first message of each batch is announced: that two look alike says nothing of the next.

    Each stage asserts what it receives (``Stage._receive``).
    """
    batches = [(zb_h1(3, count), announced, plans(zb_h1(3, count))) for count in (1, 1, 6, 1, 6)]
    run(*batches)


def test_simultaneous_messages_travel_together_once_they_are_known_to_look_alike() -> None:
    schedule = gradient_first_1f1b(4, 12)
    batch = schedule, same, plans(schedule)
    known, unknown = run(batch, batch), run(batch, batch, alike=False)
    assert known.both_ways > 40 and unknown.both_ways == 0


@pytest.mark.parametrize("alike", [True, False])
def test_what_was_sent_is_kept_no_longer_than_the_order_tells(alike: bool) -> None:
    schedule = gradient_first_1f1b(4, 12)
    backend = run((schedule, same, plans(schedule)), alike=alike)
    assert not any(backend.kept.values())
    assert backend.most_kept <= 15  # tensors, of 36 that a stage sends in a batch; 5 micro-batches ahead


class Noted:
    """The channels of a stage with one neighbour, number 1, who answers at once.

    Attributes:
        posted: what was posted, a string for each call: "s" per tensor that is sent, "r" per tensor that is received.
    """

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.channels = Channels(lambda stage: stage, lambda: self._post)

    def _post(self, stage: int, operations: Sequence[Operation]) -> list[Any]:
        self.posted.append("".join("s" if is_sent else "r" for is_sent, _ in operations))
        return []

    def receive(self) -> str:
        """Receive an activation of two tensors; what was posted."""
        with self.channels.receiving(MessageKind.ACTIVATION, 1):
            self.channels.recv(torch.empty(3), 1)
            self.channels.recv(torch.empty(3), 1)
        return self._since()

    def send(self) -> str:
        """Send a gradient of two tensors; what was posted."""
        with self.channels.sending(MessageKind.GRADIENT, 1):
            self.channels.send(torch.empty(3), 1)
            self.channels.send(torch.empty(3), 1)
        return self._since()

    def _since(self) -> str:
        posted = " ".join(self.posted)
        self.posted.clear()
        return posted


RECEIVE, SEND = LaneKey(MessageKind.ACTIVATION, False), LaneKey(MessageKind.GRADIENT, True)


def test_two_receives_are_posted_ahead_once_two_messages_looked_alike() -> None:
    stage = Noted()
    with stage.channels.batch({1: [(RECEIVE,)] * 6}, alike=True):
        assert [stage.receive() for _ in range(6)] == ["r r", "r r rr rr", "rr", "rr", "", ""]
    with stage.channels.batch({1: [(RECEIVE,)] * 6}, alike=True):
        assert [stage.receive() for _ in range(6)] == ["r r rr rr", "rr", "rr", "rr", "", ""]
    stage.channels.forget_shapes()
    with stage.channels.batch({1: [(RECEIVE,)] * 3}, alike=True):
        assert [stage.receive() for _ in range(3)] == ["r r", "r r rr", ""]


def test_receives_are_out_of_the_way_of_a_message_that_is_made() -> None:
    stage = Noted()
    with stage.channels.batch({1: [*[(RECEIVE,)] * 7, (SEND,)]}, alike=True):
        assert [stage.receive() for _ in range(2)] == ["r r", "r r rr rr"]
        assert stage.send() == "rr rr rr s s"
        assert [stage.receive() for _ in range(5)] == [""] * 5


def test_messages_wait_for_a_receive_that_cannot_be_posted_and_go_as_they_were_made() -> None:
    """The first two tensor by tensor, alone: when they were made, nothing was known of what follows."""
    stage = Noted()
    with stage.channels.batch({1: [(RECEIVE,)] * 2 + [(SEND, RECEIVE)] * 3}, alike=True):
        assert [stage.send() for _ in range(3)] == [""] * 3
        assert stage.receive() == "r r"
        assert stage.receive() == "r r s s rr s s rr ssrr"
        assert [stage.receive() for _ in range(3)] == [""] * 3


def test_a_group_is_posted_at_once_where_both_messages_are_known() -> None:
    stage = Noted()
    with stage.channels.batch({1: [(RECEIVE, SEND)] * 4}, alike=True):
        assert [(stage.send(), stage.receive()) for _ in range(4)] == [("", "r r s s")] * 2 + [("rrss", "")] * 2
    with stage.channels.batch({1: [(SEND, RECEIVE)] * 4}, alike=True):
        assert [(stage.send(), stage.receive()) for _ in range(4)] == [("s s", "r r")] + [("ssrr", "")] * 3


def test_sides_that_disagree_are_found() -> None:
    schedule = zb_h1(3, 6)
    for place in range(4, 8):
        wrong = plans(schedule)
        groups = list(wrong[1][2])
        groups[place], groups[place + 1] = groups[place + 1], groups[place]
        wrong[1] = {**wrong[1], 2: groups}
        with pytest.raises((RuntimeError, AssertionError)):
            run((schedule, same, wrong))


def test_messages_that_look_unlike_those_before_are_refused() -> None:
    def sizes(kind: MessageKind, micro_batch: int) -> list[int]:
        return [7 if micro_batch == 4 else 6]

    schedule = zb_h1(2, 6)
    with pytest.raises(ConfigError, match=r"activation.*\[7\] torch.int64 instead of \[6\] torch.int64"):
        run((schedule, sizes, plans(schedule)))

"""Links over a simulated backend, which runs what two ranks send each other in order: a thread per stage."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from ds_dynmo.engine.comm.links import LinkPlan, Links, Operation, Transfer
from ds_dynmo.engine.comm.message_forms import KnownForms, Lane, MessageForm, MessageKind
from ds_dynmo.engine.run.link_plans import evaluation_plan, link_plan
from ds_dynmo.errors import ConfigError
from ds_dynmo.schedules import (
    Action,
    Kind,
    PassBytes,
    PassCosts,
    Schedule,
    best_schedule,
    one_f_one_b,
    one_f_one_b_limit,
    schedule_for_equal_costs,
)
from ds_dynmo.schedules.forward_only import forward_orders, forward_place
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


class ForwardOnly(NamedTuple):
    """The orders of an evaluation."""

    owners: tuple[int, ...]
    orders: Sequence[Sequence[Action]]

    @property
    def num_stages(self) -> int:
        return len(self.orders)


class Stage:
    """Runs a stage's actions as the executor does, without layers."""

    def __init__(self, number: int, backend: StrictBackend) -> None:
        self.forms = KnownForms()
        self.links = Links(self.forms, lambda: lambda *args: backend.post(number, *args), torch.device("cpu"))
        self._number = number

    def batch(self, schedule: Schedule | ForwardOnly, plan: LinkPlan, sizes: Sizes, dynamic: bool) -> None:
        owners = schedule.owners
        with self.links.batch(plan, training=isinstance(schedule, Schedule), dynamic=dynamic):
            for kind, chunk, micro_batch in schedule.orders[self._number]:
                if kind == Kind.WEIGHT_GRADIENT:
                    continue
                way = MessageKind.ACTIVATION if kind == Kind.FORWARD else MessageKind.GRADIENT
                before, after = (chunk - 1, chunk + 1) if kind == Kind.FORWARD else (chunk + 1, chunk - 1)
                for other, act in ((before, self._receive), (after, self._send)):
                    if 0 <= other < len(owners) and owners[other] != self._number:
                        act(Lane(way, min(chunk, other)), chunk, other, micro_batch, sizes)

    def _receive(self, lane: Lane, chunk: int, other: int, micro_batch: int, sizes: Sizes) -> None:
        expected = sizes(lane.kind, micro_batch)
        gradients = None
        if lane.kind is MessageKind.GRADIENT:
            gradients = tuple((torch.Size([size]), torch.int64) for size in expected)
        tensors, _ = self.links.receive(lane, gradients)
        assert [len(tensor) for tensor in tensors] == expected
        assert {*torch.cat([*tensors, torch.tensor([], dtype=torch.int64)]).tolist()} <= {
            content(lane.kind, other, micro_batch)
        }

    def _send(self, lane: Lane, chunk: int, other: int, micro_batch: int, sizes: Sizes) -> None:
        tensors = [
            torch.full((size,), content(lane.kind, chunk, micro_batch)) for size in sizes(lane.kind, micro_batch)
        ]
        form = MessageForm.of_gradients(tensors)
        if lane.kind is MessageKind.ACTIVATION:
            back = sizes(MessageKind.GRADIENT, micro_batch)
            form = MessageForm.of(tensors, [len(tensor) in back for tensor in tensors], in_tuple=True)
        self.links.send(lane, tensors, form)


def run(*batches: tuple[Schedule | ForwardOnly, Sizes, Sequence[LinkPlan]], dynamic: bool = False) -> StrictBackend:
    """Run batches in turn, on a thread per stage; each with the sizes of its messages, and a plan for each stage."""
    backend = StrictBackend(batches[0][0].num_stages)
    stages = [Stage(number, backend) for number in range(batches[0][0].num_stages)]

    def of_stage(number: int) -> None:
        failure = None
        try:
            for schedule, sizes, plans in batches:
                stages[number].batch(schedule, plans[number], sizes, dynamic)
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


def without_gradients(kind: MessageKind, micro_batch: int) -> list[int]:
    return [] if kind is MessageKind.GRADIENT else same(kind, micro_batch)


def changing(kind: MessageKind, micro_batch: int) -> list[int]:
    return [3, 5 + micro_batch // 3] if kind is MessageKind.ACTIVATION else [3]


COSTS = PassCosts.chain([1, 2, 1, 1.5], [1, 1, 2, 1], [0.5, 1, 1, 2], link_seconds=0.4)
SCHEDULES: dict[str, tuple[Schedule, PassCosts | None]] = {
    "1F1B, 2 stages": (one_f_one_b(2, 6), None),
    "gradient first, 6 stages": (gradient_first_1f1b(6, 9), None),
    "ZB-H1": (zb_h1(5, 8), None),
    "equal costs": (schedule_for_equal_costs(4, 12), None),
    "uneven costs": (
        best_schedule(COSTS, 8, PassBytes.equal(4), one_f_one_b_limit(PassBytes.equal(4), 8)).schedule,
        COSTS,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_come_to_the_right_micro_batch(name: str) -> None:
    """Each stage asserts what it receives (``Stage._receive``); one that fails or waits forever fails ``run``.

    One micro-batch may come after the other.
    """
    schedule, costs = SCHEDULES[name]
    planned = plans(schedule, costs)
    run(*[(schedule, same, planned)] * 3)
    run(*[(schedule, without_gradients, planned)] * 2)
    run(*[(schedule, changing, planned)] * 2, dynamic=True)
    if name == "ZB-H1":
        run(*((zb_h1(3, count), same, plans(zb_h1(3, count))) for count in (1, 1, 6, 1, 6)))


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("owners", [(0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2)], ids=str)
def test_an_evaluation_keeps_few_outputs_however_many_micro_batches_it_has(
    owners: tuple[int, ...], dynamic: bool
) -> None:
    stages, most_kept = max(owners) + 1, []
    for micro_batches in (6, 30):
        batches = []
        for one_by_one in (len(owners) > stages, False):  # as an executor runs the first one, and others
            place = forward_place(owners, one_by_one=one_by_one)
            orders = forward_orders(owners, micro_batches, place)
            planned = [evaluation_plan(owners, orders, stage, place) for stage in range(stages)]
            batches.append((ForwardOnly(owners, orders), same, planned))
        most_kept.append(run(*batches, dynamic=dynamic).most_kept)
    assert max(most_kept) <= 14, most_kept  # tensors: of 3 messages to each of 2 neighbours, and an announcement


def test_simultaneous_messages_travel_together_once_both_sides_know_their_forms() -> None:
    schedule = gradient_first_1f1b(4, 12)
    batch = schedule, same, plans(schedule)
    known, unknown = run(batch, batch), run(batch, batch, dynamic=True)
    assert known.both_ways > 40 and unknown.both_ways == 0


@pytest.mark.parametrize("dynamic", [True, False])
def test_what_was_sent_is_kept_no_longer_than_the_order_tells(dynamic: bool) -> None:
    schedule = gradient_first_1f1b(4, 12)
    backend = run((schedule, same, plans(schedule)), dynamic=dynamic)
    assert not any(backend.kept.values())
    assert backend.most_kept <= 20  # tensors, of 36 that a stage sends in a batch; 5 micro-batches ahead


RECEIVE, SEND = (Transfer(Lane(kind, 4), kind is MessageKind.GRADIENT) for kind in MessageKind)
TWO = torch.ones(3, requires_grad=True) * 2, torch.ones(3, requires_grad=True) * 2


class Noted:
    """The links of a stage with one neighbour, number 1, who answers at once.

    Attributes:
        posted: what was posted, a string for each call: "s" per tensor that is sent, "r" per tensor that is received.
    """

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.forms = KnownForms()
        self.links = Links(self.forms, lambda: self._post, torch.device("cpu"))

    def _post(self, stage: int, operations: Sequence[Operation]) -> list[Any]:
        self.posted.append("".join("s" if is_sent else "r" for is_sent, _ in operations))
        for is_sent, tensor in operations:
            if not is_sent and tensor.dtype == torch.int64:
                tensor.copy_(MessageForm.of(TWO, [True, True], in_tuple=True).announcement(torch.device("cpu")))
        return []

    def batch(self, *groups: tuple[Transfer, ...], dynamic: bool = False) -> AbstractContextManager[None]:
        return self.links.batch({1: groups}, training=True, dynamic=dynamic)

    def receive(self) -> str:
        """Receive an activation of two tensors; what was posted."""
        self.links.receive(RECEIVE.lane)
        return self._since()

    def send(self) -> str:
        """Send a gradient of two tensors; what was posted."""
        gradients = [torch.empty(3), torch.empty(3)]
        self.links.send(SEND.lane, gradients, MessageForm.of_gradients(gradients))
        return self._since()

    def _since(self) -> str:
        posted = " ".join(self.posted)
        self.posted.clear()
        return posted


def test_two_receives_are_posted_ahead_once_their_form_is_known() -> None:
    stage = Noted()
    with stage.batch(*[(RECEIVE,)] * 6):
        assert [stage.receive() for _ in range(6)] == ["r rr rr rr", "rr", "rr", "rr", "", ""]
    with stage.batch(*[(RECEIVE,)] * 6):
        assert [stage.receive() for _ in range(6)] == ["rr rr rr", "rr", "rr", "rr", "", ""]
    stage.forms.forget()
    with stage.batch(*[(RECEIVE,)] * 3):
        assert [stage.receive() for _ in range(3)] == ["r rr rr rr", "", ""]
    with stage.batch(*[(RECEIVE,)] * 3, dynamic=True):
        assert [stage.receive() for _ in range(3)] == ["r rr"] * 3


def test_receives_are_out_of_the_way_of_a_message_that_is_made() -> None:
    stage = Noted()
    with stage.batch(*[(RECEIVE,)] * 7, (SEND,)):
        assert [stage.receive() for _ in range(2)] == ["r rr rr rr", "rr"]
        assert stage.send() == "rr rr rr sss"
        assert [stage.receive() for _ in range(5)] == [""] * 5


def test_messages_wait_for_a_receive_that_cannot_be_posted() -> None:
    stage = Noted()
    with stage.batch((RECEIVE,), *[(SEND, RECEIVE)] * 3):
        assert [stage.send() for _ in range(3)] == [""] * 3
        assert stage.receive() == "r rr sssrr ssrr ssrr"
        assert [stage.receive() for _ in range(3)] == [""] * 3


def test_a_group_is_posted_at_once_where_both_messages_are_known() -> None:
    stage = Noted()
    with stage.batch(*[(RECEIVE, SEND)] * 3):
        assert [(stage.send(), stage.receive()) for _ in range(3)] == [("", "r rr sss"), *[("rrss", "")] * 2]
    with stage.batch(*[(SEND, RECEIVE)] * 3):
        assert [(stage.send(), stage.receive()) for _ in range(3)] == [("ssrr", "")] * 3


def test_a_message_does_not_wait_for_the_other_of_its_group_where_they_travel_apart() -> None:
    stage = Noted()
    with stage.batch(*[(SEND, RECEIVE)] * 2, dynamic=True):
        assert [(stage.send(), stage.receive()) for _ in range(2)] == [("sss", "r rr")] * 2


def test_training_and_evaluation_have_forms_of_their_own() -> None:
    stage = Noted()
    with stage.batch((RECEIVE,)):
        assert stage.receive() == "r rr"
    with stage.links.batch({1: [(RECEIVE,)]}, training=False):
        assert stage.receive() == "r rr"


def test_sides_that_disagree_are_found() -> None:
    schedule = zb_h1(3, 6)
    for place in range(4, 8):
        wrong = plans(schedule)
        groups = list(wrong[1][2])
        groups[place], groups[place + 1] = groups[place + 1], groups[place]
        wrong[1] = {**wrong[1], 2: groups}
        with pytest.raises((RuntimeError, AssertionError)):
            run((schedule, same, wrong))


def test_a_change_in_place_of_what_was_sent_is_an_error() -> None:
    stage, output = Noted(), torch.ones(2, 3, requires_grad=True) * 2
    stage.links = Links(KnownForms(), lambda: lambda *_: [SimpleNamespace(wait=lambda: None)], torch.device("cpu"))
    sent = Transfer(Lane(MessageKind.ACTIVATION, 0), True)
    form = MessageForm.of([output], [True], in_tuple=False)
    with (
        pytest.raises(ConfigError, match=r"shape \[2, 3\] was changed in place .*to another stage"),
        stage.batch((sent,)),
    ):
        stage.links.send(sent.lane, [output], form)
        output.detach().zero_()
    mask = torch.ones(2, 3)  # needs no gradient, and may be changed
    with stage.batch((sent,)):
        stage.links.send(sent.lane, [mask], MessageForm.of([mask], [False], in_tuple=False))
        mask.zero_()

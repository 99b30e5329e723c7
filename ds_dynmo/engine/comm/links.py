"""The messages of a batch's passes: sends of training never wait, receives are posted ahead, in one order everywhere.

A *lane* carries the activations, or the gradients, of one boundary between two chunks of layers. A receiver posts the
next receives of a lane before it needs them, so that messages arrive while it computes.

NCCL runs the operations between two ranks one after the other: a posted receive blocks all operations that the two
ranks post later, whatever its tag. So both stages post the same operations in the same order, that of
:mod:`ds_dynmo.schedules.link_order`, which proves that there is no deadlock. A stage posts an operation once all
operations before it are posted, and

- a send: once its action has computed the tensors;
- a receive: while few receives of its lane are posted, and at the latest when a send after it is ready;
- two messages of one group: together, by ``batch_isend_irecv``.

**Forms.** A receive can be posted early only if its shapes are known (:mod:`ds_dynmo.engine.comm.message_forms`). A
message whose form is not known to both sides is *announced* by a tensor of numbers. That of activations travels before
them: they are received when their action needs them, and not in a group. That of gradients, whose shapes are known,
travels in their message, as its last tensor. Which messages are announced follows from what both sides know at the
start of the batch: the first of a lane, or with ``dynamic`` shapes all. A message has no tensor if nothing in it has a
gradient.

**Streams.** NCCL queues an operation after everything that the compute stream holds when it is posted. By then the sent
tensors have been computed, and earlier uses of the memory of received tensors have ended. A wait for an operation makes
the compute stream wait, not this process. Tensors are allocated and freed on the compute stream. They are kept here
until that stream waits for their operation, or for a later one between the same two ranks, which ends later. Then their
memory may be reused, as later uses are queued after it. A stage waits for its sends only after it has waited for a
later receive, and at the end of the batch.

**Evaluations.** Between two stages messages may go one way only. So no receive ends the sends, and a stage that is
ahead would keep the outputs of all micro-batches. It waits for a send before it posts the next but one. There is no
deadlock: all stages run their passes in one order (:mod:`ds_dynmo.schedules.forward_only`), in which the pass that
needs a message comes before the pass that makes the next but one.

gloo, on a CPU, runs the same code. There a send ends when its receive is posted, and a posted receive progresses by
itself. Neither can be asked whether it has ended (``is_completed`` is False until ``wait``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ds_dynmo.engine.comm.message_forms import Content, KnownForms, Lane, MessageForm, MessageKind
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import version_of
from ds_dynmo.unmarked import unmarked

AHEAD = 2  # receives of a lane that are posted before they are needed; sends of an evaluation that may be under way


class Transfer(NamedTuple):
    """The next message of a lane, as this stage sees it: it sends it, or receives it."""

    lane: Lane
    is_sent: bool


Operation = tuple[bool, torch.Tensor]  # whether it is a send, and the tensor
Post = Callable[[int, Sequence[Operation]], Sequence[Any]]
LinkPlan = Mapping[int, Sequence[tuple[Transfer, ...]]]  # per neighbour, the groups of messages in order


def kept(tensor: torch.Tensor, kind: MessageKind) -> torch.Tensor:
    """Return the tensor to send for ``tensor``, which keeps its content if ``tensor`` gets new data.

    A tensor without gradient, such as a mask, is copied: its layer may keep it and change it for the next micro-batch.
    """
    content = unmarked(tensor)
    return content.clone() if kind is MessageKind.ACTIVATION and not tensor.requires_grad else content


class _Sent(NamedTuple):
    """A message to post; ``form``: to announce with it, or None."""

    tensors: list[tuple[torch.Tensor, int]]  # with the version: torch's count of in-place changes
    form: MessageForm | None


@dataclass(eq=False)
class _PostedOperations:
    """Operations that were posted together.

    Attributes:
        tensors: per operation its tensor, and the version of a sent one; None: received.
    """

    works: list[Any]
    tensors: list[tuple[torch.Tensor, int | None]]

    def wait(self) -> None:
        """Wait until the operations have ended.

        Raises:
            ConfigError: a sent tensor was changed meanwhile, so its received content is undefined.
        """
        for work in self.works:
            work.wait()
        self.works = []  # a handle of gloo can be waited for only once
        for tensor, version in self.tensors:
            if version is not None and version_of(tensor) != version:
                raise ConfigError(
                    f"a tensor of shape {list(tensor.shape)} was changed in place after it was sent to another stage, "
                    "which does not wait until it has arrived: let the stage's last layer return a copy"
                )


class _Arriving(NamedTuple):
    """A posted receive; ``announcement``: the last tensor of a gradient message that is announced, or None."""

    posted: _PostedOperations
    tensors: list[torch.Tensor]
    announcement: torch.Tensor | None


@dataclass
class _LaneState:
    """One lane in one batch.

    Attributes:
        announced: of the next messages to be posted, how many are announced.
    """

    announced: float
    ready: deque[_Sent] = field(default_factory=deque)  # sends to post
    arriving: deque[_Arriving] = field(default_factory=deque)


@dataclass
class _Link:
    """All messages between this stage and a neighbour in one batch."""

    stage: int
    groups: deque[tuple[Transfer, ...]]  # still to post
    lanes: dict[Lane, _LaneState]
    posted: deque[_PostedOperations] = field(default_factory=deque)  # in order; not known to have ended
    sent: deque[_PostedOperations] = field(default_factory=deque)  # of an evaluation: the latest sends


class Links:
    """All links of one stage.

    Args:
        forms: known to both sides of each boundary.
        connect: returns a function that posts operations with a neighbour together. Collective the first time.
        device: of the tensors.
        as_sent: returns shapes and dtypes as they are sent, for those of a form; None: they are the same.
    """

    def __init__(
        self,
        forms: KnownForms,
        connect: Callable[[], Post],
        device: torch.device,
        as_sent: Callable[[Content], Content] | None = None,
    ) -> None:
        self._forms, self._connect, self._device = forms, connect, device
        self._as_sent = as_sent or (lambda content: content)
        self._links: dict[Lane, _Link] = {}
        self._dynamic = False
        self._training = True

    @contextmanager
    def batch(self, plan: LinkPlan, *, training: bool, dynamic: bool = False) -> Iterator[None]:
        """Run one batch; when it ends, all messages sent in it have arrived.

        Args:
            plan: per neighbour, the groups of messages in order.
            dynamic: whether every message is announced.
        """
        self._dynamic, self._training, self._links = dynamic, training, {}
        if plan:
            self._post = self._connect()
        for stage, groups in plan.items():
            lanes = {transfer.lane for group in groups for transfer in group}
            link = _Link(stage, deque(groups), {lane: _LaneState(self._announced(lane)) for lane in lanes})
            self._links.update(dict.fromkeys(lanes, link))
        try:
            yield
            for link in self._links.values():
                assert not link.groups, f"messages with stage {link.stage} that no action made or took: {link.groups}"
                self._wait(link, None)
        finally:
            self._links = {}

    def _announced(self, lane: Lane) -> float:
        return float("inf") if self._dynamic else self._forms.get(self._training, lane) is None

    # -- one message ----------------------------------------------------------------------------------

    def send(self, lane: Lane, tensors: Sequence[torch.Tensor], form: MessageForm) -> None:
        """Send the next message of a lane, and return; in an evaluation, once few are under way.

        The tensors may not be changed afterwards.

        Args:
            tensors: as ``form`` has packed them.
        """
        link = self._links[lane]
        state = link.lanes[lane]
        while not self._training and len(link.sent) >= AHEAD:
            self._wait(link, link.sent.popleft())
        sent = [kept(tensor, lane.kind) for tensor in tensors]
        is_announced = state.announced > len(state.ready) and (lane.kind is MessageKind.ACTIVATION or bool(sent))
        state.ready.append(_Sent([(tensor, version_of(tensor)) for tensor in sent], form if is_announced else None))
        if is_announced and not self._dynamic:
            self._forms.learn(self._training, lane, form)
        self._advance(link)

    def receive(self, lane: Lane, content: Content | None = None) -> tuple[list[torch.Tensor], MessageForm]:
        """Receive the next message of a lane.

        Args:
            content: of a gradient message with ``dynamic`` shapes.

        Returns:
            The tensors as their form has packed them, and the form.
        """
        link = self._links[lane]
        state, form = link.lanes[lane], None
        if not state.arriving:
            self._advance(link, needed=lane)
        if not state.arriving:
            assert link.groups[0] == (Transfer(lane, False),), f"{lane} is needed before {link.groups[0]}"
            link.groups.popleft()
            if state.announced and lane.kind is MessageKind.ACTIVATION:
                state.announced -= 1
                announcement = MessageForm.empty_announcement(self._device)
                self._wait(link, self._posted(link, [(announcement, None)]))
                form = self._learnt(lane, announcement)
            self._post_group(link, (Transfer(lane, False),), form.content if form is not None else content)
        arrived = state.arriving.popleft()
        self._wait(link, arrived.posted)
        if arrived.announcement is not None:
            form = self._learnt(lane, arrived.announcement)
        self._advance(link)
        return arrived.tensors, form or self._forms.get(self._training, lane) or MessageForm.of_gradients([])

    def _learnt(self, lane: Lane, announcement: torch.Tensor) -> MessageForm:
        form = MessageForm.announced(announcement)
        if not self._dynamic:
            self._forms.learn(self._training, lane, form)
        return form

    # -- the order ------------------------------------------------------------------------------------

    def _advance(self, link: _Link, needed: Lane | None = None) -> None:
        """Post all operations that may be posted now.

        Args:
            needed: the lane whose next message this stage needs now; receives before it do not wait.
        """
        while link.groups:
            group = link.groups[0]
            if len(group) > 1 and any(self._is_alone(link, transfer) for transfer in group):
                link.groups.popleft()
                link.groups.extendleft((transfer,) for transfer in reversed(group))
                continue
            if not all(self._may_post(link, transfer, needed) for transfer in group):
                return
            link.groups.popleft()
            self._post_group(link, group)

    def _is_alone(self, link: _Link, transfer: Transfer) -> bool:
        """Return whether the next message of this lane travels in no group: its shapes are not known to both sides."""
        is_activation = transfer.lane.kind is MessageKind.ACTIVATION
        return self._dynamic or (is_activation and link.lanes[transfer.lane].announced > 0)

    def _may_post(self, link: _Link, transfer: Transfer, needed: Lane | None) -> bool:
        state = link.lanes[transfer.lane]
        if transfer.is_sent:
            return bool(state.ready)
        if self._is_alone(link, transfer) or self._forms.activations(self._training, transfer.lane.boundary) is None:
            return False
        if len(state.arriving) < AHEAD or (needed is not None and not link.lanes[needed].arriving):
            return True
        return any(other.ready for other in link.lanes.values())

    def _post_group(self, link: _Link, group: tuple[Transfer, ...], content: Content | None = None) -> None:
        operations: list[tuple[torch.Tensor, int | None]] = []
        receives = []
        for lane, is_sent in group:
            state = link.lanes[lane]
            if is_sent:
                sent = state.ready.popleft()
                announcement = [] if sent.form is None else [self._announcement(state, sent.form)]
                if lane.kind is MessageKind.ACTIVATION and announcement:
                    self._posted(link, announcement)
                    announcement = []
                operations += [*sent.tensors, *announcement]
            else:
                expected = self._expected(lane) if content is None else content
                tensors = [
                    torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._as_sent(expected)
                ]
                announced = None
                if lane.kind is MessageKind.GRADIENT and state.announced and tensors:
                    state.announced -= 1
                    announced = MessageForm.empty_announcement(self._device)
                receives.append((state, tensors, announced))
                operations += [(tensor, None) for tensor in (*tensors, announced) if tensor is not None]
        posted = self._posted(link, operations)
        if not self._training and any(transfer.is_sent for transfer in group):
            link.sent.append(posted)
        for state, tensors, announced in receives:
            state.arriving.append(_Arriving(posted, tensors, announced))

    def _announcement(self, state: _LaneState, form: MessageForm) -> tuple[torch.Tensor, int | None]:
        state.announced -= 1
        announcement = form.announcement(self._device)
        return announcement, version_of(announcement)

    def _expected(self, lane: Lane) -> Content:
        form = self._forms.activations(self._training, lane.boundary)
        assert form is not None
        return form.content if lane.kind is MessageKind.ACTIVATION else form.gradients

    def _posted(self, link: _Link, tensors: Sequence[tuple[torch.Tensor, int | None]]) -> _PostedOperations:
        operations = [(version is not None, tensor) for tensor, version in tensors]
        posted = _PostedOperations(list(self._post(link.stage, operations)) if operations else [], list(tensors))
        link.posted.append(posted)
        return posted

    def _wait(self, link: _Link, until: _PostedOperations | None) -> None:
        """Wait for ``until`` and all operations posted before it; None: for all."""
        while link.posted and (until is None or until in link.posted):
            link.posted.popleft().wait()

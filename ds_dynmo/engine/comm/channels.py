"""Messages between stages in which a sender never waits for its receiver.

A *lane* is all messages of one kind (activations or gradients) between two stages in one direction, in the order of the
micro-batches. A sender continues at once; its tensors are kept until the receiver is known to have them. A receiver
posts the next receives of a lane before it needs them, so that messages arrive while it computes.

NCCL runs the operations between two ranks one after the other: a posted receive blocks all operations that the two
ranks post later, whatever its tag. So both stages post the same operations in the same order, that of
:mod:`ds_dynmo.schedules.link_order`, which proves that there is no deadlock. A stage posts an operation once all
operations before it are posted, and

- a send: once its action has computed the tensors;
- a receive: while few receives of its lane are posted, and at the latest when a send after it is ready;
- two messages of one group: together, by ``batch_isend_irecv``.

**Shapes.** A receive can be posted early only if its shapes are known. DeepSpeed announces shapes by a tensor of
numbers in the first message, or in each. Here the shapes of a lane are *fixed* once two successive messages had
the same, and stay so until the batch ends. Both stages have seen the same messages, so they agree. Other
messages are sent and received tensor by tensor when their instruction runs, and not in a group. A message has no tensor
if the receiver is frozen.

**Streams.** NCCL queues an operation after everything that the compute stream holds when it is posted. By then the sent
tensors have been computed, and earlier uses of the memory of received tensors have ended. A wait for an operation makes
the compute stream wait, not this process. Tensors are allocated and freed on the compute stream. They are kept here
until that stream waits for their operation, or for a later one between the same two ranks, which ends later. Then their
memory may be reused, as later uses are queued after it. A stage waits for its sends only after it has waited for a
later receive, and at the end of the batch.

gloo, on a CPU, runs the same code. There a send ends when its receive is posted, and a posted receive progresses by
itself. Neither can be asked whether it has ended (``is_completed`` is False until ``wait``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import version_of

AHEAD = 2  # receives of a lane that are posted before they are needed


class MessageKind(Enum):
    """The kind of a message between stages; its value is the message's tag."""

    ACTIVATION = 1
    GRADIENT = 2


MessageShapes = list[tuple[torch.Size, torch.dtype]]
Operation = tuple[bool, torch.Tensor]  # whether it is a send, and the tensor
Post = Callable[[int, Sequence[Operation]], Sequence[Any]]


class LaneKey(NamedTuple):
    """One of the lanes between this stage and a neighbour.

    Attributes:
        is_sent: this stage sends the messages; else it receives them.
    """

    kind: MessageKind
    is_sent: bool


# Per neighbour, the groups of messages in order. Each message is given by its lane, whose next one it is.
LinkPlan = Mapping[int, Sequence[tuple[LaneKey, ...]]]


def kept(tensor: torch.Tensor, kind: MessageKind) -> torch.Tensor:
    """Return the tensor to send for ``tensor``, which keeps its content if ``tensor`` gets new data.

    A tensor without gradient, such as a mask, is copied: its layer may keep it and change it for the next micro-batch.
    """
    content = tensor.detach()
    return content.clone() if kind is MessageKind.ACTIVATION and not tensor.requires_grad else content


class _SentTensor(NamedTuple):
    """A tensor under way, and its version (torch's count of in-place changes) when it was sent."""

    tensor: torch.Tensor
    version: int


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
                    "which under a schedule of ds_dynmo does not wait until it has arrived: let the stage's last layer "
                    'return a copy, or set dynmo.schedule.kind to "1f1b"'
                )


@dataclass
class _LaneState:
    """One lane in one direction, in one batch."""

    shapes: MessageShapes | None = None  # of the previous message
    shapes_are_fixed: bool = False  # all later messages of this batch have these shapes
    messages: int = 0
    ready: deque[tuple[list[_SentTensor], bool]] = field(default_factory=deque)  # sends to post; were shapes fixed
    arriving: deque[tuple[_PostedOperations, list[torch.Tensor]]] = field(default_factory=deque)  # posted receives


@dataclass
class _Link:
    """All messages between this stage and a neighbour in one batch."""

    stage_id: int
    groups: deque[tuple[LaneKey, ...]]  # still to post
    lanes: dict[LaneKey, _LaneState]
    posted: deque[_PostedOperations] = field(default_factory=deque)  # in order; not known to have ended


class Channels:
    """All lanes of one stage.

    Args:
        rank_of: returns the global rank of a stage of this pipeline.
        connect: returns a function that posts operations with a neighbour together. Collective the first time.
    """

    def __init__(self, rank_of: Callable[[int], int], connect: Callable[[], Post]) -> None:
        self._rank_of, self._connect = rank_of, connect
        self._device: Any = torch.device("cpu")
        self._shapes: dict[tuple[int, LaneKey], MessageShapes] = {}  # of the last batch
        self._links: dict[int, _Link] = {}
        self._alike = False
        self._now: LaneKey | None = None
        self._sending: list[_SentTensor] = []
        self._arrived: deque[torch.Tensor] | None = None  # tensors of the message to take; None: it was not posted
        self._taken: MessageShapes = []  # shapes taken so far

    @contextmanager
    def batch(self, plan: LinkPlan, *, alike: bool) -> Iterator[None]:
        """Run one batch; when it ends, all messages sent in it have arrived.

        Args:
            plan: per neighbour, the groups of messages in order.
            alike: whether messages of a lane may be expected to have the same shapes.
        """
        self._post = self._connect()
        self._alike = alike
        self._links = {}
        for stage, groups in plan.items():
            keys = {lane for group in groups for lane in group}
            lanes = {lane: _LaneState(self._shapes.get((stage, lane))) for lane in keys}
            self._links[stage] = _Link(stage, deque(groups), lanes)
        yield
        for link in self._links.values():
            assert not link.groups, f"messages with stage {link.stage_id} that no action made or took: {link.groups}"
            self._wait(link, None)
        # A lane's only message may contain the tensors that announce shapes, which its next message lacks. So keep the
        # shapes of lanes with more messages.
        self._shapes = {
            (link.stage_id, lane): state.shapes
            for link in self._links.values()
            for lane, state in link.lanes.items()
            if state.messages > 1 and state.shapes is not None
        }
        self._links = {}

    def forget_shapes(self) -> None:
        """Discard recorded message shapes."""
        self._shapes = {}

    # -- one instruction ------------------------------------------------------------------------------

    @contextmanager
    def sending(self, kind: MessageKind, dest_stage: int) -> Iterator[None]:
        """Send one message of a kind: all tensors sent to ``dest_stage`` inside."""
        link, lane = self._links[dest_stage], LaneKey(kind, is_sent=True)
        state = link.lanes[lane]
        self._now, self._sending = lane, []
        try:
            yield
        finally:
            self._now = None
        shapes: MessageShapes = [(sent.tensor.shape, sent.tensor.dtype) for sent in self._sending]
        if state.shapes_are_fixed and shapes != state.shapes:
            raise ConfigError(_unlike(kind, dest_stage, shapes, state.shapes))
        state.ready.append((self._sending, state.shapes_are_fixed))
        self._note(state, shapes)
        self._advance(link)

    @contextmanager
    def receiving(self, kind: MessageKind, src_stage: int) -> Iterator[None]:
        """Receive the next message of a kind: all tensors received from ``src_stage`` inside."""
        link, lane = self._links[src_stage], LaneKey(kind, is_sent=False)
        state = link.lanes[lane]
        if not state.arriving:
            self._advance(link, needed=lane)
        self._now, self._taken = lane, []
        if state.arriving:
            posted, tensors = state.arriving.popleft()
            self._wait(link, posted)
            self._arrived = deque(tensors)
        else:
            assert link.groups[0] == (lane,), f"{lane} of stage {src_stage} is needed before {link.groups[0]}"
            link.groups.popleft()
            self._arrived = None
        try:
            yield
        finally:
            self._now = None
        self._note(state, self._taken)
        self._advance(link)

    def _note(self, state: _LaneState, shapes: MessageShapes) -> None:
        """Record the shapes of a message."""
        state.shapes_are_fixed = state.shapes_are_fixed or (self._alike and shapes == state.shapes)
        state.shapes = list(shapes)
        state.messages += 1

    # -- the order ------------------------------------------------------------------------------------

    def _advance(self, link: _Link, needed: LaneKey | None = None) -> None:
        """Post all operations that may be posted now.

        Args:
            needed: the lane whose next message this stage needs now.
        """
        while link.groups:
            group = link.groups[0]
            if len(group) > 1 and not all(_shapes_are_fixed(link, lane) for lane in group):
                link.groups.popleft()
                link.groups.extendleft((lane,) for lane in reversed(group))
                continue
            if not all(_may_post(link, lane, needed) for lane in group):
                return
            link.groups.popleft()
            self._post_group(link, group)

    def _post_group(self, link: _Link, group: tuple[LaneKey, ...]) -> None:
        operations: list[tuple[torch.Tensor, int | None]] = []
        fixed, receives = True, []
        for lane in group:
            state = link.lanes[lane]
            if lane.is_sent:
                sent, fixed = state.ready.popleft()
                operations += sent
            else:
                tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in state.shapes or ()]
                receives.append((state, tensors))
                operations += [(tensor, None) for tensor in tensors]
        for batch in [operations] if fixed else [[operation] for operation in operations]:
            posted = self._posted(link, batch)
        for state, tensors in receives:
            state.arriving.append((posted, tensors))

    def _posted(self, link: _Link, tensors: list[tuple[torch.Tensor, int | None]]) -> _PostedOperations:
        operations = [(version is not None, tensor) for tensor, version in tensors]
        posted = _PostedOperations(list(self._post(link.stage_id, operations)) if operations else [], tensors)
        link.posted.append(posted)
        return posted

    def _wait(self, link: _Link, until: _PostedOperations | None) -> None:
        """Wait for ``until`` and all operations posted before it; None: for all."""
        while link.posted and (until is None or until in link.posted):
            link.posted.popleft().wait()

    # -- replacements of DeepSpeed's functions -----------------------------------------------------

    def send(self, tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> None:
        """Queue ``tensor`` to be sent in order, and return."""
        if self._now is None:
            dist.send(tensor, self._rank_of(dest_stage))
            return
        sent = kept(tensor, self._now.kind)
        self._sending.append(_SentTensor(sent, version_of(sent)))

    def recv(self, tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> None:
        """Receive into ``tensor``: it takes over the memory that was posted for it, without a copy."""
        if self._now is None:
            dist.recv(tensor, self._rank_of(src_stage))
            return
        self._taken.append((tensor.shape, tensor.dtype))
        self._device = tensor.device
        if self._arrived is None:
            link, buffer = self._links[src_stage], torch.empty_like(tensor)
            self._wait(link, self._posted(link, [(buffer, None)]))
        else:
            if not self._arrived or self._taken[-1] != (self._arrived[0].shape, self._arrived[0].dtype):
                assumed = self._links[src_stage].lanes[self._now].shapes
                raise ConfigError(_unlike(self._now.kind, src_stage, self._taken, assumed))
            buffer = self._arrived.popleft()
        tensor.data = buffer


def _shapes_are_fixed(link: _Link, lane: LaneKey) -> bool:
    """Return whether both sides know the shapes of the next message of this lane."""
    state = link.lanes[lane]
    return state.ready[0][1] if state.ready else state.shapes_are_fixed


def _may_post(link: _Link, lane: LaneKey, needed: LaneKey | None) -> bool:
    state = link.lanes[lane]
    if lane.is_sent:
        return bool(state.ready)
    if not state.shapes_are_fixed:
        return False
    return lane == needed or len(state.arriving) < AHEAD or any(other.ready for other in link.lanes.values())


def _unlike(kind: MessageKind, stage: int, shapes: MessageShapes, expected: MessageShapes | None) -> str:
    def listed(shapes: MessageShapes | None) -> str:
        return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in shapes or ()) or "nothing"

    return (
        f"a message ({kind.name.lower()}, between this stage and stage {stage}) has other tensors than those before it "
        f"in the batch: {listed(shapes)} instead of {listed(expected)}. Give the PipelineModule dynamic_shape=True, or "
        'set dynmo.schedule.kind to "1f1b"'
    )

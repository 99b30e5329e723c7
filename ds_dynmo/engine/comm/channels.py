"""Messages between stages that never keep a sender waiting.

A *lane* is all messages of one kind (activations or gradients) between two stages in one direction. They come in the
order of the micro-batches. A sender goes on at once; what it sent is kept until its receiver is known to have it. A
receiver posts the next messages of a lane before it needs them, so that they arrive while it computes.

NCCL runs what two ranks send each other one after the other: there a receive that is posted keeps all that the two
ranks post after it waiting, whatever its tag. So both stages post the same operations in the same order, that of
:mod:`ds_dynmo.schedules.link_order`, which says why nobody waits in a circle. A stage posts an operation once all
before it are posted, and

- a send: once its action has made the tensors;
- a receive: where few messages of its lane are posted, and at the latest when a send behind it is ready;
- two messages of one group: together, by ``batch_isend_irecv``.

**Sizes.** Only a message whose tensors are known can be posted before it is needed. DeepSpeed announces shapes by a
tensor of numbers in the first message, or in each. So a message is taken to look like the one before it only if that
looked like the one before that, and from then on for the batch. Both stages have seen the same messages, so they know
this of the same ones. Any other message is sent and received tensor by tensor, when its instruction runs, and not in a
group. A message may have no tensor, where the receiver is frozen.

**Streams.** NCCL queues an operation behind what the compute stream holds when it is posted. So what is sent has been
made by then, and what used the memory of a receive's tensors before is over. Waiting for an operation makes the compute
stream wait for it, not this process. Tensors are made and freed on the compute stream. They are kept here until that
stream waits for their operation, or for one posted later between the same two ranks, which is over later. After that
their memory may be used again, as whatever uses it is queued behind. A stage waits for its sends only where it has
waited for a later receive anyway, and at the end of the batch.

gloo, on a CPU, runs the same. There a send ends when its receive is posted, a receive that is posted progresses by
itself, and neither can be asked whether it has ended (``is_completed`` is False until ``wait``).
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

AHEAD = 2  # how many micro-batches' messages a receiver posts before it needs them


class Lane(Enum):
    """The kind of a message between stages; its value is the tag that tells it from the other."""

    ACTIVATION = 1
    GRADIENT = 2


MessageShapes = list[tuple[torch.Size, torch.dtype]]
Operation = tuple[bool, torch.Tensor]  # is it a send, and its tensor
Post = Callable[[int, Sequence[Operation]], Sequence[Any]]


class PlannedMessage(NamedTuple):
    """One message of the order of two stages, as one of them sees it; the next one of its lane.

    Attributes:
        is_sent: by this stage; else it is received.
    """

    lane: Lane
    is_sent: bool


LinkPlan = Mapping[int, Sequence[tuple[PlannedMessage, ...]]]


def kept(tensor: torch.Tensor, lane: Lane) -> torch.Tensor:
    """Return what is sent for ``tensor``: it has the content still when ``tensor`` is given another.

    A tensor without gradient, a mask say, is copied: its layer may keep it, and change it for the next micro-batch.
    """
    content = tensor.detach()
    return content.clone() if lane is Lane.ACTIVATION and not tensor.requires_grad else content


class _SentTensor(NamedTuple):
    """A tensor on its way, and how often its memory was written to when it was sent."""

    tensor: torch.Tensor
    version: int


@dataclass(eq=False)
class _PostedOperations:
    """Operations that were posted together.

    Attributes:
        tensors: of each, and of what is sent its version then; None: it is received.
    """

    works: list[Any]
    tensors: list[tuple[torch.Tensor, int | None]]

    def wait(self) -> None:
        """Wait until they are over.

        Raises:
            ConfigError: what was sent was changed meanwhile, so nobody knows what arrived.
        """
        for work in self.works:
            work.wait()
        self.works = []  # gloo's handles can be waited for once
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

    layout: MessageShapes | None = None  # of the message before
    is_settled: bool = False  # all messages that follow in this batch look like it
    messages: int = 0
    made: deque[tuple[list[_SentTensor], bool]] = field(default_factory=deque)  # not yet posted; whether it was settled
    arriving: deque[tuple[_PostedOperations, list[torch.Tensor]]] = field(default_factory=deque)  # posted


@dataclass
class _Link:
    """All between this stage and a neighbour, in one batch."""

    stage: int
    groups: deque[tuple[PlannedMessage, ...]]  # not posted
    lanes: dict[PlannedMessage, _LaneState]
    posted: deque[_PostedOperations] = field(default_factory=deque)  # in their order; not known to be over


class Channels:
    """All lanes of one stage.

    Args:
        rank_of: the global rank of a stage of this pipeline.
        connect: gives what posts operations with a neighbour, all of them at the same time. Collective the first time.
    """

    def __init__(self, rank_of: Callable[[int], int], connect: Callable[[], Post]) -> None:
        self._rank_of, self._connect = rank_of, connect
        self._device: Any = torch.device("cpu")
        self._layouts: dict[tuple[int, PlannedMessage], MessageShapes] = {}  # of the last batch
        self._links: dict[int, _Link] = {}
        self._alike = False
        self._now: PlannedMessage | None = None
        self._sending: list[_SentTensor] = []
        self._taking: deque[torch.Tensor] | None = None  # None: they are not posted
        self._taken: MessageShapes = []

    @contextmanager
    def batch(self, plan: LinkPlan, *, alike: bool) -> Iterator[None]:
        """Run one batch; when it ends, all messages sent in it have arrived.

        Args:
            plan: per neighbour, the groups of messages in their order.
            alike: may the messages of a lane be taken to look alike?
        """
        self._post = self._connect()
        self._alike = alike
        self._links = {}
        for stage, groups in plan.items():
            kinds = {message for group in groups for message in group}
            lanes = {message: _LaneState(self._layouts.get((stage, message))) for message in kinds}
            self._links[stage] = _Link(stage, deque(groups), lanes)
        yield
        for link in self._links.values():
            assert not link.groups, f"messages with stage {link.stage} that no action made or took: {link.groups}"
            self._wait(link, None)
        # a message alone in its batch may have been announced, and the next not
        self._layouts = {
            (link.stage, message): state.layout
            for link in self._links.values()
            for message, state in link.lanes.items()
            if state.messages > 1 and state.layout is not None
        }
        self._links = {}

    def forget_shapes(self) -> None:
        """Discard how messages looked: they may look other than before from now on."""
        self._layouts = {}

    # -- one instruction ------------------------------------------------------------------------------

    @contextmanager
    def sending(self, lane: Lane, dest_stage: int) -> Iterator[None]:
        """Send one message of ``lane``: all tensors sent to ``dest_stage`` inside."""
        link, message = self._links[dest_stage], PlannedMessage(lane, is_sent=True)
        state = link.lanes[message]
        self._now, self._sending = message, []
        try:
            yield
        finally:
            self._now = None
        layout: MessageShapes = [(sent.tensor.shape, sent.tensor.dtype) for sent in self._sending]
        if state.is_settled and layout != state.layout:
            raise ConfigError(_unlike(lane, dest_stage, layout, state.layout))
        state.made.append((self._sending, state.is_settled))
        self._note(state, layout)
        self._advance(link)

    @contextmanager
    def receiving(self, lane: Lane, src_stage: int) -> Iterator[None]:
        """Receive the next message of ``lane``: all tensors received from ``src_stage`` inside."""
        link, message = self._links[src_stage], PlannedMessage(lane, is_sent=False)
        state = link.lanes[message]
        if not state.arriving:
            self._advance(link, needed=message)
        self._now, self._taken = message, []
        if state.arriving:
            posted, tensors = state.arriving.popleft()
            self._wait(link, posted)
            self._taking = deque(tensors)
        else:
            assert link.groups[0] == (message,), f"{message} of stage {src_stage} is needed before {link.groups[0]}"
            link.groups.popleft()
            self._taking = None
        try:
            yield
        finally:
            self._now = None
        self._note(state, self._taken)
        self._advance(link)

    def _note(self, state: _LaneState, layout: MessageShapes) -> None:
        """Note how a message looked."""
        state.is_settled = state.is_settled or (self._alike and layout == state.layout)
        state.layout = list(layout)
        state.messages += 1

    # -- the order ------------------------------------------------------------------------------------

    def _advance(self, link: _Link, needed: PlannedMessage | None = None) -> None:
        """Post all that can be posted.

        Args:
            needed: of what is received, the next message of this kind.
        """
        while link.groups:
            group = link.groups[0]
            if len(group) > 1 and not all(_is_settled(link, message) for message in group):
                link.groups.popleft()
                link.groups.extendleft((message,) for message in reversed(group))
                continue
            if not all(_may_begin(link, message, needed) for message in group):
                return
            link.groups.popleft()
            self._begin(link, group)

    def _begin(self, link: _Link, group: tuple[PlannedMessage, ...]) -> None:
        operations: list[tuple[torch.Tensor, int | None]] = []
        together, receives = True, []
        for message in group:
            state = link.lanes[message]
            if message.is_sent:
                made, together = state.made.popleft()
                operations += made
            else:
                tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in state.layout or ()]
                receives.append((state, tensors))
                operations += [(tensor, None) for tensor in tensors]
        for part in [operations] if together else [[operation] for operation in operations]:
            posted = self._posted(link, part)
        for state, tensors in receives:
            state.arriving.append((posted, tensors))

    def _posted(self, link: _Link, tensors: list[tuple[torch.Tensor, int | None]]) -> _PostedOperations:
        operations = [(version is not None, tensor) for tensor, version in tensors]
        posted = _PostedOperations(list(self._post(link.stage, operations)) if operations else [], tensors)
        link.posted.append(posted)
        return posted

    def _wait(self, link: _Link, until: _PostedOperations | None) -> None:
        """Wait for ``until``, and so for all that was posted before; None: for everything."""
        while link.posted and (until is None or until in link.posted):
            link.posted.popleft().wait()

    # -- what stands in for DeepSpeed's functions -----------------------------------------------------

    def send(self, tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> None:
        """Send ``tensor`` when its turn has come, and go on."""
        if self._now is None:
            dist.send(tensor, self._rank_of(dest_stage))
            return
        sent = kept(tensor, self._now.lane)
        self._sending.append(_SentTensor(sent, version_of(sent)))

    def recv(self, tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> None:
        """Receive ``tensor``; what was posted for it becomes its content, without a copy."""
        if self._now is None:
            dist.recv(tensor, self._rank_of(src_stage))
            return
        self._taken.append((tensor.shape, tensor.dtype))
        self._device = tensor.device
        if self._taking is None:
            link, buffer = self._links[src_stage], torch.empty_like(tensor)
            self._wait(link, self._posted(link, [(buffer, None)]))
        else:
            if not self._taking or self._taken[-1] != (self._taking[0].shape, self._taking[0].dtype):
                assumed = self._links[src_stage].lanes[self._now].layout
                raise ConfigError(_unlike(self._now.lane, src_stage, self._taken, assumed))
            buffer = self._taking.popleft()
        tensor.data = buffer


def _is_settled(link: _Link, message: PlannedMessage) -> bool:
    """Return whether both sides know the shapes of the next message of this kind."""
    state = link.lanes[message]
    return state.made[0][1] if state.made else state.is_settled


def _may_begin(link: _Link, message: PlannedMessage, needed: PlannedMessage | None) -> bool:
    state = link.lanes[message]
    if message.is_sent:
        return bool(state.made)
    if not state.is_settled:
        return False
    return message == needed or len(state.arriving) < AHEAD or any(one.made for one in link.lanes.values())


def _unlike(lane: Lane, stage: int, found: MessageShapes, before: MessageShapes | None) -> str:
    def listed(layout: MessageShapes | None) -> str:
        return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in layout or ()) or "nothing"

    return (
        f"a message ({lane.name.lower()}, between this stage and stage {stage}) has other tensors than those before it "
        f"in the batch: {listed(found)} instead of {listed(before)}. Give the PipelineModule dynamic_shape=True, or "
        'set dynmo.schedule.kind to "1f1b"'
    )

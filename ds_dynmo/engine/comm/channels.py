"""Messages between stages that never keep a sender waiting.

A *lane* is all messages of one kind (activations or gradients) between two stages in one direction. They come in the
order of the micro-batches. A sender goes on at once; what it sent is kept until its receiver is known to have it. A
receiver posts the next messages of a lane before it needs them, so that they arrive while it computes.

Between processes over gloo, a send ends when its receive is posted, a receive that is posted progresses by itself, and
neither can be asked whether it has ended (``is_completed`` is False until ``wait``). So a send is waited for only where
the schedule says that its receiver has taken it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import version_of

AHEAD = 2  # how many micro-batches' messages a receiver posts before it needs them


class Lane(Enum):
    """The kind of a message between stages; its value is the tag that tells it from the other."""

    ACTIVATION = 1
    GRADIENT = 2


Layout = list[tuple[torch.Size, torch.dtype]]
Taken = dict[tuple[int, Lane], list[dict[Lane, int]]]


@dataclass
class _Receiving:
    """One lane's messages that come in; a message is one tensor or several."""

    total: int  # messages of this batch
    begun: int = 0
    layout: Layout = field(default_factory=list)  # of the message before
    now: Layout = field(default_factory=list)
    posted: deque[list[tuple[torch.Tensor, Any]]] = field(default_factory=deque)  # per message
    taking: deque[tuple[torch.Tensor, Any]] = field(default_factory=deque)


def kept(tensor: torch.Tensor, lane: Lane) -> torch.Tensor:
    """Return what is sent for ``tensor``: it has the content still when ``tensor`` is given another.

    A tensor without gradient, a mask say, is copied: its layer may keep it, and change it for the next micro-batch.
    """
    content = tensor.detach()
    return content.clone() if lane is Lane.ACTIVATION and not tensor.requires_grad else content


@dataclass(frozen=True)
class _Sent:
    """A tensor on its way, and how often its memory was written to when it was sent."""

    work: Any
    tensor: torch.Tensor
    version: int

    def finish(self) -> None:
        """Wait until the tensor has left.

        Raises:
            ConfigError: it was changed meanwhile, so nobody knows what was sent.
        """
        self.work.wait()
        if version_of(self.tensor) != self.version:
            raise ConfigError(
                f"a tensor of shape {list(self.tensor.shape)} was changed in place after it was sent to another stage, "
                "which under a schedule of ds_dynmo does not wait until it has arrived: let the stage's last layer "
                'return a copy, or set dynmo.schedule.kind to "1f1b"'
            )


class Channels:
    """All lanes of one stage.

    Args:
        rank_of: the global rank of a stage of this pipeline.
        ahead: how many messages of a lane are posted before they are needed; 0: none.
    """

    def __init__(self, rank_of: Callable[[int], int], *, ahead: int = AHEAD) -> None:
        self._rank_of, self._ahead = rank_of, ahead
        self._lane: Lane | None = None
        self._device: Any = torch.device("cpu")
        self._receiving: dict[tuple[int, Lane], _Receiving] = {}
        self._layouts: dict[tuple[int, Lane], Layout] = {}  # of the last batch
        self._sent: dict[tuple[int, Lane], deque[list[_Sent]]] = {}
        self._taken: dict[tuple[int, Lane], int] = {}
        self._learned: Taken = {}
        self._alike: Collection[Lane] = ()

    @contextmanager
    def batch(self, learned: Taken, alike: Collection[Lane]) -> Iterator[None]:
        """One batch: what was sent in it has arrived when it ends.

        Args:
            learned: per neighbour and lane, an entry for each message that arrives: how many of this stage's own
                messages that neighbour has taken by then, per lane.
            alike: lanes whose messages may be posted ahead, if they look like the one before.
        """
        self._learned, self._alike = learned, alike
        self._receiving = {
            key: _Receiving(len(messages), layout=self._layouts.get(key, [])) for key, messages in learned.items()
        }
        self._sent, self._taken = {}, {}
        yield
        for messages in self._sent.values():
            for message in messages:
                for sent in message:
                    sent.finish()
        # a message alone in its batch may have been announced, and the next not
        self._layouts = {key: one.layout for key, one in self._receiving.items() if one.total > 1}
        self._sent, self._receiving = {}, {}

    def forget_shapes(self) -> None:
        """Messages may look other than before from now on."""
        self._layouts = {}

    # -- one instruction ------------------------------------------------------------------------------

    @contextmanager
    def sending(self, lane: Lane, dest_stage: int) -> Iterator[Sequence[Any]]:
        """Inside, what is sent to ``dest_stage`` is one message of ``lane``. Gives what is in it, as it grows."""
        message: list[_Sent] = []
        self._sent.setdefault((dest_stage, lane), deque()).append(message)
        self._lane = lane
        try:
            yield message
        finally:
            self._lane = None

    @contextmanager
    def receiving(self, lane: Lane, src_stage: int) -> Iterator[Sequence[Any]]:
        """Inside, what comes from ``src_stage`` is the next message of ``lane``. Gives its layout, as it grows."""
        key = (src_stage, lane)
        one = self._receiving[key]
        self._lane, one.now = lane, []
        one.taking = deque(one.posted.popleft()) if one.posted else deque()
        try:
            yield one.now
        finally:
            self._lane = None
        one.begun += 1
        if lane in self._alike and one.now == one.layout:
            self._post(key, one)
        one.layout = one.now
        self._let_go(src_stage, self._learned[key][one.begun - 1])

    def _post(self, key: tuple[int, Lane], one: _Receiving) -> None:
        source, lane = self._rank_of(key[0]), key[1]
        while len(one.posted) < min(self._ahead, one.total - one.begun):
            message = []
            for shape, dtype in one.layout:
                buffer = torch.empty(shape, dtype=dtype, device=self._device)
                message.append((buffer, dist.irecv(buffer, source, tag=lane.value)))
            one.posted.append(message)

    def _let_go(self, neighbour: int, taken: Mapping[Lane, int]) -> None:
        """Drop what was sent to ``neighbour`` and is known to be there."""
        for lane, count in taken.items():
            key = (neighbour, lane)
            messages = self._sent.get(key)
            while messages and self._taken.get(key, 0) < count:
                for sent in messages.popleft():
                    sent.finish()
                self._taken[key] = self._taken.get(key, 0) + 1

    # -- what stands in for DeepSpeed's functions -----------------------------------------------------

    def send(self, tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> None:
        """Send ``tensor`` and go on."""
        lane = self._lane
        if lane is None:
            dist.send(tensor, self._rank_of(dest_stage))
            return
        sent = kept(tensor, lane)
        work = dist.isend(sent, self._rank_of(dest_stage), tag=lane.value)
        self._sent[dest_stage, lane][-1].append(_Sent(work, sent, version_of(sent)))

    def recv(self, tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> None:
        """Receive ``tensor``; what was posted for it becomes its content, without a copy."""
        lane = self._lane
        if lane is None:
            dist.recv(tensor, self._rank_of(src_stage))
            return
        one = self._receiving[src_stage, lane]
        one.now.append((tensor.shape, tensor.dtype))
        self._device = tensor.device
        if not one.taking:
            buffer = torch.empty_like(tensor)
            work: Any = dist.irecv(buffer, self._rank_of(src_stage), tag=lane.value)
        else:
            buffer, work = one.taking.popleft()
        work.wait()
        tensor.data = buffer

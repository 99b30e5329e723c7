"""DeepSpeed's messages between stages: the two functions by which its pipeline instructions send and receive.

Read in DeepSpeed 0.19.8, runtime/pipe/p2p.py. Instructions look them up in that module whenever they call them, so
putting others there for the time of a batch changes how messages travel, and nothing else: which tensors a message has,
their shapes and what is done with them stay DeepSpeed's, or the user's whose instruction calls DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from deepspeed.runtime.pipe import p2p


class Transport(Protocol):
    """The channel of messages between the stages of a pipeline."""

    def send(self, tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> Any:
        """Send ``tensor`` to a neighbour. The tensor may not be changed afterwards."""

    def recv(self, tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> Any:
        """Receive ``tensor`` from a neighbour: it holds the message on return."""


def send_to_next(engine: Any, tensor: torch.Tensor) -> None:
    """Send ``tensor`` to the next stage, in the message that goes there."""
    p2p.send(tensor, engine.next_stage)


def receive_from_previous(engine: Any, tensor: torch.Tensor) -> None:
    """Receive ``tensor`` from the previous stage, in the message that comes from there."""
    p2p.recv(tensor, engine.prev_stage)


@contextmanager
def messages_through(transport: Transport) -> Iterator[None]:
    """Let DeepSpeed's instructions send and receive through ``transport``."""
    bare = p2p.send, p2p.recv
    p2p.send, p2p.recv = transport.send, transport.recv
    try:
        yield
    finally:
        p2p.send, p2p.recv = bare


def shapes_are_known(engine: Any) -> bool:
    """Return whether messages of a boundary have the same shapes in every micro-batch and none is to be announced."""
    return not engine.dynamic_shape

"""Messages of a move in rounds of bounded size, so that a batch can train between two rounds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from ds_dynmo.engine.comm.pending import PendingExchange
from ds_dynmo.engine.comm.transfer_stream import TransferStream

ROUND_BYTES = 8 << 20  # least size of a round between two ranks in one direction, if there is so much to send
MOST_ROUNDS = 16
PER_CALL = 2  # rounds that are queued at a time

Message = list[torch.Tensor]  # flat byte tensors that travel together
Messages = list[tuple[int, Message]]  # with the rank that each goes to or comes from


class Round(NamedTuple):
    """What a rank sends and receives in one round."""

    sends: Messages
    receives: Messages


def rounds_of(sends: Messages, receives: Messages) -> list[Round]:
    """Cut the messages of a rank into rounds.

    Messages from one rank to another are cut by their sizes alone, so both ranks cut them alike. Round k has the k-th
    part of what is exchanged with every rank. A rank begins its rounds in order, and the k-th rounds of all ranks fit
    together: so no rank waits for one that waits for it, even if a backend runs operations in the order of posting, as
    NCCL does.
    """
    cut_sends, cut_receives = _cut_by_peer(sends), _cut_by_peer(receives)
    count = max((len(parts) for parts in (*cut_sends.values(), *cut_receives.values())), default=0)
    return [Round(_part(cut_sends, number), _part(cut_receives, number)) for number in range(count)]


def _cut_by_peer(messages: Messages) -> dict[int, list[list[Message]]]:
    """Return per rank the messages exchanged with it in one direction, in parts of about equal size."""
    of_peer: dict[int, list[Message]] = {}
    for peer, message in messages:
        of_peer.setdefault(peer, []).append(message)
    return {peer: _cut(of_this) for peer, of_this in of_peer.items()}


def _cut(messages: Sequence[Message]) -> list[list[Message]]:
    size = max(ROUND_BYTES, -(-sum(map(_bytes_of, messages)) // MOST_ROUNDS))
    finished: list[list[Message]] = []
    part: list[Message] = []
    room = size
    for message in messages:
        pieces = [[piece] for piece in message[0].split(size)] if len(message) == 1 else [message]
        for piece in pieces:
            if part and _bytes_of(piece) > room:
                finished.append(part)
                part, room = [], size
            part.append(piece)
            room -= _bytes_of(piece)
    return [*finished, part]


def _bytes_of(message: Message) -> int:
    return sum(tensor.numel() for tensor in message)


def _part(cut: Mapping[int, Sequence[Sequence[Message]]], number: int) -> Messages:
    return [(peer, message) for peer, of_peer in cut.items() for message in next(islice(of_peer, number, None), ())]


class Rounds:
    """An exchange of messages, round by round.

    Each call of :meth:`advance` queues rounds without asking whether earlier ones have ended: an accelerator may be far
    behind the calls, and orders a round after the work that was queued before it.

    Args:
        post: starts a round.
    """

    def __init__(self, rounds: Sequence[Round], post: Callable[[Round], PendingExchange]) -> None:
        self._left, self._post = deque(rounds), post
        self._under_way: deque[PendingExchange] = deque()
        self._failure: BaseException | None = None
        self._count = len(rounds)
        self._waited_for: int | None = None

    @property
    def share_in_time(self) -> float:
        """The share of the rounds, which are of about equal size, that had ended before :meth:`wait`."""
        waited_for = self._waited_for if self._waited_for is not None else self._unfinished
        return 1.0 - waited_for / self._count if self._count else 1.0

    @property
    def _unfinished(self) -> int:
        return len(self._left) + len(self._under_way)

    def advance(self) -> bool:
        """Go on with the exchange, and return at once. A failure is kept for :meth:`wait`.

        Returns:
            Whether :meth:`wait` would return, or raise, at once.
        """
        if self._failure is None:
            try:
                for _ in range(min(PER_CALL, len(self._left))):
                    self._under_way.append(self._post(self._left[0]))
                    self._left.popleft()
                while self._under_way and self._under_way[0].is_done():
                    self._under_way.popleft().wait()
            except Exception as failure:
                self._failure = failure
        return self._failure is not None or not self._unfinished

    def wait(self) -> None:
        """Exchange all that is left.

        Raises:
            RuntimeError: the time-out has passed, or a peer is gone.
            Exception: a round could not be begun, as for want of memory.
        """
        self.advance()
        if self._waited_for is None:
            self._waited_for = self._unfinished
        try:
            self._finish()
        except Exception as failure:
            self._failure = failure
        if self._failure is not None:
            raise self._failure

    def _finish(self) -> None:
        while self._left and self._failure is None:
            self.advance()
        while self._under_way and self._failure is None:
            self._under_way.popleft().wait()


class RoundsOnStream(Rounds):
    """The same on an accelerator, which is behind the host: its events tell what had arrived in time.

    Args:
        stream: that the rounds are queued on.
    """

    def __init__(
        self, rounds: Sequence[Round], post: Callable[[Round], PendingExchange], stream: TransferStream
    ) -> None:
        super().__init__(rounds, post)
        self._stream = stream
        self._began: Any = None
        self._needed: Any = None  # when the compute stream could do no more without the rounds
        self._arrived: Any = None

    @property
    def share_in_time(self) -> float:
        """The share of the exchange's time that was over when the compute stream came to wait for it.

        An accelerator that cannot time events does not say that it waited, so 1.
        """
        if not self._waited_for or self._arrived is None:
            return 1.0
        self._needed.synchronize()
        self._arrived.synchronize()
        late: float = self._needed.elapsed_time(self._arrived)
        return 1.0 - late / self._began.elapsed_time(self._arrived) if late > 0 else 1.0

    def advance(self) -> bool:
        if self._began is None:
            with self._stream.after_compute():
                self._began = self._stream.event()
        return super().advance()

    def wait(self) -> None:
        needed = self._stream.event()
        super().wait()
        if self._arrived is None:  # later waits are for nothing
            with self._stream.before_compute():
                self._needed, self._arrived = needed, self._stream.event()


class RoundsInThread(Rounds):
    """The same on a CPU, where sending takes time: a thread exchanges one round after the other.

    So messages travel while the rank computes, and while it waits for the pipeline's.
    """

    def __init__(self, rounds: Sequence[Round], post: Callable[[Round], PendingExchange]) -> None:
        super().__init__(rounds, post)
        self._thread = threading.Thread(target=self._exchange, name="ds_dynmo transfers", daemon=True)

    def _exchange(self) -> None:
        try:
            while self._left:
                self._post(self._left[0]).wait()
                self._left.popleft()
        except BaseException as failure:  # raised by wait()
            self._failure = failure

    def advance(self) -> bool:
        if self._thread.ident is None:
            self._thread.start()
        return not self._thread.is_alive()

    def _finish(self) -> None:
        self._thread.join()

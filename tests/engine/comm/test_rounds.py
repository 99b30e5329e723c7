"""Messages of a move in rounds."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ds_dynmo.engine.comm.rounds import (
    MOST_ROUNDS,
    PER_CALL,
    ROUND_BYTES,
    Message,
    Round,
    Rounds,
    RoundsInThread,
    RoundsOnStream,
    rounds_of,
)
from ds_dynmo.engine.move.background import FIRST_BYTES, TransferBudget
from ds_dynmo.placement import Placement


def sizes(messages: Iterable[Message]) -> list[list[int]]:
    return [[tensor.numel() for tensor in message] for message in messages]


@pytest.mark.parametrize("seed", range(20))
def test_sender_and_receiver_cut_alike(seed: int) -> None:
    chooser = random.Random(seed)
    messages = [
        [torch.empty(chooser.randrange(1, 4 * ROUND_BYTES), dtype=torch.uint8, device="meta")]
        for _ in range(chooser.randrange(1, 30))
    ]
    packed = [torch.empty(100, dtype=torch.uint8, device="meta") for _ in range(5)]
    others = [(2, [torch.empty(7 * ROUND_BYTES, dtype=torch.uint8, device="meta")])] * chooser.randrange(3)
    there = rounds_of([(1, packed), *((1, message) for message in messages), *others], [])
    here = rounds_of([], [*others, (0, packed), *((0, message) for message in messages)])
    for number in range(max(len(there), len(here))):
        sent = [message for peer, message in (there[number].sends if number < len(there) else []) if peer == 1]
        received = [message for peer, message in (here[number].receives if number < len(here) else []) if peer == 0]
        assert sizes(sent) == sizes(received)
    whole = sum(message[0].numel() for message in messages) + 500
    assert sum(t.numel() for each in there for peer, message in each.sends for t in message if peer == 1) == whole
    for each in there:
        bytes_to_1 = sum(tensor.numel() for peer, message in each.sends for tensor in message if peer == 1)
        assert bytes_to_1 <= max(ROUND_BYTES, -(-whole // MOST_ROUNDS))


def test_nothing_needs_no_round() -> None:
    assert rounds_of([], []) == []


class Posted:
    """A round that a test has posted; an accelerator has not come to it yet."""

    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        """Return, as if it had arrived."""


def rounds_to(*peers: int) -> list[Round]:
    return [Round([(peer, [])], []) for peer in peers]


def test_rounds_are_queued_before_earlier_ones_have_ended() -> None:
    queued: list[int] = []

    def post(messages: Round) -> Any:
        queued.append(messages.sends[0][0])
        return Posted()

    rounds = Rounds(rounds_to(*range(2 * PER_CALL + 1)), post)
    assert not rounds.advance() and queued == list(range(PER_CALL))
    assert not rounds.advance() and queued == list(range(2 * PER_CALL))
    rounds.wait()
    assert queued == list(range(2 * PER_CALL + 1)) and rounds.share_in_time == 0.0


def test_on_a_cpu_rounds_go_on_between_two_calls() -> None:
    begun, over = [threading.Event() for _ in range(5)], threading.Event()

    def post(messages: Round) -> Any:
        begun[messages.sends[0][0]].set()
        if messages.sends[0][0] == 4:
            over.wait()
        return Posted()

    rounds = RoundsInThread(rounds_to(*range(5)), post)
    assert not rounds.advance() and begun[4].wait(60)
    assert not rounds.advance() and rounds.share_in_time == pytest.approx(0.8)
    over.set()
    rounds.wait()
    assert rounds.advance()


class Device:
    """An accelerator that computes until a time and transfers until another. It is the stream of its rounds, too.

    The host is far ahead: it has queued all when the device has not begun.
    """

    def __init__(self, computes_until: float, transfers_until: float) -> None:
        self.computing, self.transferring = [0.0, computes_until], [0.0, transfers_until]
        self._times = self.computing

    @contextmanager
    def before_compute(self) -> Iterator[None]:
        self._times = self.transferring
        yield
        self._times = self.computing

    after_compute = before_compute

    def event(self) -> Any:
        return Event(self._times.pop(0) if len(self._times) > 1 else self._times[0])


class Event:
    def __init__(self, seconds: float) -> None:
        self._seconds, self._is_awaited = seconds, False

    def synchronize(self) -> None:
        self._is_awaited = True

    def elapsed_time(self, later: Event) -> float:
        assert later._is_awaited, "the device is not there yet"
        return 1000 * (later._seconds - self._seconds)


@pytest.mark.parametrize(("transfers_until", "share"), [(6.0, 1.0), (10.0, 1.0), (40.0, 0.25)])
def test_the_device_tells_what_had_arrived_in_time(transfers_until: float, share: float) -> None:
    device = Device(10.0, transfers_until)
    device.computing.pop(0)
    rounds = RoundsOnStream(rounds_to(1, 2, 3), lambda _: Posted(), device)  # type: ignore[arg-type, return-value]
    assert not rounds.advance()
    for _ in range(2):
        rounds.wait()
        assert rounds.share_in_time == share


def test_what_a_device_does_not_tell_is_not_held_against_a_move() -> None:
    device = Device(10.0, 40.0)
    device.event = lambda: None  # type: ignore[method-assign]
    rounds = RoundsOnStream(rounds_to(1, 2, 3), lambda _: Posted(), device)  # type: ignore[arg-type, return-value]
    rounds.wait()
    assert rounds.share_in_time == 1.0


@pytest.mark.parametrize("kind", [Rounds, RoundsInThread])
def test_a_round_that_cannot_begin_is_an_error_of_the_wait(kind: type[Rounds]) -> None:
    def post(messages: Round) -> Any:
        raise MemoryError("no room")

    rounds = kind(rounds_to(1, 2), post)
    rounds.advance()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            rounds.wait()
    assert rounds.advance() and rounds.share_in_time == 0.0


@pytest.mark.parametrize("kind", [Rounds, RoundsInThread])
def test_a_round_that_times_out_is_an_error_of_every_wait(kind: type[Rounds]) -> None:
    class Late(Posted):
        def wait(self) -> None:
            raise RuntimeError("timed out")

    rounds = kind(rounds_to(1), lambda messages: Late())  # type: ignore[arg-type, return-value]
    rounds.advance()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timed out"):
            rounds.wait()
    assert rounds.advance() and rounds.share_in_time == 0.0
    assert "ds_dynmo transfers" not in {thread.name for thread in threading.enumerate()}


def test_the_budget_is_what_arrived_in_time() -> None:
    budget = TransferBudget()
    assert budget.num_bytes == FIRST_BYTES
    budget.record(FIRST_BYTES, 1.0)
    assert budget.num_bytes == 2 * FIRST_BYTES
    budget.record(1000, 0.25)
    assert budget.num_bytes == 250
    budget.record(100, 1.0)
    assert budget.num_bytes == 250


def test_a_move_goes_as_far_as_the_budget_allows() -> None:
    budget, here, target = TransferBudget(), Placement.chain([0, 2, 8]), Placement.chain([0, 5, 8])

    def next_cut(num_bytes: int, forbidden: int = 0) -> int:
        budget.num_bytes = num_bytes
        found = budget.next_placement(
            here,
            target,
            allows=lambda placement: placement.boundaries[1] != forbidden,
            bytes_to=lambda placement: 10 * (placement.boundaries[1] - 2),
        )
        return found.boundaries[1]

    assert [next_cut(30), next_cut(29), next_cut(10), next_cut(1)] == [5, 4, 3, 3]
    assert [next_cut(29, forbidden=4), next_cut(1, forbidden=3)] == [3, 4]

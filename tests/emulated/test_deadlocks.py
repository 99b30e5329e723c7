"""The search finds what NCCL would not have got through, with the places, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.emulated import operation_log
from tests.emulated.deadlocks import check

SEND, RECV = "send", "recv"


def log(folder: Path, *ranks: list[tuple[Any, ...]], finished: bool = True) -> list[str]:
    """Log, per rank, operations: communicator, what it is, its messages, and numbers of those that it is behind."""
    for rank, operations in enumerate(ranks):
        operation_log.log_operations(str(folder), rank)
        for number, (communicator, what, *rest) in enumerate(operations):
            messages, after = rest[0] if rest else [], rest[1] if len(rest) > 1 else []
            operation_log.write(number, communicator, rank, len(ranks), what, messages, after)
    return check(str(folder), finished)


@pytest.fixture(autouse=True)
def _end_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_log, "_file", None)


def message(kind: str, peer: int, size: int = 4) -> tuple[str, str, list[tuple[str, int, int]]]:
    return "0:1", kind, [(kind, peer, size)]


def test_what_meets_is_no_fault(tmp_path: Path) -> None:
    first = [("all", "all_reduce"), message(SEND, 1), message(RECV, 1), ("all", "broadcast", [], [2])]
    second = [("all", "all_reduce"), message(RECV, 0), message(SEND, 0), ("all", "broadcast")]
    assert log(tmp_path, first, second) == []


def test_both_ranks_send_first(tmp_path: Path) -> None:
    (problem,) = log(tmp_path, [message(SEND, 1), message(RECV, 1)], [message(SEND, 0), message(RECV, 0)])
    assert "in a circle" in problem
    assert "rank 0: send 4 bytes to member 1" in problem and "rank 1: send 4 bytes to member 0" in problem
    assert f"{Path(__file__).name}:" in problem


def test_a_batch_may_send_and_receive_at_once(tmp_path: Path) -> None:
    batches = [[("all", "batch", [(SEND, 1 - rank, 4), (RECV, 1 - rank, 4)])] for rank in (0, 1)]
    assert log(tmp_path, *batches) == []


def test_a_circle_through_three_ranks_and_two_communicators(tmp_path: Path) -> None:
    def rank(own: int) -> list[tuple[Any, ...]]:
        previous, following = (own - 1) % 3, (own + 1) % 3
        return [
            (f"from {previous}", RECV, [(RECV, previous, 4)]),
            (f"from {own}", SEND, [(SEND, following, 4)], [0]),
        ]

    (problem,) = log(tmp_path, rank(0), rank(1), rank(2))
    assert "in a circle" in problem and all(f"rank {number}: " in problem for number in range(3))


def test_operations_of_independent_streams_make_no_circle(tmp_path: Path) -> None:
    ranks = [
        [
            (f"from {(own - 1) % 3}", RECV, [(RECV, (own - 1) % 3, 4)]),
            (f"from {own}", SEND, [(SEND, (own + 1) % 3, 4)]),
        ]
        for own in range(3)
    ]
    assert log(tmp_path, *ranks) == []


def test_collectives_in_another_order(tmp_path: Path) -> None:
    (problem,) = log(
        tmp_path, [("all", "all_reduce"), ("all", "broadcast")], [("all", "broadcast"), ("all", "all_reduce")]
    )
    assert "collective 0 of communicator all is not the same" in problem
    assert "rank 0: all_reduce" in problem and "rank 1: broadcast" in problem


def test_a_collective_behind_a_message_on_one_rank(tmp_path: Path) -> None:
    first, second = ("all", "batch", [(SEND, 1, 4)]), ("all", "batch", [(RECV, 0, 4)])
    (problem,) = log(tmp_path, [first, ("all", "barrier")], [("all", "barrier"), second])
    assert "in a circle" in problem and "rank 0: batch (send 4 bytes" in problem and "rank 1: barrier" in problem


def test_messages_of_another_size(tmp_path: Path) -> None:
    (problem,) = log(tmp_path, [message(SEND, 1, 8)], [message(RECV, 0, 4)])
    assert problem.startswith("8 bytes are sent, 4 received")
    assert "rank 0: send" in problem and "rank 1: recv" in problem


def test_what_lacks_its_counterpart(tmp_path: Path) -> None:
    ranks = [message(SEND, 1), ("all", "barrier"), ("all", "barrier")], [("all", "barrier")]
    lacking, lost = log(tmp_path, *ranks)
    assert lacking.startswith("1 of 2 ranks lack collective 1") and "rank 0: barrier" in lacking
    assert lost.startswith("a message on communicator 0:1 is never received") and "rank 0: send" in lost
    assert log(tmp_path, *ranks, finished=False) == []


def test_the_last_line_of_a_killed_rank(tmp_path: Path) -> None:
    log(tmp_path, [("all", "barrier")], [("all", "barrier")])
    with open(tmp_path / "operations0", "a") as file:
        file.write('{"rank": 0, "numb')
    assert check(str(tmp_path)) == []


def test_long_logs_are_searched(tmp_path: Path) -> None:
    """Each operation waits for the one before: no recursion, no time but in proportion."""
    first = [message(SEND, 1), ("all", "all_reduce"), message(RECV, 1)] * 2_000
    second = [message(RECV, 0), ("all", "all_reduce"), message(SEND, 0)] * 2_000
    assert log(tmp_path, first, second) == []

"""Recalls of parked ranks, and announcements of released processes that end, through the store of the launch.

A recall contains the stages of the next world. Every recalled rank answers. The recall is confirmed only if all do, so
that a dead parked process is noticed before the present world ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ds_dynmo.engine.resize.world import STORE_LOST

_END = "end"
_MOST_WAIT_SECONDS = 60.0  # of one wait; a parked rank waits repeatedly


@dataclass(frozen=True)
class Recall:
    """A call of parked ranks to world number ``generation``, which has these stages of the job."""

    generation: int
    stages: tuple[int, ...]


def post_recall(store: Any, launch_ranks: Sequence[int], recall: Recall, *, timeout_seconds: float) -> list[int]:
    """Recall the parked ranks ``launch_ranks``; confirm if all answer, else cancel. Rank 0 does this.

    Returns:
        The ranks that did not answer; the recall is cancelled if there are any.
    """
    text = json.dumps({"generation": recall.generation, "stages": recall.stages})
    for launch_rank in launch_ranks:
        store.set(_key("call", launch_rank, _count(store, launch_rank)), text)
    with suppress(RuntimeError):  # missing ranks are found below
        store.wait(
            [_key("answer", launch_rank, _count(store, launch_rank)) for launch_rank in launch_ranks],
            timedelta(seconds=timeout_seconds),
        )
    unresponsive = [
        launch_rank
        for launch_rank in launch_ranks
        if not store.check([_key("answer", launch_rank, _count(store, launch_rank))])
    ]
    for launch_rank in launch_ranks:
        number = _count(store, launch_rank)
        store.add(_counter(launch_rank), 1)
        store.set(_key("verdict", launch_rank, number), "off" if unresponsive else "on")
    return unresponsive


def dismiss(store: Any, launch_ranks: Sequence[int]) -> None:
    """End the wait of parked ranks: they will not be recalled."""
    for launch_rank in launch_ranks:
        store.set(_key("call", launch_rank, _count(store, launch_rank)), _END)


def await_recall(store: Any, launch_rank: int, timeout_seconds: float) -> Recall | None:
    """Wait until this parked rank is recalled and the recall is confirmed; None: the job has ended or is unreachable.

    Args:
        timeout_seconds: of one wait; waits are repeated while the store answers.
    """
    wait_seconds = min(_MOST_WAIT_SECONDS, timeout_seconds)
    try:
        while True:
            number = _count(store, launch_rank)
            text = _get(store, _key("call", launch_rank, number), wait_seconds)
            if text == _END:
                return None
            store.set(_key("answer", launch_rank, number), "")
            if _get(store, _key("verdict", launch_rank, number), wait_seconds) == "on":
                message = json.loads(text)
                return Recall(message["generation"], tuple(message["stages"]))
    except STORE_LOST:
        return None  # rank 0's process has ended or is unreachable


def announce_exit(store: Any, launch_rank: int) -> None:
    """Write that the process of this released rank is about to end."""
    with suppress(RuntimeError):  # the store went with rank 0's process
        store.set(_exit_key(launch_rank), "")


def have_exited(store: Any, launch_ranks: Sequence[int]) -> bool:
    """Return whether the processes of all these released ranks have announced their end."""
    with suppress(RuntimeError):
        return bool(store.check([_exit_key(launch_rank) for launch_rank in launch_ranks]))
    return False


def _get(store: Any, key: str, wait_seconds: float) -> str:
    while True:
        try:
            store.wait([key], timedelta(seconds=wait_seconds))
        except STORE_LOST:
            raise
        except RuntimeError:  # nothing yet
            continue
        text: str = store.get(key).decode()
        return text


def _count(store: Any, launch_rank: int) -> int:
    """Count the recalls of this rank so far."""
    return int(store.add(_counter(launch_rank), 0))


def _counter(launch_rank: int) -> str:
    return f"ds_dynmo/calls/{launch_rank}"


def _exit_key(launch_rank: int) -> str:
    return f"ds_dynmo/ends/{launch_rank}"


def _key(what: str, launch_rank: int, number: int) -> str:
    return f"ds_dynmo/{what}/{launch_rank}/{number}"

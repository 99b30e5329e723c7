"""How a parked rank is called back, and how one that is not parked says that it ends, through the store of the launch.

A call says which stages the next world has. Every rank that is called answers; only if all do is the call confirmed,
so that a parked process that has died is found out before the present world is given up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ds_dynmo.engine.elastic.world import STORE_LOST

_END = "end"
_LOOK_SECONDS = 60.0  # of one look into the store, at most; a parked rank looks again


@dataclass(frozen=True)
class Call:
    """What a parked rank is called to: the world of this number, of these stages of the launch."""

    generation: int
    stages: tuple[int, ...]


def post(store: Any, launch_ranks: Sequence[int], call: Call, *, timeout_seconds: float) -> list[int]:
    """Call the parked ranks ``launch_ranks`` and confirm, if all answer, or call it off. Rank 0 does this.

    Returns:
        Those that did not answer: the call is off if there are any.
    """
    text = json.dumps({"generation": call.generation, "stages": call.stages})
    for launch_rank in launch_ranks:
        store.set(_key("call", launch_rank, _count(store, launch_rank)), text)
    with suppress(RuntimeError):  # who is missing is found next
        store.wait(
            [_key("answer", launch_rank, _count(store, launch_rank)) for launch_rank in launch_ranks],
            timedelta(seconds=timeout_seconds),
        )
    silent = [
        launch_rank
        for launch_rank in launch_ranks
        if not store.check([_key("answer", launch_rank, _count(store, launch_rank))])
    ]
    for launch_rank in launch_ranks:
        number = _count(store, launch_rank)
        store.add(_counter(launch_rank), 1)
        store.set(_key("verdict", launch_rank, number), "off" if silent else "on")
    return silent


def dismiss(store: Any, launch_ranks: Sequence[int]) -> None:
    """Tell parked ranks that nobody will call any more."""
    for launch_rank in launch_ranks:
        store.set(_key("call", launch_rank, _count(store, launch_rank)), _END)


def await_call(store: Any, launch_rank: int, timeout_seconds: float) -> Call | None:
    """Wait until this parked rank is called and the call is confirmed; None: the job has ended, or is out of reach.

    Args:
        timeout_seconds: most that one look into the store waits; as long as the store answers, there is another.
    """
    look_seconds = min(_LOOK_SECONDS, timeout_seconds)
    try:
        while True:
            number = _count(store, launch_rank)
            text = _get(store, _key("call", launch_rank, number), look_seconds)
            if text == _END:
                return None
            store.set(_key("answer", launch_rank, number), "")
            if _get(store, _key("verdict", launch_rank, number), look_seconds) == "on":
                message = json.loads(text)
                return Call(message["generation"], tuple(message["stages"]))
    except STORE_LOST:
        return None  # rank 0's process has ended, or no link leads to it


def say_that_it_ends(store: Any, launch_rank: int) -> None:
    """The process of this released rank ends."""
    with suppress(RuntimeError):  # the store went with rank 0's process
        store.set(_ending(launch_rank), "")


def all_end(store: Any, launch_ranks: Sequence[int]) -> bool:
    """Have the processes of all these released ranks said that they end?"""
    with suppress(RuntimeError):
        return bool(store.check([_ending(launch_rank) for launch_rank in launch_ranks]))
    return False


def _get(store: Any, key: str, look_seconds: float) -> str:
    while True:
        try:
            store.wait([key], timedelta(seconds=look_seconds))
        except STORE_LOST:
            raise
        except RuntimeError:  # nothing yet
            continue
        text: str = store.get(key).decode()
        return text


def _count(store: Any, launch_rank: int) -> int:
    """How many calls this rank has had."""
    return int(store.add(_counter(launch_rank), 0))


def _counter(launch_rank: int) -> str:
    return f"ds_dynmo/calls/{launch_rank}"


def _ending(launch_rank: int) -> str:
    return f"ds_dynmo/ends/{launch_rank}"


def _key(what: str, launch_rank: int, number: int) -> str:
    return f"ds_dynmo/{what}/{launch_rank}/{number}"

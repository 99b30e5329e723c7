"""The operations that a rank posts on the backend "emulated_nccl", in a log that :mod:`tests.emulated.deadlocks` reads.

A file per rank, a line per operation, written at once: it also has what a rank posted before it failed or stood still.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

_ROOT = str(Path(__file__).resolve().parents[2])
_SKIPPED = (  # in the stack of who posted an operation
    "<string>",
    "/torch/",
    "/multiprocessing/",
    "/tests/support/harness.py",
    "/tests/support/ranks.py",
    "/tests/emulated/backend.py",
    "/tests/emulated/communicator.py",
    "/tests/emulated/operation_log.py",
)
_FRAMES = 4  # of a stack that are logged, from the innermost

_file: TextIO | None = None
_rank = 0


@dataclass(frozen=True)
class Operation:
    """One operation as its rank posted it.

    Attributes:
        rank: of the process, as the file of its log says.
        number: how many operations that process posted before.
        communicator: its name, which its members share and no other communicator has.
        member: this rank's place in the group; messages name their peers by it.
        size: how many members the group has.
        what: the operation, and what all members must agree on: numbers, type, root.
        messages: kind ("send" or "recv"), peer and bytes of each message between two members; none in a collective.
        after: numbers of operations of other communicators that are over before this one begins.
        place: who posted it, the innermost frame first.
    """

    rank: int
    number: int
    communicator: str
    member: int
    size: int
    what: str
    messages: list[tuple[str, int, int]]
    after: list[int]
    place: list[str]


def log_operations(folder: str, rank: int) -> None:
    """Log what this process posts from now on in a file of ``folder``."""
    global _file, _rank
    _file, _rank = open(os.path.join(folder, f"operations{rank}"), "w", buffering=1), rank  # noqa: SIM115


def write(number: int, communicator: str, member: int, size: int, what: str, messages: list, after: list[int]) -> None:
    """Log an operation, if this process keeps a log."""
    if _file is not None:
        operation = Operation(_rank, number, communicator, member, size, what, messages, after, _place())
        _file.write(json.dumps(asdict(operation)) + "\n")


def read(folder: str) -> Iterator[Operation]:
    """Return the operations that the ranks logged in ``folder``, of each rank in the order posted."""
    for path in sorted(Path(folder).glob("operations*")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a rank that was killed may not have finished its last line
                yield Operation(**json.loads(line))


def _place() -> list[str]:
    frames: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        if not any(part in code.co_filename for part in _SKIPPED):
            file = code.co_filename.removeprefix(_ROOT + os.sep).rpartition("site-packages/")[2]
            frames.append(f"{file}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return frames

"""Where the files of a checkpoint go when their content is known: to the disk, or to memory and to the disk later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ds_dynmo.files import path_in_errors
from ds_dynmo.torch_private import Record, copied_records, write_records

Write = Callable[[Any, str], Any]
"""Writes content to a path, as ``torch.save``."""


class Destination(Protocol):
    """Takes the files of a rank.

    Attributes:
        writes_later: whether files are not on the disk yet when they have been taken.
        paths: of the files that were taken.
    """

    writes_later: bool
    paths: list[str]

    def take(self, content: Any, path: str, write: Write) -> None:
        """Take a file, which ``write`` would write."""

    def write_rest(self) -> None:
        """Write the files that are not on the disk yet."""


class ToDisk:
    """Writes each file at once."""

    writes_later = False

    def __init__(self) -> None:
        self.paths: list[str] = []

    def take(self, content: Any, path: str, write: Write) -> None:
        """Write a file. Errors name it."""
        self.paths.append(path)
        with path_in_errors(path):
            write(content, path)

    def write_rest(self) -> None:
        """Do nothing: every file is written."""


class ToMemory:
    """Copies each file to host memory, one tensor after the other, and writes them later.

    What is pickled beside tensors is pickled at once. So nothing that changes later reaches a file.

    Attributes:
        num_bytes: of all files that were taken.
    """

    writes_later = True

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._files: deque[tuple[str, deque[Record]]] = deque()
        self.num_bytes = 0

    def take(self, content: Any, path: str, write: Write) -> None:
        """Copy a file to memory; in the format of ``torch.save``, whatever ``write`` would do."""
        self.paths.append(path)
        records = copied_records(content)
        self.num_bytes += sum(num_bytes for *_, num_bytes in records)
        self._files.append((path, deque(records)))

    def write_rest(self) -> None:
        """Write the files. Each tensor's memory is free when it is written."""
        while self._files:
            path, records = self._files.popleft()
            with path_in_errors(path):
                write_records(_popped(records), path)


def _popped(records: deque[Record]) -> Iterator[Record]:
    while records:
        yield records.popleft()

"""ds-dynmo-watch: a file that another process writes, truncates and replaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_dynmo.cli.watching.follower import Follower


class Followed:
    """A file, and what a follower has passed on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[bytes] = []
        self.restarts = 0
        self.follower = Follower(path, self.lines.append, self._restart)

    def _restart(self) -> None:
        self.lines.clear()
        self.restarts += 1

    def after(self, write: bytes | None = None, *, add: bytes | None = None) -> list[bytes]:
        """Return what was passed on since the last restart, once the file was written or added to."""
        if write is not None:
            self.path.write_bytes(write)
        if add is not None:
            with self.path.open("ab") as file:
                file.write(add)
        self.follower.look()
        return self.lines


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "report.jsonl")


def test_lines_are_passed_on_once_when_they_are_complete(followed: Followed) -> None:
    assert followed.after(b'{"a": 1}\n{"b"') == [b'{"a": 1}\n']
    assert followed.after(add=b": 2") == [b'{"a": 1}\n']
    assert followed.after(add=b"}\n\xff\n") == [b'{"a": 1}\n', b'{"b": 2}\n', b"\xff\n"]
    assert followed.after() == [b'{"a": 1}\n', b'{"b": 2}\n', b"\xff\n"]
    assert followed.restarts == 0 and followed.follower.changed == followed.path.stat().st_mtime


def test_a_torn_line_may_be_taken_back(followed: Followed) -> None:
    """As the engine does where a disk is full."""
    followed.after(b"first\nsec")
    os.truncate(followed.path, len(b"first\n"))
    assert followed.after() == [b"first\n"]
    assert followed.after(add=b"other\n") == [b"first\n", b"other\n"]
    assert followed.restarts == 0


def test_a_file_may_appear_late_and_vanish(followed: Followed) -> None:
    assert followed.after() == [] and followed.follower.problem == "is not there yet" and followed.follower.waits
    assert followed.after(b"first\n") == [b"first\n"] and followed.follower.problem is None
    followed.path.unlink()
    assert followed.after() == [b"first\n"] and followed.follower.problem == "is gone" and followed.follower.waits
    assert followed.after(b"second\n") == [b"second\n"] and followed.follower.problem is None


@pytest.mark.parametrize("content", [b"", b"x\n", b"new\nline\n", b"other\nand many more lines than there were\n"])
def test_a_file_that_is_written_anew_is_read_from_its_beginning(followed: Followed, content: bytes) -> None:
    followed.after(b"first\nsecond\n")
    assert followed.after(content) == content.splitlines(keepends=True)
    assert followed.restarts == 1


def test_a_file_that_is_replaced_is_read_from_its_beginning(followed: Followed) -> None:
    followed.after(b"first\n")
    new = followed.path.with_name("new")
    new.write_bytes(b"First\nsecond\n")
    new.replace(followed.path)
    assert followed.after() == [b"First\n", b"second\n"] and followed.restarts == 1


def test_the_same_lines_in_another_file_are_the_same_report(followed: Followed) -> None:
    followed.after(b"first\n")
    followed.path.unlink()
    assert followed.after(b"first\nsecond\n") == [b"first\n", b"second\n"] and followed.restarts == 0


def test_what_cannot_be_read_is_said(followed: Followed, tmp_path: Path) -> None:
    followed.path.mkdir()
    followed.follower.look()
    assert followed.follower.problem == "cannot be read: is not a file" and not followed.follower.waits
    os.mkfifo(tmp_path / "pipe")  # opening it would wait
    inside = [Followed(tmp_path / "pipe"), Followed(tmp_path / "pipe" / "report.jsonl")]
    for one in inside:
        one.follower.look()
    problems = [one.follower.problem for one in inside]
    assert problems == ["cannot be read: is not a file", "cannot be read: Not a directory"]

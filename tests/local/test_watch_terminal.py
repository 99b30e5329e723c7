"""ds-dynmo-watch as a process: in a terminal of its own, and where what reads its lines has ended."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.pure.test_watch import A_MOVE, lines_of

COMMAND = [sys.executable, "-m", "ds_dynmo.cli.watch"]
ROOT = Path(__file__).resolve().parents[2]
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
HANGS_SECONDS = 60.0


@contextmanager
def sigint_not_ignored() -> Iterator[None]:
    """Let processes that start inside be stopped by SIGINT, also where tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def watching(report: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the command in a pseudo-terminal of 24 lines of 80 columns, and yield it and our end of the terminal."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with sigint_not_ignored():
        process = subprocess.Popen(
            [*COMMAND, str(report), "--interval", "0.05"],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm-256color", "PYTHONUTF8": "1"},
        )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, text: str | None) -> str:
    """Read until ``text`` appears; None: until the command has ended."""
    found, deadline = b"", time.monotonic() + HANGS_SECONDS
    while text is None or text not in found.decode(errors="replace"):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready and time.monotonic() < deadline, f"{text!r} did not appear: {found!r}"
        try:
            found += os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            assert text is None, f"the command has ended: {found!r}"
            break
    return found.decode(errors="replace")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_terminal_is_as_before_when_the_command_is_stopped(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    pytest.importorskip("rich")
    report = tmp_path / "report.jsonl"
    with watching(report) as (process, terminal):
        begin = read_until(terminal, "is not there yet: waiting")
        assert HIDE_CURSOR in begin
        report.write_bytes(lines_of(*A_MOVE)[:-1])
        read_until(terminal, "━")
        process.send_signal(number)
        rest = read_until(terminal, None)
        assert process.wait(HANGS_SECONDS) == code
    assert SHOW_CURSOR in rest and "Traceback" not in rest
    assert "[0, 3, 4]" in rest.rpartition("report.jsonl")[2]  # the last view stays


def test_lines_end_quietly_with_what_reads_them(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    report.write_bytes(lines_of(*A_MOVE))
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, str(report), "--once"], cwd=ROOT, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 1 and done.stderr == b""

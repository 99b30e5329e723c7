"""Files that only one rank writes."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_dynmo.engine.reporting.files import append_line, guard_monitors


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "a" * 9)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))  # five more bytes fit, as if the disk were full then
    try:
        with pytest.raises(OSError, match="File too large"):
            append_line(path, "b" * 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append_line(path, "é")
    assert path.read_bytes() == b"aaaaaaaaa\n\xc3\xa9\n"


def test_a_line_goes_through_a_pipe() -> None:
    reading, writing = os.pipe()
    append_line(Path(f"/dev/fd/{writing}"), "a")
    assert os.read(reading, 9) == b"a\n"
    os.close(reading)
    os.close(writing)


def test_failing_monitors_are_named_once_and_the_others_continue() -> None:
    written: list[Any] = []
    warnings: list[str] = []

    def fail(events: Any) -> None:
        written.append(("tried", events))
        raise ConnectionError("no route")

    failing = SimpleNamespace(write_events=fail)
    working = SimpleNamespace(write_events=lambda events: written.append(("written", events)))
    master = SimpleNamespace(tb_monitor=None, wandb_monitor=failing, csv_monitor=working, enabled=True)
    guard_monitors(master, warnings.append)
    for events in (1, 2):
        for monitor in (master.wandb_monitor, master.csv_monitor):
            monitor.write_events(events)
    assert written == [("tried", 1), ("written", 1), ("tried", 2), ("written", 2)]
    (warning,) = warnings
    assert warning.startswith("wandb_monitor: was not written: no route.")

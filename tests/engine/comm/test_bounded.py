"""Calls of the store end in time, also where it does not answer; time in which the process is stopped is none."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from ds_dynmo.engine.comm import bounded
from ds_dynmo.engine.comm.bounded import CallThread, NoAnswer

SECONDS = 0.05


def test_a_call_that_does_not_return_ends() -> None:
    returns, thread = threading.Event(), CallThread("test")
    for _ in range(2):
        with pytest.raises(NoAnswer):
            thread.run(returns.wait, SECONDS)
    returns.set()


def test_a_process_that_was_stopped_meanwhile_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    returns, times = threading.Event(), iter([0.0, 10.0])

    def monotonic() -> float:
        """Tell the time; the second time, of a process that wakes up, at which the store begins to answer."""
        if (now := next(times)) > 0:
            returns.set()
        return now

    monkeypatch.setattr(bounded, "time", SimpleNamespace(monotonic=monotonic))
    assert CallThread("test").run(returns.wait, SECONDS)

"""What tests of lost ranks leave behind in the process of pytest."""

from __future__ import annotations

import threading

import pytest

from ds_dynmo.engine.comm import posted


@pytest.fixture(autouse=True)
def _pytest_may_take_its_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a rank was lost in a test."""
    monkeypatch.setattr(posted, "_ENDS_IN_TIME", threading.Event())

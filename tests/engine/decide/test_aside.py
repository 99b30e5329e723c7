"""What a thread computes while training continues."""

import threading

import pytest

from ds_dynmo.engine.decide.aside import Aside
from ds_dynmo.errors import MigrationError


def test_what_does_not_end_in_time_is_a_harmless_error() -> None:
    going_on = threading.Event()
    aside = Aside("a test", going_on.wait)
    with pytest.raises(MigrationError, match=r"a test takes longer than dynmo.timeout_seconds \(0.01 s\)") as raised:
        aside.result(0.01)
    assert raised.value.harmless
    going_on.set()
    assert aside.result() is True

"""What a thread computes while training continues."""

import sys
import threading

import pytest

from ds_dynmo.engine.decide.aside import Aside
from ds_dynmo.errors import MigrationError


def test_training_comes_sooner_to_its_turn_while_threads_compute() -> None:
    usual, going_on = sys.getswitchinterval(), threading.Event()

    def compute() -> float:
        going_on.wait()
        return sys.getswitchinterval()

    first, second = Aside("a test", compute), Aside("a test", compute)
    going_on.set()
    assert first.result() < usual / 5 and second.result() < usual / 5
    assert sys.getswitchinterval() == usual


def test_what_does_not_end_in_time_is_a_harmless_error() -> None:
    going_on = threading.Event()
    aside = Aside("a test", going_on.wait)
    with pytest.raises(MigrationError, match=r"a test takes longer than dynmo.timeout_seconds \(0.01 s\)") as raised:
        aside.result(0.01)
    assert raised.value.harmless
    going_on.set()
    assert aside.result() is True

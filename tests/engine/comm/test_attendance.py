"""Ranks that wait for each other at the store: all go on, or all name the same absent ones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from ds_dynmo.engine.comm.attendance import absent
from ds_dynmo.engine.comm.bounded import BoundedStore

AT_ONCE = timedelta(milliseconds=1)


class TimesOut(BoundedStore):
    """A store whose waits end without what they wait for, after ``meanwhile``."""

    def __init__(self, raw: dist.Store, meanwhile: Callable[[], None]) -> None:
        super().__init__(raw, 10.0)
        self._meanwhile = meanwhile

    def wait(self, keys: object, timeout: timedelta | None = None) -> None:
        self._meanwhile()
        raise RuntimeError("wait timeout")


@pytest.mark.parametrize(("comes_in_time", "expected"), [(True, []), (False, [1])])
def test_a_rank_that_gives_up_and_one_that_comes_agree(comes_in_time: bool, expected: list[int]) -> None:
    """Also if it comes in the moment in which the other gives up."""
    raw, found = dist.HashStore(), {}

    def come() -> None:
        found[1] = absent(BoundedStore(raw, 10.0), 2, 1, AT_ONCE)

    found[0] = absent(TimesOut(raw, come if comes_in_time else lambda: None), 2, 0, AT_ONCE)
    if not comes_in_time:
        come()
    assert found == {0: expected, 1: expected}

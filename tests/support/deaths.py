"""The death of a rank at any moment."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def die_at(calls: int, last_words: Callable[[], None] = lambda: None) -> None:
    """Send SIGKILL to this process when its thread enters its ``calls``-th function from now on.

    ``sys.setprofile(None)`` calls it off.

    Args:
        last_words: called directly before.
    """
    left = calls

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        left -= event in ("call", "c_call")
        if left <= 0:
            last_words()
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)

"""A result that a thread computes while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import Generic, TypeVar

from ds_dynmo.errors import MigrationError

Result = TypeVar("Result")


class Aside(Generic[Result]):
    """The result of a function that a daemon thread calls. A function that never returns does not keep the process.

    Args:
        what: name of the work in messages.
    """

    def __init__(self, what: str, function: Callable[[], Result]) -> None:
        self._what = what
        self._future: Future[Result] = Future()
        threading.Thread(target=self._run, args=(function,), name=f"ds_dynmo {what}", daemon=True).start()

    def _run(self, function: Callable[[], Result]) -> None:
        try:
            self._future.set_result(function())
        except BaseException as error:  # raised by the reader
            self._future.set_exception(error)

    def result(self, seconds: float | None = None) -> Result:
        """Wait for the result.

        Args:
            seconds: to wait at most; None: as long as the function takes.

        Raises:
            MigrationError: harmless; not within so many seconds. Other errors are the function's.
        """
        try:
            return self._future.result(seconds)
        except NotDone:
            if self._future.done():
                raise  # the function's own
            raise MigrationError(
                f"{self._what} takes longer than dynmo.timeout_seconds ({seconds:g} s)", harmless=True
            ) from None

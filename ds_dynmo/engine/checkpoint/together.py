"""Do something on every rank; if any of them fails, all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ds_dynmo.errors import CheckpointError

T = TypeVar("T")


def together(comm: Any, function: Callable[[], T]) -> T:
    """``function()`` of this rank, once every rank is done with its own. Collective.

    Raises:
        CheckpointError: on every rank, if any rank's ``function`` raised.
    """
    failure: Exception | None = None
    value: Any = None
    try:
        value = function()
    except Exception as error:  # the others wait, and have to hear of it
        failure = error
    failures = comm.gather_objects(None if failure is None else _text(failure))
    for rank, text in enumerate(failures):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}") from failure
    result: T = value
    return result


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"

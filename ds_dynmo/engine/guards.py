"""Guards of the engine's methods without a "dynmo" section, on a released rank, or with ``"enabled": false``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ds_dynmo.errors import ConfigError, ReleasedError

Method = TypeVar("Method", bound=Callable[..., Any])


def check_at_work(engine: Any, what: str) -> None:
    """Refuse a call of ``engine.<what>``.

    Raises:
        ConfigError: the configuration has no "dynmo" section.
        ReleasedError: this rank was released.
    """
    if engine.dynmo is None:
        raise ConfigError(f'engine.{what} needs a "dynmo" section in the DeepSpeed configuration; {{}} will do')
    if engine.released:
        raise ReleasedError(
            f"engine.{what}: this rank was released after step {engine.global_steps}. Leave the training loop where "
            "engine.released is True, or wait to be taken back by engine.wait_for_recall()"
        )


def at_work(method: Method) -> Method:
    """Restrict a method of the engine to ranks at work: :func:`check_at_work`."""

    @wraps(method)
    def guarded(engine: Any, *args: Any, **kwargs: Any) -> Any:
        check_at_work(engine, method.__name__)
        return method(engine, *args, **kwargs)

    return guarded  # type: ignore[return-value]


def where_layers_may_move(method: Method) -> Method:
    """Restrict a method of the engine to ranks at work and configurations in which layers may move."""

    @wraps(method)
    def guarded(engine: Any, *args: Any, **kwargs: Any) -> Any:
        check_at_work(engine, method.__name__)
        if not engine.dynmo.enabled:
            raise ConfigError(f"dynmo.enabled = false: engine.{method.__name__} would move layers; set it to true")
        return method(engine, *args, **kwargs)

    return guarded  # type: ignore[return-value]

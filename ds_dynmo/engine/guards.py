"""Guards of the engine's methods without a "dynmo" section, on a released rank, or with ``"enabled": false``.

They also keep out modes of torch in which tensors are made that no later batch could train. Other settings of torch
(autocast, the default dtype and device, deterministic algorithms, hooks on saved tensors) change nothing of what the
engine does outside of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

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
            "engine.released is True"
        )


@contextmanager
def doing(engine: Any, what: str) -> Iterator[None]:
    """Check that ``engine.<what>`` may be called, and leave inference mode and ``no_grad`` for it.

    An evaluation that is decorated by ``torch.inference_mode`` may move layers, whose tensors train in the next batch.

    Raises:
        RankLostError: a rank has died, was stopped, or cannot be reached.
        ConfigError, ReleasedError: of :func:`check_at_work`. Or tensors have no values here, as in torch's
            FakeTensorMode.
    """
    check_at_work(engine, what)
    kind = type(torch.empty(0, device="cpu"))
    if kind is not torch.Tensor:
        raise ConfigError(
            f"engine.{what} was called in a mode of torch in which new tensors are {kind.__name__}s instead of "
            "torch.Tensors, such as FakeTensorMode: call it outside of that mode"
        )
    operation = engine.stage.comm.operation(f"{what} after batch {engine.global_steps}")
    with torch.inference_mode(False), torch.enable_grad(), operation:
        yield


def at_work(method: Method) -> Method:
    """Restrict a method of the engine to ranks at work: :func:`doing`."""

    @wraps(method)
    def guarded(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with doing(engine, method.__name__):
            return method(engine, *args, **kwargs)

    return guarded  # type: ignore[return-value]


def where_layers_may_move(method: Method) -> Method:
    """Restrict a method of the engine to ranks at work and configurations in which layers may move."""

    @wraps(method)
    def guarded(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with doing(engine, method.__name__):
            if not engine.dynmo.enabled:
                raise ConfigError(f"dynmo.enabled = false: engine.{method.__name__} would move layers; set it to true")
            return method(engine, *args, **kwargs)

    return guarded  # type: ignore[return-value]

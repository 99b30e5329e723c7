"""Kill a process, or pretend to, before one of its steps of writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def killed_at(step: int, functions: Sequence[tuple[Any, str]], die: Callable[[], None]) -> Iterator[None]:
    """Call ``die`` before the ``step``-th call of these functions of modules, counted over all, and each later one."""
    left = iter(range(step))

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                die()
            return original(*args, **kwargs)

        return count

    with ExitStack() as patches:
        for module, name in functions:
            patches.enter_context(patch.object(module, name, counting(getattr(module, name))))
        yield

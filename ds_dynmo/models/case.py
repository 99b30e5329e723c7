"""The interface of a dynamic case, which changes a model between batches."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["DynamicCase"]


class DynamicCase:
    """One dynamic case of a model that trains. Every rank makes the same calls in the same order.

    Args:
        engine: what :func:`ds_dynmo.initialize` gave.

    Attributes:
        name: its key in the "model" block.
    """

    name: ClassVar[str]

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def before_batch(self, step: int) -> None:
        """Change the model before step ``step``, counted from 0, and tell the engine (``model_changed``)."""

    def after_batch(self, steps_done: int) -> None:
        """Look at what the batch did."""

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs and no layer holds, as plain JSON values; the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave."""

"""The name of a parameter in the optimizer, in messages between ranks, and in checkpoints."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MASTER", "ParamKey"]

MASTER = "master"  # the kind of state that the fp32 weights are


class ParamKey(NamedTuple):
    """The name of a parameter of the model, whichever rank holds it.

    Attributes:
        layer: number of its layer; of a layer that is tied whole, that of its first use in the model.
        name: its name inside the layer.
    """

    layer: int
    name: str

"""The paper's published figures of each case, at the largest scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

AVERAGE_GPUS = 5.8  # of 8, with re-packing, over a run with gradual pruning


class Published(NamedTuple):
    """Figures of one case.

    Attributes:
        over: "static": the same dynamic model; "dense": the model that does no less work, or has no exits; "Egeria":
            freezing under a static partition, in Egeria's own implementation.
        bubble_before, bubble_after: in words, as published.
    """

    speedup: str
    over: str
    bubble_before: str
    bubble_after: str = ""


PAPER: Mapping[str, Published] = {
    "moe": Published("1.23", "static", "25%", "8%"),
    "pruning": Published("3.18", "static", "almost 5 x dense"),
    "freezing": Published("2.23", "Egeria", "40%"),
    "sparse_attention": Published("2.71 to 4.02", "dense", "4 x dense"),
    "early_exit": Published("4.52", "dense", "up to 5 x dense"),
    "mod": Published("1.17", "static", "18%", "4%"),
}

"""What the paper publishes, and why a simulation of its load formulas agrees with it or does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AVERAGE_GPUS = 5.8  # of 8, with re-packing, over a run with gradual pruning


@dataclass(frozen=True)
class Published:
    """Of one case, at the largest scale.

    Attributes:
        speedup, over: "static": the same dynamic model; "dense": the model that does no less work, or has no exits;
            "Egeria": freezing under a static partition, in Egeria's own implementation.
        bubble_before, bubble_after: in words, as published.
        why: what the comparison shows.
    """

    speedup: str
    over: str
    bubble_before: str
    bubble_after: str
    why: str


PAPER: Mapping[str, Published] = {
    "moe": Published(
        "1.23",
        "static",
        "25%",
        "8%",
        "(1 - 0.08) / (1 - 0.25) is the 1.23: speedup and bubbles agree. With 2 layers a stage no contiguous partition "
        "comes near 8%: a stage of 1 layer makes one of 3",
    ),
    "pruning": Published(
        "3.18",
        "static",
        "almost 5 x dense",
        "",
        "two bounds. A static stage of k layers is at most k times its heaviest layer, which no partition splits: 2 "
        "at 48 layers on 24 stages, 1 at 24. And 4000 of 10,000 iterations are dense: no balance makes the whole run "
        "more than 1.96 times as fast",
    ),
    "freezing": Published(
        "2.23",
        "Egeria",
        "40%",
        "",
        "removing all of a 40% bubble gives 1 / 0.6 = 1.67; the rest of 2.23 is Egeria's own overhead, which grows "
        "with the layers. 40 layers on 24 stages cannot be even",
    ),
    "sparse_attention": Published(
        "2.71 to 4.02",
        "dense",
        "4 x dense",
        "",
        "most of it is sparsity itself, which the static partition has too. It takes s_i c_i as in the formula: with "
        "attention a quarter of a layer's work, as the sizes have it, the most is 1 / 0.75 = 1.33",
    ),
    "early_exit": Published(
        "4.52",
        "dense",
        "up to 5 x dense",
        "",
        "the first layers keep all tokens, so that a stage of one of them is the bound: k over the dense model with k "
        "layers a stage, 2 at 48 layers on 24 stages. 4.52 takes at least 5 layers a stage",
    ),
    "mod": Published(
        "1.17",
        "static",
        "18%",
        "4%",
        "(1 - 0.04) / (1 - 0.18) is the 1.17. With 2 layers a stage every stage needs one of the full blocks, and "
        "moving the routed ones between them evens nothing out",
    ),
}

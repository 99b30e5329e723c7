"""A stretch of training in which no layer's load changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

ITERATIONS = 10_000  # of a run (paper, section 4)


@dataclass(frozen=True)
class Phase:
    """Loads as shares of what a dense layer costs, per layer.

    Attributes:
        iterations: how long the phase lasts.
        forward, backward: shares of a dense layer's forward and backward seconds.
        trainable: share of a layer's parameters that train, without pruned ones, as balancing by parameters sees it.
        announced: the model says at its beginning that its work has changed, so that a rebalance follows at once.
    """

    iterations: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    trainable: tuple[float, ...]
    announced: bool = False

    @classmethod
    def of(cls, shares: Iterable[float], iterations: int = 1, *, trainable: Iterable[float] | None = None) -> Phase:
        """Make a phase whose passes have the same shares. All parameters train unless ``trainable`` says otherwise."""
        both = tuple(map(float, shares))
        return cls(iterations, both, both, (1.0,) * len(both) if trainable is None else tuple(map(float, trainable)))

    def merged(self, begins: Sequence[int]) -> Phase:
        """Return the phase of a model in which layers from each of ``begins`` up to the next are one.

        Parameters that train are then shares of those of the layer that has most.
        """
        if len(begins) == len(self.forward) + 1:
            return self
        forward, backward, trainable = (
            np.add.reduceat(part, begins[:-1]) for part in (self.forward, self.backward, self.trainable)
        )
        most = max(1.0, float(trainable.max()))
        return replace(
            self,
            forward=tuple(forward.tolist()),
            backward=tuple(backward.tolist()),
            trainable=tuple((trainable / most).tolist()),
        )

    def mean_share(self) -> float:
        """Average over layers, forward and backward together; the backward pass is twice the forward pass."""
        return float(np.mean(np.add(self.forward, np.multiply(2, self.backward))) / 3)


def mean_over(phases: Sequence[Phase], number: Callable[[Phase], float]) -> float:
    """Average ``number`` over iterations."""
    return sum(p.iterations * number(p) for p in phases) / sum(p.iterations for p in phases)

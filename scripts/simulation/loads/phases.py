"""A stretch of training in which no layer's load changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_dynmo.errors import ConfigError

ITERATIONS = 10_000  # of a run (paper, section 4)


@dataclass(frozen=True)
class Phase:
    """Loads as shares of what a dense layer costs, per layer.

    Attributes:
        iterations: how long the phase lasts.
        forward, backward: shares of a dense layer's forward and backward seconds.
        trainable: share of a layer's parameters that train, pruned ones being none: what balancing by parameters sees.
    """

    iterations: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    trainable: tuple[float, ...]

    @classmethod
    def of(cls, shares: Iterable[float], iterations: int = 1, *, trainable: Iterable[float] | None = None) -> Phase:
        """Both passes take the same share; all parameters train unless ``trainable`` says otherwise."""
        both = tuple(map(float, shares))
        return cls(
            iterations, both, both, tuple(map(float, trainable)) if trainable is not None else (1.0,) * len(both)
        )

    def mean_share(self) -> float:
        """Of a layer's forward and backward together, the backward pass being twice the forward pass."""
        return float(np.mean(np.add(self.forward, np.multiply(2, self.backward))) / 3)


def mean_over(phases: Sequence[Phase], number: Callable[[Phase], float]) -> float:
    """The mean over iterations."""
    return sum(p.iterations * number(p) for p in phases) / sum(p.iterations for p in phases)


def recorded_phases(report: Path) -> list[Phase]:
    """From the load signals in a report of scripts/train.py, one phase from each decision to the next.

    Layers that report no signal (embedding, head) are left out.

    Raises:
        ConfigError: the file holds no decision with load signals, or not of the same layers throughout.
    """
    records = [json.loads(line) for line in report.read_text().splitlines()]
    decisions = [record for record in records if record["kind"] == "rebalance" and any_signal(record["load_signals"])]
    if not decisions:
        raise ConfigError(f"--report {report}: holds no decision with load signals; a train.py run with --report does")
    signals = [[signal for signal in record["load_signals"] if signal is not None] for record in decisions]
    if len({len(shares) for shares in signals}) != 1:
        raise ConfigError(f"--report {report}: its decisions are about different numbers of layers")
    steps = [record["step"] for record in decisions]
    ends = [record["step"] for record in records if record["kind"] != "start" and "step" in record]
    stops = [*steps[1:], max(steps[-1] + 1, *ends)]
    return [Phase.of(shares, max(1, stop - step)) for shares, step, stop in zip(signals, steps, stops)]


def any_signal(signals: Sequence[float | None]) -> bool:
    return any(signal is not None for signal in signals)

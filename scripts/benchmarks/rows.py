"""The benchmark's rows, computed from what was measured, without processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from command_line import print_table
from ds_dynmo.partitioners import PipelineModel, imbalance, loads, makespan, uniform
from ds_dynmo.plan import Profile
from simulation.runs import ARMS, DYNAMIC, STATICS
from simulation.statics import Statics, label

OVERHEADS = ("profile", "decide", "migrate")
Costs = tuple[float, float, float]  # seconds of OVERHEADS
Passes = tuple[tuple[float, ...], tuple[float, ...]]  # forward and backward seconds, per layer and micro-batch


def passes_of(profile: Profile) -> Passes:
    """Give the forward and backward seconds of each layer."""
    forward = tuple(layer.forward_seconds for layer in profile.layers)
    return forward, tuple(layer.backward_seconds for layer in profile.layers)


@dataclass(frozen=True)
class Slice:
    """One turn of one balancer's engine.

    Attributes:
        iterations, seconds: how many, and what they took in all, rebalances included.
        passes: of the layers while it lasted.
        partition: under which they ran.
        costs: of ``seconds``, what rebalances took.
    """

    iterations: float
    seconds: float
    passes: Passes
    partition: tuple[int, ...]
    costs: Costs = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Round:
    """One turn, or one turn in each of a run's phases. Seconds are per iteration.

    Attributes:
        seconds: wall-clock, rebalances included.
        bound_seconds: of the shortest simulated 1F1B iteration.
        busy_seconds: of a stage on average, in layers.
    """

    seconds: float
    bound_seconds: float
    busy_seconds: float


@dataclass(frozen=True)
class Measured:
    """One balancer's run.

    Attributes:
        rounds: all balancers have as many, taking turns.
        partitions: every one that it ran under, in order, without repetitions in a row.
        imbalance: the paper's equation 2, mean over iterations.
        overheads: seconds of each of :data:`OVERHEADS`, per iteration.
    """

    rounds: tuple[Round, ...]
    partitions: tuple[tuple[int, ...], ...]
    imbalance: float
    overheads: Costs

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Slice]], micro_batches: int) -> Measured:
        slices = [one for of_round in rounds for one in of_round]
        weights = [one.iterations for one in slices]
        imbalances = [imbalance(_costs(one.passes), one.partition) for one in slices]
        profile, decide, migrate = (sum(one.costs[part] for one in slices) / sum(weights) for part in range(3))
        return cls(
            tuple(_round(of_round, micro_batches) for of_round in rounds),
            tuple(partition for partition, _ in groupby(one.partition for one in slices)),
            float(np.average(imbalances, weights=weights)),
            (profile, decide, migrate),
        )


def _round(slices: Sequence[Slice], micro_batches: int) -> Round:
    iterations = sum(one.iterations for one in slices)
    bound = sum(one.iterations * bound_seconds(one.passes, len(one.partition) - 1, micro_batches) for one in slices)
    busy = sum(
        one.iterations * micro_batches * statistics.fmean(loads(_costs(one.passes), one.partition)) for one in slices
    )
    return Round(sum(one.seconds for one in slices) / iterations, bound / iterations, busy / iterations)


def _costs(passes: Passes) -> list[float]:
    return [forward + backward for forward, backward in zip(*passes, strict=True)]


@lru_cache(maxsize=256)
def bound_seconds(passes: Passes, stages: int, micro_batches: int) -> float:
    """Give the seconds of the shortest 1F1B iteration that is found, with messages that take no time."""
    pipeline = PipelineModel(*passes, micro_batches, (1.0,) * stages)
    start = uniform(len(passes[0]), stages)
    return pipeline.iteration_seconds(makespan(_costs(passes), stages, start=start, pipeline=pipeline))


def rows(
    case: str, measured: Mapping[str, Measured], tokens: int, known: Statics | None = None
) -> list[dict[str, Any]]:
    """Make one row per balancer; ratios are medians of those of the rounds, so that drift of the machine cancels.

    "over static" is over the static partition that came out fastest, which one could not even know before.

    Args:
        tokens: of one iteration.
        known: the static partitions; of those that are alike one was run, and its row is that of each.
    """
    alike = {} if known is None else {arm: other for arm, other in known.alike.items() if other in measured}
    measured = {**measured, **{arm: measured[other] for arm, other in alike.items()}}
    throughput = {arm: tokens / statistics.median(one.seconds for one in run.rounds) for arm, run in measured.items()}
    static = max((arm for arm in STATICS if arm in throughput), key=lambda arm: throughput[arm])
    return [
        {
            "case": case,
            "balancer": arm,
            "tokens_per_second": throughput[arm],
            "tokens_per_second_spread": [
                tokens / end(one.seconds for one in measured[arm].rounds) for end in (max, min)
            ],
            "speedup_over_static": _ratio(measured[static], measured[arm]),
            "speedup_over_dense": _ratio(measured["dense"], measured[arm]),
            "share_of_ideal": _ratio(measured["oracle"], measured[arm]) if "oracle" in measured else None,
            "share_of_bound": _share(measured[arm], lambda one: one.bound_seconds),
            "bubble_ratio": max(0.0, 1 - _share(measured[arm], lambda one: one.busy_seconds)),
            "imbalance": measured[arm].imbalance,
            "start": None if known is None else list(known.start(arm)),
            "partitions": [list(partition) for partition in measured[arm].partitions],
            "measured_as": alike.get(arm, arm),
            **_overheads(measured[arm]),
        }
        for arm in ARMS
        if arm in measured
    ]


def _ratio(base: Measured, own: Measured) -> float:
    """Give how many times as fast as ``base`` a run was."""
    return statistics.median(other.seconds / one.seconds for other, one in zip(base.rounds, own.rounds, strict=True))


def _share(run: Measured, number: Callable[[Round], float]) -> float:
    return statistics.median(number(one) / one.seconds for one in run.rounds)


def _overheads(run: Measured) -> dict[str, float]:
    seconds = statistics.median(one.seconds for one in run.rounds)
    return {f"overhead_{name}": part / seconds for name, part in zip(OVERHEADS, run.overheads, strict=True)}


FIGURES = {  # columns of the table
    "best static": "speedup_over_static",
    "over dense": "speedup_over_dense",
    "of ideal": "share_of_ideal",
    "of bound": "share_of_bound",
    "bubble": "bubble_ratio",
    "imbalance": "imbalance",
}


def print_rows(table: Sequence[dict[str, Any]]) -> None:
    cells = []
    for row in table:
        figures = ["-" if row[key] is None else f"{row[key]:.2f}" for key in FIGURES.values()]
        dynamic = row["balancer"] in DYNAMIC
        costs = [f"{row[f'overhead_{name}']:.2%}" if dynamic else "-" for name in OVERHEADS]
        cells.append((row["case"], label(row["balancer"]), f"{row['tokens_per_second']:,.0f}", *figures, *costs))
    print()
    print_table(("case", "balancer", "tokens/s", *FIGURES, *OVERHEADS), cells)
    for row in table:
        if row["start"] is not None:
            went = " -> ".join(map(str, row["partitions"]))
            alike = "" if row["measured_as"] == row["balancer"] else f", the row of {label(row['measured_as'])}"
            print(f"{label(row['balancer'])} starts at {row['start']}, ran under {went}{alike}")

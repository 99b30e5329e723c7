"""Compute the benchmark's rows from measurements, without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby
from statistics import fmean, median
from typing import Any

from ds_dynmo.cli.command_line import print_table
from ds_dynmo.partitioners import PipelineModel, imbalance, loads, makespan, uniform
from simulation.runs import ARMS, DYNAMIC
from simulation.statics import STATICS, Statics, label

OVERHEADS = ("profile", "decide", "migrate")
Costs = tuple[float, float, float]  # seconds of OVERHEADS
Passes = tuple[tuple[float, ...], tuple[float, ...]]  # forward and backward seconds, per layer and micro-batch


@dataclass(frozen=True)
class Slice:
    """One turn of one balancer's engine, or the part of a turn in one of a run's phases.

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

    @property
    def layer_seconds(self) -> list[float]:
        return [forward + backward for forward, backward in zip(*self.passes, strict=True)]


@dataclass(frozen=True)
class Measured:
    """One balancer's run: its turns, of which all balancers have as many."""

    rounds: Sequence[Sequence[Slice]]
    micro_batches: int

    def means(self, number: Callable[[Slice], float]) -> list[float]:
        """Average a number of each slice over the iterations of each round."""
        return [
            sum(one.iterations * number(one) for one in slices) / sum(one.iterations for one in slices)
            for slices in self.rounds
        ]

    def seconds(self) -> list[float]:
        """Return the wall-clock seconds of an iteration in each round, rebalances included."""
        return self.means(lambda one: one.seconds / one.iterations)

    def speedup_over(self, base: Measured) -> float:
        """Return how many times as fast as ``base`` the run was: the median of the rounds, so that drift cancels."""
        return median(other / own for other, own in zip(base.seconds(), self.seconds(), strict=True))

    def share(self, number: Callable[[Slice], float]) -> float:
        """Return which share of an iteration's wall-clock seconds a number of seconds is."""
        return median(part / own for part, own in zip(self.means(number), self.seconds()))

    def bound_seconds(self, one: Slice) -> float:
        return shortest_seconds(one.passes, len(one.partition) - 1, self.micro_batches)

    def busy_seconds(self, one: Slice) -> float:
        """Return the seconds of an iteration that a stage is in layers, on average."""
        return self.micro_batches * fmean(loads(one.layer_seconds, one.partition))

    def overheads(self) -> dict[str, float]:
        """Return what rebalances took, as shares of the run."""
        slices, seconds = list(chain(*self.rounds)), median(self.seconds())
        iterations = sum(one.iterations for one in slices)
        costs = [sum(parts) / iterations for parts in zip(*(one.costs for one in slices))]
        return {f"overhead_{name}": part / seconds for name, part in zip(OVERHEADS, costs)}

    def row(self) -> dict[str, Any]:
        slices = list(chain(*self.rounds))
        return {
            "share_of_bound": self.share(self.bound_seconds),
            "bubble_ratio": max(0.0, 1 - self.share(self.busy_seconds)),
            "imbalance": sum(one.iterations * imbalance(one.layer_seconds, one.partition) for one in slices)
            / sum(one.iterations for one in slices),
            "partitions": [list(partition) for partition, _ in groupby(one.partition for one in slices)],
            **self.overheads(),
        }


@lru_cache(maxsize=256)
def shortest_seconds(passes: Passes, stages: int, micro_batches: int) -> float:
    """Return the seconds of the shortest 1F1B iteration that is found, with messages that take no time."""
    pipeline = PipelineModel(*passes, micro_batches, (1.0,) * stages)
    costs = [forward + backward for forward, backward in zip(*passes)]
    return pipeline.iteration_seconds(makespan(costs, stages, start=uniform(len(costs), stages), pipeline=pipeline))


def rows(
    case: str, measured: Mapping[str, Measured], tokens: int, known: Statics | None = None
) -> list[dict[str, Any]]:
    """Make one row per balancer.

    "over static" is over the fastest static partition, which is known only afterwards.

    Args:
        tokens: of one iteration.
        known: the static partitions; of those that are alike one was run, and its row is that of each.
    """
    alike = {} if known is None else {arm: other for arm, other in known.alike.items() if other in measured}
    measured = {**measured, **{arm: measured[other] for arm, other in alike.items()}}
    seconds = {arm: run.seconds() for arm, run in measured.items()}
    static = min((arm for arm in STATICS if arm in measured), key=lambda arm: median(seconds[arm]))
    return [
        {
            "case": case,
            "balancer": arm,
            "tokens_per_second": tokens / median(seconds[arm]),
            "tokens_per_second_spread": [tokens / max(seconds[arm]), tokens / min(seconds[arm])],
            "speedup_over_static": measured[arm].speedup_over(measured[static]),
            "speedup_over_dense": measured[arm].speedup_over(measured["dense"]),
            "share_of_ideal": measured[arm].speedup_over(measured["oracle"]) if "oracle" in measured else None,
            "start": None if known is None else list(known.start(arm)),
            "measured_as": alike.get(arm, arm),
            **measured[arm].row(),
        }
        for arm in ARMS
        if arm in measured
    ]


def rows_by_schedule(
    case: str, measured: Mapping[str, Mapping[str, Measured]], tokens: int, known: Statics | None = None
) -> list[dict[str, Any]]:
    """Make the :func:`rows` of several schedules.

    Args:
        measured: by schedule and arm. Static partitions and the dense model, under DeepSpeed's 1F1B, are in each.
    """
    first, *_ = measured.values()
    found = []
    for number, (schedule, arms) in enumerate(measured.items()):
        for row in rows(case, arms, tokens, known):
            name = row["balancer"]
            depends = name in DYNAMIC or name == "oracle"
            if depends or number == 0:
                gain = arms[name].speedup_over(first[name]) if depends else None
                own = {"schedule": schedule if depends else "1f1b", "speedup_over_first_schedule": gain}
                found.append({**row, **own})
    return found


FIGURES = {  # columns of the table
    "best static": "speedup_over_static",
    "over dense": "speedup_over_dense",
    "of ideal": "share_of_ideal",
    "of bound": "share_of_bound",
    "bubble": "bubble_ratio",
    "imbalance": "imbalance",
}


def print_rows(table: Sequence[dict[str, Any]]) -> None:
    schedules = schedules_of(table)

    def name_of(row: dict[str, Any]) -> str:
        named = len(schedules) > 1 and row["speedup_over_first_schedule"] is not None
        return label(row["balancer"]) + (f", {row['schedule']}" if named else "")

    cells = []
    for row in table:
        figures = ["-" if row[key] is None else f"{row[key]:.2f}" for key in FIGURES.values()]
        dynamic = row["balancer"] in DYNAMIC
        costs = [f"{row[f'overhead_{name}']:.2%}" if dynamic else "-" for name in OVERHEADS]
        cells.append((row["case"], name_of(row), f"{row['tokens_per_second']:,.0f}", *figures, *costs))
    print()
    print_table(("case", "balancer", "tokens/s", *FIGURES, *OVERHEADS), cells)
    for row in table:
        if row["start"] is not None:
            went = " -> ".join(map(str, row["partitions"]))
            alike = "" if row["measured_as"] == row["balancer"] else f", the row of {label(row['measured_as'])}"
            print(f"{name_of(row)} starts at {row['start']}, ran under {went}{alike}")


def schedules_of(table: Sequence[dict[str, Any]]) -> list[str]:
    """List the schedules under which engines rebalanced, in the order in which they were asked for."""
    return list(dict.fromkeys(row["schedule"] for row in table if row.get("speedup_over_first_schedule") is not None))


def print_schedules(table: Sequence[dict[str, Any]]) -> None:
    """Print schedules beside each other: throughput over the fastest static partition under DeepSpeed's 1F1B."""
    schedules = schedules_of(table)
    if len(schedules) < 2:
        return
    cells = []
    for case, balancer in dict.fromkeys((row["case"], row["balancer"]) for row in table):
        of_arm = [row for row in table if (row["case"], row["balancer"]) == (case, balancer)]
        found = {row["schedule"]: row for row in of_arm if row["speedup_over_first_schedule"] is not None}
        if len(found) == len(schedules):
            static = max(
                row["tokens_per_second"] for row in table if row["case"] == case and row["balancer"] in STATICS
            )
            over_static = (f"{found[one]['speedup_over_static']:.2f}" for one in schedules)
            gains = (f"{found[one]['speedup_over_first_schedule']:.2f}" for one in schedules[1:])
            cells.append((case, balancer, f"{static:,.0f}", *over_static, *gains))
    print("\nThroughput over the fastest static partition under DeepSpeed's 1F1B, by schedule")
    gains_over = (f"{one} over {schedules[0]}" for one in schedules[1:])
    print_table(("case", "balancer", "that static, tokens/s", *schedules, *gains_over), cells)

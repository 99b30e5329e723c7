"""Compute the benchmark's rows from measurements, without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from statistics import fmean, median
from typing import Any

from ds_dynmo.cli.command_line import print_table
from ds_dynmo.partitioners import LayerPasses, imbalance, loads_of
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import Schedule, replay
from simulation.runs import ARMS, DYNAMIC
from simulation.statics import DENSE, PARAMETERS, SHAPES, STATICS, Statics, label

OVERHEADS = ("profile", "decide", "migrate")
Costs = tuple[float, float, float]  # seconds of OVERHEADS


@dataclass(frozen=True)
class Slice:
    """One turn of one balancer's engine, or the part of a turn in which loads, placement and order were the same.

    Attributes:
        iterations, seconds: how many, and what they took in all, rebalances included.
        passes: of the layers.
        placement, schedule: under which they ran.
        costs: of ``seconds``, what rebalances took.
        predicted_seconds: of an iteration, by the decision that led to it; None: by none.
    """

    iterations: float
    seconds: float
    passes: LayerPasses
    placement: Placement
    schedule: Schedule
    costs: Costs = (0.0, 0.0, 0.0)
    predicted_seconds: float | None = None

    @property
    def stage_loads(self) -> list[float]:
        """The seconds per micro-batch of each stage."""
        return loads_of(self.passes.least_seconds, self.placement)

    @property
    def busy_seconds(self) -> float:
        """The seconds of an iteration that a stage is in layers, on average."""
        return self.schedule.micro_batches * fmean(self.stage_loads)

    @property
    def imbalance(self) -> float:
        """The paper's equation 2."""
        return imbalance(self.stage_loads, range(self.placement.num_stages + 1))

    @property
    def simulated_seconds(self) -> float:
        """The seconds of an iteration in the order that ran, with messages that take no time."""
        costs = self.passes.costs(self.placement, (1.0,) * self.placement.num_stages)
        return replay(self.schedule, costs).iteration_seconds


@dataclass(frozen=True)
class Measured:
    """One balancer's run: its turns, of which all balancers have as many."""

    rounds: Sequence[Sequence[Slice]]

    def means(self, number: Callable[[Slice], float]) -> list[float]:
        """Average a number of each slice over the iterations of each round."""
        return [
            sum(one.iterations * number(one) for one in slices) / sum(one.iterations for one in slices)
            for slices in self.rounds
        ]

    def mean(self, number: Callable[[Slice], float]) -> float:
        """Average a number of each slice over all iterations."""
        return Measured([list(chain(*self.rounds))]).means(number)[0]

    def seconds(self) -> list[float]:
        """Return the wall-clock seconds of an iteration in each round, rebalances included."""
        return self.means(lambda one: one.seconds / one.iterations)

    def batch_seconds(self) -> list[float]:
        """Return the wall-clock seconds of an iteration in each round without rebalances."""
        return self.means(lambda one: (one.seconds - sum(one.costs)) / one.iterations)

    def simulated_seconds(self) -> list[float]:
        """Return the simulated seconds of an iteration in each round, rebalances not included."""
        return self.means(lambda one: one.simulated_seconds)

    def over_predicted(self) -> float | None:
        """Return the seconds of iterations without rebalances over those that decisions predicted; None: none did."""
        known = [(one, one.predicted_seconds) for one in chain(*self.rounds) if one.predicted_seconds is not None]
        seconds = sum(one.seconds - sum(one.costs) for one, _ in known)
        return seconds / sum(one.iterations * predicted for one, predicted in known) if known else None

    def speedup_over(self, base: Measured) -> float:
        """Return how many times as fast as ``base`` the run was: the median of the rounds, so that drift cancels."""
        return median_ratio(base.seconds(), self.seconds())

    def overheads(self) -> dict[str, float]:
        """Return what rebalances took, as shares of the run."""
        slices, seconds = list(chain(*self.rounds)), median(self.seconds())
        iterations = sum(one.iterations for one in slices)
        costs = [sum(parts) / iterations for parts in zip(*(one.costs for one in slices))]
        return {f"overhead_{name}": part / seconds for name, part in zip(OVERHEADS, costs)}

    def row(self) -> dict[str, Any]:
        placements = [placement for placement, _ in groupby(one.placement for one in chain(*self.rounds))]
        busy = self.means(lambda one: one.busy_seconds)
        return {
            "simulated_seconds": median(self.simulated_seconds()),
            "over_predicted": self.over_predicted(),
            "over_simulated": median_ratio(self.batch_seconds(), self.simulated_seconds()),
            "bubble_ratio": max(0.0, 1 - median_ratio(busy, self.seconds())),
            "imbalance": self.mean(lambda one: one.imbalance),
            "partitions": [list(placement.boundaries) for placement in placements],
            "shapes": [placement.shape for placement in placements],
            **self.overheads(),
        }


def median_ratio(numbers: Sequence[float], others: Sequence[float]) -> float:
    """Divide round by round, and return the median."""
    return median(number / other for number, other in zip(numbers, others, strict=True))


def rows(
    case: str, measured: Mapping[str, Measured], tokens: int, known: Statics | None = None, schedule: str = "1f1b"
) -> list[dict[str, Any]]:
    """Make one row per balancer.

    "over static" is over the fastest static partition, which is known only afterwards.

    Args:
        tokens: of one iteration.
        known: the static partitions; of those that are alike one was run, and its row is that of each.
        schedule: of engines that rebalance.
    """
    alike = {} if known is None else {arm: other for arm, other in known.alike.items() if other in measured}
    measured = {**measured, **{arm: measured[other] for arm, other in alike.items()}}
    seconds = {arm: run.seconds() for arm, run in measured.items()}
    static = min((arm for arm in STATICS if arm in measured), key=lambda arm: median(seconds[arm]))
    in_simulation = measured[static].simulated_seconds()
    return [
        {
            "case": case,
            "balancer": arm,
            "schedule": schedule if has_schedule(arm) else "1f1b",
            "tokens_per_second": tokens / median(seconds[arm]),
            "tokens_per_second_spread": [tokens / max(seconds[arm]), tokens / min(seconds[arm])],
            "speedup_over_static": measured[arm].speedup_over(measured[static]),
            "speedup_over_parameters": speedup_over(PARAMETERS, arm, measured),
            "speedup_over_dense": measured[arm].speedup_over(measured[DENSE]),
            "share_of_ideal": speedup_over("oracle", arm, measured),
            "simulated_speedup_over_static": median_ratio(in_simulation, measured[arm].simulated_seconds()),
            "start": None if known is None else list(known.start(arm, SHAPES.get(schedule, "chain"))),
            "measured_as": alike.get(arm, arm),
            **measured[arm].row(),
        }
        for arm in ARMS
        if arm in measured
    ]


def speedup_over(base: str, arm: str, measured: Mapping[str, Measured]) -> float | None:
    """Return how many times as fast as ``base`` an arm was; None: ``base`` was not run."""
    return measured[arm].speedup_over(measured[base]) if base in measured else None


def has_schedule(arm: str) -> bool:
    """Return whether the arm is run under each schedule; others are DeepSpeed's 1F1B."""
    return arm in DYNAMIC or arm == "oracle"


def rows_by_schedule(
    case: str, measured: Mapping[str, Mapping[str, Measured]], tokens: int, known: Statics | None = None
) -> list[dict[str, Any]]:
    """Make the :func:`rows` of several schedules.

    Args:
        measured: by schedule and arm. Static partitions and the dense model, under DeepSpeed's 1F1B, are in each.
    """
    found = []
    for number, (schedule, arms) in enumerate(measured.items()):
        for row in rows(case, arms, tokens, known, schedule):
            name = row["balancer"]
            if has_schedule(name) or number == 0:
                others = [measured[other][name] for other in measured if has_schedule(name) and other != schedule]
                best = min(others, key=lambda run: median(run.seconds()), default=None)
                found.append({**row, "speedup_over_others": best and arms[name].speedup_over(best)})
    return found


FIGURES = {  # columns of the table
    "best static": "speedup_over_static",
    "over parameters": "speedup_over_parameters",
    "over dense": "speedup_over_dense",
    "of ideal": "share_of_ideal",
    "over simulated": "over_simulated",
    "bubble": "bubble_ratio",
    "imbalance": "imbalance",
}
OF_SCHEDULES = {  # columns of the table that compares schedules
    "best static": "speedup_over_static",
    "the same, simulated": "simulated_speedup_over_static",
    "over parameters": "speedup_over_parameters",
    "simulated seconds": "simulated_seconds",
    "measured over that": "over_simulated",
    "measured over predicted": "over_predicted",
    "over the best other": "speedup_over_others",
}


def print_rows(table: Sequence[dict[str, Any]]) -> None:
    several = len(schedules_of(table)) > 1

    def name_of(row: dict[str, Any]) -> str:
        return label(row["balancer"]) + (f", {row['schedule']}" if several and has_schedule(row["balancer"]) else "")

    cells = []
    for row in table:
        dynamic = row["balancer"] in DYNAMIC
        costs = [f"{row[f'overhead_{name}']:.2%}" if dynamic else "-" for name in OVERHEADS]
        cells.append((row["case"], name_of(row), f"{row['tokens_per_second']:,.0f}", *figures(row, FIGURES), *costs))
    print()
    print_table(("case", "balancer", "tokens/s", *FIGURES, *OVERHEADS), cells)
    for row in table:
        if row["start"] is not None:
            went = " -> ".join(
                f"{boundaries}" + ("" if shape == "chain" else f" ({shape})")
                for boundaries, shape in zip(row["partitions"], row["shapes"])
            )
            alike = "" if row["measured_as"] == row["balancer"] else f", the row of {label(row['measured_as'])}"
            print(f"{name_of(row)} starts at {row['start']}, ran under {went}{alike}")


def figures(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    return ["-" if row[key] is None else f"{row[key]:.2f}" for key in columns.values()]


def schedules_of(table: Sequence[dict[str, Any]]) -> list[str]:
    """List the schedules under which engines rebalanced, in the order in which they were asked for."""
    return list(dict.fromkeys(row["schedule"] for row in table if has_schedule(row["balancer"])))


def print_schedules(table: Sequence[dict[str, Any]]) -> None:
    """Print schedules beside each other, by case and balancer."""
    if len(schedules_of(table)) < 2:
        return
    compared = sorted(
        (row for row in table if has_schedule(row["balancer"])),
        key=lambda row: (row["case"], ARMS.index(row["balancer"])),
    )
    print("\nThroughput over the fastest static partition under DeepSpeed's 1F1B, by schedule")
    cells = [(row["case"], row["balancer"], row["schedule"], *figures(row, OF_SCHEDULES)) for row in compared]
    print_table(("case", "balancer", "schedule", *OF_SCHEDULES), cells)

"""The load signals of a run, from its report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ds_dynmo.errors import ConfigError
from simulation.loads.cases import Case
from simulation.loads.phases import Phase


@dataclass(frozen=True)
class Recorded(Case):
    """The load signals of a run, as a case."""

    recorded: tuple[Phase, ...] = ()

    @classmethod
    def read(cls, report: Path) -> Recorded:
        """Read a report of scripts/train.py; a ConfigError says what it lacks, as in :func:`recorded_phases`."""
        found = tuple(recorded_phases(report))
        return cls("recorded", announces=True, layers=len(found[0].forward), stages=2, replicas=1, recorded=found)

    def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
        return list(self.recorded)


def recorded_phases(report: Path) -> list[Phase]:
    """Read the load signals in a report of scripts/train.py: one phase from each decision to the next.

    Layers that report no signal (embedding, head) are left out.

    Raises:
        ConfigError: the file holds no decision with load signals, or not of the same layers throughout.
    """
    records = [json.loads(line) for line in report.read_text().splitlines()]
    decisions = [
        (record["step"], [signal for signal in record["load_signals"] if signal is not None])
        for record in records
        if record["kind"] == "rebalance"
    ]
    steps = [step for step, signals in decisions if signals]
    loads = [signals for _, signals in decisions if signals]
    if not loads:
        raise ConfigError(f"--report {report}: holds no decision with load signals; a train.py run with --report does")
    if len(set(map(len, loads))) != 1:
        raise ConfigError(f"--report {report}: its decisions are about different numbers of layers")
    ends = [record["step"] for record in records if record["kind"] != "start" and "step" in record]
    stops = [*steps[1:], max(steps[-1] + 1, *ends)]
    return [Phase.of(shares, max(1, stop - step)) for shares, step, stop in zip(loads, steps, stops)]

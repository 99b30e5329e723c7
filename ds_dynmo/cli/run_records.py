"""Read the JSON lines of a report: what a run measured and decided."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_dynmo.errors import ConfigError, ScheduleError, reason_of
from ds_dynmo.placement import Placement
from ds_dynmo.plan import Profile
from ds_dynmo.schedules import Schedule

Record = dict[str, Any]


@dataclass(frozen=True)
class DecisionRecord:
    """A decision, with the order of passes that ran before it and runs after it; None: DeepSpeed's 1F1B."""

    record: Record
    order_before: Schedule | None
    order_after: Schedule | None

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def moved(self) -> bool:
        """Whether layers changed stage."""
        return bool(self.record["old_partition"] != self.record["new_partition"])

    @property
    def changed(self) -> bool:
        """Whether the decision changed what runs."""
        return self.moved or self.order_before != self.order_after


@dataclass(frozen=True)
class RunRecords:
    """The records of one run, each kind in the order of steps.

    Attributes:
        order: of passes, in force at the end; None: DeepSpeed's 1F1B.
    """

    steps: tuple[Record, ...]
    profiles: tuple[Profile, ...]
    decisions: tuple[DecisionRecord, ...] = ()
    repacks: tuple[Record, ...] = ()
    order: Schedule | None = None

    def placements(self) -> list[tuple[int, Placement]]:
        """List the placements of the run, each with the step after which it came into force; the first one with 0.

        A run that was resumed at another partition has that from the step on at which something says so.
        """
        seen = [(profile.step, [profile.placement]) for profile in self.profiles]
        for record in [*(decision.record for decision in self.decisions), *self.repacks]:
            names = ("old_partition", "new_partition")
            seen.append((record["step"], [Placement.of(record[n], record.get(f"{n}_owners")) for n in names]))
        found: list[tuple[int, Placement]] = []
        for step, placements in sorted(seen, key=lambda entry: entry[0]):
            for placement in placements:
                if not found or found[-1][1] != placement:
                    found.append((step if found else 0, placement))
        return found


def read_report(path: Path) -> RunRecords:
    """Read the JSON lines that ``dynmo.report`` or ds-dynmo-train wrote.

    Raises:
        ConfigError: no such file, a line that is no record, or nothing in it.
    """
    steps: list[Record] = []
    repacks: list[Record] = []
    profiles: list[Profile] = []
    decisions: list[DecisionRecord] = []
    order: Schedule | None = None
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["kind"] == "step":
                steps.append(record)
            elif record["kind"] == "profile":
                profiles.append(Profile.from_record(record))
            elif record["kind"] == "repack":
                repacks.append(record)
            elif record["kind"] == "rebalance":
                decisions.append(DecisionRecord(record, order, order))
            elif record["kind"] == "schedule":
                order = Schedule.of_lines(record["orders"]) if record["orders"] else None
                if decisions and decisions[-1].step == record["step"]:
                    decisions[-1] = replace(decisions[-1], order_after=order)
        except (ValueError, LookupError, TypeError, ScheduleError) as error:
            raise ConfigError(f"{path}: line {number} is no record of a report: {error!r}") from error
    if not steps and not profiles:
        raise ConfigError(f'{path}: has no record of kind "step" or "profile", there is nothing to draw')
    return RunRecords(tuple(steps), tuple(profiles), tuple(decisions), tuple(repacks), order)

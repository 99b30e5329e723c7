"""Keep the state of a run, as the lines of its report say. Pure."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ds_dynmo.cli.watching.lines import Record, decision_line, end_line, move_line, printable, repack_line, start_line
from ds_dynmo.placement import Placement
from ds_dynmo.plan import Profile

WINDOW = 5  # tokens/s are the median of so many latest steps


@dataclass
class RunState:
    """What is known of one run.

    Attributes:
        steps: the step that the run ends with; None: the report does not say.
        step: the latest that a record names; None: none did.
        speeds: tokens/s of the latest steps.
        loss, auxiliary_loss, validation_loss: the latest, in training but for the last.
        placement: where layers are now; None: not known yet.
        placed_step: the step of the record that says so.
        measurement: the latest profile.
        decisions, moves: how many were made, and how many of them moved layers.
        decision: the latest one in words, moved or not.
        schedule: that is in force, in words; "": not known.
        ended: the report is complete.
    """

    steps: int | None = None
    step: int | None = None
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    loss: float | None = None
    auxiliary_loss: float = 0.0
    validation_loss: float | None = None
    placement: Placement | None = None
    placed_step: int = -1
    measurement: Profile | None = None
    decisions: int = 0
    moves: int = 0
    decision: str = ""
    schedule: str = ""
    ended: bool = False

    @property
    def loads(self) -> tuple[float, ...]:
        """The seconds per micro-batch of each stage, summed over its layers; empty before a profile."""
        if self.measurement is None or self.placement is None:
            return ()
        seconds = self.measurement.costs("time")
        if self.placement.num_layers != len(seconds):
            return ()
        of_stages = (self.placement.layers_of(stage) for stage in self.placement.stages)
        return tuple(math.fsum(seconds[layer] for layer in layers) for layers in of_stages)

    @property
    def loads_are_measured(self) -> bool:
        """Whether layers were measured where they are now; else they have moved since.

        :attr:`loads` are not what a decision predicts then: it weighs earlier profiles and the speeds of stages too.
        """
        return self.measurement is not None and self.measurement.placement == self.placement

    @property
    def imbalance(self) -> float | None:
        """The paper's equation 2 for :attr:`loads`."""
        loads = self.loads
        return (max(loads) - min(loads)) * len(loads) / math.fsum(loads) if any(loads) else None

    # -- the records of each kind ---------------------------------------------------------------------

    def take_step(self, record: Record) -> None:
        speed, loss = float(record["tokens_per_second"]), float(record["train_loss"])
        self.loss, self.auxiliary_loss = loss, float(record["auxiliary_loss"])
        self.speeds.append(speed)

    def take_validation(self, record: Record) -> None:
        self.validation_loss = float(record["validation_loss"])

    def take_profile(self, record: Record) -> None:
        """Take a profile, which may be written after the move that it led to: layers may be elsewhere by then."""
        self.measurement = Profile.from_record(record)
        if self.measurement.step > self.placed_step:
            self.placement = self.measurement.placement

    def take_rebalance(self, record: Record) -> None:
        old, new = _placement(record, "old_partition"), _placement(record, "new_partition")
        self._place(new, record)
        self.decisions += 1
        self.moves += old != new
        self.schedule = printable(str(record.get("schedule", "")))

    def take_repack(self, record: Record) -> None:
        old, new = _placement(record, "old_partition"), _placement(record, "new_partition")
        self._place(new, record)
        if old != new:
            self.schedule = ""  # the record of the next decision says it

    def _place(self, placement: Placement, record: Record) -> None:
        self.decision = printable(decision_line(record))
        self.placement, self.placed_step = placement, int(record["step"])


def _placement(record: Record, name: str) -> Placement:
    return Placement.of(record[name], record.get(f"{name}_owners"))


class ReportState:
    """Everything that the lines of a report say, one after another.

    Attributes:
        run: the latest run.
        history: a line for each move, each re-packing, and each beginning and end of a run.
        skipped: how many lines are no records.
    """

    def __init__(self) -> None:
        self.run = RunState()
        self.history: list[str] = []
        self.skipped = 0

    def add(self, line: bytes) -> None:
        """Take the next line of the file."""
        try:
            self._take(json.loads(line))
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
            self.skipped += 1

    def restart(self) -> None:
        """Take what follows as another run: the file was truncated or replaced."""
        self.run = RunState()
        self._tell("the file was written anew")

    def _take(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "start":
            self.run = RunState(steps=int(record["stop_at"]), step=int(record["first_step"]))
            self._tell(start_line(record))
        elif kind == "end":
            self._tell(end_line(record))
            self.run.validation_loss = float(record["validation_loss"])
            self.run.ended = True
        elif kind in _TAKE:
            self._take_step_of(int(record["step"]), kind)
            _TAKE[kind](self.run, record)
            if kind in ("rebalance", "repack") and record["old_partition"] != record["new_partition"]:
                self._tell(move_line(record) if kind == "rebalance" else repack_line(record))

    def _tell(self, line: str) -> None:
        self.history.append(printable(line))

    def _take_step_of(self, step: int, kind: str) -> None:
        """Take a step before the last one for another run. A profile may follow a later decision."""
        known = self.run.step
        if known is not None and step < known and kind != "profile":
            self._tell(f"step {step} follows step {known}: another run, or an earlier checkpoint")
            self.run = RunState(steps=self.run.steps)
        self.run.step = max(step, self.run.step or 0)


_TAKE: dict[str, Callable[[RunState, Record], None]] = {
    "step": RunState.take_step,
    "validation": RunState.take_validation,
    "profile": RunState.take_profile,
    "rebalance": RunState.take_rebalance,
    "repack": RunState.take_repack,
}

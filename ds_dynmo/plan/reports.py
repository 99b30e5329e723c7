"""Reports of decisions and of their outcome. They are logged, written as JSON lines and kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from ds_dynmo.placement import Placement

__all__ = ["MeasuredReport", "PrintsPartitions", "RebalanceReport", "RepackReport", "SaveReport", "reports_after"]

Report = TypeVar("Report")


def reports_after(last: Report | None, latest: Sequence[Report]) -> list[Report]:
    """Return the reports in ``latest`` that came after ``last``: all of them if it is None or no longer kept.

    >>> first, second, third = [1], [2], [3]
    >>> reports_after(first, [first, second, third]), reports_after(first, [second, third])
    ([[2], [3]], [[2], [3]])
    """
    new: list[Report] = []
    for report in reversed(latest):
        if report is last:
            break
        new.append(report)
    return new[::-1]


class PrintsPartitions:
    """Prints a placement as its boundaries, under the name of the property that returns these."""

    def __repr__(self) -> str:
        assert is_dataclass(self)
        values = {field.name.replace("placement", "partition"): getattr(self, field.name) for field in fields(self)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


class _BetweenPlacements(PrintsPartitions):
    """The boundaries of the two placements of a report."""

    old_placement: Placement
    new_placement: Placement

    @property
    def old_partition(self) -> tuple[int, ...]:
        """The boundaries of :attr:`old_placement`."""
        return self.old_placement.boundaries

    @property
    def new_partition(self) -> tuple[int, ...]:
        """The boundaries of :attr:`new_placement`."""
        return self.new_placement.boundaries


@dataclass(frozen=True, repr=False)
class RebalanceReport(_BetweenPlacements):
    """The outcome of one decision. Seconds are wall-clock on the reporting rank.

    Attributes:
        step: ``global_steps`` when layers had moved, or when it was decided that they stay.
        reason: why it was made: "interval", "initial" (the first partition of a run), "by hand"
            (``rebalance()`` was called), "explicit" (a partition was given), "checkpoint" (the partition of a loaded
            checkpoint), or the text given to ``model_changed``.
        old_placement, new_placement: equal if no layer moved.
        bottleneck_seconds_before, bottleneck_seconds_after: predicted seconds per micro-batch of the slowest stage;
            None without a profile (an explicit partition before the first profiled batch).
        imbalance_before, imbalance_after: predicted, the paper's equation 2.
        layers_moved: in the whole pipeline (one data-parallel replica).
        bytes_moved: in the whole pipeline (one data-parallel replica): weights, optimizer state and buffers.
        profile_seconds, decide_seconds, migrate_seconds: that training waited while the profile was gathered, that
            this rank took to decide, and that training waited while layers moved.
        background_seconds: from the beginning to the end of a move while a batch trained; None: training waited for it.
        load_signals: per layer, None where a layer does not report one.
        iteration_seconds_before, iteration_seconds_after: predicted by simulating the schedule, without the
            optimizer's step and messages; before: under the old schedule, after: under the new one.
        verdict: why layers moved or stayed.
        bubble_ratio_before, bubble_ratio_after: of the same two iterations, the fraction of ``num_stages`` x seconds in
            which no pass runs; None without a profile.
        schedule_splits: number of backward passes of a batch that run in two parts under the new schedule; None: it is
            DeepSpeed's 1F1B, or there is no profile.
        lower_bound_seconds: of the iteration under any schedule at ``new_placement``; None: no search was made.
        stage_seconds_before, stage_seconds_after: predicted per micro-batch of each stage; None without a profile.
        model_changed: whether ``reason`` is the text that the model passed to ``model_changed``.
    """

    step: int
    reason: str
    old_placement: Placement
    new_placement: Placement
    bottleneck_seconds_before: float | None
    bottleneck_seconds_after: float | None
    imbalance_before: float | None
    imbalance_after: float | None
    layers_moved: int
    bytes_moved: int
    profile_seconds: float
    decide_seconds: float
    migrate_seconds: float
    load_signals: tuple[float | None, ...] = ()
    iteration_seconds_before: float | None = None
    iteration_seconds_after: float | None = None
    verdict: str = ""
    bubble_ratio_before: float | None = None
    bubble_ratio_after: float | None = None
    schedule_splits: int | None = None
    lower_bound_seconds: float | None = None
    stage_seconds_before: tuple[float, ...] | None = None
    stage_seconds_after: tuple[float, ...] | None = None
    model_changed: bool = False
    background_seconds: float | None = None

    @property
    def schedule(self) -> str:
        """Describe the schedule that runs in a few words; "" without a profile."""
        if self.iteration_seconds_after is None:
            return ""
        kind = "1f1b" if self.schedule_splits is None else f"zero_bubble, {self.schedule_splits} split passes"
        text = f"{kind}, predicted {self.iteration_seconds_after * 1e3:.1f} ms"
        return text if self.lower_bound_seconds is None else f"{text}, bound {self.lower_bound_seconds * 1e3:.1f} ms"

    @property
    def moved(self) -> bool:
        """Whether a layer changed stage."""
        return self.old_placement != self.new_placement

    def as_record(self) -> dict[str, Any]:
        """Return a dict for one JSON line."""
        return {**_record("rebalance", self), "schedule": self.schedule}


@dataclass(frozen=True, repr=False)
class MeasuredReport(PrintsPartitions):
    """The measurement of a profile after a rebalance, for comparison with the prediction.

    Attributes:
        step: ``global_steps`` after the last profiled batch.
        rebalance_step: the step of that rebalance; None for the partition as built.
        bottleneck_seconds: per micro-batch, of the slowest stage.
        imbalance: the paper's equation 2.
        batch_seconds: wall-clock seconds of one batch.
        bubble_ratio: the fraction of ``num_stages`` x ``batch_seconds`` in which no layer computed.
    """

    step: int
    rebalance_step: int | None
    placement: Placement
    bottleneck_seconds: float
    imbalance: float
    batch_seconds: float
    bubble_ratio: float

    @property
    def partition(self) -> tuple[int, ...]:
        """The boundaries of :attr:`placement`."""
        return self.placement.boundaries

    def as_record(self) -> dict[str, Any]:
        """Return a dict for one JSON line."""
        return _record("measured", self)


@dataclass(frozen=True, repr=False)
class RepackReport(_BetweenPlacements):
    """The outcome of one re-packing. Seconds are wall-clock on the reporting rank.

    Attributes:
        step: ``global_steps`` when layers had moved, or when it was decided that they stay.
        reason: why it was made.
        old_placement, new_placement: on the old and the new number of stages.
        released_ranks: as numbered at the launch.
        iteration_seconds_before, iteration_seconds_after: predicted by simulating the schedule; None without a profile.
        layers_moved, bytes_moved: in the whole pipeline (one data-parallel replica).
        decide_seconds, migrate_seconds: as in a :class:`RebalanceReport`.
        world_seconds: to set up process groups of another size.
        verdict: why ranks were released or not.
        model_changed: as in a :class:`RebalanceReport`.
    """

    step: int
    reason: str
    old_placement: Placement
    new_placement: Placement
    released_ranks: tuple[int, ...]
    iteration_seconds_before: float | None
    iteration_seconds_after: float | None
    layers_moved: int
    bytes_moved: int
    decide_seconds: float
    migrate_seconds: float
    world_seconds: float
    verdict: str = ""
    model_changed: bool = False

    @property
    def old_stages(self) -> int:
        """The number of stages before."""
        return self.old_placement.num_stages

    @property
    def new_stages(self) -> int:
        """The number of stages after."""
        return self.new_placement.num_stages

    def as_record(self) -> dict[str, Any]:
        """Return a dict for one JSON line."""
        return _record("repack", self)


@dataclass(frozen=True)
class SaveReport:
    """A checkpoint that was saved. Seconds are wall-clock on rank 0.

    Attributes:
        step: ``global_steps`` of the state in it.
        path: its folder.
        background: whether it was written while training went on.
        bytes_saved: of all files.
        wait_seconds: that training waited.
        save_seconds: from the call until it was whole.
    """

    step: int
    path: str
    background: bool
    bytes_saved: int
    wait_seconds: float
    save_seconds: float

    def as_record(self) -> dict[str, Any]:
        """Return a dict for one JSON line."""
        return _record("save", self)


def _record(kind: str, report: RebalanceReport | MeasuredReport | RepackReport | SaveReport) -> dict[str, Any]:
    """Return the fields of a report; a placement becomes its boundaries, as ``..._partition``."""
    record: dict[str, Any] = {"kind": kind}
    for field in fields(report):
        value = getattr(report, field.name)
        name = field.name.replace("placement", "partition")
        record.update(value.as_record(name) if isinstance(value, Placement) else {name: value})
    return record

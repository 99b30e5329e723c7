"""What was done, and what came of it: records that are logged, written as JSON lines and kept."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ds_dynmo.placement import Placement

__all__ = ["MeasuredReport", "RebalanceReport", "RepackReport"]


class _BetweenPlacements:
    """What a report of a move from one placement to another says of both."""

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


@dataclass(frozen=True)
class RebalanceReport(_BetweenPlacements):
    """What one decision did. Seconds are wall-clock on the reporting rank.

    Attributes:
        step: ``global_steps`` at the decision.
        reason: what asked for it: "interval", "initial", "explicit", "by hand" or what ``model_changed`` was told.
        old_placement, new_placement: equal if no layer moved.
        bottleneck_seconds_before, bottleneck_seconds_after: predicted, per micro-batch, of the slowest stage;
            None without a profile (an explicit partition before the first profiled batch).
        imbalance_before, imbalance_after: predicted, the paper's equation 2.
        layers_moved: in the whole pipeline (one data-parallel replica).
        bytes_moved: in the whole pipeline (one data-parallel replica), weights, optimizer state and the rest.
        profile_seconds: extra time of gathering the profile; decide_seconds, migrate_seconds: likewise.
        load_signals: per layer, None where a layer does not report one.
        iteration_seconds_before, iteration_seconds_after: predicted by simulating the schedule; what is not in layers
            (the optimizer's step, messages) is not counted.
        verdict: why layers moved or stayed.
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

    @property
    def moved(self) -> bool:
        """Did any layer change stage?"""
        return self.old_placement != self.new_placement

    def as_record(self) -> dict[str, Any]:
        """A dict for one JSON line."""
        return _record("rebalance", self)


@dataclass(frozen=True)
class MeasuredReport:
    """What was measured under a partition, from a profile: the record that follows a rebalance's prediction.

    Attributes:
        step: ``global_steps`` after the last profiled batch.
        rebalance_step: the step of the rebalance whose outcome this is, None for the partition as built.
        bottleneck_seconds: per micro-batch, of the slowest stage; imbalance: the paper's equation 2.
        batch_seconds: wall-clock seconds of one batch.
        bubble_ratio: the share of ``num_stages`` x ``batch_seconds`` in which no layer was at work.
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
        """A dict for one JSON line."""
        return _record("measured", self)


@dataclass(frozen=True)
class RepackReport(_BetweenPlacements):
    """What one re-packing did, or why it did nothing. Seconds are wall-clock on the reporting rank.

    Attributes:
        step: ``global_steps`` at the decision.
        reason: what asked for it.
        old_placement, new_placement: over as many stages as there were, and as there are.
        released_ranks, recalled_ranks: of the launch, whose accelerators were given back or taken again.
        iteration_seconds_before, iteration_seconds_after: predicted by simulating the schedule; None without a profile.
        layers_moved, bytes_moved: in the whole pipeline (one data-parallel replica).
        decide_seconds, migrate_seconds: as in a rebalance; ``world_seconds``: to go on in a world of another size.
        verdict: why ranks were released, taken back or neither.
        copies: how many times the launch's replicas are there afterwards: more than once where freed ranks are
            further replicas.
    """

    step: int
    reason: str
    old_placement: Placement
    new_placement: Placement
    released_ranks: tuple[int, ...]
    recalled_ranks: tuple[int, ...]
    iteration_seconds_before: float | None
    iteration_seconds_after: float | None
    layers_moved: int
    bytes_moved: int
    decide_seconds: float
    migrate_seconds: float
    world_seconds: float
    verdict: str = ""
    copies: int = 1

    @property
    def old_stages(self) -> int:
        """How many stages there were."""
        return self.old_placement.num_stages

    @property
    def new_stages(self) -> int:
        """How many stages there are."""
        return self.new_placement.num_stages

    def as_record(self) -> dict[str, Any]:
        """A dict for one JSON line."""
        return _record("repack", self)


def _record(kind: str, report: RebalanceReport | MeasuredReport | RepackReport) -> dict[str, Any]:
    """What a report holds; of a placement its boundaries, under the name that they have there."""
    record: dict[str, Any] = {"kind": kind}
    for field in fields(report):
        value = getattr(report, field.name)
        name = field.name.replace("placement", "partition")
        record.update(value.as_record(name) if isinstance(value, Placement) else {name: value})
    return record

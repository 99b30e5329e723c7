"""Which messages the actions of a schedule send and receive, and what a stage learns from each that arrives."""

from __future__ import annotations

from ds_dynmo.engine.comm.channels import Lane, Taken
from ds_dynmo.engine.comm.ordered_channels import LinkPlan, PlannedMessage
from ds_dynmo.schedules import Action, Kind, PassCosts, Schedule, link_orders


def receives(action: Action, schedule: Schedule) -> tuple[int, Lane] | None:
    """From which stage ``action`` receives a message, and in which lane; None: from no other stage."""
    kind, chunk, _ = action
    if kind == Kind.WEIGHT_GRADIENT:
        return None
    step, lane = (-1, Lane.ACTIVATION) if kind == Kind.FORWARD else (1, Lane.GRADIENT)
    source = chunk + step
    if not 0 <= source < schedule.num_chunks or schedule.owners[source] == schedule.owners[chunk]:
        return None
    return schedule.owners[source], lane


def sends(action: Action, schedule: Schedule) -> tuple[int, Lane] | None:
    """To which stage ``action`` sends a message, and in which lane; None: to no other stage."""
    kind, chunk, _ = action
    if kind == Kind.WEIGHT_GRADIENT:
        return None
    step, lane = (1, Lane.ACTIVATION) if kind == Kind.FORWARD else (-1, Lane.GRADIENT)
    target = chunk + step
    if not 0 <= target < schedule.num_chunks or schedule.owners[target] == schedule.owners[chunk]:
        return None
    return schedule.owners[target], lane


def taken_sends(schedule: Schedule, stage: int) -> Taken:
    """What ``stage`` learns of its own sends from each message that it receives.

    A stage receives what an action needs before it runs it, and sends what it made afterwards. So a message that comes
    from an action of a neighbour says that the neighbour has taken all that its earlier actions, and this one, needed.

    Returns:
        Per neighbour and lane, a list of one entry per message: how many of its own messages in each lane that
        neighbour has taken.
    """
    learned: Taken = {}
    for neighbour, order in enumerate(schedule.orders):
        if neighbour == stage:
            continue
        taken = dict.fromkeys(Lane, 0)
        for action in order:
            received = receives(action, schedule)
            if received is not None and received[0] == stage:
                taken[received[1]] += 1
            sent = sends(action, schedule)
            if sent is not None and sent[0] == stage:
                learned.setdefault((neighbour, sent[1]), []).append(dict(taken))
    return learned


def link_plan(schedule: Schedule, stage: int, costs: PassCosts | None) -> LinkPlan:
    """In which order ``stage`` sends to and receives from each neighbour.

    Args:
        costs: that the schedule was made for; None: nothing has been measured.
    """
    plan: dict[int, list[tuple[PlannedMessage, ...]]] = {}
    owners = schedule.owners
    for pair, groups in link_orders(schedule, costs or PassCosts.equal(owners)).items():
        if stage in pair:
            plan[sum(pair) - stage] = [
                tuple(PlannedMessage(_LANES[made_by.kind], owners[made_by.chunk] == stage) for made_by, _ in group)
                for group in groups
            ]
    return plan


_LANES = {Kind.FORWARD: Lane.ACTIVATION, Kind.INPUT_GRADIENT: Lane.GRADIENT, Kind.BACKWARD: Lane.GRADIENT}

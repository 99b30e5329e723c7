"""The messages of a schedule's actions, and the order of posting between two stages."""

from __future__ import annotations

from ds_dynmo.engine.comm.channels import LaneKey, LinkPlan, MessageKind
from ds_dynmo.schedules import Action, Kind, PassCosts, Schedule, link_orders


def receives(action: Action, schedule: Schedule) -> tuple[int, MessageKind] | None:
    """Return the stage from which ``action`` receives a message, and the kind of the message; None: no other stage."""
    kind, chunk, _ = action
    if kind == Kind.WEIGHT_GRADIENT:
        return None
    step, message_kind = (-1, MessageKind.ACTIVATION) if kind == Kind.FORWARD else (1, MessageKind.GRADIENT)
    source = chunk + step
    if not 0 <= source < schedule.num_chunks or schedule.owners[source] == schedule.owners[chunk]:
        return None
    return schedule.owners[source], message_kind


def sends(action: Action, schedule: Schedule) -> tuple[int, MessageKind] | None:
    """Return the stage to which ``action`` sends a message, and the kind of the message; None: no other stage."""
    kind, chunk, _ = action
    if kind == Kind.WEIGHT_GRADIENT:
        return None
    step, message_kind = (1, MessageKind.ACTIVATION) if kind == Kind.FORWARD else (-1, MessageKind.GRADIENT)
    target = chunk + step
    if not 0 <= target < schedule.num_chunks or schedule.owners[target] == schedule.owners[chunk]:
        return None
    return schedule.owners[target], message_kind


def link_plan(schedule: Schedule, stage: int, costs: PassCosts | None) -> LinkPlan:
    """List the sends and receives of ``stage`` with each neighbour, in their order.

    Args:
        costs: of the search for the schedule; None: nothing has been measured.
    """
    plan: dict[int, list[tuple[LaneKey, ...]]] = {}
    owners = schedule.owners
    for pair, groups in link_orders(schedule, costs or PassCosts.equal(owners)).items():
        if stage in pair:
            plan[sum(pair) - stage] = [
                tuple(LaneKey(_MESSAGE_KINDS[made_by.kind], owners[made_by.chunk] == stage) for made_by, _ in group)
                for group in groups
            ]
    return plan


_MESSAGE_KINDS = {
    Kind.FORWARD: MessageKind.ACTIVATION,
    Kind.INPUT_GRADIENT: MessageKind.GRADIENT,
    Kind.BACKWARD: MessageKind.GRADIENT,
}

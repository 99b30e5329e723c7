"""The sends and receives of a schedule's actions, in the order of posting between two stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ds_dynmo.engine.comm.links import LinkPlan, Transfer
from ds_dynmo.engine.comm.message_forms import Lane, MessageKind
from ds_dynmo.schedules import Action, Kind, PassCosts, Schedule, link_orders
from ds_dynmo.schedules.forward_only import Place

_KINDS = {
    Kind.FORWARD: MessageKind.ACTIVATION,
    Kind.INPUT_GRADIENT: MessageKind.GRADIENT,
    Kind.BACKWARD: MessageKind.GRADIENT,
}


def lane_of(made_by: Action) -> Lane:
    """Return the lane of what an action sends on: the boundary behind its chunk, or of a gradient the one before."""
    kind = _KINDS[made_by.kind]
    return Lane(kind, made_by.chunk if kind is MessageKind.ACTIVATION else made_by.chunk - 1)


def link_plan(schedule: Schedule, stage: int, costs: PassCosts | None) -> LinkPlan:
    """List the sends and receives of ``stage`` with each neighbour, in their order.

    Args:
        costs: of the search for the schedule; None: nothing has been measured.
    """
    plan: dict[int, list[tuple[Transfer, ...]]] = {}
    owners = schedule.owners
    for pair, groups in link_orders(schedule, costs or PassCosts.equal(owners)).items():
        if stage in pair:
            plan[sum(pair) - stage] = [
                tuple(Transfer(lane_of(made_by), owners[made_by.chunk] == stage) for made_by, _ in group)
                for group in groups
            ]
    return plan


def evaluation_plan(owners: tuple[int, ...], orders: Sequence[Sequence[Action]], stage: int, place: Place) -> LinkPlan:
    """List the sends and receives of ``stage`` in an evaluation.

    Args:
        orders: of forward passes alone.
        place: the sort key of all actions by which ``orders`` are sorted.
    """
    plan: dict[int, list[tuple[Transfer, ...]]] = {}
    ways = dict(enumerate(pairwise(owners)))  # of the messages behind each chunk
    for _, chunk, _ in sorted((action for order in orders for action in order), key=place):
        source, target = ways.get(chunk, (stage, stage))
        if source != target and stage in (source, target):
            transfer = Transfer(Lane(MessageKind.ACTIVATION, chunk), source == stage)
            plan.setdefault(target if source == stage else source, []).append((transfer,))
    return plan

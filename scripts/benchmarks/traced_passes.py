"""What passes took in batches that were traced, with all that their stage did for them but wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from ds_dynmo.schedules import Action, Kind, PassCosts

NAMES = {
    "forward": Kind.FORWARD,
    "backward": Kind.BACKWARD,
    "input gradient": Kind.INPUT_GRADIENT,
    "weight gradient": Kind.WEIGHT_GRADIENT,
}


class TracedBatch(NamedTuple):
    """One batch.

    Attributes:
        costs: seconds of every kind of pass through each chunk of layers, averaged; 0 where it had none.
        seconds: from the first pass to the end of the last.
    """

    costs: PassCosts
    seconds: float


def traced_batches(
    events: Iterable[Mapping[str, Any]], owners: Sequence[int], orders: Sequence[Sequence[Action]]
) -> list[TracedBatch]:
    """Read what passes took out of a trace.

    A pass begins where the one before ends, or with the message that it received, and ends when what it sends is on
    its way. So replaying an order with these seconds says what the stages cost each other.

    Args:
        events: of a trace.
        owners: per chunk, the stage that holds it.
        orders: per stage, the passes that it ran, in their order.
    """
    by_step: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_step[event["args"]["step"]].append(event)
    return [_traced_batch(sorted(by_step[step], key=_begin), owners, orders) for step in sorted(by_step)]


def _begin(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _traced_batch(
    events: Sequence[Mapping[str, Any]], owners: Sequence[int], orders: Sequence[Sequence[Action]]
) -> TracedBatch:
    passes = [event for event in events if _kind(event) is not None]
    seconds = (max(map(_end, passes)) - min(map(_begin, passes))) / 1e6
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for stage, order in enumerate(orders):
        taken = _pass_seconds([event for event in events if event["args"]["stage"] == stage])
        for action, one in zip(order, taken, strict=True):
            found[action.kind, action.chunk].append(one)
    by_kind = {kind: tuple(fmean(found[kind, chunk] or [0.0]) for chunk in range(len(owners))) for kind in Kind}
    costs = PassCosts(
        tuple(owners),
        by_kind[Kind.FORWARD],
        by_kind[Kind.INPUT_GRADIENT],
        by_kind[Kind.WEIGHT_GRADIENT],
        by_kind[Kind.BACKWARD],
    )
    return TracedBatch(costs, seconds)


def _kind(event: Mapping[str, Any]) -> Kind | None:
    """Return the kind of pass that an event is; None: it is none. Its name ends with the micro-batch."""
    return NAMES.get(event["name"].rsplit(" ", 1)[0])


def _pass_seconds(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of each pass of one stage, whose events come in the order of time."""
    found: list[float] = []
    kind: Kind | None = None  # of the pass that has not ended
    began = ended = _begin(events[0]) if events else 0.0

    def end() -> None:
        nonlocal kind, began
        if kind is not None:
            found.append((ended - began) / 1e6)
        kind, began = None, ended

    for event in events:
        category, until = event["cat"], _end(event)
        if category in ("wait", "receive"):
            end()
            began = ended = until
        elif category == "send":
            ended = until
        elif _kind(event) is not None:
            end()
            kind, ended = _kind(event), until
        elif category == "load":
            end()
        else:  # the batch's end
            break
    end()
    return found

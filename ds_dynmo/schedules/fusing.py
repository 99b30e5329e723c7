"""Backward passes in one where two parts fill no gap: a split costs some per cent of the pass, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.costs import PassCosts
from ds_dynmo.schedules.order import Orders, Run, run

__all__ = ["fuse"]

_ROUNDING = 1e-9  # relative


def fuse(orders: Orders, micro_batches: int, costs: PassCosts, target_seconds: float) -> list[list[Action]]:
    """Run in one each backward pass whose weight gradient can follow its input gradient at once, by a deadline.

    Deadlines are the latest starts in an iteration of ``target_seconds``, with the orders as they are. A pass is
    fused if then neither the stage that waits for its gradient nor its own stage's next action is late, and no weight
    gradient of an earlier micro-batch is left for later. So where ``target_seconds`` is the orders' own iteration, the
    result takes no longer. A longer target fuses more; what that saves may be worth more than what it delays.
    """
    ran = run(orders, micro_batches, costs)
    latest, gradients_due = _deadlines(orders, micro_batches, costs, ran, target_seconds)
    allowed = _ROUNDING * target_seconds
    clock = _Clock(micro_batches, costs, len(orders))
    weights_done = [0] * costs.num_chunks
    fused: list[list[Action]] = [[] for _ in orders]
    for stage, place in _in_turn(ran):
        kind, chunk, micro_batch = action = orders[stage][place]
        if kind == Kind.WEIGHT_GRADIENT and micro_batch < weights_done[chunk]:
            continue  # fused
        if kind == Kind.INPUT_GRADIENT and weights_done[chunk] == micro_batch:
            following = _following(orders[stage], place, weights_done)
            due = min(
                gradients_due[chunk * micro_batches + micro_batch],
                target_seconds if following is None else latest[stage][following],
            )
            if clock.start_of(stage, action) + costs.backward_seconds[chunk] <= due + allowed:
                kind, action = Kind.BACKWARD, Action(Kind.BACKWARD, chunk, micro_batch)
        if kind in (Kind.WEIGHT_GRADIENT, Kind.BACKWARD):
            weights_done[chunk] += 1
        clock.run(stage, action)
        fused[stage].append(action)
    return fused


def _in_turn(ran: Run) -> Iterator[tuple[int, int]]:
    """Stage and place of each action, none before one that it waits for."""
    reached = [0] * len(ran.starts)
    for stage, count in ran.bursts:
        for place in range(reached[stage], reached[stage] + count):
            yield stage, place
        reached[stage] += count


def _following(order: Sequence[Action], place: int, weights_done: Sequence[int]) -> int | None:
    """The place of the next action that is left once the backward pass at ``place`` is fused."""
    _, chunk, micro_batch = order[place]
    for following in range(place + 1, len(order)):
        kind, other, passed = order[following]
        done = micro_batch + 1 if other == chunk else weights_done[other]
        if kind != Kind.WEIGHT_GRADIENT or passed >= done:
            return following
    return None


def _deadlines(
    orders: Orders, micro_batches: int, costs: PassCosts, ran: Run, target_seconds: float
) -> tuple[list[list[float]], list[float]]:
    """Latest starts, in the shape of ``orders``, and by when each gradient has to leave, by chunk and micro-batch."""
    seconds, links, last_chunk = costs.by_kind, costs.link_seconds, costs.num_chunks - 1
    latest = [[0.0] * len(order) for order in orders]
    next_due = [target_seconds] * len(orders)
    outputs_due = [target_seconds] * (micro_batches * costs.num_chunks)
    gradients_due = list(outputs_due)
    for stage, place in reversed(list(_in_turn(ran))):
        kind, chunk, micro_batch = orders[stage][place]
        slot = chunk * micro_batches + micro_batch
        due = next_due[stage]
        if kind == Kind.FORWARD:
            due = min(due, outputs_due[slot])
        elif kind != Kind.WEIGHT_GRADIENT:
            due = min(due, gradients_due[slot])
        start = latest[stage][place] = next_due[stage] = due - seconds[kind][chunk]
        if kind == Kind.FORWARD and chunk > 0:
            outputs_due[slot - micro_batches] = start - links[chunk - 1]
        elif kind in (Kind.INPUT_GRADIENT, Kind.BACKWARD) and costs.frozen_chunks <= chunk < last_chunk:
            gradients_due[slot + micro_batches] = start - links[chunk]
    return latest, gradients_due


class _Clock:
    """When actions run that come in turn."""

    def __init__(self, micro_batches: int, costs: PassCosts, num_stages: int) -> None:
        self._micro_batches, self._costs = micro_batches, costs
        self._free_at = [0.0] * num_stages
        self._inputs = [0.0] * (micro_batches * costs.num_chunks)  # when they arrive; gradients likewise
        self._gradients = list(self._inputs)

    def start_of(self, stage: int, action: Action) -> float:
        kind, chunk, micro_batch = action
        if kind == Kind.WEIGHT_GRADIENT:
            return self._free_at[stage]
        # A gradient that nobody sends, the loss's or a frozen chunk's, is there when the stage is free.
        arrivals = self._inputs if kind == Kind.FORWARD else self._gradients
        return max(self._free_at[stage], arrivals[chunk * self._micro_batches + micro_batch])

    def run(self, stage: int, action: Action) -> None:
        kind, chunk, micro_batch = action
        costs, slot = self._costs, chunk * self._micro_batches + micro_batch
        end = self._free_at[stage] = self.start_of(stage, action) + costs.by_kind[kind][chunk]
        if kind == Kind.FORWARD:
            if chunk + 1 < costs.num_chunks:
                self._inputs[slot + self._micro_batches] = end + costs.link_seconds[chunk]
        elif kind in (Kind.INPUT_GRADIENT, Kind.BACKWARD) and chunk > costs.frozen_chunks:
            self._gradients[slot - self._micro_batches] = end + costs.link_seconds[chunk - 1]

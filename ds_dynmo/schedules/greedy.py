"""The simulator as scheduler: let every stage take the most useful pass that is ready, and keep what it did.

The simulation ends, so the order that it leaves behind is not cyclic. That must not depend on what is frozen today:
backward passes of frozen chunks, which take no time, wait for gradients here as others do.

The simulation counts whole ticks. So what is due at the same time is so on every machine, and no order depends on a
rounding error. Ties go to the smaller number of a stage, then to the later chunk.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.costs import PassBytes, PassCosts

__all__ = ["Policy", "greedy"]

_NEVER = 1 << 62  # ticks


@dataclass(frozen=True)
class Policy:
    """What a stage does when it can do several things.

    It runs a backward pass (its input gradient) that is ready, else a forward pass, else a weight gradient.

    Attributes:
        alternate: after a backward pass, a forward pass comes first, as in 1F1B; where only memory is in its way, a
            weight gradient makes room. Else the stages behind have nothing to do while this one goes back.
        forward_patience: no forward pass while a gradient is known to arrive within this share of it.
        weight_patience: no weight gradient while anything is known to arrive within this share of it.
        lead: how far ahead of its backward passes a chunk runs forward, in round trips to the last chunk; as far as
            memory allows where infinite.
        split_first, split_last: how many of the first and of the last micro-batches may run backward in two parts, as
            shares of the number of stages; all where infinite, none where both are 0. Those between run in one, unless
            weight gradients are waiting. Where a split has a price, it pays while the pipeline fills and drains.
    """

    alternate: bool = True
    forward_patience: float = 0.0
    weight_patience: float = 0.0
    lead: float = math.inf
    split_first: float = math.inf
    split_last: float = math.inf


def greedy(
    costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int], policy: Policy
) -> list[list[Action]] | None:
    """The order in which each stage worked; None where memory let no stage go on.

    Args:
        sizes: bytes per chunk.
        limits: per stage, the bytes of passes in flight.
    """
    simulation = _Simulation(costs, micro_batches, sizes, limits, policy)
    return simulation.orders if simulation.run() else None


class _Simulation:
    """The state of all stages at one time, in ticks."""

    def __init__(
        self, costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int], policy: Policy
    ) -> None:
        chunks = range(costs.num_chunks)
        longest = max(max(seconds) for seconds in (*costs.by_kind, costs.link_seconds or (0.0,)))
        scale = math.ldexp(1.0, 30 - math.frexp(longest)[1])
        self._ticks = [[round(value * scale) for value in seconds] for seconds in costs.by_kind]
        self._links = [round(value * scale) for value in costs.link_seconds]
        self._forward_patience = [round(policy.forward_patience * ticks) for ticks in self._ticks[Kind.FORWARD]]
        self._weight_patience = [round(policy.weight_patience * ticks) for ticks in self._ticks[Kind.WEIGHT_GRADIENT]]
        self._micro_batches, self._owners = micro_batches, costs.owners
        self._chunks = [costs.chunks_of(stage) for stage in range(costs.num_stages)]
        self._alternate = policy.alternate
        self._splits = [seconds > 0 for seconds in costs.weight_gradient_seconds]
        first, last = (
            micro_batches if share == math.inf else round(share * costs.num_stages)
            for share in (policy.split_first, policy.split_last)
        )
        self._in_one = range(first, micro_batches - last)
        self._lead = self._leads(policy.lead)

        # What is due: when the inputs and the gradients of each chunk's passes arrive, as far as is known.
        self._inputs: list[list[int]] = [[] for _ in chunks]
        self._inputs[0] = [0] * micro_batches
        self._gradients: list[list[int]] = [[] for _ in chunks]
        self._forwards, self._backwards, self._weights = ([0] * costs.num_chunks for _ in range(3))  # begun

        self._activations, self._held = sizes.activation_bytes, sizes.held_bytes
        self._for_split = [  # beside what a backward pass in one needs: in the end, and while segments are recomputed
            max(sizes.held_bytes[chunk] - sizes.activation_bytes[chunk], split - sizes.recomputed_bytes[chunk])
            for chunk, split in enumerate(sizes.split_recomputed_bytes)
        ]
        # What one backward pass recomputes has room at any time.
        self._room = [
            limit - max(sizes.recomputed_bytes[chunk] for chunk in mine) for limit, mine in zip(limits, self._chunks)
        ]
        activations = sizes.activation_bytes
        self._returning = [  # on a stage with several chunks: room for the way back
            max((activations[other] for other in self._chunks[owner] if other > chunk), default=0)
            for chunk, owner in enumerate(costs.owners)
        ]
        self.orders: list[list[Action]] = [[] for _ in self._chunks]
        self._went_back = [True] * costs.num_stages  # was the last pass, weight gradients apart, a backward one?
        self._events = [(0, stage) for stage in range(costs.num_stages)]
        self._free_at = [0] * costs.num_stages

    def _leads(self, lead: float) -> list[int]:
        """Per chunk, how many forward passes may be ahead of the backward passes."""
        if lead == math.inf:
            return [self._micro_batches] * len(self._owners)
        forward, part, rest, whole = self._ticks
        passes = [f + min(i + w, b) for f, i, w, b in zip(forward, part, rest, whole)]
        period = max(1, max(sum(passes[chunk] for chunk in mine) for mine in self._chunks))
        leads, trip = [], 0
        for chunk in reversed(range(len(self._owners))):
            trip += forward[chunk] + min(part[chunk], whole[chunk])
            leads.append(max(1, math.ceil(lead * trip / period)))
            trip += 2 * self._links[chunk - 1] if chunk else 0
        return leads[::-1]

    def run(self) -> bool:
        """Did all passes run?"""
        left = sum(self._micro_batches * (3 if splits else 2) for splits in self._splits)
        while self._events:
            now, stage = heapq.heappop(self._events)
            if now < self._free_at[stage]:
                continue
            chosen = self._choose(stage, now)
            if chosen is not None:
                left -= self._start(stage, now, *chosen)
        return left == 0

    def _choose(self, stage: int, now: int) -> tuple[Kind, int] | None:
        """What ``stage`` begins now, and on which of its chunks; None: it waits for an event."""
        ready_back, soon_back = self._ready(self._chunks[stage], self._gradients, self._backwards, now)
        able = [chunk for chunk in self._chunks[stage] if self._has_room(stage, chunk)]
        ready_forward, soon_forward = self._ready(able, self._inputs, self._forwards, now)
        if ready_back is not None:
            if self._alternate and self._went_back[stage]:
                if ready_forward is not None:
                    return Kind.FORWARD, ready_forward
                pending = self._pending(stage)
                if pending is not None and self._memory_blocks(stage, now):
                    return Kind.WEIGHT_GRADIENT, pending
            return self._backward(stage, ready_back)
        if ready_forward is not None and soon_back >= now + self._forward_patience[ready_forward]:
            return Kind.FORWARD, ready_forward
        pending = self._pending(stage)
        soon = min(soon_back, soon_forward)
        if pending is not None and soon >= now + self._weight_patience[pending]:
            return Kind.WEIGHT_GRADIENT, pending
        if soon < _NEVER:
            heapq.heappush(self._events, (soon, stage))
        return None

    def _ready(
        self, chunks: Sequence[int], arrivals: list[list[int]], begun: list[int], now: int
    ) -> tuple[int | None, int]:
        """The last of ``chunks`` whose next data is there, and when the next data of any other arrives."""
        ready, soon = None, _NEVER
        for chunk in chunks:
            count = begun[chunk]
            if count < len(arrivals[chunk]):
                at = arrivals[chunk][count]
                if at <= now:
                    ready = chunk
                elif at < soon:
                    soon = at
        return ready, soon

    def _has_room(self, stage: int, chunk: int) -> bool:
        """May ``chunk`` run one more micro-batch forward?"""
        ahead = self._forwards[chunk] - self._backwards[chunk]
        needed = self._activations[chunk] + self._returning[chunk]
        return ahead < self._lead[chunk] and needed <= self._room[stage]

    def _memory_blocks(self, stage: int, now: int) -> bool:
        """Is a forward pass ready for which only memory is missing?"""
        ready, _ = self._ready(self._chunks[stage], self._inputs, self._forwards, now)
        return ready is not None and self._forwards[ready] - self._backwards[ready] < self._lead[ready]

    def _pending(self, stage: int) -> int | None:
        """The chunk of the oldest micro-batch that waits for its weight gradient; of one, the last chunk."""
        waiting = [chunk for chunk in self._chunks[stage] if self._weights[chunk] < self._backwards[chunk]]
        return min(waiting, key=lambda chunk: (self._weights[chunk], -chunk), default=None)

    def _backward(self, stage: int, chunk: int) -> tuple[Kind, int]:
        """The next backward pass of ``chunk``: in two parts where that is wanted and there is room for what is held."""
        micro_batch = self._backwards[chunk]
        if not self._splits[chunk] or (micro_batch in self._in_one and self._weights[chunk] == micro_batch):
            return Kind.BACKWARD, chunk
        if self._for_split[chunk] <= self._room[stage]:
            return Kind.INPUT_GRADIENT, chunk
        if self._weights[chunk] == micro_batch:
            return Kind.BACKWARD, chunk
        return Kind.WEIGHT_GRADIENT, chunk

    def _start(self, stage: int, now: int, kind: Kind, chunk: int) -> int:
        """Run a pass; how many of a split one's three it was."""
        counts = (self._forwards, self._backwards, self._weights, self._backwards)[kind]
        self.orders[stage].append(Action(kind, chunk, counts[chunk]))
        counts[chunk] += 1
        end = self._free_at[stage] = now + self._ticks[kind][chunk]
        heapq.heappush(self._events, (end, stage))
        if kind == Kind.FORWARD:
            self._room[stage] -= self._activations[chunk]
            self._went_back[stage] = False
            if chunk + 1 < len(self._owners):
                self._send(self._inputs, chunk + 1, end + self._links[chunk])
            else:
                self._gradients[chunk].append(end)
            return 1
        if kind == Kind.WEIGHT_GRADIENT:
            self._room[stage] += self._held[chunk]
            return 1
        self._went_back[stage] = True
        self._room[stage] += self._activations[chunk]
        if chunk > 0:
            self._send(self._gradients, chunk - 1, end + self._links[chunk - 1])
        if kind == Kind.INPUT_GRADIENT:
            self._room[stage] -= self._held[chunk]
            return 1
        self._weights[chunk] += 1
        return 2 if self._splits[chunk] else 1

    def _send(self, arrivals: list[list[int]], chunk: int, at: int) -> None:
        arrivals[chunk].append(at)
        heapq.heappush(self._events, (at, self._owners[chunk]))

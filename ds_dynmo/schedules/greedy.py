"""Greedy list scheduling: simulate the pipeline, and let every stage run the most useful pass that is ready.

A simulation that ends leaves an order that is not cyclic. This must hold whichever chunks are frozen: backward passes
of frozen chunks take no time, but wait for gradients like others.

Times are whole ticks. So equal times are equal on every machine, and no order depends on a rounding error. Ties go to
the lower stage, then to the later chunk.

A decision runs dozens of simulations while training may wait: the event loop calls no function of this package.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynmo.schedules.actions import Action, Kind, all_passes
from ds_dynmo.schedules.costs import PassBytes, PassCosts

__all__ = ["Policy", "greedy"]

_NEVER = 1 << 62  # ticks
_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _BACKWARD = map(int, Kind)


@dataclass(frozen=True)
class Policy:
    """The rule by which a stage chooses among passes that are ready.

    By default: a backward pass (or its input gradient), else a forward pass, else a weight gradient.

    Attributes:
        alternate: prefer a forward pass after a backward pass, as in 1F1B, because later stages would run out of work
            otherwise. If only memory prevents the forward pass, run a weight gradient to free some.
        forward_patience: delay a forward pass if a gradient will arrive within this share of the pass.
        weight_patience: delay a weight gradient if any input will arrive within this share of the pass.
        lead: the most forward passes that a chunk runs ahead of its backward passes, in round trips to the last chunk;
            infinite: as many as fit in memory.
        split_first, split_last: number of first and of last micro-batches whose backward passes may be split, as shares
            of the number of stages; infinite: all. Those between are split only while weight gradients are pending. A
            split that costs time pays off while the pipeline fills and drains.
    """

    alternate: bool = True
    forward_patience: float = 0.0
    weight_patience: float = 0.0
    lead: float = math.inf
    split_first: float = math.inf
    split_last: float = math.inf


def greedy(
    costs: PassCosts,
    micro_batches: int,
    sizes: PassBytes,
    limits: Sequence[int],
    policy: Policy,
    *,
    most_seconds: float = math.inf,
) -> list[list[Action]] | None:
    """Simulate the pipeline under ``policy`` and return the order of each stage; None if out of memory or time.

    Args:
        sizes: bytes per chunk.
        limits: per stage, bytes that passes in flight may hold.
        most_seconds: the longest iteration of use; the simulation stops beyond it.
    """
    return _GreedySimulation(costs, micro_batches, sizes, limits, policy).run(most_seconds)


class _GreedySimulation:
    """A pipeline and a policy, in ticks."""

    def __init__(
        self, costs: PassCosts, micro_batches: int, sizes: PassBytes, limits: Sequence[int], policy: Policy
    ) -> None:
        longest = max(max(seconds) for seconds in (*costs.by_kind, costs.link_seconds or (0.0,)))
        self._scale = math.ldexp(1.0, 30 - math.frexp(longest)[1])
        self._ticks = [[round(value * self._scale) for value in seconds] for seconds in costs.by_kind]
        self._links = [round(value * self._scale) for value in costs.link_seconds]
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
        activations = self._activations = sizes.activation_bytes
        self._held = sizes.held_bytes
        self._for_split = [  # bytes beyond those of a backward pass in one: at its end, or while it recomputes
            max(sizes.held_bytes[chunk] - activations[chunk], split - sizes.recomputed_bytes[chunk])
            for chunk, split in enumerate(sizes.split_recomputed_bytes)
        ]
        self._room = [  # bytes for passes in flight; the recomputation of one backward pass is always reserved
            limit
            - sum(sizes.standing_bytes[chunk] for chunk in mine)
            - max(sizes.recomputed_bytes[chunk] for chunk in mine)
            for limit, mine in zip(limits, self._chunks)
        ]
        self._needed = [  # bytes for a forward pass; with several chunks per stage, also for the way back
            activations[chunk] + max((activations[other] for other in self._chunks[owner] if other > chunk), default=0)
            for chunk, owner in enumerate(costs.owners)
        ]

    def _leads(self, lead: float) -> list[int]:
        """Return, per chunk, the most forward passes ahead of the backward passes."""
        if lead == math.inf:
            return [self._micro_batches] * len(self._owners)
        forward, input_gradient, weight_gradient, backward = self._ticks
        passes = [f + min(i + w, b) for f, i, w, b in zip(forward, input_gradient, weight_gradient, backward)]
        period = max(1, max(sum(passes[chunk] for chunk in mine) for mine in self._chunks))
        leads, trip = [], 0
        for chunk in reversed(range(len(self._owners))):
            trip += forward[chunk] + min(input_gradient[chunk], backward[chunk])
            leads.append(max(1, math.ceil(lead * trip / period)))
            trip += 2 * self._links[chunk - 1] if chunk else 0
        return leads[::-1]

    def run(self, most_seconds: float) -> list[list[Action]] | None:
        """Simulate one batch, and return what :func:`greedy` does.

        The loop uses local names and no calls: it runs once per action of each candidate.
        """
        owners, chunks, splits, in_one = self._owners, self._chunks, self._splits, self._in_one
        alternate, lead, needed, links = self._alternate, self._lead, self._needed, self._links
        activations, held, for_split = self._activations, self._held, self._for_split
        forward_patience, weight_patience = self._forward_patience, self._weight_patience
        forward_ticks, input_ticks, weight_ticks, backward_ticks = self._ticks
        num_chunks, num_stages, micro_batches = len(owners), len(chunks), self._micro_batches
        forward, input_, weight, backward = (all_passes(kind, num_chunks, micro_batches) for kind in Kind)
        last = num_chunks - 1
        orders: list[list[Action]] = [[] for _ in chunks]
        room = list(self._room)

        # Arrivals of inputs and gradients, by chunk and micro-batch; _NEVER while unknown.
        inputs = [[_NEVER] * (micro_batches + 1) for _ in owners]
        inputs[0] = [0] * micro_batches + [_NEVER]
        gradients = [[_NEVER] * (micro_batches + 1) for _ in owners]
        forwards, backwards, weights = ([0] * num_chunks for _ in range(3))  # passes begun
        went_back = [True] * num_stages  # whether the last pass, weight gradients apart, was a backward one
        free_at = [0] * num_stages

        # Per stage, a lower bound of the ticks that its remaining passes take.
        least_backward = [min(b, i + w) for i, w, b in zip(input_ticks, weight_ticks, backward_ticks)]
        least_input = [max(0, b - w) for b, w in zip(least_backward, weight_ticks)]  # of that, in the input gradient
        remaining = [
            micro_batches * sum(forward_ticks[chunk] + least_backward[chunk] for chunk in mine) for mine in chunks
        ]
        most = _NEVER if most_seconds == math.inf else math.ceil(most_seconds * self._scale)

        # An event is a time and a stage in one number. A stage that runs a pass has one at its end.
        bits = num_stages.bit_length()
        mask = (1 << bits) - 1
        events = list(range(num_stages))
        push, pop, replace = heapq.heappush, heapq.heappop, heapq.heapreplace
        while events:
            event = events[0]
            stage, now = event & mask, event >> bits
            if now < free_at[stage]:
                pop(events)
                continue

            # Find what is ready: of several chunks the last, but the oldest weight gradient.
            ready_back = ready_forward = arrived = pending = -1
            soon_back = soon_forward = _NEVER
            for chunk in chunks[stage]:
                gone, back = forwards[chunk], backwards[chunk]
                at = gradients[chunk][back]
                if at <= now:
                    ready_back = chunk
                elif at < soon_back:
                    soon_back = at
                at = inputs[chunk][gone]
                if at < _NEVER:
                    if at <= now:
                        arrived = chunk
                    if gone - back < lead[chunk] and needed[chunk] <= room[stage]:
                        if at <= now:
                            ready_forward = chunk
                        elif at < soon_forward:
                            soon_forward = at
                if weights[chunk] < back and (pending < 0 or weights[chunk] <= weights[pending]):
                    pending = chunk

            # Choose the pass. A stage that runs nothing waits for a later event.
            kind = -1
            if ready_back >= 0:
                if alternate and went_back[stage]:
                    if ready_forward >= 0:
                        kind, chunk = _FORWARD, ready_forward
                    elif pending >= 0 and arrived >= 0 and forwards[arrived] - backwards[arrived] < lead[arrived]:
                        kind, chunk = _WEIGHT_GRADIENT, pending  # frees memory
                if kind < 0:
                    chunk = ready_back
                    passed = backwards[chunk]
                    is_next = weights[chunk] == passed
                    if not splits[chunk] or (is_next and passed in in_one):
                        kind = _BACKWARD
                    elif for_split[chunk] <= room[stage]:
                        kind = _INPUT_GRADIENT
                    else:
                        kind = _BACKWARD if is_next else _WEIGHT_GRADIENT
            elif ready_forward >= 0 and soon_back >= now + forward_patience[ready_forward]:
                kind, chunk = _FORWARD, ready_forward
            elif pending >= 0 and min(soon_back, soon_forward) >= now + weight_patience[pending]:
                kind, chunk = _WEIGHT_GRADIENT, pending
            else:
                pop(events)
                continue

            to, at = -1, 0  # the receiving chunk and the arrival
            if kind == _FORWARD:
                passed = forwards[chunk]
                forwards[chunk] = passed + 1
                orders[stage].append(forward[chunk][passed])
                end = now + forward_ticks[chunk]
                remaining[stage] -= forward_ticks[chunk]
                room[stage] -= activations[chunk]
                went_back[stage] = False
                if chunk < last:
                    to, at = chunk + 1, end + links[chunk]
                    inputs[to][passed] = at
                else:
                    gradients[chunk][passed] = end
            elif kind == _WEIGHT_GRADIENT:
                passed = weights[chunk]
                weights[chunk] = passed + 1
                orders[stage].append(weight[chunk][passed])
                end = now + weight_ticks[chunk]
                remaining[stage] -= least_backward[chunk] - least_input[chunk]
                room[stage] += held[chunk]
            else:
                passed = backwards[chunk]
                backwards[chunk] = passed + 1
                went_back[stage] = True
                room[stage] += activations[chunk]
                if kind == _INPUT_GRADIENT:
                    orders[stage].append(input_[chunk][passed])
                    end = now + input_ticks[chunk]
                    remaining[stage] -= least_input[chunk]
                    room[stage] -= held[chunk]
                else:
                    orders[stage].append(backward[chunk][passed])
                    end = now + backward_ticks[chunk]
                    remaining[stage] -= least_backward[chunk]
                    weights[chunk] = passed + 1
                if chunk:
                    to, at = chunk - 1, end + links[chunk - 1]
                    gradients[to][passed] = at
            if end + remaining[stage] > most:
                return None
            free_at[stage] = end
            replace(events, end << bits | stage)
            if to >= 0:
                woken = owners[to]
                if not now < at <= free_at[woken]:  # else it chooses again at the end of its pass
                    push(events, at << bits | woken)
        return orders if min(weights) == micro_batches else None

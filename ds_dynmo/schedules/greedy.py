"""Greedy list scheduling: simulate the pipeline, and let every stage run the most useful pass that is ready.

A stage prefers a backward pass (or its input gradient), then a forward pass, then a weight gradient. After a backward
pass it prefers a forward pass, as in 1F1B, because later stages would run out of work otherwise; if only memory
prevents that, it runs a weight gradient to free some. With several chunks, a backward pass is that of the oldest
micro-batch, a forward pass that of the last chunk, and memory for the way back is kept free.

With little memory the first chunk of a stage would leave too little of it to the others. Where memory is shared, each
chunk has its own part of it, in proportion to the time until its gradients come back.

A patient stage begins no weight gradient if the input of another pass arrives while it would be little more than half
done. That shortens some iterations and lengthens others.

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

from ds_dynmo.schedules.actions import Action, Kind, all_passes
from ds_dynmo.schedules.costs import PassBytes, PassCosts

__all__ = ["greedy"]

_NEVER = 1 << 62  # ticks
_SHARED = 0.8  # of a stage's memory
_PATIENCE = 0.6  # of a weight gradient's seconds
_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _BACKWARD = map(int, Kind)


def greedy(
    costs: PassCosts,
    micro_batches: int,
    sizes: PassBytes,
    limits: Sequence[int],
    *,
    patient: bool = False,
    shares_memory: bool = False,
) -> list[list[Action]] | None:
    """Simulate the pipeline and return the order of each stage; None if out of memory.

    Backward passes are split wherever a chunk has weight gradients and memory allows.

    Args:
        sizes: bytes per chunk.
        limits: per stage, bytes that passes in flight may hold.
        patient: whether stages wait for inputs that arrive soon.
        shares_memory: whether the chunks of a stage share its memory.
    """
    longest = max(max(seconds) for seconds in (*costs.by_kind, costs.link_seconds or (0.0,)))
    scale = math.ldexp(1.0, 30 - math.frexp(longest)[1])
    forward_ticks, input_ticks, weight_ticks, backward_ticks = (
        [round(value * scale) for value in seconds] for seconds in costs.by_kind
    )
    links = [round(value * scale) for value in costs.link_seconds]
    patience = [round(_PATIENCE * ticks) if patient else 0 for ticks in weight_ticks]
    owners = costs.owners
    chunks = [costs.chunks_of(stage) for stage in range(costs.num_stages)]
    splits = [seconds > 0 for seconds in costs.weight_gradient_seconds]
    activations, held = sizes.activation_bytes, sizes.held_bytes
    for_split = [  # bytes beyond those of a backward pass in one: at its end, or while it recomputes
        max(held[chunk] - activations[chunk], split - sizes.recomputed_bytes[chunk])
        for chunk, split in enumerate(sizes.split_recomputed_bytes)
    ]
    for_both = [  # the same, if the weight gradient follows at once
        max(held[chunk] - activations[chunk], split) for chunk, split in enumerate(sizes.split_recomputed_bytes)
    ]
    reserve = [max(sizes.recomputed_bytes[chunk] for chunk in mine) for mine in chunks]  # bytes to recompute one pass
    room = [  # bytes for passes in flight
        limit - reserved - sum(sizes.standing_bytes[chunk] for chunk in mine)
        for limit, reserved, mine in zip(limits, reserve, chunks)
    ]
    needed = [  # bytes for a forward pass; with several chunks per stage, also for the way back
        activations[chunk] + max((activations[other] for other in chunks[owner] if other > chunk), default=0)
        for chunk, owner in enumerate(owners)
    ]
    num_chunks = len(owners)
    most = [micro_batches] * num_chunks  # in flight
    if shares_memory:
        first_parts = [one if split else whole for one, whole, split in zip(input_ticks, backward_ticks, splits)]
        most = _shares(chunks, room, activations, [f + b for f, b in zip(forward_ticks, first_parts)], links)
    forward, input_, weight, backward = (all_passes(kind, num_chunks, micro_batches) for kind in Kind)
    last = num_chunks - 1
    orders: list[list[Action]] = [[] for _ in chunks]

    # Arrivals of inputs and gradients, by chunk and micro-batch; _NEVER while unknown.
    inputs = [[_NEVER] * (micro_batches + 1) for _ in owners]
    inputs[0] = [0] * micro_batches + [_NEVER]
    gradients = [[_NEVER] * (micro_batches + 1) for _ in owners]
    forwards, backwards, weights = ([0] * num_chunks for _ in range(3))  # passes begun
    follows = [-1] * len(chunks)  # chunk whose weight gradient follows at once
    went_back = [True] * len(chunks)  # whether the last pass, weight gradients apart, was a backward one
    free_at = [0] * len(chunks)

    # An event is a time and a stage in one number. A stage that runs a pass has one at its end.
    bits = len(chunks).bit_length()
    mask = (1 << bits) - 1
    events = list(range(len(chunks)))
    push, pop, replace = heapq.heappush, heapq.heappop, heapq.heapreplace
    while events:
        event = events[0]
        stage, now = event & mask, event >> bits
        if now < free_at[stage]:
            pop(events)
            continue

        # Find what is ready: of several chunks the last one's forward pass, else the oldest pass.
        ready_back = ready_forward = arrived = pending = -1
        soon = _NEVER  # the next arrival
        for chunk in chunks[stage]:
            back = backwards[chunk]
            at = gradients[chunk][back]
            if at > now:
                soon = min(soon, at)
            elif ready_back < 0 or back <= backwards[ready_back]:
                ready_back = chunk
            at, fits = inputs[chunk][forwards[chunk]], needed[chunk] <= room[stage]
            if forwards[chunk] - back >= most[chunk]:
                at = _NEVER  # for now
            if at <= now:
                arrived = chunk
                if fits:
                    ready_forward = chunk
            elif fits:
                soon = min(soon, at)
            if weights[chunk] < back and (pending < 0 or weights[chunk] <= weights[pending]):
                pending = chunk

        # Choose the pass. A stage that runs nothing waits for a later event.
        frees_memory = ready_back >= 0 and arrived >= 0 and pending >= 0
        if follows[stage] >= 0:
            kind, chunk = _WEIGHT_GRADIENT, follows[stage]
            follows[stage] = -1
        elif ready_back >= 0 and not (went_back[stage] and (ready_forward >= 0 or frees_memory)):
            chunk = ready_back
            passed = backwards[chunk]
            if not splits[chunk]:
                kind = _BACKWARD
            elif for_split[chunk] <= room[stage]:
                kind = _INPUT_GRADIENT
            elif weights[chunk] < passed:
                kind = _WEIGHT_GRADIENT
            elif for_both[chunk] <= room[stage] + reserve[stage]:
                kind, follows[stage] = _INPUT_GRADIENT, chunk
            else:
                kind = _BACKWARD
        elif ready_forward >= 0:
            kind, chunk = _FORWARD, ready_forward
        elif pending >= 0 and (frees_memory or soon >= now + patience[pending]):
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
            room[stage] += held[chunk]
        else:
            passed = backwards[chunk]
            backwards[chunk] = passed + 1
            went_back[stage] = True
            room[stage] += activations[chunk]
            if kind == _INPUT_GRADIENT:
                orders[stage].append(input_[chunk][passed])
                end = now + input_ticks[chunk]
                room[stage] -= held[chunk]
            else:
                orders[stage].append(backward[chunk][passed])
                end = now + backward_ticks[chunk]
                weights[chunk] = passed + 1
            if chunk:
                to, at = chunk - 1, end + links[chunk - 1]
                gradients[to][passed] = at
        free_at[stage] = end
        replace(events, end << bits | stage)
        if to >= 0:
            woken = owners[to]
            if not now < at <= free_at[woken]:  # else it chooses again at the end of its pass
                push(events, at << bits | woken)
    return orders if min(weights) == micro_batches else None


def _shares(
    chunks: Sequence[Sequence[int]],
    room: Sequence[int],
    activations: Sequence[int],
    ticks: Sequence[int],
    links: Sequence[int],
) -> list[int]:
    """Return, per chunk, the micro-batches in flight that its share of its stage's memory holds, at least 1.

    Args:
        chunks: per stage.
        room: bytes per stage.
        activations: bytes per chunk.
        ticks: of the passes of one micro-batch through each chunk, until the gradient of its input.
    """
    returns = [sum(ticks[chunk:]) + 2 * sum(links[chunk:]) for chunk in range(len(ticks))]
    most = [1] * len(ticks)
    for mine, free in zip(chunks, room):
        whole = sum(activations[chunk] * returns[chunk] for chunk in mine)
        for chunk in mine:
            most[chunk] = max(1, math.ceil(_SHARED * free * returns[chunk] / whole)) if whole else _NEVER
    return most

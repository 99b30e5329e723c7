"""How short an iteration can be, whatever the order.

Per chunk ``c``, of the passes that run either way: ``f`` forward, ``i`` until the input's gradient is there, ``b`` the
whole backward pass (in one or in two parts, whichever is shorter). Links count where a message is sent.

- ``head[c]``: chunk ``c`` cannot begin before one micro-batch has come through all chunks before it.
- ``turn[c]``: its first gradient cannot be there before one micro-batch has gone to the last chunk and come back.
- ``tail[c]``: after its last input gradient, that gradient goes back to the first chunk, and each chunk on the way has
  the rest of its backward pass to do.
- ``ahead``: until its first gradient is there a stage can only run forward passes, as many as its memory holds.

A stage owns one chunk or more, the first of which is ``c``. Its ``m`` micro-batches of work cannot be done before

1. ``head[c] + m * sum(f + b)``: it works without a pause;
2. ``head[c] + m * sum(f + i) + tail[c]``: its last action but weight gradients is an input gradient, and at best of
   the chunk with the shortest tail;
3. as 1 and 2 from ``turn`` of its last chunk on, when no more than ``ahead`` is done;
4. ``head[c] + ceil(m / n) * (turn[c] + i[c] - head[c]) + tail[c]``: a micro-batch occupies memory from its forward pass
   to its input gradient, and ``n`` fit at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds_dynmo.schedules.costs import PassBytes, PassCosts

__all__ = ["lower_bound", "lower_bounds"]

Floats = npt.NDArray[np.float64]


def lower_bound(
    costs: PassCosts, micro_batches: int, sizes: PassBytes | None = None, limits: Sequence[int] | None = None
) -> float:
    """Seconds below which no order of these passes can be.

    Args:
        sizes, limits: bytes per chunk, and that each stage may hold; None: as many as it likes.

    >>> lower_bound(PassCosts.equal(range(8)), 12, PassBytes.equal(8), [8] * 8)
    43.0
    """
    in_flight = None
    if sizes is not None and limits is not None:
        needs = zip(costs.owners, sizes.activation_bytes)
        fitting = [limits[owner] // needed if needed else micro_batches for owner, needed in needs]
        in_flight = np.array([min(micro_batches, max(1, count)) for count in fitting])
    forward, input_gradient, weight_gradient, backward = map(np.asarray, costs.by_kind)
    sent = [0.0] * costs.frozen_chunks + list(costs.link_seconds[costs.frozen_chunks :])
    bounds = lower_bounds(
        costs.owners, forward, input_gradient, weight_gradient, backward, micro_batches, sent, in_flight
    )
    return float(bounds)


def lower_bounds(
    owners: Sequence[int],
    forward: Floats,
    input_gradient: Floats,
    weight_gradient: Floats,
    backward: Floats,
    micro_batches: int,
    link_seconds: Sequence[float] = (),
    in_flight: npt.NDArray[np.int64] | None = None,
) -> Floats:
    """:func:`lower_bound` for many pipelines at once.

    Args:
        forward, input_gradient, weight_gradient, backward: seconds, ``[num_chunks, ...]``; further axes count
            pipelines.
        link_seconds: per boundary of chunks; (): none.
        in_flight: per chunk, micro-batches that its stage has memory for, ``[num_chunks]`` or as ``forward``; None:
            all.

    Returns:
        Seconds, in the shape of the further axes.
    """
    last = len(owners) - 1
    links = list(link_seconds) or [0.0] * last
    whole = np.minimum(backward, input_gradient + weight_gradient)
    until = np.minimum(input_gradient, whole)  # the input's gradient is there
    head, turn, tail = np.zeros_like(forward), np.zeros_like(forward), whole - until
    for chunk in range(1, len(owners)):
        head[chunk] = head[chunk - 1] + forward[chunk - 1] + links[chunk - 1]
        tail[chunk] = np.maximum(tail[chunk], links[chunk - 1] + until[chunk - 1] + tail[chunk - 1])
    turn[last] = head[last] + forward[last]
    for chunk in range(last, 0, -1):
        turn[chunk - 1] = turn[chunk] + until[chunk] + links[chunk - 1]
    fitting = np.full(len(owners), micro_batches) if in_flight is None else in_flight
    fitting = fitting.reshape(fitting.shape + (1,) * (forward.ndim - fitting.ndim))
    ahead = fitting * forward
    rounds = -(-micro_batches // fitting)
    slots = head + rounds * (turn + until - head) + tail
    best: Floats = slots.max(axis=0)
    for stage in range(max(owners) + 1):
        mine = [chunk for chunk, owner in enumerate(owners) if owner == stage]
        first, back = mine[0], turn[mine[-1]]
        begun = np.minimum(ahead[mine].sum(axis=0), back - head[first])
        start = np.maximum(head[first], back - begun)
        forwards = forward[mine].sum(axis=0)
        best = np.maximum(best, start + micro_batches * (forwards + whole[mine].sum(axis=0)))
        best = np.maximum(best, start + micro_batches * (forwards + until[mine].sum(axis=0)) + tail[first])
    return best

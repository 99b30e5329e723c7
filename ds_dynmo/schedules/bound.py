"""Lower bounds of an iteration's time, over all orders of its passes.

Seconds per chunk ``c``: ``f`` of the forward pass, ``i`` until the gradient of its input is computed, ``b`` of the
whole backward pass (in one or in two parts, whichever is shorter). Messages between stages add the link's seconds.

- ``head[c]``: chunk ``c`` cannot start before one micro-batch has passed all chunks before it.
- ``turn[c]``: its first gradient cannot arrive before one micro-batch has gone to the last chunk and back.
- ``tail[c]``: the last input gradient of ``c`` still travels to the first chunk, and each chunk on the way has the rest
  of its backward pass to run.
- ``ahead``: until its first gradient arrives, a stage can only run forward passes, as many as its memory holds.

A stage holds one chunk or more; ``c`` is the first of them. Its passes of ``m`` micro-batches cannot end before

1. ``head[c] + m * sum(f + b)``: the stage runs without a pause;
2. ``head[c] + m * sum(f + i) + tail[c]``: weight gradients apart, its last action is an input gradient, at best of the
   chunk with the shortest tail;
3. the same as 1 and 2, but from ``turn`` of its last chunk on, when at most ``ahead`` is done;
4. ``head[c] + ceil(m / n) * (turn[c] + i[c] - head[c]) + tail[c]``: a micro-batch occupies memory from its forward pass
   to its input gradient, and ``n`` of them fit at a time.
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
    """Return a lower bound of the iteration of any order of these passes, in seconds.

    Args:
        sizes: bytes per chunk; None: memory does not matter.
        limits: bytes that each stage may hold; None: no limit.

    >>> lower_bound(PassCosts.equal(range(8)), 12, PassBytes.equal(8), [8] * 8)
    43.0
    """
    in_flight = None
    if sizes is not None and limits is not None:
        activations = zip(costs.owners, sizes.activation_bytes)
        fitting = [limits[owner] // size if size else micro_batches for owner, size in activations]
        in_flight = np.array([min(micro_batches, max(1, count)) for count in fitting])
    forward, input_gradient, weight_gradient, backward = map(np.asarray, costs.by_kind)
    links = [0.0] * costs.frozen_chunks + list(costs.link_seconds[costs.frozen_chunks :])
    bounds = lower_bounds(
        costs.owners, forward, input_gradient, weight_gradient, backward, micro_batches, links, in_flight
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
    """Compute :func:`lower_bound` of many pipelines at once.

    Args:
        forward, input_gradient, weight_gradient, backward: seconds, ``[num_chunks, ...]``; further axes count
            pipelines.
        link_seconds: per boundary of chunks; (): no time.
        in_flight: per chunk, micro-batches that its stage has memory for, ``[num_chunks]`` or in the shape of
            ``forward``; None: all.

    Returns:
        Seconds, in the shape of the further axes.
    """
    last = len(owners) - 1
    links = list(link_seconds) or [0.0] * last
    whole = np.minimum(backward, input_gradient + weight_gradient)
    until = np.minimum(input_gradient, whole)  # the gradient of the input is computed
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

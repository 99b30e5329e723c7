"""The tidy end of the exact balancers: among partitions of equal bottleneck, one that is locally even."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

__all__ = ["even_out"]


def even_out(prefix: list[int], bounds: list[int], fits: Callable[[int, int, int], bool] | None = None) -> list[int]:
    """``bounds`` after moving inner boundaries, in turn, to where the heavier of the two stages is lightest.

    No stage becomes heavier than the heavier of a pair was, so the bottleneck never grows.

    Args:
        prefix: exact prefix sums of the layers' costs.
        fits: whether (stage, start, stop) fits in memory; None: everything does.

    >>> even_out([0, 10, 11, 12, 13, 14], [0, 1, 2, 5])
    [0, 1, 3, 5]
    """
    bounds = [*bounds]
    num_stages = len(bounds) - 1
    for _ in range(num_stages):
        before = [*bounds]
        for stage in range(1, num_stages):
            bound = _even_bound(prefix, *bounds[stage - 1 : stage + 2])
            if fits is None or (fits(stage - 1, bounds[stage - 1], bound) and fits(stage, bound, bounds[stage + 1])):
                bounds[stage] = bound
        if bounds == before:
            break
    return bounds


def _even_bound(prefix: list[int], start: int, bound: int, stop: int) -> int:
    """Where the heavier of ``[start, bound)`` and ``[bound, stop)`` would be lightest; ``bound`` if there already."""
    low, high = prefix[start], prefix[stop]
    # Beyond the middle the left one is the heavier, and lightest at once; before it the right one.
    right = bisect_left(prefix, -(-(low + high) // 2), start + 1, stop - 1)
    left = max(right - 1, start + 1)
    best, heaviest = bound, max(prefix[bound] - low, high - prefix[bound])
    for place in (left, right):
        heavier = max(prefix[place] - low, high - prefix[place])
        if heavier < heaviest:
            best, heaviest = place, heavier
    return best

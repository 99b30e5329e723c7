"""The paper's diffusion step between two neighbours, and Lemma 2's bound on the rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ds_dynmo.partitioners.portable import log

__all__ = ["diffusion_step", "lemma2_bound"]


def diffusion_step(
    left_costs: Sequence[float],
    right_costs: Sequence[float],
    fits: Callable[[int], bool] = lambda left_layers: True,
    *,
    speeds: tuple[float, float] = (1.0, 1.0),
) -> int:
    """Decide how many of two neighbours' layers the left one should hold, from local information only.

    The heavier stage passes layers over their common boundary, one by one, as long as the larger of the two loads
    falls, neither stage becomes empty, and both fit. So with equal speeds the gap between them shrinks, and no gap to a
    third stage grows. A stage's load is the cost of its layers over its speed.

    Args:
        left_costs, right_costs: per layer, in layer order, each at least one.
        fits: ``fits(left_layers)`` is True if both stages fit in memory.
        speeds: of the left and the right stage.

    >>> diffusion_step([4.0, 3.0, 1.0], [2.0])
    1
    >>> diffusion_step([4.0, 3.0, 1.0], [2.0], speeds=(2.0, 1.0))
    2
    """
    costs = [*left_costs, *right_costs]

    def both_loads(left_layers: int) -> tuple[float, float]:
        return math.fsum(costs[:left_layers]) / speeds[0], math.fsum(costs[left_layers:]) / speeds[1]

    best = len(left_costs)
    left_load, right_load = both_loads(best)
    if left_load == right_load:
        return best
    lightest = max(left_load, right_load)
    step = -1 if left_load > right_load else 1
    for place in range(best + step, 0 if step < 0 else len(costs), step):
        load = max(both_loads(place))
        if load > lightest or not fits(place):
            break
        if load < lightest:
            best, lightest = place, load
    return best


def lemma2_bound(num_stages: int, total: float, gamma: float) -> int:
    """Bound the rounds until the balancer converges (Lemma 2, with the constants of its proof).

    It is ``60 ln(2 N) N min(N ln(S N^2 / gamma), S / gamma)`` for N stages and a total load S. Gamma is the tolerated
    gap in load; a total below gamma counts as gamma.

    >>> lemma2_bound(4, total=8.0, gamma=1.0)
    3993
    """
    ratio = max(total / gamma, 1.0) if total > 0 else 1.0
    rounds = min(num_stages * log(ratio * num_stages * num_stages), ratio)
    return math.ceil(60 * log(2 * num_stages) * num_stages * rounds)

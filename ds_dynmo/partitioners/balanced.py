"""The paper's Partition: an exact binary search on the bottleneck with linear probing.

Costs are multiplied by one power of two that makes them integers. So prefix sums and comparisons are exact, and the
search ends at sums of layers instead of at an epsilon.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ds_dynmo.errors import PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners.checks import check_costs, check_num_stages, check_speeds
from ds_dynmo.partitioners.limited import balanced_within
from ds_dynmo.partitioners.memory import MemoryModel
from ds_dynmo.partitioners.pairs import balanced_pairs
from ds_dynmo.partitioners.registry import register
from ds_dynmo.partitioners.ties import Limits, check_layer_bytes, even_out, evenest, fewest_moved, lightest_loads
from ds_dynmo.plan import check_partition

__all__ = ["balanced", "balanced_groups", "uniform"]


def uniform(num_layers: int, num_stages: int) -> list[int]:
    """Split layers by number: sizes differ by at most one layer, larger ones first.

    >>> uniform(8, 3)
    [0, 3, 6, 8]

    Raises:
        PartitionError: more stages than layers, or no stage at all.
    """
    check_num_stages(num_layers, num_stages)
    size, larger = divmod(num_layers, num_stages)
    return [stage * size + min(stage, larger) for stage in range(num_stages + 1)]


@register("partition")
def balanced(
    costs: Sequence[float],
    num_stages: int,
    *,
    memory: MemoryModel | None = None,
    start: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    layer_bytes: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
) -> list[int]:
    """Find a partition of the smallest possible bottleneck (Lemma 1), among those that fit if ``memory`` is given.

    Ties are broken by the least imbalance (equation 2; with different speeds by the largest load of the lightest
    stage), then by the fewest bytes that move from ``start``. Without a start no two neighbours can be evened out
    further.

    Args:
        costs: per layer, finite and >= 0; ints are compared exactly, floats as the numbers they are.
        start: the current partition.
        speeds: per stage; the time of a stage is the costs of its layers over its speed; None: all are equal.
        layer_bytes: per layer, the bytes that move with it; None: the same for all.
        owners: per chunk, the stage that holds it; None: a chain. With two chunks per stage ties are broken as in
            :func:`balanced_pairs`.

    >>> balanced([4, 9, 7, 5], 3)
    [0, 1, 2, 4]
    >>> balanced([10, 1, 1, 1, 1], 3, start=[0, 1, 2, 5])
    [0, 1, 3, 5]
    >>> balanced([4, 9, 7, 5], 2, speeds=[1, 4])
    [0, 1, 4]

    Raises:
        PartitionError: negative or non-finite costs, more stages than layers, or no partition fits (names the stage,
            the bytes and the limit of the one that exceeds its limits least).
    """
    checked = check_costs(costs)
    if owners is not None and len(owners) > num_stages:
        same = check_speeds((1.0,) * num_stages if speeds is None else speeds, num_stages)
        return balanced_pairs(checked, owners, same, memory=memory, start=start)
    weights = to_integers(checked)
    check_num_stages(len(weights), num_stages)
    prefix = [0, *accumulate(weights)]
    present = None if start is None else list(check_partition(start, len(weights), num_stages))
    sizes = check_layer_bytes(layer_bytes, len(weights))
    slowness = None if speeds is None else [1 / speed for speed in check_speeds(speeds, num_stages)]
    if memory is not None or (slowness is not None and len(set(slowness)) > 1):
        return balanced_within(prefix, memory, present, to_integers(slowness or [1] * num_stages), sizes)
    bound = _least_bottleneck(prefix, num_stages, max(weights))
    limits = Limits(prefix, (1,) * num_stages, bound)
    floor = _largest_floor(prefix, num_stages)
    lowered, partition = 0, _spread(prefix, num_stages, floor, bound)
    while partition is None:  # the least bottleneck may not allow such a floor
        lowered = 2 * lowered + (floor >> 5) + 1
        partition = _spread(prefix, num_stages, max(0, floor - lowered), bound)
    if lowered:
        reached = lightest_loads(limits, limits.lightest(even_out(prefix, partition)))
        floor = reached[-1][len(weights)]
    if present is not None:
        return present if limits.met(present, floor) else fewest_moved(limits, floor, present, sizes)
    return even_out(prefix, evenest(limits, reached, floor) if lowered else partition)


def balanced_groups(
    costs: Sequence[float],
    num_stages: int,
    groups: LayerGroups,
    *,
    start: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
) -> list[int]:
    """Find what :func:`balanced` finds, among the partitions that cut no group.

    Args:
        costs: per layer.
        start: the partition to keep if it is as good; if it cuts a group, the nearest one that does not.
        owners: as in :func:`balanced`.

    >>> balanced_groups([4, 9, 7, 5], 3, LayerGroups((0, 1, 3, 4)))
    [0, 1, 3, 4]

    Raises:
        PartitionError: as :func:`balanced`; more stages or chunks than groups.
    """
    chunks, name = (num_stages, "stage") if owners is None or len(owners) == num_stages else (len(owners), "chunk")
    if (problem := groups.shortage(chunks, name)) is not None:
        raise PartitionError(problem)
    present = None if start is None else groups.fold_partition(groups.nearest(start))
    folded = groups.fold(check_costs(costs))
    return list(groups.unfold_partition(balanced(folded, num_stages, start=present, owners=owners)))


def to_integers(costs: Sequence[float]) -> list[int]:
    """Multiply ``costs`` by the power of two that makes all of them integers."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    scale = max(denominator for _, denominator in ratios) if ratios else 1
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _least_bottleneck(prefix: list[int], num_stages: int, largest: int) -> int:
    """Search for the smallest bottleneck of any partition. Between probes both ends snap to sums of layers."""
    low = max(largest, -(-prefix[-1] // num_stages))
    high = _first_bound_beyond(prefix, _fill(prefix, num_stages, low), low)
    if high == low:
        return low
    low, high = high, low + largest  # greedy filling always meets this bound
    while low < high:
        middle = (low + high) // 2
        partition = _fill(prefix, num_stages, middle)
        if prefix[-1] - prefix[partition[-2]] <= middle:
            high = max(prefix[b] - prefix[a] for a, b in zip(partition, partition[1:]))
        else:
            low = _first_bound_beyond(prefix, partition, middle)
    return high


def _fill(prefix: list[int], num_stages: int, bound: int) -> list[int]:
    """Fill stages from the left up to ``bound``; the last one takes the rest.

    The last stages may stay empty. Then fewer stages meet the bound, so ``num_stages`` meet it if some are split.

    Args:
        bound: at least the largest layer.
    """
    partition, stop = [0], 0
    for _ in range(num_stages - 1):
        stop = bisect_right(prefix, prefix[stop] + bound, stop) - 1
        partition.append(stop)
    partition.append(len(prefix) - 1)
    return partition


def _first_bound_beyond(prefix: list[int], partition: list[int], bound: int) -> int:
    """Return ``bound`` if the filled ``partition`` meets it, else the smallest bound that fills stages differently."""
    rest = prefix[-1] - prefix[partition[-2]]
    if rest <= bound:
        return bound
    return min([rest, *(prefix[stop + 1] - prefix[start] for start, stop in zip(partition[:-2], partition[1:-1]))])


def _largest_floor(prefix: list[int], num_stages: int) -> int:
    """Search for the largest load of the lightest stage, whatever the bottleneck; mirrors :func:`_least_bottleneck`."""
    low, high = 0, prefix[-1] // num_stages
    while low < high:
        middle = (low + high + 1) // 2
        partition = _fill_least(prefix, num_stages, middle)
        if prefix[-1] - prefix[partition[-2]] >= middle:
            low = min(prefix[b] - prefix[a] for a, b in zip(partition, partition[1:]))
        else:
            stages = zip(partition[:-2], partition[1:-1])
            short = max(
                [prefix[-1] - prefix[partition[-2]], *(prefix[stop - 1] - prefix[start] for start, stop in stages)]
            )
            high = min(short, middle - 1)
    return low


def _fill_least(prefix: list[int], num_stages: int, floor: int) -> list[int]:
    """Fill stages from the left with the fewest layers that reach ``floor``; the last takes the rest, maybe none."""
    partition, stop, num_layers = [0], 0, len(prefix) - 1
    for _ in range(num_stages - 1):
        stop = min(bisect_left(prefix, prefix[stop] + floor, min(stop + 1, num_layers)), num_layers)
        partition.append(stop)
    partition.append(num_layers)
    return partition


def _spread(prefix: list[int], num_stages: int, floor: int, bound: int) -> list[int] | None:
    """Choose boundaries nearest to an even share, from the last to the first, with loads from ``floor`` to ``bound``.

    With a floor of 0 this always succeeds: the stages before a boundary can hold all layers up to the boundary of the
    greedy filling. With a larger floor, None means that these choices led to no partition; another may exist.
    """
    latest, earliest = _fill(prefix, num_stages, bound), _fill_least(prefix, num_stages, floor)
    partition = [0] * num_stages + [len(prefix) - 1]
    for stage in range(num_stages - 1, 0, -1):
        stop = partition[stage + 1]
        low = max(earliest[stage], bisect_left(prefix, prefix[stop] - bound))
        high = min(latest[stage], bisect_right(prefix, prefix[stop] - floor, 0, stop) - 1)
        if low > high:
            return None
        share = bisect_left(prefix, prefix[stop] * stage // (stage + 1), low, high)
        # The first boundary at or beyond the even share; the one before it may be nearer.
        if share > low and (prefix[share] + prefix[share - 1]) * (stage + 1) >= 2 * prefix[stop] * stage:
            share -= 1
        partition[stage] = share
    return partition if floor <= prefix[partition[1]] <= bound else None

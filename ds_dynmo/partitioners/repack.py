"""Re-packing: the number of stages for a model whose work has shrunk, and the choice of stages to keep.

:func:`first_fit` is the paper's algorithm 2, which packs by memory alone. :func:`fewest_stages` keeps throughput too.
Both return boundaries for fewer stages; :func:`hosts` then chooses the stages to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners.memory import MemoryModel
from ds_dynmo.partitioners.pipeline import PipelineModel
from ds_dynmo.placement import Placement
from ds_dynmo.plan import check_partition

__all__ = ["Packing", "fewest_stages", "first_fit", "fits_on", "hosts", "pack_onto"]

_ROUNDING = 1e-9  # relative, of sums in another order

Balance = Callable[[int], Sequence[int]]  # returns the best partition of a number of stages, or raises PartitionError


@dataclass(frozen=True)
class Packing:
    """A partition of a number of stages, and the seconds of its iteration."""

    partition: tuple[int, ...]
    iteration_seconds: float

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.placement.num_stages

    @property
    def placement(self) -> Placement:
        """The partition as a chain."""
        return Placement.chain(self.partition)


def first_fit(
    partition: Sequence[int], fits: Callable[[int, int, int, int], bool], *, target: int = 1
) -> tuple[int, ...]:
    """Run the paper's algorithm 2 for contiguous stages: merge a stage with the next one if both fit.

    The printed algorithm counts a source's memory again after its layers have left, considers workers that are already
    idle, and compares workers that are not neighbours. Here a merged stage is not considered again, and only the next
    stage in the pipeline can take layers, so that stages stay contiguous.

    Args:
        partition: the current one.
        fits: ``fits(num_stages, stage, start, stop)`` is True if layers ``[start, stop)`` fit on ``stage`` of
            ``num_stages``, with fewer micro-batches in flight than now.
        target: the number of stages at which to stop.

    Returns:
        Boundaries of ``target`` stages or more; ``partition`` if no two neighbours fit merged.

    >>> first_fit([0, 2, 4, 6, 8], lambda num_stages, stage, start, stop: stop - start <= 4)
    (0, 4, 8)

    Raises:
        PartitionError: ``partition`` is invalid, or the target is below 1.
    """
    packed = list(check_partition(partition, partition[-1], len(partition) - 1))
    if target < 1:
        raise PartitionError(f"a pipeline needs at least 1 stage, the target is {target}")
    stage = 0
    while stage < len(packed) - 2:
        merged = packed[: stage + 1] + packed[stage + 2 :]
        count = len(merged) - 1
        if count >= target and all(fits(count, s, *merged[s : s + 2]) for s in range(count)):
            packed = merged
        else:
            stage += 1
    return tuple(packed)


def fewest_stages(
    balance: Balance, pipeline: PipelineModel, most: int, *, within_seconds: float, least: int = 1
) -> Packing | None:
    """Find the fewest stages, from ``least`` to ``most``, whose iteration takes no longer than ``within_seconds``.

    Args:
        balance: returns a partition of a number of stages that fits in memory.
        pipeline: of any number of stages, which are assumed to be equally fast.

    Returns:
        None if no number of stages is fast enough and fits.
    """
    for count in range(least, most + 1):
        if pipeline.on(count).work_seconds * (1 - _ROUNDING) > within_seconds:
            continue  # no schedule can be short enough
        try:
            packing = pack_onto(balance, pipeline, count)
        except PartitionError:
            continue
        if packing.iteration_seconds <= within_seconds:
            return packing
    return None


def pack_onto(balance: Balance, pipeline: PipelineModel, num_stages: int) -> Packing:
    """Return the best partition of exactly ``num_stages`` stages, and the seconds of its iteration.

    Raises:
        PartitionError: more stages than layers, fewer than 1, or no partition fits.
    """
    num_layers = len(pipeline.forward_seconds)
    if not 1 <= num_stages <= num_layers:
        raise PartitionError(f"{num_layers} layers can be on 1 to {num_layers} stages, not on {num_stages}")
    partition = check_partition(balance(num_stages), num_layers, num_stages)
    return Packing(partition, pipeline.on(num_stages).iteration_seconds(partition))


def fits_on(memory: MemoryModel) -> Callable[[int, int, int, int], bool]:
    """Build the ``fits`` of :func:`first_fit`, with the smallest of the limits on every stage."""
    models: dict[int, MemoryModel] = {}

    def fits(num_stages: int, stage: int, start: int, stop: int) -> bool:
        if num_stages not in models:
            models[num_stages] = memory.on(num_stages)
        return models[num_stages].fits(stage, start, stop)

    return fits


def hosts(old: Sequence[int], new: Sequence[int], layer_bytes: Sequence[int]) -> tuple[int, ...]:
    """Choose the present stages that become the stages of a smaller pipeline, in order, so that fewest bytes move.

    The first stage stays the first and, with two stages or more, the last stays the last: they read the data.

    Args:
        old: the present boundaries.
        new: boundaries of as many stages or fewer.
        layer_bytes: per layer, the bytes that move with it.

    >>> hosts([0, 2, 4, 6, 8], [0, 3, 6, 8], [1] * 8)
    (0, 2, 3)

    Raises:
        PartitionError: ``new`` has more stages than ``old``.
    """
    present, wanted = len(old) - 1, len(new) - 1
    if wanted > present:
        raise PartitionError(f"{wanted} stages cannot be chosen from {present}")
    sums = [0, *accumulate(layer_bytes)]

    def kept(stage: int, place: int) -> int:
        low, high = max(old[stage], new[place]), min(old[stage + 1], new[place + 1])
        return sums[high] - sums[low] if low < high else 0

    # best[stage]: the most bytes that stay, and the chosen stages, the last of which is `stage`
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (kept(0, 0), (0,))}
    for place in range(1, wanted):
        last = place == wanted - 1
        stages = [present - 1] if last else range(place, present - (wanted - 1 - place))
        following = {}
        for stage in stages:
            earlier = [(value, choice) for before, (value, choice) in best.items() if before < stage]
            value, choice = max(earlier, key=lambda item: (item[0], [-s for s in item[1]]))
            following[stage] = (value + kept(stage, place), (*choice, stage))
        best = following
    return max(best.values(), key=lambda item: item[0])[1]

"""Which number of stages is enough for a model whose work has shrunk, and which of the present stages go on.

Two planners. :func:`first_fit` is the paper's algorithm 2, which packs by memory alone. :func:`fewest_stages` asks
for throughput too. Either gives boundaries for fewer stages; :func:`hosts` then says which stages are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners.memory import MemoryModel
from ds_dynmo.partitioners.pipeline import PipelineModel
from ds_dynmo.placement import Placement
from ds_dynmo.plan import check_partition

__all__ = ["Packing", "fewest_stages", "first_fit", "fits_on", "hosts", "pack_onto"]

Balance = Callable[[int], Sequence[int]]  # the best partition over so many stages; PartitionError where none fits


@dataclass(frozen=True)
class Packing:
    """A partition over some number of stages, and what an iteration takes under it."""

    partition: tuple[int, ...]
    iteration_seconds: float

    @property
    def num_stages(self) -> int:
        """How many stages it has."""
        return self.placement.num_stages

    @property
    def placement(self) -> Placement:
        """Where it puts the layers."""
        return Placement.chain(self.partition)


def first_fit(
    partition: Sequence[int], fits: Callable[[int, int, int, int], bool], *, target: int = 1
) -> tuple[int, ...]:
    """The paper's algorithm 2 for contiguous stages: a stage's layers go to the next one where both fit.

    As printed, the algorithm counts a source's memory again after it has gone, looks at workers that are idle already
    and compares workers that are no neighbours; here a stage that was given away is out of the game, and only the next
    stage in the pipeline can take layers, so that stages stay contiguous.

    Args:
        partition: the one in force.
        fits: of ``(num_stages, stage, start, stop)``: may ``stage`` of so many own layers ``[start, stop)``? It is
            asked about the pipeline as it would then be, with fewer micro-batches in flight.
        target: the number of stages at which to stop.

    Returns:
        Boundaries of ``target`` stages or more; ``partition`` if no two neighbours fit together.

    >>> first_fit([0, 2, 4, 6, 8], lambda num_stages, stage, start, stop: stop - start <= 4)
    (0, 4, 8)

    Raises:
        PartitionError: ``partition`` is none, or a target below 1.
    """
    bounds = list(check_partition(partition, partition[-1], len(partition) - 1))
    if target < 1:
        raise PartitionError(f"a pipeline needs at least 1 stage, the target is {target}")
    stage = 0
    while stage < len(bounds) - 2:
        together = bounds[: stage + 1] + bounds[stage + 2 :]
        count = len(together) - 1
        if count >= target and all(fits(count, s, *together[s : s + 2]) for s in range(count)):
            bounds = together
        else:
            stage += 1
    return tuple(bounds)


def fewest_stages(
    balance: Balance, pipeline: PipelineModel, most: int, *, within_seconds: float, least: int = 1
) -> Packing | None:
    """The least number of stages, from ``least`` to ``most``, whose iteration takes no longer than ``within_seconds``.

    Args:
        balance: gives a partition over a number of stages that fits in memory.
        pipeline: of any number of stages; stages are taken to be equally fast.

    Returns:
        None where no number of stages is fast enough and fits.
    """
    for count in range(least, most + 1):
        try:
            packing = pack_onto(balance, pipeline, count)
        except PartitionError:
            continue
        if packing.iteration_seconds <= within_seconds:
            return packing
    return None


def pack_onto(balance: Balance, pipeline: PipelineModel, num_stages: int) -> Packing:
    """The best partition over just so many stages, and what to expect of it.

    Raises:
        PartitionError: more stages than layers, fewer than 1, or none fits.
    """
    num_layers = len(pipeline.forward_seconds)
    if not 1 <= num_stages <= num_layers:
        raise PartitionError(f"{num_layers} layers can be on 1 to {num_layers} stages, not on {num_stages}")
    partition = check_partition(balance(num_stages), num_layers, num_stages)
    return Packing(partition, pipeline.on(num_stages).iteration_seconds(partition))


def fits_on(memory: MemoryModel) -> Callable[[int, int, int, int], bool]:
    """For :func:`first_fit`: does it fit where every stage has the limit that the tightest one has?"""
    models: dict[int, MemoryModel] = {}

    def fits(num_stages: int, stage: int, start: int, stop: int) -> bool:
        if num_stages not in models:
            models[num_stages] = memory.on(num_stages)
        return models[num_stages].fits(stage, start, stop)

    return fits


def hosts(old: Sequence[int], new: Sequence[int], layer_bytes: Sequence[int]) -> tuple[int, ...]:
    """Which of the present stages become the stages of a smaller pipeline, in order, so that least has to move.

    The first stage stays the first; of two stages or more the last stays the last: they read the data.

    Args:
        old: boundaries now.
        new: boundaries over fewer stages, or as many.
        layer_bytes: per layer, what moves with it.

    >>> hosts([0, 2, 4, 6, 8], [0, 3, 6, 8], [1] * 8)
    (0, 2, 3)

    Raises:
        PartitionError: more stages than there are.
    """
    present, wanted = len(old) - 1, len(new) - 1
    if wanted > present:
        raise PartitionError(f"{wanted} stages cannot be chosen from {present}")
    sums = [0]
    for size in layer_bytes:
        sums.append(sums[-1] + size)

    def kept(stage: int, place: int) -> int:
        low, high = max(old[stage], new[place]), min(old[stage + 1], new[place + 1])
        return sums[high] - sums[low] if low < high else 0

    # best[stage]: the most bytes that stay where they are, and the choice, with `stage` in the latest place
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

"""Re-packing: the number of stages for a model whose work has shrunk, and the choice of stages to keep.

:func:`first_fit` is the paper's algorithm 2, which packs by memory alone. :func:`fewest_stages` keeps throughput too.
Both return a placement on fewer stages; :func:`hosts` then chooses the stages to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners.memory import MemoryModel
from ds_dynmo.partitioners.pipeline import PipelineModel
from ds_dynmo.placement import Placement

__all__ = ["Packing", "fewest_stages", "first_fit", "hosts", "pack_onto"]

_ROUNDING = 1e-9  # relative, of sums in another order

Balance = Callable[[int], Placement]  # returns the best placement on a number of stages, or raises PartitionError


@dataclass(frozen=True)
class Packing:
    """A placement, and the seconds of its iteration."""

    placement: Placement
    iteration_seconds: float

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.placement.num_stages


def first_fit(placement: Placement, memory: MemoryModel, *, target: int = 1) -> Placement:
    """Run the paper's algorithm 2 for contiguous stages: merge a stage with the next one if both fit.

    The printed algorithm counts a source's memory again after its layers have left, considers workers that are already
    idle, and compares workers that are not neighbours. Here a merged stage is not considered again, and only the next
    stage in the pipeline can take layers, so that chunks stay contiguous. One stage has one chunk.

    Args:
        placement: the current one.
        memory: of any number of stages; the smallest of its limits counts on each.
        target: the number of stages at which to stop.

    Returns:
        A placement on ``target`` stages or more; ``placement`` if no two neighbours fit merged.

    >>> memory = MemoryModel((10,) * 8, (0,) * 8, (0,) * 8, limits=(45,) * 4, micro_batches=4)
    >>> first_fit(Placement.chain([0, 2, 4, 6, 8]), memory)
    [0, 4, 8]

    Raises:
        PartitionError: the target is below 1, or ``memory`` is of other layers.
    """
    if target < 1:
        raise PartitionError(f"a pipeline needs at least 1 stage, the target is {target}")
    limit, on, stage = min(memory.limits), cache(memory.on), 0
    while stage < placement.num_stages - 1 and placement.num_stages > target:
        merged = _merged(placement, stage)
        if max(on(merged.num_stages).bytes_per_stage(merged)) <= limit:
            placement = merged
        else:
            stage += 1
    return placement


def _merged(placement: Placement, stage: int) -> Placement:
    """Merge ``stage`` with the next one, chunk by chunk."""
    if placement.num_stages == 2:
        return Placement.chain([0, placement.num_layers])
    first, second = (
        [chunk for chunk, owner in enumerate(placement.owners) if owner == one] for one in (stage, stage + 1)
    )
    between = {max(pair) for pair in zip(first, second)}
    cuts = [cut for number, cut in enumerate(placement.boundaries) if number not in between]
    return Placement.of_shape(placement.shape, cuts)


def fewest_stages(
    balance: Balance, pipeline: PipelineModel, most: int, *, within_seconds: float, least: int = 1
) -> Packing | None:
    """Find the fewest stages, from ``least`` to ``most``, whose iteration takes no longer than ``within_seconds``.

    Args:
        balance: returns a placement on a number of stages that fits in memory.
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
    """Return the best placement on exactly ``num_stages`` stages, and the seconds of its iteration.

    Raises:
        PartitionError: more stages than layers, fewer than 1, or no placement fits.
    """
    num_layers = len(pipeline.forward_seconds)
    if not 1 <= num_stages <= num_layers:
        raise PartitionError(f"{num_layers} layers can be on 1 to {num_layers} stages, not on {num_stages}")
    placement = balance(num_stages)
    return Packing(placement, pipeline.on(num_stages).iteration_seconds(placement))


def hosts(old: Placement, new: Placement, layer_bytes: Sequence[int]) -> tuple[int, ...]:
    """Choose the present stages that become the stages of a smaller pipeline, in order, so that fewest bytes move.

    The first stage stays the first and, with two stages or more, the last stays the last: they read the data.

    Args:
        old: the present placement.
        new: on as many stages or fewer.
        layer_bytes: per layer, the bytes that move with it.

    >>> hosts(Placement.chain([0, 2, 4, 6, 8]), Placement.chain([0, 3, 6, 8]), [1] * 8)
    (0, 2, 3)

    Raises:
        PartitionError: ``new`` has more stages than ``old``.
    """
    present, wanted = old.num_stages, new.num_stages
    if wanted > present:
        raise PartitionError(f"{wanted} stages cannot be chosen from {present}")

    def kept(stage: int, place: int) -> int:
        return sum(layer_bytes[layer] for layer in {*old.layers_of(stage)}.intersection(new.layers_of(place)))

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

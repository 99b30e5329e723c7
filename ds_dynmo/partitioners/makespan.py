"""The partition of the shortest simulated iteration, which is not always the one of least bottleneck.

With few micro-batches, the time to fill and drain the pipeline matters. If the ratio of forward to backward seconds
differs between layers, stages wait for each other although their sums are equal. If there are few partitions, all are
simulated. Else a local search starts from several seeds: in a step one boundary, or a run of neighbouring ones, moves
by a layer. Partitions that a lower bound excludes are not simulated.

Under a split schedule (``pipeline.passes``) each partition needs a search for its order, which takes long. Candidates
are all partitions, or the neighbours of the best one under 1F1B; with two chunks per stage, those met by a local search
with the lower bound alone. The search runs

1. for the partition with the least bound and for the current one;
2. while the work limit of a decision allows it: for the one with the smallest bottleneck and for the best under 1F1B;
3. for the best of the :data:`_SIMULATED` partitions with the least bounds, after they were simulated under all orders
   found so far.

Partitions that can hardly be shorter, or not by as much as a move has to gain, are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ds_dynmo.partitioners.balanced import balanced
from ds_dynmo.partitioners.checks import check_costs, check_num_stages
from ds_dynmo.partitioners.memory import MemoryModel
from ds_dynmo.partitioners.metrics import Partitions, prefix_sums
from ds_dynmo.partitioners.passes import PassModel
from ds_dynmo.partitioners.pipeline import PipelineModel
from ds_dynmo.partitioners.registry import register
from ds_dynmo.placement import Placement, check_partition

__all__ = ["makespan"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_ALL = 1000  # most partitions of which all are simulated
_BATCH = 192  # neighbours simulated at once; fewer would not be faster
_NEIGHBOURS = 1200  # neighbours considered in a round
_SIMULATED = 12  # partitions simulated under split schedules
_ACTIONS = 1500  # total length of the orders searched in step 3
_GAIN = 0.002  # share of an iteration that a search has to promise
_SURELY = 1.03  # over the least bound; a partition with a larger bound is not the best one
_TIE = 1e-9  # relative difference below which two iterations take the same time


@register("makespan")
def makespan(
    costs: Sequence[float],
    num_stages: int,
    *,
    start: Sequence[int] | None = None,
    memory: MemoryModel | None = None,
    pipeline: PipelineModel | None = None,
    owners: Sequence[int] | None = None,
) -> list[int]:
    """Find a partition with the shortest iteration among those that fit; among equals, the one that moves fewest bytes.

    Args:
        costs: per layer; used if ``pipeline`` is None, as in :func:`balanced`.
        start: the current partition, from which layers move; None: moves do not count.
        pipeline: the model of an iteration's time.
        owners: per chunk, the stage that holds it; None: a chain. Two chunks per stage need ``pipeline.passes``.

    >>> model = PipelineModel((1.0,) * 4, (2.0,) * 4, micro_batches=1, speeds=(1.0, 1.0))
    >>> makespan([3.0] * 4, 2, start=[0, 1, 4], pipeline=model)  # one micro-batch passes all layers in turn
    [0, 1, 4]

    Raises:
        PartitionError: as :func:`balanced`; or the pipeline model is of other layers or stages.
    """
    owners = tuple(range(num_stages)) if owners is None else tuple(owners)
    of_pairs = len(owners) > num_stages
    if pipeline is None or (of_pairs and pipeline.passes is None):
        speeds = None if pipeline is None else pipeline.speeds
        return balanced(costs, num_stages, memory=memory, start=start, speeds=speeds, owners=owners)
    check_num_stages(len(check_costs(costs)), num_stages)
    pipeline.check_shape(len(costs), num_stages)
    if memory is not None:
        memory.check_shape(len(costs), num_stages)
    current = None if start is None else Placement.of(check_partition(start, len(costs), len(owners)), owners)
    if pipeline.passes is not None and (num_stages > 1 or of_pairs):
        return _under_schedules(costs, pipeline, memory, current, owners)
    if _are_few(len(costs), num_stages):
        candidates = _all_that_fit(costs, memory, owners)
        seconds = pipeline.iterations_seconds(candidates)
        return _preferred(candidates, seconds, pipeline, current, float(seconds.min()))
    return _search(costs, pipeline, memory, current)


def _under_schedules(
    costs: Sequence[float],
    pipeline: PipelineModel,
    memory: MemoryModel | None,
    current: Placement | None,
    owners: tuple[int, ...],
) -> list[int]:
    """Find the partition with the shortest iteration, each under the order found for it."""
    passes = pipeline.passes
    assert passes is not None
    seconds: dict[Placement, float] = {}

    fits = current is not None and _fitted(_columns([current.boundaries]), memory, owners).shape[1] > 0
    current_seconds = passes.known_seconds(current) if current is not None and fits else math.inf

    def may_be_shorter(bound: float) -> bool:
        """Return whether an order as close to its bound as the current one would gain enough."""
        expected = bound * max(1.0, passes.in_force_over_bound)
        longest = [(1 - _GAIN) * min(seconds.values(), default=math.inf), (1 - passes.min_gain) * current_seconds]
        return expected < min(longest)

    def search(placements: Sequence[Placement]) -> None:
        bounds = passes.lower_bounds(_columns([placement.boundaries for placement in placements]), owners)
        for placement, bound in zip(placements, bounds):
            if (placement == current or may_be_shorter(bound)) and placement not in seconds:
                seconds[placement] = pipeline.iteration_seconds(placement)

    def placement_of(partition: npt.ArrayLike) -> Placement:
        return Placement.of(np.asarray(partition).tolist(), owners)

    others = [balanced(costs, len(pipeline.speeds), memory=memory, speeds=pipeline.speeds, owners=owners)]
    if _are_few(len(costs), len(owners)):
        candidates = _all_that_fit(costs, memory, owners)
    elif len(owners) > len(pipeline.speeds):
        seeds = [*others, *([current.boundaries] if current is not None and fits else [])]
        candidates = _near_the_least_bound(passes, _columns(seeds), memory, owners)
    else:
        best = _search(costs, replace(pipeline, passes=None), memory, current)
        others.append(best)
        near = _columns([best]) + _shifts(len(owners))
        candidates = _fitted(np.column_stack([_columns([best]), near]), memory, owners)
    bounds = passes.lower_bounds(candidates, owners)
    first = [placement_of(candidates[:, bounds.argmin()])]
    if current is not None and fits:
        surely_longer = passes.lower_bounds(_columns([current.boundaries]), owners)[0] > _SURELY * bounds.min()
        first.insert(1 if surely_longer else 0, current)
    search(first)
    for partition in others:
        if passes.can_search(owners):
            search([placement_of(partition)])
    least = [placement_of(candidates[:, place]) for place in np.argsort(bounds, kind="stable")[:_SIMULATED]]
    promising = [
        placement
        for placement, bound in zip(least, np.sort(bounds, kind="stable"))
        if may_be_shorter(bound) and placement not in seconds
    ][: passes.affordable_replays(owners)]
    if promising:
        by_replay = np.argsort([passes.known_seconds(placement) for placement in promising], kind="stable")
        for place in by_replay[: max(1, _ACTIONS // passes.num_passes(owners))]:
            if passes.can_search(owners):
                search([promising[place]])
    iterations = np.array(list(seconds.values()))
    searched = _columns([placement.boundaries for placement in seconds])
    return _preferred(searched, iterations, pipeline, current, float(iterations.min()))


def _near_the_least_bound(
    passes: PassModel, seeds: Partitions, memory: MemoryModel | None, owners: tuple[int, ...]
) -> Partitions:
    """Return partitions met on the way to the least bound of an iteration, neighbour by neighbour, with the seeds."""
    met, best = seeds, seeds
    least = passes.lower_bounds(seeds, owners).min()
    while True:
        near = _fitted(_moved(best, _shifts(len(owners))), memory, owners)
        if not near.shape[1]:
            return met
        bounds = passes.lower_bounds(near, owners)
        best = near[:, np.argsort(bounds, kind="stable")[:_SIMULATED]]
        met = np.unique(np.column_stack([met, best]), axis=1)
        if bounds.min() >= least * (1 - _TIE):
            return met
        least = bounds.min()


def _are_few(num_layers: int, num_chunks: int) -> bool:
    """Return whether there are so few partitions that all are simulated."""
    return math.comb(num_layers - 1, num_chunks - 1) <= _ALL


def _columns(partitions: Sequence[Sequence[int]]) -> Partitions:
    return np.array(partitions, dtype=np.int64).T


def _moved(partitions: Partitions, shifts: Integers) -> Partitions:
    """Return every partition with every shift."""
    return (partitions[:, :, None] + shifts[:, None, :]).reshape(len(partitions), -1)


def _all_that_fit(costs: Sequence[float], memory: MemoryModel | None, owners: tuple[int, ...]) -> Partitions:
    """Return every partition that fits, as columns.

    Raises:
        PartitionError: no partition fits; says why.
    """
    candidates = _fitted(_every_partition(len(costs), len(owners)), memory, owners)
    if not candidates.shape[1]:
        balanced(costs, max(owners) + 1, memory=memory, owners=owners)
    return candidates


@lru_cache(maxsize=8)
def _every_partition(num_layers: int, num_chunks: int) -> Partitions:
    inner = list(itertools.combinations(range(1, num_layers), num_chunks - 1))
    ends = np.zeros((len(inner), 1), dtype=np.int64)
    return np.hstack([ends, np.array(inner, dtype=np.int64).reshape(len(inner), -1), ends + num_layers]).T


def _fitted(candidates: Partitions, memory: MemoryModel | None, owners: tuple[int, ...]) -> Partitions:
    """Keep the candidates that are partitions and fit."""
    candidates = candidates[:, (candidates[:-1] < candidates[1:]).all(axis=0)]
    if memory is None:
        return candidates
    return candidates[:, memory.fits_of_many(candidates, owners)]


def _preferred(
    candidates: Partitions, seconds: Floats, pipeline: PipelineModel, current: Placement | None, best_seconds: float
) -> list[int]:
    """Choose, among those as short as the best, the one that moves fewest bytes, then fewest layers."""
    equal = candidates[:, seconds <= best_seconds * (1 + _TIE)]
    if current is not None:
        moved_bytes, layers = pipeline.moved(current, equal)
        equal = equal[:, np.lexsort((layers, moved_bytes))]
    partition: list[int] = equal[:, 0].tolist()
    return partition


def _search(
    costs: Sequence[float], pipeline: PipelineModel, memory: MemoryModel | None, current: Placement | None
) -> list[int]:
    """Simulate neighbours of the best partitions of a chain until none is shorter."""
    num_stages = len(pipeline.speeds)
    owners = tuple(range(num_stages))
    beam = _seeds(pipeline, memory)
    if not beam.shape[1]:
        balanced(costs, num_stages, memory=memory)  # raises, and says why none fits
    known = [balanced(costs, num_stages), *([current.boundaries] if current is not None else [])]
    beam = np.column_stack([beam, _fitted(_columns(known), memory, owners)])
    seconds = pipeline.iterations_seconds(beam)
    shifts = _shifts(num_stages)
    width = max(2, min(8, _NEIGHBOURS // shifts.shape[1]))
    seen: set[bytes] = set()
    improved = True
    while improved:
        order = np.argsort(seconds, kind="stable")[:width]
        beam, seconds = beam[:, order], seconds[order]
        near = _fitted(_moved(beam, shifts), memory, owners)
        near = _fresh(near, _lower_bounds(near, pipeline), float(seconds[0]), seen)
        if not near.shape[1]:
            break
        near_seconds = pipeline.iterations_seconds(near)
        improved = near_seconds.min() < seconds[0] * (1 - _TIE)
        beam, seconds = np.column_stack([beam, near]), np.concatenate([seconds, near_seconds])
    best = beam[:, seconds.argmin()].tolist()
    return best if current is None else _with_fewer_moves(best, float(seconds.min()), pipeline, memory, current)


def _with_fewer_moves(
    best: list[int], best_seconds: float, pipeline: PipelineModel, memory: MemoryModel | None, current: Placement
) -> list[int]:
    """Move boundaries of ``best`` back to the current partition if the iteration gets no longer."""
    runs = _shifts(len(best) - 1)[:, ::2].astype(bool)
    near = np.where(runs, _columns([current.boundaries]), _columns([best]))
    near = _fitted(near, memory, current.owners)
    near = near[:, _lower_bounds(near, pipeline) <= best_seconds * (1 + _TIE)]
    if not near.shape[1]:
        return best
    near = np.column_stack([np.array(best), near])
    return _preferred(near, pipeline.iterations_seconds(near), pipeline, current, best_seconds)


def _fresh(near: Partitions, bounds: Floats, best_seconds: float, seen: set[bytes]) -> Partitions:
    """Select partitions that may be shorter and have not been simulated, the most promising first."""
    promising = np.argsort(bounds, kind="stable")[: np.count_nonzero(bounds < best_seconds)]
    columns = np.ascontiguousarray(near[:, promising].T)
    chosen = []
    for place, column in enumerate(columns):
        key = column.tobytes()
        if key not in seen:
            seen.add(key)
            chosen.append(place)
            if len(chosen) == _BATCH:
                break
    return columns[chosen].T


@lru_cache(maxsize=8)
def _shifts(num_chunks: int) -> Integers:
    """List the moves of every run of neighbouring boundaries by one layer to the left or right."""
    runs = []
    for first in range(1, num_chunks):
        for end in range(first + 1, num_chunks + 1):
            run = np.zeros(num_chunks + 1, dtype=np.int64)
            run[first:end] = 1
            runs += [run, -run]
    return np.array(runs).T


def _lower_bounds(partitions: Partitions, pipeline: PipelineModel) -> Floats:
    """Bound iterations from below: a stage runs all its passes, and one micro-batch passes all earlier stages."""
    forward, backward = pipeline.stages_seconds(partitions)
    both = forward + backward
    before = np.cumsum(both, axis=0) - both
    lowest: Floats = (before + pipeline.micro_batches * both).max(axis=0)
    return lowest


def _seeds(pipeline: PipelineModel, memory: MemoryModel | None) -> Partitions:
    """Find start partitions that minimise parts of an iteration's time: the largest load, and the sum of loads.

    Loads weigh forward and backward seconds in several ways, with or without the passes through earlier stages. With
    equal speeds all partitions have the same sum; else it is minimised under several limits of a stage's load.
    """
    forward, backward = prefix_sums(pipeline.forward_seconds), prefix_sums(pipeline.backward_seconds)
    shares = np.array([0.5, 0.5, 0.3, 0.7])[:, None]
    heads = np.array([0.0, 1.0, 1.0, 1.0])[:, None, None] / (pipeline.micro_batches * np.mean(pipeline.speeds))
    prefix = 2 * (shares * forward + (1 - shares) * backward)
    places = np.arange(len(forward))
    illegal = places[:, None] <= places
    loads = np.where(illegal, np.inf, prefix[:, :, None] - prefix[:, None, :])  # [kind, stop, start]
    passes = heads * prefix[:, None, :]
    by_speed = {speed: loads / speed + passes for speed in set(pipeline.speeds)}
    costs = [by_speed[speed] for speed in pipeline.speeds]
    if memory is not None:
        costs = [np.where(places[:, None] > stops, np.inf, stage) for stops, stage in zip(memory.furthest, costs)]
    seeds, least = _chain(costs, np.maximum)
    if not seeds.shape[1] or len(by_speed) == 1:
        return seeds
    limits = least[0] * np.array([1.0, 1.1, 1.3, 1.6, 2.0, 3.0])[:, None, None] * (1 + _TIE)
    return np.column_stack(
        [seeds, _chain([np.where(stage[:1] <= limits, stage[:1], np.inf) for stage in costs], np.add)[0]]
    )


def _chain(stage_costs: Sequence[Floats], combine: np.ufunc) -> tuple[Partitions, Floats]:
    """Find, per kind, the partition of least cost and that cost: ``combine`` over ``costs[kind, stop, start]``."""
    kinds, size, _ = stage_costs[0].shape
    least = np.full((kinds, size), np.inf)
    least[:, 0] = 0.0
    froms = []
    for costs in stage_costs:
        reached = combine(least[:, None, :], costs)
        froms.append(reached.argmin(axis=2))
        least = np.take_along_axis(reached, froms[-1][:, :, None], axis=2)[:, :, 0]
    boundaries = [np.full(kinds, size - 1)]
    for chosen in reversed(froms):
        boundaries.append(chosen[np.arange(kinds), boundaries[-1]])
    feasible = least[:, -1] < np.inf
    return np.array(boundaries[::-1], dtype=np.int64)[:, feasible], least[feasible, -1]

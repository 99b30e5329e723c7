"""The partition of the shortest simulated iteration, which is not always the one of least bottleneck.

With few micro-batches, the time to fill and drain the pipeline matters. If the ratio of forward to backward seconds
differs between layers, stages wait for each other although their sums are equal. If there are few partitions, all are
simulated. Else a local search starts from several seeds: in a step one boundary, or a run of neighbouring ones, moves
by a layer. Partitions that a lower bound excludes are not simulated.

Under a split schedule (``pipeline.passes``) each partition needs a search for its order, which takes long. Candidates
are all partitions, or the neighbours of the best one under 1F1B. The search runs

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
from ds_dynmo.partitioners.pipeline import PipelineModel
from ds_dynmo.partitioners.registry import register
from ds_dynmo.plan import check_partition

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
) -> list[int]:
    """Find a partition with the shortest iteration among those that fit; among equals, the one that moves fewest bytes.

    Args:
        costs: per layer; used if ``pipeline`` is None, as in :func:`balanced`.
        start: the current partition, from which layers move; None: moves do not count.
        pipeline: the model of an iteration's time.

    >>> model = PipelineModel((1.0,) * 4, (2.0,) * 4, micro_batches=1, speeds=(1.0, 1.0))
    >>> makespan([3.0] * 4, 2, start=[0, 1, 4], pipeline=model)  # one micro-batch passes all layers in turn
    [0, 1, 4]

    Raises:
        PartitionError: as :func:`balanced`; or the pipeline model is of other layers or stages.
    """
    if pipeline is None:
        return balanced(costs, num_stages, memory=memory, start=start)
    check_num_stages(len(check_costs(costs)), num_stages)
    pipeline.check_shape(len(costs), num_stages)
    current = None if start is None else list(check_partition(start, len(costs), num_stages))
    fits = _fitting(memory, len(costs), num_stages)
    if pipeline.passes is not None and num_stages > 1:
        return _under_schedules(costs, pipeline, fits, memory, current)
    if _are_few(len(costs), num_stages):
        candidates = _all_that_fit(costs, num_stages, fits, memory)
        seconds = pipeline.iterations_seconds(candidates)
        return _preferred(candidates, seconds, pipeline, current, float(seconds.min()))
    return _search(costs, pipeline, fits, memory, current)


def _under_schedules(
    costs: Sequence[float],
    pipeline: PipelineModel,
    furthest: Integers | None,
    memory: MemoryModel | None,
    current: list[int] | None,
) -> list[int]:
    """Find the partition with the shortest iteration, each under the order found for it."""
    passes = pipeline.passes
    assert passes is not None
    num_stages = len(pipeline.speeds)
    seconds: dict[tuple[int, ...], float] = {}

    fits = current is not None and _fitted(np.array(current)[:, None], furthest).shape[1] > 0
    current_seconds = passes.known_seconds(current) if current is not None and fits else math.inf

    def may_be_shorter(bound: float) -> bool:
        """Return whether an order as close to its bound as the current one would gain enough."""
        expected = bound * max(1.0, passes.in_force_over_bound)
        longest = [(1 - _GAIN) * min(seconds.values(), default=math.inf), (1 - passes.min_gain) * current_seconds]
        return expected < min(longest)

    def search(partitions: Sequence[Sequence[int]]) -> None:
        for partition, bound in zip(partitions, passes.lower_bounds(np.array(partitions).T)):
            if (partition == current or may_be_shorter(bound)) and tuple(partition) not in seconds:
                seconds[tuple(partition)] = pipeline.iteration_seconds(partition)

    others = [balanced(costs, num_stages, memory=memory, speeds=pipeline.speeds)]
    if _are_few(len(costs), num_stages):
        candidates = _all_that_fit(costs, num_stages, furthest, memory)
    else:
        best = _search(costs, replace(pipeline, passes=None), furthest, memory, current)
        others.append(best)
        near = np.array(best)[:, None] + _shifts(num_stages)
        candidates = _fitted(np.column_stack([np.array(best), near]), furthest)
    bounds = passes.lower_bounds(candidates)
    first = [candidates[:, bounds.argmin()].tolist()]
    if current is not None and fits:
        surely_longer = passes.lower_bounds(np.array(current)[:, None])[0] > _SURELY * bounds.min()
        first.insert(1 if surely_longer else 0, current)
    search(first)
    for partition in others:
        if passes.can_search:
            search([partition])
    promising = [
        candidates[:, place].tolist()
        for place in np.argsort(bounds, kind="stable")[:_SIMULATED]
        if may_be_shorter(bounds[place]) and tuple(candidates[:, place]) not in seconds
    ][: passes.affordable_replays]
    if promising:
        by_replay = np.argsort([passes.known_seconds(partition) for partition in promising], kind="stable")
        for place in by_replay[: max(1, _ACTIONS // passes.num_passes)]:
            if passes.can_search:
                search([promising[place]])
    iterations = np.array(list(seconds.values()))
    return _preferred(np.array(list(seconds)).T, iterations, pipeline, current, float(iterations.min()))


def _are_few(num_layers: int, num_stages: int) -> bool:
    """Return whether there are so few partitions that all are simulated."""
    return math.comb(num_layers - 1, num_stages - 1) <= _ALL


def _all_that_fit(
    costs: Sequence[float], num_stages: int, furthest: Integers | None, memory: MemoryModel | None
) -> Partitions:
    """Return every partition that fits, as columns.

    Raises:
        PartitionError: no partition fits; says why.
    """
    candidates = _fitted(_every_partition(len(costs), num_stages), furthest)
    if not candidates.shape[1]:
        balanced(costs, num_stages, memory=memory)
    return candidates


@lru_cache(maxsize=8)
def _every_partition(num_layers: int, num_stages: int) -> Partitions:
    inner = list(itertools.combinations(range(1, num_layers), num_stages - 1))
    ends = np.zeros((len(inner), 1), dtype=np.int64)
    return np.hstack([ends, np.array(inner, dtype=np.int64).reshape(len(inner), -1), ends + num_layers]).T


def _fitting(memory: MemoryModel | None, num_layers: int, num_stages: int) -> Integers | None:
    """Compute, per stage and first layer, the furthest stop that fits; None: no limit."""
    if memory is None:
        return None
    memory.check_shape(num_layers, num_stages)
    return np.array([memory.furthest_stops(stage) for stage in range(num_stages)])


def _fitted(candidates: Partitions, furthest: Integers | None) -> Partitions:
    """Keep the candidates that are partitions and fit."""
    legal = (candidates[:-1] < candidates[1:]).all(axis=0)
    candidates = candidates[:, legal]
    if furthest is not None:
        stages = np.arange(len(furthest))[:, None]
        candidates = candidates[:, (candidates[1:] <= furthest[stages, candidates[:-1]]).all(axis=0)]
    return candidates


def _preferred(
    candidates: Partitions, seconds: Floats, pipeline: PipelineModel, current: list[int] | None, best_seconds: float
) -> list[int]:
    """Choose, among those as short as the best, the one that moves fewest bytes, then fewest layers."""
    equal = candidates[:, seconds <= best_seconds * (1 + _TIE)]
    if current is not None:
        moved_bytes, layers = pipeline.moved(current, equal)
        equal = equal[:, np.lexsort((layers, moved_bytes))]
    partition: list[int] = equal[:, 0].tolist()
    return partition


def _search(
    costs: Sequence[float],
    pipeline: PipelineModel,
    furthest: Integers | None,
    memory: MemoryModel | None,
    current: list[int] | None,
) -> list[int]:
    """Simulate neighbours of the best partitions until none is shorter."""
    num_stages = len(pipeline.speeds)
    beam = _seeds(pipeline, furthest)
    if not beam.shape[1]:
        balanced(costs, num_stages, memory=memory)  # raises, and says why none fits
    known = [balanced(costs, num_stages), *([current] if current is not None else [])]
    beam = np.column_stack([beam, _fitted(np.array(known).T, furthest)])
    seconds = pipeline.iterations_seconds(beam)
    shifts = _shifts(num_stages)
    width = max(2, min(8, _NEIGHBOURS // shifts.shape[1]))
    seen: set[bytes] = set()
    improved = True
    while improved:
        order = np.argsort(seconds, kind="stable")[:width]
        beam, seconds = beam[:, order], seconds[order]
        near = _fitted((beam[:, :, None] + shifts[:, None, :]).reshape(num_stages + 1, -1), furthest)
        near = _fresh(near, _lower_bounds(near, pipeline), float(seconds[0]), seen)
        if not near.shape[1]:
            break
        near_seconds = pipeline.iterations_seconds(near)
        improved = near_seconds.min() < seconds[0] * (1 - _TIE)
        beam, seconds = np.column_stack([beam, near]), np.concatenate([seconds, near_seconds])
    best = beam[:, seconds.argmin()].tolist()
    return best if current is None else _with_fewer_moves(best, float(seconds.min()), pipeline, furthest, current)


def _with_fewer_moves(
    best: list[int], best_seconds: float, pipeline: PipelineModel, furthest: Integers | None, current: list[int]
) -> list[int]:
    """Move boundaries of ``best`` back to the current partition if the iteration gets no longer."""
    runs = _shifts(len(best) - 1)[:, ::2].astype(bool)
    near = _fitted(np.where(runs, np.array(current)[:, None], np.array(best)[:, None]), furthest)
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
def _shifts(num_stages: int) -> Integers:
    """List the moves of every run of neighbouring boundaries by one layer to the left or right."""
    runs = []
    for first in range(1, num_stages):
        for end in range(first + 1, num_stages + 1):
            run = np.zeros(num_stages + 1, dtype=np.int64)
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


def _seeds(pipeline: PipelineModel, furthest: Integers | None) -> Partitions:
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
    if furthest is not None:
        costs = [np.where(places[:, None] > stops, np.inf, stage) for stops, stage in zip(furthest, costs)]
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

"""The partition of the shortest simulated iteration, which is not always the one of least bottleneck.

With few micro-batches, filling and draining the pipeline count. Where the ratio of forward to backward differs between
layers, stages wait for each other although their sums are even. If there are few partitions, all are simulated. Else
the best of some seeds are improved step by step: one boundary, or a run of neighbouring ones, moves by a layer.
Partitions that a lower bound excludes are not simulated.

Under a schedule of ours (``pipeline.passes``) an order has to be found for each partition, which takes long. Candidates
are all partitions, or the neighbours of the best one under 1F1B whose messages leave by themselves. That of the least
bound and the one in force get orders first; then, while something is left of the work that a decision may do, that of
the smallest bottleneck and the best one under 1F1B. The dozen of least bound are simulated under these orders, and the
best of them get orders of their own. Partitions that can hardly be shorter, or not by as much as a move is worth, are
left out.
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
from ds_dynmo.partitioners.metrics import prefix_sums
from ds_dynmo.partitioners.pipeline import PipelineModel
from ds_dynmo.partitioners.registry import register
from ds_dynmo.plan import check_partition

__all__ = ["makespan"]

Floats = npt.NDArray[np.float64]
Bounds = npt.NDArray[np.int64]  # [num_stages + 1, how many]: partitions are columns
_ALL = 1000  # up to so many partitions all are simulated
_BATCH = 192  # neighbours simulated at once; fewer would not be faster
_NEIGHBOURS = 1200  # neighbours considered in a round
_SIMULATED = 12  # under schedules of ours
_ACTIONS = 1500  # of the partitions of which an order is searched, together
_GAIN = 0.002  # of an iteration, below which no order is searched
_SURELY = 1.03  # times the least bound: a partition whose bound is above it is not the best one
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
    """Find a partition of the shortest iteration among those that fit; of equals the one that moves fewest bytes.

    Args:
        costs: per layer; without ``pipeline`` they alone count, as in :func:`balanced`.
        start: the partition in force, from which bytes move; None: nothing has to move.
        pipeline: how long an iteration takes.

    >>> model = PipelineModel((1.0,) * 4, (2.0,) * 4, micro_batches=1, speeds=(1.0, 1.0))
    >>> makespan([3.0] * 4, 2, start=[0, 1, 4], pipeline=model)  # one micro-batch passes all layers in turn
    [0, 1, 4]

    Raises:
        PartitionError: as :func:`balanced`; or a pipeline model of other layers or stages.
    """
    if pipeline is None:
        return balanced(costs, num_stages, memory=memory, start=start)
    check_num_stages(len(check_costs(costs)), num_stages)
    pipeline.check_shape(len(costs), num_stages)
    given = None if start is None else list(check_partition(start, len(costs), num_stages))
    fits = _fitting(memory, len(costs), num_stages)
    if pipeline.passes is not None and num_stages > 1:
        return _under_schedules(costs, pipeline, fits, memory, given)
    if _are_few(len(costs), num_stages):
        candidates = _all_that_fit(costs, num_stages, fits, memory)
        seconds = pipeline.iterations_seconds(candidates)
        return _preferred(candidates, seconds, pipeline, given, float(seconds.min()))
    return _search(costs, pipeline, fits, memory, given)


def _under_schedules(
    costs: Sequence[float],
    pipeline: PipelineModel,
    furthest: Bounds | None,
    memory: MemoryModel | None,
    given: list[int] | None,
) -> list[int]:
    """Find the partition of the shortest iteration under the schedule that each one gets."""
    passes = pipeline.passes
    assert passes is not None
    num_stages = len(pipeline.speeds)
    seconds: dict[tuple[int, ...], float] = {}

    fits = given is not None and _fitted(np.array(given)[:, None], furthest).shape[1] > 0
    present = passes.known_seconds(given) if given is not None and fits else math.inf

    def may_be_shorter(bound: float) -> bool:
        """Is it, and by enough, if its order comes as close to the bound as that in force did?"""
        expected = bound * max(1.0, passes.in_force_over_bound)
        longest = [(1 - _GAIN) * min(seconds.values(), default=math.inf), (1 - passes.min_gain) * present]
        return expected < min(longest)

    def search(partitions: Sequence[Sequence[int]]) -> None:
        for one, bound in zip(partitions, passes.lower_bounds(np.array(partitions).T)):
            if (one == given or may_be_shorter(bound)) and tuple(one) not in seconds:
                seconds[tuple(one)] = pipeline.iteration_seconds(one)

    others = [balanced(costs, num_stages, memory=memory, speeds=pipeline.speeds)]
    if _are_few(len(costs), num_stages):
        candidates = _all_that_fit(costs, num_stages, furthest, memory)
    else:
        best = _search(costs, replace(pipeline, sends="overlapped", passes=None), furthest, memory, given)
        others.append(best)
        near = np.array(best)[:, None] + _shifts(num_stages)
        candidates = _fitted(np.column_stack([np.array(best), near]), furthest)
    bounds = passes.lower_bounds(candidates)
    first = [candidates[:, bounds.argmin()].tolist()]
    if given is not None and fits:
        surely_longer = passes.lower_bounds(np.array(given)[:, None])[0] > _SURELY * bounds.min()
        first.insert(1 if surely_longer else 0, given)
    search(first)
    for one in others:
        if passes.can_search:
            search([one])
    dozen = [
        candidates[:, place].tolist()
        for place in np.argsort(bounds, kind="stable")[:_SIMULATED]
        if may_be_shorter(bounds[place]) and tuple(candidates[:, place]) not in seconds
    ][: passes.affordable_replays]
    if dozen:
        by_replay = np.argsort([passes.known_seconds(one) for one in dozen], kind="stable")
        for place in by_replay[: max(1, _ACTIONS // passes.num_passes)]:
            if passes.can_search:
                search([dozen[place]])
    iterations = np.array(list(seconds.values()))
    return _preferred(np.array(list(seconds)).T, iterations, pipeline, given, float(iterations.min()))


def _are_few(num_layers: int, num_stages: int) -> bool:
    """Are the partitions so few that all are simulated?"""
    return math.comb(num_layers - 1, num_stages - 1) <= _ALL


def _all_that_fit(
    costs: Sequence[float], num_stages: int, furthest: Bounds | None, memory: MemoryModel | None
) -> Bounds:
    """Give every partition that fits.

    Raises:
        PartitionError: none does; says why.
    """
    candidates = _fitted(_every_partition(len(costs), num_stages), furthest)
    if not candidates.shape[1]:
        balanced(costs, num_stages, memory=memory)
    return candidates


@lru_cache(maxsize=8)
def _every_partition(num_layers: int, num_stages: int) -> Bounds:
    inner = list(itertools.combinations(range(1, num_layers), num_stages - 1))
    ends = np.zeros((len(inner), 1), dtype=np.int64)
    return np.hstack([ends, np.array(inner, dtype=np.int64).reshape(len(inner), -1), ends + num_layers]).T


def _fitting(memory: MemoryModel | None, num_layers: int, num_stages: int) -> Bounds | None:
    """Compute how far each stage may reach from each first layer; None: no limit."""
    if memory is None:
        return None
    memory.check_shape(num_layers, num_stages)
    return np.array([memory.furthest_stops(stage) for stage in range(num_stages)])


def _fitted(candidates: Bounds, furthest: Bounds | None) -> Bounds:
    """Keep the candidates that are partitions and fit."""
    legal = (candidates[:-1] < candidates[1:]).all(axis=0)
    candidates = candidates[:, legal]
    if furthest is not None:
        stages = np.arange(len(furthest))[:, None]
        candidates = candidates[:, (candidates[1:] <= furthest[stages, candidates[:-1]]).all(axis=0)]
    return candidates


def _preferred(
    candidates: Bounds, seconds: Floats, pipeline: PipelineModel, given: list[int] | None, best_seconds: float
) -> list[int]:
    """Choose among those as short as the best the one that moves fewest bytes, then fewest layers."""
    equal = candidates[:, seconds <= best_seconds * (1 + _TIE)]
    if given is not None:
        moved_bytes, layers = pipeline.moved(given, equal)
        equal = equal[:, np.lexsort((layers, moved_bytes))]
    partition: list[int] = equal[:, 0].tolist()
    return partition


def _search(
    costs: Sequence[float],
    pipeline: PipelineModel,
    furthest: Bounds | None,
    memory: MemoryModel | None,
    given: list[int] | None,
) -> list[int]:
    """Simulate neighbours of the best partitions so far until none is better."""
    num_stages = len(pipeline.speeds)
    beam = _seeds(pipeline, furthest)
    if not beam.shape[1]:
        balanced(costs, num_stages, memory=memory)  # says why none fits
    known = [balanced(costs, num_stages), *([given] if given is not None else [])]
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
    return best if given is None else _homeward(best, float(seconds.min()), pipeline, furthest, given)


def _homeward(
    best: list[int], best_seconds: float, pipeline: PipelineModel, furthest: Bounds | None, given: list[int]
) -> list[int]:
    """Put boundaries of ``best`` back to where they are now, as long as the iteration gets no longer."""
    runs = _shifts(len(best) - 1)[:, ::2].astype(bool)
    near = _fitted(np.where(runs, np.array(given)[:, None], np.array(best)[:, None]), furthest)
    near = near[:, _lower_bounds(near, pipeline) <= best_seconds * (1 + _TIE)]
    if not near.shape[1]:
        return best
    near = np.column_stack([np.array(best), near])
    return _preferred(near, pipeline.iterations_seconds(near), pipeline, given, best_seconds)


def _fresh(near: Bounds, bounds: Floats, best_seconds: float, seen: set[bytes]) -> Bounds:
    """Keep those that may be better and have not been simulated, the most promising first."""
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
def _shifts(num_stages: int) -> Bounds:
    """List the moves of every run of neighbouring boundaries by one layer to the left or right."""
    runs = []
    for first in range(1, num_stages):
        for end in range(first + 1, num_stages + 1):
            run = np.zeros(num_stages + 1, dtype=np.int64)
            run[first:end] = 1
            runs += [run, -run]
    return np.array(runs).T


def _lower_bounds(bounds: Bounds, pipeline: PipelineModel) -> Floats:
    """Bound iterations from below: a stage's own passes come after one pass each way through the stages before it."""
    forward, backward = pipeline.stages_seconds(bounds)
    both = forward + backward
    before = np.cumsum(both, axis=0) - both
    lowest: Floats = (before + pipeline.micro_batches * both).max(axis=0)
    return lowest


def _seeds(pipeline: PipelineModel, furthest: Bounds | None) -> Bounds:
    """Find partitions that minimise parts of an iteration's time: the largest load of a stage, and the sum of loads.

    The load weighs forward and backward in several ways, with or without the passes through the stages before. With
    equal speeds the sum is the same everywhere; else it is minimised under several limits of a stage's load.
    """
    forward, backward = prefix_sums(pipeline.forward_seconds), prefix_sums(pipeline.backward_seconds)
    shares = np.array([0.5, 0.5, 0.3, 0.7])[:, None]
    heads = np.array([0.0, 1.0, 1.0, 1.0])[:, None, None] / (pipeline.micro_batches * np.mean(pipeline.speeds))
    prefix = 2 * (shares * forward + (1 - shares) * backward)
    places = np.arange(len(forward))
    illegal = places[:, None] <= places
    loads = np.where(illegal, np.inf, prefix[:, :, None] - prefix[:, None, :])  # [kind, stop, start]
    passes = heads * prefix[:, None, :]
    of_speed = {speed: loads / speed + passes for speed in set(pipeline.speeds)}
    costs = [of_speed[speed] for speed in pipeline.speeds]
    if furthest is not None:
        costs = [np.where(places[:, None] > stops, np.inf, of) for stops, of in zip(furthest, costs)]
    seeds, least = _chain(costs, np.maximum)
    if not seeds.shape[1] or len(of_speed) == 1:
        return seeds
    limits = least[0] * np.array([1.0, 1.1, 1.3, 1.6, 2.0, 3.0])[:, None, None] * (1 + _TIE)
    return np.column_stack([seeds, _chain([np.where(of[:1] <= limits, of[:1], np.inf) for of in costs], np.add)[0]])


def _chain(stage_costs: Sequence[Floats], combine: np.ufunc) -> tuple[Bounds, Floats]:
    """Find, per kind, the partition of least cost, and its cost: ``combine`` over ``costs[kind, stop, start]``."""
    kinds, size, _ = stage_costs[0].shape
    least = np.full((kinds, size), np.inf)
    least[:, 0] = 0.0
    froms = []
    for costs in stage_costs:
        reached = combine(least[:, None, :], costs)
        froms.append(reached.argmin(axis=2))
        least = np.take_along_axis(reached, froms[-1][:, :, None], axis=2)[:, :, 0]
    bounds = [np.full(kinds, size - 1)]
    for chosen in reversed(froms):
        bounds.append(chosen[np.arange(kinds), bounds[-1]])
    found = least[:, -1] < np.inf
    return np.array(bounds[::-1], dtype=np.int64)[:, found], least[found, -1]

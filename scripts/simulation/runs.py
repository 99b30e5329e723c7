"""Simulate a run of a dynamic model under a balancer, without processes.

A balancer sees what the engine would: the costs of the iteration before, of each layer on its slowest replica, and no
links. A move must lower the bottleneck by the engine's ``min_improvement``, and save more until the next rebalance than
it takes. The engine also weighs the noise of its measurements; here there is none.

An iteration is timed in three ways: ``1F1B`` is DeepSpeed's schedule with its filling and draining; ``zero bubble`` is
ours, with the order that is shortest for the costs of that iteration; ``busiest stage`` is the time that this stage
works, below which no schedule can come. Moves are decided by ``busiest stage`` and ``1F1B``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ds_dynmo.partitioners import PipelineModel, balanced, iteration_seconds, uniform
from ds_dynmo.partitioners.registry import propose
from ds_dynmo.placement import Placement
from simulation import LoadModel, Phase
from simulation.statics import STATIC, STATICS, Statics
from simulation.zero_bubble import zero_bubble_seconds

Floats = npt.NDArray[np.float64]
Partition = Sequence[int]

BALANCERS = {  # by arm: the balancer, and what it balances by
    "partition_time": ("partition", "time"),
    "partition_parameters": ("partition", "parameters"),
    "diffusion_time": ("diffusion", "time"),
    "diffusion_parameters": ("diffusion", "parameters"),
    "makespan": ("makespan", "time"),
}
DYNAMIC = tuple(BALANCERS)
ARMS = (*STATICS, *DYNAMIC, "oracle", "dense")
MIN_IMPROVEMENT = 0.03  # the engine's default


@dataclass(frozen=True)
class Setting:
    """A machine and a pipeline on it.

    Attributes:
        micro_batches: of one replica and iteration; 4 for each stage in the paper.
        interval: iterations between rebalances.
        announced: a phase change that the model announces is followed by a rebalance after one iteration, without
            waiting for the interval.
        forward_seconds: of a dense layer and micro-batch, the backward pass taking twice that: 2 x 2048 tokens, hidden
            size 1024, at 400 TFLOP/s.
        layer_bytes: what moves with a layer: 12 x 1024^2 weights in bf16, fp32 and Adam's two moments.
        message_bytes: of activations between stages, bf16.
        link_bytes_per_second: between stages, one 200 Gb/s link by default.
    """

    layers: int
    stages: int
    replicas: int
    micro_batches: int
    interval: int
    announced: bool = False
    forward_seconds: float = 0.34e-3
    layer_bytes: int = 14 * 12 * 1024**2
    message_bytes: int = 2 * 2 * 2048 * 1024
    link_bytes_per_second: float = 25e9
    micro_batch_tokens: int = 2 * 2048

    @property
    def link_seconds(self) -> float:
        """The seconds of one message between stages."""
        return self.message_bytes / self.link_bytes_per_second

    @property
    def tokens(self) -> int:
        """The tokens of one iteration."""
        return self.micro_batch_tokens * self.micro_batches * self.replicas

    @classmethod
    def of(cls, load_model: LoadModel, **changes: int | float | None) -> Setting:
        """Make the paper's setting of a load model, with those of ``changes`` that are not None."""
        chosen = {name: value for name, value in changes.items() if value is not None}
        stages = int(chosen.get("stages", load_model.stages))
        paper = {
            "layers": load_model.layers,
            "stages": stages,
            "replicas": load_model.replicas,
            "micro_batches": 4 * stages,
            "interval": load_model.interval,
            "announced": chosen.get("interval") is None,
        }
        return cls(**{**paper, **chosen})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    """Means over the iterations of a run.

    Attributes:
        busiest_stage_seconds, one_f_one_b_seconds, zero_bubble_seconds: of an iteration, ``busiest stage``, ``1F1B``
            and ``zero bubble``, moves included.
        move_seconds: of them, what moving layers takes.
        busiest_stage_ratio, one_f_one_b_ratio, zero_bubble_ratio: the bubble ratios of these three, the share of
            stages x iteration without work.
        imbalance: the paper's equation 2, of the replica that is slowest.
        last_busiest_stage_seconds, last_zero_bubble_seconds: of an iteration at the end of the run.
        moves: partitions that were moved to.
    """

    busiest_stage_seconds: float
    one_f_one_b_seconds: float
    zero_bubble_seconds: float
    move_seconds: float
    busiest_stage_ratio: float
    one_f_one_b_ratio: float
    zero_bubble_ratio: float
    imbalance: float
    last_busiest_stage_seconds: float
    last_zero_bubble_seconds: float
    moves: int


@dataclass(frozen=True, eq=False)
class PhaseCosts:
    """The same phase on every replica: seconds per micro-batch, ``[replicas, layers]``."""

    iterations: int
    forward: Floats
    backward: Floats
    trainable: tuple[float, ...]
    announced: bool = False

    @classmethod
    def of(cls, phases: Sequence[Phase], forward_seconds: float) -> PhaseCosts:
        forward = forward_seconds * np.array([phase.forward for phase in phases])
        backward = 2 * forward_seconds * np.array([phase.backward for phase in phases])
        return cls(phases[0].iterations, forward, backward, phases[0].trainable, phases[0].announced)

    def slowest(self) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of each layer on its slowest replica, as a profile does."""
        return self.forward.max(axis=0), self.backward.max(axis=0)

    def costs(self) -> list[float]:
        forward, backward = self.slowest()
        costs: list[float] = (forward + backward).tolist()
        return costs


def run_costs(load_model: LoadModel, setting: Setting, count: int, seed: int) -> list[PhaseCosts]:
    replicas = [
        load_model.phases(setting.layers, count, seed=seed, replica=replica) for replica in range(setting.replicas)
    ]
    return [PhaseCosts.of(phases, setting.forward_seconds) for phases in zip(*replicas)]


def dense_costs(load_model: LoadModel, setting: Setting) -> list[PhaseCosts]:
    """Make one iteration of the model that never changes; its replicas are alike."""
    return [PhaseCosts.of([load_model.dense(setting.layers)], setting.forward_seconds)]


def first_layers(partition: Partition) -> list[int]:
    """List the first layer of each stage."""
    placement = Placement.chain(partition)
    return [placement.chunk(stage).start for stage in placement.stages]


def iteration(phase: PhaseCosts, partition: Partition, setting: Setting) -> tuple[float, float, float, float]:
    """Return ``busiest stage`` and ``1F1B`` seconds, mean seconds of a stage's work, and the imbalance."""
    starts = first_layers(partition)
    forward = np.add.reduceat(phase.forward, starts, axis=1).T
    backward = np.add.reduceat(phase.backward, starts, axis=1).T
    loads = forward + backward  # [stages, replicas]
    slowest = loads[:, int(loads.max(axis=0).argmax())]
    seconds = iteration_seconds(forward, backward, setting.micro_batches, setting.link_seconds)
    imbalance = float((slowest.max() - slowest.min()) / slowest.mean()) if slowest.any() else 0.0
    return (
        setting.micro_batches * float(loads.max()),
        float(seconds.max()),
        setting.micro_batches * float(loads.mean()),
        imbalance,
    )


@lru_cache(maxsize=1024)  # balancers often agree
def timed_iteration(
    phase: PhaseCosts, partition: tuple[int, ...], setting: Setting
) -> tuple[float, float, float, float, float]:
    """Return what :func:`iteration` does, and ``zero bubble`` seconds."""
    starts = first_layers(partition)
    known_forward, known_backward = (np.add.reduceat(seconds, starts).tolist() for seconds in phase.slowest())
    seconds = zero_bubble_seconds(
        (known_forward, known_backward),
        np.add.reduceat(phase.forward, starts, axis=1).T,
        np.add.reduceat(phase.backward, starts, axis=1).T,
        np.diff(partition).tolist(),
        setting.micro_batches,
        setting.link_seconds,
    )
    return *iteration(phase, partition, setting), seconds


def proposal(phase: PhaseCosts, start: Partition, arm: str, setting: Setting) -> Partition:
    """Choose the partition that ``arm`` proposes, given a profile of ``phase``."""
    if arm == "oracle":
        return balanced(phase.costs(), setting.stages)
    balancer, balance_by = BALANCERS[arm]
    return propose(
        balancer,
        phase.costs() if balance_by == "time" else phase.trainable,
        setting.stages,
        start=list(start),
        memory=None,
        pipeline=pipeline_of(phase, setting),
        speeds=None,
    )


def pipeline_of(phase: PhaseCosts, setting: Setting) -> PipelineModel:
    """Make the balancer's model of a pipeline from a profile of ``phase``."""
    forward, backward = phase.slowest()
    return PipelineModel(
        tuple(forward.tolist()),
        tuple(backward.tolist()),
        setting.micro_batches,
        (1.0,) * setting.stages,
        (setting.layer_bytes,) * setting.layers,
    )


def known_statics(first: PhaseCosts, setting: Setting) -> Statics:
    """Make the static partitions from the loads of the first iteration."""
    return Statics.known(pipeline_of(first, setting), first.trainable)


def worth_it(phase: PhaseCosts, old: Partition, new: Partition, arm: str, setting: Setting) -> bool:
    """Decide whether the engine moves from ``old`` to ``new``, given a profile of ``phase``."""
    if list(old) == list(new):
        return False
    if arm == "oracle":
        return True
    forward, backward = phase.slowest()
    known = PhaseCosts(1, forward[None], backward[None], phase.trainable)
    expected = replace(setting, message_bytes=0)
    before, after = iteration(known, old, expected), iteration(known, new, expected)
    by_parameters = arm.endswith("parameters")
    if by_parameters:
        was, will_be = (float(np.add.reduceat(phase.trainable, list(which[:-1])).max()) for which in (old, new))
    else:
        was, will_be = before[0], after[0]
    if arm == "makespan" or was == will_be:  # as low a bottleneck: an iteration may be shorter all the same
        was, will_be = before[1], after[1]
    if not was - will_be >= MIN_IMPROVEMENT * was > 0:
        return False
    if by_parameters:
        return True
    return (before[1] - after[1]) * setting.interval > move_seconds(old, new, setting)


def move_seconds(old: Partition, new: Partition, setting: Setting) -> float:
    """Return the seconds of a move: those of the stage that sends or receives most layers, both at once."""
    busiest = 0
    for (begin, end), (first, last) in zip(zip(old, old[1:]), zip(new, new[1:])):
        stay = max(0, min(end, last) - max(begin, first))
        busiest = max(busiest, end - begin - stay, last - first - stay)
    return busiest * setting.layer_bytes / setting.link_bytes_per_second


def replay(phases: Sequence[PhaseCosts], arm: str, setting: Setting, start: Partition | None = None) -> Outcome:
    """Simulate the run under ``arm``, which begins at ``start``; None: uniform.

    A rebalance follows the first iteration of a phase that was announced, else the next multiple of the interval. The
    oracle knows loads that last before they come, and of those that change in every iteration the one before.
    """
    partition: Partition = uniform(setting.layers, setting.stages) if start is None else start
    rows, moves, moving, begin = [], 0, 0.0, 0
    for phase in phases:
        known_after = iterations_until_known(phase, arm, setting, begin)
        if known_after:
            rows.append((min(known_after, phase.iterations), *timed_iteration(phase, tuple(partition), setting)))
        if (arm in DYNAMIC or arm == "oracle") and known_after <= phase.iterations:
            new = proposal(phase, partition, arm, setting)
            if worth_it(phase, partition, new, arm, setting):
                moves += 1
                moving += 0.0 if arm == "oracle" else move_seconds(partition, new, setting)
                partition = new
        if phase.iterations > known_after:
            rows.append((phase.iterations - known_after, *timed_iteration(phase, tuple(partition), setting)))
        begin += phase.iterations
    weights = [row[0] for row in rows]
    busiest_stage, one_f_one_b, work, imbalance, zero_bubble = (
        float(np.average([row[column] for row in rows], weights=weights)) for column in range(1, 6)
    )
    moving /= sum(weights)
    return Outcome(
        busiest_stage + moving,
        one_f_one_b + moving,
        zero_bubble + moving,
        moving,
        1 - work / busiest_stage,
        1 - work / one_f_one_b,
        1 - work / zero_bubble,
        imbalance,
        rows[-1][1],
        rows[-1][5],
        moves,
    )


def iterations_until_known(phase: PhaseCosts, arm: str, setting: Setting, begin: int) -> int:
    """Count the iterations of a phase, which begins after ``begin`` others, before a rebalance knows its loads."""
    if arm == "oracle":
        return 0 if phase.iterations > 1 else 1
    return 1 if setting.announced and phase.announced else setting.interval - begin % setting.interval


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Average over runs with different seeds."""
    means = {name: statistics.fmean(getattr(outcome, name) for outcome in outcomes) for name in Outcome.__annotations__}
    return Outcome(**{**means, "moves": round(means["moves"])})  # type: ignore[arg-type]


def compare(
    load_model: LoadModel, setting: Setting, arms: Sequence[str], *, count: int, seeds: int
) -> dict[str, Outcome]:
    """Simulate each of ``arms`` on the same loads; average over seeds.

    Static arms stay at their partition, which is made from the loads of the first iteration. All others begin at the
    one of these that has the shortest first iteration.
    """
    runs = [run_costs(load_model, setting, count, seed) for seed in range(seeds)]
    starts = [known_statics(phases[0], setting) for phases in runs]
    outcomes = {
        arm: mean_outcome([replay(phases, arm, setting, known.start(arm)) for phases, known in zip(runs, starts)])
        for arm in arms
        if arm != "dense"
    }
    if "dense" in arms:
        outcomes["dense"] = replay(dense_costs(load_model, setting), STATIC, setting)
    return outcomes


def figures_of(arm: str, outcomes: dict[str, Outcome], setting: Setting) -> dict[str, float]:
    """Return what ``arm`` came to, over the static partitions and the dense model.

    Args:
        outcomes: of all static arms, "dense" and ``arm``.
    """
    own, uniform, dense = outcomes[arm], outcomes[STATIC], outcomes["dense"]
    statics = [outcomes[name] for name in STATICS]
    best = min(statics, key=lambda outcome: outcome.zero_bubble_seconds)
    best_1f1b = min(statics, key=lambda outcome: outcome.one_f_one_b_seconds)
    return {
        "tokens_per_second": setting.tokens / own.zero_bubble_seconds,
        "tokens_per_second_1f1b": setting.tokens / own.one_f_one_b_seconds,
        "speedup_over_static": best.zero_bubble_seconds / own.zero_bubble_seconds,
        "speedup_over_static_1f1b": best_1f1b.one_f_one_b_seconds / own.one_f_one_b_seconds,
        "speedup_over_static_at_end": best.last_zero_bubble_seconds / own.last_zero_bubble_seconds,
        "speedup_over_uniform": uniform.zero_bubble_seconds / own.zero_bubble_seconds,
        "speedup_over_uniform_1f1b": uniform.one_f_one_b_seconds / own.one_f_one_b_seconds,
        "speedup_over_uniform_at_end": uniform.last_zero_bubble_seconds / own.last_zero_bubble_seconds,
        "speedup_over_dense": dense.zero_bubble_seconds / own.zero_bubble_seconds,
        "speedup_over_dense_1f1b": dense.one_f_one_b_seconds / own.one_f_one_b_seconds,
        "speedup_over_1f1b": own.one_f_one_b_seconds / own.zero_bubble_seconds,
        "bubble_ratio": own.zero_bubble_ratio,
        "bubble_ratio_of_loads": own.busiest_stage_ratio,
        "bubble_ratio_1f1b": own.one_f_one_b_ratio,
        "imbalance": own.imbalance,
        "overhead_migrate": own.move_seconds / own.zero_bubble_seconds,
        "moves": own.moves,
    }

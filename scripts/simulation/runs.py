"""Simulate a run of a dynamic model under a balancer, without processes.

A balancer sees what the engine would: the costs of the iteration before, of each layer on its slowest replica, and no
links. A move must lower the bottleneck by the engine's ``min_improvement``, and save more until the next rebalance than
it takes. The engine also weighs the noise of its measurements; here there is none.

An iteration of a chain is timed in three ways: ``1F1B`` is DeepSpeed's schedule with its filling and draining; ``zero
bubble`` is ours, in the order that a decision would find; ``busiest stage`` is the time that this stage works, below
which no schedule can come. Moves of a chain are decided by ``busiest stage`` and ``1F1B``. A V has no 1F1B, and moves
are decided by its shortest order, within the work that the engine spends on searches.

Halves: layers are the attentions and feed-forward parts of blocks, both with the load of their block.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ds_dynmo.engine.decide.tradeoff import MoveTradeoff
from ds_dynmo.partitioners import MoveCosts, PipelineModel, balanced, iteration_seconds, loads_of, uniform
from ds_dynmo.partitioners.metrics import sums_of_stages
from ds_dynmo.partitioners.registry import propose
from ds_dynmo.placement import Placement, Shape
from simulation import LoadModel, Phase
from simulation.statics import DENSE, PARAMETERS, STATIC, STATICS, Statics
from simulation.zero_bubble import Orders, pass_model

Floats = npt.NDArray[np.float64]

BALANCERS = {  # by arm: the balancer, and what it balances by
    "partition_time": ("partition", "time"),
    "partition_parameters": ("partition", "parameters"),
    "diffusion_time": ("diffusion", "time"),
    "diffusion_parameters": ("diffusion", "parameters"),
    "makespan": ("makespan", "time"),
}
DYNAMIC = tuple(BALANCERS)
ARMS = (*STATICS, *DYNAMIC, "oracle", "dense")
V, HALVES, V_HALVES = "V", "makespan_halves", "V_halves"
FORMS: dict[str, tuple[str, Shape, bool]] = {  # of arms that are only simulated: the balancer, the shape, halves or not
    HALVES: ("makespan", "chain", True),
    V: ("makespan", "v", False),
    V_HALVES: ("makespan", "v", True),
}
HALF_BLOCK = (1 / 3, 2 / 3)  # of a block's seconds: attention, feed-forward
MIN_IMPROVEMENT = 0.03  # the engine's default
SEARCH_SHARE, SECONDS_PER_ACTION = 0.01, 3e-6  # the engine's, for the orders that a decision may search


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

    def with_layers(self, layers: int) -> Setting:
        """Return the setting of the same model in another number of layers."""
        return replace(self, layers=layers, layer_bytes=self.layer_bytes * self.layers // layers)

    @property
    def link_seconds(self) -> float:
        """The seconds of one message between stages."""
        return self.message_bytes / self.link_bytes_per_second

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
        bound_seconds: of an iteration if no stage ever waited, on the replica with most work.
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
    bound_seconds: float
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

    def merged(self, begins: Sequence[int]) -> PhaseCosts:
        """Return the costs of a model in which layers from each of ``begins`` up to the next are one."""
        forward, backward = (np.add.reduceat(part, begins[:-1], axis=1) for part in (self.forward, self.backward))
        trainable = np.add.reduceat(self.trainable, begins[:-1])
        return replace(self, forward=forward, backward=backward, trainable=tuple(trainable.tolist()))

    def in_halves(self) -> PhaseCosts:
        """Return the costs of half blocks."""
        shares, trainable = np.tile(HALF_BLOCK, self.forward.shape[1]), np.repeat(self.trainable, 2)
        forward, backward = (np.repeat(part, 2, axis=1) * shares for part in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward, trainable=tuple((trainable * shares).tolist()))

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


def stages_seconds(seconds: Floats, placement: Placement) -> Floats:
    """Sum the seconds of layers, ``[replicas, layers]``, per stage, ``[stages, replicas]``."""
    return sums_of_stages(np.add.reduceat(seconds, placement.boundaries[:-1], axis=1).T, placement.owners)


def iteration(phase: PhaseCosts, placement: Placement, setting: Setting) -> tuple[float, float, float, float, float]:
    """Return ``busiest stage`` and ``1F1B`` seconds, mean seconds of a stage's work, the imbalance, and the bound."""
    forward, backward = stages_seconds(phase.forward, placement), stages_seconds(phase.backward, placement)
    loads = forward + backward
    slowest = loads[:, int(loads.max(axis=0).argmax())]
    seconds = np.array(math.nan)
    if placement.shape == "chain":
        seconds = iteration_seconds(forward, backward, setting.micro_batches, setting.link_seconds)
    imbalance = float((slowest.max() - slowest.min()) / slowest.mean()) if slowest.any() else 0.0
    return (
        setting.micro_batches * float(loads.max()),
        float(seconds.max()),
        setting.micro_batches * float(loads.mean()),
        imbalance,
        setting.micro_batches * float(loads.mean(axis=0).max()),
    )


def timed_iteration(
    phase: PhaseCosts, placement: Placement, setting: Setting, orders: Orders
) -> tuple[float, float, float, float, float, float]:
    """Return what :func:`iteration` does, and ``zero bubble`` seconds."""
    model = pass_model(*phase.slowest(), setting.stages, setting.micro_batches, setting.link_seconds)
    seconds = orders.seconds(model, placement, phase.forward, phase.backward)
    return *iteration(phase, placement, setting), seconds


def proposal(phase: PhaseCosts, pipeline: PipelineModel, start: Placement, arm: str, setting: Setting) -> Placement:
    """Choose the placement that ``arm`` proposes, given a profile of ``phase``."""
    if arm == "oracle":
        return start.at(balanced(phase.costs(), setting.stages))
    balancer, balance_by = BALANCERS[arm]
    found = propose(
        balancer,
        phase.costs() if balance_by == "time" else phase.trainable,
        setting.stages,
        start=list(start.boundaries),
        memory=None,
        pipeline=pipeline,
        speeds=None,
        owners=start.owners,
    )
    return start.at(found)


def pipeline_of(phase: PhaseCosts, setting: Setting, orders: Orders | None = None) -> PipelineModel:
    """Make the balancer's model of a pipeline from a profile of ``phase``; with ``orders`` it is one for a V."""
    forward, backward = phase.slowest()
    under_1f1b = PipelineModel(
        tuple(forward.tolist()),
        tuple(backward.tolist()),
        setting.micro_batches,
        (1.0,) * setting.stages,
        (setting.layer_bytes,) * setting.layers,
    )
    if orders is None:
        return under_1f1b
    searches = SEARCH_SHARE * setting.interval * under_1f1b.work_seconds / SECONDS_PER_ACTION
    passes = orders.known_by(pass_model(forward, backward, setting.stages, setting.micro_batches))
    # How far the order is from its bound was simulated with links, which decisions do not know.
    known = replace(passes, in_force_over_bound=0.0, search_actions=searches, min_gain=MIN_IMPROVEMENT)
    return replace(under_1f1b, passes=known)


def known_statics(first: PhaseCosts, setting: Setting, whole: Sequence[int] | None = None) -> Statics:
    """Make the static partitions, of whole layers, from the loads of the first iteration.

    Args:
        whole: where whole layers begin among those of ``first``; None: each is one.
    """
    whole = range(setting.layers + 1) if whole is None else whole
    undivided = first.merged(whole)
    pipeline = pipeline_of(undivided, setting.with_layers(len(whole) - 1))
    return Statics.known(pipeline, undivided.trainable, first.costs(), whole)


def worth_it(
    phase: PhaseCosts, pipeline: PipelineModel, old: Placement, new: Placement, arm: str, setting: Setting
) -> bool:
    """Decide whether the engine moves from ``old`` to ``new``, given a profile of ``phase``."""
    if old == new:
        return False
    if arm == "oracle":
        return True
    by_parameters = arm.endswith("parameters")
    costs = phase.trainable if by_parameters else phase.costs()
    was, will_be = (max(loads_of(costs, which)) for which in (old, new))
    before, after = pipeline.iteration_seconds(old), pipeline.iteration_seconds(new)
    if arm == "makespan" or was == will_be:  # as low a bottleneck: an iteration may be shorter all the same
        was, will_be = before, after
    if not was - will_be >= MIN_IMPROVEMENT * was > 0:
        return False
    return (
        by_parameters
        or exact_tradeoff(old, new, setting).objection(before - after, setting.interval, pipeline, old, new) is None
    )


def exact_tradeoff(old: Placement, new: Placement, setting: Setting) -> MoveTradeoff:
    """Return what stands against a move from ``old`` to ``new``: its seconds, and no noise."""
    moved = sum(setting.layer_bytes for layer in range(setting.layers) if old.stage_of(layer) != new.stage_of(layer))
    exact = (0.0,) * setting.layers
    return MoveTradeoff(MoveCosts([(moved, move_seconds(old, new, setting))]), exact, exact)


def move_seconds(old: Placement, new: Placement, setting: Setting) -> float:
    """Return the seconds of a move: those of the stage that sends or receives most layers, both at once."""
    pairs = [({*old.layers_of(stage)}, {*new.layers_of(stage)}) for stage in old.stages]
    busiest = max(max(len(before - after), len(after - before)) for before, after in pairs)
    return busiest * setting.layer_bytes / setting.link_bytes_per_second


def replay(phases: Sequence[PhaseCosts], arm: str, setting: Setting, start: Placement | None = None) -> Outcome:
    """Simulate the run under ``arm``, which begins at ``start``; None: uniform.

    A rebalance follows the first iteration of a phase that was announced, else the next multiple of the interval. The
    oracle knows loads that last before they come, and of those that change in every iteration the one before.
    """
    here = Placement.chain(uniform(setting.layers, setting.stages)) if start is None else start
    rows, moves, moving, begin, orders = [], 0, 0.0, 0, Orders()
    for phase in phases:
        known_after = iterations_until_known(phase, arm, setting, begin)
        if known_after:
            rows.append((min(known_after, phase.iterations), *timed_iteration(phase, here, setting, orders)))
        if (arm in DYNAMIC or arm == "oracle") and known_after <= phase.iterations:
            pipeline = pipeline_of(phase, setting, orders if here.shape == "v" else None)
            new = proposal(phase, pipeline, here, arm, setting)
            if worth_it(phase, pipeline, here, new, arm, setting):
                moves += 1
                moving += 0.0 if arm == "oracle" else move_seconds(here, new, setting)
                here = new
        if phase.iterations > known_after:
            rows.append((phase.iterations - known_after, *timed_iteration(phase, here, setting, orders)))
        begin += phase.iterations
    weights = [row[0] for row in rows]
    busiest_stage, one_f_one_b, work, imbalance, bound, zero_bubble = (
        float(np.average([row[column] for row in rows], weights=weights)) for column in range(1, 7)
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
        bound,
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
    one of these that has the shortest first iteration, those with two chunks per stage at one that balances its loads.
    An arm whose chunks are more than the layers is left out.
    """
    runs = [run_costs(load_model, setting, count, seed) for seed in range(seeds)]
    outcomes = dict[str, Outcome]()
    for arm in arms:
        balancer, shape, halves = FORMS.get(arm, (arm, "chain", False))
        own = setting.with_layers(2 * setting.layers) if halves else setting
        whole = range(own.layers + 1) if halves else load_model.whole_layers(own.layers)
        if arm == DENSE:
            [dense] = dense_costs(load_model, setting)
            outcomes[arm] = replay([dense.merged(whole)], DENSE, setting.with_layers(len(whole) - 1))
        elif shape == "chain" or own.layers >= 2 * own.stages:
            each = [[phase.in_halves() for phase in phases] if halves else phases for phases in runs]
            outcomes[arm] = mean_outcome([begin_and_replay(phases, balancer, own, shape, whole) for phases in each])
    return outcomes


def begin_and_replay(
    phases: Sequence[PhaseCosts], arm: str, setting: Setting, shape: Shape, whole: Sequence[int]
) -> Outcome:
    start = known_statics(phases[0], setting, whole).start(arm, shape)
    if arm in STATICS:
        phases, setting = [phase.merged(whole) for phase in phases], setting.with_layers(len(whole) - 1)
    return replay(phases, arm, setting, Placement.of_shape(shape, start))


def figures_of(arm: str, outcomes: dict[str, Outcome]) -> dict[str, float | None]:
    """Return what ``arm`` came to, over the static partitions and the dense model; None under 1F1B for a V.

    "Over default" is over DeepSpeed's: balanced by parameters, under its 1F1B.

    Args:
        outcomes: of all static arms, "dense" and ``arm``.
    """
    own = outcomes[arm]
    statics = [outcomes[name] for name in STATICS]
    default = outcomes[PARAMETERS].one_f_one_b_seconds
    bases = {"static": min(statics, key=lambda outcome: outcome.one_f_one_b_seconds)}
    bases |= {"uniform": outcomes[STATIC], "dense": outcomes[DENSE]}
    under_1f1b = {
        "speedup_over_default_1f1b": default / own.one_f_one_b_seconds,
        **{
            f"speedup_over_{name}_1f1b": one.one_f_one_b_seconds / own.one_f_one_b_seconds
            for name, one in bases.items()
        },
        "speedup_over_1f1b": own.one_f_one_b_seconds / own.zero_bubble_seconds,
        "bubble_ratio_1f1b": own.one_f_one_b_ratio,
    }
    return {
        "speedup_over_default": default / own.zero_bubble_seconds,
        **{f"speedup_over_{name}": one.one_f_one_b_seconds / own.zero_bubble_seconds for name, one in bases.items()},
        "speedup_of_bound_over_default": default / own.bound_seconds,
        "bubble_ratio": own.zero_bubble_ratio,
        "bubble_ratio_of_loads": own.busiest_stage_ratio,
        "imbalance": own.imbalance,
        "overhead_migrate": own.move_seconds / own.zero_bubble_seconds,
        "moves": own.moves,
        **{name: None if math.isnan(number) else number for name, number in under_1f1b.items()},
    }

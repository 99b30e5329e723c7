"""Run every balancer on one case, side by side, with layers that sleep for the load model's times.

Where loads change in every iteration, the engines rebalance in every iteration, on the clock. A turn is some
iterations. Otherwise a run of 10,000 iterations is cut down to its phases. In each phase every engine is told of the
change and decides; if the phase lasts, it decides once more an interval later. Then the settled pipelines are timed in
turns. A phase counts as its iterations times that, plus the measured costs of as many rebalances as it has intervals.
Iterations until layers have settled count with the seconds of the batch before each decision.

Recorded loads are those of `scripts/simulation/recorded.py`. Where they change in every iteration, turns
are spread over the recording.

Static engines have the partitions that are made from the loads of the first phase or iteration, of whole layers: where
a recording has slices and halves of them, each sum is a layer, as for the dense model. Of those that are alike one is
run. All others start at the best of them, the dense model at the uniform one, engines with two chunks per stage
at the one that balances the same loads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from benchmarks.arms import Arm, chosen, profiling_seconds, say, timed, turns
from benchmarks.emulation import data, make_engine, set_loads, told_passes
from benchmarks.rows import Costs, Measured, Slice, has_schedule, rows_by_schedule
from ds_dynmo.engine.decide.cycle import Asked, Reason, Request
from ds_dynmo.partitioners import LayerPasses, PipelineModel, balanced
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import Schedule
from simulation import LoadModel, Phase, Recorded
from simulation.runs import Setting
from simulation.statics import SHAPES, Statics

PHASES = 4  # of a run whose loads last, in each of which there are all rounds
CHANGING_ROUNDS = 3  # for each of them, where loads change in every iteration
LAYERS, RECORDED_BATCHES = 32, 5  # of made-up loads; of a turn, where recorded loads change in every iteration
LASTING_MS, CHANGING_MS = 5.0, 12.0  # a forward pass of a mean layer; longer where every iteration has a decision
PROBES, LASTING_PROBES = 6, 2  # pairs of a profiled and a plain batch; fewer where profiles are rare


def emulated_rows(load_model: LoadModel, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the case, and return its rows on rank 0; other ranks return an empty list."""
    benchmark = Benchmark(load_model, arguments)
    benchmark.measure()
    if torch.distributed.get_rank():
        return []
    measured = {
        schedule: {arm.name: Measured(arm.rounds) for arm in benchmark.arms if arm.schedule in (None, schedule)}
        for schedule in benchmark.schedules
    }
    tokens = arguments.micro_batches * Setting.micro_batch_tokens
    return rows_by_schedule(load_model.name, measured, tokens, benchmark.statics)


class Batch(NamedTuple):
    """A measured batch: its seconds, without the rebalance after it, and what that took.

    Attributes:
        predicted: its seconds, by the latest decision before it; None: there was none.
    """

    seconds: float
    costs: Costs
    placement: Placement
    schedule: Schedule
    predicted: float | None = None

    def times(self, count: float, passes: LayerPasses, *, less: float = 0.0) -> Slice:
        """Count the batch ``count`` times, each time ``less`` seconds, without the rebalance."""
        return Slice(count, count * (self.seconds - less), passes, self.placement, self.schedule)


class Benchmark:
    """One case: an engine per balancer over the same emulated layers."""

    def __init__(self, load_model: LoadModel, arguments: argparse.Namespace) -> None:
        self.load_model = load_model
        self.arguments = arguments
        self.lasting = load_model.interval > 1
        self.batches = data()
        self.began = time.perf_counter()
        self.layers = layers_of(load_model, arguments)
        self.dense = load_model.dense(self.layers)
        self.rounds = arguments.rounds * (1 if self.lasting else CHANGING_ROUNDS)
        self.turns: list[list[Phase]] = []
        self.frozen: dict[tuple[str, str | None], list[bool]] = {}  # by arm, which layers are
        if self.lasting:
            self.phases = load_model.phases(self.layers, arguments.phases, seed=arguments.seed)
        else:
            size = arguments.batches or (RECORDED_BATCHES if isinstance(load_model, Recorded) else 1)
            self.turns = load_model.turns(self.layers, self.rounds, size, seed=arguments.seed)
            self.phases = list(chain(*self.turns))
        mean_ms = arguments.forward_ms or (LASTING_MS if self.lasting else CHANGING_MS)
        self.whole = load_model.whole_layers(self.layers)
        self.mean_share = statistics.fmean(phase.mean_share() for phase in self.phases)
        self.forward_seconds = mean_ms / 1e3 / self.mean_share  # of a dense layer
        stages = torch.distributed.get_world_size()
        undivided = self.phases[0].merged(self.whole)
        passes = self.passes(undivided)
        first = PipelineModel(passes.forward_seconds, passes.backward_seconds, arguments.micro_batches, (1.0,) * stages)
        own = self.passes(self.phases[0]).least_seconds
        self.statics = Statics.known(first, undivided.trainable, own, self.whole)
        self.schedules = list(dict.fromkeys(arguments.schedule or ["1f1b"]))
        self.arms = [
            self.arm(name, schedule)
            for name in chosen(arguments.balancer, self.statics)
            for schedule in (self.schedules if has_schedule(name) else [None])
        ]
        for line in self.statics.lines():
            say(f"{load_model.name}: {line}")

    def arm(self, name: str, schedule: str | None) -> Arm:
        """Make the engine of the arm ``name``; with ``schedule`` None it is DeepSpeed's."""
        shape = SHAPES.get(schedule or "", "chain")
        block: dict[str, Any] = {"initial_partition": list(self.statics.start(name, shape))}
        if schedule is not None:
            block["schedule"] = {"kind": schedule}
        layers = len(self.whole) - 1 if schedule is None else self.layers
        sizes = {"layers": layers, "micro_batches": self.arguments.micro_batches}
        return Arm(name, make_engine(name, **sizes, interval=self.load_model.interval, block=block), schedule)

    def measure(self) -> None:
        """Fill the rounds of every arm. Collective."""
        self.say("engines are built")
        profiling = self.probe()
        for arm in self.arms:
            arm.rounds = [[] for _ in range(self.rounds)]
        if self.lasting:
            self.measure_lasting(profiling)
        else:
            self.measure_changing(profiling)

    def probe(self) -> float:
        """Measure the seconds that a profile adds to a batch of mean layers."""
        dense = next(arm for arm in self.arms if arm.name == "dense")
        self.load(dense, self.dense, self.mean_share)
        self.timed_batch(dense), self.timed_batch(dense)
        pairs = LASTING_PROBES if self.lasting else PROBES
        return profiling_seconds(dense, lambda: dense.engine.train_batch(self.batches), pairs)

    # -- loads that change in every iteration ----------------------------------------------------------

    def measure_changing(self, profiling: float) -> None:
        last = None
        for number, phases in enumerate(self.turns):
            for arm in turns(self.arms, number):
                if phases[0] is not last:  # the iteration before is not counted: nothing was known before it
                    self.load(arm, phases[0])
                    self.timed_batch(arm), arm.new_costs()
                for before, phase in zip(phases, phases[1:]):
                    arm.rounds[number].append(self.one_iteration(arm, phase, before, profiling))
            last = phases[-1]
            self.say(f"round {number + 1} of {self.rounds}")

    def one_iteration(self, arm: Arm, phase: Phase, before: Phase, profiling: float) -> Slice:
        """Time one iteration. Before it, untimed, the oracle goes to the best partition for its loads.

        Of made-up loads, which no balancer can foresee, it knows those of the iteration before.
        """
        self.load(arm, phase)
        if arm.name == "oracle":
            self.go_to_best(arm, phase if isinstance(self.load_model, Recorded) else before)
        batch = self.measured_batch(arm)
        profile, decide, migrate = batch.costs
        costs = (profile + profiling, decide, migrate) if arm.dynamic else (0.0, 0.0, 0.0)
        less = profiling if arm.dynamic else 0.0
        done = batch.times(1, self.passes(self.phase_of(arm, phase)), less=less)
        return replace(with_costs([done], costs)[0], predicted_seconds=batch.predicted)

    # -- loads that last -------------------------------------------------------------------------------

    def measure_lasting(self, profiling: float) -> None:
        for number, phase in enumerate(self.phases):
            begun = [(arm, *self.change(arm, phase, profiling)) for arm in self.arms]
            for turn in range(self.arguments.rounds):
                for arm, unsettled, costs in turns(begun, turn):
                    batches = [self.measured_batch(arm) for _ in range(self.arguments.batches or 1)]
                    batch = batches[-1]._replace(seconds=statistics.fmean(one.seconds for one in batches))
                    left = phase.iterations - sum(one.iterations for one in unsettled)
                    settled = batch.times(left, self.passes(self.phase_of(arm, phase)))
                    settled = replace(settled, predicted_seconds=batch.predicted)
                    arm.rounds[turn] += with_costs([*unsettled, settled], costs)
            self.say(f"phase {number + 1} of {len(self.phases)}")

    def change(self, arm: Arm, phase: Phase, profiling: float) -> tuple[list[Slice], Costs]:
        """Change the loads. A dynamic engine decides, and again an interval later if the phase lasts.

        Returns:
            The iterations until layers have settled, none for a static engine, and the costs of all rebalances.
        """
        self.load(arm, phase)
        arm.engine.model_changed("the loads of another phase")
        if arm.name == "oracle":
            self.go_to_best(arm, phase)
        arm.new_costs()
        decisions = [self.measured_batch(arm)]
        if arm.dynamic and phase.iterations > known_after(self.load_model, phase) + self.load_model.interval:
            arm.engine.rebalancer.go(Asked(Request(Reason.INTERVAL)))
            decisions.append(self.measured_batch(arm))
        moved_again = arm.engine.stage.placement != decisions[-1].placement and len(decisions) > 1
        self.timed_batch(arm)  # warm up: new shapes, new memory, another order
        if not arm.dynamic:
            return [], (0.0, 0.0, 0.0)
        every = [batch.costs for batch in decisions]
        counts, costs = until_settled(self.load_model, phase, every, profiling, moved_again=moved_again)
        passes = self.passes(phase)
        return [batch.times(count, passes, less=profiling) for count, batch in zip(counts, decisions)], costs

    # -- helpers ---------------------------------------------------------------------------------------

    def load(self, arm: Arm, phase: Phase, factor: float = 1.0) -> None:
        """Set the loads of the arm's layers to ``phase``, times ``factor``, and tell the engine which are frozen."""
        loads = self.phase_of(arm, phase)
        set_loads(arm.engine, loads, self.forward_seconds * factor)
        frozen = [share == 0 for share in loads.trainable]
        if frozen != self.frozen.get((arm.name, arm.schedule), [False] * len(frozen)):
            arm.engine.model_changed("other layers are frozen")
        self.frozen[arm.name, arm.schedule] = frozen

    def timed_batch(self, arm: Arm) -> float:
        return timed(lambda: arm.engine.train_batch(self.batches))

    def measured_batch(self, arm: Arm) -> Batch:
        """Train a batch, and read from the engine what it ran, and what the rebalance after it took."""
        stage = arm.engine.stage
        placement = stage.placement
        reports = arm.engine.reports if arm.dynamic else ()
        predicted = reports[-1].iteration_seconds_after if reports else None
        seconds, costs = self.timed_batch(arm), arm.new_costs()
        return Batch(seconds - sum(costs), costs, placement, stage.schedule.running, predicted)

    def phase_of(self, arm: Arm, phase: Phase) -> Phase:
        """Return the loads of the arm's layers: static arms and the dense model have whole ones."""
        phase = self.dense if arm.name == "dense" else phase
        return phase if has_schedule(arm.name) else phase.merged(self.whole)

    def passes(self, phase: Phase) -> LayerPasses:
        """Return the seconds that the layers sleep."""
        return told_passes(phase, self.forward_seconds)

    def go_to_best(self, arm: Arm, phase: Phase) -> None:
        """Move to the best partition for the true costs of ``phase``."""
        here = arm.engine.stage.placement
        arm.engine.rebalance(balanced(self.passes(phase).least_seconds, here.num_stages, owners=here.owners))

    def say(self, what: str) -> None:
        say(f"{self.load_model.name}: {what}, {time.perf_counter() - self.began:.0f} s")


def layers_of(load_model: LoadModel, arguments: argparse.Namespace) -> int:
    """Return the number of emulated layers: the requested one, or the recording's."""
    return int(arguments.layers or (load_model.layers if isinstance(load_model, Recorded) else LAYERS))


def known_after(load_model: LoadModel, phase: Phase) -> int:
    """Return the iterations of ``phase`` that pass until its loads are known, and decided on: at most all of them."""
    return 1 if phase.announced else min(load_model.interval, phase.iterations)


def until_settled(
    load_model: LoadModel, phase: Phase, decisions: Sequence[Costs], profiling: float, *, moved_again: bool
) -> tuple[list[int], Costs]:
    """Count what a phase begins with: a decision once the change is known, and another one an interval later.

    Args:
        decisions: the costs of the one or two.
        profiling: seconds of a batch that are its profile's.
        moved_again: the second one moved layers; else they had settled with the first.

    Returns:
        The iterations before each decision until layers have settled, and the costs of all rebalances of the phase,
        which are as many as it has intervals, these at least. These alone move layers.
    """
    counts = [known_after(load_model, phase), *([load_model.interval] if moved_again else [])]
    profile, decide, migrate = (sum(parts) for parts in zip(*decisions))
    profiled = len(decisions)
    rebalances = max(profiled, phase.iterations / load_model.interval)
    return counts, (rebalances * (profile / profiled + profiling), rebalances * decide / profiled, migrate)


def with_costs(slices: Sequence[Slice], costs: Costs) -> list[Slice]:
    """Add the costs of a phase to the first slice that has iterations, and leave out those that have none."""
    first, *rest = [one for one in slices if one.iterations]
    return [replace(first, seconds=first.seconds + sum(costs), costs=costs), *rest]

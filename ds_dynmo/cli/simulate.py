"""Simulate a pipeline from what a run measured: with other stages, micro-batches, schedules, or a memory limit.

    ds-dynmo-simulate report.jsonl --stages 2 4 8
    ds-dynmo-simulate report.jsonl --stages 8 --micro-batches 16 32 --schedule zero_bubble --memory-limit 30GiB
    ds-dynmo-simulate --costs 3 9 9 9 9 12 --stages 2 3       # without a run: milliseconds of each layer

``report.jsonl`` is written with ``--report`` of ds-dynmo-train or ``dynmo.report``; its latest profile counts, or the
latest one up to ``--step``. ``--costs`` are forward and backward together, of a micro-batch; a third is forward.

A row is the partition that a decision would choose, and its iteration without the optimizer's step and loading data,
messages as long as one that the run measured. "over default": over it, the iteration that DeepSpeed gives by default,
1F1B with as many parameters on each stage; "over best static": that of the best partition under 1F1B. Both without a
memory limit; --costs have no parameters, so their default is uniform. "largest stage": weights, gradients, optimizer
state and activations, where a run measured them. Where no backward pass was measured in two parts, all schedules but
1F1B count with 40% of it for weights, and 5% more for two parts than for one.

"v" and "loop" give each stage two chunks of layers, and "auto" takes the shortest of a chain, a V and a loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from ds_dynmo.cli.command_line import CommandParser, check_at_least_1, print_table, refuse, write_json
from ds_dynmo.cli.run_records import read_report
from ds_dynmo.config import DynMoConfig
from ds_dynmo.config.dynmo import ScheduleConfig
from ds_dynmo.config.memory_limit import parse_memory_limit
from ds_dynmo.config.withdrawn import check_withdrawn
from ds_dynmo.engine.decide.decision import Decision, predict, proposed_placement
from ds_dynmo.engine.decide.decision_input import DecisionInput, memory_model
from ds_dynmo.errors import ConfigError, PartitionError, counted
from ds_dynmo.partitioners import balanced, makespan, names, uniform
from ds_dynmo.placement import Placement, Shape
from ds_dynmo.plan import LayerCost, Profile

Kind = Literal["1f1b", "zero_bubble", "v", "loop", "auto"]
WEIGHT_SHARE, SPLIT_PRICE = 0.4, 1.05  # of transformer blocks: weights in a backward pass; both parts over one pass
BY_DEFAULT: tuple[Kind, ...] = ("1f1b", "zero_bubble", "v", "loop")  # "auto" takes the best of these
MICRO_BATCHES_PER_STAGE = 4  # of --costs


@dataclass(frozen=True)
class SimulatedPipeline:
    """A simulated pipeline.

    Attributes:
        schedule: the one that runs: 1F1B where no other order fits in memory; with the placement that "auto" chose.
        over_default, over_static: the iterations of DeepSpeed's default partition and of the best one, under 1F1B, over
            this one's.
        stage_bytes: of each stage; (): no bytes were measured.
    """

    stages: int
    micro_batches: int
    schedule: str
    partition: tuple[int, ...]
    iteration_seconds: float
    bubble_ratio: float
    over_default: float
    over_static: float
    stage_bytes: tuple[int, ...]

    def cells(self) -> tuple[str, ...]:
        largest = f"{max(self.stage_bytes) / 2**20:,.1f} MiB" if self.stage_bytes else "-"
        seconds = self.iteration_seconds
        return (
            *(str(self.stages), str(self.micro_batches), self.schedule, f"{1e3 * seconds:,.1f}"),
            *(f"{self.micro_batches / seconds:,.1f}", f"{self.bubble_ratio:.2f}", f"{self.over_default:.2f}"),
            *(f"{self.over_static:.2f}", largest, str(list(self.partition))),
        )


HEAD = (
    *("stages", "micro-batches", "schedule", "iteration (ms)", "micro-batches/s", "bubble ratio", "over default"),
    *("over best static", "largest stage", "partition"),
)


def profile_of(report: Path, step: int | None) -> Profile:
    """Read the latest profile of a report, or the latest one up to ``step``.

    Raises:
        ConfigError: there is none; else as :func:`read_report`.
    """
    profiles = read_report(report).profiles
    if not profiles:
        raise ConfigError(f"{report}: has no profile: nothing was measured before the run ended")
    known = [profile for profile in profiles if step is None or profile.step <= step]
    if not known:
        raise ConfigError(f"--step {step}: the first profile is of step {profiles[0].step}")
    return known[-1]


def profile_with(costs: Sequence[float]) -> Profile:
    """Make the profile of layers that take ``costs`` milliseconds."""
    for cost in costs:
        if not 0 <= cost < float("inf"):
            raise ConfigError(f"--costs {cost:g}: should be milliseconds, at least 0")
    layers = tuple(LayerCost(cost / 3e3, 2 * cost / 3e3, 1, 1, 0, 0, 0) for cost in costs)
    return Profile(0, Placement.chain([0, len(layers)]), layers, 1, 0.0)


def with_assumed_splits(profile: Profile) -> Profile:
    """Split the backward pass of each layer that trains by assumed shares, unless a profile has measured some."""
    if any(layer.input_gradient_seconds + layer.weight_gradient_seconds for layer in profile.layers):
        return profile
    of_inputs, of_weights = SPLIT_PRICE * (1 - WEIGHT_SHARE), SPLIT_PRICE * WEIGHT_SHARE
    layers = tuple(
        replace(
            layer,
            input_gradient_seconds=of_inputs * layer.backward_seconds,
            weight_gradient_seconds=of_weights * layer.backward_seconds,
        )
        if layer.trainable_parameters
        else layer
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def simulate(
    profile: Profile, kind: Kind, *, balancer: str, limit_bytes: int | None, checkpoint_interval: int
) -> SimulatedPipeline:
    """Decide where the layers of a profile go on the stages of its placement, and simulate an iteration there.

    Raises:
        PartitionError: no partition meets the limit.
    """
    stages, num_layers = profile.placement.num_stages, len(profile.layers)
    given = DecisionInput.of(
        replace(profile, placement=uniform_placement(kind, num_layers, stages)),
        config=DynMoConfig(balancer=balancer, schedule=ScheduleConfig(kind=kind)),
        limit_bytes=limit_bytes,
        checkpoint_interval=checkpoint_interval,
        shapes=get_args(Shape) if kind == "auto" and num_layers >= 2 * stages > 2 else (),
        searches=kind != "1f1b",
    )
    decision = predict(given, proposed_placement(given))
    shape, seconds = decision.placement.shape, decision.iteration_seconds_after
    by_default, best = static_seconds(profile)
    runs: str = kind if decision.found is not None or kind == "1f1b" or stages == 1 else "1f1b (no other fits)"
    if kind == "auto" and stages > 1:
        runs = f"auto: {shape if shape != 'chain' else '1f1b' if decision.found is None else 'zero_bubble'}"
    return SimulatedPipeline(
        stages,
        profile.micro_batches,
        runs,
        decision.partition,
        seconds,
        decision.bubble_ratio_after,
        by_default / seconds if seconds else 1.0,
        best / seconds if seconds else 1.0,
        stage_bytes(profile, decision, checkpoint_interval),
    )


def static_seconds(profile: Profile) -> tuple[float, float]:
    """Simulate 1F1B at DeepSpeed's default partition, which balances parameters, and at the best one."""
    stages = profile.placement.num_stages
    pipeline = DecisionInput.of(profile).pipeline
    default = balanced([layer.parameters for layer in profile.layers], stages)
    best = makespan(pipeline.layer_seconds, stages, pipeline=pipeline)
    by_default, shortest = (pipeline.seconds_under_1f1b(partition) for partition in (default, best))
    return by_default, min(by_default, shortest)


def uniform_placement(shape: Kind | Shape, num_layers: int, stages: int) -> Placement:
    """Return equally many layers in each chunk: of a V or a loop if ``shape`` is one, on two stages or more.

    Raises:
        PartitionError: fewer layers than chunks.
    """
    if shape not in ("v", "loop") or stages == 1:
        return Placement.chain(uniform(num_layers, stages))
    chunks = 2 * stages
    even = uniform(num_layers, chunks) if num_layers >= chunks else ()
    return Placement.of_shape(shape, even, num_layers=num_layers, num_stages=stages)  # refuses fewer layers


def stage_bytes(profile: Profile, decision: Decision, checkpoint_interval: int) -> tuple[int, ...]:
    """Compute the bytes of each stage in training; () if none were measured."""
    layers, placement = profile.layers, decision.placement
    if not any(layer.static_bytes for layer in layers):
        return ()
    workspace = max(layer.workspace_bytes for layer in layers)
    if decision.found is None:
        memory = memory_model(profile, sys.maxsize, checkpoint_interval)
        assert memory is not None
        return tuple(workspace + held for held in memory.bytes_per_stage(placement))
    static = (sum(layers[index].static_bytes for index in placement.layers_of(stage)) for stage in placement.stages)
    return tuple(workspace + own + passes for own, passes in zip(static, decision.found.peak_bytes))


def simulated(profile: Profile, arguments: argparse.Namespace) -> Iterator[SimulatedPipeline | str]:
    """Yield a row for each number of stages and micro-batches and each schedule, or why there is none."""
    num_layers, limit = len(profile.layers), limit_of(arguments.memory_limit)
    for stages in arguments.stages or [profile.placement.num_stages]:
        if num_layers < stages:
            raise ConfigError(f"--stages {stages}: the model has {counted(num_layers, 'layer')}")
        chain = uniform_placement("1f1b", num_layers, stages)
        from_report = [profile.micro_batches] if arguments.costs is None else [MICRO_BATCHES_PER_STAGE * stages]
        for micro_batches in arguments.micro_batches or from_report:
            for kind in arguments.schedule or BY_DEFAULT:
                pipeline = replace(profile, placement=chain, micro_batches=micro_batches)
                try:
                    yield simulate(
                        pipeline,
                        kind,
                        balancer=arguments.balancer,
                        limit_bytes=limit,
                        checkpoint_interval=arguments.checkpoint_interval,
                    )
                except PartitionError as error:
                    yield f"{counted(stages, 'stage')}, {micro_batches} micro-batches, {kind}: {error}"


def limit_of(text: str | None) -> int | None:
    """Read a memory limit in bytes.

    Raises:
        ConfigError: it is none, or a share of a device.
    """
    try:
        limit = parse_memory_limit(text)
    except ValueError as error:
        raise ConfigError(f"--memory-limit {text}: {error}") from error
    if isinstance(limit, float):
        raise ConfigError(f'--memory-limit {text}: of which device? Give bytes, such as "30GiB"')
    return limit


def parse(given: list[str]) -> argparse.Namespace:
    """Read the arguments.

    Raises:
        ConfigError: some do not go together, or a number is too small.
    """
    parser = CommandParser(__doc__, prog="ds-dynmo-simulate")
    parser.add_argument("report", type=Path, nargs="?", help="JSON lines of a run")
    parser.add_argument("--step", type=int, help="take the latest profile up to this step (default: the latest)")
    parser.add_argument("--costs", type=float, nargs="+", metavar="MS", help="of each layer, in place of a report")
    parser.add_argument("--stages", type=int, nargs="+", help="default: as many as the run has")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", help="of a batch, default: the run's; with --costs 4 for each stage"
    )
    parser.add_argument("--schedule", nargs="+", choices=get_args(Kind), help="default: all but auto")
    parser.add_argument("--balancer", choices=names(), default="makespan", help="default: %(default)s")
    parser.add_argument("--memory-limit", metavar="BYTES", help='of a rank, such as "30GiB" (default: none)')
    parser.add_argument(
        "--checkpoint-interval",
        type=int,
        default=0,
        metavar="LAYERS",
        help="activation_checkpoint_interval of the PipelineModule (default: 0, no checkpointing)",
    )
    check_withdrawn(given, "ds-dynmo-simulate")
    arguments = parser.parse_args(given)
    if (arguments.report is None) == (arguments.costs is None):
        raise ConfigError("give the report of a run, or --costs")
    if arguments.costs is not None and arguments.stages is None:
        raise ConfigError("--costs: needs --stages")
    if arguments.costs is not None and arguments.step is not None:
        raise ConfigError("--step: is that of a report, not of --costs")
    check_at_least_1(arguments, "stages", "micro_batches")
    if arguments.checkpoint_interval < 0:
        raise ConfigError(f"--checkpoint-interval {arguments.checkpoint_interval}: should be at least 0")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    if arguments.costs is not None:
        profile = profile_with(arguments.costs)
    else:
        profile = profile_of(arguments.report, arguments.step)
        where = f"{counted(profile.placement.num_stages, 'stage')}, {list(profile.partition)}"
        measured = f"{profile.micro_batches} micro-batches, a batch took {1e3 * profile.batch_seconds:,.1f} ms"
        print(f"step {profile.step}: {counted(len(profile.layers), 'layer')} in {where}, {measured}\n")
    results = list(simulated(with_assumed_splits(profile), arguments))
    rows = [result for result in results if isinstance(result, SimulatedPipeline)]
    if rows:
        print_table(HEAD, [row.cells() for row in rows])
    for result in results:
        if isinstance(result, str):
            print(result)
    write_json(arguments.json, [vars(row) for row in rows])


def main(given: list[str] | None = None) -> int:
    try:
        run(parse(sys.argv[1:] if given is None else given))
    except ConfigError as error:
        return refuse("ds-dynmo-simulate", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pipeline schedules side by side: DeepSpeed's engines and ours over the same layers, batch by batch in turns."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule

from benchmarks.arms import say, timed, turns
from benchmarks.emulation import pipeline_engine
from benchmarks.scaling import WIDTH, LayerSeconds, ScalingBlock, layer_seconds, stage_costs
from benchmarks.traced_passes import traced_batches
from command_line import print_table
from ds_dynmo.partitioners import simulate
from ds_dynmo.schedules import (
    PassBytes,
    PassCosts,
    Schedule,
    best_schedule,
    gradient_first_1f1b,
    one_f_one_b,
    one_f_one_b_limit,
    replay,
)

STOCK = "stock"
TRACED = 3  # batches, after those that are timed
ORDERS: dict[str, Callable[[PassCosts, int], Schedule]] = {  # of our engines, for costs and micro-batches
    "1f1b": lambda costs, micro_batches: one_f_one_b(costs.num_stages, micro_batches),
    "gradient_first": lambda costs, micro_batches: gradient_first_1f1b(costs.num_stages, micro_batches),
    "zero_bubble": lambda costs, micro_batches: shortest(costs, micro_batches),
}
ARMS = {
    STOCK: "DeepSpeed's 1F1B",
    "dualpipev": "DeepSpeed's DualPipeV",
    "1f1b": "1F1B's order",
    "gradient_first": "1F1B's order, gradient first",
    "zero_bubble": "zero bubble",
}


@dataclass
class Arm:
    """An engine and what its batches took.

    Attributes:
        schedule: of ours; None: DeepSpeed's own.
    """

    name: str
    engine: Any
    schedule: Schedule | None
    data: Iterator[tuple[torch.Tensor, torch.Tensor]]
    trace: Path | None
    seconds: list[float] = field(default_factory=list)

    def batch(self) -> float:
        """Train a batch. Collective."""
        return timed(lambda: self.engine.train_batch(self.data))


def shortest(costs: PassCosts, micro_batches: int) -> Schedule:
    """Find the shortest order that holds no more than 1F1B does, where every micro-batch holds as much."""
    sizes = PassBytes.equal(costs.num_stages)
    return best_schedule(costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches)).schedule


def arms_for(asked: list[str] | None, stages: int, layers: int, micro_batches: int) -> list[str]:
    """Choose the arms that are run: DualPipeV needs two micro-batches and two layers per stage."""
    fits = micro_batches >= 2 * stages and layers >= 2 * stages
    return [arm for arm in ARMS if (not asked or arm in (*asked, STOCK)) and (arm != "dualpipev" or fits)]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the arms, replay their orders, and compare what they trained. Collective."""
    stages = torch.distributed.get_world_size()
    seconds = layer_seconds(
        arguments.loads, arguments.split, arguments.layers, arguments.pass_ms / 1e3, seed=arguments.seed
    )
    costs = stage_costs(seconds, stages)
    names = arms_for(arguments.arm, stages, arguments.layers, arguments.micro_batches)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        torch.distributed.broadcast_object_list(shared)
        arms = [make_arm(name, seconds, costs, arguments, Path(shared[0])) for name in names]
        say("engines are built")
        for number in range(1 + arguments.batches):
            for arm in turns(arms, number):
                arm.seconds.append(arm.batch())
            say(f"round {number} of {arguments.batches}" if number else "warmed up")
        for arm in arms:
            del arm.seconds[0]
        differing = differing_arms(arms)
        for number in range(TRACED):
            for arm in turns([arm for arm in arms if arm.trace is not None], number):
                arm.batch()
        work = arguments.micro_batches * sum(one.forward + one.backward for one in seconds) / stages
        rows = [row(arm, arms[0], costs, work, arguments.micro_batches) for arm in arms] if is_first() else []
        torch.distributed.barrier()
    return {"stages": stages, "work_seconds": work, "differing_weights": differing, "arms": rows}


def is_first() -> bool:
    return bool(torch.distributed.get_rank() == 0)


def make_arm(
    name: str, seconds: list[LayerSeconds], costs: PassCosts, arguments: argparse.Namespace, folder: Path
) -> Arm:
    """Make an arm's engine. Ours trace the batches after the last one that is timed."""
    specs = [LayerSpec(ScalingBlock, layer, one) for layer, one in enumerate(seconds)]
    schedule = ORDERS[name](costs, arguments.micro_batches) if name in ORDERS else None
    dynmo, trace = None, None
    if schedule is not None:
        step, trace = arguments.batches + 2, folder / f"{name}.json"
        dynmo = {
            "enabled": False,
            "log": False,
            "monitor": False,
            "randomness": {"per_layer": False},
            "schedule": {"kind": "zero_bubble"},
            "trace": {"path": str(trace), "steps": [step, step + TRACED - 1]},
        }
    engine = pipeline_engine(
        specs,
        micro_batches=arguments.micro_batches,
        dynmo=dynmo,
        module_class=DualPipeVModule if name == "dualpipev" else PipelineModule,
    )
    if schedule is not None:
        engine.stage.schedule.decide(schedule)
    return Arm(name, engine, schedule, data(), trace)


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random micro-batches, the same for every arm."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(1, WIDTH, generator=generator), torch.randn(1, WIDTH, generator=generator)


def differing_arms(arms: list[Arm]) -> list[str]:
    """Name the arms whose weights are not bitwise those of the first. Collective."""
    models = [weights(arm.engine) for arm in arms]
    return [arm.name for arm, model in zip(arms, models) if model != models[0]]


def weights(engine: Any) -> dict[str, bytes]:
    """Collect the bytes of all weights of the model. Collective."""
    here = {name: weight.detach().numpy().tobytes() for name, weight in engine.module.named_parameters()}
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, here)
    return {name: content for part in every for name, content in part.items()}


# -- what it comes to --------------------------------------------------------------------------------------


def row(arm: Arm, stock: Arm, costs: PassCosts, work: float, micro_batches: int) -> dict[str, Any]:
    """Make an arm's figures; "over stock" is the median of the rounds, so that drift cancels.

    Args:
        work: seconds of a batch in which every stage works as long, and never waits.
    """
    seconds = median(arm.seconds)
    simulated, traced = simulated_seconds(arm, costs, micro_batches), replayed_batches(arm, costs.num_stages)
    replayed = median(one["replayed_seconds"] for one in traced) if traced else None
    return {
        "arm": arm.name,
        "seconds": seconds,
        "seconds_spread": [min(arm.seconds), max(arm.seconds)],
        "share_of_work_bound": work / seconds,
        "speedup_over_stock": median(other / own for other, own in zip(stock.seconds, arm.seconds)),
        "simulated_seconds": simulated,
        "over_simulated": None if simulated is None else seconds / simulated,
        "replayed_seconds": replayed,
        "over_replayed": None if replayed is None else seconds / replayed,
        "splits": 0 if arm.schedule is None else arm.schedule.splits,
        "batches": arm.seconds,
        "traced": traced,
    }


def simulated_seconds(arm: Arm, costs: PassCosts, micro_batches: int) -> float | None:
    """Simulate a batch with the seconds that layers are told; None: of DualPipeV there is no simulation."""
    if arm.schedule is not None:
        return replay(arm.schedule, costs).iteration_seconds
    if arm.name != STOCK:
        return None
    stock = simulate(costs.forward_seconds, costs.backward_seconds, micro_batches, sends="rendezvous")
    return float(stock.iteration_seconds)


def replayed_batches(arm: Arm, num_stages: int) -> list[dict[str, float]]:
    """Replay the order of each traced batch with the seconds that its passes took, beside how long they all took."""
    if arm.schedule is None or arm.trace is None:
        return []
    batches = traced_batches(json.loads(arm.trace.read_text())["traceEvents"], num_stages)
    return [
        {"seconds": batch.seconds, "replayed_seconds": replay(arm.schedule, batch.costs).iteration_seconds}
        for batch in batches
    ]


COLUMNS = {
    "of work bound": "share_of_work_bound",
    "over stock": "speedup_over_stock",
    "simulated": "simulated_seconds",
    "measured over that": "over_simulated",
    "replayed": "replayed_seconds",
    "measured over it": "over_replayed",
}


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(
        f"\n{found['stages']} stages, {arguments.layers} layers, {arguments.micro_batches} micro-batches, forward "
        f"{arguments.pass_ms:g} ms a layer, {arguments.split} split, {arguments.loads} loads"
    )
    cells = []
    for one in found["arms"]:
        low, high = one["seconds_spread"]
        figures = ("-" if one[key] is None else f"{one[key]:.3f}" for key in COLUMNS.values())
        cells.append((ARMS[one["arm"]], f"{one['seconds']:.3f} ({low:.3f} to {high:.3f})", *figures))
    print_table(("schedule", "seconds per batch", *COLUMNS), cells)
    differing = ", ".join(ARMS[name] for name in found["differing_weights"])
    print(f"weights differ under {differing}" if differing else "weights are bitwise equal")

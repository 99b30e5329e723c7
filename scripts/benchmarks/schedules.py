"""Pipeline schedules side by side: DeepSpeed's engines and ours over the same layers, batch by batch in turns."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule

from benchmarks.arms import most_over_ranks, say, timed, turns
from benchmarks.emulation import pipeline_engine
from benchmarks.scaling import WIDTH, LayerSeconds, ScalingBlock, chunk_costs, layer_seconds
from benchmarks.traced_passes import traced_batches
from ds_dynmo.cli.command_line import print_table
from ds_dynmo.models.gpt import Block
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.partitioners import simulate
from ds_dynmo.placement import owners_of
from ds_dynmo.schedules import (
    PassBytes,
    PassCosts,
    Schedule,
    best_schedule,
    one_f_one_b,
    one_f_one_b_limit,
    period_seconds,
    replay,
)
from simulation.statics import SHAPES

STOCK = "stock"
ZERO_BUBBLE, WAITING = "zero_bubble", "zero_bubble_waiting"
DUALPIPEV, AUTO = "dualpipev", "auto"
TRACED = 3  # batches, after those that are timed
WARM_UP = 3  # batches; from the second on, those whose order is decided have a profile
SEARCHED = (ZERO_BUBBLE, WAITING, *SHAPES)  # arms whose order is the shortest that is found
ARMS = {
    STOCK: "DeepSpeed's 1F1B",
    DUALPIPEV: "DeepSpeed's DualPipeV",
    "1f1b": "1F1B's order",
    ZERO_BUBBLE: "zero bubble",
    WAITING: "zero bubble, waits for the loss",
    "v": "V",
    "loop": "loop",
    AUTO: "auto",
}


@dataclass
class Arm:
    """An engine and what its batches took.

    Attributes:
        trace: where our engine writes what the last batches did.
        costs: of its chunks, as sleeping layers are told; None: not known, or DualPipeV's, which is not simulated.
        decides: its order is found from a profile.
        in_a_row: batches in each of its turns.
    """

    name: str
    engine: Any
    data: Iterator[tuple[torch.Tensor, torch.Tensor]]
    trace: Path | None
    costs: PassCosts | None = None
    decides: bool = False
    in_a_row: int = 1
    seconds: list[float] = field(default_factory=list)

    def batch(self) -> float:
        """Train a batch. Collective."""
        return timed(self._train)

    def turn(self) -> float:
        """Train the batches of a turn. Return the seconds of one, from the end of the first. Collective."""
        if self.in_a_row == 1:
            return self.batch()
        ends = []
        torch.distributed.barrier()
        for _ in range(self.in_a_row):
            self._train()
            ends.append(time.perf_counter())
        return most_over_ranks([(ends[-1] - ends[0]) / (self.in_a_row - 1)])[0]

    def _train(self) -> None:
        loss = self.engine.train_batch(self.data)
        if self.name == WAITING:
            loss.item()

    def predicted_seconds(self, schedule: Schedule, costs: PassCosts) -> float:
        """Simulate a batch. Return its seconds, or those from one to the next where batches overlap."""
        if self.in_a_row == 1 or self.name == WAITING:
            return replay(schedule, costs).iteration_seconds
        return period_seconds(schedule.orders, schedule.micro_batches, costs)

    def profile(self) -> None:
        """Let a decision follow the next batch, if one is wanted."""
        if self.decides:
            self.engine.model_changed("an order is to be decided")

    @property
    def schedule(self) -> Schedule | None:
        """Return the schedule in force; None: DeepSpeed's own."""
        if self.trace is None:
            return None
        found: Schedule | None = self.engine.stage.schedule.schedule_for(
            self.engine.stage.placement, self.engine.micro_batches
        )
        return found


class Layers:
    """The model that all arms train: sleeping layers, or transformer blocks that compute.

    Attributes:
        specs: of its layers.
        seconds: which sleeping layers are told; None: they compute.
        work_seconds: of a batch in which every stage works as long, and never waits; None: not known.
        shape: of a micro-batch.
    """

    def __init__(self, arguments: argparse.Namespace, stages: int) -> None:
        self.seconds: list[LayerSeconds] | None = None
        self.work_seconds: float | None = None
        if arguments.compute == "real":
            sequence, hidden = arguments.sequence_length, arguments.hidden_size
            config = GPTConfig(hidden_size=hidden, heads=4, sequence_length=sequence)
            self.specs = [LayerSpec(Block, config, layer + 1) for layer in range(arguments.layers)]
            self.shape: tuple[int, ...] = (1, sequence, hidden)
            return
        seconds = layer_seconds(
            arguments.loads, arguments.split, arguments.layers, arguments.pass_ms / 1e3, seed=arguments.seed
        )
        self.specs = [LayerSpec(ScalingBlock, layer, one) for layer, one in enumerate(seconds)]
        self.seconds = seconds
        self.work_seconds = arguments.micro_batches * sum(one.forward + one.backward for one in seconds) / stages
        self.shape = (1, WIDTH)

    def costs(self, name: str, stages: int) -> PassCosts | None:
        """Return what the chunks of an arm are told."""
        if self.seconds is None or name == DUALPIPEV:
            return None
        return chunk_costs(self.seconds, owners_of(SHAPES.get(name, "chain"), stages))


def shortest(costs: PassCosts, micro_batches: int, memory: float) -> Schedule:
    """Find the shortest order that holds no more than ``memory`` times 1F1B, where every micro-batch holds as much."""
    sizes = PassBytes.equal(costs.num_chunks)
    limits = one_f_one_b_limit(sizes, micro_batches, memory, owners=costs.owners)
    return best_schedule(costs, micro_batches, sizes, limits, back_to_back=memory > 1).schedule


def arms_for(
    asked: list[str] | None, compute: str, stages: int, layers: int, micro_batches: int, in_a_row: int = 1
) -> list[str]:
    """Choose the arms that are run: two chunks need two layers per stage, "auto" a profile.

    DualPipeV needs two micro-batches per stage as well.

    Args:
        in_a_row: batches of each turn; it makes no difference to one alone whether the loss is waited for.
    """
    in_two = layers >= 2 * stages
    needs = {
        DUALPIPEV: in_two and micro_batches >= 2 * stages,
        **dict.fromkeys(SHAPES, in_two),
        AUTO: compute == "real",
        WAITING: in_a_row > 1,
    }
    left_out = {name for name, runs in needs.items() if not runs}
    return [arm for arm in ARMS if (not asked or arm in (*asked, STOCK)) and arm not in left_out]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the arms, replay their orders, and compare what they trained. Collective."""
    stages = torch.distributed.get_world_size()
    layers = Layers(arguments, stages)
    sizes = arguments.layers, arguments.micro_batches, arguments.back_to_back
    names = arms_for(arguments.arm, arguments.compute, stages, *sizes)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        torch.distributed.broadcast_object_list(shared)
        arms = [make_arm(name, layers, arguments, Path(shared[0])) for name in names]
        say("engines are built")
        for number in range(WARM_UP):
            for arm in arms:
                if number == 1:
                    arm.profile()
                arm.batch()
        say("warmed up")
        for number in range(arguments.batches):
            for arm in turns(arms, number):
                arm.seconds.append(arm.turn())
            say(f"round {number + 1} of {arguments.batches}")
        differing = differing_arms(arms)
        for number in range(TRACED):
            for arm in turns([arm for arm in arms if arm.trace is not None], number):
                arm.batch()
        rows = [row(arm, arms[0], layers) for arm in arms] if is_first() else []
        torch.distributed.barrier()
    return {"stages": stages, "work_seconds": layers.work_seconds, "differing_weights": differing, "arms": rows}


def is_first() -> bool:
    return bool(torch.distributed.get_rank() == 0)


def make_arm(name: str, layers: Layers, arguments: argparse.Namespace, folder: Path) -> Arm:
    """Make an arm's engine. Ours trace the batches after the last one that is timed, and never move layers."""
    micro_batches, costs = arguments.micro_batches, layers.costs(name, torch.distributed.get_world_size())
    decides = name == AUTO or (name in SEARCHED and costs is None)
    dynmo, trace = None, None
    if name not in (STOCK, DUALPIPEV):
        step, trace = WARM_UP + arguments.batches * arguments.back_to_back + 1, folder / f"{name}.json"
        kind = name if name == AUTO else SHAPES.get(name, "zero_bubble")
        dynmo = {
            **({"interval": 0, "min_improvement": 0.99} if decides else {"enabled": False}),
            "log": False,
            "monitor": False,
            "randomness": {"per_layer": False},
            "schedule": {"kind": kind, "memory": arguments.memory},
            "trace": {"path": str(trace), "steps": [step, step + TRACED - 1]},
        }
    engine = pipeline_engine(
        layers.specs,
        micro_batches=micro_batches,
        dynmo=dynmo,
        module_class=DualPipeVModule if name == DUALPIPEV else PipelineModule,
    )
    if name in SEARCHED and costs is not None:
        engine.stage.schedule.decide(shortest(costs, micro_batches, arguments.memory))
    elif name == "1f1b":
        engine.stage.schedule.decide(one_f_one_b(engine.num_stages, micro_batches))
    return Arm(name, engine, data(layers.shape), trace, costs, decides, arguments.back_to_back)


def data(shape: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random micro-batches, the same for every arm."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def differing_arms(arms: list[Arm]) -> list[str]:
    """Name the arms whose weights are not bitwise those of the first. Collective."""
    models = [weights(arm.engine) for arm in arms]
    return [arm.name for arm, model in zip(arms, models) if model != models[0]]


def weights(engine: Any) -> dict[str, bytes]:
    """Collect the bytes of all weights of the model. Collective."""
    here = {name: weight.detach().cpu().numpy().tobytes() for name, weight in engine.module.named_parameters()}
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, here)
    return {name: content for part in every for name, content in part.items()}


# -- what it comes to --------------------------------------------------------------------------------------


def row(arm: Arm, stock: Arm, layers: Layers) -> dict[str, Any]:
    """Make an arm's figures; "over stock" is the median of the rounds, so that drift cancels."""
    seconds, ratios = median(arm.seconds), [other / own for other, own in zip(stock.seconds, arm.seconds)]
    quarters = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [*ratios] * 3
    simulated, traced = simulated_seconds(arm), replayed_batches(arm)
    replayed = median(one["replayed_seconds"] for one in traced) if traced else None
    return {
        "arm": arm.name,
        "seconds": seconds,
        "seconds_spread": [min(arm.seconds), max(arm.seconds)],
        "share_of_work_bound": None if layers.work_seconds is None else layers.work_seconds / seconds,
        "speedup_over_stock": median(ratios),
        "speedup_over_stock_quartiles": [quarters[0], quarters[2]],
        "simulated_seconds": simulated,
        "over_simulated": None if simulated is None else seconds / simulated,
        "replayed_seconds": replayed,
        "over_replayed": None if replayed is None else seconds / replayed,
        "is_ours": arm.schedule is not None,
        "splits": 0 if arm.schedule is None else arm.schedule.splits,
        "batches": arm.seconds,
        "traced": traced,
    }


def simulated_seconds(arm: Arm) -> float | None:
    """Simulate a batch with the seconds that layers are told; None: they are not told."""
    if arm.costs is None:
        return None
    if arm.schedule is not None:
        return arm.predicted_seconds(arm.schedule, arm.costs)
    return simulate(arm.costs.forward_seconds, arm.costs.backward_seconds, arm.engine.micro_batches).iteration_seconds


def replayed_batches(arm: Arm) -> list[dict[str, float]]:
    """Replay the order of each traced batch with the seconds that its passes took, beside how long they all took."""
    schedule = arm.schedule
    if schedule is None or arm.trace is None:
        return []
    batches = traced_batches(json.loads(arm.trace.read_text())["traceEvents"], schedule.owners, schedule.orders)
    return [
        {"seconds": batch.seconds, "replayed_seconds": arm.predicted_seconds(schedule, batch.costs)}
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
    told = f"forward {arguments.pass_ms:g} ms a layer, {arguments.split} split, {arguments.loads} loads"
    real = f"hidden size {arguments.hidden_size}, {arguments.sequence_length} tokens"
    print(
        f"\n{found['stages']} stages, {arguments.layers} layers, {arguments.micro_batches} micro-batches, "
        f"{real if arguments.compute == 'real' else told}"
    )
    cells = []
    for one in found["arms"]:
        (low, high), (first, third) = one["seconds_spread"], one["speedup_over_stock_quartiles"]
        figures = ("-" if one[key] is None else f"{one[key]:.3f}" for key in COLUMNS.values())
        seconds = f"{one['seconds']:.3f} ({low:.3f} to {high:.3f})"
        cells.append((name_of(one), seconds, *figures, f"{first:.3f} to {third:.3f}"))
    print_table(("schedule", "seconds per batch", *COLUMNS, "middle half of rounds, over stock"), cells)
    differing = ", ".join(ARMS[name] for name in found["differing_weights"])
    print(f"weights differ under {differing}" if differing else "weights are bitwise equal")


def name_of(found: dict[str, Any]) -> str:
    """Name an arm; of one that may choose, say what it chose."""
    name = ARMS[found["arm"]]
    if found["arm"] != AUTO:
        return name
    return f"{name}: ours, {found['splits']} splits" if found["is_ours"] else f"{name}: DeepSpeed's 1F1B"

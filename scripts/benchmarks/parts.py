"""The parts of scripts/benchmark.py that need one engine: one change, profiles, the cost of a rebalance.

    deepspeed --num_gpus 2 scripts/benchmark.py freezing --compute sleep
    deepspeed --num_gpus 2 scripts/benchmark.py freezing --compute real
    deepspeed --num_gpus 2 scripts/benchmark.py profile --compute real
    deepspeed --num_gpus 2 scripts/benchmark.py overhead --compute real

Set OMP_NUM_THREADS=1: one thread per stage. ``--json FILE`` writes the figures too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_dynmo
from ds_dynmo.engine.balancing.trigger import Reason, Request
from ds_dynmo.models.gpt import Block, GPTConfig
from ds_dynmo.partitioners import bottleneck
from scripts.startup import init_distributed

BLOCKS, FROZEN = 12, 6
SLEEP_SECONDS = 0.005  # forward; backward twice that


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        time.sleep(seconds)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return gradient * weight, torch.zeros_like(weight), None


class SleepingBlock(nn.Module):
    """Sleeps for its cost: stands in for an accelerator that computes while the CPU waits."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(hidden, self.weight, self.seconds)  # type: ignore[no-any-return]


class _Clock(torch.autograd.Function):
    """The identity; calls back when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, arrived: Callable[[], None]) -> torch.Tensor:
        ctx.arrived = arrived
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.arrived()
        return gradient, None


class SelfTimed(nn.Module):
    """A layer with clocks of its own, the truth that a profile is held against."""

    def __init__(self, typename: type[nn.Module], *arguments: Any) -> None:
        super().__init__()
        self.layer = typename(*arguments)
        self.forwards: list[float] = []
        self.recomputations: list[float] = []
        self.backwards: list[float] = []
        self._began = 0.0
        self.recording = False
        self.in_backward = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        outputs = _Clock.apply(self.layer(_Clock.apply(hidden, self._end)), self._begin)
        if self.recording:
            (self.recomputations if self.in_backward else self.forwards).append(time.perf_counter() - began)
        return outputs  # type: ignore[no-any-return]

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _end(self) -> None:
        if self.recording:
            self.backwards.append(time.perf_counter() - self._began)


def make_engine(layers: list[Any], arguments: argparse.Namespace, dynmo: dict[str, Any], interval: int = 0) -> Any:
    """An engine over ``layers``, uniformly split, whose loss is a mean square."""
    module = PipelineModule(
        layers=layers,
        num_stages=torch.distributed.get_world_size(),
        loss_fn=lambda outputs, labels: (outputs - labels).square().mean(),
        partition_method="uniform",
        activation_checkpoint_interval=interval,
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": arguments.micro_batches,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "dynmo": dynmo,
    }
    return ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]


def block_specs(arguments: argparse.Namespace, timed: bool = False) -> list[Any]:
    """Twelve equal blocks: real transformer blocks or sleeping ones."""
    if arguments.compute == "sleep":
        chosen: tuple[Any, ...] = (SleepingBlock, SLEEP_SECONDS)
        return [LayerSpec(SelfTimed, *chosen) if timed else LayerSpec(*chosen) for _ in range(BLOCKS)]
    config = GPTConfig(hidden_size=arguments.hidden_size, heads=4, sequence_length=arguments.sequence_length)
    return [
        LayerSpec(SelfTimed, Block, config, index) if timed else LayerSpec(Block, config, index)
        for index in range(BLOCKS)
    ]


def batches(arguments: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same random hidden state again and again."""
    width = 8 if arguments.compute == "sleep" else arguments.hidden_size
    length = 8 if arguments.compute == "sleep" else arguments.sequence_length
    hidden = torch.randn(1, length, width, generator=torch.Generator().manual_seed(0))
    while True:
        yield hidden, torch.zeros_like(hidden)


def timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def freeze_first(engine: Any, count: int) -> None:
    for index, module in engine.stage.layers.modules().items():
        if index < count:
            module.requires_grad_(False)
    engine.model_changed(f"first {count} layers are frozen")


def freezing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Iteration time at the static partition over that after the rebalance, alternating."""
    engine = make_engine(block_specs(arguments), arguments, {"interval": 0, "log": False})
    data = batches(arguments)
    static = engine.partition
    engine.train_batch(data), engine.train_batch(data)
    freeze_first(engine, FROZEN)
    engine.train_batch(data)  # profiled; a decision follows
    engine.train_batch(data)
    balanced, profile = engine.partition, engine.profile
    ratios, iterations = [], defaultdict(list)
    for _ in range(arguments.pairs):
        seconds = {}
        for name, partition in (("static", static), ("balanced", balanced)):
            engine.rebalance(partition)
            engine.train_batch(data)  # warm up: new shapes, new memory
            seconds[name] = statistics.mean(timed(lambda: engine.train_batch(data)) for _ in range(2))
            iterations[name].append(seconds[name])
        ratios.append(seconds["static"] / seconds["balanced"])
    costs = profile.costs("time")
    return {
        "partitions": [static, balanced],
        "static ms": 1e3 * statistics.median(iterations["static"]),
        "balanced ms": 1e3 * statistics.median(iterations["balanced"]),
        "ratio (median of pairs)": statistics.median(ratios),
        "ratio (least, most)": [min(ratios), max(ratios)],
        "ratio of profiled bottlenecks": bottleneck(costs, static) / bottleneck(costs, balanced),
        "block forward ms": [round(1e3 * layer.forward_seconds, 2) for layer in profile.layers],
        "block backward ms": [round(1e3 * layer.backward_seconds, 2) for layer in profile.layers],
    }


def profile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Profiled seconds against the layers' own clocks, and what a profiled batch costs."""
    figures: dict[str, Any] = {}
    for interval in (0, 1):
        engine = make_engine(block_specs(arguments, timed=True), arguments, {"interval": 0, "log": False}, interval)
        original = engine.profiler.one_pass
        data = batches(arguments)
        own = list(engine.stage.layers.modules().values())

        def one_pass(backward: bool, original: Any = original, own: list[Any] = own) -> Any:
            for layer in own:
                layer.in_backward = backward
            return original(backward)

        engine.profiler.one_pass = one_pass
        engine.train_batch(data), engine.train_batch(data)
        errors: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(arguments.pairs):
            for layer in own:
                layer.recording = True
                layer.forwards.clear(), layer.recomputations.clear(), layer.backwards.clear()
            engine.model_changed("measure")
            engine.balancer.trigger._pending = None
            samples = engine.profiler
            engine.train_batch(data)
            for index, layer in engine.stage.layers.modules().items():
                if not layer.backwards:
                    continue  # the first layer: its input needs no gradient, so its own clock has no end
                forward, backward = statistics.median(layer.forwards), statistics.median(layer.backwards)
                if layer.recomputations:
                    backward += statistics.median(layer.recomputations)
                errors["forward"].append(samples.samples.forward_seconds(index) / forward - 1)
                errors["backward"].append(samples.samples.backward_seconds(index) / backward - 1)
            engine.balancer.trigger._urgent = False
            for layer in own:
                layer.recording = False
        name = "checkpointed" if interval else "plain"
        for phase, found in errors.items():
            figures[f"{name} {phase}: profiled over own clock, median"] = 1 + statistics.median(found)
            measured_layers = len(found) // arguments.pairs
            figures[f"{name} {phase}: the layer that is farthest off"] = 1 + max(
                (statistics.median(found[place::measured_layers]) for place in range(measured_layers)), key=abs
            )
        engine.profiler.one_pass = original
    return figures


def overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """A profiled batch over one that is not, alternating; and profile, decide and migrate at interval 100."""
    engine = make_engine(block_specs(arguments), arguments, {"interval": 0, "log": False})
    data = batches(arguments)
    engine.train_batch(data), engine.train_batch(data)
    freeze_first(engine, FROZEN)
    for _ in range(3):
        engine.train_batch(data)
    ratios, profiled, plain = [], [], []
    for pair in range(arguments.pairs):
        seconds = {}
        for marked in (True, False) if pair % 2 else (False, True):
            if marked:
                engine.balancer.trigger.ask(Request(Reason.MODEL_CHANGED, "measure"))
            engine.balancer.trigger.decision_due = lambda batches: False
            seconds[marked] = timed(lambda: engine.train_batch(data))
            del engine.balancer.trigger.decision_due
            engine.balancer.trigger.decided(moved=False)
            engine.profiler.forget()
        ratios.append(seconds[True] / seconds[False])
        profiled.append(seconds[True])
        plain.append(seconds[False])
    batch = statistics.median(plain)
    engine.balancer.trigger.ask(Request(Reason.MODEL_CHANGED, "measure"))
    engine.train_batch(data)
    decision = engine.reports[-1]
    balanced, static = engine.partition, [0, FROZEN, BLOCKS]
    moves = [engine.rebalance(partition).migrate_seconds for _ in range(5) for partition in (static, balanced)]
    extra = max(0.0, statistics.median(profiled) - batch)
    total = extra + decision.profile_seconds + decision.decide_seconds + statistics.median(moves)
    return {
        "batch ms": 1e3 * batch,
        "profiled over plain batch (median of pairs)": statistics.median(ratios),
        "gather profile ms": 1e3 * decision.profile_seconds,
        "decide ms": 1e3 * decision.decide_seconds,
        "migrate ms (median of moves)": 1e3 * statistics.median(moves),
        "MiB per move": engine.reports[-1].bytes_moved / 2**20,
        "share of a run at interval 100": total / (100 * batch + total),
    }


PARTS = {"freezing": freezing, "profile": profile, "overhead": overhead}


def main(given: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(PARTS))
    parser.add_argument("--compute", choices=["sleep", "real"], default="sleep", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of measurements, default %(default)s")
    parser.add_argument("--micro-batches", type=int, default=16, help="per batch, default %(default)s")
    parser.add_argument("--hidden-size", type=int, default=256, help="of real blocks, default %(default)s")
    parser.add_argument("--sequence-length", type=int, default=256, help="of real blocks, default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    init_distributed()
    figures = PARTS[arguments.what](arguments)
    if torch.distributed.get_rank() == 0:
        print(f"\n{arguments.what}, {arguments.compute} layers, {torch.distributed.get_world_size()} stages")
        for name, value in figures.items():
            print(f"  {name}: {value:.4g}" if isinstance(value, float) else f"  {name}: {value}")
        if arguments.json:
            machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
            arguments.json.write_text(json.dumps({"machine": machine, **figures}, indent=2) + "\n")
    torch.distributed.barrier()

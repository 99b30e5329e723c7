"""Measure what one change, one profile and one rebalance gain and cost, with twelve equal blocks, sleeping or real."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.arms import Arm, last_report, profiling_seconds, timed
from benchmarks.emulation import MICRO_BATCH, EmulatedBlock, pipeline_engine
from ds_dynmo.models.gpt import Block
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.layer_numbers import local_layers
from ds_dynmo.partitioners import bottleneck

BLOCKS, FROZEN = 12, 6
SLEEP_SECONDS = 0.005  # forward; backward twice that
BY_HAND = {"interval": 0, "log": False}
STAYING = {**BY_HAND, "min_improvement": 0.99}  # profiles on request, and never moves by itself
OPTIONS = {"compute": "sleep", "pairs": 8, "micro_batches": 16, "hidden_size": 256, "sequence_length": 256}


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
    """A layer with its own clocks, with which a profile is compared."""

    def __init__(self, typename: type[nn.Module], *arguments: Any) -> None:
        super().__init__()
        self.layer = typename(*arguments)
        self.clear(checkpointed=False)

    def clear(self, *, checkpointed: bool) -> None:
        """Drop all times. If ``checkpointed``, passes with gradients count as backward."""
        self.checkpointed = checkpointed
        self.forwards: list[float] = []
        self.recomputations: list[float] = []
        self.backwards: list[float] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        outputs: torch.Tensor = _Clock.apply(self.layer(_Clock.apply(hidden, self._end)), self._begin)
        recomputed = self.checkpointed and torch.is_grad_enabled()
        (self.recomputations if recomputed else self.forwards).append(time.perf_counter() - began)
        return outputs

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _end(self) -> None:
        self.backwards.append(time.perf_counter() - self._began)

    def seconds(self) -> tuple[float, float]:
        """Return the medians of forward and backward passes; recomputation belongs to backward."""
        recomputed = statistics.median(self.recomputations) if self.recomputations else 0.0
        return statistics.median(self.forwards), statistics.median(self.backwards) + recomputed


def make_engine(
    arguments: argparse.Namespace, dynmo: dict[str, Any], *, own_clocks: bool = False, checkpoint_interval: int = 0
) -> Any:
    """Make an engine over twelve equal blocks, real transformer blocks or sleeping ones."""
    config = GPTConfig(hidden_size=arguments.hidden_size, heads=4, sequence_length=arguments.sequence_length)
    specs = []
    for index in range(BLOCKS):
        block = (EmulatedBlock, SLEEP_SECONDS) if arguments.compute == "sleep" else (Block, config, index)
        specs.append(LayerSpec(SelfTimed, *block) if own_clocks else LayerSpec(*block))
    return pipeline_engine(
        specs,
        micro_batches=arguments.micro_batches,
        dynmo=dynmo,
        checkpoint_interval=checkpoint_interval,
        gradient_clipping=1.0,
    )


def batches(arguments: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same random hidden state again and again."""
    shape = MICRO_BATCH if arguments.compute == "sleep" else (1, arguments.sequence_length, arguments.hidden_size)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    while True:
        yield hidden, torch.zeros_like(hidden)


def freeze_first(engine: Any, count: int) -> None:
    for layer, module in local_layers(engine.module):
        if layer < count:
            module.requires_grad_(False)
    engine.model_changed(f"first {count} layers are frozen")


def freezing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare iterations at the static partition with those after the rebalance, in turns."""
    engine, data = make_engine(arguments, BY_HAND), batches(arguments)
    static = engine.partition
    engine.train_batch(data), engine.train_batch(data)
    freeze_first(engine, FROZEN)
    engine.train_batch(data)  # profiled; a decision follows
    engine.train_batch(data)
    balanced, profile = engine.partition, engine.profile
    ratios, iterations = [], defaultdict(list)
    for _ in range(arguments.pairs):
        for name, partition in (("static", static), ("balanced", balanced)):
            engine.rebalance(partition)
            engine.train_batch(data)  # warm up: new shapes, new memory
            iterations[name].append(statistics.mean(timed(lambda: engine.train_batch(data)) for _ in range(2)))
        ratios.append(iterations["static"][-1] / iterations["balanced"][-1])
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
    """Compare profiled seconds with the layers' own clocks."""
    figures: dict[str, Any] = {}
    for name, interval in (("plain", 0), ("checkpointed", 1)):
        engine = make_engine(arguments, STAYING, own_clocks=True, checkpoint_interval=interval)
        data = batches(arguments)
        own: dict[int, Any] = dict(local_layers(engine.module))
        engine.train_batch(data), engine.train_batch(data)
        errors: dict[str, dict[int, list[float]]] = {"forward": defaultdict(list), "backward": defaultdict(list)}
        for _ in range(arguments.pairs):
            for layer in own.values():
                layer.clear(checkpointed=interval > 0)
            engine.model_changed("measure")
            engine.train_batch(data)
            for number, layer in own.items():
                if layer.backwards:  # not the model's first: its input needs no gradient, so its own clock has no end
                    forward, backward = layer.seconds()
                    seen = engine.profile.layers[number]
                    errors["forward"][number].append(seen.forward_seconds / forward - 1)
                    errors["backward"][number].append(seen.backward_seconds / backward - 1)
        for phase, of_layers in errors.items():
            every = [error for found in of_layers.values() for error in found]
            farthest = max(map(statistics.median, of_layers.values()), key=abs)
            figures[f"{name} {phase}: profiled over own clock, median"] = 1 + statistics.median(every)
            figures[f"{name} {phase}: the layer that is farthest off"] = 1 + farthest
    return figures


def overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what a profile adds to a batch, and what gathering it, deciding and migrating take."""
    staying, data = Arm("partition_time", make_engine(arguments, STAYING)), batches(arguments)
    staying.engine.train_batch(data), staying.engine.train_batch(data)
    freeze_first(staying.engine, FROZEN)
    for _ in range(3):
        staying.engine.train_batch(data)
    staying.new_costs()
    extra = profiling_seconds(staying, lambda: staying.engine.train_batch(data), arguments.pairs)
    batch = statistics.median(timed(lambda: staying.engine.train_batch(data)) for _ in range(arguments.pairs))
    engine = make_engine(arguments, BY_HAND)
    engine.train_batch(data)
    freeze_first(engine, FROZEN)
    engine.train_batch(data)  # profiled; a decision follows
    decision = last_report(engine)
    balanced = engine.partition
    static = [0, FROZEN, BLOCKS] if engine.num_stages == 2 else balanced  # on one stage nothing can move
    moves = [engine.rebalance(partition).migrate_seconds for _ in range(5) for partition in (static, balanced)]
    total = extra + decision.profile_seconds + decision.decide_seconds + statistics.median(moves)
    return {
        "batch ms": 1e3 * batch,
        "profiled over plain batch (median of pairs)": 1 + extra / batch,
        "gather profile ms": 1e3 * decision.profile_seconds,
        "decide ms": 1e3 * decision.decide_seconds,
        "migrate ms (median of moves)": 1e3 * statistics.median(moves),
        "MiB per move": last_report(engine).bytes_moved / 2**20,
        "share of a run at interval 100": total / (100 * batch + total),
    }


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(f"\n{arguments.what}, {arguments.compute} layers, {torch.distributed.get_world_size()} stages")
    for name, value in found.items():
        print(f"  {name}: {value:.4g}" if isinstance(value, float) else f"  {name}: {value}")

#!/usr/bin/env python3
"""Measure how close to the smallest bottleneck decentralised diffusion comes, and how long each balancer takes.

    scripts/partitioners.py                 # all tables, 2000 instances per row; some minutes
    scripts/partitioners.py --instances 100
    scripts/partitioners.py --orders        # the last table alone: how long it takes to find an order; seconds
    scripts/partitioners.py --large         # also DeepSpeed's balancer on 1000 layers x 128 stages; minutes

Gaps are to the optimum that ``balanced`` finds. "pairs" is what stages reach that only even out with a neighbour. Odd
instances start from the uniform partition, even ones from a random one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from statistics import fmean, median
from typing import Any, NamedTuple

from ds_dynmo.cli.command_line import print_table
from ds_dynmo.partitioners import (
    MemoryModel,
    PipelineModel,
    balanced,
    bottleneck,
    check_fits,
    diffusion,
    diffusion_step,
    diffusion_trace,
    lemma2_bound,
    makespan,
    uniform,
)
from ds_dynmo.schedules import PassBytes, PassCosts, best_schedule, one_f_one_b_limit

Cells = tuple[object, ...]
SEED = 0
SIZES = [(8, 3), (24, 8), (48, 24)]
FAMILIES: dict[str, Callable[[random.Random], float]] = {
    "uniform [0.5, 1.5]": lambda rng: rng.uniform(0.5, 1.5),
    "lognormal (0, 1)": lambda rng: rng.lognormvariate(0, 1),
}


class Run(NamedTuple):
    gap: float
    pairs_gap: float
    rounds: int
    rounds_bound: int
    floats_sent: int
    potential_rose: bool


def main(given: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=2000, help="random instances per row (default: %(default)s)")
    parser.add_argument("--large", action="store_true", help="time DeepSpeed's balancer on the largest models too")
    parser.add_argument("--orders", action="store_true", help="print the last table alone, of orders of passes")
    arguments = parser.parse_args(given)
    if not arguments.orders:
        of_balancers(arguments)
        print()
    print("One order of passes: layers x0.7 to x1.3, a pass in two parts takes 5% longer; medians of 5 pipelines")
    print_table(("stages x micro-batches", "milliseconds of 1 core: median, least, most", "over bound"), orders())


def of_balancers(arguments: argparse.Namespace) -> None:
    print("Diffusion without memory limits; gap = bottleneck / optimum - 1", flush=True)
    print_table(QUALITY, quality(arguments.instances))
    print("\nDiffusion within memory limits that bind (starts that fit; in flight and sizes as in the memory model)")
    print_table(("layers x stages", "mean gap", "worst gap", "optimum missed"), with_memory(arguments.instances // 2))
    print("\nMilliseconds of one decision, uniform [0.5, 1.5] costs (diffusion: all stages in one process)")
    balancers = ("balanced", "balanced, memory limits", "diffusion", "DeepSpeed partition_balanced")
    print_table(("layers x stages", *balancers), timings(arguments.large))
    print("\nThe shortest iteration; gain = least bottleneck's iteration / its own - 1")
    print_table(
        ("layers x stages", "micro-batches", "ms: median, least", "mean gain", "largest gain"),
        shortest(arguments.instances // 20),
    )


QUALITY = (
    *("layers x stages", "costs", "mean gap", "worst gap", "optimum missed", "pairs alone: mean, worst, missed"),
    *("rounds mean, most", "least Lemma 2 bound", "floats sent", "potential ended higher"),
)


def quality(instances: int) -> Iterator[Cells]:
    """Compare diffusion with the optimum, one row per size and family of costs."""
    for num_layers, num_stages in SIZES:
        for family, draw in FAMILIES.items():
            rng = random.Random(SEED)
            runs = [one_run(rng, case, num_layers, num_stages, draw) for case in range(instances)]
            gaps, pairs = [run.gap for run in runs], [run.pairs_gap for run in runs]
            rounds = [run.rounds for run in runs]
            yield (
                f"{num_layers} x {num_stages}",
                family,
                f"{fmean(gaps):.3%}",
                f"{max(gaps):.3%}",
                f"{missed(gaps):.1%}",
                f"{fmean(pairs):.1%}, {max(pairs):.1%}, {missed(pairs):.1%}",
                f"{fmean(rounds):.0f}, {max(rounds)}",
                min(run.rounds_bound for run in runs),
                f"{fmean(run.floats_sent for run in runs):.0f}",
                f"{fmean(run.potential_rose for run in runs):.1%}",
            )


def one_run(
    rng: random.Random, case: int, num_layers: int, num_stages: int, draw: Callable[[random.Random], float]
) -> Run:
    costs = [draw(rng) for _ in range(num_layers)]
    start = uniform(num_layers, num_stages) if case % 2 else random_start(rng, num_layers, num_stages)
    optimum = bottleneck(costs, balanced(costs, num_stages))
    trace = diffusion_trace(costs, num_stages, start)
    return Run(
        bottleneck(costs, trace.partition) / optimum - 1,
        bottleneck(costs, pairs_alone(costs, start)) / optimum - 1,
        trace.rounds,
        lemma2_bound(num_stages, sum(costs), min(costs)),
        trace.floats_sent,
        trace.potentials[-1] > trace.potentials[0],
    )


def pairs_alone(costs: list[float], start: list[int]) -> list[int]:
    """Find the partition that stages reach if each only evens out with its neighbours."""
    partition, quiet, parity = [*start], 0, 0
    while quiet < 2:
        before = [*partition]
        for stage in range(1 + parity, len(partition) - 1, 2):
            left, right = costs[partition[stage - 1] : partition[stage]], costs[partition[stage] : partition[stage + 1]]
            partition[stage] = partition[stage - 1] + diffusion_step(left, right)
        quiet, parity = (quiet + 1 if partition == before else 0), 1 - parity
    return partition


def with_memory(instances: int) -> Iterator[Cells]:
    """Compare diffusion with the optimum under tight memory limits, one row per size."""
    for num_layers, num_stages in SIZES[:2]:
        rng = random.Random(SEED)
        gaps: list[float] = []
        for _ in range(instances):
            costs = [rng.uniform(0.5, 1.5) for _ in range(num_layers)]
            start, memory = tight_memory(rng, num_layers, num_stages)
            found = diffusion(costs, num_stages, start, memory=memory)
            check_fits(found, memory)
            gaps.append(bottleneck(costs, found) / bottleneck(costs, balanced(costs, num_stages, memory=memory)) - 1)
        yield f"{num_layers} x {num_stages}", f"{fmean(gaps):.3%}", f"{max(gaps):.3%}", f"{missed(gaps):.1%}"


def tight_memory(rng: random.Random, num_layers: int, num_stages: int) -> tuple[list[int], MemoryModel]:
    """Draw a start, and limits that it fits with 0 to 40% to spare on each stage."""
    start = random_start(rng, num_layers, num_stages)
    static_bytes, activation_bytes = (tuple(rng.randint(50, 150) for _ in range(num_layers)) for _ in range(2))
    model = MemoryModel(static_bytes, activation_bytes, (0,) * num_layers, (0,) * num_stages, 2 * num_stages)
    needed = [model.stage_bytes(stage, *start[stage : stage + 2]) for stage in range(num_stages)]
    limits = tuple(int(bytes_ * rng.uniform(1, 1.4)) for bytes_ in needed)
    return start, MemoryModel(static_bytes, activation_bytes, (0,) * num_layers, limits, 2 * num_stages)


def timings(large: bool) -> Iterator[Cells]:
    """Time every balancer, one row per size; DeepSpeed's on the largest model only if ``large``."""
    from deepspeed.runtime.utils import partition_balanced

    for num_layers, num_stages in [*SIZES, (200, 64), (1000, 128)]:
        rng = random.Random(SEED)
        costs = [rng.uniform(0.5, 1.5) for _ in range(num_layers)]
        per_layer, limit = (1,) * num_layers, 3 * num_layers
        memory = MemoryModel(per_layer, per_layer, per_layer, (limit,) * num_stages, 8)
        yield (
            f"{num_layers} x {num_stages}",
            milliseconds(balanced, costs, num_stages, repeats=30),
            milliseconds(balanced, costs, num_stages, repeats=5, memory=memory),
            milliseconds(diffusion, costs, num_stages, repeats=3),
            milliseconds(partition_balanced, costs, num_stages, repeats=1) if large or num_layers <= 200 else "not run",
        )


def shortest(instances: int) -> Iterator[Cells]:
    """Time makespan, and compare its iteration with that of the least bottleneck, per size and micro-batches.

    Forward seconds are uniform, backward seconds 0.5 to 3 times as long, starts random.
    """
    for num_layers, num_stages in [*SIZES, (96, 16)]:
        for micro_batches in (num_stages // 2, num_stages, 2 * num_stages):
            rng = random.Random(SEED)
            seconds, gains = [], []
            for _ in range(instances):
                pipeline = random_pipeline(rng, num_layers, num_stages, micro_batches)
                costs = list(pipeline.layer_seconds)
                start = random_start(rng, num_layers, num_stages)
                began = time.perf_counter()
                found = makespan(costs, num_stages, start=start, pipeline=pipeline)
                seconds.append(time.perf_counter() - began)
                least = pipeline.iteration_seconds(balanced(costs, num_stages))
                gains.append(least / pipeline.iteration_seconds(found) - 1)
            milliseconds = f"{1e3 * median(seconds):.1f}, {1e3 * min(seconds):.1f}"
            yield (
                f"{num_layers} x {num_stages}",
                micro_batches,
                milliseconds,
                f"{fmean(gains):.1%}",
                f"{max(gains):.1%}",
            )


def random_pipeline(rng: random.Random, num_layers: int, num_stages: int, micro_batches: int) -> PipelineModel:
    forward = tuple(rng.uniform(0.5, 1.5) for _ in range(num_layers))
    backward = tuple(seconds * rng.uniform(0.5, 3) for seconds in forward)
    return PipelineModel(forward, backward, micro_batches, (1.0,) * num_stages)


def orders() -> Iterator[Cells]:
    """Time the search of an order, a row per size."""
    for num_stages, micro_batches in ((8, 16), (24, 48), (64, 256)):
        rng, seconds, over = random.Random(SEED), [], []
        for _ in range(5):
            forward, first, second = ([rng.uniform(0.7, 1.3) for _ in range(num_stages)] for _ in range(3))
            costs = PassCosts.chain(forward, first, second, [(i + w) / 1.05 for i, w in zip(first, second)])
            sizes = PassBytes.equal(num_stages)
            began = time.process_time()
            found = best_schedule(costs, micro_batches, sizes, one_f_one_b_limit(sizes, micro_batches))
            seconds.append(1e3 * (time.process_time() - began))
            over.append(found.iteration_seconds / found.lower_bound_seconds - 1)
        times = f"{median(seconds):.0f}, {min(seconds):.0f}, {max(seconds):.0f}"
        yield f"{num_stages} x {micro_batches}", times, f"{median(over):.1%}"


def milliseconds(balancer: Callable[..., Any], *arguments: Any, repeats: int, **options: Any) -> str:
    """Time a balancer, and return the median of ``repeats``."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        balancer(*arguments, **options)
        seconds.append(time.perf_counter() - began)
    return f"{1000 * median(seconds):.2f}"


def random_start(rng: random.Random, num_layers: int, num_stages: int) -> list[int]:
    return [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]


def missed(gaps: list[float]) -> float:
    return fmean(gap > 0 for gap in gaps)


if __name__ == "__main__":
    main(sys.argv[1:])

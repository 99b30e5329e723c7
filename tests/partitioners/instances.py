"""Random instances, and the exact answers from trying every partition."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from ds_dynmo.partitioners import LayerPasses, MemoryModel, PassModel, PipelineModel

KINDS = ("ints", "ties", "zeros", "uniform", "lognormal", "ratios")


def random_costs(rng: random.Random, num_layers: int, kind: str) -> list[float]:
    draw: Callable[[], float] = {
        "ints": lambda: rng.randrange(20),
        "ties": lambda: rng.choice([1, 1, 2]),
        "zeros": lambda: rng.choice([0.0, 0.0, 0.1, 0.7]),
        "uniform": lambda: rng.uniform(0.5, 1.5),
        "lognormal": lambda: rng.lognormvariate(0, 1),
        "ratios": lambda: 10 ** rng.uniform(-12, 12),
    }[kind]
    return [draw() for _ in range(num_layers)]


def random_start(rng: random.Random, num_layers: int, num_stages: int) -> list[int]:
    return [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]


def random_memory(rng: random.Random, num_layers: int, num_stages: int) -> MemoryModel:
    def layer_bytes(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(most) for _ in range(num_layers))

    static_bytes, activation_bytes, input_bytes = layer_bytes(12), layer_bytes(9), layer_bytes(4)
    micro_batches = rng.randint(1, 6)
    share = (sum(static_bytes) + min(micro_batches, num_stages) * sum(activation_bytes)) / num_stages
    limits = tuple(int(share * rng.uniform(0.6, 2)) for _ in range(num_stages))
    interval = rng.choice([0, 0, 1, 2, 3])
    return MemoryModel(static_bytes, activation_bytes, input_bytes, limits, micro_batches, interval)


def every_partition(num_layers: int, num_stages: int) -> Iterator[list[int]]:
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield [0, *inner, num_layers]


def plain_bottleneck(costs: list[float], partition: list[int]) -> float:
    return max(math.fsum(costs[start:stop]) for start, stop in zip(partition, partition[1:]))


def slowest_seconds(costs: list[float], partition: Sequence[int], speeds: list[float]) -> float:
    """Return the seconds of the slowest stage, where a layer takes its cost divided by the stage's speed."""
    return max(math.fsum(costs[a:b]) / speed for a, b, speed in zip(partition, partition[1:], speeds))


def overshoot(memory: MemoryModel, partition: list[int]) -> int:
    """Return the bytes by which the worst stage exceeds its limit; not positive if all fit."""
    return max(
        memory.stage_bytes(stage, *partition[stage : stage + 2]) - memory.limits[stage]
        for stage in range(len(memory.limits))
    )


def partitions_that_fit(partitions: Iterable[list[int]], memory: MemoryModel | None) -> list[list[int]]:
    """Return those of ``partitions`` that keep every stage within its limit."""
    return [partition for partition in partitions if memory is None or overshoot(memory, partition) <= 0]


def pipeline_of(passes: PassModel) -> PipelineModel:
    layers = passes.layers
    return PipelineModel(
        layers.forward_seconds,
        layers.backward_seconds,
        passes.micro_batches,
        passes.speeds,
        layers.static_bytes,
        passes=passes,
    )


def random_passes(
    rng: random.Random,
    layers: int = 7,
    stages: int = 3,
    micro_batches: int = 5,
    interval: int = 0,
    link_seconds: float = 0.0,
) -> PassModel:
    """Make random layers; every third has no weight gradient, and the first is sometimes frozen."""
    forward = [rng.uniform(0.3, 1.7) for _ in range(layers)]
    backward = [2 * one * rng.uniform(0.7, 1.3) for one in forward]
    frozen = rng.choice([0, 1])
    backward[:frozen] = [0.0] * frozen
    weights = [0.0 if number % 3 == 2 else 0.4 * one for number, one in enumerate(backward)]
    inputs = [1.05 * one - weight for one, weight in zip(backward, weights)]
    activations = tuple(round(1000 * one) for one in forward)
    of_layers = LayerPasses(
        tuple(forward),
        tuple(inputs),
        tuple(weights),
        tuple(backward),
        tuple(rng.randrange(1000) for _ in range(layers)),
        activations,
        tuple(size // 10 for size in activations),
        tuple(round(rng.uniform(0.5, 1.1) * size) for size in activations),
        frozen_layers=frozen,
        checkpoint_interval=interval,
    )
    speeds = tuple(rng.choice([1.0, 0.8]) for _ in range(stages))
    return PassModel(of_layers, micro_batches, speeds, link_seconds=link_seconds)


def memory_of(passes: PassModel, interval: int) -> MemoryModel:
    """Count the same layers as the memory model does, without limits."""
    layers = passes.layers
    sizes = layers.static_bytes, layers.activation_bytes, layers.input_bytes
    return MemoryModel(*sizes, (0,) * len(passes.speeds), passes.micro_batches, interval)

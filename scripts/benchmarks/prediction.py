"""How well the simulated 1F1B iteration predicts the measured one: random layer costs under random partitions.

Layers sleep. Three predictions of each draw, with the sends that the engine's own decisions assume (a gloo send ends
with its receipt) but for the first:

"ideal": from the seconds that layers are told to sleep, with messages that take no time;
"profile": from a profiled batch's seconds per layer, which is what DynMo decides with;
"fitted": likewise, plus what DeepSpeed's engine takes for a pass beside its layers, for a message, and once for an
iteration (the optimizer's step, the loss). All three are fitted to every other draw, by least squares of the relative
errors, and tried on the draws between them, so that both halves see the same of what drifts on the machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.arms import quietly, say, timed
from benchmarks.emulation import data, make_engine, random_phase, set_loads, told_seconds
from ds_dynmo.partitioners import simulate

SPREAD = 0.6  # of the logarithm of costs
MOST_STEPS, STEP_SECONDS = 50, 1e-6  # of the fit

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Draw:
    """One pipeline that was timed.

    Attributes:
        seconds: of an iteration, the median.
        told: forward and backward seconds that each stage is told to sleep, per micro-batch.
        profiled: those that a profile saw.
    """

    seconds: float
    told: tuple[list[float], list[float]]
    profiled: tuple[list[float], list[float]]
    partition: list[int]


@dataclass(frozen=True)
class Fit:
    """What the engine adds.

    Attributes:
        pass_seconds: to each forward and each backward pass of a stage.
        link_seconds: to each message.
        iteration_seconds: once.
    """

    pass_seconds: float = 0.0
    link_seconds: float = 0.0
    iteration_seconds: float = 0.0

    def predicts(self, stages: tuple[list[float], list[float]], micro_batches: int) -> float:
        """Seconds of an iteration."""
        forward, backward = ([seconds + self.pass_seconds for seconds in passes] for passes in stages)
        links = self.link_seconds if len(forward) > 1 else 0.0
        found = simulate(forward, backward, micro_batches, links, sends="rendezvous")
        return found.iteration_seconds + self.iteration_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draws", type=int, default=12, help="of costs and a partition, default %(default)s")
    parser.add_argument("--batches", type=int, default=3, help="that are timed of each, default %(default)s")
    parser.add_argument("--layers-per-stage", type=int, default=3, help="on average, default %(default)s")
    parser.add_argument("--micro-batches", type=int, default=16, help="per iteration, default %(default)s")
    parser.add_argument("--forward-ms", type=float, default=8.0, help="of a layer, the median, default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of costs and partitions, default %(default)s")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every draw; fit to every other one, and try the fit on the draws between them."""
    if arguments.draws < 4 or min(arguments.batches, arguments.layers_per_stage, arguments.micro_batches) < 1:
        raise SystemExit("emulate.py prediction: --draws should be at least 4, the other numbers at least 1")
    draws = timed_draws(arguments)
    fitted = fit(draws[::2], arguments.micro_batches)
    errors = errors_of(draws[1::2], fitted, arguments.micro_batches)
    stages = torch.distributed.get_world_size()
    return {"stages": stages, "fit": asdict(fitted), "errors": errors, "draws": [asdict(draw) for draw in draws]}


def timed_draws(arguments: argparse.Namespace) -> list[Draw]:
    """Every draw, timed. Collective."""
    stages = torch.distributed.get_world_size()
    layers = stages * arguments.layers_per_stage
    engine = quietly(partial(make_engine, "dense", layers=layers, micro_batches=arguments.micro_batches, interval=0))
    chooser, batches, draws = np.random.default_rng(arguments.seed), data(), []
    forward_seconds = arguments.forward_ms / 1e3
    for number in range(arguments.draws):
        phase = random_phase(chooser, layers, SPREAD)
        inner = sorted(chooser.choice(np.arange(1, layers), size=stages - 1, replace=False).tolist())
        partition = [0, *inner, layers]
        engine.rebalance(partition)
        set_loads(engine, phase, forward_seconds)
        engine.model_changed("another draw")
        engine.train_batch(batches)  # profiled
        seconds = statistics.median(timed(lambda: engine.train_batch(batches)) for _ in range(arguments.batches))
        told = told_seconds(phase, forward_seconds)
        costs = engine.profile.layers
        seen = tuple(cost.forward_seconds for cost in costs), tuple(cost.backward_seconds for cost in costs)
        draws.append(Draw(seconds, _by_stage(told, partition), _by_stage(seen, partition), partition))
        say(f"draw {number + 1} of {arguments.draws}: {seconds:.3f} s")
    return draws


def _by_stage(passes: Sequence[Sequence[float]], partition: list[int]) -> tuple[list[float], list[float]]:
    forward, backward = ([0.0, *accumulate(seconds)] for seconds in passes)
    ends = list(zip(partition, partition[1:]))
    return [forward[stop] - forward[start] for start, stop in ends], [backward[b] - backward[a] for a, b in ends]


def fit(draws: list[Draw], micro_batches: int) -> Fit:
    """The numbers, none negative, that explain ``draws`` best: least squares of relative errors, by Gauss and Newton.

    An iteration is linear in them as long as the same passes make up its critical path.
    """

    def misfits(numbers: Floats) -> Floats:
        return np.array([Fit(*numbers).predicts(draw.profiled, micro_batches) / draw.seconds - 1 for draw in draws])

    best = np.zeros(3)
    errors = misfits(best)
    for _ in range(MOST_STEPS):
        slopes = [(misfits(best + STEP_SECONDS * unit) - errors) / STEP_SECONDS for unit in np.eye(3)]
        step = np.linalg.lstsq(np.array(slopes).T, -errors, rcond=None)[0]
        tries = [np.maximum(best + step / 2**halvings, 0.0) for halvings in range(6)]
        nearer = next((found for found in tries if np.sum(misfits(found) ** 2) < np.sum(errors**2)), None)
        if nearer is None:
            break
        best, errors = nearer, misfits(nearer)
    return Fit(*best.tolist())


def errors_of(draws: list[Draw], fitted: Fit, micro_batches: int) -> dict[str, list[float]]:
    """Relative errors of each prediction, by draw."""

    def errors(predicted: list[float]) -> list[float]:
        return [prediction / draw.seconds - 1 for prediction, draw in zip(predicted, draws)]

    return {
        "ideal": errors([simulate(*draw.told, micro_batches).iteration_seconds for draw in draws]),
        "profile": errors([Fit().predicts(draw.profiled, micro_batches) for draw in draws]),
        "fitted": errors([fitted.predicts(draw.profiled, micro_batches) for draw in draws]),
    }


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    others = len(found["errors"]["ideal"])
    print(f"\n{found['stages']} stages, {arguments.micro_batches} micro-batches, {others} draws that were not fitted")
    print(f"{'prediction':<12}{'mean error':>12}{'mean |error|':>14}{'largest':>10}")
    for name, values in found["errors"].items():
        sizes = [abs(value) for value in values]
        print(f"{name:<12}{statistics.fmean(values):>12.1%}{statistics.fmean(sizes):>14.1%}{max(sizes):>10.1%}")
    for name, value in found["fit"].items():
        print(f"fitted {name}: {1e3 * value:.2f} ms")

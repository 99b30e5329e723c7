"""Measure how well the simulated 1F1B iteration predicts the real one: random layer costs under random partitions.

"profile" and "fitted" assume sends as the engine's decisions do: a gloo send ends with its receipt. The numbers of
"fitted" come from every other draw, by least squares of the relative errors, and are tested on the draws between them,
so that both halves see the same drift of the machine.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.arms import say, timed
from benchmarks.emulation import data, make_engine, random_phase, set_loads, told_seconds
from benchmarks.rows import Passes, passes_of
from ds_dynmo.cli.command_line import check_at_least_1, print_table
from ds_dynmo.errors import ConfigError
from ds_dynmo.partitioners import loads, simulate

SPREAD = 0.6  # of the logarithm of costs
MOST_STEPS, STEP_SECONDS = 50, 1e-6  # of the fit

Floats = npt.NDArray[np.float64]
Stages = tuple[list[float], list[float]]  # forward and backward seconds of each


@dataclass(frozen=True)
class Draw:
    """One pipeline that was timed.

    Attributes:
        seconds: of an iteration, the median.
        told: forward and backward seconds that each stage is told to sleep, per micro-batch.
        profiled: those that a profile saw.
    """

    seconds: float
    told: Stages
    profiled: Stages
    partition: list[int]


@dataclass(frozen=True)
class Fit:
    """Seconds that the engine adds.

    Attributes:
        pass_seconds: to each forward and each backward pass of a stage.
        link_seconds: to each message.
        iteration_seconds: once.
    """

    pass_seconds: float = 0.0
    link_seconds: float = 0.0
    iteration_seconds: float = 0.0

    def predicts(self, stages: Stages, micro_batches: int) -> float:
        """Predict the seconds of an iteration."""
        forward, backward = ([seconds + self.pass_seconds for seconds in passes] for passes in stages)
        links = self.link_seconds if len(forward) > 1 else 0.0
        found = simulate(forward, backward, micro_batches, links, sends="rendezvous")
        return found.iteration_seconds + self.iteration_seconds


OPTIONS = {"draws": 12, "batches": 3, "layers_per_stage": 3, "micro_batches": 16, "forward_ms": 8.0, "seed": 0}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time random layer costs under random partitions, and compare with three predictions of the 1F1B iteration.

    Layers sleep. "ideal" uses the seconds that layers sleep, and messages that take no time. "profile" uses a profiled
    batch's seconds per layer, as DynMo's decisions do. "fitted" adds the engine's seconds per pass, per message, and
    per iteration.
    """
    check_at_least_1(arguments, "batches", "layers_per_stage", "micro_batches")
    if arguments.draws < 4:
        raise ConfigError(f"--draws {arguments.draws}: should be at least 4")
    draws = timed_draws(arguments)
    fitted = fit(draws[::2], arguments.micro_batches)
    errors = errors_of(draws[1::2], fitted, arguments.micro_batches)
    stages = torch.distributed.get_world_size()
    return {"stages": stages, "fit": asdict(fitted), "errors": errors, "draws": [asdict(draw) for draw in draws]}


def timed_draws(arguments: argparse.Namespace) -> list[Draw]:
    """Time every draw. Collective."""
    stages = torch.distributed.get_world_size()
    layers = stages * arguments.layers_per_stage
    engine = make_engine("dense", layers=layers, micro_batches=arguments.micro_batches, interval=0)
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
        seconds = median(timed(lambda: engine.train_batch(batches)) for _ in range(arguments.batches))
        told = told_seconds(phase, forward_seconds)
        seen = passes_of(engine.profile)
        draws.append(Draw(seconds, by_stage(told, partition), by_stage(seen, partition), partition))
        say(f"draw {number + 1} of {arguments.draws}: {seconds:.3f} s")
    return draws


def by_stage(passes: Passes, partition: list[int]) -> Stages:
    """Add up the layers' seconds by stage."""
    forward, backward = (loads(seconds, partition) for seconds in passes)
    return forward, backward


def fit(draws: list[Draw], micro_batches: int) -> Fit:
    """Find the numbers, none negative, that explain ``draws`` best: least squares of relative errors, Gauss-Newton.

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
    """Return the relative errors of each prediction, by draw."""

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
    cells = []
    for name, errors in found["errors"].items():
        sizes = [abs(error) for error in errors]
        cells.append((name, *(f"{number:.1%}" for number in (fmean(errors), fmean(sizes), max(sizes)))))
    print_table(("prediction", "mean error", "mean |error|", "largest"), cells)
    for name, value in found["fit"].items():
        print(f"fitted {name}: {1e3 * value:.2f} ms")

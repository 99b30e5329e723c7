"""Every balancer on one of the models of ds_configs, side by side, on real text.

Training is bitwise the same under every balancer, so that the layers' seconds that one engine profiles, those of
"partition_time", hold for all. Nobody knows true costs here, so there is no oracle.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_dynmo.models import dynamic_cases
from scripts.benchmark_arms import Arm, profiling_seconds, quietly, say, timed, turns
from scripts.benchmark_cases import settings_for
from scripts.benchmark_rows import Costs, Measured, Passes, Slice, rows
from scripts.emulation import BALANCERS
from scripts.loads import Case
from scripts.simulation import ARMS, STATICS
from scripts.train import batches, build_engine
from scripts.train_options import Run, prepare

REFERENCE = "partition_time"


@dataclass
class Trained:
    """A balancer's engine with its model's dynamic cases and its text."""

    arm: Arm
    run: Run
    cases: Any
    text: Any

    def batch(self, step: int) -> None:
        """Batch ``step`` of the run, with what the model changes before and after it."""
        for case in self.cases:
            case.before_batch(step)
        self.arm.engine.train_batch(self.text.iterate(step * self.arm.engine.micro_batches))
        for case in self.cases:
            case.after_batch(step + 1)


def real_rows(case: Case, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """The case's rows, on rank 0; others return none."""
    trained = [train(case.name, arm, arguments) for arm in ARMS if arm != "oracle"]
    say(f"{case.name}: engines are built")
    dense = next(one for one in trained if one.arm.name == "dense")
    dense.batch(0)
    dense.batch(0)
    profiling = profiling_seconds(dense.arm, lambda: dense.batch(0))
    size = arguments.steps // arguments.rounds
    for one in trained:
        one.arm.rounds = [[] for _ in range(arguments.rounds)]
    reference = next(one.arm.engine for one in trained if one.arm.name == REFERENCE)
    for number in range(arguments.rounds):
        unfinished = []
        for one in turns(trained, number):
            partition = tuple(one.arm.engine.partition)
            steps = range(number * size, (number + 1) * size)
            seconds = sum(timed(partial(one.batch, step)) for step in steps)
            unfinished.append((one.arm, partition, seconds, costs_of(one.arm, size, profiling)))
        for arm, partition, seconds, costs in unfinished:
            passes = passes_of(arm.engine if arm.name == "dense" else reference)
            arm.rounds[number].append(Slice(size, seconds, passes, partition, costs))
        say(f"{case.name}: round {number + 1} of {arguments.rounds}")
    if torch.distributed.get_rank():
        return []
    engine, run = reference, trained[0].run
    measured = {one.arm.name: Measured.of(one.arm.rounds, engine.micro_batches) for one in trained}
    tokens = engine.micro_batches * engine.train_micro_batch_size_per_gpu() * run.model.sequence_length
    return rows(case.name, measured, tokens)


def train(case: str, arm: str, arguments: argparse.Namespace) -> Trained:
    """An engine for ``arm`` over the case's model, or over the dense model of its size."""
    settings = settings_for(case, "dense" if arm == "dense" else "on")
    block = {**settings["dynmo"], "log": False}
    if arm in STATICS:
        start = "uniform" if arm == "static_uniform" else "parameters"
        block = {"enabled": False, "initial_partition": start}
    elif arm == "dense":
        block = {"interval": 0, "min_improvement": 0.99, "log": False, "profile": {"warmup_batches": 1_000_000}}
    else:
        block["balancer"], block["balance_by"] = BALANCERS[arm]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({**settings, "dynmo": block}))
        run = prepare(["--deepspeed_config", str(config), "--steps", str(arguments.steps)])
    engine = quietly(partial(build_engine, run))
    cases = dynamic_cases(run.model, engine, total_steps=run.steps)
    return Trained(Arm(arm, engine), run, cases, batches(run, engine, "train"))


def costs_of(arm: Arm, size: int, profiling: float) -> Costs:
    """Of the rebalances in the last slice; a profile is as long as the configuration says."""
    profile, decide, migrate = arm.new_costs()
    if not arm.dynamic:
        return 0.0, 0.0, 0.0
    decisions = sum(report.step > arm.engine.global_steps - size for report in arm.engine.reports)
    return profile + decisions * arm.engine.dynmo.profile.batches * profiling, decide, migrate


def passes_of(engine: Any) -> Passes:
    """Of the latest profile."""
    layers = engine.profile.layers
    return tuple(layer.forward_seconds for layer in layers), tuple(layer.backward_seconds for layer in layers)

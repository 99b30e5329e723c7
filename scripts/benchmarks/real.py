"""Every balancer on one of the models of ds_configs, side by side, on real text.

Engines take turns batch by batch, so that whatever else the machine does is shared alike.
Training is bitwise the same under every balancer, so that the layers' seconds that one engine profiles, those of
"partition_time", hold for all. Nobody knows true costs here, so there is no oracle. Static engines have the partitions
that a profile of the model before it changes says; of those that are alike one is run. All others start at the best of
them, the dense model at the uniform one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.arms import Arm, profiling_seconds, say, timed, turns
from benchmarks.emulated import ALWAYS
from benchmarks.emulation import BALANCERS
from benchmarks.rows import Costs, Measured, Passes, Slice, rows
from benchmarks.trained import Trained, settings_for, statics_of
from ds_dynmo.errors import ConfigError
from ds_dynmo.plan import Profile
from simulation.loads import Case
from simulation.runs import ARMS, STATICS
from simulation.statics import Statics

REFERENCE = "partition_time"
NOT_KNOWN_YET: Passes = ((), ())
PROBES = 16  # pairs of a profiled and a plain batch: single batches differ by a tenth, a profile adds a hundredth


def real_rows(case: Case, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """The case's rows, on rank 0; others return none."""
    known = statics_of(case.name, arguments.steps)
    trained = [train(case.name, arm, known, arguments) for arm in chosen(known, arguments)]
    say(f"{case.name}: engines are built")
    dense = next(one for one in trained if one.arm.name == "dense")
    dense.batch(0)
    dense.batch(0)
    profiling = profiling_seconds(dense.arm, lambda: dense.batch(0), PROBES)
    size = arguments.steps // arguments.rounds
    reference = next(one.arm.engine for one in trained if one.arm.name == REFERENCE)
    profiles: list[Profile | None] = []
    for number in range(arguments.rounds):
        seconds = dict.fromkeys((one.arm.name for one in trained), 0.0)
        for step in range(number * size, (number + 1) * size):
            for one in turns(trained, step):
                seconds[one.arm.name] += timed(partial(one.batch, step))
        for one in trained:
            costs, partition = costs_of(one.arm, size, profiling), tuple(one.arm.engine.partition)
            one.arm.rounds.append([Slice(size, seconds[one.arm.name], NOT_KNOWN_YET, partition, costs)])
        profiles.append(reference.profile)
        say(f"{case.name}: round {number + 1} of {arguments.rounds}")
    for one in trained:
        of_engine = [dense.arm.engine.profile] * arguments.rounds if one is dense else profiles
        one.arm.rounds = [
            [replace(done, passes=passes) for done in of_round]
            for of_round, passes in zip(one.arm.rounds, each_known(of_engine, arguments.steps), strict=True)
        ]
    if torch.distributed.get_rank():
        return []
    micro_batches, run = reference.micro_batches, trained[0].run
    measured = {one.arm.name: Measured.of(one.arm.rounds, micro_batches) for one in trained}
    tokens = micro_batches * reference.train_micro_batch_size_per_gpu() * run.model.sequence_length
    return rows(case.name, measured, tokens, known)


def chosen(known: Statics, arguments: argparse.Namespace) -> list[str]:
    """The arms that are run: what was asked for, what they are compared with, and what is profiled."""
    asked = (*arguments.balancer, *ALWAYS, REFERENCE) if arguments.balancer else ARMS
    return [arm for arm in ARMS if arm in asked and arm not in ("oracle", *known.alike)]


def train(case: str, arm: str, known: Statics, arguments: argparse.Namespace) -> Trained:
    """An engine for ``arm`` over the case's model, or over the dense model of its size."""
    settings = settings_for(case, "dense" if arm == "dense" else "on")
    block = {**settings["dynmo"], "log": False}
    if arm in STATICS:
        block = {"enabled": False, "log": False}
    elif arm == "dense":
        block = {"interval": 0, "min_improvement": 0.99, "log": False, "profile": {"warmup_batches": 1_000_000}}
    else:
        block["balancer"], block["balance_by"] = BALANCERS[arm]
    # The dense model may have another number of layers: early exit's has no exits.
    block["initial_partition"] = "uniform" if arm == "dense" else list(known.start(arm))
    return Trained.build(arm, {**settings, "dynmo": block}, arguments.steps)


def costs_of(arm: Arm, size: int, profiling: float) -> Costs:
    """Of the rebalances in the last slice; a profile is as long as the configuration says."""
    profile, decide, migrate = arm.new_costs()
    if not arm.dynamic:
        return 0.0, 0.0, 0.0
    decisions = sum(report.step > arm.engine.global_steps - size for report in arm.engine.reports)
    return profile + decisions * arm.engine.dynmo.profile.batches * profiling, decide, migrate


def each_known(profiles: Sequence[Profile | None], steps: int) -> list[Passes]:
    """What layers take in each round; before the first profile, what that says.

    Raises:
        ConfigError: no profile was taken.
    """
    known = next((profile for profile in profiles if profile is not None), None)
    if known is None:
        raise ConfigError(f"--steps {steps}: too few, no layer was profiled in them")
    return [passes_of(profile or known) for profile in profiles]


def passes_of(profile: Profile) -> Passes:
    forward = tuple(layer.forward_seconds for layer in profile.layers)
    return forward, tuple(layer.backward_seconds for layer in profile.layers)

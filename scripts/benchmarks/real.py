"""Run every balancer on one of the models of ds_configs, side by side, on real text.

Engines take turns batch by batch, so that other work on the machine slows all of them alike. Training is bitwise equal
under every balancer, so layers are profiled in one engine, that of "partition_time". True costs are not known, so there
is no oracle. Static partitions come from a profile of the model before it changes; of equal ones, one is run. All other
engines start at the best of them, the dense model at the uniform one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.arms import Arm, arm_block, chosen, profiling_seconds, say, turns
from benchmarks.rows import Costs, Measured, Slice, passes_of, rows
from benchmarks.trained import Trained, configuration, statics_of
from ds_dynmo.errors import ConfigError
from ds_dynmo.plan import Profile
from simulation.loads import Case
from simulation.statics import Statics

REFERENCE = "partition_time"  # its engine profiles the layers
PROBES = 16  # pairs of a profiled and a plain batch: single batches differ by a tenth, a profile adds a hundredth


def real_rows(case: Case, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the case, and return its rows on rank 0; other ranks return an empty list.

    Raises:
        ConfigError: no layer was profiled.
    """
    known = statics_of(case.name, arguments.steps)
    asked = [*arguments.balancer, REFERENCE] if arguments.balancer else None
    arms = [arm for arm in chosen(asked, known) if arm != "oracle"]
    trained = {arm: train(case.name, arm, known, arguments.steps) for arm in arms}
    say(f"{case.name}: engines are built")
    dense, reference = trained["dense"], trained[REFERENCE]
    dense.batch(0)
    dense.batch(0)
    profiling = profiling_seconds(dense.arm, lambda: dense.batch(0), PROBES)
    size = arguments.steps // arguments.rounds
    profiles: list[Profile | None] = []
    for number in range(arguments.rounds):
        for step in range(number * size, (number + 1) * size):
            for one in turns(list(trained.values()), step):
                one.timed_batch(step)
        for one in trained.values():
            costs, partition = costs_of(one.arm, size, profiling), tuple(one.arm.engine.partition)
            one.arm.rounds.append([Slice(size, sum(one.seconds[-size:]), ((), ()), partition, costs)])
        profiles.append(reference.arm.engine.profile)
        say(f"{case.name}: round {number + 1} of {arguments.rounds}")
    first = next((profile for profile in profiles if profile is not None), None)
    if first is None:
        raise ConfigError(f"--steps {arguments.steps}: too few, no layer was profiled in them")
    if torch.distributed.get_rank():
        return []
    measured = {}
    for arm, one in trained.items():
        seen = [dense.arm.engine.profile] * arguments.rounds if one is dense else [each or first for each in profiles]
        rounds = [[replace(done[0], passes=passes_of(profile))] for done, profile in zip(one.arm.rounds, seen)]
        measured[arm] = Measured(rounds, reference.arm.engine.micro_batches)
    return rows(case.name, measured, reference.tokens, known)


def train(case: str, arm: str, known: Statics, steps: int) -> Trained:
    """Build an engine for ``arm`` over the case's model, or over the dense model of its size."""
    block = arm_block(arm, configuration(case)["dynmo"])
    # The dense model may have another number of layers: early exit's has no exits.
    block["initial_partition"] = "uniform" if arm == "dense" else list(known.start(arm))
    return Trained.build(arm, case, block, steps)


def costs_of(arm: Arm, size: int, profiling: float) -> Costs:
    """Give the costs of the rebalances in the last ``size`` batches."""
    profile, decide, migrate = arm.new_costs()
    if not arm.dynamic:
        return 0.0, 0.0, 0.0
    decisions = sum(report.step > arm.engine.global_steps - size for report in arm.engine.reports)
    return profile + decisions * arm.engine.dynmo.profile.batches * profiling, decide, migrate

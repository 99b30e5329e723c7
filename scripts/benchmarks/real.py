"""Run every balancer on one of the models of ds_configs, side by side, on real text.

Engines take turns batch by batch, so that other work on the machine slows all of them alike. Training is bitwise equal
under every balancer, so layers are profiled in one engine, that of "partition_time". True costs are not known, so there
is no oracle. Static partitions come from a profile of the model before it changes; of equal ones, one is run. All other
engines start at the best of them, the dense model at the uniform one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.arms import Arm, arm_block, chosen, profiling_seconds, say, turns
from benchmarks.rows import Costs, Measured, Slice, passes_of, rows
from benchmarks.trained import Trained, configuration, statics_of
from ds_dynmo.cli.train import ends_part
from ds_dynmo.errors import ConfigError
from ds_dynmo.plan import Profile
from simulation import LoadModel
from simulation.statics import Statics

REFERENCE = "partition_time"  # its engine profiles the layers
DEFAULTS = (REFERENCE, "makespan")  # balancers, where none is asked for
PROBES = 6  # pairs of a profiled and a plain batch
SAID = 10  # progress lines


def real_rows(
    load_model: LoadModel, arguments: argparse.Namespace, keep: Callable[[list[dict[str, object]]], None]
) -> list[dict[str, object]]:
    """Measure the case, and return its rows on rank 0; other ranks return an empty list.

    Args:
        keep: is given the rows so far after each round, on rank 0.

    Raises:
        ConfigError: no layer was profiled.
    """
    began = time.perf_counter()
    known = statics_of(load_model.name, arguments.steps)
    asked = [*(arguments.balancer or DEFAULTS), REFERENCE]
    arms = [arm for arm in chosen(asked, known) if arm != "oracle"]
    trained = {arm: train(load_model.name, arm, known, arguments.steps) for arm in arms}
    say(f"{load_model.name}: {len(arms)} engines are built, {time.perf_counter() - began:.0f} s")
    dense, reference = trained["dense"], trained[REFERENCE]
    dense.batch(0)
    dense.batch(0)
    profiling = profiling_seconds(dense.arm, lambda: dense.batch(0), PROBES)
    size = arguments.steps // arguments.rounds
    profiles: list[Profile | None] = []
    table: list[dict[str, object]] = []
    for number in range(arguments.rounds):
        for step in range(number * size, (number + 1) * size):
            for one in turns(list(trained.values()), step):
                one.timed_batch(step)
            if ends_part(step, size * arguments.rounds, SAID):
                passed = time.perf_counter() - began
                say(f"{load_model.name}: step {step + 1} of {size * arguments.rounds}, {passed:.0f} s")
        for one in trained.values():
            costs, partition = costs_of(one.arm, size, profiling), tuple(one.arm.engine.partition)
            one.arm.rounds.append([Slice(size, sum(one.seconds[-size:]), ((), ()), partition, costs)])
        profiles.append(reference.arm.engine.profile)
        table = rows_so_far(load_model.name, trained, profiles, known)
        if table:
            keep(table)
    if profiles[-1] is None:
        raise ConfigError(f"--steps {arguments.steps}: too few, no layer was profiled in them")
    return table


def rows_so_far(
    case: str, trained: dict[str, Trained], profiles: list[Profile | None], known: Statics
) -> list[dict[str, object]]:
    """Make the rows of the rounds so far on rank 0; none on other ranks, or before a profile.

    Args:
        profiles: of the dynamic model, at the end of each round.
    """
    first = next((profile for profile in profiles if profile is not None), None)
    if first is None or torch.distributed.get_rank():
        return []
    measured = {}
    for arm, one in trained.items():
        seen = [one.arm.engine.profile] * len(profiles) if arm == "dense" else [each or first for each in profiles]
        rounds = [[replace(done[0], passes=passes_of(profile))] for done, profile in zip(one.arm.rounds, seen)]
        measured[arm] = Measured(rounds, one.arm.engine.micro_batches)
    return rows(case, measured, trained[REFERENCE].tokens, known)


def train(case: str, arm: str, known: Statics, steps: int) -> Trained:
    """Build an engine for ``arm`` over the case's model, or over the dense model of its size."""
    block = arm_block(arm, configuration(case)["dynmo"])
    # The dense model may have another number of layers: early exit's has no exits.
    block["initial_partition"] = "uniform" if arm == "dense" else list(known.start(arm))
    return Trained.build(arm, case, block, steps)


def costs_of(arm: Arm, size: int, profiling: float) -> Costs:
    """Return the costs of the rebalances in the last ``size`` batches."""
    profile, decide, migrate = arm.new_costs()
    if not arm.dynamic:
        return 0.0, 0.0, 0.0
    decisions = sum(report.step > arm.engine.global_steps - size for report in arm.engine.reports)
    return profile + decisions * arm.engine.dynmo.profile.batches * profiling, decide, migrate

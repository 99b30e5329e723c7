#!/usr/bin/env python3
"""Train each dynamic case on real text, three ways in turns: DynMo on, off, and the dense model of the same size.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/cases.py freezing --steps 200
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/cases.py moe mod --steps 100 --json cases.json

"On" starts at the best static partition by a profile of the model before it changes: uniform, by parameters, or
balanced by that profile. "Off" is the baseline: the same dynamic model stays at that partition. Its losses must equal
those of "on", in fp32 to the bit; a difference is an error. The three engines are in the same processes and take turns
after every batch, so that other work on the machine slows all of them alike. The table shows tokens per second, losses,
and the share of the run that profiling, deciding and moving took.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch

from benchmarks.arms import engines_end_here, say, turns
from benchmarks.trained import Trained, configuration, statics_of
from ds_dynmo.cli.command_line import CommandParser, num_processes, print_table, refusals_of, write_json
from ds_dynmo.cli.startup import begin_rank
from ds_dynmo.cli.train import VALIDATIONS, batches, ends_part, validate
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import LANGUAGE_MODEL_LOSS
from simulation import LOAD_MODELS

WAYS = ("on", "off", "dense")
SAID = 10  # progress lines per case
LAST_STEPS = 10  # the training loss in the table is the mean of so many last steps


def measure(case: str, steps: int) -> list[dict[str, Any]]:
    """Train the case three ways and make its rows. Collective.

    Raises:
        ConfigError: losses with DynMo on and off differ.
    """
    known = statics_of(case, steps)
    trained = {}
    for way in WAYS:
        start = "uniform" if way == "dense" else list(known.start(known.best))  # the dense model may have fewer layers
        block = {**configuration(case)["dynmo"], "log": False, "initial_partition": start}
        trained[way] = Trained.build(way, case, block if way == "on" else {**block, "enabled": False}, steps)
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    validation_losses: dict[str, list[tuple[int, float]]] = {way: [] for way in WAYS}
    for step in range(steps):
        for way in turns(WAYS, step):
            one = trained[way]
            one.timed_batch(step)
            losses[way].append(float(one.arm.engine.get_additional_losses()[LANGUAGE_MODEL_LOSS]))
            if ends_part(step, steps, VALIDATIONS):
                loss = validate(one.arm.engine, batches(one.run, one.arm.engine, "validation"))
                validation_losses[way].append((step + 1, loss))
        if ends_part(step, steps, SAID):
            ratio = statistics.median(b / a for a, b in zip(trained["on"].seconds, trained["off"].seconds))
            say(f"{case}: step {step + 1} of {steps}, a batch off over one with DynMo on: {ratio:.3f}")
    if losses["on"] != losses["off"] or validation_losses["on"] != validation_losses["off"]:
        raise ConfigError(f"{case}: losses differ: {validation_losses['on']} and {validation_losses['off']}")
    return [
        {
            "case": case,
            "dynmo": way,
            "static": known.best,
            "tokens_per_second": one.tokens * steps / sum(one.seconds),
            "over_off": sum(trained["off"].seconds) / sum(one.seconds),
            "share_of_run": sum(one.arm.new_costs()) / sum(one.seconds),
            "partition": one.arm.engine.partition,
            "moves": sum(report.moved for report in one.arm.engine.reports),
            "validation_losses": validation_losses[way],
            "losses": losses[way],
            "seconds": one.seconds,
        }
        for way, one in trained.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    head = ("case", "dynmo", "tokens/s", "over off", "train loss", "valid. loss", "moves", "share", "partition")
    cells = [
        (
            one["case"],
            one["dynmo"],
            f"{one['tokens_per_second']:,.0f}",
            f"{one['over_off']:.3f}",
            f"{statistics.fmean(one['losses'][-LAST_STEPS:]):.3f}",
            f"{one['validation_losses'][-1][1]:.3f}",
            one["moves"],
            f"{one['share_of_run']:.2%}",
            one["partition"],
        )
        for one in rows
    ]
    print_table(head, cells)


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("cases", nargs="*", choices=[*LOAD_MODELS, []], help="default: all")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run, default %(default)s")
    arguments = parser.parse_args(given)
    with refusals_of("cases.py"):
        num_processes("2 scripts/cases.py")
        begin_rank()
        rows: list[dict[str, Any]] = []
        for case in arguments.cases or LOAD_MODELS:
            with engines_end_here():
                new = measure(case, arguments.steps)
            rows += new
            if torch.distributed.get_rank() == 0:
                show(new)
                write_json(arguments.json, rows)  # after each case, because later ones may fail
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])

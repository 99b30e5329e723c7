#!/usr/bin/env python3
"""Each dynamic case on real text, three ways in turns: DynMo on, switched off, and the dense model of the same size.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/cases.py freezing --steps 200
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/cases.py moe mod --steps 100 --json cases.json

"On" starts at the best static partition that a profile of the model before it changes knows of: uniform, by
parameters or balanced by that profile. "Off" is the same dynamic model that stays there: the baseline. Its losses have
to be those of "on", to the bit in fp32, and a difference is an error. The three engines live in the same processes and
take turns after every batch, so that what the machine does meanwhile hits all of them alike. The table shows tokens per
second, losses, and what profiling, deciding and moving cost of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms import engines_end_here, say, turns
from benchmarks.trained import CONFIGS, Trained, settings_for, statics_of
from ds_dynmo.errors import ConfigError
from startup import init_distributed

WAYS = ("on", "off", "dense")
SAID = 10  # lines of progress a case
LAST_STEPS = 10  # the training loss that is shown is their mean


def measure(case: str, steps: int) -> list[dict[str, Any]]:
    """The case's rows. Collective.

    Raises:
        ConfigError: losses are not the same with DynMo on as with it off.
    """
    known = statics_of(case, steps)
    trained = {}
    for way in WAYS:
        settings = settings_for(case, way)
        start = "uniform" if way == "dense" else list(known.start(known.best))  # the dense model may have fewer layers
        settings["dynmo"] = {**settings["dynmo"], "initial_partition": start}
        trained[way] = Trained.build(way, settings, steps)
    for step in range(steps):
        for way in turns(WAYS, step):
            trained[way].timed_batch(step)
        if (step + 1) * SAID // steps > step * SAID // steps:
            ratio = statistics.median(b / a for a, b in zip(trained["on"].seconds, trained["off"].seconds))
            say(f"{case}: step {step + 1} of {steps}, a batch off over one with DynMo on: {ratio:.3f}")
    on, off = trained["on"], trained["off"]
    if (on.losses, on.validation_losses) != (off.losses, off.validation_losses):
        raise ConfigError(f"{case}: losses differ: {on.validation_losses} and {off.validation_losses}")
    return [{**row(case, one, off), "static": known.best} for one in trained.values()]


def row(case: str, one: Trained, off: Trained) -> dict[str, Any]:
    """Collective."""
    seconds, engine = sum(one.seconds), one.arm.engine
    shares = dict(zip(("profile", "decide", "migrate"), (part / seconds for part in one.arm.new_costs())))
    fifth = max(1, len(one.seconds) // 5)
    return {
        "case": case,
        "dynmo": one.arm.name,
        "tokens_per_second": one.tokens * len(one.seconds) / seconds,
        "over_off": sum(off.seconds) / seconds,
        "over_off_at_the_end": sum(off.seconds[-fifth:]) / sum(one.seconds[-fifth:]),
        "median_seconds": statistics.median(one.seconds),
        "share_of_run": sum(shares.values()),
        "shares": shares,
        "partition": engine.partition,
        "decisions": len(engine.reports),
        "moves": sum(report.moved for report in engine.reports),
        "validation_losses": one.validation_losses,
        "losses": one.losses,
        "auxiliary_losses": one.auxiliary_losses,
        "seconds": one.seconds,
    }


def show(rows: list[dict[str, Any]]) -> None:
    head = ("case", "dynmo", "tokens/s", "over off", "at the end", "train loss", "valid. loss", "moves", "share")
    print("{:<18}{:<7}{:>10}{:>10}{:>12}{:>12}{:>13}{:>7}{:>8}  partition".format(*head))
    for one in rows:
        print(
            f"{one['case']:<18}{one['dynmo']:<7}{one['tokens_per_second']:>10,.0f}{one['over_off']:>10.3f}"
            f"{one['over_off_at_the_end']:>12.3f}{statistics.fmean(one['losses'][-LAST_STEPS:]):>12.3f}"
            f"{one['validation_losses'][-1][1]:>13.3f}{one['moves']:>7}{one['share_of_run']:>8.2%}  {one['partition']}",
            flush=True,
        )


def main(given: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = sorted(path.stem for path in CONFIGS.glob("*.json") if path.stem not in ("gpt", "repack"))
    parser.add_argument("cases", nargs="+", choices=found)
    parser.add_argument("--steps", type=int, default=200, help="of each run, default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of each batch here too")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start with DeepSpeed's launcher: deepspeed --num_gpus 2 scripts/cases.py ...")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    init_distributed()
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        with engines_end_here():
            new = measure(case, arguments.steps)
        rows += new
        if torch.distributed.get_rank() == 0:
            show(new)
            if arguments.json:  # after each case: later ones may fail
                arguments.json.write_text(json.dumps(rows) + "\n")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])

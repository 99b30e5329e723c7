#!/usr/bin/env python3
"""Train variants of a dynamic case and the dense model of its size, in turns in one process, by processor time.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 1 scripts/variants.py early_exit '{"depths": [6]}' '{"threshold": 0.5}'

Each argument after the case changes keys of its object in ds_configs/CASE.json; {} is the shipped configuration. All
train on the same text, batch by batch, and nothing moves. Speed is that of the dense model's processor time, so that
other work on the machine counts little. Losses are validation losses: of the variant and of the dense model after the
same batches, and of the dense model after as much processor time as the variant took, between two of its validations.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
import time
from itertools import accumulate
from typing import Any

from benchmarks.arms import Arm, say, turns
from benchmarks.trained import Trained, configuration, without_cases
from ds_dynmo.cli.command_line import CommandParser, num_processes, print_table, refusals_of, write_json
from ds_dynmo.cli.startup import begin_rank
from ds_dynmo.cli.train import batches, build_engine, ends_part, validate
from ds_dynmo.cli.training.options import prepare
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import dynamic_cases
from ds_dynmo.models.gpt import BlockPart
from ds_dynmo.models.local_layers import local_layers

DENSE = "dense"
VALIDATIONS = 10


def keys_of(argument: str) -> dict[str, Any]:
    """Read a variant.

    Raises:
        ConfigError: it is no JSON object.
    """
    try:
        keys = json.loads(argument)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{argument}: is not JSON: {error}") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"{argument}: should be an object of keys to change")
    return keys


def build(case: str, variant: str, steps: int) -> Trained:
    """Build the engine of a variant, or of the dense model."""
    settings = configuration(case)
    settings["dynmo"] = {"enabled": False, "log": False}
    if variant == DENSE:
        settings["model"] = without_cases(settings["model"])
    else:
        settings["model"][case] = {**settings["model"][case], **keys_of(variant)}
    run = prepare(["--deepspeed_config", variant, "--steps", str(steps)], settings)
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints lines about each layer
        engine = build_engine(run)
    return Trained(
        Arm(variant, engine),
        run,
        dynamic_cases(run.model, engine, total_steps=steps),
        batches(run, engine, "train"),
    )


def train(trained: dict[str, Trained], steps: int) -> dict[str, list[tuple[int, float]]]:
    """Train all in turns; give their validation losses and the steps these are after."""
    losses: dict[str, list[tuple[int, float]]] = {variant: [] for variant in trained}
    for step in range(steps):
        for variant in turns(list(trained), step):
            one = trained[variant]
            began = time.process_time()
            one.batch(step)
            one.seconds.append(time.process_time() - began)
            if ends_part(step, steps, VALIDATIONS):
                losses[variant].append(
                    (step + 1, validate(one.arm.engine, batches(one.run, one.arm.engine, "validation")))
                )
        if ends_part(step, steps, VALIDATIONS):
            say(f"step {step + 1} of {steps}")
    return losses


def loss_at(seconds: float, spent: list[float], losses: list[tuple[int, float]]) -> float:
    """Interpolate the loss after ``seconds`` of training; ``spent`` has those after each batch.

    >>> loss_at(3.0, [1.0, 2.0, 4.0], [(2, 2.5), (3, 2.0)])
    2.25
    """
    known = [(spent[step - 1], loss) for step, loss in losses]
    for (before, first), (after, second) in zip(known, known[1:]):
        if before <= seconds <= after:
            return first + (second - first) * (seconds - before) / (after - before)
    return known[0][1] if seconds < known[0][0] else known[-1][1]


def row_of(variant: str, one: Trained, dense: Trained, losses: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    spent = list(accumulate(dense.seconds))
    last = len(one.seconds) // 4  # batches at the end of a run, when a case is in full swing
    layers = [layer for _, layer in local_layers(one.arm.engine.module)]
    signals = [layer.load_signal() for layer in layers if isinstance(layer, BlockPart)]
    return {
        "variant": variant,
        "speed": spent[-1] / sum(one.seconds),
        "speed_at_the_end": statistics.median(b / a for a, b in zip(one.seconds[-last:], dense.seconds[-last:])),
        "loss": losses[variant][-1][1],
        "dense_loss_same_step": losses[DENSE][-1][1],
        "dense_loss_same_time": loss_at(sum(one.seconds), spent, losses[DENSE]),
        "load_signals": signals,
        "losses": losses[variant],
        "seconds": one.seconds,
    }


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("case", choices=("early_exit", "freezing", "mod", "moe", "pruning", "sparse_attention"))
    parser.add_argument("variants", nargs="+", metavar="VARIANT", help="a JSON object")
    parser.add_argument("--steps", type=int, default=300, help="batches of each run, default %(default)s")
    arguments = parser.parse_args(given)
    with refusals_of("variants.py"):
        if num_processes("1 scripts/variants.py") != 1:
            raise ConfigError("needs one process: deepspeed --num_gpus 1 scripts/variants.py ...")
        begin_rank()
        trained = {name: build(arguments.case, name, arguments.steps) for name in (DENSE, *arguments.variants)}
    losses = train(trained, arguments.steps)
    rows = [row_of(name, trained[name], trained[DENSE], losses) for name in arguments.variants]
    print_table(
        ("variant", "over dense", "in the last quarter", "loss", "dense, same step", "dense, same time", "mean load"),
        [
            (
                row["variant"],
                *(f"{row[key]:.2f}" for key in ("speed", "speed_at_the_end")),
                *(f"{row[key]:.3f}" for key in ("loss", "dense_loss_same_step", "dense_loss_same_time")),
                f"{statistics.fmean(row['load_signals']):.2f}",
            )
            for row in rows
        ],
    )
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main(sys.argv[1:])

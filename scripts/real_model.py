#!/usr/bin/env python3
"""Fine-tune a real model in real stages: what DeepSpeed offers, and our partitions and pieces, by turns in one run.

    python scripts/smollm2.py smollm2 text.jsonl
    deepspeed --num_gpus 2 scripts/real_model.py smollm2 --data text.jsonl --json figures.json
    deepspeed --num_gpus 2 scripts/real_model.py smollm2 --data text.jsonl --tokens 512 --arm whole --arm v
    deepspeed --num_gpus 2 scripts/real_model.py smollm2 --data text.jsonl --arm uniform --balanced 0 20 33

Set OMP_NUM_THREADS=1: one thread per stage. Each arm has an engine of its own, which begins with the same weights,
trains on the same batches and is timed on the slowest rank; each turn is a batch of every arm.

- "parameters" (DeepSpeed's default), "uniform", "type": DeepSpeed's partitions, its own engine;
- "balanced": a static partition of whole layers, even by the costs that "whole", which runs too, measured, or as
  --balanced gives it;
- "whole": whole layers move, under 1F1B;
- "pieces": the vocabulary in slices and decoder layers in halves, under 1F1B; "zero_bubble", "v" and "auto": the same
  pieces under these schedules.

"over best static" is over the fastest of the first two lines. Batches before layers have gone where they stay are not
timed. Losses are compared with those of "parameters": pieces add the same numbers in another order.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.arms import engines_end_here, say, timed, turns
from benchmarks.machine import Machine
from ds_dynmo.cli.command_line import (
    CommandParser,
    check_at_least_1,
    num_processes,
    print_table,
    refusals_of,
    settings_of,
    write_json,
)
from ds_dynmo.cli.startup import begin_rank
from ds_dynmo.cli.train import batches, build_engine
from ds_dynmo.cli.training.options import TrainingRun, prepare
from ds_dynmo.partitioners import balanced

CONFIG = Path(__file__).resolve().parent.parent / "ds_configs" / "finetune.json"
STOCK = {"parameters": "parameters", "uniform": "uniform", "type": "type:DecoderLayer"}  # values of partition_method
PIECES = {"pieces": "1f1b", "zero_bubble": "zero_bubble", "v": "v", "auto": "auto"}  # schedules
DEFAULT, BALANCED = "parameters", "balanced"
STATIC = (*STOCK, BALANCED)
WHOLE = "whole"
ARMS = (*STOCK, WHOLE, BALANCED, *PIECES)
ALWAYS = (DEFAULT, BALANCED)  # what the others are compared with
WARM_UP = 4  # batches, in which layers are profiled and go where they stay


@dataclass
class Arm:
    """An engine, and by batch its seconds and its losses."""

    name: str
    engine: Any
    data: Any
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def train(self) -> None:
        """Train a batch. Collective."""
        losses = list[torch.Tensor]()
        self.seconds.append(timed(lambda: losses.append(self.engine.train_batch(self.data))))
        self.losses.append(float(losses[0]))

    @property
    def partition(self) -> list[int]:
        return list(self.engine.partition if hasattr(self.engine, "partition") else self.engine.module.parts)


def parse(given: list[str]) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("model", help="folder of a Hugging Face causal language model")
    parser.add_argument("--data", required=True, help="text, as of scripts/train.py")
    parser.add_argument(
        "--arm",
        action="append",
        choices=[arm for arm in ARMS if arm not in ALWAYS],
        help=f"beside {', '.join(ALWAYS)}; default: all; may be repeated",
    )
    parser.add_argument("--balanced", type=int, nargs="+", metavar="BOUNDARY", help="partition of that arm")
    parser.add_argument("--tokens", type=int, default=128, help="of a micro-batch, one sequence, default %(default)s")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a batch, default %(default)s")
    parser.add_argument("--slices", default="auto", help="of the vocabulary, default %(default)s")
    parser.add_argument("--batches", type=int, default=20, help="timed of each, default %(default)s")
    return parser.parse_args(given)


def prepared(arguments: argparse.Namespace, arm: str) -> TrainingRun:
    """Prepare the run of an arm: its layers, its section."""
    changes = [
        f"model.huggingface={arguments.model}",
        f"model.sequence_length={arguments.tokens}",
        "train_micro_batch_size_per_gpu=1",
        f"gradient_accumulation_steps={arguments.micro_batches}",
        "optimizer.params.lr=1e-5",
        "gradient_clipping=0.0",  # DeepSpeed would clip by the norm of a stage
        "scheduler=null",
        "dynmo.log=false",
    ]
    if arm in PIECES:
        slices = f"model.vocabulary_slices={arguments.slices}"
        changes += [slices, "model.split_blocks=true", f"dynmo.schedule.kind={PIECES[arm]}"]
    if arm in STOCK:
        changes += ["dynmo=null"]
    flags = ["--deepspeed_config", str(CONFIG), "--data", arguments.data, "--steps", str(WARM_UP + arguments.batches)]
    for change in changes:
        flags += ["--set", change]
    return prepare(flags)


def build(arm: str, run: TrainingRun) -> Arm:
    """Build an engine. Collective."""
    engine = build_engine(run, STOCK.get(arm, "uniform"))
    return Arm(arm, engine, batches(run, engine, "train").iterate(micro_batches=engine.micro_batches))


def measure(arguments: argparse.Namespace) -> list[Arm]:
    """Train every arm, by turns. Collective."""
    asked = {*(arguments.arm or ARMS), *ALWAYS}
    if not arguments.balanced:
        asked.add(WHOLE)
    names = [arm for arm in ARMS if arm in asked]
    arms = list[Arm]()
    for name in names:
        run = prepared(arguments, name)
        if name == BALANCED:
            boundaries = arguments.balanced
            if not boundaries:
                costs = next(arm for arm in arms if arm.name == WHOLE).engine.profile.costs("time")
                boundaries = balanced(costs, run.stages)
            still = {"enabled": False, "initial_partition": boundaries, "log": False}
            run = replace(run, settings={**run.settings, "dynmo": still})
        arm = build(name, run)
        same = next((one for one in arms if one.name in STOCK and one.partition == arm.partition), None)
        if name in STOCK and same is not None:
            say(f"{name}: {arm.partition} is the partition of {same.name}, which runs for both")
            continue
        for _ in range(WARM_UP):
            arm.train()
        say(f"{name}: {arm.partition}, {len(run.layers)} layers, {arm.seconds[-1]:.2f} s a batch")
        arms.append(arm)
    for number in range(arguments.batches):
        for arm in turns(arms, number):
            arm.train()
        say(f"batch {number + 1} of {arguments.batches}")
    return arms


def rows(arms: list[Arm], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Make a row per arm: medians over batches, ratios to batches of the same turn."""
    timed_seconds = {arm.name: arm.seconds[WARM_UP:] for arm in arms}
    default = next(arm for arm in arms if arm.name == DEFAULT)
    best = min((arm.name for arm in arms if arm.name in STATIC), key=lambda name: median(timed_seconds[name]))

    def over(base: str, arm: Arm) -> float:
        return median(one / own for one, own in zip(timed_seconds[base], timed_seconds[arm.name], strict=True))

    return [
        {
            "arm": arm.name,
            "schedule": PIECES.get(arm.name, "1f1b"),
            "partition": arm.partition,
            "seconds": median(timed_seconds[arm.name]),
            "tokens_per_second": arguments.tokens * arguments.micro_batches / median(timed_seconds[arm.name]),
            "over_default": over(DEFAULT, arm),
            "over_best_static": over(best, arm),
            "largest_difference_of_losses": max(
                abs(own - one) / one for own, one in zip(arm.losses, default.losses, strict=True)
            ),
            "losses": arm.losses,
            "all_seconds": arm.seconds,
        }
        for arm in arms
    ]


def show(table: list[dict[str, Any]]) -> None:
    head = ("arm", "s/batch", "tokens/s", "over default", "over best static", "first loss", "last loss", "differs")
    cells = [
        (
            row["arm"],
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['over_default']:.2f}",
            f"{row['over_best_static']:.2f}",
            f"{row['losses'][0]:.4f}",
            f"{row['losses'][-1]:.4f}",
            f"{row['largest_difference_of_losses']:.1e}",
        )
        for row in table
    ]
    print_table(head, cells)
    for row in table:
        print(f"{row['arm']}: {row['partition']}")


def main(given: list[str]) -> None:
    arguments = parse(given)
    with refusals_of("real_model.py"):
        num_processes("2 scripts/real_model.py")
        check_at_least_1(arguments, "tokens", "micro_batches", "batches")
        prepared(arguments, DEFAULT)
        begin_rank()
        machine = Machine()
        with engines_end_here():
            table = rows(measure(arguments), arguments)
    if torch.distributed.get_rank() == 0:
        show(table)
        print(machine, flush=True)
        versions = {**machine.record(), "transformers": transformers.__version__}
        write_json(arguments.json, {"machine": versions, "settings": settings_of(arguments), "rows": table})
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])

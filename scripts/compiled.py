#!/usr/bin/env python3
"""Compare layers that torch compiles with layers as they are, in two engines of two stages that take turns.

    deepspeed --num_gpus 2 scripts/compiled.py gpt
    deepspeed --num_gpus 2 scripts/compiled.py llama --hidden-size 256

Real text, the sizes of ds_configs/gpt.json and ds_configs/huggingface.json. Shown are

- the seconds that torch compiles on each rank in the first batch, where all blocks are on stage 0: with an empty
  TORCHINDUCTOR_CACHE_DIR, and in a second run with what the first left there;
- those after half of the blocks have moved to stage 1, which had none;
- tokens/s of both engines, and the ratio of pairs of batches: median, least to most.

Set OMP_NUM_THREADS=1. ``--json FILE`` also writes the figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from typing import Any

import torch.distributed as dist

from benchmarks.arms import timed, turns
from benchmarks.machine import Machine
from benchmarks.trained import Trained, configuration
from ds_dynmo.cli.command_line import (
    CommandParser,
    check_at_least_1,
    num_processes,
    print_table,
    refusals_of,
    write_json,
)
from ds_dynmo.cli.startup import begin_rank
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import model_layers, read_model_config

WARM_UP = 3  # batches of each engine before those that count


def settings_of(arguments: argparse.Namespace, *, compiled: bool) -> dict[str, Any]:
    """Make the configuration of one engine."""
    width = arguments.hidden_size
    settings = configuration("gpt" if arguments.model == "gpt" else "huggingface")
    settings["dynmo"] = {"interval": 0, "compile": compiled, "profile": {"warmup_batches": 1_000_000}, "log": False}
    if arguments.model == "gpt":
        settings["model"]["hidden_size"] = width
        return settings
    kept = ("vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    sizes = {key: settings["model"]["huggingface"][key] for key in kept}
    sizes |= {"hidden_size": width, "intermediate_size": 4 * width, "bos_token_id": None, "eos_token_id": None}
    settings["model"]["huggingface"] = {"model_type": "llama", "tie_word_embeddings": False, **sizes}
    return settings


def compile_seconds(trained: Trained) -> list[float]:
    """Train the batch after a change, and list the seconds that torch compiled in it, per rank. Collective."""
    layers = trained.arm.engine.stage.compiled
    before = layers.seconds
    trained.batch(0)
    every: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, round(layers.seconds - before, 2))
    return every


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compile, move, and train in turns."""
    eager, compiled = (
        Trained.of("compiled" if kind else "eager", settings_of(arguments, compiled=kind), 1_000_000)
        for kind in (False, True)
    )
    num_layers = compiled.arm.engine.stage.layers.num_layers
    figures: dict[str, Any] = {"model": arguments.model, "hidden_size": arguments.hidden_size}
    for one in (eager, compiled):
        one.arm.engine.rebalance([0, num_layers - 2, num_layers])
    figures["first batch, seconds by rank"] = compile_seconds(compiled)
    for one in (eager, compiled):
        one.arm.engine.rebalance([0, num_layers // 2, num_layers])
    figures["moved"] = compiled.arm.engine.reports[-1].layers_moved
    figures["after the move, seconds by rank"] = compile_seconds(compiled)
    for step in range(1, 1 + WARM_UP + arguments.pairs):
        for one in turns((eager, compiled), step):
            one.seconds.append(timed(partial(one.batch, step)))
    plain, fast = (one.seconds[WARM_UP:] for one in (eager, compiled))
    ratios = [a / b for a, b in zip(plain, fast)]
    figures["tokens/s"] = round(eager.tokens / statistics.median(plain))
    figures["tokens/s, compiled"] = round(eager.tokens / statistics.median(fast))
    figures["ratio"] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return figures


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("model", choices=("gpt", "llama"))
    parser.add_argument("--hidden-size", type=int, default=128, help="default %(default)s")
    parser.add_argument("--pairs", type=int, default=20, help="of batches, default %(default)s")
    arguments = parser.parse_args(given)
    with refusals_of("compiled.py"):
        check_at_least_1(arguments, "hidden_size", "pairs")
        if num_processes("2 scripts/compiled.py") != 2:
            raise ConfigError("two ranks are needed: deepspeed --num_gpus 2 scripts/compiled.py ...")
        model_layers(read_model_config(settings_of(arguments, compiled=True)))  # refuses sizes that make no model
    begin_rank()
    machine = Machine()
    figures = measure(arguments)
    if dist.get_rank() == 0:
        print_table(("figure", ""), figures.items())
        write_json(arguments.json, {"machine": machine.record(), **figures})


if __name__ == "__main__":
    main(sys.argv[1:])

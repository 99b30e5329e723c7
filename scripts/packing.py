#!/usr/bin/env python3
"""Measure tokens of text per second, packed and with one document in each sequence, in one job, batch by batch in turn.

    deepspeed --num_gpus 2 scripts/packing.py --model model --data text.jsonl

Padding does not count, nor do labels that predict nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ds_dynmo.cli.command_line import CommandParser, check_at_least_1, num_processes, refusals_of
from ds_dynmo.cli.startup import begin_rank
from ds_dynmo.cli.train import batches, build_engine
from ds_dynmo.cli.training.options import prepare
from ds_dynmo.config import load_settings

CONFIG = Path(__file__).resolve().parents[1] / "ds_configs" / "finetune.json"
WAYS = ("packed", "padded")


def counted(micro_batches: Iterator[Any], counts: list[int]) -> Iterator[Any]:
    """Pass micro-batches on, and add the labels of each to ``counts``."""
    for inputs, labels in micro_batches:
        counts.append(int((labels >= 0).sum()))
        yield inputs, labels


def main(given: list[str]) -> int:
    parser = CommandParser(__doc__, has_figures=False)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model with a tokenizer")
    parser.add_argument("--data", required=True, help="text with documents")
    parser.add_argument("--batches", type=int, default=20, help="of each, after two that do not count")
    args = parser.parse_args(given)
    with refusals_of("packing.py"):
        check_at_least_1(args, "batches")
        num_processes("2 scripts/packing.py")
        settings = {**load_settings(CONFIG), "dynmo": {"interval": 0}}
        shared = ["--deepspeed_config", str(CONFIG), "--model", args.model, "--data", args.data]
        runs = [prepare(shared, {**settings, "data": {"documents": documents}}) for documents in WAYS]
        begin_rank()
        engines = [build_engine(run) for run in runs]
    data = [batches(run, engine, "train") for run, engine in zip(runs, engines)]
    speeds: dict[str, list[float]] = {documents: [] for documents in WAYS}
    for batch in range(args.batches + 2):
        for documents, engine, each in zip(WAYS, engines, data):
            counts: list[int] = []
            torch.distributed.barrier()
            began = time.perf_counter()
            engine.train_batch(counted(each.iterate(engine.micro_batches_taken), counts))
            torch.distributed.barrier()
            if batch >= 2:
                speeds[documents].append(sum(counts) / (time.perf_counter() - began))
    if torch.distributed.get_rank() == 0:
        for documents, values in speeds.items():
            print(f"{documents}: {statistics.median(values):,.0f} tokens of text per second (median of {len(values)})")
        ratios = sorted(packed / padded for packed, padded in zip(*speeds.values()))
        print(f"packed over padded: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

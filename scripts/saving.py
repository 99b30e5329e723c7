#!/usr/bin/env python3
"""Measure how long training waits for a checkpoint: three engines take turns in one run of two stages.

    deepspeed --num_gpus 2 scripts/saving.py --precision bf16-zero1 --layer-parameters 16

They are an engine with ``"checkpoint": "background"``, one with ``"blocking"``, and DeepSpeed's own. Figures are
medians: seconds of the save, seconds until the checkpoint is whole, and batches beside a save over others. DeepSpeed's
own does not wait until files are on the disk. Set OMP_NUM_THREADS=1. ``--json FILE`` also writes the figures.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.arms import timed
from benchmarks.emulation import PRECISIONS, pipeline_engine
from benchmarks.machine import Machine
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

LAYERS = 4
MICRO_BATCHES = 4
KINDS = ("background", "blocking", "stock")


class Block(nn.Module):
    """A square linear layer with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.linear(hidden)
        return hidden + mixed.tanh()


class Saves:
    """The engine of one kind of saves, and its seconds.

    Attributes:
        seconds: lists by figure.
    """

    def __init__(self, kind: str, width: int, precision: str, folder: Path) -> None:
        dynmo = None if kind == "stock" else {"interval": 0, "checkpoint": kind, "log": False}
        self.engine = pipeline_engine(
            [LayerSpec(Block, width) for _ in range(LAYERS)],
            micro_batches=MICRO_BATCHES,
            dynmo=dynmo,
            **PRECISIONS[precision],
        )
        hidden = torch.ones(1, width, dtype=torch.bfloat16 if precision.startswith("bf16") else torch.float32)
        self._data = iter(lambda: (hidden, hidden), None)
        self._kind, self._folder = kind, folder / kind
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.batch(), self.batch()

    def batch(self) -> float:
        """Train a batch, and return its seconds."""
        return timed(partial(self.engine.train_batch, self._data))

    def save(self, number: int) -> None:
        """Train two batches, save, and train beside the save while it lasts."""
        still = statistics.mean((self.batch(), self.batch()))
        began = time.perf_counter()
        self.seconds["wait"].append(timed(partial(self.engine.save_checkpoint, self._folder, tag=f"t{number}")))
        if self._kind == "background":
            for seconds in self._beside():
                self.seconds["batch beside over others"].append(seconds / still)
            self.engine.wait_for_save()
        self.seconds["until it is whole"].append(time.perf_counter() - began)
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder / f"t{number - 1}", ignore_errors=True)

    def _beside(self) -> Iterator[float]:
        """Train batches until every rank's part is written."""
        while self.engine.checkpointer.is_saving:
            yield self.batch()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let the three engines save in turns."""
    width = int((arguments.layer_parameters * 1e6) ** 0.5)
    folder = [tempfile.mkdtemp(dir=arguments.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        kinds = {kind: Saves(kind, width, arguments.precision, Path(folder[0])) for kind in KINDS}
        for number in range(arguments.rounds):
            for one in kinds.values():
                one.save(number)
        file_bytes = sum(path.stat().st_size for path in (Path(folder[0]) / KINDS[0]).rglob("*") if path.is_file())
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    figures = {
        f"{kind}, {name}": statistics.median(seconds)
        for kind, one in kinds.items()
        for name, seconds in one.seconds.items()
    }
    return {"bytes": file_bytes, **figures}


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default: %(default)s")
    parser.add_argument(
        "--layer-parameters",
        type=float,
        default=4.0,
        help=f"millions in each of the {LAYERS} layers, default %(default)s",
    )
    parser.add_argument("--rounds", type=int, default=5, help="saves of each engine, default %(default)s")
    parser.add_argument("--folder", type=Path, help="where to write, default: that of temporary files")
    arguments = parser.parse_args(given)
    with refusals_of("saving.py"):
        check_at_least_1(arguments, "rounds")
        if arguments.layer_parameters < 1e-4:
            raise ConfigError(f"--layer-parameters {arguments.layer_parameters}: should be at least 0.0001 (millions)")
        if num_processes("2 scripts/saving.py") != 2:
            raise ConfigError("two ranks are needed: deepspeed --num_gpus 2 scripts/saving.py ...")
    begin_rank()
    machine = Machine()
    figures = {"precision": arguments.precision, **measure(arguments)}
    if dist.get_rank() == 0:
        print_table(("figure", ""), figures.items())
        write_json(arguments.json, {"machine": machine.record(), **figures})


if __name__ == "__main__":
    main(sys.argv[1:])

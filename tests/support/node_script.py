"""One rank of a job that the `deepspeed` command starts: it trains, rebalances and saves; then a new engine resumes.

Usage: node_script.py FOLDER MOVES_BEFORE MOVES_AFTER
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_dynmo.cli.startup import init_distributed
from tests.support.configs import Case
from tests.support.training import batches, build

CASE = Case(stages=2, precision="bf16 zero1", dropout=True)


def train(engine: Any, moves: list[list[int]]) -> list[Any]:
    data = islice(batches(engine), engine.global_steps * engine.micro_batches, None)
    losses = []
    for number in range(4):
        losses.append(engine.train_batch(data).item())
        if number < len(moves):
            engine.rebalance(moves[number])
    return [losses, engine.partition]


def main(folder: Path, moves_before: list[list[int]], moves_after: list[list[int]]) -> None:
    torch.set_num_threads(1)
    init_distributed()
    engine = build(CASE)
    found = [train(engine, moves_before)]
    engine.save_checkpoint(str(folder / "checkpoint"))
    resumed = build(CASE)
    resumed.load_checkpoint(str(folder / "checkpoint"))
    found.append(train(resumed, moves_after))
    (folder / f"rank-{engine.global_rank}.json").write_text(json.dumps(found))


main(Path(sys.argv[-3]), json.loads(sys.argv[-2]), json.loads(sys.argv[-1]))

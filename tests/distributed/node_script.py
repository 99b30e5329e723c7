"""One rank of a job that the `deepspeed` command starts: trains, rebalances, saves and resumes.

node_script.py FOLDER train|resume MOVES
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled: 40 s
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.workloads import Case, batches, build  # noqa: E402

FOLDER, WHAT, MOVES = Path(sys.argv[-3]), sys.argv[-2], json.loads(sys.argv[-1])


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    engine = build(Case(stages=2, precision="bf16 zero1", dropout=True))
    if WHAT == "resume":
        engine.load_checkpoint(str(FOLDER / "checkpoint"))
    data = islice(batches(engine), engine.global_steps * engine.micro_batches, None)
    losses = []
    for _ in range(4):
        losses.append(engine.train_batch(data).item())
        if MOVES:
            engine.rebalance(MOVES.pop(0))
    if WHAT == "train":
        engine.save_checkpoint(str(FOLDER / "checkpoint"))
    (FOLDER / f"{WHAT}-{engine.global_rank}.json").write_text(json.dumps([losses, engine.partition]))


main()

#!/usr/bin/env python3
"""Record what each layer costs in each iteration of real training: the recordings in scripts/recordings.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/record.py                       # the six cases
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/record.py moe pruning --steps 100 --out recordings

Trains the models of ds_configs, deeper. scripts/train.py --record does the same to any other configuration.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

from benchmarks.arms import engines_end_here, say
from benchmarks.trained import configuration
from command_line import CommandParser, check_at_least_1, num_processes, refusals_of
from simulation.loads import CASES
from startup import begin_rank
from train import build_cases, build_engine, train
from training.options import prepare

FOLDER = Path(__file__).resolve().parent / "recordings"
MICRO_BATCHES = 8
LAYERS = 16
SIZES: dict[str, dict[str, Any]] = {  # of the model blocks, by case, beside the number of layers
    "pruning": {"hidden_size": 256, "heads": 4},
}


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__, has_figures=False)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--steps", type=int, default=300, help="of each run, default %(default)s")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: scripts/recordings")
    arguments = parser.parse_args(given)
    with refusals_of("record.py"):
        num_processes("2 scripts/record.py")
        check_at_least_1(arguments, "steps")
        begin_rank()
        for case in arguments.cases or CASES:
            settings = configuration(case)
            settings["gradient_accumulation_steps"] = MICRO_BATCHES
            settings["model"] |= {"layers": LAYERS, **SIZES.get(case, {})}
            flags = ["--steps", str(arguments.steps), "--record", str(arguments.out / f"{case}.jsonl")]
            run = prepare(["--deepspeed_config", case, *flags], settings)
            say(f"{case}: {run.steps} steps into {run.record}")
            with engines_end_here():
                with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints lines about each layer
                    engine = build_engine(run)
                train(run, engine, build_cases(run, engine))
                del engine


if __name__ == "__main__":
    main(sys.argv[1:])

#!/usr/bin/env python3
"""Record what each layer costs in each iteration of real training: the recordings in scripts/recordings.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/record.py                       # the six cases
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/record.py moe pruning --steps 100 --out recordings

Trains the models of ds_configs, with more layers; "mod_threshold" is mixture of depths with a threshold.
scripts/train.py --record records any other configuration.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.arms import engines_end_here, say
from ds_dynmo.cli.command_line import CommandParser, num_processes, refusals_of
from ds_dynmo.cli.startup import begin_rank
from ds_dynmo.cli.train import build_cases, build_engine, train
from ds_dynmo.cli.training.options import TrainingRun, prepare
from simulation import LOAD_MODELS

SCRIPTS = Path(__file__).resolve().parent
CONFIGS, FOLDER = SCRIPTS.parent / "ds_configs", SCRIPTS / "recordings"
CHANGES = ("gradient_accumulation_steps=8", "model.layers=16")  # of the files in ds_configs
EVERY_BATCH = "dynmo.interval=1"  # what decisions after each batch would gain
OWN_CHANGES = {  # further ones, by case
    "pruning": ("gradient_accumulation_steps=4", "model.hidden_size=256", "model.heads=4"),
    "freezing": ("model.case.schedule=[[0.2, 3], [0.4, 5], [0.6, 8]]",),
    "moe": ("gradient_accumulation_steps=4", EVERY_BATCH),
    "sparse_attention": ("gradient_accumulation_steps=2", EVERY_BATCH),
    "early_exit": ("model.case.depths=[4, 8, 12]",),
    "mod": ("model.case.threshold=null", "model.case.capacity=0.125", EVERY_BATCH),
    "mod_threshold": (EVERY_BATCH,),
}
FILES = {"mod_threshold": "mod"}  # of cases that are not called like their configuration


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__, has_figures=False)
    parser.add_argument("cases", nargs="*", choices=[*LOAD_MODELS, *FILES, []], help="default: the six cases")
    parser.add_argument("--steps", type=int, default=300, help="of each run, default %(default)s")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: scripts/recordings")
    arguments = parser.parse_args(given)
    with refusals_of("record.py"):
        num_processes("2 scripts/record.py")
        runs = [prepared(case, arguments.steps, arguments.out) for case in arguments.cases or LOAD_MODELS]
        begin_rank()
        for run in runs:
            with engines_end_here():
                record(run)


def prepared(case: str, steps: int, folder: Path) -> TrainingRun:
    flags = ["--deepspeed_config", str(CONFIGS / f"{FILES.get(case, case)}.json")]
    for change in (*CHANGES, *OWN_CHANGES.get(case, ())):
        flags += ["--set", change]
    run = prepare([*flags, "--steps", str(steps), "--record", str(folder / f"{case}.jsonl")])
    return replace(run, name=case)


def record(run: TrainingRun) -> None:
    """Train on real text. Collective."""
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints lines about each layer
        engine = build_engine(run)
    train(run, engine, build_cases(run, engine))
    say(f"{run.name}: {run.steps} steps are in {run.record}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])

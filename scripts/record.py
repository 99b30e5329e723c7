#!/usr/bin/env python3
"""Record what each layer costs in each iteration of real training: the recordings in scripts/recordings.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/record.py                       # the six cases
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/record.py moe pruning --steps 100 --out recordings

Trains the models of ds_configs, with more layers. scripts/train.py --record records any other configuration.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.arms import engines_end_here, say
from benchmarks.trained import CONFIGS, configuration
from ds_dynmo.cli.command_line import CommandParser, num_processes, refusals_of
from ds_dynmo.cli.simulation.loads import CASES
from ds_dynmo.cli.startup import begin_rank
from ds_dynmo.cli.train import build_cases, build_engine, train
from ds_dynmo.cli.training.options import Run, prepare

FOLDER = Path(__file__).resolve().parent / "recordings"
CHANGES: dict[str, Any] = {"gradient_accumulation_steps": 8, "model": {"layers": 16}}  # of the files in ds_configs
OWN_CHANGES: dict[str, dict[str, Any]] = {  # further ones, by case
    "pruning": {"gradient_accumulation_steps": 4, "model": {"hidden_size": 256, "heads": 4}},
    "freezing": {"model": {"freezing": {"schedule": [[0.2, 3], [0.4, 5], [0.6, 8]]}}},
    "moe": {"gradient_accumulation_steps": 4},
    "sparse_attention": {"gradient_accumulation_steps": 2},
    "early_exit": {"model": {"early_exit": {"depths": [4, 8, 12]}}},
}


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__, has_figures=False)
    found = [name for name in sorted(path.stem for path in CONFIGS.glob("*.json")) if can_change(name)]
    parser.add_argument("cases", nargs="*", choices=[*found, []], help="files of ds_configs; default: the six cases")
    parser.add_argument("--steps", type=int, default=300, help="of each run, default %(default)s")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: scripts/recordings")
    arguments = parser.parse_args(given)
    with refusals_of("record.py"):
        num_processes("2 scripts/record.py")
        runs = [prepared(case, arguments.steps, arguments.out) for case in arguments.cases or CASES]
        begin_rank()
        for run in runs:
            with engines_end_here():
                record(run)


def can_change(case: str) -> bool:
    """Tell whether the model has the number of layers that is changed; others have one in their own library's words."""
    return "huggingface" not in configuration(case)["model"]


def prepared(case: str, steps: int, folder: Path) -> Run:
    settings = merged(merged(configuration(case), CHANGES), OWN_CHANGES.get(case, {}))
    flags = ["--steps", str(steps), "--record", str(folder / f"{case}.jsonl")]
    return prepare(["--deepspeed_config", case, *flags], settings)


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Replace values of ``settings``; of an object that both have, those that ``changes`` names.

    >>> merged({"model": {"layers": 12, "seed": 0}}, {"model": {"layers": 16}})
    {'model': {'layers': 16, 'seed': 0}}
    """
    found = dict(settings)
    for key, value in changes.items():
        found[key] = merged(settings[key], value) if isinstance(value, dict) else value
    return found


def record(run: Run) -> None:
    """Train on real text. Collective."""
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints lines about each layer
        engine = build_engine(run)
    train(run, engine, build_cases(run, engine))
    say(f"{run.name}: {run.steps} steps are in {run.record}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])

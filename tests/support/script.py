"""The training script, run on a rank as by a launcher."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_dynmo.cli.train import build_cases, build_engine, main, train
from ds_dynmo.cli.training.options import prepare
from tests.support.case_runs import CASES, SIZES
from tests.support.training import state


def flags(folder: Path, name: str, steps: int | None = None) -> list[str]:
    """Write the JSON of case ``name`` to ``folder``, and return the script's flags for it."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "dynmo": {"interval": 2, "min_improvement": 0.0, "profile": {"batches": 1}},
        "model": {**SIZES, **CASES[name]},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    given = ["--deepspeed_config", str(folder / "config.json"), "--data", __file__]
    return given if steps is None else [*given, "--steps", str(steps)]


class Killed(Exception):
    """Ends a job in the middle of a batch."""


def run_script(
    arguments: list[str],
    killed_in: int | None = None,
    packed_in: int | None = None,
    before: dict[int, Callable[[], Any]] | None = None,
) -> dict[str, Any]:
    """Run scripts/train.py on ranks that have met, and return its results.

    Args:
        killed_in: the step, counted from 1, in the middle of which everything ends.
        packed_in: the step after which the engine continues with one stage.
        before: what this rank calls before a batch, by step.
    """
    run = prepare(arguments)
    engine = build_engine(run)
    cases = build_cases(run, engine)
    train_batch = engine.train_batch

    def until_killed(data: Any) -> Any:
        if (call := (before or {}).get(engine.global_steps + 1)) is not None:
            call()
        if engine.global_steps + 1 == killed_in:
            raise Killed
        loss = train_batch(data)
        if engine.global_steps == packed_in:
            engine.repack(1)
        return loss

    engine.train_batch = until_killed
    try:
        history = train(run, engine, cases)
    except Killed:
        return {}
    if engine.released:
        return {"losses": history.losses}
    return {
        "losses": history.losses,
        "stopped": history.stopped,
        "ranks": history.ranks,
        "validation": history.validation_losses,
        "state": state(engine),
        "replica": engine.grid.get_data_parallel_id(),
    }


def run_command(arguments: list[str]) -> tuple[int, str, str]:
    """Run the whole command on ranks that have met; return its exit code, and what this rank prints and its errors."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # of the world that is there
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        return main(arguments), said.getvalue(), errors.getvalue()

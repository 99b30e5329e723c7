"""Runs for test_train_script.py; every function runs on a rank."""

from __future__ import annotations

from typing import Any

from scripts.train import build_engine, train
from scripts.train_options import prepare
from tests.distributed import workloads


class Killed(Exception):
    """Stands in for what ends a job in the middle."""


def run_script(arguments: list[str], killed_in: int | None = None) -> dict[str, Any]:
    """What scripts/train.py trains once its ranks have met.

    Args:
        killed_in: the step, counted from 1, in the middle of which everything ends.
    """
    run = prepare(arguments)
    engine = build_engine(run)
    train_batch = engine.train_batch

    def until_killed(data: Any) -> Any:
        if engine.global_steps + 1 == killed_in:
            raise Killed
        return train_batch(data)

    engine.train_batch = until_killed
    try:
        history = train(run, engine)
    except Killed:
        return {}
    return {
        "losses": history.losses,
        "validation": history.validation_losses,
        "state": workloads.state(engine),
        "replica": engine.grid.get_data_parallel_id(),
    }

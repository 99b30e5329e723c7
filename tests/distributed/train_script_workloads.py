"""Runs for test_train_script.py; every function runs on a rank."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from deepspeed.pipe import PipelineModule

import ds_dynmo
from ds_dynmo.errors import CheckpointError
from ds_dynmo.models import language_model_loss, model_layers
from scripts.train import batches, build_cases, build_engine, train
from scripts.training.options import prepare
from scripts.training.report import begin_report, record_nothing
from tests.distributed import workloads


class Killed(Exception):
    """Stands in for what ends a job in the middle."""


def run_script(
    arguments: list[str], killed_in: int | None = None, joined_in: int | None = None, packed_in: int | None = None
) -> dict[str, Any]:
    """What scripts/train.py trains once its ranks have met.

    Args:
        killed_in: the step, counted from 1, in the middle of which everything ends.
        joined_in: the step before which another rank has joined.
        packed_in: the step at whose end the engine goes on with one stage.
    """
    run = prepare(arguments)
    engine = build_engine(run)
    cases = build_cases(run, engine)
    if run.join is not None:
        engine.join(run.join)
    train_batch = engine.train_batch

    def until_killed(data: Any) -> Any:
        if engine.global_steps + 1 == killed_in:
            raise Killed
        if engine.global_steps + 1 == joined_in:
            engine._repacker.world.store.wait(["ready/1"])
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
        "ranks": history.ranks,
        "validation": history.validation_losses,
        "state": workloads.state(engine),
        "replica": engine.grid.get_data_parallel_id(),
    }


def reported(arguments: list[str]) -> tuple[list[float], str]:
    """The losses of a run that writes its report from rank 0, and what rank 0 had to say of it."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        run = prepare(arguments)
        engine = build_engine(run)
        record = begin_report(run.report) if engine.global_rank == 0 else record_nothing
        return train(run, engine, build_cases(run, engine), record).losses, said.getvalue()


def failure_to_save(arguments: list[str]) -> str:
    try:
        run_script(arguments)
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def losses_apart(arguments: list[str]) -> dict[str, Any]:
    """What scripts/train.py reports, and beside it a plain pipeline and an evaluation of the first batch."""
    run = prepare(arguments)
    module = PipelineModule(
        layers=model_layers(run.model), num_stages=run.stages, loss_fn=language_model_loss, partition_method="uniform"
    )
    parameters = list(module.parameters())
    plain = ds_dynmo.initialize(model=module, model_parameters=parameters, config=run.settings)[0]
    data = batches(run, plain, "train")
    totals = [plain.train_batch(data.iterate(step * plain.micro_batches)).item() for step in range(run.steps)]
    engine = build_engine(run)
    evaluated = engine.eval_batch(data.iterate(0)).item()
    history = train(run, engine, build_cases(run, engine))
    return {
        "totals": totals,
        "plain": workloads.state(plain),
        "evaluated": evaluated,
        "losses": history.losses,
        "auxiliary": history.auxiliary_losses,
        "state": workloads.state(engine),
        "replica": engine.grid.get_data_parallel_id(),
    }

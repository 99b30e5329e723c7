"""Train a GPT or a Hugging Face causal language model in a pipeline that re-balances itself, configured by one JSON.

    deepspeed --num_gpus 2 --module ds_dynmo.cli.start_training --deepspeed_config ds_configs/freezing.json

The JSON is DeepSpeed's own, with a "dynmo" section and a "model" section (ds_dynmo.models.ModelConfig). Errors in
either end the command with exit code 2 before a process group exists.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

import ds_dynmo
from ds_dynmo.cli.command_line import refuse_on_ranks
from ds_dynmo.cli.export import export
from ds_dynmo.cli.startup import init_distributed, take_device
from ds_dynmo.cli.training.options import TrainingRun, prepare, settings_all_ranks_share
from ds_dynmo.cli.training.recording import Recording
from ds_dynmo.cli.training.report import (
    History,
    ProgressLines,
    WriteRecord,
    begin_report,
    closing_line,
    closing_table,
    continue_report,
    record_nothing,
    repack_lines,
    summary,
    validation_record,
)
from ds_dynmo.cli.training.resuming import (
    client_state,
    other_checkpoints_hint,
    read_run_metadata,
    write_restart,
)
from ds_dynmo.cli.training.saving import after_failed_save, check_room, claimed, how_to_continue
from ds_dynmo.cli.training.steps import Steps
from ds_dynmo.cli.training.stopping import StopSignals
from ds_dynmo.data import TokenBatches
from ds_dynmo.engine.comm.hosts import check_launch
from ds_dynmo.engine.comm.same_facts import check_same
from ds_dynmo.engine.save.folder import write_latest
from ds_dynmo.engine.save.listing import checkpoints
from ds_dynmo.errors import CheckpointError, ConfigError, PartitionError
from ds_dynmo.files import path_in_errors
from ds_dynmo.files.claims import check_claim
from ds_dynmo.models import (
    DynamicCase,
    LanguageModelPipeline,
    dynamic_cases,
)
from ds_dynmo.models.vocabulary import takes_labels, with_labels

VALIDATIONS = 5
ALONE = "One process, so one stage: no layer can move. Start several by deepspeed or torchrun."
NOT_BEGUN = "Nothing was trained"
UNSAVED = "Weights will not be saved. Pass --save DIR, and --export DIR for a folder that transformers reads."


def build_engine(run: TrainingRun, partition_method: str = "uniform") -> Any:
    """Build the model in stages, and the engine around it; load the checkpoint of a resumed run. Collective.

    Raises:
        ConfigError: ranks were given different data or settings, or what the engine refuses.
    """
    check_same(settings_all_ranks_share(run))
    module = LanguageModelPipeline(run.layers, num_stages=run.stages, partition_method=partition_method)
    engine, *_ = ds_dynmo.initialize(
        args=argparse.Namespace(local_rank=run.local_rank),
        model=module,
        model_parameters=list(module.parameters()),
        config=run.settings,
    )
    if takes_labels(run.layers):
        engine.set_batch_fn(with_labels)
    if run.resumed is not None:
        if engine.dynmo is None and engine.partition != run.resumed["partition"]:
            raise ConfigError(
                f"--resume {run.resume}: was saved under partition {run.resumed['partition']}, this run has "
                f'{engine.partition}; a "dynmo" section loads it'
            )
        load(run, engine)
    return engine


def load(run: TrainingRun, engine: Any) -> None:
    """Load the checkpoint of a resumed run. Collective.

    Raises:
        CheckpointError: on every rank: it, or with ``--newest-whole`` any in its folder, cannot be loaded.
    """
    assert run.resumed is not None
    tag, newest_whole = run.resumed["tag"], {"newest_whole": True} if run.newest_whole else {}
    try:
        engine.load_checkpoint(str(run.resume), tag=tag, **newest_whole)
    except CheckpointError as error:
        others = [] if run.newest_whole else [other for other in checkpoints(str(run.resume)) if other != tag]
        raise CheckpointError(f"{error}{other_checkpoints_hint(others)}") from error


def as_loaded(run: TrainingRun, engine: Any) -> TrainingRun:
    """Return the run as it goes on from the checkpoint that was loaded, another one if its own was damaged."""
    if run.resume is None or run.resumed is None or engine.global_steps == run.first_step:
        return run
    return replace(run, resumed=read_run_metadata(run.resume, f"global_step{engine.global_steps}"))


def build_cases(run: TrainingRun, engine: Any) -> list[DynamicCase]:
    """Build the dynamic cases, which change the model's work while it trains, in the state of a resumed run."""
    cases = dynamic_cases(run.model, engine, total_steps=run.steps)
    if run.resumed is not None:
        # The engine stops a job for a restart (repack.release "checkpoint") at the end of train_batch: it saved the
        # state of the cases before their after_batch.
        after_batch_pending = run.resumed["in_step"]
        for case in cases:
            case.load_state_dict(run.resumed["cases"][case.name])
            if after_batch_pending:
                case.after_batch(run.resumed["step"])
    if engine.dynmo is not None and engine.dynmo.repack.checkpoint is not None:
        engine.before_release(lambda: write_restart(engine, run_metadata(run, engine, cases)))
    return cases


def train(run: TrainingRun, engine: Any, cases: list[DynamicCase], record: WriteRecord = record_nothing) -> History:
    """Train up to ``run.stop`` on every rank.

    Rank 0 passes each step to ``record``. A run that saves also ends at SIGINT or SIGTERM: ``history.stopped``.
    """
    with StopSignals(run.save is not None, None if engine.dynmo is None else engine.stage.comm) as stop:
        if engine.dynmo is not None:
            engine.before_release(stop.settle)
        return train_until(stop, run, engine, cases, record)


def train_until(
    stop: StopSignals, run: TrainingRun, engine: Any, cases: list[DynamicCase], record: WriteRecord
) -> History:
    """Train up to ``run.stop``, or to the batch in which ranks agree to ``stop``."""
    history = History()
    data = batches(run, engine, "train").iterate(engine.micro_batches_taken, micro_batches=engine.micro_batches)
    progress = ProgressLines(run, engine)
    steps = Steps(run, engine, history, record)
    recording = Recording(run, engine, run.record if engine.global_rank == 0 else None)
    validation = batches(run, engine, "validation")
    while engine.global_steps < run.stop:
        steps.begin()
        for case in cases:
            case.before_batch(engine.global_steps)
        engine.train_batch(data)
        if engine.released:
            break
        step = engine.global_steps - 1
        history.decisions_seen(engine)
        recording.batch()
        for case in cases:
            case.after_batch(step + 1)
        last = step + 1 == run.stop
        if last:
            stop.settle()
        else:
            history.stopped = stop.agreed(engine.device)
        validates = last or ends_part(step, run.steps, VALIDATIONS)
        due = run.save_interval and (step + 1) % run.save_interval == 0
        saves = run.save is not None and bool(last or due or history.stopped)
        steps.end(is_read=progress.is_due(step + 1) or validates or saves)
        if progress.is_due(step + 1):
            progress.step(step + 1, history)
        if validates:
            history.validation_losses.append((step + 1, validate(engine, validation)))
            progress.say(f"step {step + 1}: validation loss {history.validation_losses[-1][1]:.3f}")
            if engine.global_rank == 0:
                record(validation_record(history))
        if saves:
            tag = f"global_step{step + 1}"
            progress.say(f"step {step + 1}: saving checkpoint {tag} in {run.save}")
            save(run, engine, cases, tag)
            if last or history.stopped:
                engine.wait_for_save()
        if history.stopped:
            progress.say(stopped_line(run, history.stopped, tag, step + 1))
            break
    steps.read()
    return history


def ends_part(step: int, steps: int, parts: int) -> bool:
    """Return whether batch ``step``, counted from 0, is the last of one of ``parts`` equal parts of a run."""
    return (step + 1) * parts // steps > step * parts // steps


def batches(run: TrainingRun, engine: Any, split: Any) -> TokenBatches:
    replicas, size = engine.grid.get_data_parallel_world_size(), engine.train_micro_batch_size_per_gpu()
    # A run of other replicas may have ended within a round of micro-batches, one for each replica.
    begun = engine.global_samples // size % replicas if split == "train" else 0
    found = run.text.batches(
        split,
        micro_batch_size=size,
        sequence_length=run.model.sequence_length,
        seed=run.model.seed,
        replica=engine.grid.get_data_parallel_rank(),
        replicas=replicas,
        sampling=run.model.sampling if split == "train" else "random",
    )
    return replace(found, begun=begun)


def validate(engine: Any, validation: TokenBatches) -> float:
    """Measure the validation loss, every time on the same micro-batches."""
    return float(engine.eval_batch(validation.iterate(micro_batches=engine.micro_batches)))


def run_metadata(run: TrainingRun, engine: Any, cases: list[DynamicCase]) -> dict[str, Any]:
    """Return what a run resumes from besides its layers, as plain JSON values. Collective."""
    return {
        **run.state_dict(),
        "step": engine.global_steps,
        "stages": engine.num_stages,
        "partition": engine.partition,
        "cases": {case.name: case.state_dict() for case in cases},
    }


def save(run: TrainingRun, engine: Any, cases: list[DynamicCase], tag: str) -> None:
    """Save a checkpoint, with the metadata from which a run resumes. Collective.

    Raises:
        CheckpointError: on every rank, without a "dynmo" section on rank 0; earlier checkpoints are untouched.
    """
    metadata = run_metadata(run, engine, cases)
    if engine.dynmo is None and engine.global_rank == 0:
        check_claim(str(run.save))
    save_checkpoint = partial(
        engine.save_checkpoint,
        str(run.save),
        tag=tag,
        client_state=client_state(metadata),
        save_latest=engine.dynmo is not None,
        exclude_frozen_parameters=not run.model.save_base,
    )
    if engine.dynmo is not None:
        save_checkpoint()
        return
    try:
        with path_in_errors(f"{run.save}/{tag}"):
            save_checkpoint()
        if engine.global_rank == 0:  # DeepSpeed would name it while other ranks write
            write_latest(str(run.save), tag)
    except OSError as error:
        raise CheckpointError(f"{run.save}: checkpoint {tag} was not saved: {error}") from error


def resumed_line(run: TrainingRun) -> str:
    """Say which checkpoint a run is resumed from."""
    assert run.resume is not None and run.resumed is not None
    stages = f"stages: {run.resumed['stages']} when saved, {run.stages} now"
    return f"resuming from {run.resume / run.resumed['tag']}: step {run.first_step} of {run.steps}; {stages}"


def stopped_line(run: TrainingRun, number: int, tag: str, step: int) -> str:
    """Say which signal ended a run, and how to continue it. A ``--tag`` of its command named another checkpoint."""
    flags = f"--resume {run.save}" if run.tag is None else f"--resume {run.save} --tag {tag}"
    return f"stopped by {signal.Signals(number).name}; the same command with {flags} continues from step {step}"


def main(arguments: list[str] | None = None) -> int:
    ds_dynmo.end_with_launcher()  # also while data are read, which may take minutes
    run = None
    try:
        launched = ds_dynmo.set_rank_variables()
        run = prepare(sys.argv[1:] if arguments is None else arguments)
        first_rank = int(os.environ["RANK"]) == 0
        with claimed(run) if first_rank else nullcontext():
            return train_and_export(run, first_rank=first_rank, launched=launched)
    except (ConfigError, PartitionError) as error:
        return refuse_on_ranks(error)
    except KeyboardInterrupt:
        if os.environ["RANK"] == "0":
            print(f"stopped by SIGINT. {how_to_continue(run) if run is not None else NOT_BEGUN}", flush=True)
        return 128 + signal.SIGINT


def train_and_export(run: TrainingRun, *, first_rank: bool, launched: bool) -> int:
    """Train, save and export what a run is to, and return the exit code of the command."""
    if get_accelerator().device_name() == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # all stages share this machine's cores
    if not launched:
        print(ALONE, flush=True)
    if first_rank and run.model.huggingface is not None and run.save is None and run.record is None:
        print(UNSAVED, flush=True)
    if first_rank and run.resumed is not None:
        print(resumed_line(run), flush=True)
    torch.manual_seed(run.model.seed)
    np.random.seed(run.model.seed)
    random.seed(run.model.seed)
    unwritten = begin_report(run) if first_rank else []

    try:
        check_launch()
        take_device(run.local_rank)
        init_distributed()
    except ConfigError as error:
        return refuse_on_ranks(error, retry=True)
    try:
        engine = build_engine(run)
        if (loaded := as_loaded(run, engine)) is not run:
            run = loaded
            if first_rank:
                print(resumed_line(run), flush=True)
        check_room(run, engine)
        if engine.dynmo is not None:
            engine.stage.comm.how_to_continue = partial(how_to_continue, run)
        cases = build_cases(run, engine)
        record = continue_report(run, engine, unwritten) if first_rank else record_nothing
        try:
            history = train(run, engine, cases, record)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {after_failed_save(run)}") from error
    except (CheckpointError, ConfigError, PartitionError) as error:
        return refuse_on_ranks(error, retry=isinstance(error, CheckpointError))
    if first_rank and not history.stopped:
        numbers = summary(run, engine, history)
        record(numbers)
        closing = [
            *(closing_table(run, engine, history) if run.record is None else [f"recorded in {run.record}"]),
            *repack_lines(engine),
            closing_line(history, numbers),
        ]
        print("\n".join(["", *closing]), flush=True)
    if not engine.released:
        deepspeed.comm.destroy_process_group()
    if history.stopped:
        return 128 + history.stopped  # as a shell says it of a process that a signal ended
    if first_rank and run.export is not None:
        assert run.save is not None
        try:
            export(run.save, run.export)
        except (CheckpointError, ConfigError) as error:
            retry = f"the run is saved: ds-dynmo-export {run.save} {run.export} exports it"
            return refuse_on_ranks(CheckpointError(f"{error}; {retry}"))
        print(f"exported to {run.export}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

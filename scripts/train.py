"""Trains a byte-level GPT in a pipeline that re-balances itself, as one JSON says.

    deepspeed --num_gpus 2 scripts/train.py --deepspeed_config ds_configs/freezing.json

The JSON is DeepSpeed's own, with a "dynmo" block and a "model" block (ds_dynmo.models.ModelConfig). What can be wrong
with either is refused with exit code 2 before a process group exists.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from tqdm import tqdm  # type: ignore[import-untyped]

import ds_dynmo
from ds_dynmo.config import load_json, read_dynmo_config
from ds_dynmo.errors import CheckpointError, ConfigError, PartitionError
from ds_dynmo.models import (
    Batches,
    ByteText,
    DynamicCase,
    EpochBatches,
    ModelConfig,
    dynamic_cases,
    language_model_loss,
    load_text,
    model_layers,
    read_model_config,
)
from ds_dynmo.plan import Profile, RebalanceReport

RESUME_FILE = "dynmo_train.json"
VALIDATIONS = 5
PROGRESS_LINES = 20
LAST_STEPS = 10  # the training loss that is reported at the end is their mean
FIRST_RANK_SECONDS = 10.0


@dataclass(frozen=True)
class Run:
    """A run whose every setting has been checked."""

    settings: dict[str, Any]
    model: ModelConfig
    text: ByteText
    steps: int
    stages: int
    local_rank: int
    report: Path | None
    save: Path | None
    resume: Path | None
    resumed: dict[str, Any] | None

    @property
    def first_step(self) -> int:
        return self.resumed["step"] if self.resumed else 0


@dataclass
class History:
    """What the closing table is made from."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    cases: dict[str, dict[str, float]] = field(default_factory=dict)  # what each has to say at the end
    profiles: list[Profile | None] = field(default_factory=list)  # for each report, what it was decided on

    def decisions_seen(self, engine: Any) -> None:
        """Keeps the profile behind every new report."""
        for report in engine.reports[len(self.profiles) :]:
            profile = engine.profile
            known = profile is not None and profile.partition == report.old_partition
            self.profiles.append(profile if known else None)


# -- before the process group exists -----------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(description="Train a GPT in a pipeline that re-balances itself.", allow_abbrev=False)
    parser.add_argument("--deepspeed_config", required=True, metavar="JSON", help='with "model" and "dynmo" blocks')
    parser.add_argument("--data", metavar="FILE_OR_FOLDER", help="text (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=150, help="batches in total (default: 150)")
    parser.add_argument("--seed", type=int, help="of weights and data (default: the model block's)")
    parser.add_argument("--stages", type=int, help="of the pipeline (default: the number of processes)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="JSON lines: start, rebalance, measured, end")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint at the end")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from a checkpoint that --save wrote")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def prepare(arguments: list[str]) -> Run:
    """Everything that can be checked without the other processes.

    Raises:
        ConfigError: naming the option, key or path, its value and what is allowed.
    """
    args = parse_arguments(arguments)
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError("start with DeepSpeed's launcher: deepspeed --num_gpus 2 scripts/train.py ...")
    settings = load_json(args.deepspeed_config)
    dynmo = read_dynmo_config(settings)
    model = read_model_config(settings)
    if model.freezing is not None and dynmo is None:
        raise ConfigError('model.freezing: needs a "dynmo" block, stock DeepSpeed cannot train a frozen front')
    if model.moe is not None and model.moe.routing == "bias" and dynmo is None:
        raise ConfigError('model.moe.routing = "bias": needs a "dynmo" block, its counts are summed over replicas')
    if model.moe is not None and model.moe.expert_parallel and dynmo is None:
        raise ConfigError('model.moe.expert_parallel: needs a "dynmo" block, stock DeepSpeed would average the experts')
    if model.pruning is not None and dynmo is None:
        raise ConfigError('model.pruning: needs a "dynmo" block, stock DeepSpeed cannot sum over its stages')
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: should be at least 1")
    if args.seed is not None:
        if not 0 <= args.seed < 2**32:
            raise ConfigError(f"--seed {args.seed}: should be in 0 to 2**32 - 1")
        model = model.model_copy(update={"seed": args.seed})
    stages = check_stages(args.stages, int(os.environ["WORLD_SIZE"]), len(model_layers(model)))
    text = load_text(args.data)
    text.check_length(model.sequence_length)
    settings = dict(settings)
    if dynmo is not None:
        settings["dynmo"] = dict(settings["dynmo"])
    resumed = None
    if args.resume is not None:
        resumed = read_resume_file(args.resume, model, args.steps)
    if args.save is not None:
        with refusing("--save", args.save):
            args.save.mkdir(parents=True, exist_ok=True)
    report = args.report
    if report is not None and dynmo is not None:
        settings["dynmo"]["report"] = str(report)
    elif report is None and dynmo is not None and dynmo.report is not None:
        report = Path(dynmo.report)
    if report is not None:
        with refusing("--report", report):
            report.parent.mkdir(parents=True, exist_ok=True)
            report.open("a").close()
    return Run(
        settings=settings,
        model=model,
        text=text,
        steps=args.steps,
        stages=stages,
        local_rank=args.local_rank,
        report=report,
        save=args.save,
        resume=args.resume,
        resumed=resumed,
    )


def check_stages(stages: int | None, world_size: int, num_layers: int) -> int:
    """The number of pipeline stages: what was asked for, or one per process."""
    if stages is None:
        stages = world_size
    if stages < 1 or world_size % stages:
        raise ConfigError(f"--stages {stages}: should divide the number of processes, {world_size}")
    if stages > num_layers:
        raise ConfigError(f"--stages {stages}: the model has {num_layers} layers, at most one stage each")
    return stages


def read_resume_file(folder: Path, model: ModelConfig, steps: int) -> dict[str, Any]:
    """What the run that is resumed was, if this one can go on from it."""
    if not folder.is_dir():
        raise ConfigError(f"--resume {folder}: no such folder")
    resumed = load_json(folder / RESUME_FILE)
    missing = {"step", "partition", "model", "cases"} - resumed.keys()
    if missing:
        raise ConfigError(f"--resume {folder}: {RESUME_FILE} lacks {', '.join(sorted(missing))}")
    saved_model = read_model_config(resumed)
    for key in ModelConfig.model_fields:
        if getattr(model, key) != getattr(saved_model, key):
            raise ConfigError(
                f"--resume {folder}: was trained with model.{key} = {getattr(saved_model, key)}, "
                f"this run has {getattr(model, key)}"
            )
    if resumed["step"] >= steps:
        raise ConfigError(f"--resume {folder}: is at step {resumed['step']}, --steps {steps} leaves nothing to do")
    return resumed


@contextmanager
def refusing(option: str, path: Path) -> Iterator[None]:
    """An OSError as a ConfigError that names the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from error


def refuse(error: Exception) -> int:
    """Says once what is wrong; 2, the exit code.

    The launcher ends all ranks when it sees one of them gone. So that rank 0 has the word, the others wait for
    that; one that is still there then has a trouble of its own.
    """
    rank = int(os.environ.get("RANK", 0))
    where = ""
    if rank:
        time.sleep(FIRST_RANK_SECONDS)
        where = f" on rank {rank}"
    print(f"train.py: error{where}: {error}", file=sys.stderr, flush=True)
    return 2


# -- training ----------------------------------------------------------------------------------------------


def build_engine(run: Run) -> Any:
    """The model in uniform stages, and the engine around it."""
    module = PipelineModule(
        layers=model_layers(run.model), num_stages=run.stages, loss_fn=language_model_loss, partition_method="uniform"
    )
    engine, *_ = ds_dynmo.initialize(
        args=argparse.Namespace(local_rank=run.local_rank),
        model=module,
        model_parameters=list(module.parameters()),
        config=run.settings,
    )
    if run.resumed is not None:
        if engine.dynmo is None and engine.partition != run.resumed["partition"]:
            raise ConfigError(
                f"--resume {run.resume}: was saved under partition {run.resumed['partition']}, this run has "
                f'{engine.partition}; a "dynmo" block loads it'
            )
        engine.load_checkpoint(str(run.resume))
    return engine


def train(run: Run, engine: Any) -> History:
    """Trains to the last step, on every rank alike."""
    history = History()
    cases = dynamic_cases(run.model, engine, total_steps=run.steps)
    if run.resumed is not None:
        for case in cases:
            case.load_state_dict(run.resumed["cases"][case.name])
    training = batches(run, engine, "train")
    progress = Progress(run, engine)
    caches = run.model.freezing is not None and run.model.freezing.cache_bytes > 0
    if caches and isinstance(training, EpochBatches) and run.steps * engine.micro_batches <= len(training.epoch):
        progress.say(f"model.freezing.cache_bytes: in {run.steps} steps no text comes again, nothing will be found")
    for step in range(engine.global_steps, run.steps):
        for case in cases:
            case.before_batch(step)
        began = time.perf_counter()
        loss = engine.train_batch(training.iterate(step * engine.micro_batches))
        if engine.released:
            break
        history.losses.append(float(loss))
        history.step_seconds.append(time.perf_counter() - began)
        history.decisions_seen(engine)
        for case in cases:
            case.after_batch(step + 1)
        progress.step(step + 1, history)
        if (step + 1) * VALIDATIONS // run.steps > step * VALIDATIONS // run.steps:
            history.validation_losses.append((step + 1, validate(run, engine)))
            progress.say(f"step {step + 1}: validation loss {history.validation_losses[-1][1]:.3f}")
    progress.close()
    if not engine.released:
        history.cases = {case.name: numbers for case in cases if (numbers := case.summary())}
    if run.save is not None and not engine.released:
        save(run, engine, cases)
    return history


def batches(run: Run, engine: Any, split: Any) -> Batches:
    return run.text.batches(
        split,
        micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        sequence_length=run.model.sequence_length,
        seed=run.model.seed,
        replica=engine.grid.get_data_parallel_rank(),
        replicas=engine.grid.get_data_parallel_world_size(),
        sampling=run.model.sampling if split == "train" else "random",
    )


def validate(run: Run, engine: Any) -> float:
    """The loss on the same micro-batches every time."""
    return float(engine.eval_batch(batches(run, engine, "validation").iterate()))


def save(run: Run, engine: Any, cases: list[DynamicCase]) -> None:
    """A checkpoint, and beside it what :func:`read_resume_file` reads."""
    engine.save_checkpoint(str(run.save))
    states = {case.name: case.state_dict() for case in cases}
    if engine.global_rank == 0:
        resume = {
            "step": engine.global_steps,
            "partition": engine.partition,
            "model": run.model.model_dump(mode="json"),
            "cases": states,
        }
        assert run.save is not None
        (run.save / RESUME_FILE).write_text(json.dumps(resume, indent=2) + "\n")


# -- what is said on rank 0 --------------------------------------------------------------------------------


class Progress:
    """A bar on a terminal, a line now and then elsewhere; nothing on other ranks."""

    def __init__(self, run: Run, engine: Any) -> None:
        self._first_rank = engine.global_rank == 0
        self._steps = run.steps
        self._every = max(1, run.steps // PROGRESS_LINES)
        self._tokens = tokens_per_step(run, engine)
        self._bar: tqdm | None = None
        if self._first_rank and sys.stderr.isatty():
            self._bar = tqdm(total=run.steps, initial=run.first_step, unit="step", dynamic_ncols=True)

    def step(self, steps_done: int, history: History) -> None:
        seconds = history.step_seconds[-self._every :]
        speed = self._tokens * len(seconds) / sum(seconds)
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {history.losses[-1]:.3f}, {speed:,.0f} tokens/s", refresh=False)
            self._bar.update()
        elif steps_done % self._every == 0 or steps_done == self._steps or len(history.losses) == 1:
            self.say(f"step {steps_done}/{self._steps}: loss {history.losses[-1]:.3f}, {speed:,.0f} tokens/s")

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line)
        elif self._first_rank:
            print(line, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def tokens_per_step(run: Run, engine: Any) -> int:
    return int(engine.train_batch_size()) * run.model.sequence_length


def closing_table(run: Run, engine: Any, history: History) -> list[str]:
    """One line per decision: what it changed, and what was measured before and after."""
    if not engine.reports:
        return []
    tokens = tokens_per_step(run, engine)
    rows = [("step", "reason", "partition", "tokens/s", "bubble ratio", "imbalance")]
    for report, profile in zip(engine.reports, history.profiles):
        measured = [m for m in engine.measurements if report.moved and m.rebalance_step == report.step]
        before = batch_numbers(report, profile, tokens)
        after = ("-", "-", "-")
        if measured:
            first = measured[0]
            after = (f"{tokens / first.batch_seconds:,.0f}", f"{first.bubble_ratio:.2f}", f"{first.imbalance:.2f}")
        if report.moved:
            partition = f"{list(report.old_partition)} -> {list(report.new_partition)}"
        else:
            partition = f"{list(report.old_partition)} kept"
        changes = [f"{old} -> {new}" if report.moved else old for old, new in zip(before, after)]
        rows.append((str(report.step), report.reason, partition, *changes))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def batch_numbers(report: RebalanceReport, profile: Profile | None, tokens: int) -> tuple[str, str, str]:
    """Tokens per second, bubble ratio and imbalance when ``report`` was decided."""
    if profile is None or report.imbalance_before is None:
        return ("-", "-", "-")
    busy_seconds = profile.micro_batches * sum(profile.costs("time")) / (len(profile.partition) - 1)
    bubble_ratio = max(0.0, 1 - busy_seconds / profile.batch_seconds)
    return (f"{tokens / profile.batch_seconds:,.0f}", f"{bubble_ratio:.2f}", f"{report.imbalance_before:.2f}")


def case_lines(history: History) -> list[str]:
    """One line per case that has numbers."""
    return [
        f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {value:,.0f}" for key, value in numbers.items())
        for name, numbers in history.cases.items()
    ]


def summary(run: Run, engine: Any, history: History) -> dict[str, Any]:
    """The numbers of the whole run; validation is not in its time."""
    last = history.losses[-LAST_STEPS:]
    seconds = sum(history.step_seconds)
    return {
        "kind": "end",
        "steps": engine.global_steps,
        "partition": engine.partition,
        "tokens_per_second": tokens_per_step(run, engine) * len(history.losses) / seconds,
        "train_seconds": seconds,
        "median_step_seconds": statistics.median(history.step_seconds),
        "train_loss": statistics.fmean(last),
        "first_train_loss": history.losses[0],
        "validation_loss": history.validation_losses[-1][1],
        "validation_losses": history.validation_losses,
        "cases": history.cases,
    }


def write_record(path: Path | None, record: dict[str, Any], mode: str) -> None:
    if path is not None:
        with path.open(mode) as lines:
            lines.write(json.dumps(record) + "\n")


def main(arguments: list[str]) -> int:
    try:
        run = prepare(arguments)
    except (ConfigError, PartitionError) as error:
        return refuse(error)

    first_rank = int(os.environ["RANK"]) == 0
    if get_accelerator().device_name() == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # every stage has a process of its own on this machine
    get_accelerator().set_device(run.local_rank)
    torch.manual_seed(run.model.seed)
    np.random.seed(run.model.seed)
    random.seed(run.model.seed)
    if first_rank:
        start = {"kind": "start", "steps": run.steps, "first_step": run.first_step, "stages": run.stages}
        model = run.model.model_dump(mode="json")
        write_record(run.report, {**start, "data": run.text.name, "model": model, "config": run.settings}, "w")

    deepspeed.init_distributed()
    try:
        engine = build_engine(run)
    except (CheckpointError, ConfigError, PartitionError) as error:
        return refuse(error)
    history = train(run, engine)
    if first_rank:
        numbers = summary(run, engine, history)
        write_record(run.report, numbers, "a")
        closing = (
            f"{numbers['tokens_per_second']:,.0f} tokens/s, train loss {numbers['train_loss']:.3f} "
            f"(last {len(history.losses[-LAST_STEPS:])} steps), validation loss {numbers['validation_loss']:.3f}"
        )
        lines = itertools.chain([""], closing_table(run, engine, history), case_lines(history), [closing])
        print("\n".join(lines), flush=True)
    if not engine.released:
        deepspeed.comm.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

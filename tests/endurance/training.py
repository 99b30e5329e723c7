"""Train a launch of a round; every function runs on a rank."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_dynmo.models import dynamic_cases
from tests.endurance import disturbances
from tests.endurance.plan import Launch, Round
from tests.support import case_runs
from tests.support.case_runs import CaseRun
from tests.support.configs import Case
from tests.support.deaths import die_at
from tests.support.models import layers
from tests.support.sliced_layers import sliced_layers
from tests.support.training import batches, build, drop_decision, state

CHECKPOINTS = "checkpoints"
DIED = "died"  # a rank that kills itself writes it
SEED_OF_EVALUATION = 7


@dataclass(frozen=True)
class Job:
    """An engine, its data and its dynamic cases."""

    engine: Any
    cases: Sequence[Any]
    micro_batches: Any  # a function of the seed

    def data(self) -> Iterator[Any]:
        """Return the micro-batches that follow those that were trained."""
        return islice(self.micro_batches(0), self.engine.global_steps * self.engine.micro_batches, None)

    def save(self, folder: Path) -> None:
        """Write a checkpoint, as the configuration has it: with the state of the cases."""
        states = json.dumps([case.state_dict() for case in self.cases])
        self.engine.save_checkpoint(str(folder), client_state={"cases": states})

    def load(self, folder: Path) -> None:
        """Go on from the last checkpoint, if there is one."""
        if (folder / "latest").exists():
            _, client_state = self.engine.load_checkpoint(str(folder))
            for case, saved in zip(self.cases, json.loads(client_state["cases"]), strict=True):
                case.load_state_dict(saved)


class Progress:
    """What rank 0 has done, one JSON line each, so that a killed launch has its losses, and a hanging one its place."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a") if dist.get_rank() == 0 else None

    def note(self, **what: Any) -> None:
        if self._file is not None:
            print(json.dumps(what), file=self._file, flush=True)


def start(case: Case | CaseRun, launch: Launch) -> Job:
    """Build what a launch trains."""
    case = replace(case, stages=launch.stages, dynmo=launch.section)
    if isinstance(case, Case):
        engine = build(case, sliced_layers if case.slices else layers)
        return Job(engine, (), lambda seed: batches(engine, seed))
    engine, model = case_runs.build(case)
    cases = dynamic_cases(model, engine, total_steps=case.steps)
    return Job(engine, cases, lambda seed: case_runs.batches(engine, model, seed))


def train(plan: Round, number: int | None, folder: str, seconds: float) -> dict[str, Any]:
    """Train a launch of a round, to the end of the round if nothing kills it.

    Args:
        number: of the launch; None: the undisturbed one.
        folder: of the round.
        seconds: after which a rank that is not done writes where its threads are.
    """
    launch = plan.undisturbed if number is None else plan.launches[number]
    place = Path(folder)
    with (place / f"stacks-{number}-rank{dist.get_rank()}.txt").open("w") as stacks:
        faulthandler.dump_traceback_later(seconds, file=stacks)
        try:
            return _train(plan, launch, number, place)
        finally:
            sys.setprofile(None)
            faulthandler.cancel_dump_traceback_later()


def _train(plan: Round, launch: Launch, number: int | None, folder: Path) -> dict[str, Any]:
    job, checkpoints, rank = start(plan.case, launch), folder / CHECKPOINTS, dist.get_rank()
    engine, progress, losses = job.engine, Progress(folder / f"progress-{number}.jsonl"), {}
    if number is not None:
        job.load(checkpoints)
        progress.note(resumed=engine.global_steps, stages=engine.num_stages)
    data, death = job.data(), launch.death
    while engine.global_steps < plan.steps:
        step = engine.global_steps
        if death is not None and death.rank == rank and step >= death.step:
            die_at(death.calls, (folder / DIED).touch)
            death = None
        for case in job.cases:
            case.before_batch(step)
        if number is None:
            drop_decision(engine)
        losses[step] = engine.train_batch(data).item()
        progress.note(step=step, loss=losses[step], moves=_moves(engine), repacks=len(engine.repacks))
        chooser = random.Random(f"{plan.seed}, launch {number}, step {step}")
        for case in job.cases if not engine.released else ():
            case.after_batch(step + 1)
        while not engine.released and chooser.random() < launch.disturbed / 2:
            name, disturb = disturbances.draw(
                chooser, engine, lambda _: job.save(checkpoints), has_two_chunks=launch.has_two_chunks
            )
            progress.note(begins=name)
            disturb(engine)
            progress.note(done=name, moves=_moves(engine), repacks=len(engine.repacks))
        if engine.released:
            return {"losses": losses}
    if number is not None:
        job.save(checkpoints)
        engine.wait_for_save()
    return {
        "losses": losses,
        "state": state(engine),
        "replica": engine.grid.get_data_parallel_id(),
        "evaluated": engine.eval_batch(job.micro_batches(SEED_OF_EVALUATION)).item(),
        "counters": (engine.global_steps, engine.global_samples, engine.module.micro_offset, engine.skipped_steps),
        "lr": engine.get_lr(),
    }


def _moves(engine: Any) -> int:
    return sum(report.moved and report.reason != "initial" for report in engine.reports)


def nothing() -> int:
    """Do nothing, so that the server that forks ranks has started."""
    return os.getpid()

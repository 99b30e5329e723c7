"""One trial: train with a fault, see how each rank ends, resume without it, and compare with undisturbed training."""

from __future__ import annotations

import faulthandler
import json
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_dynmo.engine.comm import watch
from ds_dynmo.errors import CheckpointError, MigrationError, PartitionError, raise_unless_harmless
from tests.faults.fault import DAMAGES, OF_LINKS, TIMEOUT_SECONDS, Fault
from tests.support.configs import Case
from tests.support.harness import End, RankError, run, run_to_the_end
from tests.support.namespaces import network
from tests.support.training import Warnings, batches, build, partitions, state, whole

STEPS = 6
SECONDS = 60.0  # for each launch, on a busy machine
LAST_CHECKPOINT = 4  # after the step of this number
CASES = {
    name: Case(stages=3, precision=precision, groups="two", dropout=True)
    for name, precision in (("fp32", "fp32"), ("bf16 zero1", "bf16 zero1"))
}


def section(*, background: bool, timeout_seconds: float = 60.0) -> dict[str, Any]:
    """Return a "dynmo" section that profiles and decides in every second batch.

    Args:
        timeout_seconds: short only where a fault happens: ranks may need longer to begin, on a busy machine.
    """
    kind = "background" if background else "blocking"
    return {
        "interval": 2,
        "timeout_seconds": timeout_seconds,
        "profile": {"batches": 1, "warmup_batches": 0},
        "min_improvement": 0.9,
        "checkpoint": kind,
        "migration": kind,
        "schedule": "zero_bubble" if background else "1f1b",  # training is the same to the bit
    }


class Notes:
    """Lines of JSON that the ranks of a launch leave, whatever becomes of them."""

    def __init__(self, folder: str, launch: str) -> None:
        self._path = Path(folder, f"notes of {launch}")

    def add(self, what: str, value: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([what, value]) + "\n")

    def all(self, what: str) -> list[Any]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [value for kind, value in map(json.loads, lines) if kind == what]


def train(case: Case, folder: str, launch: str, fault: Fault | None) -> dict[str, Any]:
    """Train on from the last checkpoint, if there is one: move, save, load and re-pack on the way."""
    with Path(folder, f"stacks of {launch}, rank {dist.get_rank()}").open("w") as stacks:
        faulthandler.dump_traceback_later(0.8 * SECONDS, file=stacks)
        try:
            return _train(case, folder, launch, fault)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _train(case: Case, folder: str, launch: str, fault: Fault | None) -> dict[str, Any]:
    notes = Notes(folder, launch)
    rank = dist.get_rank()
    error, watch.logger.error = watch.logger.error, lambda line: notes.add("said", [rank, line])
    engine = build(case)
    checkpoints = Path(folder, "checkpoints")
    if (checkpoints / "latest").exists():
        engine.load_checkpoint(str(checkpoints), newest_whole=True)
    if fault is not None:
        fault.inject(engine, lambda: notes.add("happened", time.monotonic()))
    losses: dict[int, float] = {}
    while engine.global_steps < STEPS:
        step = engine.global_steps
        losses[step] = engine.train_batch(islice(batches(engine), step * engine.micro_batches, None)).item()
        if dist.get_rank() == 0:
            notes.add("loss", [step, losses[step]])
        for act in (_move, _save, _load, _repack):
            if not engine.released:
                try:
                    act(engine, case, checkpoints, notes)
                except (CheckpointError, MigrationError, PartitionError) as failure:
                    raise_unless_harmless(failure)
                    if "neither what it was" in str(failure):
                        raise
                    notes.add("harmless", str(failure))
        if engine.released:
            return {"losses": losses}
    engine.wait_for_save()
    watch.logger.error = error
    return {"losses": losses, "state": state(engine), "replica": 0}


def _move(engine: Any, case: Case, checkpoints: Path, notes: Notes) -> None:
    step, stages = engine.global_steps, engine.num_stages
    to = partitions(replace(case, stages=stages), step, 1)[0]
    if stages > 1:
        engine.rebalance(to, background=step % 2 == 1)


def _save(engine: Any, case: Case, checkpoints: Path, notes: Notes) -> None:
    step = engine.global_steps
    if _is_saved(step):
        engine.save_checkpoint(str(checkpoints))
        if dist.get_rank() == 0 and case.dynmo is not None and case.dynmo["checkpoint"] == "blocking":
            notes.add("saved", step)


def _is_saved(step: int) -> bool:
    return step % 2 == 0 and step <= LAST_CHECKPOINT


def _load(engine: Any, case: Case, checkpoints: Path, notes: Notes) -> None:
    """Load what was saved last. If that is damaged, train on from the one before, or, without one, from here."""
    if _is_saved(engine.global_steps):
        engine.wait_for_save()
        warnings = Warnings(watch.logger)
        engine.load_checkpoint(str(checkpoints), newest_whole=True)
        for message in warnings.messages:  # which checkpoint was refused, and why
            notes.add("harmless", message)


def _repack(engine: Any, case: Case, checkpoints: Path, notes: Notes) -> None:
    if engine.global_steps == STEPS - 1 and engine.num_stages == 3:
        engine.repack(2)


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        happened: whether a rank came to the fault's place.
        ended: "" if training went on, else how the launch ended.
        seconds: from the fault to the end of the last rank that it was not on; None: training went on.
        problem: "" if all was as it has to be.
    """

    fault: Fault
    case: str
    happened: bool
    ended: str
    seconds: float | None
    problem: str


@dataclass(frozen=True)
class Undisturbed:
    """Losses and state of undisturbed training of a case."""

    losses: dict[int, float]
    state: dict[str, Any]

    @classmethod
    def of(cls, name: str, folder: Path) -> Undisturbed:
        """Train a case undisturbed."""
        folder.mkdir()
        case = replace(CASES[name], dynmo=section(background=False))
        ranks = run(3, train, case, str(folder), "undisturbed", None, complete=False)
        return cls(ranks[0]["losses"], whole([rank for rank in ranks if "state" in rank]))


def try_fault(fault: Fault, name: str, seed: int, folder: Path, undisturbed: Undisturbed) -> Outcome:
    """Train with a fault; if that ends the launch, resume it. Return what became of it."""
    chooser = random.Random(seed)
    background = chooser.random() < 0.5
    case = replace(CASES[name], dynmo=section(background=background, timeout_seconds=TIMEOUT_SECONDS))
    notes = Notes(str(folder), "fault")
    ended, seconds = "", None
    try:
        with network(3) if fault.kind in OF_LINKS else nullcontext() as hosts:
            ends = run_to_the_end(3, train, case, str(folder), "fault", fault, seconds=SECONDS, hosts=hosts)
        happened = notes.all("happened")
        if all(end.exit_code == 0 and not end.error for end in ends):
            results = [end.result for end in ends]
        else:
            ended = _how(ends, fault)
            others = [end.at for rank, end in enumerate(ends) if rank != fault.rank]
            seconds = max(others) - happened[0] if happened else None
            stages = chooser.choice([2, 3])
            resumed = replace(case, stages=stages, dynmo=section(background=background))
            results = run(stages, train, resumed, str(folder), "resumed", None, complete=False)
        problem = _problem(results, undisturbed, notes, ends, ended, fault)
    except RankError as error:
        happened, problem = notes.all("happened"), str(error)
    return Outcome(fault, name, bool(happened), ended, seconds, problem)


def _how(ends: list[End], fault: Fault) -> str:
    """Say how the ranks ended, the one with the fault last."""
    texts = []
    for end in sorted(ends, key=lambda end: end is ends[fault.rank]):
        lines = end.error.strip().splitlines()
        texts.append(lines[-1][:400] if lines else f"exit code {end.exit_code}")
    return " | ".join(texts)


def _problem(
    results: list[dict[str, Any]], undisturbed: Undisturbed, notes: Notes, ends: list[End], ended: str, fault: Fault
) -> str:
    """Compare training, or what it resumed with, with the undisturbed one, and check what was said."""
    losses = {step: loss for step, loss in notes.all("loss")}
    for seen in (losses, results[0]["losses"]):
        if seen != {step: undisturbed.losses[step] for step in seen}:
            return f"losses differ: {seen}, undisturbed: {undisturbed.losses}"
    if whole([rank for rank in results if "state" in rank]) != undisturbed.state:
        return "weights or optimizer state differ"
    if fault.kind in DAMAGES and ended:
        return f"a damaged file ended it: {ended}"
    if fault.kind == "a file cut" and notes.all("happened") and not any(".pt: " in t for t in notes.all("harmless")):
        return f"nothing refused the file: {notes.all('harmless')}"
    if not ended:
        return ""
    if min(results[0]["losses"], default=STEPS) < max(notes.all("saved"), default=0):
        return f"resumed before the last checkpoint, {max(notes.all('saved'))}"
    cut, comes_back = fault.kind in OF_LINKS, fault.kind != "exception"  # when the others have gone on without it
    said = [line for rank, line in notes.all("said") if not (comes_back and rank == fault.rank)]
    said = [line for line in said if line.startswith("rank")]
    was_needed = fault.place != "re-pack: release"
    was_killed = fault.kind in ("SIGKILL", "SIGSTOP for too long", "link cut") and was_needed
    names = (
        f"rank {fault.rank} (host",
        f"rank {fault.rank}, with the store",
        f", {fault.rank} at the launch (host",
        f"ranks [{fault.rank}] (as numbered",
    )
    is_right = len(said) in ((1, 2) if cut else (1,))  # one on each other host
    if was_killed and not (is_right and all(any(name in line for name in names) for line in said)):
        return f"said: {said}"
    if was_killed and any("RankLostError" not in end.error for rank, end in enumerate(ends) if rank != fault.rank):
        codes = [end.exit_code for end in ends]
        if any(code not in (0, 1, -9) for code in codes):
            return f"exit codes {codes}"
    return ""

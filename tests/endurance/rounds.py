"""Run a round: train its case undisturbed, then by its launches, and compare losses, weights and optimizer state."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.endurance import training
from tests.endurance.leftovers import Surroundings, parts_of_checkpoints
from tests.endurance.plan import Launch, Round, random_round
from tests.support.harness import RankError, run
from tests.support.training import whole


@dataclass(frozen=True)
class Result:
    """What a round did.

    Attributes:
        did: per launch, what rank 0 noted.
        counts: see :func:`count`.
        failure: "" if all was equal and nothing is left.
    """

    seed: int
    case: str
    launches: tuple[str, ...]
    did: tuple[tuple[Any, ...], ...]
    counts: Mapping[str, int]
    seconds: float
    failure: str

    def line(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps(asdict(self))


class Difference(Exception):
    """A disturbed run is not the undisturbed one."""


def run_round(seed: int, folder: Path, seconds: float) -> Result:
    """Run the round of a seed.

    Args:
        folder: which it makes; it stays if the round fails.
        seconds: limit for each launch.
    """
    plan, began, surroundings = random_round(seed), time.monotonic(), Surroundings.now()
    folder.mkdir(parents=True)
    failure = ""
    try:
        _train_and_compare(plan, folder, seconds)
    except (RankError, Difference) as error:
        failure = str(error)
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    except Exception:
        failure = traceback.format_exc()
    did = tuple(tuple(notes(folder, number)) for number in range(len(plan.launches)))
    left = surroundings.left() + ([] if failure else parts_of_checkpoints(folder / training.CHECKPOINTS))
    if left:
        failure = "\n".join([failure, "left behind:", *left]).strip()
    if not failure:
        shutil.rmtree(folder)
    return Result(
        seed,
        repr(plan.case),
        tuple(map(repr, plan.launches)),
        did,
        count(plan, did),
        round(time.monotonic() - began, 1),
        failure,
    )


def _train_and_compare(plan: Round, folder: Path, seconds: float) -> None:
    def ranks(launch: Launch) -> int:
        return launch.stages * plan.case.ranks // plan.case.stages

    arguments = (str(folder), 0.8 * seconds)
    still = run(ranks(plan.undisturbed), training.train, plan, None, *arguments, seconds=seconds)
    expected = still[0]["losses"]
    for number, launch in enumerate(plan.launches):
        died = folder / training.DIED
        died.unlink(missing_ok=True)
        results = []
        try:
            results = run(ranks(launch), training.train, plan, number, *arguments, seconds=seconds, complete=False)
        except RankError as error:
            if not died.exists():
                raise RankError(f"launch {number}: {error}") from error
        seen = [result["losses"] for result in results]
        seen.append({note["step"]: note["loss"] for note in notes(folder, number) if "step" in note})
        for losses in seen:
            _compare(f"launch {number}: losses", losses, {step: expected[step] for step in losses})
    _compare_ends(still, [result for result in results if "state" in result])


def _compare_ends(still: list[dict[str, Any]], disturbed: list[dict[str, Any]]) -> None:
    for name in ("evaluated", "counters", "lr"):
        _compare(name, [result[name] for result in disturbed], [still[0][name]] * len(disturbed))
    there, here = whole(still), whole(disturbed)
    _compare("names in the state", sorted(here), sorted(there))
    different = [name for name in sorted(there) if here[name] != there[name]]
    _compare("different state", different, [])


def _compare(what: str, found: Any, expected: Any) -> None:
    if repr(found) != repr(expected):  # as text, a NaN equals itself
        raise Difference(f"{what}: {found!r:.2000}; undisturbed: {expected!r:.2000}")


def notes(folder: Path, number: int) -> list[dict[str, Any]]:
    """Read what rank 0 noted of a launch; the last line of a killed one may be cut off."""
    path = folder / f"progress-{number}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def count(plan: Round, did: tuple[tuple[Any, ...], ...]) -> dict[str, int]:
    """Count steps, moves, re-packs and what else was done in a round, by kind."""
    counts: Counter[str] = Counter(launches=len([launch for launch in did if launch]))
    for number, launch in enumerate(did):
        counts["steps"] += sum("step" in note for note in launch)
        counts["moves"] += max((note.get("moves", 0) for note in launch), default=0)
        counts["re-packs"] += max((note.get("repacks", 0) for note in launch), default=0)
        counts.update(f"by hand: {_kind(note['done'])}" for note in launch if "done" in note)
        was_killed = plan.launches[number].death is not None and not _ended(plan, launch)
        counts["kills"] += was_killed
        if number and launch and launch[0].get("resumed"):
            stages = [each.stages for each in plan.launches[number - 1 : number + 1]]
            counts[f"resumes on {_relation(*stages)} stages"] += 1
    return dict(counts)


def _ended(plan: Round, launch: tuple[Any, ...]) -> bool:
    return any(note.get("step") == plan.steps - 1 for note in launch)


def _kind(done: str) -> str:
    return done.partition(" to ")[0]


def _relation(before: int, after: int) -> str:
    return "as many" if before == after else "more" if after > before else "fewer"

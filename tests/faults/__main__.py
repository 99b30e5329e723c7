"""Inject faults, one per trial: ``python -m tests.faults --count 1000``. Print a table, and what went wrong.

Each trial trains three ranks, which move, save, load and re-pack, with a fault at a place, of a kind, on a random rank
in a random step. If that ends them, it resumes them on two or three ranks. All losses, weights and optimizer states
have to be those of undisturbed training.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults.fault import OF_LINKS, ON_FIRST, ON_RELEASED, PLACES, Fault, kinds_at
from tests.faults.trial import CASES, STEPS, Outcome, Undisturbed, try_fault
from tests.support.namespaces import network

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"  # networks are removed by what is there


def random_fault(seed: int) -> tuple[Fault, str]:
    """Draw a fault, and the case that it happens in. All pairs of a place and a kind come in turn."""
    chooser = random.Random(seed)
    place = [*PLACES][seed % len(PLACES)]
    kinds = kinds_at(place)
    rank = 0 if place in ON_FIRST else 1 if place in ON_RELEASED else chooser.randrange(3)
    kind = kinds[seed // len(PLACES) % len(kinds)]
    in_batch = place.startswith("batch")
    fault = Fault(rank, chooser.randrange(STEPS - 1), place, kind, chooser.randrange(4) if in_batch else 0)
    return fault, chooser.choice([*CASES])


def has_networks() -> bool:
    """Return whether links between hosts can be cut here; say why not."""
    try:
        with network(1):
            return True
    except pytest.skip.Exception as reason:
        print(f"no link is cut: {reason}", flush=True)
        return False


def trials(first: int, count: int, folder: Path) -> Iterator[tuple[int, Outcome]]:
    """Try faults of seeds from ``first`` on."""
    undisturbed = {name: Undisturbed.of(name, folder / name) for name in CASES}
    cuts = has_networks()
    for seed in range(first, first + count):
        fault, name = random_fault(seed)
        if fault.kind in OF_LINKS and not cuts:
            continue
        place = folder / str(seed)
        place.mkdir()
        outcome = try_fault(fault, name, seed, place, undisturbed[name])
        if outcome.problem:
            print(f"--seed {seed} --count 1: {outcome}", flush=True)
            print(*(path.read_text() for path in sorted(place.glob("stacks of *"))), sep="\n", flush=True)
        yield seed, outcome
        shutil.rmtree(place)


def table(outcomes: list[Outcome]) -> list[str]:
    """Make the table: per place and kind how many happened, went on and ended, and how long the others took."""
    rows = defaultdict(list)
    for outcome in outcomes:
        if outcome.happened:
            rows[outcome.fault.place, outcome.fault.kind].append(outcome)
    head = ("place", "kind", "happened", "went on", "ended, resumed", "s, median and most", "problems")
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for (place, kind), found in sorted(rows.items()):
        seconds = [outcome.seconds for outcome in found if outcome.seconds is not None]
        times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
        went_on = sum(not outcome.ended for outcome in found)
        problems = sum(bool(outcome.problem) for outcome in found)
        lines.append(
            f"| {place} | {kind} | {len(found)} | {went_on} | {len(found) - went_on} | {times} | {problems or ''} |"
        )
    happened, problems = sum(o.happened for o in outcomes), sum(bool(o.problem) for o in outcomes)
    return [*lines, f"{len(outcomes)} trials, {happened} faults happened, {problems} problems"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="trials")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; with --count 1 it is repeated")
    parser.add_argument("--out", type=Path, default=None, help="write outcomes here, as lines of JSON")
    arguments = parser.parse_args()
    sys.path.append(str(SCRIPTS))
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, outcome in trials(arguments.seed, arguments.count, Path(folder)):
            outcomes.append(outcome)
            if arguments.out is not None:
                with arguments.out.open("a") as file:
                    file.write(json.dumps({"seed": seed, **asdict(outcome)}) + "\n")
    print("\n".join(table(outcomes)), flush=True)
    return int(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

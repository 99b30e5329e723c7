"""Train random cases for hours, and compare each with an undisturbed run: ``python -m tests.endurance --hours 2``.

A round draws a case from its seed: a model, a wrapper, a topology and a schedule. It trains it once as it is, and once
with random moves, decisions, re-packs and saves between batches, also in the background; ranks kill themselves at any
moment, and the job resumes from its last whole checkpoint, on as many stages or others. Losses, weights and optimizer
state have to be equal to the bit, and nothing may be left behind. Each round adds a line of JSON to ``rounds.jsonl`` in
the folder; the end, or Ctrl-C, prints what was done. Decisions by measured times differ when a round is repeated.

``--growth`` instead moves layers a thousand times in the same processes, and looks whether these grow: growth.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    options = _parse(arguments)
    _prepare()
    from tests.endurance import growth, training
    from tests.support.harness import run

    run(1, training.nothing)  # starts the server that forks ranks, which stays
    if options.growth:
        return growth.measure(moves=options.moves, repacks=options.repacks)
    return _endure(options)


def _endure(options: argparse.Namespace) -> int:
    from tests.endurance.rounds import run_round
    from tests.endurance.tally import Tally

    tally, deadline = Tally(), time.monotonic() + 3600 * options.hours
    options.folder.mkdir(parents=True, exist_ok=True)
    seed = options.seed
    with suppress(KeyboardInterrupt), (options.folder / "rounds.jsonl").open("a") as lines:
        while tally.rounds < options.rounds and time.monotonic() < deadline:
            result = run_round(seed, options.folder / f"round-{seed}-{os.getpid()}", options.seconds)
            tally.add(result)
            print(result.line(), file=lines, flush=True)
            if result.failure:
                print(f"round {seed} failed: {result.failure}\n  {result.case}", flush=True)
                print(f"  again: python -m tests.endurance --rounds 1 --seed {seed}", flush=True)
                if not options.keep_going:
                    break
            seed += 1
    print(tally.table(), flush=True)
    return int(bool(tally.failed) or not tally.rounds)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.endurance", description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=float, default=2.0, help="no round begins later; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="how many at most; default: any number")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next ones have the next numbers")
    parser.add_argument("--folder", type=Path, default=Path("endurance"), help="for rounds.jsonl and failed rounds")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a launch hangs; default: %(default)s")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument("--growth", action="store_true", help="measure what processes hold after many moves instead")
    parser.add_argument("--moves", type=int, default=1000, help="of --growth; default: %(default)s")
    parser.add_argument("--repacks", type=int, default=100, help="of --growth; default: %(default)s")
    return parser.parse_args(arguments)


def _prepare() -> None:
    """Do for ranks what tests/conftest.py does, and let SIGTERM end the run as Ctrl-C does."""
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    from guard import scratch_folder

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch_folder())
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    signal.signal(signal.SIGTERM, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())

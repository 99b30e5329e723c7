"""Draw the report of a run as pictures.

    ds-dynmo-plot report.jsonl --trace trace.json --out pictures
    ds-dynmo-plot repacked.jsonl --never never.jsonl --format svg     # the same run without re-packing

``report.jsonl`` is written with ``--report`` of ds-dynmo-train or ``dynmo.report``, ``trace.json`` with
``dynmo.trace``. Needs matplotlib: the extra "plots".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_dynmo.cli.command_line import OneLineParser, refuse
from ds_dynmo.cli.plotting.data import (
    RunRecords,
    TimelineRows,
    read_report,
    read_trace,
    simulated,
    traced,
    traced_steps,
)
from ds_dynmo.config.withdrawn import check_withdrawn
from ds_dynmo.errors import ConfigError
from ds_dynmo.files import atomic_write


def expected(report: RunRecords) -> list[TimelineRows]:
    """Simulate batches before and after the last move, or by the last profile if nothing moved."""
    if not report.profiles:
        return []
    if not report.moves:
        profile = report.profiles[-1]
        title = f"simulated from the profile of step {profile.step}: partition {list(profile.partition)}"
        return [simulated(profile, profile.partition, title)]
    move = report.moves[-1]
    known = [profile for profile in report.profiles if profile.step <= move["step"]]
    if not known:
        return []
    source = f"simulated from the profile of step {known[-1].step}"
    partitions = (move["old_partition"], move["new_partition"])
    return [simulated(known[-1], partition, f"{source}: partition {partition}") for partition in partitions]


def measured(events: list[dict[str, Any]], steps: list[int] | None) -> list[TimelineRows]:
    """Make the timelines of the batches ``steps`` of a trace, or of the first and the last.

    Raises:
        ConfigError: a step is not in the trace.
    """
    there = traced_steps(events)
    for step in steps or []:
        if step not in there:
            raise ConfigError(f"--steps {step}: is not in the trace, which has {there[0]} to {there[-1]}")
    return [traced(events, step) for step in steps or sorted({there[0], there[-1]})]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = OneLineParser(__doc__, prog="ds-dynmo-plot")
    parser.add_argument("report", type=Path, help="JSON lines of a run")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the measured timeline of some of its batches")
    parser.add_argument(
        "--never", type=Path, metavar="FILE", help="the report of the same run that never re-packs, to draw beside it"
    )
    parser.add_argument("--steps", type=int, nargs="+", help="of the trace (default: the first and the last)")
    parser.add_argument("--format", choices=["png", "svg"], default="png", help="of the pictures, default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("pictures"), metavar="FOLDER", help="default: %(default)s")
    check_withdrawn(arguments, "ds-dynmo-plot")
    return parser.parse_args(arguments)


def figures_of(args: argparse.Namespace, report: RunRecords) -> dict[str, Any]:
    """Draw what was asked for, by the name of a file. A run has not all of them.

    Raises:
        ConfigError: a file cannot be read, or lacks what is drawn of it.
    """
    from ds_dynmo.cli.plotting import pictures

    if args.steps is not None and args.trace is None:
        raise ConfigError(f"--steps {args.steps[0]}: needs --trace FILE, whose steps they are")
    never = read_report(args.never) if args.never is not None else None
    if never is not None and bool(never.steps) != bool(report.steps):
        raise ConfigError(f"--never {args.never}: only one of the two reports has tokens/s")
    figures: dict[str, Any] = {
        "loads": pictures.stage_loads(report),
        "speed": pictures.speed(report),
        "ranks": pictures.ranks(report, never),
        "losses": pictures.losses(report),
    }
    if args.trace is not None:
        timelines = measured(read_trace(args.trace), args.steps)
        figures["timeline"] = pictures.timelines(timelines)
    if timelines := expected(report):
        figures["simulated"] = pictures.timelines(timelines)
    return {name: figure for name, figure in figures.items() if figure is not None}


def write(folder: Path, suffix: str, figures: Mapping[str, Any]) -> Iterator[str]:
    """Write each figure, and yield the names of the files.

    Raises:
        OSError: a file cannot be written.
    """
    from ds_dynmo.cli.plotting import pictures

    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        with atomic_write(folder / f"{name}.{suffix}") as new:
            if suffix == "svg":
                new.write_bytes(pictures.svg(figure))
            else:
                figure.savefig(new, format="png", dpi=130)
        yield f"{name}.{suffix}"


def main(arguments: list[str] | None = None) -> int:
    try:
        args = parse(sys.argv[1:] if arguments is None else arguments)
        report = read_report(args.report)
        figures = figures_of(args, report)
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        return refuse("ds-dynmo-plot", f'no {missing}: install the extra "plots" (pip install matplotlib)')
    except ConfigError as error:
        return refuse("ds-dynmo-plot", error)
    try:
        written = sorted(write(args.out, args.format, figures))
    except OSError as error:
        return refuse("ds-dynmo-plot", f"--out {args.out}: cannot be written: {error}")
    print(f"{args.out}: {', '.join(written)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

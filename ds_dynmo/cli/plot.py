"""Draw the report of a run: the run over time, and one batch before and after a decision.

    ds-dynmo-plot report.jsonl
    ds-dynmo-plot report.jsonl --decision 93 --trace trace.json --format svg --out pictures

``report.jsonl`` is written with ``--report`` of ds-dynmo-train or ``dynmo.report``, ``trace.json`` with
``dynmo.trace``. Needs matplotlib: the extra "plot".
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ds_dynmo.cli.command_line import OneLineParser, refuse
from ds_dynmo.cli.plotting.timelines import TimelineRows, around, read_trace, traced, traced_steps
from ds_dynmo.cli.run_records import read_report
from ds_dynmo.config.withdrawn import check_withdrawn
from ds_dynmo.errors import ConfigError, reason_of
from ds_dynmo.files import atomic_write


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
    parser.add_argument(
        "--decision",
        type=int,
        metavar="STEP",
        help="before and after this one (default: the last that changed a batch)",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the measured timeline of some of its batches")
    parser.add_argument("--steps", type=int, nargs="+", help="of the trace (default: the first and the last)")
    parser.add_argument("--format", choices=["png", "svg"], default="png", help="of the pictures, default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("pictures"), metavar="FOLDER", help="default: %(default)s")
    check_withdrawn(arguments, "ds-dynmo-plot")
    return parser.parse_args(arguments)


def figures_of(args: argparse.Namespace) -> dict[str, Any]:
    """Draw what was asked for, by the name of a file. A run without a profile has no batch to simulate.

    Raises:
        ConfigError: a file cannot be read, or lacks what is drawn of it.
    """
    from ds_dynmo.cli.plotting import pictures

    if args.steps is not None and args.trace is None:
        raise ConfigError(f"--steps {args.steps[0]}: needs --trace FILE, whose steps they are")
    report = read_report(args.report)
    figures = {"run": pictures.over_time(report)}
    if batches := around(report, args.decision):
        figures["batch"] = pictures.timelines(batches)
    if args.trace is not None:
        figures["trace"] = pictures.timelines(measured(read_trace(args.trace), args.steps))
    return figures


def write(folder: Path, kind: str, figures: dict[str, Any]) -> list[str]:
    """Write each figure, and return the names of the files.

    Raises:
        OSError: a file cannot be written.
    """
    from ds_dynmo.cli.plotting import pictures

    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{name}.{kind}": figure for name, figure in figures.items()}
    for name, figure in files.items():
        with atomic_write(folder / name) as new:
            pictures.save(figure, new, kind)
    return list(files)


def main(arguments: list[str] | None = None) -> int:
    try:
        args = parse(sys.argv[1:] if arguments is None else arguments)
        figures = figures_of(args)
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        return refuse("ds-dynmo-plot", f'no {missing}: install the extra "plot" (pip install matplotlib)')
    except ConfigError as error:
        return refuse("ds-dynmo-plot", error)
    try:
        written = write(args.out, args.format, figures)
    except OSError as error:
        return refuse("ds-dynmo-plot", f"--out {args.out}: cannot be written: {reason_of(error)}")
    print(f"{args.out}: {', '.join(written)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

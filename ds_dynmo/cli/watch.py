"""Watch a run: the loads of its stages, its partition, moves, tokens/s and losses, from its report, as it is written.

    ds-dynmo-watch report.jsonl                    # in a terminal: a table; elsewhere, or with --plain: lines
    ds-dynmo-watch report.jsonl --once             # how the run stands now
    ds-dynmo-watch report.jsonl --svg view.svg     # the same as a picture

``report.jsonl`` is written with ``--report`` of ds-dynmo-train or ``dynmo.report``. It need not exist yet. The command
ends when the report does, with code 0, or with Ctrl-C, with code 130. The table needs rich: the extra "watch".
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_dynmo.cli.command_line import OneLineParser, refuse
from ds_dynmo.cli.watching.follower import Follower
from ds_dynmo.cli.watching.lines import status_line
from ds_dynmo.cli.watching.run_state import ReportState
from ds_dynmo.files import write_text

if TYPE_CHECKING:
    from rich.console import Console

LIVE_SECONDS, PLAIN_SECONDS = 0.5, 10.0  # between two looks at the file
INTERRUPTED = 128 + signal.SIGINT
PICTURE_COLUMNS = 100
INSTALL = 'the extra "watch": pip install rich'


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(__doc__, prog="ds-dynmo-watch")
    parser.add_argument("report", type=Path, help="JSON lines of a run")
    parser.add_argument("--once", action="store_true", help="show how the run stands now, and end")
    parser.add_argument("--plain", action="store_true", help="lines also in a terminal")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the view as it is now to a picture, and end")
    parser.add_argument(
        "--interval",
        type=float,
        metavar="SECONDS",
        help=f"between two looks at the file (default: {LIVE_SECONDS:g} in a terminal, {PLAIN_SECONDS:g} elsewhere)",
    )
    args = parser.parse_args(arguments)
    if args.interval is not None and not 0 < args.interval < float("inf"):
        parser.error(f"--interval {args.interval:g}: should be more than 0 seconds")
    return args


class ReportWatcher:
    """A report and the file that it is read from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = ReportState()
        self._told = 0  # events
        self._status = ""
        self.file = Follower(path, self.report.add, self.report.restart)

    @property
    def note(self) -> str:
        """The state of the file: missing, empty, or how long ago it was written."""
        if self.file.problem is not None:
            return f"{self.file.problem}: waiting"
        if self.report.run.step is None:
            return "has no record yet: waiting"
        assert self.file.changed is not None
        return f"written {_ago(time.time() - self.file.changed)} ago"

    def view(self, height: int | None = None) -> Any:
        """Return what rich draws now, in ``height`` lines; None: in as many as it takes."""
        from ds_dynmo.cli.watching.view import view

        return view(self.report, self.path.name, self.note, height)

    def live(self, console: Console, interval: float) -> None:
        """Draw the view again and again until the run ends, and leave the last one in the terminal."""
        from rich.live import Live

        with _ends_at_sigterm(), Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            try:
                while not self.report.run.ended:
                    live.update(self.view(console.height), refresh=True)
                    time.sleep(interval)
                    self.file.look()
            finally:
                live.update(self.view())

    def plain(self, interval: float) -> None:
        """Print what is new until the run ends, and the state of the file while it is waited for."""
        waits = ""
        while True:
            note = self.note
            if note != waits and note.endswith("waiting"):
                _say(f"{self.path.name} {note}")
            waits = note
            self.say_what_is_new()
            if self.report.run.ended:
                return
            time.sleep(interval)
            self.file.look()

    def say_what_is_new(self) -> None:
        """Print the events since the last call, and the state of a run that goes on if it has changed."""
        for line in self.report.history[self._told :]:
            _say(line)
        self._told = len(self.report.history)
        status = status_line(self.report.run)
        if status and status != self._status and not self.report.run.ended:
            _say(status)
        self._status = status


def picture(view: Any) -> str:
    """Draw a view as SVG, without the fonts that rich would have a browser fetch."""
    from rich.console import Console

    console = Console(record=True, width=PICTURE_COLUMNS, file=StringIO(), force_terminal=True)
    console.print(view)
    drawn = console.export_svg(title="ds-dynmo-watch", unique_id="view")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


def terminal() -> Console | None:
    """Return the terminal to draw in; None: there is none that can, or no rich."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(f"ds-dynmo-watch: the table needs rich, {INSTALL}", file=sys.stderr)
        return None
    console = Console()
    return None if console.is_dumb_terminal else console


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a reason may have letters that the terminal's encoding lacks
    try:
        return show(ReportWatcher(args.report), args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # what read our lines has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def show(watch: ReportWatcher, args: argparse.Namespace) -> int:
    """Show a report as asked for, and return the exit code."""
    watch.file.look()
    looks_once = args.once or args.svg is not None
    if watch.file.problem is not None and (looks_once or not watch.file.waits):
        return refuse("ds-dynmo-watch", f"{args.report}: {watch.file.problem}")
    if looks_once and watch.report.run.step is None:
        return refuse("ds-dynmo-watch", f"{args.report}: has no record of a run")
    if args.svg is not None:
        try:
            write_text(args.svg, picture(watch.view()))
        except ModuleNotFoundError:
            return refuse("ds-dynmo-watch", f"--svg needs rich: {INSTALL}")
        except OSError as error:
            return refuse("ds-dynmo-watch", f"--svg {args.svg}: cannot be written: {error.strerror}")
        return 0
    console = None if args.plain else terminal()
    if args.once:
        if console is not None:
            console.print(watch.view())
        else:
            watch.say_what_is_new()
    elif console is not None:
        watch.live(console, args.interval or LIVE_SECONDS)
    else:
        watch.plain(args.interval or PLAIN_SECONDS)
    return 0


@contextmanager
def _ends_at_sigterm() -> Iterator[None]:
    """Exit at SIGTERM by an exception, so that the terminal is restored."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str) -> None:
    print(line, flush=True)


def _ago(seconds: float) -> str:
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


if __name__ == "__main__":
    sys.exit(main())

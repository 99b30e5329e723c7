"""Functions that commands share: options and their checks, tables, and JSON of figures."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ds_dynmo.config.explain import suggest
from ds_dynmo.errors import ConfigError, reason_of
from ds_dynmo.files import write_text
from ds_dynmo.launch import end_restarts

FIRST_RANK_SECONDS = 10.0


class OneLineParser(argparse.ArgumentParser):
    """Shows a docstring as it is. Says what is wrong in one line, and which flag was meant; ``--help`` shows all."""

    def __init__(self, description: str | None, **settings: Any) -> None:
        settings["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, **settings)

    def parse_known_args(self, *args: Any, **settings: Any) -> Any:
        """Parse arguments, and refuse those that no flag takes."""
        known, unknown = super().parse_known_args(*args, **settings)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}; {self.meant_by(unknown[0].partition('=')[0])}")
        return known, unknown

    def meant_by(self, flag: str) -> str:
        """Suggest what an unknown flag was meant to be."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return suggest(flag, [option for action in shown for option in action.option_strings])

    def error(self, message: str) -> NoReturn:
        """Print the message, and end the command with exit code 2."""
        raise SystemExit(refuse(self.prog, message))


class CommandParser(OneLineParser):
    """Accepts ``--json FILE``, and ``--local_rank`` of DeepSpeed's launcher.

    Args:
        has_figures: there are some to write.
    """

    def __init__(self, description: str | None, *, has_figures: bool = True, **settings: Any) -> None:
        super().__init__(description, **settings)
        if has_figures:
            self.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
        self.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Accept ``--set KEY=VALUE``, which :func:`ds_dynmo.config.load_settings` takes as changes."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="KEY=VALUE",
        help="change the JSON, as dynmo.interval=10 does; VALUE is JSON or a word, null removes the key; repeatable",
    )


@contextmanager
def refusals_of(command: str) -> Iterator[None]:
    """End ``command`` with a message in place of a traceback, at a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise SystemExit(f"{command}: error: {error}") from error


def refuse(command: str, reason: object) -> int:
    """Print why ``command`` cannot run, and return the exit code, 2."""
    print(f"{command}: error: {reason}", file=sys.stderr, flush=True)
    return 2


def refuse_on_ranks(error: Exception, *, retry: bool = False) -> int:
    """Print an error of ds-dynmo-train, and return the exit code, 2.

    The launcher ends all ranks when one has exited. So other ranks wait, and only rank 0 prints an error that all
    have. A rank that still runs after that has another error and prints it.

    Args:
        retry: let torchrun start the ranks again, if it would: another start may succeed.
    """
    rank = int(os.environ.get("RANK", 0))
    where = ""
    if rank:
        time.sleep(FIRST_RANK_SECONDS)
        where = f" on rank {rank}"
    print(f"ds-dynmo-train: error{where}: {error}", file=sys.stderr, flush=True)
    if not retry:
        end_restarts()
    return 2


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a measurement, for the JSON of its figures."""
    return {name: value for name, value in vars(arguments).items() if name not in ("json", "local_rank")}


def path_of(text: str) -> Path:
    """Read a path. Refuse an empty one, such as that of an unset shell variable: Path takes it for this folder."""
    if not text:
        raise argparse.ArgumentTypeError('should name a file or a folder, got ""')
    return Path(text)


def check_at_least_1(arguments: argparse.Namespace, *options: str) -> None:
    """Refuse counts and sizes below 1, alone or in a list. An option that is not given is None and passes.

    Raises:
        ConfigError: naming the option and its value.
    """
    for option in options:
        given = getattr(arguments, option)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise ConfigError(f"--{option.replace('_', '-')} {value}: should be at least 1")


def check_layers(layers: int, stages: int, where: str = "--layers") -> None:
    """Refuse fewer layers than stages.

    Raises:
        ConfigError: naming the option, or where the layers are from, and both numbers.
    """
    if layers < stages:
        raise ConfigError(f"{where} {layers}: should be at least the number of stages, {stages}")


def num_processes(command: str) -> int:
    """Read the number of ranks that the launcher has started.

    Raises:
        ConfigError: there is no launcher; the message says how to start ``command`` with one.
    """
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(f"start with DeepSpeed's launcher: deepspeed --num_gpus {command} ...")
    return int(os.environ["WORLD_SIZE"])


def table_lines(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Make a line of each row, with columns as wide as their widest cell."""
    lines = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print("\n".join(table_lines(head, rows)))


def write_json(path: Path | None, figures: Any) -> None:
    """Write ``figures`` to ``path``, if one is given, into a folder that is made if it is missing.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(figures, indent=2, default=str) + "\n")
        except OSError as error:
            raise ConfigError(f"--json {path}: cannot be written: {reason_of(error)}") from error

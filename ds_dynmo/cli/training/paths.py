"""Check that a run can write where its flags say, before hours are spent on what it should write."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_dynmo.cli.training.resuming import can_be_resumed, has_saved
from ds_dynmo.engine.save.listing import checkpoints, whole_checkpoints
from ds_dynmo.errors import ConfigError, reason_of

__all__ = ["check_new_folder", "check_writable", "refusing"]


def check_new_folder(args: argparse.Namespace, resume: Path | None) -> None:
    """Refuse to save into a folder that has checkpoints, unless this run goes on from there or takes it over.

    Raises:
        ConfigError: naming ``--save``, and what goes on.
    """
    save: Path | None = args.save
    if save is None or args.take_over or (resume is not None and resume.resolve() == save.resolve()):
        return
    if has_saved(save):
        there = ", ".join(checkpoints(str(save))[:3]) or "of stock DeepSpeed"
        goes_on = f"--resume {save} goes on from there; " if can_be_resumed(save) else ""
        raise ConfigError(
            f"--save {save}: has checkpoints of another run ({there}): name another folder; {goes_on}--take-over saves "
            "there too, and replaces those of the same steps"
        )


def check_writable(args: argparse.Namespace, report: Path | None) -> None:
    """Check that files can be written, into folders that are made if they are missing: at once for those begun at once.

    Raises:
        ConfigError: naming the flag and the path.
    """
    if args.save is not None:
        try:
            with refusing("--save", args.save):
                _check_folder(args.save)
        except ConfigError as error:
            whole = ", ".join(tag for tag in whole_checkpoints(str(args.save)) if can_be_resumed(args.save, tag))
            goes_on = f"; whole checkpoints there: {whole}: --resume {args.save} and another folder of --save go on"
            raise ConfigError(f"{error}{goes_on if whole else ''}") from error
    if args.export is not None:
        with refusing("--export", args.export):
            _check_folder(args.export)
    for option, path in (("--report", report), ("--record", args.record)):
        if path is not None:
            with refusing(option, path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("a").close()


@contextmanager
def refusing(option: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {reason_of(error)}") from error


def _check_folder(folder: Path) -> None:
    """Check that a folder can be written to, or made. Rank 0 makes it, as this run may still be refused.

    Raises:
        OSError: with the reason.
    """
    there = folder
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        number = errno.EEXIST if there == folder else errno.ENOTDIR
    elif os.statvfs(there).f_flag & os.ST_RDONLY:
        number = errno.EROFS
    elif os.access(there, os.W_OK | os.X_OK):
        return
    else:
        number = errno.EACCES
    raise OSError(number, os.strerror(number), str(there))

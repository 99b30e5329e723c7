"""Let a run alone save into its folder, which has room for it, and say after a failed save what is there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ds_dynmo.cli.training.options import TrainingRun
from ds_dynmo.cli.training.paths import refusing
from ds_dynmo.cli.training.resuming import find_checkpoint, has_saved
from ds_dynmo.engine.save.listing import checkpoints, whole_checkpoints
from ds_dynmo.errors import ConfigError, counted
from ds_dynmo.files.claims import claim_folder

__all__ = ["after_failed_save", "check_room", "claimed", "how_to_continue"]


@contextmanager
def claimed(run: TrainingRun) -> Iterator[None]:
    """Claim the folder of ``--save`` for a run while the body runs, on rank 0.

    Raises:
        ConfigError: naming ``--save``; another run that has not ended saves there, or it cannot be written to.
    """
    with ExitStack() as stack:
        if run.save is not None:
            with refusing("--save", run.save):
                try:
                    stack.enter_context(claim_folder(run.save, take_over=run.take_over))
                except ConfigError as error:
                    raise ConfigError(
                        f"--save {error}: name another folder; with --take-over that run's next save is refused"
                    ) from error
        yield


def check_room(run: TrainingRun, engine: Any) -> None:
    """Compare the free space for checkpoints with what they will take. Collective.

    Says so on rank 0 if the checkpoints of the whole run will not fit. Without a "dynmo" section nothing is compared.

    Raises:
        ConfigError: there is no room for the first checkpoint, or for the second while the first stays.
    """
    if run.save is None or engine.dynmo is None:
        return
    expected = engine.checkpoint_bytes(exclude_frozen_parameters=not run.model.save_base)
    there = run.save
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    saves = 1 if run.save_interval is None else -(-(run.stop - run.first_step) // run.save_interval)
    keep = engine.dynmo.checkpoint.keep
    present = len(checkpoints(str(run.save))) if run.resume is not None else 0  # of this run, and removed in turn
    most = saves if keep is None else max(1, min(saves, keep + 1 - present))
    least = min(saves, 1 if present else 2)
    if free < least * expected:
        raise ConfigError(
            f"--save {run.save}: {_text(free)} are free there, and {counted(least, 'checkpoint')} of this run will "
            f"take about {_text(least * expected)}: make room or name another folder"
        )
    if free < most * expected and engine.global_rank == 0:
        print(
            f"--save {run.save}: {_text(free)} are free there, enough for {free // expected} of the {most} checkpoints "
            f"of about {_text(expected)} that this run will write; --keep N removes older ones",
            flush=True,
        )


def after_failed_save(run: TrainingRun) -> str:
    """Say what is saved of a run whose save failed, and how to continue."""
    room = "make room or name another folder by --save, and"
    if run.save is None or not has_saved(run.save):
        return f"nothing of this run is saved: {room} start again; --save-interval N saves on the way"
    try:
        last = find_checkpoint(run.save)
        others = whole_checkpoints(str(run.save), besides=last)
        besides = f", others are {', '.join(others)}" if others else ""
        there = f"the last whole checkpoint there is {last}{besides}"
    except ConfigError as error:  # it is not known which is the last
        there = str(error)
    return f"{there}: {room} the same command with --resume {run.save} continues from it"


def how_to_continue(run: TrainingRun) -> str:
    """Say how to go on with a run that has ended on the way."""
    try:
        if run.save is None or not has_saved(run.save):
            return "Nothing of this run is saved: start it again; --save DIR --save-interval N saves on the way"
        last = f"The last whole checkpoint is {run.save / find_checkpoint(run.save)}"
    except ConfigError as error:  # it is not known which is the last
        last = str(error)
    return f"{last}: the same command with --resume {run.save} continues from it"


def _text(num_bytes: int) -> str:
    """Write a number of bytes in a unit in which it is at least 1.

    >>> _text(5 * 2**30), _text(3 * 2**19), _text(70)
    ('5.00 GiB', '1.50 MiB', '70 bytes')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"

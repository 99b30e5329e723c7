"""End the processes that a program started, and remove what it made, however the program ends."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def guarded_group(leader: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill ``leader`` and its process group at the end of the block, or when this program is killed in it.

    Args:
        leader: a process that was started with ``start_new_session``.
    """
    held = _guard('kill -s KILL -- "-$1"', str(leader.pid))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the group may have ended; or ranks outlive their launcher
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        os.close(held)


@contextmanager
def guarded_removal(action: str, argument: str) -> Iterator[None]:
    """Run ``action`` at the end of the block, or when this program is killed in it.

    Args:
        action: a shell's command, which removes ``$1`` if that is there.
        argument: its ``$1``.
    """
    held = _guard(action, argument)
    try:
        yield
    finally:
        subprocess.run(["sh", "-c", action, "guard", argument], capture_output=True, check=False)
        os.close(held)


def scratch_folder() -> Path:
    """Make a temporary folder that is removed once this program has ended."""
    folder = tempfile.mkdtemp(prefix="ds_dynmo_")
    _guard('rm -rf -- "$1" || { sleep 1; rm -rf -- "$1"; }', folder)
    return Path(folder)


def _guard(action: str, argument: str) -> int:
    """Start a shell in its own session that runs ``action`` once its input has ended.

    Returns:
        The other end of its input, which closes at the latest when this program ends.
    """
    script = "exec 3<&0; { cat <&3; " + action + "; } > /dev/null 2>&1 &"  # background jobs read /dev/null without 3<&0
    theirs, held = os.pipe()
    subprocess.run(["sh", "-c", script, "guard", argument], stdin=theirs, start_new_session=True, check=True)
    os.close(theirs)
    return held

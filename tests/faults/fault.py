"""A fault: what happens to which rank in which step, and where."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch.distributed as dist

TIMEOUT_SECONDS = 2.0  # of the runs in which faults happen

PLACES = {  # the functions in which a fault may happen, by the phase and what is done there
    "profile: post": "ds_dynmo.engine.measure.profile_reduction:measurement_table",
    "profile: read": "ds_dynmo.engine.measure.profile_reduction:profile_from",
    "decide": "ds_dynmo.engine.decide.decider:decide",
    "move: prepare": "ds_dynmo.engine.move.migrator:Migrator.prepare",
    "move: pack": "ds_dynmo.engine.move.migrator:Migrator._prepared",
    "move: start": "ds_dynmo.engine.move.migrator:Migrator.start",
    "move: poll": "ds_dynmo.engine.move.migrator:Migrator.poll",
    "move: commit": "ds_dynmo.engine.move.migrator:Migrator.commit",
    "move: rebuild": "ds_dynmo.engine.move.migration_context:MigrationContext.rebuild",
    "save: begin": "ds_dynmo.engine.save.folder:CheckpointFolder.begin",
    "save: take a file": "ds_dynmo.engine.save.writing:_take",
    "save: write the rest": "ds_dynmo.engine.save.writing:UnfinishedCheckpoint._write_rest",
    "save: describe a file": "ds_dynmo.engine.save.writing:describe",
    "save: write the stage's manifest": "ds_dynmo.engine.save.writing:write_stage",
    "save: write the manifest": "ds_dynmo.engine.save.writing:write_all",
    "save: commit": "ds_dynmo.engine.save.folder:CheckpointFolder.commit",
    "load: open": "ds_dynmo.engine.save.reading:_open",
    "load: read a layer": "ds_dynmo.engine.save.reading:_read_layer",
    "load: apply": "ds_dynmo.engine.save.reading:apply",
    "re-pack: move": "ds_dynmo.engine.resize.shrinking:Shrinking.shrink",
    "re-pack: end the world": "ds_dynmo.engine.resize.world:World.end",
    "re-pack: begin a world": "ds_dynmo.engine.resize.world:World.begin",
    "re-pack: release": "ds_dynmo.engine.resize.shrinking:Shrinking._release",
    "batch: forward": "ds_dynmo.engine.run.executor:Executor._forward",
    "batch: backward": "ds_dynmo.engine.run.executor:Executor._backward",
    "batch: weight gradient": "ds_dynmo.engine.run.executor:Executor._weight_gradient",
    "batch: receive": "ds_dynmo.engine.run.executor:Executor._receive",
    "batch: end": "ds_dynmo.engine.run.executor:Executor._end",
}


ON_FIRST = {  # places to which only rank 0 comes
    *("profile: read", "decide", "save: begin", "save: write the manifest", "save: commit"),
}
ON_RELEASED = {"re-pack: release"}  # to which only a rank comes that is released


class Injected(RuntimeError):
    """The error of a fault."""


def _raise() -> None:
    raise Injected("the cable is gone")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(seconds: float) -> None:
    """Stop this process, and let another wake it up."""
    wake = f"import os, signal, time; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
    subprocess.Popen([sys.executable, "-c", wake], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def _fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


KINDS: dict[str, Callable[[], None]] = {
    "exception": _raise,
    "SIGKILL": _kill,
    "SIGSTOP for a while": lambda: _stop(TIMEOUT_SECONDS / 4),
    "SIGSTOP for too long": lambda: _stop(4 * TIMEOUT_SECONDS),
    "disk full": _fill_disk,
}


@dataclass(frozen=True)
class Fault:
    """A fault on one rank, once.

    Attributes:
        rank: as numbered at the launch.
        step: ``global_steps`` from which on it happens, as soon as the rank comes to the place.
        place: of :data:`PLACES`.
        kind: of :data:`KINDS`.
        after: calls of the place's function to let pass.
    """

    rank: int
    step: int
    place: str
    kind: str
    after: int = 0

    def inject(self, engine: Any, happens: Callable[[], None] = lambda: None) -> None:
        """Let it happen on its rank.

        Args:
            happens: is called just before.
        """
        if dist.get_rank() != self.rank:
            return
        owner, name = _owner_of(PLACES[self.place])
        function, left = getattr(owner, name), self.after

        @wraps(function)
        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if engine.global_steps >= self.step:
                left -= 1
                if left == -1:
                    happens()
                    KINDS[self.kind]()
            return function(*args, **kwargs)

        setattr(owner, name, failing)


def _owner_of(path: str) -> tuple[Any, str]:
    """Return the module or class that has a function, and its name there."""
    module, _, names = path.partition(":")
    owner = importlib.import_module(module)
    *outer, name = names.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name

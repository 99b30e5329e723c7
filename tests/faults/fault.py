"""A fault: what happens to which rank in which step, and where."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support import namespaces

TIMEOUT_SECONDS = 2.0  # of the runs in which faults happen

PLACES = {  # functions of modules and of the engine in which a fault may happen, by the phase and what is done there
    "profile: measure a layer": "ds_dynmo.engine.measure.profile_reduction:_row",
    "profile: post": "ds_dynmo.engine.measure.profile_reduction:measurement_table",
    "profile: read": "ds_dynmo.engine.measure.profile_reduction:profile_from",
    "decide": "ds_dynmo.engine.decide.decider:decide",
    "move: prepare": "ds_dynmo.engine.move.migrator:Migrator.prepare",
    "move: describe": "engine:stage.state.describe",
    "move: pack": "ds_dynmo.engine.move.migration_context:pack",
    "move: exchange headers": "ds_dynmo.engine.move.migrator:_exchange_headers",
    "move: make room": "engine:stage.state.prepare",
    "move: start": "ds_dynmo.engine.move.migrator:Migrator.start",
    "move: poll": "ds_dynmo.engine.move.migrator:Migrator.poll",
    "move: commit": "ds_dynmo.engine.move.migrator:Migrator.commit",
    "move: send the rest": "engine:stage.comm.p2p.post",
    "move: unpack": "ds_dynmo.engine.move.arriving:ArrivingLayer.materialize",
    "move: rebuild": "ds_dynmo.engine.move.migration_context:MigrationContext.rebuild",
    "move: hand over to the optimizer": "engine:stage.state.install_parameters",
    "move: tie": "engine:stage.layers.tie",
    "save: begin": "ds_dynmo.engine.save.folder:CheckpointFolder.begin",
    "save: take a file": "ds_dynmo.engine.save.writing:_take",
    "save: write a file": "ds_dynmo.engine.save.destinations:write_records",
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
    "re-pack: form groups": "ds_dynmo.engine.deepspeed.process_groups:refit",
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
DAMAGES = ("a file cut", "a file flipped")
OF_LINKS = ("link cut for a while", "link cut")  # each rank has to run on a host of its own
WITH_FILES = {  # places whose functions begin with the path of files that were written
    *("save: describe a file", "save: write the stage's manifest", "save: write the manifest"),
}


def kinds_at(place: str) -> list[str]:
    """Return the kinds of faults that can happen at a place."""
    damages, fills = place in WITH_FILES, place.startswith("save")
    return [kind for kind in KINDS if (kind not in DAMAGES or damages) and (kind != "disk full" or fills)]


class Injected(RuntimeError):
    """The error of a fault."""


def _raise(*_: Any) -> None:
    raise Injected("the cable is gone")


def _kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(seconds: float) -> None:
    """Stop this process, and let another wake it up."""
    wake = f"import os, signal, time; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
    subprocess.Popen([sys.executable, "-c", wake], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def _cut_link(seconds: float | None = None) -> None:
    """Pull the cable of this rank's host, and plug it in again after so many seconds."""
    assert namespaces.entered is not None
    network, host = namespaces.entered
    network.pull_cable(host)
    if seconds is not None:
        threading.Timer(seconds, network.plug_cable, (host,)).start()


def _fill_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _cut(path: str, *_: Any) -> None:
    file = _last_written(path)
    os.truncate(file, file.stat().st_size // 2)


def _flip(path: str, *_: Any) -> None:
    file = _last_written(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _last_written(path: str) -> Path:
    """Return a file, or that of tensors in a folder which was written last."""
    files = [Path(path), *Path(path).rglob("*.pt")]
    return max(filter(Path.is_file, files), key=lambda file: file.stat().st_mtime_ns)


KINDS: dict[str, Callable[..., None]] = {  # called as the place's function is
    "exception": _raise,
    "SIGKILL": _kill,
    "SIGSTOP for a while": lambda *_: _stop(TIMEOUT_SECONDS / 4),
    "SIGSTOP for too long": lambda *_: _stop(4 * TIMEOUT_SECONDS),
    "link cut for a while": lambda *_: _cut_link(TIMEOUT_SECONDS / 4),
    "link cut": lambda *_: _cut_link(),
    "disk full": _fill_disk,
    "a file cut": _cut,
    "a file flipped": _flip,
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
        owner, name = owner_of(PLACES[self.place], engine)
        function, left = getattr(owner, name), self.after

        @wraps(function)
        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if engine.global_steps >= self.step:
                left -= 1
                if left == -1:
                    happens()
                    KINDS[self.kind](*args)
            return function(*args, **kwargs)

        setattr(owner, name, failing)


def owner_of(path: str, engine: Any) -> tuple[Any, str]:
    """Return the module, class or part of the engine that has a function, and its name there."""
    module, _, names = path.partition(":")
    owner = engine if module == "engine" else importlib.import_module(module)
    *outer, name = names.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name

"""Runs into which a failure is injected, at one step of a rebalance on one rank."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

from ds_dynmo import MigrationError
from ds_dynmo.engine.migration import migrate
from tests.distributed.workloads import Case, batches, build, partitions, state

MOVES = ([0, 4, 6, 8], [0, 1, 6, 8], [0, 2, 4, 8])  # by the rank that receives


class Injected(RuntimeError):
    """The failure."""


def broken(*_: Any, **__: Any) -> Any:
    raise Injected("the cable is gone")


def _arriving(engine: Any) -> None:
    migrate.ArrivingLayer.open = broken  # type: ignore[method-assign]


def _no_load_signal(engine: Any) -> None:
    for module in engine._layers.modules().values():
        module.load_signal = broken


HARMLESS: dict[str, Callable[[Any], None]] = {
    "gather": _no_load_signal,
    "decide": lambda engine: setattr(engine, "_decide", broken),
    "prepare": lambda engine: setattr(engine._state, "_holdings" if engine._wrapper else "prepare", broken),
    "pack": lambda engine: setattr(engine._state, "content", broken),
}
FATAL: dict[str, Callable[[Any], None]] = {
    "headers": lambda engine: setattr(engine._comm, "exchange_headers", broken),
    "send": lambda engine: setattr(engine._comm, "exchange", broken),
    "unpack": _arriving,
    "rebuild": lambda engine: setattr(engine._layers, "rebuild", broken),
    "rewrap": lambda engine: setattr(engine._state, "settle", broken),
    "tie": lambda engine: setattr(engine._layers, "tie", broken),
}


def harmless(case: Case, point: str, rank: int) -> dict[str, Any]:
    """Train on after an automatic rebalance that fails before bytes move."""
    engine = build(case)
    data, losses = batches(engine), []
    losses.append(engine.train_batch(data).item())
    if engine.global_rank == rank:
        HARMLESS[point](engine)
    if point in ("gather", "decide"):
        engine._controller.request("a test")
    for _ in range(2):
        losses.append(engine.train_batch(data).item())
    message = repr(engine._failure)
    if point not in ("gather", "decide"):
        try:
            engine.rebalance(MOVES[(rank + 1) % 3])  # the rank sends
        except MigrationError as error:
            assert error.harmless
            message = str(error)
    if engine.global_rank == rank:
        for owner in (engine, engine._state):
            for name in ("_decide", "prepare", "_holdings", "content"):
                vars(owner).pop(name, None)
        for module in engine._layers.modules().values():
            vars(module).pop("load_signal", None)
    engine.rebalance(MOVES[rank])
    losses.append(engine.train_batch(data).item())
    return {"message": message, "losses": losses, "state": state(engine), "replica": 0}


def unharmed(case: Case, rank: int) -> dict[str, Any]:
    engine = build(case)
    data = batches(engine)
    losses = [engine.train_batch(data).item() for _ in range(3)]
    engine.rebalance(MOVES[rank])
    losses.append(engine.train_batch(data).item())
    return {"losses": losses, "state": state(engine), "replica": 0}


def fatal(case: Case, point: str, rank: int) -> str:
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    if engine.global_rank == rank:
        FATAL[point](engine)
    try:
        engine.rebalance(MOVES[rank])
    except MigrationError as error:
        assert not error.harmless
        return str(error)
    return "nothing was raised"


# -- a rank is killed ---------------------------------------------------------------------------------

STEPS = 8


def train_and_save(case: Case, folder: str, victim: int, calls: int) -> dict[str, Any]:
    """Rebalance after every batch, save after every second; rank ``victim`` kills itself at its ``calls``-th call."""
    engine = build(case)
    if engine.global_rank == victim:
        _die_at(calls)
    return _go_on(engine, case, folder)


def resume(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case)
    engine.load_checkpoint(folder)
    return _go_on(engine, case, folder)


def _go_on(engine: Any, case: Case, folder: str) -> dict[str, Any]:
    data = islice(batches(engine), engine.global_steps * engine.micro_batches, None)
    losses = {}
    for step, move in list(enumerate(partitions(case, 1, STEPS)))[engine.global_steps :]:
        losses[step] = engine.train_batch(data).item()
        engine.rebalance(move)
        if step % 2:
            engine.save_checkpoint(folder)
    sys.setprofile(None)
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


def _die_at(calls: int) -> None:
    """SIGKILL to this process when it enters its ``calls``-th function from now on."""
    left = calls

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        left -= event in ("call", "c_call")
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)

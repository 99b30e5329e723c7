"""Runs in which a host's cable is pulled; every function here runs on a rank, each on a host of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ds_dynmo
from ds_dynmo.errors import ConfigError
from tests.distributed.namespaces import Network, rename
from tests.distributed.workloads import Case, batches, build


def cut(case: Case, network: Network, victim: int, moment: str) -> str:
    """What this rank's run ends with, in which the cable of ``victim`` is pulled at this moment."""
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    rank = engine.global_rank

    def pull() -> None:
        if rank == victim:
            network.pull_cable(victim)

    try:
        MOMENTS[moment](engine, data, pull)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _first(pull: Callable[[], None], owner: Any, name: str) -> None:
    """The cable is pulled when ``name`` is called."""
    function = getattr(owner, name)

    def pulled(*args: Any, **kwargs: Any) -> Any:
        pull()
        return function(*args, **kwargs)

    setattr(owner, name, pulled)


def _now(engine: Any, pull: Callable[[], None]) -> None:
    engine._comm.gather_objects(None)
    pull()


def _before_a_rebalance(engine: Any, data: Any, pull: Callable[[], None]) -> None:
    _now(engine, pull)
    engine.rebalance([0, 4, 6, 8])


def _before_a_batch(engine: Any, data: Any, pull: Callable[[], None]) -> None:
    _now(engine, pull)
    engine.train_batch(data)


def _while_layers_move(engine: Any, data: Any, pull: Callable[[], None]) -> None:
    _first(pull, engine._comm, "exchange_headers")
    engine.repack(2)


def _as_the_new_world_begins(engine: Any, data: Any, pull: Callable[[], None]) -> None:
    _first(pull, engine._repacker.world, "_topology")
    engine.repack(2)
    assert engine.released
    raise RuntimeError(f"called: {engine.wait_for_recall()}")


def _while_parked(engine: Any, data: Any, pull: Callable[[], None]) -> None:
    """The ranks at work notice when they call; a rank that is not called is as one whose job has ended."""
    engine.repack(2)
    pull()
    if engine.released:
        raise RuntimeError(f"called: {engine.wait_for_recall()}")
    engine.train_batch(data)
    engine.repack(3)


MOMENTS: dict[str, Callable[[Any, Any, Callable[[], None]], None]] = {
    "before a rebalance": _before_a_rebalance,
    "while layers move": _while_layers_move,
    "as the new world begins": _as_the_new_world_begins,
    "while parked": _while_parked,
    "before a batch": _before_a_batch,
}


# -- names that resolve to this host alone --------------------------------------------------------------


def start_by_address(case: Case, network: Network, folder: str) -> str:
    return start(case, "node", network.address(dist.get_rank()), folder)


def start(case: Case, name: str, address: str, folder: str) -> str:
    """Build an engine on a host of this name, by which gloo is to find its address; what it ends with.

    The groups before it have been made, as where they are NCCL's: gloo comes in with the engine.
    """
    initialize = ds_dynmo.initialize

    def by_name(**arguments: Any) -> Any:
        rename(f"{name}{dist.get_rank()}", address, Path(folder) / str(dist.get_rank()))
        del os.environ["GLOO_SOCKET_IFNAME"]
        return initialize(**arguments)

    ds_dynmo.initialize = by_name
    try:
        engine = build(case)
    except ConfigError as error:
        return str(error)
    return f"trained: {engine.train_batch(batches(engine)).item() > 0}"

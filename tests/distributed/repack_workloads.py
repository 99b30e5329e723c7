"""Runs that give ranks back and take them again; every function here runs on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ds_dynmo.errors import ReleasedError
from tests.distributed.workloads import Case, batches, build, state

Sizes = Mapping[int, int]  # after which step, to how many stages


def train(case: Case, sizes: Sizes, steps: int) -> dict[str, Any]:
    """Train ``steps`` batches, re-packing on the way; a rank that is released waits to be taken back."""
    engine = build(case)
    data = batches(engine)
    found: dict[str, Any] = {"home": dist.get_rank(), "losses": {}, "released": []}
    while engine.global_steps < steps:
        loss = engine.train_batch(data).item()
        found["losses"][engine.global_steps] = loss
        wanted = sizes.get(engine.global_steps)
        if wanted is not None:
            engine.repack(wanted)
        if engine.released:
            found["released"].append(engine.global_steps)
            try:
                engine.train_batch(data)
            except ReleasedError as error:
                found["refused"] = str(error)
            if not engine.wait_for_recall():
                return {**found, "state": {}, "attributes": {}}
    found["state"] = state(engine)
    found["evaluation"] = engine.eval_batch(batches(engine, seed=7)).item()
    found["attributes"] = attributes(engine)
    found["reports"] = engine.repacks
    found["partition"] = engine.partition
    engine.dismiss_parked()
    return found


def attributes(engine: Any) -> dict[str, Any]:
    """All plain attributes of the engine, its module, grid and optimizer: whatever was built once from the world."""
    optimizer = engine._wrapper._wrapper if engine._wrapper is not None else None
    holders = {"engine": engine, "module": engine.module, "grid": engine.grid, "optimizer": optimizer}
    return {
        f"{place}.{name}": value
        for place, holder in holders.items()
        if holder is not None
        for name, value in vars(holder).items()
        if isinstance(value, int | str | tuple | list | bool | None) and _plain(value)
    }


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return isinstance(value, int | str | bool | None)


def train_alone(case: Case, steps: int) -> dict[str, Any]:
    """As :func:`train`, without re-packing, from the start."""
    return train(case, {}, steps)


def train_through_checkpoint(case: Case, folder: str, first: int, last: int) -> dict[str, Any]:
    """Train batches ``first + 1`` to ``last``, from the checkpoint at ``first`` (0: none), and save one at the end."""
    engine = build(case)
    data = batches(engine)
    if first:
        engine.load_checkpoint(folder)
        for _ in range(first * case.micro_batches):
            next(data)
    losses = {step + 1: engine.train_batch(data).item() for step in range(first, last)}
    engine.save_checkpoint(folder)
    return {"losses": losses, "state": state(engine), "attributes": attributes(engine), "partition": engine.partition}

"""A job, and launches that join it; every function here runs on a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ds_dynmo.errors import ConfigError
from tests.distributed.workloads import Case, batches, build, sleeping_engine, state

SLEEPS = [0.02] * 4  # seconds


def job(case: Case, sizes: Mapping[int, int], awaited: Mapping[int, Sequence[int]], steps: int) -> dict[str, Any]:
    """Train, re-packing after the steps of ``sizes``, once the ranks of ``awaited`` have said that they joined."""
    engine = build(case)
    return _train(engine, batches(engine), sizes, awaited, steps)


def newcomer(case: Case, address: str, sizes: Mapping[int, int], steps: int) -> dict[str, Any]:
    """Join the job at ``address``, wait to be called, and take part."""
    engine = build(case)
    engine.join(address)
    assert engine.released
    if not engine.wait_for_recall():
        return {"losses": {}, "state": {}, "called": False}
    data = batches(engine)
    for _ in range(engine.global_steps * engine.micro_batches):
        next(data)
    return _train(engine, data, sizes, {}, steps)


def _train(
    engine: Any, data: Any, sizes: Mapping[int, int], awaited: Mapping[int, Sequence[int]], steps: int
) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": {}, "state": {}, "called": True}
    while engine.global_steps < steps:
        loss = engine.train_batch(data).item()
        found["losses"][engine.global_steps] = loss
        engine._repacker.world.store.wait([f"place/{rank}" for rank in awaited.get(engine.global_steps, ())])
        if engine.global_steps in sizes:
            engine.repack(sizes[engine.global_steps])
        if engine.released and not engine.wait_for_recall():
            return found
    found["state"] = state(engine)
    found["reports"] = engine.repacks
    found["most"] = engine.most_stages()
    found["gone"] = [place.rank for place in engine._repacker.gone_and_staying()[0]]
    engine.dismiss_parked()
    return found


def refused(case: Case, address: str) -> list[Any]:
    """Try to join; training goes on here if the job does not fit."""
    engine = build(case)
    data = batches(engine)
    try:
        engine.join(address)
    except ConfigError as error:
        return [str(error), engine.released, engine.train_batch(data).item() > 0]
    return ["joined"]


def quiet_job(case: Case) -> int:
    """A job that stays at a step until all that want to join have looked at it."""
    engine = build(case)
    engine._repacker.world.store.wait(["looked"])
    return int(dist.get_world_size())


def sleeping_job(block: dict[str, Any], steps: int) -> list[int]:
    """Stages after each step, the fourth of which begins when a rank has joined; layers sleep for their cost."""
    engine, data = sleeping_engine(block, SLEEPS, 1)
    sizes: list[int] = []
    while engine.global_steps < steps:
        if engine.global_steps == 3:
            engine._repacker.world.store.wait(["place/1"])
        engine.train_batch(data)
        sizes.append(engine.num_stages)
    return sizes


def sleeping_newcomer(block: dict[str, Any], address: str, steps: int) -> None:
    engine, data = sleeping_engine(block, SLEEPS, 1)
    engine.join(address)
    if not engine.wait_for_recall():
        return
    while not engine.released and engine.global_steps < steps:
        engine.train_batch(data)

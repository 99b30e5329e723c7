"""A job, and launches that join it; every function here runs on a rank."""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ds_dynmo.engine.elastic import joining, repacking
from ds_dynmo.engine.elastic.secret import VARIABLE
from ds_dynmo.engine.elastic.world import part_of, store_at
from ds_dynmo.errors import ConfigError, MigrationError
from tests.distributed import late_optimizer_workloads, train_script_workloads
from tests.distributed.workloads import Case, batches, build, sleeping_engine, state

SLEEPS = [0.02] * 4  # seconds
SECRET = "known to the job and to those that join it"


def know(secret: str = SECRET) -> None:
    """This rank's environment has the secret."""
    os.environ[VARIABLE] = secret


def job(case: Case, sizes: Mapping[int, int], awaited: Mapping[int, Sequence[int]], steps: int) -> dict[str, Any]:
    """Train, re-packing after the steps of ``sizes``, once the ranks of ``awaited`` have said that they joined."""
    know()
    engine = build(case)
    return _train(engine, batches(engine), sizes, awaited, steps)


def newcomer(case: Case, address: str, sizes: Mapping[int, int], steps: int) -> dict[str, Any]:
    """Join the job at ``address``, wait to be called, and take part."""
    know()
    engine = build(case)
    engine.join(address)
    assert engine.released
    assert not engine._repacker._launch_store.check(["ds_dynmo/job"])  # nobody can join this launch any more
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
        engine._repacker.world.store.wait([f"ready/{rank}" for rank in awaited.get(engine.global_steps, ())])
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
    know()
    engine = build(case)
    data = batches(engine)
    try:
        engine.join(address)
    except ConfigError as error:
        return [str(error), engine.released, engine.train_batch(data).item() > 0]
    return ["joined"]


def quiet_job(case: Case) -> int:
    """A job that stays at a step until all that want to join have looked at it; how many stages it can go on with."""
    know()
    engine = build(case)
    engine._repacker.world.store.wait(["looked"])
    return int(engine.most_stages())


def job_with_a_late_optimizer(case: Case) -> int:
    know()
    engine = late_optimizer_workloads.without_optimizer(case)
    late_optimizer_workloads.give_optimizer(engine)
    store = engine._repacker.world.store
    store.set("optimizer", "")
    store.wait(["looked"])
    return int(engine.most_stages())


def newcomer_with_a_late_optimizer(case: Case, address: str) -> bool:
    """It joins once it has the optimizer, which the job was given too; without it there is no such job."""
    know()
    engine = late_optimizer_workloads.without_optimizer(case)
    job = part_of(store_at(address, 60.0), joining.find(store_at(address, 60.0), 60.0))
    job.wait(["optimizer"])
    with suppress(ConfigError):
        engine.join(address)
    assert not engine.released
    late_optimizer_workloads.give_optimizer(engine)
    engine.join(address)
    job.set("looked", "")
    return bool(engine.released)


def secrets_that_differ(case: Case) -> str:
    know(f"{SECRET}, rank {os.environ['RANK']}")
    try:
        build(case)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def job_beside_a_stranger(case: Case) -> int:
    """How many stages the job can go on with, once a stranger wrote what ranks that joined used to write."""
    know()
    engine = build(case)
    store = engine._repacker.world.store
    store.add("joined", 10**15)
    store.set("place/1", pickle.dumps(Bomb()))
    return int(engine.most_stages())


class Bomb:
    """Its pickle ends the process that loads it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def deceived_job(case: Case) -> str:
    know()
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    engine._repacker.world.store.wait(["ready/1"])
    try:
        engine.repack(2)
    except MigrationError as error:
        return str(error)
    return "nothing was raised"


def impostor(case: Case, address: str) -> None:
    """Takes part in all that follows without the secret, and sends a pickle that nobody may load."""
    know()
    engine = build(case)
    engine.join(address)

    def pretend(_: Any, gather: Callable[[bytes], list[bytes]], *facts: Any) -> None:
        gather(secrets.token_bytes(32))
        gather(secrets.token_bytes(32))
        with suppress(RuntimeError):  # the others leave
            engine._comm.gather_objects(Bomb())

    repacking.check_members = pretend
    with suppress(MigrationError):
        engine.wait_for_recall()


def sleeping_job(block: dict[str, Any], steps: int) -> list[int]:
    """Stages after each step, the fourth of which begins when a rank has joined; layers sleep for their cost."""
    know()
    engine, data = sleeping_engine(block, SLEEPS, 1)
    sizes: list[int] = []
    while engine.global_steps < steps:
        if engine.global_steps == 3:
            engine._repacker.world.store.wait(["ready/1"])
        engine.train_batch(data)
        sizes.append(engine.num_stages)
    return sizes


def sleeping_newcomer(block: dict[str, Any], address: str, steps: int) -> None:
    know()
    engine, data = sleeping_engine(block, SLEEPS, 1)
    engine.join(address)
    if not engine.wait_for_recall():
        return
    while not engine.released and engine.global_steps < steps:
        engine.train_batch(data)


def run_script(*arguments: Any) -> dict[str, Any]:
    know()
    return train_script_workloads.run_script(*arguments)

"""Ranks of another launch become stages of a running job, which trains bitwise as without them."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from ds_dynmo.engine.elastic import job_spec, secret
from ds_dynmo.engine.elastic.world import store_at, store_part
from ds_dynmo.errors import ConfigError, MigrationError
from tests.distributed.harness import run
from tests.distributed.support.configs import Case
from tests.distributed.support.elastic import (
    ACCEPTS_JOINS,
    SECRET,
    job,
    joining_launch,
    losses,
    merged,
    set_secret,
    together,
    train_alone,
)
from tests.distributed.support.script import flags, run_script
from tests.distributed.support.training import (
    batches,
    build,
    give_optimizer,
    sleeping_engine,
    use_virtual_clock,
    whole,
    without_optimizer,
)
from tests.emulated import not_on_it

pytestmark = not_on_it("deadlocks are searched in the operations of one launch")

LAYER_SECONDS = [0.02] * 4
STEPS = 6
SECONDS = 60.0


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """Make the store where the job's ranks meet, on any free port."""
    yield TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("fp32", 1),
        pytest.param("fp32", 2, marks=pytest.mark.fuzz),
        ("bf16 zero1", 2),
        pytest.param("bf16", 1, marks=pytest.mark.fuzz),
    ],
)
def test_launches_that_join_become_stages(store: TCPStore, precision: str, replicas: int) -> None:
    """1 -> 2 -> 4 stages by two launches, in any order, then 2 equal one stage alone, to the bit."""
    case = Case(
        stages=1,
        replicas=replicas,
        precision=precision,
        tied=True,
        dynmo=ACCEPTS_JOINS,
        groups="two",
        scheduler=True,
        dropout=True,
        clip=0.0 if "zero1" in precision else 1.0,  # ZeRO sums the norm over its shards
    )
    sizes, address = {1: 2, 3: 4, 5: 2}, f"localhost:{store.port}"
    awaited = {1: range(replicas, 2 * replicas), 3: range(2 * replicas, 4 * replicas)}

    def launch(stages: int) -> list[Any]:
        own = replace(case, stages=stages)
        return run(own.ranks, joining_launch, own, address, sizes, STEPS, seconds=SECONDS)

    of_job, *of_joining = together(
        lambda: run(case.ranks, job, case, sizes, awaited, STEPS, port=store.port, seconds=SECONDS),
        lambda: launch(1),
        lambda: launch(2),
    )
    everyone = [*of_job, *of_joining[0], *of_joining[1]]
    alone = run(case.ranks, train_alone, replace(case, dynmo={"interval": 0}), STEPS)
    assert losses(everyone) == losses(alone)
    assert merged(everyone) == merged(alone)
    assert all(result["called"] for result in everyone)
    first, second, third = of_job[0]["reports"]
    assert (first.recalled_ranks, second.recalled_ranks) == tuple(map(tuple, awaited.values()))
    assert third.released_ranks == tuple(range(replicas, 3 * replicas))
    assert of_job[0]["most"] == 2  # they were not parked
    assert of_job[0]["gone"] == []  # their own launches release what they run on


def refused(case: Case, address: str) -> list[Any]:
    """Try to join, and train on if the job refuses."""
    set_secret()
    engine = build(case)
    data = batches(engine)
    try:
        engine.join(address)
    except ConfigError as error:
        return [str(error), engine.released, engine.train_batch(data).item() > 0]
    return ["joined"]


def quiet_job(case: Case) -> int:
    """Wait until all launches have tried to join, and return the number of stages that the job can have."""
    set_secret()
    engine = build(case)
    engine.repacker.world.store.wait(["looked"])
    return int(engine.most_stages())


def test_a_launch_of_another_run_cannot_join(store: TCPStore) -> None:
    """It gets an error that tells what differs, and trains on by itself."""
    case, address = Case(stages=1, dynmo=ACCEPTS_JOINS), f"localhost:{store.port}"
    others = {
        "the layers": replace(case, blocks=4),
        "beside the stages": replace(case, replicas=2),
        '"gradient_clipping" in the configuration': replace(case, clip=0.5),
        '"dynmo" in the configuration': replace(case, dynmo={**ACCEPTS_JOINS, "balancer": "partition"}),
    }

    def look() -> list[list[Any]]:
        try:
            return [run(other.ranks, refused, other, address)[0] for other in others.values()]
        finally:
            store.set("ds_dynmo/" + store.get("ds_dynmo/job").decode() + "/looked", "")

    most, found = together(lambda: run(1, quiet_job, case, port=store.port, seconds=SECONDS), look)
    assert most == [1]
    for expected, (text, released, trains) in zip(others, found, strict=True):
        assert text.startswith("engine.join: the job does something else") and expected in text
        assert not released and trains


def job_with_a_late_optimizer(case: Case) -> int:
    set_secret()
    engine = without_optimizer(case)
    give_optimizer(engine)
    store = engine.repacker.world.store
    store.set("optimizer", "")
    store.wait(["looked"])
    return int(engine.most_stages())


def joining_launch_with_a_late_optimizer(case: Case, address: str) -> bool:
    """Join once the launch has the job's optimizer; before that, the job refuses."""
    set_secret()
    engine = without_optimizer(case)
    job = store_part(store_at(address, 60.0), job_spec.find_job(store_at(address, 60.0), 60.0))
    job.wait(["optimizer"])
    with suppress(ConfigError):
        engine.join(address)
    assert not engine.released
    give_optimizer(engine)
    engine.join(address)
    job.set("looked", "")
    return bool(engine.released)


def test_a_launch_joins_with_the_jobs_latest_optimizer(store: TCPStore) -> None:
    case = Case(stages=1, dynmo=ACCEPTS_JOINS)
    most, joined = together(
        lambda: run(1, job_with_a_late_optimizer, case, port=store.port, seconds=SECONDS),
        lambda: run(1, joining_launch_with_a_late_optimizer, case, f"localhost:{store.port}"),
    )
    assert (most, joined) == ([2], [True])


def test_joining_without_a_job_is_refused(store: TCPStore) -> None:
    case = Case(stages=1, dynmo={**ACCEPTS_JOINS, "timeout_seconds": 0.5})
    silent = socket.create_server(("localhost", 0))
    for address, expected in [
        (f"localhost:{silent.getsockname()[1]}", "engine.join: no job answers at localhost:"),
        ("nowhere", 'engine.join: "nowhere": should be HOST:PORT'),
        (f"localhost:{store.port}", "engine.join: the launch runs no job that can be joined"),
        ("localhost:1", "engine.join: no job answers at localhost:1 within 0.5 s"),
    ]:
        text, released, trains = run(1, refused, case, address)[0]
        assert text.startswith(expected) and not released and trains


class Bomb:
    """An object whose pickle ends the process that loads it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def job_beside_a_stranger(case: Case) -> int:
    """Return the number of stages that the job can have, after a stranger wrote keys of an earlier protocol."""
    set_secret()
    engine = build(case)
    store = engine.repacker.world.store
    store.add("joined", 10**15)
    store.set("place/1", pickle.dumps(Bomb()))
    return int(engine.most_stages())


def test_strangers_entries_in_the_store_are_not_read(store: TCPStore) -> None:
    """Neither a count that a stranger writes, however large, nor its pickles are read."""
    for accepts in (False, True):
        case = Case(stages=1, dynmo={**ACCEPTS_JOINS, "repack": {"accept_joins": accepts}})
        assert run(1, job_beside_a_stranger, case, seconds=SECONDS) == [1]
    refusals = run(1, refused, Case(stages=1, dynmo={"interval": 0}), f"localhost:{store.port}")
    assert refusals[0][0].startswith("engine.join: dynmo.repack.accept_joins = false")


def secrets_that_differ(case: Case) -> str:
    set_secret(f"{SECRET}, rank {os.environ['RANK']}")
    try:
        build(case)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def test_ranks_of_a_launch_with_different_secrets_are_refused_at_the_start() -> None:
    """A re-packing would find it too late to go back."""
    for rank, message in enumerate(run(2, secrets_that_differ, Case(dynmo=ACCEPTS_JOINS))):
        assert message.startswith(f"ranks [{1 - rank}] have another secret in DS_DYNMO_JOIN_SECRET than rank {rank}")


def deceived_job(case: Case) -> str:
    set_secret()
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    engine.repacker.world.store.wait(["ready/1"])
    try:
        engine.repack(2)
    except MigrationError as error:
        return str(error)
    return "nothing was raised"


def impostor(case: Case, address: str) -> None:
    """Join, then take part in the new world without the secret, and send a pickle that nobody may load."""
    set_secret()
    engine = build(case)
    engine.join(address)

    def pretend(_: Any, gather: Callable[[bytes], list[bytes]], *facts: Any) -> None:
        gather(secrets.token_bytes(32))
        gather(secrets.token_bytes(32))
        with suppress(RuntimeError):  # the other ranks leave
            engine.stage.comm.gather_objects(Bomb())

    secret.check_members = pretend
    with suppress(MigrationError):
        engine.wait_for_recall()


def test_an_impostor_is_found_in_the_new_world(store: TCPStore) -> None:
    """It is found before anything from its connections is unpickled."""
    case, address = Case(stages=1, dynmo=ACCEPTS_JOINS), f"localhost:{store.port}"
    messages, _ = together(
        lambda: run(1, deceived_job, case, port=store.port, seconds=SECONDS),
        lambda: run(1, impostor, case, address, seconds=SECONDS),
    )
    assert "ranks [1] of the new world do not know the secret in DS_DYNMO_JOIN_SECRET" in messages[0]


def test_a_job_that_ends_dismisses_launches_that_joined(store: TCPStore) -> None:
    case = Case(stages=1, dynmo=ACCEPTS_JOINS)
    own = replace(case, stages=2)
    _, waiting = together(
        lambda: run(1, job, case, {}, {1: [1, 2]}, 2, port=store.port, seconds=SECONDS),
        lambda: run(2, joining_launch, own, f"localhost:{store.port}", {}, 2),
    )
    assert [result["called"] for result in waiting] == [False, False]


def run_joining_script(*arguments: Any) -> dict[str, Any]:
    set_secret()
    return run_script(*arguments)


def test_the_training_script_joins_a_run(store: TCPStore, tmp_path: Path) -> None:
    """The run takes the rank as a stage at its next decision, and its losses stay the same to the bit."""
    arguments = flags(tmp_path, "dense", 8)
    alone = run(1, run_script, arguments)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            {
                **settings,
                "dynmo": {**settings["dynmo"], "repack": {"enabled": True, "min_stages": 2, "accept_joins": True}},
            }
        )
    )
    others = [*arguments, "--join", f"localhost:{store.port}"]
    of_run, joined = together(
        lambda: run(1, run_joining_script, arguments, None, 4, port=store.port, seconds=SECONDS),
        lambda: run(1, run_joining_script, others, seconds=SECONDS),
    )
    ranks = of_run[0]["ranks"]
    assert ranks == sorted(ranks) and ranks[-4:] == [2] * 4
    assert of_run[0]["losses"] == alone[0]["losses"]
    assert joined[0]["losses"] == alone[0]["losses"][ranks.count(1) - 1 :]  # it was recalled at the end of a step
    assert of_run[0]["validation"] == alone[0]["validation"]
    assert whole([*of_run, *joined]) == whole(alone)


def job_of_known_times(block: dict[str, Any], steps: int) -> list[int]:
    """Return the number of stages after each step. The fourth step begins when a rank has joined."""
    set_secret()
    use_virtual_clock()
    engine, data = sleeping_engine(block, LAYER_SECONDS, 1)
    store = engine.repacker.world.store
    sizes: list[int] = []
    while engine.global_steps < steps:
        if engine.global_steps == 3:
            store.set("trained 3 steps", "")
            store.wait(["ready/1"])
        engine.train_batch(data)
        sizes.append(engine.num_stages)
    return sizes


def joining_launch_of_known_times(block: dict[str, Any], address: str, steps: int) -> None:
    set_secret()
    use_virtual_clock()
    engine, data = sleeping_engine(block, LAYER_SECONDS, 1)
    store_part(store_at(address, SECONDS), job_spec.find_job(store_at(address, SECONDS), SECONDS)).wait(
        ["trained 3 steps"]
    )
    engine.join(address)
    assert engine.wait_for_recall()
    while not engine.released and engine.global_steps < steps:
        engine.train_batch(data)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_an_automatic_repacking_takes_ranks_that_join_and_keeps_them(store: TCPStore, schedule: str) -> None:
    """From then on the target speed includes them; before, one stage was fast enough."""
    block = {
        **ACCEPTS_JOINS,
        "interval": 2,
        "profile": {"batches": 1},
        "repack": {"enabled": True, "accept_joins": True},
        "schedule": {"kind": schedule},
    }
    sizes, _ = together(
        lambda: run(1, job_of_known_times, block, 8, port=store.port, seconds=SECONDS)[0],
        lambda: run(1, joining_launch_of_known_times, block, f"localhost:{store.port}", 8, seconds=SECONDS),
    )
    assert sizes == [1] * 3 + [2] * 5

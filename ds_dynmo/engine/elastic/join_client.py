"""Join a running job, as a launch of its own; ``join_server`` is the job's side, and describes the protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.elastic import job_spec
from ds_dynmo.engine.elastic.job_spec import JobSpec
from ds_dynmo.engine.elastic.join_server import INVALID_MESSAGE, REQUEST_SLOTS, message_key, read_message, slot_key
from ds_dynmo.engine.elastic.release import RankLocation
from ds_dynmo.engine.elastic.secret import VARIABLE, JoinSecret, new_nonce
from ds_dynmo.engine.elastic.world import World, store_at, store_part
from ds_dynmo.errors import ConfigError


@dataclass(frozen=True)
class JoinedJob:
    """What a launch knows of the job that has admitted it.

    Attributes:
        name: of the job.
        store: the job's part of the store of its launch.
        axes: the size of each axis of the job's launch, by name, in order.
        first_stage: the number that this launch's first stage has in the job.
    """

    name: str
    store: BoundedStore
    axes: dict[str, int]
    first_stage: int


def join_job(
    where: Any,
    own: JobSpec,
    location: RankLocation,
    world: World,
    comm: Communicator,
    secret: JoinSecret,
    timeout_seconds: float,
) -> JoinedJob:
    """Ask the job at ``where`` to admit this launch. Collective over the launch, which is unchanged afterwards.

    Args:
        where: "HOST:PORT", or the store of the job's launch.
        own: what this launch does.
        location: where this rank runs.
        timeout_seconds: for which this launch's ranks wait for each other.

    Raises:
        ConfigError: on every rank; there is no job, or it does something else, or does not know the secret.
    """
    launch = _on_every_rank(comm, lambda: _store_of(where, timeout_seconds))
    half = timeout_seconds / 2  # the other ranks wait for rank 0 meanwhile
    name = _on_first_rank(comm, world, lambda: job_spec.find_job(launch, half))
    store = store_part(launch, name)
    client = JoinClient(store, name, secret, half)
    job = _on_first_rank(comm, world, client.request_job_spec)
    _on_every_rank(comm, lambda: job_spec.check_fits(job, own))
    every = comm.gather_objects((world.launch_stage, world.rank_in_stage, location))
    locations = [location for *_, location in sorted(every, key=lambda found: found[:2])]
    return JoinedJob(name, store, job.axes, _on_first_rank(comm, world, lambda: client.apply(own, locations)))


def _store_of(where: Any, timeout_seconds: float) -> BoundedStore:
    return store_at(where, timeout_seconds) if isinstance(where, str) else BoundedStore(where, timeout_seconds)


def _on_every_rank(comm: Communicator, make: Callable[[], Any]) -> Any:
    """Call ``make``; a ConfigError of one rank is raised on every rank. Collective."""
    problem, made = "", None
    try:
        made = make()
    except (ConfigError, RuntimeError) as error:  # RuntimeError: another launch's store may go at any time
        problem = str(error) or repr(error)
    problem = next(filter(None, comm.gather_objects(problem)), "")
    if problem:
        raise ConfigError(f"engine.join: {problem}")
    return made


def _on_first_rank(comm: Communicator, world: World, make: Callable[[], Any]) -> Any:
    """Call ``make`` on rank 0 of this launch; every rank gets its result, or its ConfigError. Collective."""
    return comm.broadcast_object(_on_every_rank(comm, lambda: make() if world.launch_rank == 0 else None))


class JoinClient:
    """Asks a job to admit this launch, on the launch's rank 0.

    Args:
        store: the job's part of the store of its launch.
        name: of the job.
        timeout_seconds: of each answer.
    """

    def __init__(self, store: Any, name: str, secret: JoinSecret, timeout_seconds: float) -> None:
        self._store, self._name, self._secret, self._timeout_seconds = store, name, secret, timeout_seconds
        self._own, self._theirs = new_nonce(), ""

    def request_job_spec(self) -> JobSpec:
        """Ask what the job does.

        Raises:
            ConfigError: nobody answers, or somebody who does not know the secret.
        """
        hello = json.dumps({"nonce": self._own})
        if not any(
            self._store.compare_set(slot_key(slot), "", hello) == hello.encode() for slot in range(REQUEST_SLOTS)
        ):
            raise ConfigError(f"{REQUEST_SLOTS} launches want to join at the moment: try again")
        self._theirs, job, proof = self._await("job", "nonce", "job", "proof")
        self._check(proof, "job", job)
        return JobSpec(**json.loads(job))

    def apply(self, own: JobSpec, locations: Sequence[RankLocation]) -> int:
        """Ask to be admitted, and return the number that this launch's first stage gets in the job.

        Args:
            locations: of all its ranks, by stage and, within a stage, in the order of the other axes.

        Raises:
            ConfigError: it is refused (says why), or nobody answers.
        """
        application = json.dumps({"job": asdict(own), "locations": [location.as_record() for location in locations]})
        proof = self._secret.proof("client", self._name, self._own, self._theirs, application)
        self._store.set(message_key("application", self._own), json.dumps({"application": application, "proof": proof}))
        text, proof = self._await("verdict", "verdict", "proof")
        self._check(proof, "verdict", text)
        verdict: dict[str, Any] = json.loads(text)
        if "refused" in verdict:
            raise ConfigError(verdict["refused"])
        return int(verdict["first_stage"])

    def _await(self, what: str, *fields: str) -> list[str]:
        key = message_key(what, self._own)
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_seconds))
            raw = self._store.get(key)
            self._store.delete_key(key)
            message = read_message(raw)
            return [message[field] for field in fields]
        except INVALID_MESSAGE as error:
            raise ConfigError(f"the job gave no valid answer within {self._timeout_seconds:g} s") from error

    def _check(self, proof: str, what: str, said: str) -> None:
        if not self._secret.proves(proof, what, self._name, self._own, self._theirs, said):
            raise ConfigError(f"whoever answers there does not know the secret that this launch has in {VARIABLE}")

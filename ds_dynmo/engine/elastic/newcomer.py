"""The side of a launch that joins a running job; the job's is in ``admission``, and what they say to each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.engine.elastic import joining
from ds_dynmo.engine.elastic.admission import GARBAGE, SLOTS, message_key, read_message, slot_key
from ds_dynmo.engine.elastic.joining import Job
from ds_dynmo.engine.elastic.release import Place
from ds_dynmo.engine.elastic.secret import VARIABLE, JoinSecret, new_nonce
from ds_dynmo.engine.elastic.world import World, part_of, store_at
from ds_dynmo.errors import ConfigError


@dataclass(frozen=True)
class Admitted:
    """What a launch knows that was let in.

    Attributes:
        name: of the job.
        store: the job's part of the store of its launch.
        axes: the size of each axis of the job's launch, by name, in order.
        first_stage: of the job, that this launch's first stage is from now on.
    """

    name: str
    store: BoundedStore
    axes: dict[str, int]
    first_stage: int


def enter(where: Any, own: Job, place: Place, world: World, comm: Any, secret: JoinSecret, patience: float) -> Admitted:
    """Be let into the job at ``where``. Collective over the launch that joins; nothing of it has changed afterwards.

    Args:
        where: "HOST:PORT", or the store of the job's launch.
        own: what this launch does.
        place: where this rank runs.
        comm: the ``Communicator`` of this launch.
        patience: seconds, after which this launch's ranks do not wait for each other any longer.

    Raises:
        ConfigError: on every rank, where there is no job, or it does something else or does not know the secret.
    """
    launch = _unless_it_fails(comm, lambda: _store_of(where, patience))
    half = patience / 2  # the other ranks wait for rank 0 meanwhile
    name = _for_all(comm, world, lambda: joining.find(launch, half))
    store = part_of(launch, name)
    newcomer = Newcomer(store, name, secret, half)
    job = _for_all(comm, world, newcomer.ask)
    _unless_it_fails(comm, lambda: joining.check_fits(job, own))
    every = comm.gather_objects((world.launch_stage, world.place_in_stage, place))
    places = [place for *_, place in sorted(every, key=lambda found: found[:2])]
    return Admitted(name, store, job.axes, _for_all(comm, world, lambda: newcomer.apply(own, places)))


def _store_of(where: Any, patience: float) -> BoundedStore:
    return store_at(where, patience) if isinstance(where, str) else BoundedStore(where, patience)


def _unless_it_fails(comm: Any, make: Callable[[], Any]) -> Any:
    """What ``make`` gives on this rank; a ConfigError of one rank is raised on every rank. Collective."""
    problem, made = "", None
    try:
        made = make()
    except (ConfigError, RuntimeError) as error:  # of the store of another launch: it may go at any time
        problem = str(error) or repr(error)
    problem = next(filter(None, comm.gather_objects(problem)), "")
    if problem:
        raise ConfigError(f"engine.join: {problem}")
    return made


def _for_all(comm: Any, world: World, make: Callable[[], Any]) -> Any:
    """What ``make`` gives on rank 0 of this launch, on every rank; likewise its ConfigError. Collective."""
    return comm.broadcast_object(_unless_it_fails(comm, lambda: make() if world.launch_rank == 0 else None))


class Newcomer:
    """The side of a launch that wants to join, on its rank 0.

    Args:
        store: the job's part of the store of its launch.
        name: of the job.
        timeout_seconds: of each answer.
    """

    def __init__(self, store: Any, name: str, secret: JoinSecret, timeout_seconds: float) -> None:
        self._store, self._name, self._secret, self._timeout_seconds = store, name, secret, timeout_seconds
        self._own, self._theirs = new_nonce(), ""

    def ask(self) -> Job:
        """What the job is that can be joined here.

        Raises:
            ConfigError: nobody answers, or somebody who does not know the secret.
        """
        hello = json.dumps({"nonce": self._own})
        if not any(self._store.compare_set(slot_key(slot), "", hello) == hello.encode() for slot in range(SLOTS)):
            raise ConfigError(f"{SLOTS} launches want to join at the moment: try again")
        self._theirs, job, proof = self._await("job", "nonce", "job", "proof")
        self._check(proof, "job", job)
        return Job(**json.loads(job))

    def apply(self, own: Job, places: Sequence[Place]) -> int:
        """The number of the first stage that this launch is from now on.

        Args:
            places: of all its ranks, by stage and, within a stage, in the order of the other axes.

        Raises:
            ConfigError: it is refused (says why), or nobody answers.
        """
        application = json.dumps({"job": asdict(own), "places": [place.as_record() for place in places]})
        proof = self._secret.proof("newcomer", self._name, self._own, self._theirs, application)
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
        except GARBAGE as error:
            raise ConfigError(
                f"the job does not answer, or not as it should, in {self._timeout_seconds:g} s"
            ) from error

    def _check(self, proof: str, what: str, said: str) -> None:
        if not self._secret.proves(proof, what, self._name, self._own, self._theirs, said):
            raise ConfigError(f"who answers there does not know the secret that this launch has in {VARIABLE}")

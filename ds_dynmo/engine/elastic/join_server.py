"""Admit ranks of another launch to a running job, once both sides have proved that they know the secret.

Messages travel as JSON over the store of the job's launch, in which anybody who reaches its port can write:

    client    writes a nonce into a free slot
    server    writes a nonce of its own and the spec of the job, proved over both nonces
    client    checks the proof, and whether it fits; writes its own spec, proved over both nonces
    server    checks the proof, and whether it fits; writes the client's number, or why not, proved over both nonces

The server runs in a thread of rank 0, and answers within fractions of a second whatever the job is doing. It serves a
limited number of slots and of handshakes at a time, and drops a message that is longer than any honest one. Such a
message is read whole before it is measured: a store cannot read a part of a value.
"""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_dynmo.engine.elastic.job_spec import JobSpec, refusal
from ds_dynmo.engine.elastic.release import RankLocation
from ds_dynmo.engine.elastic.secret import VARIABLE, JoinSecret, new_nonce
from ds_dynmo.engine.elastic.world import STORE_LOST

REQUEST_SLOTS = 8  # launches that can ask at the same time
_MOST_HANDSHAKES = 64  # at a time; a client waits in its slot while there are so many
_LONGEST_MESSAGE = 1 << 20  # bytes
_POLL_SECONDS = 0.2
_NONCE = re.compile(r"[0-9a-f]{64}")
INVALID_MESSAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
)  # what reading one raises


@dataclass(frozen=True)
class AdmittedLaunch:
    """A launch that was admitted.

    Attributes:
        stages: the stages of the job that its ranks have become.
        locations: where its ranks run.
    """

    stages: tuple[int, ...]
    locations: tuple[RankLocation, ...]


@dataclass
class _Handshake:
    """A handshake that has begun: the server's nonce, and the ``time.monotonic()`` at which it is given up."""

    nonce: str
    until: float


class JoinServer:
    """Admits other launches to the job, on rank 0.

    Args:
        store: the job's part of the launch's store, by a connection of its own.
        name: of the job.
        ranks_per_stage: how many ranks a stage has.
        most_stages: how many stages of other launches there can be at a time.
        timeout_seconds: after which a client that sends nothing more is given up.
        warn: reports a line; called in the thread.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        secret: JoinSecret,
        job: JobSpec,
        *,
        ranks_per_stage: int,
        most_stages: int,
        timeout_seconds: float,
        warn: Callable[[str], None],
    ) -> None:
        self._store, self._name, self._secret, self._job = store, name, secret, job
        self._ranks_per_stage, self._most_stages = ranks_per_stage, most_stages
        self._timeout_seconds, self._warn = timeout_seconds, warn
        self._next_stage = job.axes["pipe"]
        self._handshakes: dict[str, _Handshake] = {}
        self._lock = threading.Lock()
        self._admitted: list[tuple[AdmittedLaunch, float]] = []  # and until when its ranks have to be ready
        self._stages_here = 0
        self._has_warned = False
        self._stop = threading.Event()

    def start(self) -> None:
        """Serve in a thread until :meth:`close`, or until this object is no longer referenced."""
        thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._stop), name="ds_dynmo joins", daemon=True
        )
        weakref.finalize(self, _end, thread, self._stop)  # also when the interpreter ends
        thread.start()

    def update_job(self, job: JobSpec) -> None:
        """Replace the spec of the job for whoever asks from now on."""
        self._job = job

    def close(self) -> list[AdmittedLaunch]:
        """Stop admitting launches, and return those that were admitted and are not ready yet."""
        self._stop.set()
        with self._lock:
            admitted, self._admitted = self._admitted, []
        return [launch for launch, _ in admitted]

    def ready_launches(self, stages_here: int) -> list[AdmittedLaunch]:
        """Return, each once, the admitted launches all of whose ranks can be called by now.

        Args:
            stages_here: stages of other launches that the job has already, at work or waiting.
        """
        now = time.monotonic()
        with self._lock:
            ready = [launch for launch, _ in self._admitted if self._is_ready(launch)]
            self._admitted = [
                (launch, until) for launch, until in self._admitted if launch not in ready and now < until
            ]
            self._stages_here = stages_here + sum(len(launch.stages) for launch in ready)
        return ready

    def _is_ready(self, launch: AdmittedLaunch) -> bool:
        return bool(self._store.check([ready_key(location.rank) for location in launch.locations]))

    # -- one poll -------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Handle what clients have written."""
        for slot in range(REQUEST_SLOTS):
            if len(self._handshakes) < _MOST_HANDSHAKES:
                self._receive(slot_key(slot), self._begin)
        for nonce, handshake in list(self._handshakes.items()):
            self._receive(message_key("application", nonce), lambda message, nonce=nonce: self._decide(nonce, message))  # type: ignore[misc]
            if time.monotonic() > handshake.until:
                self._handshakes.pop(nonce, None)
                self._store.delete_key(message_key("job", nonce))

    def _receive(self, key: str, use: Callable[[dict[str, str]], None]) -> None:
        """Handle the message at ``key``, if there is one, and delete it; an invalid one is dropped."""
        if not self._store.check([key]):
            return
        try:
            raw = self._store.get(key)
            self._store.delete_key(key)
            use(read_message(raw))
        except STORE_LOST:
            raise
        except INVALID_MESSAGE:
            self._warn_once("an invalid message")

    def _begin(self, message: dict[str, str]) -> None:
        theirs, own, job = message["nonce"], new_nonce(), json.dumps(asdict(self._job))
        if not _NONCE.fullmatch(theirs) or theirs in self._handshakes:
            raise ValueError("no nonce, or one that was used")
        self._handshakes[theirs] = _Handshake(own, time.monotonic() + self._timeout_seconds)
        proof = self._secret.proof("job", self._name, theirs, own, job)
        self._store.set(message_key("job", theirs), json.dumps({"nonce": own, "job": job, "proof": proof}))

    def _decide(self, theirs: str, message: dict[str, str]) -> None:
        own = self._handshakes.pop(theirs).nonce
        application = message["application"]
        if not self._secret.proves(message["proof"], "client", self._name, theirs, own, application):
            self._warn_once(f"a request without a proof that it knows the secret in {VARIABLE}")
            return
        verdict = json.dumps(self._admit(json.loads(application)))
        proof = self._secret.proof("verdict", self._name, theirs, own, verdict)
        self._store.set(message_key("verdict", theirs), json.dumps({"verdict": verdict, "proof": proof}))

    def _admit(self, application: dict[str, Any]) -> dict[str, Any]:
        """Admit a launch that knows the secret and number its stages, or say why not."""
        applicant = JobSpec(**application["job"])
        locations = [RankLocation(**record) for record in application["locations"]]
        differ = self._job.differences(applicant)
        if differ:
            return {"refused": refusal(differ)}
        stages = applicant.axes["pipe"]
        if len(locations) != stages * self._ranks_per_stage:
            return {"refused": f"{len(locations)} ranks are not {stages} stages of {self._ranks_per_stage}"}
        with self._lock:
            here = self._stages_here + sum(len(launch.stages) for launch, _ in self._admitted)
            if here + stages > self._most_stages:
                return {
                    "refused": f"the job takes in {self._most_stages} stages of other launches at most, as many as it "
                    f"has layers, and has {here}: {stages} more are too many"
                }
            first = self._next_stage
            self._next_stage += stages
            ranks = range(first * self._ranks_per_stage, self._next_stage * self._ranks_per_stage)
            launch = AdmittedLaunch(
                tuple(range(first, self._next_stage)),
                tuple(replace(location, rank=rank) for rank, location in zip(ranks, locations, strict=True)),
            )
            self._admitted.append((launch, time.monotonic() + self._timeout_seconds))
        return {"first_stage": first}

    def _warn_once(self, what: str) -> None:
        """Warn of the first such message alone, so that nobody can fill the log."""
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"DynMo: somebody wrote {what} into the store of the launch, where ranks of other launches ask to "
                "join. It is ignored, and so is what follows, without a further warning"
            )


def _serve(server: weakref.ref[JoinServer], stop: threading.Event) -> None:
    while not stop.wait(_POLL_SECONDS):
        serving = server()
        if serving is None:
            return
        with suppress(*STORE_LOST):  # rank 0's process ends
            serving.poll()
            del serving
            continue
        return


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(timeout=10 * _POLL_SECONDS)


# -- what is written where ----------------------------------------------------------------------------


def ready_key(rank: int) -> str:
    """Name the key where an admitted rank says that it can be called."""
    return f"ready/{rank}"


def slot_key(number: int) -> str:
    """Name the key where a client asks."""
    return f"join/slot/{number}"


def message_key(what: str, nonce: str) -> str:
    """Name the key of a message of the handshake in which the client drew ``nonce``."""
    return f"join/{what}/{nonce}"


def read_message(raw: bytes) -> dict[str, str]:
    """Read a message: texts by name.

    Raises:
        ValueError: it is invalid, or longer than any honest one.
    """
    if len(raw) > _LONGEST_MESSAGE:
        raise ValueError(f"{len(raw)} bytes")
    message = json.loads(raw)
    if not isinstance(message, dict) or not all(isinstance(text, str) for text in message.values()):
        raise ValueError("not texts by name")
    return message

"""Let ranks of another launch into a running job, once both sides have proved that they know the secret.

All of it travels as JSON over the store of the job's launch, in which anybody who reaches its port can write:

    the newcomer    writes a nonce into a free slot
    the job         writes a nonce of its own and what the job is, proved over both nonces
    the newcomer    checks the proof, and whether it fits; writes what it is, proved over both nonces
    the job         checks the proof, and whether it fits; writes its number, or why not, proved over both nonces

The job answers within fractions of a second, whatever it is doing, in a thread of rank 0. What this thread looks at is
bounded: some slots, some meetings that have begun, and of a message as much as an honest one needs.
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

from ds_dynmo.engine.elastic.joining import Job, refusal
from ds_dynmo.engine.elastic.release import Place
from ds_dynmo.engine.elastic.secret import VARIABLE, JoinSecret, new_nonce
from ds_dynmo.engine.elastic.world import STORE_LOST

SLOTS = 8  # joining ranks that can ask at the same time
_MEETINGS = 64  # that have begun and are not over; a newcomer waits in its slot while there are so many
_LONGEST = 1 << 20  # bytes of a message
_LOOK_SECONDS = 0.2  # between looks of the job
_NONCE = re.compile(r"[0-9a-f]{64}")
GARBAGE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)  # what a message may raise that is none


@dataclass(frozen=True)
class Arrival:
    """A launch that was let in.

    Attributes:
        stages: of the job, that its ranks are.
        places: where these run.
    """

    stages: tuple[int, ...]
    places: tuple[Place, ...]


@dataclass
class _Meeting:
    """One that has begun: the job's nonce, and when it is given up."""

    nonce: str
    until: float


class Admissions:
    """The job's side, on rank 0.

    Args:
        store: the job's part of the launch's store, by a connection of its own.
        name: of the job.
        ranks_of_stage: how many ranks a stage has.
        most_stages: how many stages of other launches there can be at a time.
        timeout_seconds: after which a newcomer that does not go on is given up.
        warn: reports a line; called in the thread.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        secret: JoinSecret,
        job: Job,
        *,
        ranks_of_stage: int,
        most_stages: int,
        timeout_seconds: float,
        warn: Callable[[str], None],
    ) -> None:
        self._store, self._name, self._secret, self._job = store, name, secret, job
        self._ranks_of_stage, self._most_stages = ranks_of_stage, most_stages
        self._timeout_seconds, self._warn = timeout_seconds, warn
        self._next_stage = job.axes["pipe"]
        self._meetings: dict[str, _Meeting] = {}
        self._lock = threading.Lock()
        self._admitted: list[tuple[Arrival, float]] = []  # and until when its ranks have to be ready
        self._stages_here = 0
        self._has_warned = False
        self._stop = threading.Event()

    def start(self) -> None:
        """Serve, in a thread, until :meth:`close`, or until nobody holds this any more."""
        thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._stop), name="ds_dynmo joins", daemon=True
        )
        weakref.finalize(self, _end, thread, self._stop)  # also when the interpreter ends
        thread.start()

    def describe(self, job: Job) -> None:
        """The job is another one than it was: whoever asks from now on is told so."""
        self._job = job

    def close(self) -> list[Arrival]:
        """Let nobody in any more; those that were let in and have not arrived."""
        self._stop.set()
        with self._lock:
            admitted, self._admitted = self._admitted, []
        return [arrival for arrival, _ in admitted]

    def arrived(self, stages_here: int) -> list[Arrival]:
        """Those that were let in, all of whose ranks can be called by now; each once.

        Args:
            stages_here: stages of other launches that the job has already, at work or waiting.
        """
        now = time.monotonic()
        with self._lock:
            ready = [arrival for arrival, _ in self._admitted if self._is_ready(arrival)]
            self._admitted = [(a, until) for a, until in self._admitted if a not in ready and now < until]
            self._stages_here = stages_here + sum(len(arrival.stages) for arrival in ready)
        return ready

    def _is_ready(self, arrival: Arrival) -> bool:
        return bool(self._store.check([ready_key(place.rank) for place in arrival.places]))

    # -- one look -------------------------------------------------------------------------------------

    def look(self) -> None:
        """Go on with every newcomer that has written something."""
        for slot in range(SLOTS):
            if len(self._meetings) < _MEETINGS:
                self._receive(slot_key(slot), self._begin)
        for nonce, meeting in list(self._meetings.items()):
            self._receive(message_key("application", nonce), lambda message, nonce=nonce: self._decide(nonce, message))  # type: ignore[misc]
            if time.monotonic() > meeting.until:
                self._meetings.pop(nonce, None)
                self._store.delete_key(message_key("job", nonce))

    def _receive(self, key: str, use: Callable[[dict[str, str]], None]) -> None:
        """What was written there, once; nothing comes of what makes no sense."""
        if not self._store.check([key]):
            return
        try:
            raw = self._store.get(key)
            self._store.delete_key(key)
            use(read_message(raw))
        except STORE_LOST:
            raise
        except GARBAGE:
            self._warn_once("what makes no sense")

    def _begin(self, message: dict[str, str]) -> None:
        theirs, own, job = message["nonce"], new_nonce(), json.dumps(asdict(self._job))
        if not _NONCE.fullmatch(theirs) or theirs in self._meetings:
            raise ValueError("no nonce, or one that was used")
        self._meetings[theirs] = _Meeting(own, time.monotonic() + self._timeout_seconds)
        proof = self._secret.proof("job", self._name, theirs, own, job)
        self._store.set(message_key("job", theirs), json.dumps({"nonce": own, "job": job, "proof": proof}))

    def _decide(self, theirs: str, message: dict[str, str]) -> None:
        own = self._meetings.pop(theirs).nonce
        application = message["application"]
        if not self._secret.proves(message["proof"], "newcomer", self._name, theirs, own, application):
            self._warn_once(f"no proof that it knows the secret in {VARIABLE}")
            return
        verdict = json.dumps(self._admit(json.loads(application)))
        proof = self._secret.proof("verdict", self._name, theirs, own, verdict)
        self._store.set(message_key("verdict", theirs), json.dumps({"verdict": verdict, "proof": proof}))

    def _admit(self, application: dict[str, Any]) -> dict[str, Any]:
        """Give numbers to one that knows the secret; or say why not."""
        applicant, places = Job(**application["job"]), [Place(**record) for record in application["places"]]
        differ = self._job.differences(applicant)
        if differ:
            return {"refused": refusal(differ)}
        stages = applicant.axes["pipe"]
        if len(places) != stages * self._ranks_of_stage:
            return {"refused": f"{len(places)} ranks are not {stages} stages of {self._ranks_of_stage}"}
        with self._lock:
            here = self._stages_here + sum(len(arrival.stages) for arrival, _ in self._admitted)
            if here + stages > self._most_stages:
                return {
                    "refused": f"the job takes in {self._most_stages} stages of other launches at most, as many as it "
                    f"has layers, and has {here}: {stages} more are too many"
                }
            first = self._next_stage
            self._next_stage += stages
            ranks = range(first * self._ranks_of_stage, self._next_stage * self._ranks_of_stage)
            arrival = Arrival(
                tuple(range(first, self._next_stage)),
                tuple(replace(place, rank=rank) for rank, place in zip(ranks, places, strict=True)),
            )
            self._admitted.append((arrival, time.monotonic() + self._timeout_seconds))
        return {"first_stage": first}

    def _warn_once(self, what: str) -> None:
        """Nobody can fill the log."""
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"DynMo: somebody wrote {what} into the store of the launch, where ranks of other launches ask to "
                "join. It is ignored, and so is what follows, without a further warning"
            )


def _serve(admissions: weakref.ref[Admissions], stop: threading.Event) -> None:
    while not stop.wait(_LOOK_SECONDS):
        serving = admissions()
        if serving is None:
            return
        with suppress(*STORE_LOST):  # rank 0's process ends
            serving.look()
            del serving
            continue
        return


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(timeout=10 * _LOOK_SECONDS)


# -- what is written where ----------------------------------------------------------------------------


def ready_key(rank: int) -> str:
    """Where a rank that was let in says that it can be called."""
    return f"ready/{rank}"


def slot_key(number: int) -> str:
    """Where a newcomer asks."""
    return f"join/slot/{number}"


def message_key(what: str, nonce: str) -> str:
    """Where the messages of the meeting are in which the newcomer drew ``nonce``."""
    return f"join/{what}/{nonce}"


def read_message(raw: bytes) -> dict[str, str]:
    """A message: texts by name.

    Raises:
        ValueError: it is none, or longer than any honest one.
    """
    if len(raw) > _LONGEST:
        raise ValueError(f"{len(raw)} bytes")
    message = json.loads(raw)
    if not isinstance(message, dict) or not all(isinstance(text, str) for text in message.values()):
        raise ValueError("not texts by name")
    return message

"""How a launch is admitted to a job, and which are not: all over a store, without process groups."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore

from ds_dynmo.config import RepackConfig
from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.engine.elastic.job_spec import JobSpec
from ds_dynmo.engine.elastic.join_client import JoinClient
from ds_dynmo.engine.elastic.join_server import REQUEST_SLOTS, JoinServer, message_key, ready_key, slot_key
from ds_dynmo.engine.elastic.release import RankLocation
from ds_dynmo.engine.elastic.secret import VARIABLE, JoinSecret, secret_for
from ds_dynmo.errors import ConfigError

NAME = "0" * 32
SECRET = "correct horse battery staple, and more"
JOB = JobSpec({"pipe": 2, "data": 2}, {"the layers": "alike"})
LAYERS = 4


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "store"), 1)


class Gate:
    """A job's server that polls when told to, and its warnings."""

    def __init__(self, store: FileStore, secret: str = SECRET, seconds: float = 60.0) -> None:
        self.warnings: list[str] = []
        self.server = JoinServer(
            BoundedStore(store, 30.0),
            NAME,
            JoinSecret(secret),
            JOB,
            ranks_per_stage=2,
            most_stages=LAYERS,
            timeout_seconds=seconds,
            warn=self.warnings.append,
        )

    def while_polling(self, action: Callable[[], Any]) -> Any:
        done = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(action)
            future.add_done_callback(lambda _: done.set())
            while not done.wait(0.001):
                self.server.poll()
        return future.result()


def locations(count: int) -> list[RankLocation]:
    return [RankLocation(rank, f"host-{rank}", "cpu") for rank in range(count)]


def client(store: FileStore, secret: str = SECRET) -> JoinClient:
    return JoinClient(BoundedStore(store, 30.0), NAME, JoinSecret(secret), 30.0)


def join(store: FileStore, stages: int = 1, **other: Any) -> int:
    asking = client(store)
    assert asking.request_job_spec() == JOB
    return asking.apply(replace(JOB, axes={"pipe": stages, "data": 2}, **other), locations(2 * stages))


def test_launches_that_know_the_secret_arrive_when_all_their_ranks_are_ready(store: FileStore) -> None:
    gate = Gate(store)
    assert gate.while_polling(lambda: join(store, 1)) == 2
    assert gate.while_polling(lambda: join(store, 2)) == 3
    for rank in (4, 6, 7, 8, 9):
        store.set(ready_key(rank), "")
    (second,) = gate.server.ready_launches(0)
    assert second.stages == (3, 4)
    assert [(location.rank, location.host) for location in second.locations] == [(6 + n, f"host-{n}") for n in range(4)]
    store.set(ready_key(5), "")
    assert [arrival.stages for arrival in gate.server.ready_launches(2)] == [(2,)]
    assert gate.server.ready_launches(3) == [] and not gate.warnings


def test_the_secret_stays_in_the_environment(store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    secret = secret_for(RepackConfig(accept_joins=True))
    assert secret is not None and SECRET not in repr(secret) + repr(vars(JoinClient(store, NAME, secret, 1.0)))
    for copies in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="a secret is not pickled"):
            copies(secret)
    gate = Gate(store)
    gate.while_polling(lambda: join(store))
    assert SECRET.encode() not in (tmp_path / "store").read_bytes()


@pytest.mark.parametrize(
    ("value", "said"), [(None, "it is not set"), ("", "not set"), ("seven77", "it has 7 characters")]
)
def test_no_joins_without_a_secret(value: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert secret_for(RepackConfig()) is None
    with pytest.raises(ConfigError, match=f"accept_joins = true needs a secret of 32 .* {VARIABLE}.*{said}") as error:
        secret_for(RepackConfig(accept_joins=True))
    assert "seven77" not in str(error.value)


def test_a_client_refuses_a_job_that_does_not_know_the_secret(store: FileStore) -> None:
    stranger = Gate(store, "another secret that is as long as the right one")
    with pytest.raises(ConfigError, match=f"does not know the secret that this launch has in {VARIABLE}"):
        stranger.while_polling(client(store).request_job_spec)


@pytest.mark.parametrize("answer", [b"\x80\x04N.", b"[]", b"{}", b'{"nonce": 1}', b"[" * 100_000])
def test_a_client_refuses_an_invalid_answer(store: FileStore, answer: bytes) -> None:
    asking = client(store)
    store.set(message_key("job", asking._own), answer)
    with pytest.raises(ConfigError, match="the job gave no valid answer within"):
        asking.request_job_spec()


def apply_with_altered_message(store: FileStore, change: Callable[[dict[str, str]], None]) -> None:
    """Request the job's specification, and apply with a message that ``change`` has altered."""
    asking, bounded = client(store), BoundedStore(store, 30.0)

    class Changing:
        def __getattr__(self, name: str) -> Any:
            return getattr(bounded, name)

        def set(self, key: str, value: str) -> None:
            message = json.loads(value)
            change(message)
            bounded.set(key, json.dumps(message))

    asking.request_job_spec()
    asking._store, asking._timeout_seconds = Changing(), 0.1
    with pytest.raises(ConfigError, match="gave no valid answer"):
        asking.apply(JOB, locations(4))


def test_a_launch_that_does_not_know_the_secret_is_not_admitted(store: FileStore) -> None:
    gate = Gate(store)
    forged = JoinSecret("another secret that is as long as the right one").proof("client")
    gate.while_polling(lambda: apply_with_altered_message(store, lambda message: message.update(proof=forged)))
    gate.while_polling(lambda: apply_with_altered_message(store, lambda message: message.update(application="{}")))
    gate.while_polling(lambda: apply_with_altered_message(store, lambda message: message.pop("proof")))
    assert gate.server.close() == []
    assert len(gate.warnings) == 1 and "a request without a proof that it knows the secret" in gate.warnings[0]


def test_a_proof_from_one_handshake_is_worthless_in_another(store: FileStore) -> None:
    gate, heard = Gate(store), dict[str, str]()
    gate.while_polling(
        lambda: apply_with_altered_message(store, lambda message: heard.update(message) or message.clear())
    )  # type: ignore[func-returns-value]
    gate.while_polling(lambda: apply_with_altered_message(store, lambda message: message.update(heard)))
    assert set(heard) == {"application", "proof"} and gate.server.close() == []


def test_the_job_also_checks_whether_a_launch_fits(store: FileStore) -> None:
    gate = Gate(store)
    with pytest.raises(ConfigError, match=r"the job does something else\. What differs: the layers"):
        gate.while_polling(lambda: join(store, traits={"the layers": "others"}))
    with pytest.raises(ConfigError, match="4 ranks are not 1 stages of 2"):
        asking = client(store)
        gate.while_polling(asking.request_job_spec)
        gate.while_polling(lambda: asking.apply(replace(JOB, axes={"pipe": 1, "data": 2}), locations(4)))
    assert gate.server.close() == []


def test_no_more_stages_are_admitted_than_the_model_has_layers(store: FileStore) -> None:
    gate = Gate(store)
    gate.while_polling(lambda: join(store, 3))
    with pytest.raises(
        ConfigError, match=r"takes in 4 stages of other launches at most, .* has 3: 2 more are too many"
    ):
        gate.while_polling(lambda: join(store, 2))
    for rank in range(4, 10):
        store.set(ready_key(rank), "")
    assert len(gate.server.ready_launches(0)) == 1
    with pytest.raises(ConfigError, match="has 3: 2 more are too many"):
        gate.while_polling(lambda: join(store, 2))
    gate.server.ready_launches(0)  # the admitted ones have left
    assert gate.while_polling(lambda: join(store, 2)) == 5


GARBAGE = [
    pickle.dumps(print),
    b"",
    b"\xff",
    b"[" * 100_000,
    b"9" * 10_000,
    b'{"nonce": 5}',
    b'{"nonce": "../../world"}',
    b'{"nonce": "' + b"0" * (1 << 20) + b'"}',
]


def test_invalid_messages_are_dropped_and_reported_once(store: FileStore) -> None:
    gate = Gate(store)
    assert len(GARBAGE) == REQUEST_SLOTS
    for slot, garbage in enumerate(GARBAGE):
        store.set(slot_key(slot), garbage)
    gate.server.poll()
    assert not any(store.check([slot_key(slot)]) for slot in range(REQUEST_SLOTS))
    assert len(gate.warnings) == 1 and "an invalid message" in gate.warnings[0]
    assert gate.while_polling(lambda: join(store)) == 2


def test_handshakes_are_bounded_and_expire(store: FileStore) -> None:
    gate = Gate(store, seconds=0.0)
    for number in range(200):
        store.set(slot_key(number % REQUEST_SLOTS), json.dumps({"nonce": f"{number:064x}"}))
        if number % REQUEST_SLOTS == REQUEST_SLOTS - 1:
            gate.server.poll()
            assert len(gate.server._handshakes) <= REQUEST_SLOTS
    with pytest.raises(ConfigError, match="8 launches want to join at the moment"):
        for slot in range(REQUEST_SLOTS):
            store.set(slot_key(slot), "taken")
        client(store).request_job_spec()


def test_the_thread_ends_with_the_last_reference_to_its_server(store: FileStore) -> None:
    gate = Gate(store)
    gate.server.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "ds_dynmo joins"]
    assert join(store) == 2
    del gate
    thread.join(timeout=30)
    assert not thread.is_alive()

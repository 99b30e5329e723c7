"""A posted tensor is a tensor like any other: whatever reads it waits first, once."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ds_dynmo.engine.comm.beats import Activity
from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.comm.posted import Posted, PostedBroadcast, PostedTensor, wait_for_posted
from ds_dynmo.engine.comm.watch import Lookout
from ds_dynmo.errors import RankLostError
from tests.support.watches import ToldWatch

QUIET = ToldWatch()


class Arrival:
    """Puts a value into memory when it is waited for."""

    def __init__(self, value: float = 2.5) -> None:
        self.value, self.waits = value, 0
        self.memory = torch.zeros(2)
        self.tensor = PostedTensor(self.memory[1], self.wait)

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            self.memory[1] = self.value


def through_a_file(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"loss": tensor}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["loss"]


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "str": str,
    "repr": repr,
    "format": lambda t: f"{t:.3f} {t}",
    "compare": lambda t: bool(t < 3) and bool(t >= 2) and bool(t == 2.5),
    "isfinite": lambda t: math.isfinite(t) and bool(torch.isfinite(t)),
    "add": lambda t: t + 1,
    "add from the right": lambda t: 1 + t,
    "divide": lambda t: t / 2,
    "negative": lambda t: -t,
    "sum": lambda t: sum([t, t]),
    "max": lambda t: max(t, torch.tensor(1.0)).item(),
    "stack": lambda t: torch.stack([t, t]),
    "tensor of a list": lambda t: torch.tensor([t, t]),
    "as a result": lambda t: torch.add(torch.tensor(1.0), 1, out=torch.empty(())) + t,
    "numpy": lambda t: t.numpy(),
    "asarray": lambda t: np.asarray(t),
    "numpy mean": lambda t: np.mean([t, t]),
    "tolist": lambda t: t.tolist(),
    "mean": lambda t: t.mean().item(),
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "to": lambda t: t.to("cpu", torch.float64),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": through_a_file,
    "data": lambda t: t.data,
    "equal": lambda t: torch.equal(t, torch.tensor(2.5)),
    "copy into": lambda t: torch.zeros(()).copy_(t),
    "dlpack": torch.from_dlpack,
    "ops": lambda t: torch.ops.aten.mul(t, 2),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_it_reads_as_a_plain_tensor() -> None:
    for name, read in READS.items():
        arrival = Arrival()
        assert isinstance(arrival.tensor, torch.Tensor) and torch.is_tensor(arrival.tensor)
        assert arrival.waits == 0
        found, expected = read(arrival.tensor), read(torch.tensor(2.5))
        assert arrival.waits > 0, name
        assert type(found) is type(expected), name
        assert np.all(np.asarray(found) == np.asarray(expected)), name
        assert read(arrival.tensor) is not None, name  # a second time, too


def test_it_can_be_kept_and_told_apart_without_being_read() -> None:
    arrivals = [Arrival(), Arrival()]
    kept = {arrival.tensor: number for number, arrival in enumerate(arrivals)}
    assert [kept[arrival.tensor] for arrival in arrivals] == [0, 1]
    assert all(arrival.waits == 0 for arrival in arrivals)


def test_what_changes_it_in_place_changes_what_is_read() -> None:
    arrival = Arrival()
    loss = arrival.tensor
    loss += 1
    assert type(loss) is torch.Tensor
    assert loss.item() == arrival.tensor.item() == 3.5


def test_torch_distributed_waits_too() -> None:
    """It hands tensors over to C++, where no Python is asked."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        arrival = Arrival()
        gathered = [torch.zeros(())]
        dist.all_gather(gathered, arrival.tensor)
        assert arrival.waits > 0 and gathered[0].item() == 2.5
        arrival = Arrival()
        dist.all_reduce(arrival.tensor)
        assert arrival.waits > 0 and arrival.tensor.item() == 2.5
    finally:
        dist.destroy_process_group()


def test_what_goes_wrong_is_raised_to_whoever_reads() -> None:
    def lost() -> None:
        raise RuntimeError("connection closed by peer")

    tensor = PostedTensor(torch.zeros(()), lost)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            tensor.item()


class Work:
    """A broadcast that was posted; it fails if the others are gone."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.waits, self.arrives_after = fails, 0, 0

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            self.waits += 1
        self.arrives_after -= 1
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self.fails:
            raise RuntimeError("connection closed by peer")

    def is_completed(self) -> bool:
        return self.arrives_after <= 0


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """What broadcasts give, in their order."""
    given = [Work(), Work(fails=True), Work(), Work()]
    left = iter(given)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: next(left))
    return given


def test_a_process_that_ends_waits_for_what_it_sends(works: list[Work]) -> None:
    posted = [PostedBroadcast(torch.zeros(2), 0, None, QUIET) for _ in works[:3]]
    posted[2].wait()
    wait_for_posted()
    wait_for_posted()
    assert [work.waits for work in works] == [1, 1, 1, 0]


def test_what_code_of_the_user_reads_is_watched(works: list[Work]) -> None:
    """So is what a process that ends waits for; not what an operation waits for, nor what has arrived."""
    watch = ToldWatch()
    first, second, third = (PostedBroadcast(torch.ones(2), 0, None, watch) for _ in works[:3])
    first.wait()
    loss = first.element(0)
    assert loss.item() == loss.item() == 1 and watch.waits == 1
    with pytest.raises(RuntimeError, match="closed by peer"):
        second.element(0).item()
    assert watch.waits == 2 and len(watch.explained) == 1
    works[2].arrives_after = 2
    assert third.element(0).item() == 1 and watch.waits == 3
    PostedBroadcast(torch.ones(2), 0, None, watch)
    wait_for_posted()
    assert watch.waits == 4 and len(watch.explained) == 1


def test_a_loss_that_has_arrived_is_read_although_a_rank_is_lost(works: list[Work]) -> None:
    watch = ToldWatch()
    arrived, missing = (PostedBroadcast(torch.ones(2), 0, None, watch).element(0) for _ in range(2))
    watch.verdict = "rank 1 has ended"
    assert arrived.item() == 1
    works[1].arrives_after = 1000
    with pytest.raises(RankLostError, match="rank 1 has ended"):
        missing.item()


def test_a_loss_keeps_a_deleted_engines_watch_until_it_is_read(works: list[Work]) -> None:
    watch = ToldWatch()
    posted, kept = PostedBroadcast(torch.ones(2), 0, None, watch), weakref.ref(watch)
    loss = posted.element(0)
    del watch
    assert kept() is not None
    loss.item()
    assert kept() is None


def test_a_process_that_ends_waits_for_what_a_thread_reads() -> None:
    """It may have to pass it on to other ranks."""
    reads, arrives, ends = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        reads.set()
        arrives.wait()

    posted = Posted(torch.zeros(1), wait, QUIET)
    reader = threading.Thread(target=posted.wait)
    reader.start()
    reads.wait()
    process = threading.Thread(target=lambda: (wait_for_posted(), ends.set()))
    process.start()
    assert not ends.wait(0.2)
    arrives.set()
    assert ends.wait()
    reader.join()
    process.join()


def test_elements_share_one_wait(works: list[Work]) -> None:
    posted = PostedBroadcast(torch.tensor([1.0, 2.0]), 0, None, QUIET)
    first, second = posted.element(0), posted.element(1)
    assert works[0].waits == 0
    assert (first.item(), second.item(), first.item()) == (1.0, 2.0, 1.0)
    assert works[0].waits == 1


def test_never_more_than_one_is_under_way(works: list[Work]) -> None:
    comm = Communicator.__new__(Communicator)
    comm._posted, comm._watch = None, QUIET  # type: ignore[assignment]
    comm.post(torch.zeros(2), 0, None)
    assert [work.waits for work in works] == [0, 0, 0, 0]
    comm.post(torch.zeros(2), 0, None)
    assert [work.waits for work in works] == [1, 0, 0, 0]
    with pytest.raises(RuntimeError, match="closed by peer"):
        comm.wait_for_posted_broadcast()
    comm.wait_for_posted_broadcast()


def test_who_does_not_wait_finds_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """``to_dlpack`` asks no Python."""
    memory = torch.zeros(2)

    class Arriving:
        def wait(self, timeout: timedelta | None = None) -> None:
            memory.copy_(torch.tensor([2.5, 3.5]))

        def is_completed(self) -> bool:
            return True

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: Arriving())
    posted = PostedBroadcast(memory, 1, None, QUIET)
    loss = posted.element(1)
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(loss)).isnan()  # type: ignore[attr-defined]
    assert loss.item() == 3.5
    posted.wait()
    sent = torch.ones(2)
    PostedBroadcast(sent, 0, None, QUIET).wait()
    assert sent.tolist() == [1.0, 1.0]


def test_two_threads_that_wait_wait_once() -> None:
    calls, entered, twice = [0], threading.Event(), threading.Event()

    def wait() -> None:
        calls[0] += 1
        entered.set()
        if calls[0] > 1:
            twice.set()
        twice.wait(0.5)  # for the other thread, which has to wait outside

    posted = Posted(torch.zeros(1), wait, QUIET)
    threads = [threading.Thread(target=posted.wait) for _ in range(2)]
    threads[0].start()
    entered.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert calls == [1]


READS_FROM_A_STOPPED_RANK = """
import os, signal, sys, torch
import torch.distributed as dist
from ds_dynmo.engine.comm.posted import PostedBroadcast, forget_posted
from ds_dynmo.errors import RankLostError
from tests.support.watches import ToldWatch

rank, store = int(os.fork() == 0), dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = dist.new_group([0, 1])
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
watch = ToldWatch()
watch.verdict = "rank 1 was stopped"
loss = PostedBroadcast(torch.zeros(1), 1, group, watch).element(0)
try:
    loss.item()
except RankLostError:
    forget_posted()
    raise
"""


def test_a_process_ends_although_a_stopped_rank_has_not_sent_a_loss(tmp_path: Path) -> None:
    """gloo waits at the end for what was posted, half an hour in a group that DeepSpeed has made."""
    program = [sys.executable, "-c", READS_FROM_A_STOPPED_RANK, str(tmp_path / "store")]
    root, said = str(Path(__file__).resolve().parents[3]), tmp_path / "said"
    with said.open("w") as file:
        reader = subprocess.Popen(program, cwd=root, stderr=file, start_new_session=True)
    try:
        assert reader.wait(timeout=120) == 1
    finally:
        os.killpg(reader.pid, signal.SIGKILL)
    assert said.read_text().rstrip().endswith("RankLostError: rank 1 was stopped")


def test_a_process_does_not_wait_at_its_end_once_a_rank_is_lost() -> None:
    """What it has posted, others do not receive any more."""
    waits: list[str] = []
    lookout = Lookout(
        BoundedStore(dist.HashStore(), 10.0), 0, 1, timeout_seconds=1.0, activity=Activity(), remedy=lambda: "resume"
    )

    def wait() -> None:
        waits.append("waited")
        lookout.say()  # another thread has read it meanwhile

    posted = Posted(torch.zeros(1), wait, QUIET)
    lookout.verdict = "rank 1 has ended"
    assert lookout.say() == "rank 1 has ended. resume"
    wait_for_posted()
    assert waits == []
    posted.wait()
    assert waits == ["waited"]
    both = [Posted(torch.zeros(1), wait, QUIET) for _ in range(2)]
    wait_for_posted()
    assert len(both) == len(waits) == 2

"""What runs in the process of a rank: it meets the others, calls a function, and sends what came of it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from ds_dynmo.interface import choose_interface
from tests import emulated
from tests.emulated.operation_log import log_operations
from tests.mutations import reach
from tests.support.namespaces import Network, enter

STACKS = signal.SIGUSR2  # asks a rank for the stacks of its threads, in its log


@dataclass(frozen=True)
class Place:
    """Where a rank runs and how it meets the others."""

    rank: int
    num_ranks: int
    folder: str
    hosts: Network | None
    timeout: timedelta
    backend: str | None
    port: int | None = None  # of a TCPStore; None: the store is a file

    @property
    def log(self) -> str:
        """The file of what this rank prints."""
        return os.path.join(self.folder, f"rank{self.rank}.log")

    def meet(self) -> None:
        """Take this rank's device, and initialize communication."""
        import deepspeed
        import torch
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.runtime.utils import PartitionedTensor

        if self.backend == "gloo":
            set_accelerator(CPU_Accelerator())
            PartitionedTensor.from_meta.__func__.__defaults__ = ("cpu",)  # it names the device that was there at import
        get_accelerator().set_device(self.rank)
        backend = self.backend or get_accelerator().communication_backend_name()
        if get_accelerator().device_name() == emulated.NAME:
            log_operations(self.folder, self.rank)
        self._initialize(torch.distributed, backend)
        deepspeed.init_distributed(backend)

    def _initialize(self, dist: Any, backend: str) -> None:
        if self.hosts is not None:
            enter(self.hosts, self.rank)
            choose_interface()
            dist.init_process_group(backend, timeout=self.timeout)
            return
        if self.port is None:
            store = dist.FileStore(os.path.join(self.folder, "store"), self.num_ranks)
        else:
            store = dist.TCPStore("127.0.0.1", self.port, self.num_ranks, is_master=self.rank == 0)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.num_ranks, timeout=self.timeout)


@dataclass(frozen=True)
class Call:
    """A function for a rank to call.

    Attributes:
        pickled: the function and its arguments, pickled, so that an import error is reported by the rank.
        stays: after it succeeded, until the rank is ended: others may still be connecting to it.
        test: that asks for it.
    """

    pickled: bytes
    stays: bool
    test: str


@dataclass(frozen=True)
class Answer:
    """What a call came to.

    Attributes:
        value: the result, or a traceback.
        ok: whether it is a result.
        at: ``time.monotonic()`` when it was known: the clock is that of all ranks of a machine.
        cpu_seconds: that the rank's process has computed.
    """

    value: Any
    ok: bool
    at: float
    cpu_seconds: float


def rank_main(place: Place, pipe: Connection, call: Call) -> None:
    """Run one rank, from its first line to its end."""
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    rank, num_ranks = place.rank, place.num_ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_SIZE=str(num_ranks))
    output = os.open(place.log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(STACKS, all_threads=True)
    answer = _answer(place, call)
    pipe.send(answer)
    for worker in multiprocessing.active_children():  # workers of a DataLoader would exit only seconds later
        worker.kill()
    if call.stays and answer.ok:
        threading.Event().wait()
    os._exit(0)


def _answer(place: Place, call: Call) -> Answer:
    try:
        import torch
        from deepspeed.accelerator import get_accelerator

        import tests.support.preload  # in case the fork server was started in another folder  # noqa: F401
        from ds_dynmo.engine.comm.posted import wait_for_posted

        torch.set_num_threads(1)
        # Linux's default. Otherwise the workers of a DataLoader would start a fork server that imports torch.
        multiprocessing.set_start_method("fork", force=True)
        place.meet()
        with reach.recorded(call.test):
            function, args = pickle.loads(call.pickled)
            value, ok = function(*args), True
        wait_for_posted()  # as a process does when it exits normally
        get_accelerator().synchronize()  # what it sent has left
    except BaseException:
        value, ok = traceback.format_exc(), False
    at = time.monotonic()
    if found := emulated.take_reports():
        value, ok = "\n".join(found if ok else [value, *found]), False
    return Answer(value, ok, at, time.process_time())


def _end_with_pytest() -> None:
    """End this rank if pytest's process is killed and cannot end it."""
    pytest_process = multiprocessing.parent_process()
    assert pytest_process is not None
    pytest_process.join()
    os._exit(1)

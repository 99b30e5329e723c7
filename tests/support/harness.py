"""Run a function on real ranks, one process each, forked from a server that has imported torch and DeepSpeed.

A fork costs a fraction of a second, an import ten. The ranks meet in a ``FileStore`` (no ports); where some may die, in
a ``TCPStore``, which ends with rank 0 as a launch's does. The first error or the first rank that dies ends them all.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest.mock import patch

from ds_dynmo.interface import choose_interface
from tests import emulated
from tests.emulated import deadlocks
from tests.emulated.operation_log import log_operations
from tests.support.namespaces import Network, enter
from tests.support.ports import free_port

GROUP_TIMEOUT = timedelta(minutes=4)  # a rank that compiles lets others wait, on a busy machine for minutes
BIND_ONCE = {"LD_BIND_NOW": "1"}  # in the fork server; else each rank looks up torch's functions: 5% of its time


class RankError(RuntimeError):
    """A rank raised or died. The message holds its traceback."""


def run(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 300.0,
    hosts: Network | None = None,
    group_timeout: timedelta = GROUP_TIMEOUT,
    backend: str | None = None,
    complete: bool = True,
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh world, and return the results in rank order.

    Args:
        function: importable by name, also from the file of its test. DeepSpeed's communication is initialized when it
            is called.
        seconds: limit after which all ranks are killed.
        hosts: a host for each rank to run on; the ranks meet at the first.
        group_timeout: timeout of the default process group.
        backend: of the default process group; None: that of DeepSpeed's accelerator. With "gloo" the ranks use the CPU,
            otherwise each its own device.
        complete: whether every operation between ranks has its counterpart: not where a rank is to fail on the way.
            Then a rank that is done stays until all are; else its process ends.

    Raises:
        RankError: a rank raised, died, or was not done in time; or the emulated device found a fault, or its backend
            an order of operations in which real ones would stand still.
    """
    call = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        places = [Place(rank, num_ranks, folder, hosts, group_timeout, backend) for rank in range(num_ranks)]
        with _started(places, call, stays=complete) as (pipes, _):
            try:
                results = _collect(pipes, seconds)
                faults = deadlocks.check(folder, finished=complete)
            except RankError as error:
                faults = [str(error), *deadlocks.check(folder, finished=False)]
    if faults:
        raise RankError("\n".join(faults))
    return results


@contextmanager
def _started(places: Sequence[Place], call: bytes, *, stays: bool) -> Iterator[tuple[list[Connection], list[Any]]]:
    """Start a rank at each place; yield their pipes and processes. End them all afterwards."""
    context = _context(places[0].backend)
    pipes, processes = [], []
    try:
        for place in places:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(place, theirs, call, stays))
            with patch.dict(os.environ, BIND_ONCE):
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes, processes
    finally:
        for process in processes:
            process.kill()
            process.join()


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        result: of its function; None: it returned none.
        error: the traceback of the error that ended it; "": none did.
        exit_code: of its process, as Python has it: -9 for SIGKILL.
        at: ``time.monotonic()`` when it had.
    """

    result: Any
    error: str
    exit_code: int | None
    at: float


def run_to_the_end(
    num_ranks: int, function: Callable[..., Any], *args: Any, seconds: float, hosts: Network | None = None
) -> list[End]:
    """Call ``function(*args)`` on every rank, and wait for each, whatever becomes of the others: see :func:`run`.

    Raises:
        RankError: a rank had not ended in time.
    """
    call, began = pickle.dumps((function, args)), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        places = [Place(rank, num_ranks, folder, hosts, GROUP_TIMEOUT, "gloo", port) for rank in range(num_ranks)]
        with _started(places, call, stays=False) as (pipes, processes):
            ends: dict[int, End] = {}
            while len(ends) < num_ranks:
                running = {process.sentinel: rank for rank, process in enumerate(processes) if rank not in ends}
                ended = wait([*running], timeout=seconds - (time.monotonic() - began))
                if not ended:
                    raise RankError(f"ranks {sorted(running.values())} had not ended after {seconds} s")
                for rank in (running[sentinel] for sentinel in ended):  # type: ignore[index]
                    ok, value = _received(pipes[rank])
                    result, error = (value, "") if ok else (None, value)
                    ends[rank] = End(result, error, processes[rank].exitcode, time.monotonic())
    return [ends[rank] for rank in range(num_ranks)]


def _received(pipe: Connection) -> tuple[bool, Any]:
    """Receive what a rank that has ended sent; nothing, if it was killed."""
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return True, None


def _context(backend: str | None) -> Any:
    """Return how ranks start: as new programs where a fork of a process that has looked for devices cannot use them."""
    from deepspeed.accelerator import get_accelerator

    if backend != "gloo" and get_accelerator().device_name() not in ("cpu", emulated.NAME):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    return context


def run_each(
    num_ranks: int, function: Callable[..., Any], *calls: tuple[Any, ...], backend: str | None = None
) -> list[list[Any]]:
    """Call ``function(*call)`` for each of ``calls`` in turn, in one world. Return, per call, the results by rank."""
    ranks = run(num_ranks, _each, function, calls, backend=backend)
    return [[results[number] for results in ranks] for number in range(len(calls))]


def _each(function: Callable[..., Any], calls: tuple[tuple[Any, ...], ...]) -> list[Any]:
    return [function(*call) for call in calls]


def _collect(pipes: list[Connection], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout=seconds)
        if not ready:
            raise RankError(f"ranks {sorted(set(range(len(pipes))) - set(results))} were not done in {seconds} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, value = pipes[rank].recv()
            except EOFError:
                raise RankError(f"rank {rank} died") from None
            if not ok:
                others = [other for other in pipes if other is not pipe and pipes.index(other) not in results]
                told = "".join(f"\n{text}" for text in _also_failed(others, pipes))
                raise RankError(f"rank {rank} failed:\n{value}{told}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _also_failed(others: list[Connection], pipes: list[Connection]) -> list[str]:
    """Say which other ranks failed or died at the same time: one may fail because of another, and report first."""
    texts = []
    for pipe in wait(others, timeout=0.5) if others else []:
        rank = pipes.index(pipe)  # type: ignore[arg-type]
        try:
            ok, value = pipe.recv()  # type: ignore[union-attr]
        except EOFError:
            texts.append(f"rank {rank} died")
            continue
        if not ok:
            texts.append(f"rank {rank} failed as well:\n{value}")
    return texts


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


def _rank_main(place: Place, pipe: Connection, call: bytes, stays: bool) -> None:
    """Run one rank.

    Args:
        call: the function and its arguments, pickled, so that an import error is reported here.
        stays: until :func:`run` ends it, unless the function failed.
    """
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    rank, num_ranks, folder = place.rank, place.num_ranks, place.folder
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_SIZE=str(num_ranks))
    output = os.open(os.path.join(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        import torch
        from deepspeed.accelerator import get_accelerator

        import tests.support.preload  # in case the fork server was started in another folder  # noqa: F401
        from ds_dynmo.engine.comm.posted import wait_for_posted

        torch.set_num_threads(1)
        # Linux's default. Otherwise the workers of a DataLoader would start a fork server that imports torch.
        multiprocessing.set_start_method("fork", force=True)
        place.meet()
        function, args = pickle.loads(call)
        result = (True, function(*args))
        wait_for_posted()  # as a process does when it exits normally
        get_accelerator().synchronize()  # what it sent has left
    except BaseException:
        result = (False, traceback.format_exc())
    found = emulated.take_reports()
    if found:
        result = (False, "\n".join(found if result[0] else [result[1], *found]))
    pipe.send(result)
    for worker in multiprocessing.active_children():  # workers of a DataLoader would exit only seconds later
        worker.kill()
    if stays and result[0]:  # others may still be connecting to this rank, which they cannot once it is gone
        threading.Event().wait()
    os._exit(0)


def _end_with_pytest() -> None:
    """End this rank if pytest's process is killed and cannot end it."""
    pytest_process = multiprocessing.parent_process()
    assert pytest_process is not None
    pytest_process.join()
    os._exit(1)

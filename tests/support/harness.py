"""Run a function on real ranks, one process each, forked from a server that has imported torch and DeepSpeed.

A fork costs a fraction of a second, an import ten. The ranks meet in a ``FileStore`` (no ports); where some may die, in
a ``TCPStore``, which ends with rank 0 as a launch's does. The first error or the first rank that dies ends them all.

Every call has a world of its own: a fork and its end take 0.04 CPU seconds, less than to put back what a check changed
in its process, and nothing that one leaves behind reaches another. An engine costs three times as much, and
:func:`run_each` runs several checks in one world.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests import emulated
from tests.emulated import deadlocks
from tests.support.namespaces import Network
from tests.support.ports import free_port
from tests.support.ranks import STACKS, Answer, Call, Place, rank_main

GROUP_TIMEOUT = timedelta(minutes=4)  # a rank that compiles lets others wait, on a busy machine for minutes
TOGETHER_SECONDS = 0.5  # in which others fail because of the first
BIND_ONCE = {"LD_BIND_NOW": "1"}  # in the fork server; else each rank looks up torch's functions: 5% of its time


class RankError(RuntimeError):
    """A rank raised or died. The message holds its traceback."""


CPU_SECONDS = [0.0]  # that the ranks of this process's tests have computed


class World:
    """Ranks that call a function."""

    def __init__(self, places: Sequence[Place], pickled: bytes, *, stays: bool) -> None:
        context = _context(places[0].backend)
        call = Call(pickled, stays, os.environ.get("PYTEST_CURRENT_TEST", ""))
        self.places = places
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        try:
            for place in places:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=rank_main, args=(place, theirs, call))
                with patch.dict(os.environ, BIND_ONCE):
                    process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        except BaseException:
            self.end()
            raise

    def collect(self, seconds: float) -> list[Any]:
        """Return the results in rank order.

        Raises:
            RankError: a rank raised, died, or was not done in time.
        """
        answers: dict[int, Answer] = {}
        until = time.monotonic() + seconds
        while len(answers) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait([*waiting], timeout=max(0.0, until - time.monotonic()))
            if not ready:
                raise RankError(self._stacks([*waiting.values()], seconds))
            answers.update(_received(ready, waiting))  # type: ignore[arg-type]
            if not all(answer.ok for answer in answers.values()):
                until = time.monotonic() + TOGETHER_SECONDS
                while others := [pipe for pipe, rank in waiting.items() if rank not in answers]:
                    if not (ready := wait(others, timeout=max(0.0, until - time.monotonic()))):
                        break
                    answers.update(_received(ready, waiting))  # type: ignore[arg-type]
                raise RankError(_first_error(answers))
        CPU_SECONDS[0] += sum(answer.cpu_seconds for answer in answers.values())
        return [answers[rank].value for rank in range(len(self.pipes))]

    def _stacks(self, ranks: list[int], seconds: float) -> str:
        """Say which ranks are not done, and where all of them stand."""
        asked = [process for process in self.processes if process.is_alive()]
        for process in asked:
            os.kill(process.pid, STACKS)
        until = time.monotonic() + 1.0
        for process in asked:  # they write at once, and do not end; but one that had not begun does
            process.join(max(0.0, until - time.monotonic()))
        stacks = []
        for place in self.places:
            log = Path(place.log)
            said = log.read_text(errors="replace")[-4000:] if log.exists() else "it had not begun"
            stacks.append(f"rank {place.rank}:\n{said}")
        return "\n".join([f"ranks {ranks} were not done in {seconds} s. Where all of them stand:", *stacks])

    def end(self) -> None:
        """Kill every rank."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()


def _received(ready: Sequence[Connection], ranks: dict[Connection, int]) -> dict[int, Answer]:
    answers = {}
    for pipe in ready:
        try:
            answers[ranks[pipe]] = pipe.recv()
        except (EOFError, ConnectionResetError):
            answers[ranks[pipe]] = Answer(f"rank {ranks[pipe]} died", False, 0.0, 0.0)  # first: it let others fail
    return answers


def _first_error(answers: dict[int, Answer]) -> str:
    """Return the error of the rank that failed first, and the last line of the others', which may follow from it."""
    failed = sorted((answer.at, rank) for rank, answer in answers.items() if not answer.ok)
    first, *others = (rank for _, rank in failed)
    text = answers[first].value
    lines = [text if text.endswith("died") else f"rank {first} failed:\n{text}"]
    for rank in others:
        lines.append(f"rank {rank} failed after it: {answers[rank].value.strip().splitlines()[-1]}")
    return "\n".join(lines)


def run(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float | None = None,
    hosts: Network | None = None,
    group_timeout: timedelta = GROUP_TIMEOUT,
    backend: str | None = None,
    complete: bool = True,
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh world, and return the results in rank order.

    Args:
        function: importable by name, also from the file of its test. DeepSpeed's communication is initialized when it
            is called.
        seconds: limit after which all ranks are killed; None: 300, or what the environment says.
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
        world = World(places, call, stays=complete)
        try:
            results = world.collect(seconds or float(os.environ.get("DS_DYNMO_RANK_SECONDS", "300")))
            faults = deadlocks.check(folder, finished=complete)
        except RankError as error:
            faults = [str(error), *deadlocks.check(folder, finished=False)]
        finally:
            world.end()
    if faults:
        raise RankError("\n".join(faults))
    return results


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
        world = World(places, call, stays=False)
        try:
            ends: dict[int, End] = {}
            while len(ends) < num_ranks:
                running = {process.sentinel: rank for rank, process in enumerate(world.processes) if rank not in ends}
                ended = wait([*running], timeout=seconds - (time.monotonic() - began))
                if not ended:
                    raise RankError(f"ranks {sorted(running.values())} had not ended after {seconds} s")
                for rank in (running[sentinel] for sentinel in ended):  # type: ignore[index]
                    answer = _of_ended(world.pipes[rank])
                    result, error = (answer.value, "") if answer.ok else (None, answer.value)
                    ends[rank] = End(result, error, world.processes[rank].exitcode, time.monotonic())
        finally:
            world.end()
    return [ends[rank] for rank in range(num_ranks)]


def _of_ended(pipe: Connection) -> Answer:
    """Receive what a rank that has ended sent; nothing, if it was killed."""
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, ConnectionResetError):
        return Answer(None, True, time.monotonic(), 0.0)


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

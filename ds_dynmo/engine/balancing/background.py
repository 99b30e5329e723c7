"""Take a decision in a process of its own while a batch trains.

A thread would slow training down: a search is pure Python, and so are backward passes between two kernels. Each rank
has a process, because each rank takes each decision; so no rank waits for another one's, and what they found is
compared as ever.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deepspeed.utils import logger

from ds_dynmo import partitioners
from ds_dynmo.engine.balancing import worker
from ds_dynmo.engine.balancing.policy import Decision
from ds_dynmo.engine.balancing.trigger import Request
from ds_dynmo.errors import PartitionError

Answer = TypeVar("Answer")

_LONG = 800  # passes of a batch, times orders that are searched: about 20 ms


@dataclass(frozen=True)
class BegunDecision:
    """A decision that is calculated while a batch trains.

    Attributes:
        calculate: what is calculated.
        profile_seconds: that gathering the profile took.
        waited_seconds: that training waited until it was begun.
    """

    request: Request
    calculate: Callable[[], Decision]
    profile_seconds: float
    waited_seconds: float


def searches_long(balancer: str, num_stages: int, micro_batches: int, *, back_to_back: bool = False) -> bool:
    """Does a decision take longer than training should wait? The same on every rank, because it counts passes.

    Balancers of the user's own are called in the process that registered them, so these decisions never count as long.

    Args:
        back_to_back: an order is chosen by the seconds from one batch to the next.
    """
    ours = partitioners.get(balancer).__module__.startswith("ds_dynmo.")
    orders = 6 if partitioners.takes(balancer, "pipeline") else 2
    if back_to_back:
        orders *= 4  # of each one several batches are simulated
    return ours and 3 * num_stages * micro_batches * orders > _LONG


class DecisionProcess:
    """A process that calculates one thing at a time; started at the first need, ended with the rank.

    If it fails, this process calculates in its place, from then on, with one warning.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = False
        self._end: Callable[[], Any] = lambda: None

    def begin(self, call: Callable[[], Answer]) -> None:
        """Let the process calculate ``call()``."""
        if self._failed:
            return
        try:
            if self._process is None:
                self._start()
            self._send(pickle.dumps(call, pickle.HIGHEST_PROTOCOL))
        except Exception as error:
            self._fail(error)

    def finish(self, call: Callable[[], Answer]) -> tuple[Answer, float | None]:
        """Wait for the result of ``call()``, which was begun.

        Returns:
            Also the seconds that the process took for it; None: it was calculated here, now.

        Raises:
            PartitionError: from the call.
        """
        if not self._failed:
            try:
                assert self._process is not None and self._process.stdout is not None
                answer, error, seconds = pickle.load(self._process.stdout)
            except Exception as failure:
                self._fail(failure)
            else:
                if error is None:
                    return answer, seconds
                if isinstance(error, PartitionError):
                    raise error
                self._fail(error)
        return call(), None

    def close(self) -> None:
        """End the process, also in the middle of a calculation; the next :meth:`begin` starts another one."""
        self._end()
        self._process = None

    def _start(self) -> None:
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(worker.__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **one_thread},
        )
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        self._send(sys.path)

    def _send(self, value: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        pickle.dump(value, self._process.stdin)
        self._process.stdin.flush()

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self.close()
        logger.warning(f"DynMo: the process that decides beside training failed: {error!r}. Training waits instead")


def _end(process: subprocess.Popen[bytes], rank: int) -> None:
    if os.getpid() != rank:
        return  # a fork of the rank ends
    process.kill()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:
            pass  # what was not sent
    process.wait()

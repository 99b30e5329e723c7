"""Traces of batches: the times of each pass and message on each rank.

While a batch is traced, every pass, message and instruction at its end records its start and end. So do the engine's
phases after them.

On a CPU, times are those of a monotonic clock. On an accelerator they are events on the current stream, which waits for
each receive: they show when the device did the work, and need only one synchronisation, before the batch. After the
batch each rank estimates the offset of its clock from rank 0's (:meth:`Communicator.clock_offset`), and rank 0 writes
the file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_dynmo.config import TraceConfig
from ds_dynmo.engine.decide.report_files import WarnsOnce, check_writable
from ds_dynmo.engine.decide.reporter import Reporter
from ds_dynmo.engine.measure.trace_events import TraceEvent, TraceFile, Track, batch_events, track_names
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.placement import Placement

_TRIES = 3  # readings of both clocks


class Tracer:
    """Records the batches of ``dynmo.trace``. Construction is collective.

    Attributes:
        records: whether a batch is being recorded.

    Args:
        clock: the profiler's clock.
        reporter: warns; its first rank writes the file.

    Raises:
        ConfigError: on every rank, if rank 0 cannot write the file.
    """

    def __init__(self, config: TraceConfig, stage: StageContext, clock: Any, reporter: Reporter) -> None:
        self._config, self._stage, self._clock, self._reporter = config, stage, clock, reporter
        self._comm = stage.comm
        self.records = False
        self._place: dict[str, int] = {}
        self._marks: list[tuple[str, str, int | None, int | None]] = []
        self._times: list[Any] = []
        self._origin: float | None = None
        self._base_error_seconds = 0.0
        self._file: TraceFile | None = None
        self._append = WarnsOnce(config.path, self._append_batch, reporter.warn, OSError)
        # The first traced batch creates the file, as a resumed run with the same path must not overwrite it at once.
        check_writable(config.path, "dynmo.trace.path", self._comm, writes=reporter.speaks)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Record and write the batch inside and the phases after it, if its step is traced. Collective."""
        (first, last), step = self._config.steps, self._stage.counters.steps + 1
        if not first <= step <= last:
            yield
            return
        placement, worlds_left, here = self._stage.placement, self._comm.worlds_left, self._comm.here
        self._place = {
            "rank": here.rank,
            "stage": here.stage,
            "replica": here.replica,
            "slice": here.tp_rank,
        }
        get_accelerator().synchronize()
        beginning, base_seconds, self._base_error_seconds = begin(self._clock)
        self._marks, self._times = [], [beginning]
        self.records, self._stage.timeline.record = True, self.phase
        try:
            yield
        finally:
            self.records, self._stage.timeline.record = False, None
        if self._comm.worlds_left != worlds_left:  # the ranks of the batch are no longer together
            self._reporter.warn(
                f"DynMo step {step}: the job was re-packed during this batch, so its trace is not written"
            )
            return
        elapsed = [0.0, *accumulate(self._clock.seconds_between(self._times))]
        self._write(step, placement, [base_seconds + seconds for seconds in elapsed[1:]])

    @contextmanager
    def phase(
        self, category: str, what: str, micro_batch: int | None = None, chunk: int | None = None
    ) -> Iterator[None]:
        """Record the start and end of what runs inside."""
        begin = self._clock.now()
        try:
            yield
        finally:
            self._marks.append((category, what, micro_batch, chunk))
            self._times += begin, self._clock.now()

    def _write(self, step: int, placement: Placement, seconds: list[float]) -> None:
        self._comm.enter("trace")
        offset_seconds, error_seconds = self._comm.clock_offset(time.perf_counter)
        shared = [time - offset_seconds for time in seconds]
        events = tuple(
            TraceEvent(category, what, micro_batch, begin, end, chunk)
            for (category, what, micro_batch, chunk), begin, end in zip(
                self._marks, shared[::2], shared[1::2], strict=True
            )
        )
        error_seconds += self._base_error_seconds
        tracks = self._comm.gather_on_first(Track(**self._place, clock_error_seconds=error_seconds, events=events))
        if not self._reporter.speaks:
            return
        if self._origin is None:
            self._origin = min(event.begin_seconds for track in tracks for event in track.events)
        self._append((step, placement, tracks))

    def _append_batch(self, batch: tuple[int, Placement, list[Track]]) -> None:
        step, placement, tracks = batch
        assert self._origin is not None
        self._file = self._file or TraceFile(Path(self._config.path))
        names = track_names(tracks) if self._file.empty else []
        self._file.append([*names, *batch_events(step, placement, tracks, self._origin)])


def begin(clock: Any) -> tuple[Any, float, float]:
    """Read ``clock`` and the host's monotonic clock at the same time.

    The process may be suspended between the two, so the fastest of a few tries counts.

    Returns:
        The time of ``clock``, the host's seconds, and their error bound in seconds.
    """
    tries = []
    for _ in range(_TRIES):
        before = time.perf_counter()
        mark = clock.now()
        half = (time.perf_counter() - before) / 2
        tries.append((mark, before + half, half))
    return min(tries, key=lambda tried: tried[2])

"""Traces of batches: the times of each pipeline instruction on each rank.

While a batch is traced, every pipeline instruction of DeepSpeed or the user records its start and end. So do the
engine's phases after them. Other batches run unwrapped functions, at no cost.

On a CPU, times are those of a monotonic clock. On an accelerator they are events on the current stream, which waits for
each receive: they show when the device did the work, and need only one synchronisation, before the batch. After the
batch each rank estimates the offset of its clock from rank 0's (:meth:`Communicator.clock_offset`), and rank 0 writes
the file.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule

from ds_dynmo.config import TraceConfig
from ds_dynmo.engine.decide.report_files import WarnsOnce, check_writable
from ds_dynmo.engine.decide.reporter import Reporter
from ds_dynmo.engine.deepspeed.instruction_map import Instructions
from ds_dynmo.engine.measure.trace_events import TraceEvent, TraceFile, Track, batch_events, track_names
from ds_dynmo.engine.split.steps import InputGradientPass, WeightGradientPass
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.placement import Placement

INSTRUCTIONS: dict[type, tuple[str, str]] = {  # category and displayed name
    schedule.ForwardPass: ("forward", "forward"),
    schedule.BackwardPass: ("backward", "backward"),
    InputGradientPass: ("backward", "input gradient"),
    WeightGradientPass: ("weight gradient", "weight gradient"),
    schedule.LoadMicroBatch: ("load", "load"),
    schedule.SendActivation: ("send", "activation"),
    schedule.RecvActivation: ("receive", "activation"),
    schedule.SendGrad: ("send", "gradient"),
    schedule.RecvGrad: ("receive", "gradient"),
    schedule.ReduceTiedGrads: ("reduce", "reduce tied gradients"),
    schedule.ReduceGrads: ("reduce", "reduce gradients"),
    schedule.OptimizerStep: ("optimizer step", "optimizer step"),
}
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
        self._marks: list[tuple[str, str, int | None]] = []
        self._times: list[Any] = []
        self._counts: Counter[str] = Counter()
        self._deferred: deque[int] = deque()  # micro-batches with pending weight gradients
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
        self._marks, self._times, self._counts, self._deferred = [], [beginning], Counter(), deque()
        self.records, self._stage.timeline.record = True, self._phase
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
    def _phase(self, category: str, what: str, micro_batch: int | None = None) -> Iterator[None]:
        begin = self._clock.now()
        try:
            yield
        finally:
            self._marks.append((category, what, micro_batch))
            self._times += begin, self._clock.now()

    def recorded(self, bare: Instructions) -> Instructions:
        """Wrap the instructions of a batch so that they record start and end."""
        return MappingProxyType(
            {
                kind: self._recorded(instruction, *INSTRUCTIONS[kind]) if kind in INSTRUCTIONS else instruction
                for kind, instruction in bare.items()
            }
        )

    def _recorded(self, function: Callable[..., Any], category: str, what: str) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            micro_batch = None
            if "buffer_id" in kwargs:
                micro_batch = self._micro_batch(category, what)
            with self._phase(category, what, micro_batch):
                return function(*args, **kwargs)

        return recorded

    def _micro_batch(self, category: str, what: str) -> int:
        """Return the micro-batch of the next instruction of this kind: they come in order."""
        if what == "weight gradient":
            return self._deferred.popleft()
        kind = category if category == "backward" else f"{category} {what}"
        micro_batch = self._counts[kind]
        self._counts[kind] += 1
        if what == "input gradient":
            self._deferred.append(micro_batch)
        return micro_batch

    def _write(self, step: int, placement: Placement, seconds: list[float]) -> None:
        self._comm.enter("trace")
        offset_seconds, error_seconds = self._comm.clock_offset(time.perf_counter)
        shared = [time - offset_seconds for time in seconds]
        events = tuple(
            TraceEvent(*mark, begin, end)
            for mark, begin, end in zip(self._marks, shared[::2], shared[1::2], strict=True)
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

"""The numbers of each batch, read a few batches at a time.

To read a loss is to wait for the last stage. So while losses are unread, a stage begins its next batch before later
stages have ended this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ds_dynmo.cli.training.options import TrainingRun
from ds_dynmo.cli.training.report import History, WriteRecord, step_record
from ds_dynmo.engine.measure.profiler import device_clock
from ds_dynmo.models import AUXILIARY_LOSS, LANGUAGE_MODEL_LOSS

__all__ = ["READ_AFTER", "Steps"]

READ_AFTER = 10  # batches, after which their losses are read in any case: a report is no further behind
SPEED_SERIES = "Train/Samples/tokens_per_second"  # in DeepSpeed's monitors, beside the losses that it sends itself


@dataclass
class _Step:
    """A batch.

    Attributes:
        began, ended: by the clock of the device.
        losses: the language model's, and what training added to it; a stage waits where it reads them.
    """

    began: Any
    number: int = 0
    samples: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    ended: Any = None


class Steps:
    """Adds the numbers of each batch to the history, and on rank 0 to the report and to monitors.

    Seconds are those of this rank, with what the cases do before and after the batch, and the wait for losses that are
    read with it.
    """

    def __init__(self, run: TrainingRun, engine: Any, history: History, record: WriteRecord) -> None:
        self._run, self._engine, self._history, self._record = run, engine, history, record
        self._clock = device_clock()
        self._unread: list[_Step] = []
        self._running: _Step | None = None

    def begin(self) -> None:
        """Begin a batch, with what its cases do before it."""
        self._history.ranks.append(torch.distributed.get_world_size())
        self._running = _Step(self._clock.now())

    def end(self, *, is_read: bool) -> None:
        """End the batch, with what its cases have done after it.

        Args:
            is_read: whether its loss is needed now; else it is read with those of later batches.
        """
        step, engine = self._running, self._engine
        assert step is not None, "no batch began"
        losses = engine.get_additional_losses()
        step.losses = [losses[LANGUAGE_MODEL_LOSS], losses[AUXILIARY_LOSS]]
        step.number, step.samples = engine.global_steps, engine.global_samples
        self._unread.append(step)
        is_read = is_read or len(self._unread) >= READ_AFTER
        if is_read:
            float(step.losses[0])  # what its last stages still do counts as its time
        step.ended = self._clock.now()
        if is_read:
            self.read()

    def read(self) -> None:
        """Read the losses of all batches that ended."""
        for step in self._unread:
            self._add(step, *(float(loss) for loss in step.losses))
        self._unread = []

    def _add(self, step: _Step, loss: float, auxiliary_loss: float) -> None:
        (seconds,) = self._clock.seconds_between([step.began, step.ended])
        self._history.add(loss, auxiliary_loss, seconds)
        if self._engine.global_rank == 0:
            measured = step_record(self._run, self._engine, step.number, self._history)
            self._record(measured)
            self._engine.monitor.write_events([(SPEED_SERIES, measured["tokens_per_second"], step.samples)])

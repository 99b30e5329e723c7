"""The numbers of batches are read a few at a time, and are all there in the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_dynmo.cli.training import steps as module
from ds_dynmo.cli.training.report import History
from ds_dynmo.cli.training.steps import READ_AFTER, Steps
from ds_dynmo.engine.measure.profiler import CpuClock
from ds_dynmo.models import AUXILIARY_LOSS, LANGUAGE_MODEL_LOSS


class Clock(CpuClock):
    """Stands still until it is told."""

    time = 0.0

    def now(self) -> float:
        return self.time


class Loss:
    """A loss that takes a second to arrive."""

    def __init__(self, batch: int, clock: Clock, read: list[int]) -> None:
        self._batch, self._clock, self._read = batch, clock, read

    def __float__(self) -> float:
        if self._batch not in self._read:
            self._read.append(self._batch)
            self._clock.time += 1.0
        return float(self._batch)


def test_losses_are_read_where_they_are_needed_and_seconds_are_of_whole_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, read, records, speeds = Clock(), list[int](), list[dict[str, Any]](), list[Any]()
    monkeypatch.setattr(module, "device_clock", lambda: clock)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    engine = SimpleNamespace(global_rank=0, global_steps=0, global_samples=0, train_batch_size=lambda: 2)
    engine.monitor = SimpleNamespace(write_events=speeds.extend)
    run, history = SimpleNamespace(model=SimpleNamespace(sequence_length=8)), History()
    steps, reads = Steps(run, engine, history, records.append), []  # type: ignore[arg-type]
    for number in range(1, 2 * READ_AFTER + 4):
        steps.begin()
        clock.time += 3.0  # what the case does before, the batch, and what the case does after
        engine.global_steps, engine.global_samples = number, 2 * number
        loss = Loss(number, clock, read)
        engine.get_additional_losses = lambda loss=loss: {LANGUAGE_MODEL_LOSS: loss, AUXILIARY_LOSS: torch.zeros(1)}
        steps.end(is_read=number == 3)
        reads.append(len(history.losses))
        clock.time += 100.0  # validates, or saves
    assert [reads.index(count) + 1 for count in (3, 3 + READ_AFTER)] == [3, 3 + READ_AFTER]
    assert sorted(set(reads)) == [0, 3, 3 + READ_AFTER, 3 + 2 * READ_AFTER]
    assert history.losses == [record["train_loss"] for record in records] == [*range(1, 2 * READ_AFTER + 4)]
    assert [record["step"] for record in records] == [samples // 2 for _, _, samples in speeds] == history.losses
    waited = {3, 3 + READ_AFTER, 3 + 2 * READ_AFTER}
    assert history.step_seconds == [4.0 if number in waited else 3.0 for number in range(1, 2 * READ_AFTER + 4)]
    steps.begin()
    clock.time += 3.0
    steps.end(is_read=False)
    assert len(history.losses) == 2 * READ_AFTER + 3
    steps.read()
    assert len(history.losses) == len(history.ranks) == 2 * READ_AFTER + 4

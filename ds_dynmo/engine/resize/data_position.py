"""Track a rank's position in its data, so that a rank that was away goes on where the others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.utils import RepeatingLoader
from torch.utils.data.distributed import DistributedSampler

from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline


def micro_batches_of(engine: DeepSpeedPipeline, replicas: int) -> int:
    """Count the micro-batches of each replica's data that a run has trained on, however its batches were divided."""
    return int(engine.global_samples) // (engine.train_micro_batch_size_per_gpu() * replicas)


class DataPosition:
    """Skips the micro-batches that the job trained on while this rank did not read.

    It does so for an iterator that the rank had before, and for one that the engine made of ``training_data``. Any
    other iterator is expected to be at the right position.

    For life, a rank reads the data of the launch's replica that it began in. Where there are extra replicas, each copy
    of a replica reads another part of every batch.
    """

    replica_multiplier = 1  # copies that there are of the launch's replicas
    copy_index = 0  # of the copy that this rank is in

    def __init__(self, engine: DeepSpeedPipeline) -> None:
        self._engine = engine
        self._replica, self._replicas = engine.grid.get_data_parallel_id(), engine.grid.data_parallel_size
        self._iterator = engine.data_iterator
        self.passed = 0  # micro-batches of a replica's data since the engine was built
        self._behind = 0
        self._was_given = False

    @property
    def taken(self) -> int:
        """Micro-batches that were trained on so far, of the data of each of the launch's replicas."""
        return micro_batches_of(self._engine, self._replicas)

    @property
    def can_read(self) -> bool:
        """Whether this rank could read data on the first or the last stage."""
        return self._was_given or self._engine.data_iterator is not None or bool(self._engine.training_data)

    @property
    def is_missing(self) -> bool:
        """True on a rank that reads data, and was given none but what ``train_batch`` is called with."""
        return self._engine.data_iterator is None and (self._engine.is_first_stage() or self._engine.is_last_stage())

    def others_took(self, passed: int) -> None:
        """Take over the job's count ``passed``; what this rank missed is skipped before its next batch."""
        self._behind += max(0, passed - self.passed)
        self.passed = passed

    @property
    def first_of_batch(self) -> int:
        """The number of this rank's first micro-batch in a batch."""
        return self._counts()[0]

    def before_batch(self, data_iter: Any) -> None:
        """Skip to the position of the other ranks before a batch; ``data_iter``: the argument of ``train_batch``."""
        engine = self._engine
        self._was_given = data_iter is not None
        reads = engine.is_first_stage() or engine.is_last_stage()
        if data_iter is None and engine.data_iterator is None and reads:
            self._read_training_data()
        elif data_iter is not None and data_iter is not self._iterator:
            self._iterator, self._behind = data_iter, 0
        before, count, after = self._counts()
        self.passed += before + count + after
        self._behind += before
        if reads:
            for _ in range(self._behind if self._iterator is not None else 0):
                next(self._iterator)
            self._behind, count = 0, 0
        self._behind += count + after

    def evaluate_part(self, data_iter: Any, evaluate: Callable[[], Any]) -> Any:
        """Call ``evaluate`` on this rank's part of a whole batch."""
        before, _, after = self._counts()
        reads = data_iter is not None and (self._engine.is_first_stage() or self._engine.is_last_stage())
        for _ in range(before if reads else 0):
            next(data_iter)
        result = evaluate()
        for _ in range(after if reads else 0):
            next(data_iter)
        return result

    def _counts(self) -> tuple[int, int, int]:
        """Count the micro-batches of a batch: of the copies before this one, of this one, and of those after it."""
        count = self._engine.micro_batches
        return self.copy_index * count, count, (self.replica_multiplier - 1 - self.copy_index) * count

    def _read_training_data(self) -> None:
        """Read ``training_data``, which DeepSpeed sets up at the start on the first and the last stage only."""
        engine = self._engine
        dataset = engine.training_data
        if dataset is None:
            return
        sampler: Any = DistributedSampler(dataset, self._replicas, self._replica, shuffle=False)
        engine.set_dataloader(RepeatingLoader(engine.deepspeed_io(dataset, data_sampler=sampler)))
        self._iterator = engine.data_iterator

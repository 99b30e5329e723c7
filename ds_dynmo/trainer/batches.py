"""Micro-batches of a trainer: the rows that transformers' trainer takes, in its order, as a pipeline takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ds_dynmo.data.rows import IGNORED
from ds_dynmo.errors import ConfigError
from ds_dynmo.trainer.rows import Row, TrainerRows

__all__ = ["Collator", "Epochs", "MicroBatch", "Sizes", "as_micro_batch", "collate_rows"]

Collator = Callable[[list[Row]], Mapping[str, torch.Tensor]]
MicroBatch = tuple[Any, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """How many rows are trained together.

    Attributes:
        rows: of the data.
        micro_batch: rows of one.
        steps: micro-batches of a batch, of each replica.
        drop_last: rows that fill no micro-batch are left out.
    """

    rows: int
    micro_batch: int
    steps: int
    replicas: int
    drop_last: bool

    @property
    def micro_batches(self) -> int:
        """Of a replica in an epoch."""
        whole = self.rows / self.micro_batch
        count = math.floor(whole) if self.drop_last else math.ceil(whole)
        return count // self.replicas if self.drop_last else math.ceil(count / self.replicas)

    @property
    def batches(self) -> int:
        """In an epoch. The last one may have fewer micro-batches."""
        return max(math.ceil(self.micro_batches / self.steps), 1)


@dataclass(frozen=True)
class Epochs:
    """The order of rows, as that of transformers' trainer with the same seed: by batch, not by what came before.

    Attributes:
        seed: None: rows come in their order.
    """

    sizes: Sizes
    seed: int | None

    def of(self, epoch: int, batch: int, replica: int) -> list[list[int]]:
        """Return the numbers of the rows of each micro-batch of a batch; empty lists where an epoch has no more."""
        sizes, order = self.sizes, _order(self.sizes.rows, self.seed, epoch)
        found: list[list[int]] = []
        for number in range(batch * sizes.steps, (batch + 1) * sizes.steps):
            first = (number * sizes.replicas + replica) * sizes.micro_batch
            rows = range(first, first + sizes.micro_batch) if number < sizes.micro_batches else range(0)
            if sizes.replicas == 1:  # the last one may be smaller; of several replicas all have as many rows
                rows = range(rows.start, min(rows.stop, sizes.rows))
            found.append([order[row % sizes.rows] for row in rows])
        return found


@lru_cache(maxsize=2)
def _order(rows: int, seed: int | None, epoch: int) -> Sequence[int]:
    if seed is None:
        return range(rows)
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)  # as accelerate's SeedableRandomSampler
    return torch.randperm(rows, generator=generator).tolist()


def collate_rows(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Put rows of token ids together, with padding after the shorter ones. Without labels, ids are the labels.

    Raises:
        ConfigError: rows have something else than token ids, or not as many of each.
    """
    known = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0, "position_ids": 0}
    length = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {name: [] for name in known if name in rows[0] or name in ("labels",)}
    for row in rows:
        for name, values in batch.items():
            own = row.get(name, row["input_ids"] if name == "labels" else None)
            if own is None or len(own) != len(row["input_ids"]):
                raise ConfigError(f'rows: "{name}" should have one for each of a row\'s {len(row["input_ids"])} tokens')
            values.append([*own, *[known[name]] * (length - len(own))])
    return {name: torch.tensor(values, dtype=torch.int64) for name, values in batch.items()}


def as_micro_batch(batch: Mapping[str, torch.Tensor], inputs: Sequence[str], rows: int) -> MicroBatch:
    """Make what a pipeline takes of what a collator makes.

    Labels come to the place of the token that predicts them. Where there are fewer than ``rows`` rows, the first ones
    come again, without labels: they train nothing.

    Args:
        inputs: the names of what the model takes beside ``input_ids``.

    Raises:
        ConfigError: the model takes something that is not there, or padding is not where it needs no mask.
    """
    ids, labels = batch["input_ids"], batch.get("labels")
    if labels is None:
        raise ConfigError(
            "data_collator: what it makes has no labels: DataCollatorForLanguageModeling(mlm=False) adds them"
        )
    mask = batch.get("attention_mask")
    if mask is not None and "attention_mask" not in inputs and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ConfigError('padding is before a row\'s tokens: pad behind them (tokenizer.padding_side = "right")')
    if missing := [name for name in inputs if name not in batch]:
        raise ConfigError(f"data_collator: what it makes has no {', '.join(missing)}, and had in the first batch")
    labels = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), dim=1)
    beside = [batch[name] for name in inputs]
    if len(ids) < rows:
        places = torch.arange(rows) % len(ids)
        ids, beside = ids[places], [one[places] for one in beside]
        labels = torch.cat((labels, labels.new_full((rows - len(labels), labels.shape[1]), IGNORED)))
    return (ids, *beside) if beside else ids, labels


def without_labels(micro_batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch that trains nothing."""
    inputs, labels = micro_batch
    return inputs, torch.full_like(labels, IGNORED)


def micro_batches_of(
    numbers: Sequence[Sequence[int]], rows: TrainerRows, collate: Collator, inputs: Sequence[str], size: int
) -> Iterator[MicroBatch]:
    """Return the micro-batches of a batch, read when they are asked for."""
    last: MicroBatch | None = None
    for each in numbers:
        if each:
            last = as_micro_batch(collate([rows[number] for number in each]), inputs, size)
            yield last
        else:
            assert last is not None, "a batch has one micro-batch at least"
            yield without_labels(last)

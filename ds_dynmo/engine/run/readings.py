"""What a stage reads of its data: a digest of the inputs and of the labels of each micro-batch.

A digest is small, and cheap beside a batch: of a large tensor it has elements at equal distances.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

SAMPLED = 2**16  # elements of a tensor
SHOWN = 4  # of them in messages


class Half(NamedTuple):
    """The inputs or the labels of a micro-batch.

    Attributes:
        digest: of all values.
        is_blank: whether there is no value, or one number throughout: a stage may be given that for what it does not
            use.
        shown: the first values, for messages.
    """

    digest: str
    is_blank: bool
    shown: str


NOTHING = Half("nothing", is_blank=True, shown="nothing")


class MicroBatch(NamedTuple):
    """Both halves of a micro-batch."""

    inputs: Half
    labels: Half


@dataclass
class Readings:
    """The micro-batches that this rank reads in a batch.

    Attributes:
        micro_batches: read so far; None: they are not recorded.
    """

    micro_batches: list[MicroBatch] | None = field(default=None)

    @contextmanager
    def recorded(self) -> Iterator[list[MicroBatch]]:
        """Record the micro-batches that are read inside."""
        self.micro_batches = []
        try:
            yield self.micro_batches
        finally:
            self.micro_batches = None

    def saw(self, batch: Any) -> None:
        """Record a micro-batch as the data iterator gave it, if that is asked for."""
        if self.micro_batches is not None:
            self.micro_batches.append(MicroBatch(_half(batch, 0), _half(batch, 1)))


def _half(batch: Any, place: int) -> Half:
    try:
        return half_of(batch[place])
    except Exception:  # any object of a user's; what it lacks shows where it is used
        return NOTHING


def half_of(value: Any) -> Half:
    """Return the digest of a tensor, or of those in a container."""
    halves = [_half_of_tensor(tensor) for tensor in _tensors(value)]
    if not halves:
        return NOTHING
    return Half(" ".join(half.digest for half in halves), all(half.is_blank for half in halves), halves[0].shown)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _half_of_tensor(tensor: torch.Tensor) -> Half:
    flat = torch.flatten(tensor.detach())
    if not flat.numel():
        return NOTHING
    sample = flat[:: max(1, flat.numel() // SAMPLED)].cpu()
    if (sample == sample[0]).all():
        text = f"all {_text(sample[0])}"
        return Half(text, is_blank=True, shown=text)
    content = (
        f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + sample.contiguous().view(torch.uint8).numpy().tobytes()
    )
    first = ", ".join(map(_text, flat[:SHOWN].cpu()))
    return Half(hashlib.blake2b(content, digest_size=16).hexdigest(), is_blank=False, shown=f"[{first}, ...]")


def _text(number: torch.Tensor) -> str:
    value = number.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""What a stage reads of its data: a digest of the inputs and of the labels of each micro-batch.

A digest is small, and cheap beside a batch: of a large tensor it has elements at equal distances.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ds_dynmo.unmarked import unmarked

SAMPLED = 2**16  # elements of a tensor
SHOWN = 4  # of them in messages
SHOWN_CHARACTERS = 60
HEADER_BYTES, MICRO_BATCH_BYTES = 256, 320  # of the form in which a reading travels


class HalfDigest(NamedTuple):
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


NOTHING = HalfDigest("nothing", is_blank=True, shown="nothing")


class MicroBatchDigest(NamedTuple):
    """Both halves of a micro-batch."""

    inputs: HalfDigest
    labels: HalfDigest


@dataclass(frozen=True)
class Reading:
    """What a stage has read in a batch.

    Attributes:
        host: of the rank.
    """

    rank: int
    host: str
    micro_batches: Sequence[MicroBatchDigest]

    @property
    def name(self) -> str:
        """The rank, for messages."""
        return f"rank {self.rank} ({self.host})"

    def to_bytes(self, count: int) -> torch.Tensor:
        """Return the reading as uint8 on the CPU, as many for every reading of a batch of ``count`` micro-batches."""
        text = json.dumps([self.rank, self.host[:SHOWN_CHARACTERS], self.micro_batches]).encode()
        whole = no_reading(count)
        whole[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return whole

    @classmethod
    def from_bytes(cls, whole: torch.Tensor) -> Reading:
        """Return the reading of :meth:`to_bytes`."""
        rank, host, micro_batches = json.loads(whole.numpy().tobytes().rstrip(b"\0"))
        return cls(
            rank, host, [MicroBatchDigest(HalfDigest(*inputs), HalfDigest(*labels)) for inputs, labels in micro_batches]
        )


def no_reading(count: int) -> torch.Tensor:
    """Return zeros in the place of :meth:`Reading.to_bytes`."""
    return torch.zeros(HEADER_BYTES + count * MICRO_BATCH_BYTES, dtype=torch.uint8, device="cpu")


@dataclass
class Readings:
    """The micro-batches that this rank reads in a batch.

    Attributes:
        micro_batches: read so far; None: they are not recorded.
    """

    micro_batches: list[MicroBatchDigest] | None = field(default=None)

    @contextmanager
    def recorded(self) -> Iterator[list[MicroBatchDigest]]:
        """Record the micro-batches that are read inside."""
        self.micro_batches = []
        try:
            yield self.micro_batches
        finally:
            self.micro_batches = None

    def saw(self, batch: Any) -> None:
        """Record a micro-batch as the data iterator gave it, if that is asked for."""
        if self.micro_batches is not None:
            self.micro_batches.append(MicroBatchDigest(_half(batch, 0), _half(batch, 1)))


def _half(batch: Any, place: int) -> HalfDigest:
    try:
        return half_of(batch[place])
    except Exception:  # any object of a user's; what it lacks shows where it is used
        return NOTHING


def half_of(value: Any) -> HalfDigest:
    """Return the digest of a tensor, or of those in a container."""
    halves = [_half_of_tensor(tensor) for tensor in _tensors(value) if tensor.numel()]
    if not halves:
        return NOTHING
    digest = _hash(" ".join(half.digest for half in halves).encode())
    return HalfDigest(digest, all(half.is_blank for half in halves), halves[0].shown[:SHOWN_CHARACTERS])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield unmarked(value)
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _half_of_tensor(tensor: torch.Tensor) -> HalfDigest:
    sample, count = tensor, tensor.numel()
    if count > SAMPLED:
        places = torch.arange(0, count, count // SAMPLED, device=tensor.device)
        sample = sample[torch.unravel_index(places, tensor.shape)]
    sample = sample.cpu().flatten()
    if (sample == sample[0]).all():
        text = f"all {_text(sample[0])}"
        return HalfDigest(text, is_blank=True, shown=text)
    content = (
        f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + sample.contiguous().view(torch.uint8).numpy().tobytes()
    )
    first = ", ".join(map(_text, sample[:SHOWN]))
    return HalfDigest(_hash(content), is_blank=False, shown=f"[{first}, ...]")


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _text(number: torch.Tensor) -> str:
    value = number.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)

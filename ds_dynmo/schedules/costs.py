"""The costs of a schedule: seconds and bytes of passes per chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynmo.errors import ScheduleError

__all__ = ["PassBytes", "PassCosts"]


@dataclass(frozen=True)
class PassCosts:
    """Seconds per micro-batch of each pass and of each message between chunks.

    Attributes:
        owners: per chunk, the stage that holds it (``Placement.owners``).
        forward_seconds, input_gradient_seconds, weight_gradient_seconds: per chunk.
        backward_seconds: per chunk, both gradients in one pass. Usually less than the sum of the two parts, because
            splitting costs time.
        link_seconds: per boundary between chunks ``c`` and ``c + 1``, of a message in either direction. 0 between two
            chunks of one stage, which send each other nothing.
        frozen_chunks: number of leading chunks without trainable parameters. No gradient is sent to them: their
            backward passes take no time and wait for nothing.

    Raises:
        ScheduleError: different numbers of chunks, negative or non-finite seconds.
    """

    owners: tuple[int, ...]
    forward_seconds: tuple[float, ...]
    input_gradient_seconds: tuple[float, ...]
    weight_gradient_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    link_seconds: tuple[float, ...] = ()
    frozen_chunks: int = 0

    def __post_init__(self) -> None:
        if not self.owners or {*self.owners} != {*range(self.num_stages)}:
            raise ScheduleError(f"the owners {list(self.owners)} of chunks are not the stages 0, 1, ...")
        if not self.link_seconds:
            object.__setattr__(self, "link_seconds", (0.0,) * (self.num_chunks - 1))
        for name, count in (
            ("forward_seconds", self.num_chunks),
            ("input_gradient_seconds", self.num_chunks),
            ("weight_gradient_seconds", self.num_chunks),
            ("backward_seconds", self.num_chunks),
            ("link_seconds", self.num_chunks - 1),
        ):
            seconds = getattr(self, name)
            if len(seconds) != count:
                raise ScheduleError(f"{self.num_chunks} chunks need {count} {name}, got {len(seconds)}")
            for place, value in enumerate(seconds):
                if not 0 <= value < math.inf:
                    raise ScheduleError(f"{name}[{place}] is {value!r}: seconds are finite and >= 0")
        for chunk in range(self.frozen_chunks):
            if (
                self.backward_seconds[chunk]
                or self.input_gradient_seconds[chunk]
                or self.weight_gradient_seconds[chunk]
            ):
                raise ScheduleError(f"chunk {chunk} of {self.frozen_chunks} frozen ones has backward seconds")
        links = tuple(
            0.0 if here == there else float(link)
            for here, there, link in zip(self.owners, self.owners[1:], self.link_seconds)
        )
        object.__setattr__(self, "link_seconds", links)

    @classmethod
    def chain(
        cls,
        forward_seconds: Sequence[float],
        input_gradient_seconds: Sequence[float],
        weight_gradient_seconds: Sequence[float],
        backward_seconds: Sequence[float] | None = None,
        link_seconds: float | Sequence[float] = 0.0,
        *,
        frozen_chunks: int = 0,
    ) -> PassCosts:
        """Build the costs of a pipeline with one chunk per stage.

        Args:
            backward_seconds: None: the sum of both gradients.
            link_seconds: one number for all boundaries, or one per boundary.
        """
        stages = len(forward_seconds)
        if backward_seconds is None:
            backward_seconds = [i + w for i, w in zip(input_gradient_seconds, weight_gradient_seconds)]
        links = (link_seconds,) * (stages - 1) if isinstance(link_seconds, float | int) else tuple(link_seconds)
        return cls(
            tuple(range(stages)),
            tuple(map(float, forward_seconds)),
            tuple(map(float, input_gradient_seconds)),
            tuple(map(float, weight_gradient_seconds)),
            tuple(map(float, backward_seconds)),
            links,
            frozen_chunks,
        )

    @classmethod
    def equal(cls, owners: Sequence[int], seconds: float = 1.0) -> PassCosts:
        """Build costs for a pipeline that has not been measured: forward passes and both gradients take equal time."""
        same = (seconds,) * len(owners)
        return cls(tuple(owners), same, same, same, (2 * seconds,) * len(owners))

    @property
    def num_chunks(self) -> int:
        return len(self.owners)

    @property
    def num_stages(self) -> int:
        return max(self.owners) + 1

    @property
    def by_kind(self) -> tuple[tuple[float, ...], ...]:
        """Seconds per chunk of each :class:`Kind`, in the order of their numbers."""
        return self.forward_seconds, self.input_gradient_seconds, self.weight_gradient_seconds, self.backward_seconds

    def chunks_of(self, stage: int) -> list[int]:
        """List the chunks of ``stage``, in the order of the model."""
        return [chunk for chunk, owner in enumerate(self.owners) if owner == stage]


@dataclass(frozen=True)
class PassBytes:
    """Bytes that each chunk holds per micro-batch.

    Attributes:
        activation_bytes: from the start of the forward pass to the end of the input gradient's pass. Under
            activation checkpointing: the inputs of the segments.
        held_bytes: from the end of the input gradient's pass to the end of the weight gradient's: the inputs of the
            weight gradient. A backward pass in one holds none.
        recomputed_bytes: while a backward pass in one runs: the largest recomputed segment; 0 without activation
            checkpointing.
        split_recomputed_bytes: while the input gradient's pass runs: the maximum over segments of the recomputed
            segment and what later segments already hold for their weight gradients; (): ``recomputed_bytes``.
        standing_bytes: all the time, for posted receives; (): none.

    Raises:
        ScheduleError: different numbers of chunks, negative bytes.
    """

    activation_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    recomputed_bytes: tuple[int, ...]
    split_recomputed_bytes: tuple[int, ...] = ()
    standing_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.split_recomputed_bytes:
            object.__setattr__(self, "split_recomputed_bytes", self.recomputed_bytes)
        if not self.standing_bytes:
            object.__setattr__(self, "standing_bytes", (0,) * len(self.activation_bytes))
        names = ("activation_bytes", "held_bytes", "recomputed_bytes", "split_recomputed_bytes", "standing_bytes")
        if len({len(getattr(self, name)) for name in names}) != 1:
            raise ScheduleError(
                f"bytes are needed for each chunk, got {len(self.activation_bytes)} activation, "
                f"{len(self.held_bytes)} held and {len(self.recomputed_bytes)} recomputed values"
            )
        for name in names:
            for chunk, value in enumerate(getattr(self, name)):
                if value < 0:
                    raise ScheduleError(f"{name}[{chunk}] is {value}: bytes cannot be negative")

    @classmethod
    def equal(cls, num_chunks: int, activation_bytes: int = 1) -> PassBytes:
        """Build equal sizes, all held until the weight gradient is computed, without recomputation."""
        return cls((activation_bytes,) * num_chunks, (activation_bytes,) * num_chunks, (0,) * num_chunks)

"""Memory in training: the bytes that a stage needs on its device, and whether a partition fits.

A stage holds the static bytes of its layers (weights, gradients, optimizer state, buffers) and, for every micro-batch
in flight (:func:`micro_batches_held`), the activations of its layers. Early stages of a chain have more micro-batches
in flight, so they need more memory for the same layers. With activation checkpointing every ``k`` layers, counted from
the first of a chunk, a micro-batch in flight holds only the input of each segment, and the activations of one segment
exist while it is recomputed. :mod:`ds_dynmo.partitioners.move_memory` adds the memory of a migration.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_dynmo.errors import PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import in_flight

__all__ = [
    "LayerBytes",
    "MemoryModel",
    "StageMemory",
    "check_fits",
    "kept_bytes",
    "micro_batches_held",
    "resident_bytes",
]

Ints = npt.NDArray[np.int64]
LayerBytes = tuple[int, int]  # a layer's activations, and its input


def micro_batches_held(owners: Sequence[int], micro_batches: int) -> tuple[int, ...]:
    """Count, per chunk, the micro-batches whose activations it holds at the peak of its stage, whatever the order.

    On a chain these are those of 1F1B. Of two chunks per stage, each counts as many as the first stage of a chain.
    Orders are searched within these bytes (:func:`ds_dynmo.schedules.one_f_one_b_limit`), so this is a safe bound.

    Args:
        owners: per chunk, the stage that holds it.

    >>> micro_batches_held((0, 1, 2), 8), micro_batches_held((0, 1, 1, 0), 8)
    ((3, 2, 1), (2, 2, 2, 2))
    """
    stages = max(owners) + 1
    if len(owners) == stages:
        return tuple(in_flight(stage, stages, micro_batches) for stage in owners)
    return (in_flight(0, stages, micro_batches),) * len(owners)


class KeptBytes(NamedTuple):
    """Bytes that layers keep for their backward passes.

    Attributes:
        per_micro_batch: of each micro-batch in flight: all activations; under checkpointing the inputs of segments.
        segments: under checkpointing, per segment, the number of layers up to its end, and its activation bytes.
    """

    per_micro_batch: int
    segments: list[tuple[int, int]]

    @property
    def recomputed(self) -> int:
        """The activation bytes of the largest segment; one is recomputed at a time."""
        return max((size for _, size in self.segments), default=0)


def kept_bytes(activation_bytes: Sequence[int], input_bytes: Sequence[int], checkpoint_interval: int) -> KeptBytes:
    """Compute the bytes that these layers of one stage keep; segments are counted from the first.

    >>> kept_bytes([4, 5, 6], [1, 2, 3], checkpoint_interval=2)
    KeptBytes(per_micro_batch=4, segments=[(2, 9), (3, 6)])
    """
    if checkpoint_interval == 0:
        return KeptBytes(sum(activation_bytes), [])
    heads = range(0, len(input_bytes), checkpoint_interval)
    ends = [*heads[1:], len(input_bytes)]
    segments = [(end, sum(activation_bytes[head:end])) for head, end in zip(heads, ends)]
    return KeptBytes(sum(input_bytes[head] for head in heads), segments)


def resident_bytes(
    static_bytes: Sequence[int],
    activation_bytes: Sequence[int],
    input_bytes: Sequence[int],
    in_flight: int,
    checkpoint_interval: int,
) -> int:
    """Compute the bytes that a stage of these layers holds at its peak.

    >>> resident_bytes([10, 10, 10], [4, 5, 6], [1, 2, 3], in_flight=2, checkpoint_interval=0)
    60
    >>> resident_bytes([10, 10, 10], [4, 5, 6], [1, 2, 3], in_flight=2, checkpoint_interval=2)
    47
    """
    kept = kept_bytes(activation_bytes, input_bytes, checkpoint_interval)
    return sum(static_bytes) + in_flight * kept.per_micro_batch + kept.recomputed


@dataclass(frozen=True)
class StageMemory:
    """The memory model of one stage: the bytes of its layers, and its limit.

    Attributes:
        static_bytes, activation_bytes, input_bytes: per layer of the stage.
        limit: bytes that the stage may use.
        in_flight: micro-batches whose activations it holds at its peak.
        checkpoint_interval: the same for every stage.
        inner_bytes: as in a :class:`MemoryModel`, of the layers of the stage.
    """

    static_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    input_bytes: tuple[int, ...]
    limit: int
    in_flight: int
    checkpoint_interval: int = 0
    inner_bytes: tuple[tuple[LayerBytes, ...], ...] = ()


@dataclass(frozen=True)
class MemoryModel:
    """The bytes of each layer, and the limit of each stage.

    Attributes:
        static_bytes: per layer: weights, gradients, optimizer state, buffers.
        activation_bytes: per layer and micro-batch, saved for the backward pass.
        input_bytes: per layer and micro-batch, of its input; used only under checkpointing.
        limits: per stage, the bytes that it may use.
        micro_batches: per iteration.
        checkpoint_interval: layers per checkpointed segment, 0 without checkpointing.
        inner_bytes: the bytes of each layer of each group, if groups count as layers (:meth:`folded`): a segment may
            start and end within a group. Else empty.

    Raises:
        PartitionError: values for different numbers of layers, negative bytes, no micro-batch, or a negative interval.
    """

    static_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    input_bytes: tuple[int, ...]
    limits: tuple[int, ...]
    micro_batches: int
    checkpoint_interval: int = 0
    inner_bytes: tuple[tuple[LayerBytes, ...], ...] = ()

    def __post_init__(self) -> None:
        per_layer = {len(self.static_bytes), len(self.activation_bytes), len(self.input_bytes)}
        if len(per_layer) != 1:
            raise PartitionError(
                f"a memory model needs bytes for each layer, got {len(self.static_bytes)} static, "
                f"{len(self.activation_bytes)} activation and {len(self.input_bytes)} input values"
            )
        for name in ("static_bytes", "activation_bytes", "input_bytes", "limits"):
            for place, value in enumerate(getattr(self, name)):
                if value < 0:
                    raise PartitionError(f"{name}[{place}] is {value}: bytes cannot be negative")
        if self.micro_batches < 1 or self.checkpoint_interval < 0:
            raise PartitionError(
                "a memory model needs micro_batches >= 1 and checkpoint_interval >= 0, "
                f"got {self.micro_batches} and {self.checkpoint_interval}"
            )

    def check_shape(self, num_layers: int, num_stages: int) -> None:
        """Refuse a model of other layers or stages.

        Raises:
            PartitionError: with both numbers.
        """
        if len(self.static_bytes) != num_layers or len(self.limits) != num_stages:
            raise PartitionError(
                f"the memory model is for {len(self.static_bytes)} layers and {len(self.limits)} stages, "
                f"not for {num_layers} and {num_stages}"
            )

    def on(self, num_stages: int) -> MemoryModel:
        """Return a model of ``num_stages`` stages, each with the smallest of the limits."""
        return replace(self, limits=(min(self.limits),) * num_stages)

    def folded(self, groups: LayerGroups) -> MemoryModel:
        """Return a model whose layers are ``groups``; a stage needs exactly the same bytes.

        Raises:
            PartitionError: the groups are of another number of layers.
        """
        self.check_shape(groups.num_layers, len(self.limits))
        if groups.single_layers:
            return self
        layers = list(zip(self.activation_bytes, self.input_bytes))
        return replace(
            self,
            static_bytes=groups.fold_ints(self.static_bytes),
            activation_bytes=groups.fold_ints(self.activation_bytes),
            input_bytes=tuple(self.input_bytes[first] for first in groups.boundaries[:-1]),
            inner_bytes=tuple(tuple(layers[start:stop]) for start, stop in itertools.pairwise(groups.boundaries)),
        )

    def in_layers(self, partition: Sequence[int]) -> list[int]:
        """Convert boundaries from groups to layers."""
        return [self._first_layers[group] for group in partition]

    def layer_bytes(self, start: int, stop: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the activation and input bytes of layers ``[start, stop)``, or of the layers in these groups."""
        if not self.inner_bytes:
            return self.activation_bytes[start:stop], self.input_bytes[start:stop]
        layers = [layer for group in self.inner_bytes[start:stop] for layer in group]
        return [activation for activation, _ in layers], [inputs for _, inputs in layers]

    def in_flight(self, stage: int) -> int:
        """Return the number of micro-batches whose activations ``stage`` of a chain holds at its peak."""
        return in_flight(stage, len(self.limits), self.micro_batches)

    def bytes_of_chunks(self, chunks: Sequence[tuple[Ints, Ints]], held: Sequence[int]) -> Ints:
        """Compute the bytes that a stage needs for these chunks, in many cases at once.

        Args:
            chunks: first layers, and the layers after the last ones, ``[how many]`` each.
            held: micro-batches that each chunk holds.
        """
        kept, recomputed = self._kept
        needed: Ints = np.maximum.reduce([recomputed[chunk] for chunk in chunks])
        for (starts, stops), count in zip(chunks, held):
            needed = needed + self._static[stops] - self._static[starts] + count * kept[starts, stops]
        return needed

    def stage_bytes(self, stage: int, start: int, stop: int) -> int:
        """Compute the bytes that ``stage`` of a chain needs for layers ``[start, stop)``."""
        return resident_bytes(
            self.static_bytes[start:stop],
            *self.layer_bytes(start, stop),
            self.in_flight(stage),
            self.checkpoint_interval,
        )

    def bytes_per_stage(self, placement: Placement) -> list[int]:
        """Compute the bytes that each stage needs under ``placement``.

        Raises:
            PartitionError: the placement is of other layers or stages.
        """
        self.check_shape(placement.num_layers, placement.num_stages)
        columns = np.array(placement.boundaries)[:, None]
        return [int(needed[0]) for needed in self.bytes_of_many(columns, placement.owners)]

    def bytes_of_many(self, partitions: Ints, owners: Sequence[int]) -> list[Ints]:
        """Compute the bytes that each stage needs under many partitions, ``[num_chunks + 1, how many]``."""
        held, needed = micro_batches_held(owners, self.micro_batches), []
        for stage in range(len(self.limits)):
            mine = [chunk for chunk, owner in enumerate(owners) if owner == stage]
            ends = [(partitions[chunk], partitions[chunk + 1]) for chunk in mine]
            needed.append(self.bytes_of_chunks(ends, [held[chunk] for chunk in mine]))
        return needed

    def fits_of_many(self, partitions: Ints, owners: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Mark which of many partitions are within all limits."""
        if len(owners) == len(self.limits):
            within = partitions[1:] <= self.furthest[np.arange(len(owners))[:, None], partitions[:-1]]
        else:
            within = np.array(self.bytes_of_many(partitions, owners)) <= np.array(self.limits)[:, None]
        fits: npt.NDArray[np.bool_] = np.logical_and.reduce(within, axis=0)
        return fits

    def fits(self, stage: int, start: int, stop: int) -> bool:
        """Return whether layers ``[start, stop)`` fit on ``stage`` of a chain."""
        return self.stage_bytes(stage, start, stop) <= self.limits[stage]

    def of_stage(self, stage: int, start: int, stop: int) -> StageMemory:
        """Return the part of this model about ``stage`` with layers ``[start, stop)``."""
        return StageMemory(
            self.static_bytes[start:stop],
            self.activation_bytes[start:stop],
            self.input_bytes[start:stop],
            self.limits[stage],
            self.in_flight(stage),
            self.checkpoint_interval,
            self.inner_bytes[start:stop],
        )

    def furthest_stops(self, stage: int, extra_bytes: int = 0) -> list[int]:
        """Compute, for each ``start`` in ``0 .. num_layers``, the largest ``stop`` that fits (``start``: none).

        Args:
            extra_bytes: added to the limit.
        """
        limit, held = self.limits[stage] + extra_bytes, self.in_flight(stage)
        if self.checkpoint_interval:
            places = np.arange(len(self._static))
            needed = self.bytes_of_chunks([(places[:, None], places)], [held])
            furthest: Ints = places + ((places[:, None] < places) & (needed <= limit)).sum(axis=1)
        else:
            needed = self._static + held * self._kept[0][0]
            furthest = np.searchsorted(needed, needed + limit, "right") - 1
        return list(map(int, furthest))

    @cached_property
    def furthest(self) -> Ints:
        """Per stage of a chain and first layer, the furthest stop that fits."""
        return np.array([self.furthest_stops(stage) for stage in range(len(self.limits))])

    @cached_property
    def _first_layers(self) -> list[int]:
        """The first layer of each layer or group, and the number of layers."""
        return list(
            itertools.accumulate(
                map(len, self.inner_bytes) if self.inner_bytes else (1,) * len(self.static_bytes), initial=0
            )
        )

    @cached_property
    def _static(self) -> Ints:
        """The sums of the first 0, 1, 2, ... static bytes."""
        return np.concatenate([[0], np.cumsum(self.static_bytes)])

    @cached_property
    def _kept(self) -> tuple[Ints, Ints]:
        """What :func:`kept_bytes` returns for every chunk ``[start, stop]``: bytes per micro-batch, and recomputed."""
        size, interval = len(self.static_bytes) + 1, self.checkpoint_interval
        activations, inputs = map(np.array, self.layer_bytes(0, size))
        sums = np.concatenate([[0], np.cumsum(activations)])[self._first_layers]
        if not interval:
            return sums - sums[:, None], np.zeros((size, size), dtype=np.int64)
        kept, recomputed = np.zeros((2, size, size), dtype=np.int64)
        for start, first in enumerate(self._first_layers[:-1]):
            in_segment = np.arange(len(inputs) - first) % interval
            ends = np.array(self._first_layers[start + 1 :]) - first - 1
            kept[start, start + 1 :] = np.cumsum(np.where(in_segment == 0, inputs[first:], 0))[ends]
            through = np.cumsum(activations[first:])
            before = np.concatenate([[0], through])[np.arange(len(through)) - in_segment]
            recomputed[start, start + 1 :] = np.maximum.accumulate(through - before)[ends]
        return kept, recomputed


def check_fits(placement: Placement, memory: MemoryModel) -> None:
    """Refuse a placement that does not fit.

    Raises:
        PartitionError: it is of other layers or stages, or does not fit; names the stage that is furthest above its
            limit, the bytes that it needs and the limit.
    """
    needed = memory.bytes_per_stage(placement)
    over = max(range(len(needed)), key=lambda stage: needed[stage] - memory.limits[stage])
    if needed[over] > memory.limits[over]:
        raise PartitionError(
            f"partition {memory.in_layers(placement.boundaries)} does not fit: stage {over} needs {needed[over]} "
            f"bytes, its limit is {memory.limits[over]}"
        )

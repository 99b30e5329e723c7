"""Seconds and bytes of each layer's passes, and their sums over chunks, as :mod:`ds_dynmo.schedules` needs them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners.memory import kept_bytes
from ds_dynmo.partitioners.metrics import Numbers, Partitions, sums_of_many
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import PassBytes, PassCosts

__all__ = ["LayerPasses"]


@dataclass(frozen=True)
class LayerPasses:
    """Seconds and bytes of each layer if backward passes may run in two parts, on a stage of speed 1.

    Attributes:
        forward_seconds, input_gradient_seconds, weight_gradient_seconds, backward_seconds: per layer and micro-batch.
            If a layer's backward pass cannot be split, all of it is in the first part.
        static_bytes: per layer: weights, gradients, optimizer state, buffers.
        activation_bytes, input_bytes: per layer and micro-batch, as in a :class:`MemoryModel`.
        deferred_bytes: per layer and micro-batch, held from the first part of a backward pass to the second.
        frozen_layers: number of leading layers without trainable parameters.
        checkpoint_interval: layers per checkpointed segment, 0 without checkpointing.
        first_layers: if groups of layers count as layers, the first layer of each, then the number of layers; ():
            partitions are of layers.
    """

    forward_seconds: tuple[float, ...]
    input_gradient_seconds: tuple[float, ...]
    weight_gradient_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    static_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    input_bytes: tuple[int, ...]
    deferred_bytes: tuple[int, ...]
    frozen_layers: int = 0
    checkpoint_interval: int = 0
    first_layers: tuple[int, ...] = ()

    def folded(self, groups: LayerGroups) -> LayerPasses:
        """Return the same layers, whose partitions are of ``groups``."""
        return replace(self, first_layers=tuple(groups.boundaries))

    @property
    def by_kind(self) -> tuple[tuple[float, ...], ...]:
        """Seconds per layer of each kind of pass, in the order of ``Kind``."""
        return (
            self.forward_seconds,
            self.input_gradient_seconds,
            self.weight_gradient_seconds,
            self.backward_seconds,
        )

    @property
    def least_seconds(self) -> tuple[float, ...]:
        """Per layer, the least seconds of a micro-batch, with the backward pass in one part or two, none if frozen."""
        whole = (
            min(backward, first + second) if layer >= self.frozen_layers else 0.0
            for layer, (first, second, backward) in enumerate(zip(*self.by_kind[1:]))
        )
        return tuple(forward + backward for forward, backward in zip(self.forward_seconds, whole))

    def costs(self, placement: Placement, speeds: Sequence[float], link_seconds: float = 0.0) -> PassCosts:
        """Sum the seconds of passes per chunk.

        Args:
            speeds: per stage.
            link_seconds: of a message between stages.
        """
        chunks, owners = self._chunks(placement.boundaries), placement.owners
        goes_back = [stop > self.frozen_layers for _, stop in chunks]
        forward, *backward = (
            [math.fsum(seconds[start:stop]) / speeds[owner] for (start, stop), owner in zip(chunks, owners)]
            for seconds in self.by_kind
        )
        first, second, whole = (tuple(value * back for value, back in zip(part, goes_back)) for part in backward)
        links = (link_seconds,) * (len(owners) - 1)
        return PassCosts(owners, tuple(forward), first, second, whole, links, goes_back.count(False))

    def seconds_of_many(self, partitions: Partitions, owners: Sequence[int], speeds: Sequence[float]) -> list[Numbers]:
        """Sum the seconds of each kind of pass per chunk under many partitions, ``[num_chunks, how many]``."""
        partitions = self._in_layers(partitions)
        divisor = np.asarray(speeds)[list(owners), None]
        forward, *backward = (sums_of_many(seconds, partitions) / divisor for seconds in self.by_kind)
        return [forward, *(seconds * (partitions[1:] > self.frozen_layers) for seconds in backward)]

    def links_of_many(self, partitions: Partitions, owners: Sequence[int], link_seconds: float) -> list[Numbers]:
        """Return, per boundary of chunks, the seconds of a message under many partitions; none from frozen chunks."""
        trained = self._in_layers(partitions)[1:] > self.frozen_layers
        return [
            (link_seconds if here != there else 0.0) * back for here, there, back in zip(owners, owners[1:], trained)
        ]

    def bytes_of_many(self, partitions: Partitions) -> tuple[Numbers, Numbers]:
        """Sum the activation bytes and the static bytes per chunk under many partitions, ``[num_chunks, how many]``."""
        partitions = self._in_layers(partitions)
        return sums_of_many(self.activation_bytes, partitions), sums_of_many(self.static_bytes, partitions)

    def sizes(self, placement: Placement) -> PassBytes:
        """Sum the bytes of passes per chunk."""
        activations, held, recomputed, split_recomputed = [], [], [], []
        for start, stop in self._chunks(placement.boundaries):
            kept = kept_bytes(self.activation_bytes[start:stop], self.input_bytes[start:stop], self.checkpoint_interval)
            deferred = self.deferred_bytes[start:stop]
            with_held = (size + sum(deferred[end:]) for end, size in kept.segments)
            activations.append(kept.per_micro_batch)
            held.append(sum(deferred))
            recomputed.append(kept.recomputed)
            split_recomputed.append(max(with_held, default=0))
        return PassBytes(tuple(activations), tuple(held), tuple(recomputed), tuple(split_recomputed))

    def sizes_with_messages(self, placement: Placement, standing: int) -> PassBytes:
        """Sum the bytes of passes per chunk and of messages between stages, which no limit of passes counts.

        Args:
            standing: number of messages per boundary and direction with buffers all the time.
        """
        chunks, owners = self._chunks(placement.boundaries), placement.owners
        arriving = [
            self.input_bytes[start] if here != there else 0
            for (start, _), here, there in zip(chunks[1:], owners, owners[1:])
        ]
        standing_bytes = tuple(standing * sum(pair) for pair in itertools.pairwise([0, *arriving, 0]))
        return replace(self.sizes(placement), standing_bytes=standing_bytes)

    def static_of_stages(self, placement: Placement) -> list[int]:
        """Sum the static bytes per stage."""
        sums = [0] * placement.num_stages
        for owner, (start, stop) in zip(placement.owners, self._chunks(placement.boundaries)):
            sums[owner] += sum(self.static_bytes[start:stop])
        return sums

    def _chunks(self, boundaries: Sequence[int]) -> list[tuple[int, int]]:
        """Return the layers ``(start, stop)`` of each chunk."""
        return list(itertools.pairwise(self._in_layers(np.asarray(boundaries)).tolist()))

    def _in_layers(self, partitions: Partitions) -> Partitions:
        return np.asarray(self.first_layers)[partitions] if self.first_layers else partitions

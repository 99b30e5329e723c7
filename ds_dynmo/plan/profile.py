"""Measurements: the costs of each layer, and the placement under which they were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ds_dynmo.placement import Placement
from ds_dynmo.plan.reports import PrintsPartitions

__all__ = ["HeldBytes", "LayerCost", "Profile", "limit_minus_workspace"]

# What a record of a profile has of each layer: all that a simulation of a batch on other stages counts with.
_SECONDS = ("forward_seconds", "backward_seconds", "input_gradient_seconds", "weight_gradient_seconds")
_COUNTS = (
    *("parameters", "trainable_parameters", "static_bytes", "activation_bytes", "input_bytes", "deferred_bytes"),
    "workspace_bytes",
)


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of a layer on a rank between two batches, by their treatment when layers move.

    Attributes:
        separate: in separate tensors, freed when the layer has left: buffers, and without a flat optimizer also
            weights and optimizer state.
        flat: weights in the stage's flat buffer.
        shards: fp32 weights and moments in this rank's shards, all kinds of state together.
        largest_shard: the largest kind of state in ``shards``.
        gradients: buffers of summed gradients; freed before layers move and allocated again afterwards.
        staged: the most bytes held twice while the layer or its state travels, because small tensors are packed.
    """

    separate: int = 0
    flat: int = 0
    shards: int = 0
    largest_shard: int = 0
    gradients: int = 0
    staged: int = 0

    def __add__(self, other: HeldBytes) -> HeldBytes:
        return HeldBytes(
            self.separate + other.separate,
            self.flat + other.flat,
            self.shards + other.shards,
            self.largest_shard + other.largest_shard,
            self.gradients + other.gradients,
            self.staged + other.staged,
        )

    @property
    def total(self) -> int:
        """The bytes held while nothing moves."""
        return self.separate + self.flat + self.shards + self.gradients


@dataclass(frozen=True)
class LayerCost:
    """The measured costs of a layer (paper, section 3.1: the first iteration after each dynamism step).

    Attributes:
        forward_seconds, backward_seconds: per micro-batch; recomputation under activation checkpointing
            belongs to backward. Mean over micro-batches without the largest and the smallest eighth, of three or more
            at least one each; slowest data-parallel replica.
        parameters, trainable_parameters: numbers of elements, with and without frozen ones.
        static_bytes: weights, gradients, optimizer state and buffers while the layer trains: what each stage has to
            have room for.
        activation_bytes: per micro-batch, saved for the backward pass; for the last layer, with those of the loss.
        input_bytes: per micro-batch, of the layer's input, which a checkpointed segment keeps.
        load_signal: the fraction of its dense work that the layer reports; None: it does not report any.
        held: of the same tensors, the bytes that are held between two batches, by how they move: from these the peak
            of a move is computed. Gradients that are freed after a batch are in ``static_bytes`` alone.
        input_gradient_seconds, weight_gradient_seconds: per micro-batch, of a backward pass in two parts; 0: no pass
            was split. Their sum is usually more than ``backward_seconds``.
        deferred_bytes: per micro-batch, held from the first part to the second.
        first_use: the first layer with the same parameters: itself unless it is tied; None: a plain function.
        output_bytes: per micro-batch, of the layer's output.
        workspace_bytes: that the layer reports to need only while it runs.
    """

    forward_seconds: float
    backward_seconds: float
    parameters: int
    trainable_parameters: int
    static_bytes: int
    activation_bytes: int
    input_bytes: int
    load_signal: float | None = None
    held: HeldBytes = HeldBytes()
    first_use: int | None = None
    input_gradient_seconds: float = 0.0
    weight_gradient_seconds: float = 0.0
    deferred_bytes: int = 0
    output_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward together, per micro-batch."""
        return self.forward_seconds + self.backward_seconds


def limit_minus_workspace(limit_bytes: int, layers: Sequence[LayerCost]) -> int:
    """Return a rank's limit minus the largest workspace of any layer: one layer runs at a time, on any stage."""
    return max(0, limit_bytes - max((layer.workspace_bytes for layer in layers), default=0))


@dataclass(frozen=True, repr=False)
class Profile(PrintsPartitions):
    """One measurement of the whole pipeline, the same on every rank.

    Attributes:
        step: ``global_steps`` after the last profiled batch.
        placement: under which it was measured; after a re-packing, the new one.
        layers: one :class:`LayerCost` per layer of the model.
        micro_batches: micro-batches per batch.
        batch_seconds: wall-clock seconds of a batch, median of the latest since layers moved or changed, slowest rank.
        link_seconds: of a message between stages, measured alone, the slowest; 0.0 if no order depends on it.
    """

    step: int
    placement: Placement
    layers: tuple[LayerCost, ...]
    micro_batches: int
    batch_seconds: float
    link_seconds: float = 0.0

    @property
    def partition(self) -> tuple[int, ...]:
        """The boundaries of :attr:`placement`."""
        return self.placement.boundaries

    def costs(self, balance_by: Literal["time", "parameters"]) -> list[float]:
        """Return the layers' costs for a balancer: seconds per micro-batch, or trainable parameters."""
        if balance_by == "time":
            return [layer.seconds for layer in self.layers]
        return [float(layer.trainable_parameters) for layer in self.layers]

    @property
    def bubble_ratio(self) -> float:
        """The fraction of ``num_stages`` x ``batch_seconds`` in which no layer computed."""
        busy_seconds = self.micro_batches * math.fsum(self.costs("time")) / self.placement.num_stages
        return max(0.0, 1.0 - busy_seconds / self.batch_seconds) if self.batch_seconds else 0.0

    def as_record(self) -> dict[str, Any]:
        """Return a dict for one JSON line: what layers cost, as lists."""
        return {
            "kind": "profile",
            "step": self.step,
            **self.placement.as_record("partition"),
            "micro_batches": self.micro_batches,
            "batch_seconds": self.batch_seconds,
            "link_seconds": self.link_seconds,
            **{name: [getattr(layer, name) for layer in self.layers] for name in (*_SECONDS, *_COUNTS)},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Profile:
        """Read a record of :meth:`as_record`.

        Raises:
            ValueError, TypeError, LookupError: the record is invalid.
        """
        placement = Placement.of(record["partition"], record.get("partition_owners"))
        measured: dict[str, list[Any]] = {name: list(map(float, record[name])) for name in _SECONDS}
        measured |= {name: list(map(int, record[name])) for name in _COUNTS}
        for name, values in measured.items():
            if not all(value >= 0 for value in values) or math.fsum(values) == math.inf:
                raise ValueError(f"layers were measured to have {name} {values}")
        costs = zip(*measured.values(), strict=True)
        layers = tuple(LayerCost(**dict(zip(measured, cost))) for cost in costs)
        if len(layers) != placement.num_layers:
            raise ValueError(f"{len(layers)} layers were measured, the partition {placement} has another number")
        micro_batches, batch_seconds = int(record["micro_batches"]), float(record["batch_seconds"])
        link_seconds = float(record.get("link_seconds", 0.0))
        return cls(int(record["step"]), placement, layers, micro_batches, batch_seconds, link_seconds)

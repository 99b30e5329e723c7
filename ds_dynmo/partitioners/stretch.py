"""The data of a stage of the diffusion balancer: consecutive layers with costs and bytes, and the stage's room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ds_dynmo.partitioners.memory import StageMemory, resident_bytes

__all__ = ["LayerDemand", "Room", "Stretch"]


class LayerDemand(NamedTuple):
    """The cost of a layer or a group of layers, and its bytes if memory is limited.

    ``inner`` holds the activation and input bytes of each layer of a group, under activation checkpointing.
    """

    cost: float
    static_bytes: float = 0.0
    activation_bytes: float = 0.0
    input_bytes: float = 0.0
    inner: tuple[float, ...] = ()


class Room(NamedTuple):
    """The memory limit and the speed of one stage.

    Attributes:
        limit_bytes: ``inf``: no limit.
        in_flight: micro-batches that the stage holds at its peak.
        checkpoint_interval: layers per checkpointed segment, 0 without checkpointing.
        speed: a layer takes its cost over the speed.
    """

    limit_bytes: float
    in_flight: int
    checkpoint_interval: int
    speed: float

    @classmethod
    def of(cls, memory: StageMemory | None, speed: float) -> Room:
        """Build the room of a stage from its ``memory`` and ``speed``."""
        if memory is None:
            return cls(math.inf, 1, 0, speed)
        return cls(float(memory.limit), memory.in_flight, memory.checkpoint_interval, speed)


@dataclass(frozen=True)
class Stretch:
    """The layers ``[start, stop)``, numbered as in the model."""

    start: int
    demands: Sequence[LayerDemand]

    @property
    def stop(self) -> int:
        """The number of the last layer, plus one."""
        return self.start + len(self.demands)

    @cached_property
    def costs(self) -> Sequence[float]:
        """The cost of each layer."""
        return [demand.cost for demand in self.demands]

    @classmethod
    def of(cls, start: int, costs: Sequence[float], memory: StageMemory | None) -> Stretch:
        """Build the stretch of a stage's layers, the first of which is ``start``."""
        if memory is None:
            return cls(start, [LayerDemand(float(cost)) for cost in costs])
        layers = zip(costs, memory.static_bytes, memory.activation_bytes, memory.input_bytes)
        demands = [LayerDemand(float(cost), float(a), float(b), float(c)) for cost, a, b, c in layers]
        if memory.checkpoint_interval:  # segments may start within a group
            for place, group in enumerate(memory.inner_bytes):
                if len(group) > 1:
                    inner = tuple(float(value) for layer in group for value in layer)
                    demands[place] = demands[place]._replace(inner=inner)
        return cls(start, demands)

    def load(self, room: Room, start: int, stop: int) -> float:
        """Compute the load of layers ``[start, stop)`` on a stage with ``room``; it never falls as layers are added."""
        return math.fsum(self.costs[start - self.start : stop - self.start]) / room.speed

    def fits(self, room: Room, start: int, stop: int) -> bool:
        """Return whether layers ``[start, stop)`` fit on a stage with ``room``."""
        if room.limit_bytes == math.inf:
            return True
        demands = self.demands[start - self.start : stop - self.start]
        static, activation, inputs = _bytes_of(demands)
        needed = resident_bytes(static, activation, inputs, room.in_flight, room.checkpoint_interval)
        return needed <= room.limit_bytes

    def part(self, start: int, stop: int) -> Stretch:
        """Cut out layers ``[start, stop)``; empty if ``stop`` is not beyond ``start``."""
        return Stretch(start, self.demands[start - self.start : max(stop, start) - self.start])

    def joined(self, other: Stretch) -> Stretch:
        """Join this stretch with ``other``, which starts where this one ends."""
        assert other.start == self.stop, (self.stop, other.start)
        return Stretch(self.start, [*self.demands, *other.demands])


def _bytes_of(demands: Sequence[LayerDemand]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return the static bytes of each entry, and the activation and input bytes of each layer, as whole floats."""
    _, static, activation, inputs, inner = zip(*demands)
    if not any(inner):
        return static, activation, inputs
    layers = [value for demand in demands for value in demand.inner or (demand.activation_bytes, demand.input_bytes)]
    return static, layers[::2], layers[1::2]

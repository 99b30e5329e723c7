"""Values that pass between measuring, deciding and migrating. All are frozen; all validate themselves once.

Layers are numbered 0 .. num_layers - 1 for life. A *partition* is a list of ``num_stages + 1`` increasing
ints, e.g. ``[0, 3, 8]``: stage ``s`` owns layers ``[p[s], p[s + 1])`` (DeepSpeed's ``parts``).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ds_dynmo.errors import PartitionError

__all__ = [
    "HeldBytes",
    "LayerCost",
    "LayerMove",
    "MeasuredReport",
    "MigrationPlan",
    "Profile",
    "RebalanceReport",
    "RepackReport",
    "check_partition",
    "stage_of",
]


def check_partition(
    partition: Sequence[int], num_layers: int, num_stages: int, *, empty: Container[int] = ()
) -> tuple[int, ...]:
    """``partition`` as a tuple of plain ints.

    Args:
        empty: stages that own no layer: they are being released, or were just taken back.

    Raises:
        PartitionError: not ``num_stages + 1`` ints, not strictly increasing (a stage would be empty),
            or not running from 0 to ``num_layers``.
    """
    try:
        bounds = tuple(operator.index(bound) for bound in partition)
    except TypeError as error:
        raise PartitionError(f"a partition is a list of ints, got {partition!r}") from error
    if len(bounds) != num_stages + 1:
        raise PartitionError(
            f"partition {list(bounds)} has {len(bounds)} boundaries, {num_stages} stages need {num_stages + 1}"
        )
    if bounds[0] != 0 or bounds[-1] != num_layers:
        raise PartitionError(
            f"partition {list(bounds)} runs from {bounds[0]} to {bounds[-1]}, "
            f"the model's {num_layers} layers need 0 to {num_layers}"
        )
    for stage, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        if stage in empty and stop == start:
            continue
        if stop <= start:
            raise PartitionError(
                f"partition {list(bounds)} is not strictly increasing: stage {stage} would own no layer "
                f"({start} to {stop})"
            )
    return bounds


def stage_of(layer: int, partition: Sequence[int]) -> int:
    """The stage that owns ``layer``."""
    for stage in range(len(partition) - 1):
        if partition[stage] <= layer < partition[stage + 1]:
            return stage
    raise PartitionError(f"layer {layer} is in no stage of partition {list(partition)}")


@dataclass(frozen=True)
class HeldBytes:
    """What a layer holds on a rank between two batches, by what becomes of it when layers move.

    Attributes:
        own: in memory of its own: it is freed where the layer has left. Buffers; weights and optimizer state too,
            unless the optimizer keeps them flat.
        flat: of its weights in the stage's flat buffer.
        shards: of its fp32 weights and moments in this rank's shards, all kinds of state together.
        largest_shard: of the kind that has most.
        gradients: of buffers that its gradients are summed in, freed before layers move and made anew afterwards.
        staged: held once more, at most, while the layer or its state travels: small tensors are packed together.
    """

    own: int = 0
    flat: int = 0
    shards: int = 0
    largest_shard: int = 0
    gradients: int = 0
    staged: int = 0

    def __add__(self, other: HeldBytes) -> HeldBytes:
        return HeldBytes(
            self.own + other.own,
            self.flat + other.flat,
            self.shards + other.shards,
            self.largest_shard + other.largest_shard,
            self.gradients + other.gradients,
            self.staged + other.staged,
        )

    @property
    def total(self) -> int:
        """All that is held while nothing moves."""
        return self.own + self.flat + self.shards + self.gradients


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs, measured (paper, section 3.1: the first iteration after each dynamism step).

    Attributes:
        forward_seconds, backward_seconds: per micro-batch; recomputation under activation checkpointing
            belongs to backward. Median over micro-batches, slowest data-parallel replica.
        parameters, trainable_parameters: elements, frozen ones included and excluded.
        static_bytes: weights, gradients, optimizer state and buffers.
        activation_bytes: per micro-batch, what the layer saves for its backward pass.
        input_bytes: per micro-batch, the layer's input, what a checkpointed segment keeps.
        load_signal: the share of its dense work that the layer says it does now, None if it does not say.
        held: between two batches, by what becomes of it when layers move.
        first_use: the first layer that uses the same parameters: itself, unless it is tied; None: a function.
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

    @property
    def seconds(self) -> float:
        """Forward and backward together, per micro-batch."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Profile:
    """One measurement of the whole pipeline, the same on every rank.

    Attributes:
        step: ``global_steps`` after the last profiled batch.
        partition: the partition under which it was measured; after a re-packing, the one in force then.
        layers: one :class:`LayerCost` per layer of the model.
        micro_batches: micro-batches per batch.
        batch_seconds: wall-clock seconds of a batch, median of the latest since layers moved or changed, slowest rank.
    """

    step: int
    partition: tuple[int, ...]
    layers: tuple[LayerCost, ...]
    micro_batches: int
    batch_seconds: float

    def costs(self, balance_by: Literal["time", "parameters"]) -> list[float]:
        """Per-layer costs for a balancer: seconds per micro-batch, or trainable parameters."""
        if balance_by == "time":
            return [layer.seconds for layer in self.layers]
        return [float(layer.trainable_parameters) for layer in self.layers]

    def as_record(self) -> dict[str, Any]:
        """A dict for one JSON line: of the layers, their seconds."""
        return {
            "kind": "profile",
            "step": self.step,
            "partition": self.partition,
            "micro_batches": self.micro_batches,
            "batch_seconds": self.batch_seconds,
            "forward_seconds": [layer.forward_seconds for layer in self.layers],
            "backward_seconds": [layer.backward_seconds for layer in self.layers],
        }


@dataclass(frozen=True)
class LayerMove:
    """One layer's way from the stage that owns it to the stage that will."""

    layer: int
    source: int
    destination: int


@dataclass(frozen=True)
class MigrationPlan:
    """Every layer that changes stage between two partitions; ranks compare :attr:`digest` before a byte moves.

    Attributes:
        leaving: stages that will own no layer, because they are about to be released.
        joining: stages that own none yet, because they were just taken back.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]
    moves: tuple[LayerMove, ...]
    leaving: frozenset[int] = frozenset()
    joining: frozenset[int] = frozenset()

    @classmethod
    def between(
        cls, old: Sequence[int], new: Sequence[int], *, leaving: Iterable[int] = (), joining: Iterable[int] = ()
    ) -> MigrationPlan:
        """The plan that leads from partition ``old`` to ``new`` (same layers, same number of stages)."""
        num_layers, num_stages = old[-1], len(old) - 1
        none_left, none_yet = frozenset(leaving), frozenset(joining)
        return cls(
            check_partition(old, num_layers, num_stages, empty=none_yet),
            check_partition(new, num_layers, num_stages, empty=none_left),
            tuple(_moves(old, new)),
            none_left,
            none_yet,
        )

    def __post_init__(self) -> None:
        num_layers, num_stages = self.old[-1], len(self.old) - 1
        check_partition(self.old, num_layers, num_stages, empty=self.joining)
        check_partition(self.new, num_layers, num_stages, empty=self.leaving)
        if list(self.moves) != list(_moves(self.old, self.new)):
            raise PartitionError(f"moves {self.moves} do not lead from {self.old} to {self.new}")

    @property
    def digest(self) -> int:
        """A 62-bit hash, equal on ranks that are about to do the same."""
        text = repr((self.old, self.new, tuple((m.layer, m.source, m.destination) for m in self.moves)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def _moves(old: Sequence[int], new: Sequence[int]) -> Iterator[LayerMove]:
    for layer in range(old[-1]):
        source, destination = stage_of(layer, old), stage_of(layer, new)
        if source != destination:
            yield LayerMove(layer, source, destination)


@dataclass(frozen=True)
class RebalanceReport:
    """What one decision did. Seconds are wall-clock on the reporting rank.

    Attributes:
        step: ``global_steps`` at the decision.
        reason: what asked for it: "interval", "initial", "explicit", "by hand" or what ``model_changed`` was told.
        old_partition, new_partition: equal if no layer moved.
        bottleneck_seconds_before, bottleneck_seconds_after: predicted, per micro-batch, of the slowest stage;
            None without a profile (an explicit partition before the first profiled batch).
        imbalance_before, imbalance_after: predicted, the paper's equation 2.
        layers_moved: in the whole pipeline (one data-parallel replica).
        bytes_moved: in the whole pipeline (one data-parallel replica), weights, optimizer state and the rest.
        profile_seconds: extra time of gathering the profile; decide_seconds, migrate_seconds: likewise.
        load_signals: per layer, None where a layer does not report one.
        iteration_seconds_before, iteration_seconds_after: predicted by simulating the schedule; what is not in layers
            (the optimizer's step, messages) is not counted.
        verdict: why layers moved or stayed.
    """

    step: int
    reason: str
    old_partition: tuple[int, ...]
    new_partition: tuple[int, ...]
    bottleneck_seconds_before: float | None
    bottleneck_seconds_after: float | None
    imbalance_before: float | None
    imbalance_after: float | None
    layers_moved: int
    bytes_moved: int
    profile_seconds: float
    decide_seconds: float
    migrate_seconds: float
    load_signals: tuple[float | None, ...] = ()
    iteration_seconds_before: float | None = None
    iteration_seconds_after: float | None = None
    verdict: str = ""

    @property
    def moved(self) -> bool:
        """Did any layer change stage?"""
        return self.old_partition != self.new_partition

    def as_record(self) -> dict[str, Any]:
        """A dict for one JSON line."""
        return {"kind": "rebalance", **asdict(self)}


@dataclass(frozen=True)
class MeasuredReport:
    """What was measured under a partition, from a profile: the record that follows a rebalance's prediction.

    Attributes:
        step: ``global_steps`` after the last profiled batch.
        rebalance_step: the step of the rebalance whose outcome this is, None for the partition as built.
        bottleneck_seconds: per micro-batch, of the slowest stage; imbalance: the paper's equation 2.
        batch_seconds: wall-clock seconds of one batch.
        bubble_ratio: the share of ``num_stages`` x ``batch_seconds`` in which no layer was at work.
    """

    step: int
    rebalance_step: int | None
    partition: tuple[int, ...]
    bottleneck_seconds: float
    imbalance: float
    batch_seconds: float
    bubble_ratio: float

    def as_record(self) -> dict[str, Any]:
        """A dict for one JSON line."""
        return {"kind": "measured", **asdict(self)}


@dataclass(frozen=True)
class RepackReport:
    """What one re-packing did, or why it did nothing. Seconds are wall-clock on the reporting rank.

    Attributes:
        step: ``global_steps`` at the decision.
        reason: what asked for it.
        old_partition, new_partition: over as many stages as there were, and as there are.
        released_ranks, recalled_ranks: of the launch, whose accelerators were given back or taken again.
        iteration_seconds_before, iteration_seconds_after: predicted by simulating the schedule; None without a profile.
        layers_moved, bytes_moved: in the whole pipeline (one data-parallel replica).
        decide_seconds, migrate_seconds: as in a rebalance; ``world_seconds``: to go on in a world of another size.
        verdict: why ranks were released, taken back or neither.
        copies: how many times the launch's replicas are there afterwards: more than once where freed ranks are
            further replicas.
    """

    step: int
    reason: str
    old_partition: tuple[int, ...]
    new_partition: tuple[int, ...]
    released_ranks: tuple[int, ...]
    recalled_ranks: tuple[int, ...]
    iteration_seconds_before: float | None
    iteration_seconds_after: float | None
    layers_moved: int
    bytes_moved: int
    decide_seconds: float
    migrate_seconds: float
    world_seconds: float
    verdict: str = ""
    copies: int = 1

    @property
    def old_stages(self) -> int:
        """How many stages there were."""
        return len(self.old_partition) - 1

    @property
    def new_stages(self) -> int:
        """How many stages there are."""
        return len(self.new_partition) - 1

    def as_record(self) -> dict[str, Any]:
        """A dict for one JSON line."""
        return {"kind": "repack", **asdict(self)}

"""Groups of layers that are kept on one stage (``keep_together``), which no partition cuts.

A balancer treats each group as one layer, whose costs and bytes are sums over its layers. So the best partition of the
groups is the best partition of the layers that cuts no group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ds_dynmo.errors import ConfigError, PartitionError, counted
from ds_dynmo.plan import check_partition

__all__ = ["TYPE_RULE", "KeepRule", "LayerGroups"]

KeepRule = tuple[int, ...] | str  # a run of layer numbers, or TYPE_RULE and a regular expression
TYPE_RULE = "type:"


@dataclass(frozen=True)
class LayerGroups:
    """The groups of one model.

    Attributes:
        boundaries: group ``g`` is layers ``[boundaries[g], boundaries[g + 1])``; a partition may cut at these.
        reasons: the layers with which no stage may start, each with the reason.

    >>> groups = LayerGroups.of([(1, 2)], ["Embedding", "Norm", "Head"])
    >>> groups.boundaries
    (0, 1, 3)
    >>> groups.fold([5, 1, 2])
    [5, 3]
    """

    boundaries: tuple[int, ...]
    reasons: tuple[tuple[int, str], ...] = ()

    @classmethod
    def single(cls, num_layers: int) -> LayerGroups:
        """Build a group for every layer: any cut is allowed."""
        return cls(tuple(range(num_layers + 1)))

    @classmethod
    def of(cls, rules: Sequence[KeepRule], names: Sequence[str]) -> LayerGroups:
        """Apply the rules of ``keep_together`` to a model.

        Args:
            rules: runs of layer numbers, inside which there is no cut; and ``"type:REGEX"``: no cut directly before a
                layer whose name matches, searched anywhere in it, ignoring case, as DeepSpeed's ``type:`` does.
            names: per layer its class name (function name, for a plain function).

        Raises:
            ConfigError: a layer that the model does not have, or a pattern that no name matches.
        """
        reasons: dict[int, str] = {}
        for place, rule in enumerate(rules):
            for layer in _joined(place, rule, names):
                reasons.setdefault(
                    layer,
                    f"layers {layer - 1} ({names[layer - 1]}) and {layer} ({names[layer]}) stay together, "
                    f"dynmo.keep_together has {_shown(rule)}",
                )
        cuts = tuple(cut for cut in range(len(names) + 1) if cut not in reasons)
        return cls(cuts, tuple(sorted(reasons.items())))

    @property
    def num_layers(self) -> int:
        return self.boundaries[-1]

    @property
    def num_groups(self) -> int:
        """The number of groups, which is the largest number of stages."""
        return len(self.boundaries) - 1

    @property
    def single_layers(self) -> bool:
        """Whether every group is one layer."""
        return self.num_groups == self.num_layers

    def allows(self, partition: Sequence[int]) -> bool:
        """Return whether ``partition`` cuts no group."""
        return set(partition) <= set(self.boundaries)

    def check(self, partition: Sequence[int]) -> None:
        """Refuse a partition that cuts a group.

        Raises:
            PartitionError: with the cut, the two layers' class names and the rule.
        """
        forbidden = dict(self.reasons)
        for cut in partition:
            if cut in forbidden:
                raise PartitionError(f"partition {list(partition)} cuts before layer {cut}: {forbidden[cut]}")

    def shortage(self, num_chunks: int, name: str = "stage") -> str | None:
        """Return why there are too few groups for ``num_chunks`` stages or chunks; None if there are enough.

        Args:
            name: "chunk" where stages own several.
        """
        if num_chunks <= self.num_groups:
            return None
        chunks = counted(num_chunks, name)
        if self.single_layers:
            layers = counted(self.num_layers, "layer")
            return f"{layers} cannot fill {chunks}: every {name} owns at least one layer"
        return (
            f"dynmo.keep_together makes {self.num_groups} groups of the model's {self.num_layers} layers, which cannot "
            f"fill {chunks}: every {name} owns at least one group"
        )

    def fold(self, numbers: Sequence[float], start: int = 0) -> list[float]:
        """Sum ``numbers`` over the layers of each group: ints exactly, floats rounded once.

        Args:
            numbers: one per layer from ``start`` on, for whole groups.

        Raises:
            PartitionError: they start or end within a group.
        """
        cuts = [cut - start for cut in self.boundaries if start <= cut <= start + len(numbers)]
        if not cuts or cuts[0] != 0 or cuts[-1] != len(numbers):
            raise PartitionError(
                f"{len(numbers)} numbers from layer {start} on are not those of whole groups of a model of "
                f"{self.num_layers} layers"
            )
        return [_sum(numbers[low:high]) for low, high in pairwise(cuts)]

    def fold_ints(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Sum ``numbers`` over the layers of each group."""
        return tuple(sum(numbers[low:high]) for low, high in pairwise(self.boundaries))

    def fold_partition(self, partition: Sequence[int]) -> tuple[int, ...]:
        """Convert boundaries from layers to groups.

        Raises:
            PartitionError: it cuts a group.
        """
        self.check(partition)
        number = {cut: group for group, cut in enumerate(self.boundaries)}
        return tuple(number[cut] for cut in partition)

    def unfold_partition(self, partition: Sequence[int]) -> tuple[int, ...]:
        """Convert boundaries from groups to layers."""
        return tuple(self.boundaries[group] for group in partition)

    def nearest(self, partition: Sequence[int]) -> tuple[int, ...]:
        """Find the nearest partition that cuts no group: with the least sum of its boundaries' distances, in layers.

        >>> LayerGroups((0, 1, 2, 5, 6)).nearest([0, 3, 4, 6])
        (0, 2, 5, 6)

        Raises:
            PartitionError: ``partition`` is invalid, or has more stages than there are groups.
        """
        num_stages = len(partition) - 1
        wanted = check_partition(partition, self.num_layers, num_stages)
        if self.allows(wanted):
            return wanted
        if (problem := self.shortage(num_stages)) is not None:
            raise PartitionError(problem)
        # best[group]: the distance so far and the boundaries, the last of which is at this group
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
        for stage in range(1, num_stages):
            least: tuple[int, tuple[int, ...]] | None = None
            following = {}
            for group in range(stage, self.num_groups - (num_stages - stage) + 1):
                least = min(filter(None, (least, best.get(group - 1))), key=lambda reached: reached[0])
                cut = self.boundaries[group]
                following[group] = (least[0] + abs(cut - wanted[stage]), (*least[1], cut))
            best = following
        return (*min(best.values(), key=lambda reached: reached[0])[1], self.num_layers)


def _joined(place: int, rule: KeepRule, names: Sequence[str]) -> list[int]:
    """List the layers that are kept with the layer before them."""
    key = f"dynmo.keep_together[{place}] = {_shown(rule)}"
    if isinstance(rule, str):
        pattern = rule.removeprefix(TYPE_RULE)
        matching = [layer for layer, name in enumerate(names) if re.search(pattern, name, re.IGNORECASE)]
        if not matching:
            raise ConfigError(f"{key}: no layer's name matches {pattern!r}; names are {sorted(set(names))}")
        return [layer for layer in matching if layer > 0]
    if rule[-1] >= len(names):
        raise ConfigError(f"{key}: there is no layer {rule[-1]}, the model has layers 0 to {len(names) - 1}")
    return list(rule[1:])


def _shown(rule: KeepRule) -> str:
    return f'"{rule}"' if isinstance(rule, str) else str(list(rule))


def _sum(numbers: Sequence[float]) -> float:
    if len(numbers) == 1:
        return numbers[0]
    return sum(numbers) if all(isinstance(number, int) for number in numbers) else math.fsum(numbers)

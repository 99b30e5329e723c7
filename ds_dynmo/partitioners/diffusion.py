"""The paper's diffusion-based balancer with all stages in one process: messages are delivered in memory.

The algorithm of a stage is in :mod:`ds_dynmo.partitioners.diffusion_node`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners.balanced import uniform
from ds_dynmo.partitioners.checks import check_costs, check_num_chunks, check_num_stages, check_speeds
from ds_dynmo.partitioners.diffusion_node import DiffusionNode
from ds_dynmo.partitioners.diffusion_pairs import diffusion_of_pairs
from ds_dynmo.partitioners.memory import MemoryModel, check_fits
from ds_dynmo.partitioners.metrics import loads, potential
from ds_dynmo.partitioners.registry import register
from ds_dynmo.placement import Placement, check_partition

__all__ = ["DiffusionTrace", "diffusion", "diffusion_trace"]


@dataclass(frozen=True)
class DiffusionTrace:
    """One run of the balancer, round by round.

    Attributes:
        partitions: before the first round and after each round: ``rounds + 1`` of them.
        potentials: the paper's phi of each partition. It falls with every step between neighbours of equal speed. The
            sweeps before those steps lower the bottleneck, which may raise phi.
    """

    partitions: tuple[tuple[int, ...], ...]
    potentials: tuple[float, ...]

    @property
    def rounds(self) -> int:
        """The number of message hops until every stage was done."""
        return len(self.partitions) - 1

    @property
    def partition(self) -> list[int]:
        """The final partition."""
        return list(self.partitions[-1])


@register("diffusion")
def diffusion(
    costs: Sequence[float],
    num_stages: int,
    start: Sequence[int] | None = None,
    *,
    memory: MemoryModel | None = None,
    speeds: Sequence[float] | None = None,
    owners: Sequence[int] | None = None,
) -> list[int]:
    """Balance by messages between neighbouring stages only (Lemma 2).

    Without ``memory`` and with equal speeds the bottleneck is the smallest possible one, up to rounding of a stage's
    load. With ``memory`` every stage fits. With ``memory`` or different speeds the bottleneck is at most that of
    the start, if the start fits.

    Args:
        costs: per layer, finite and >= 0.
        start: the current partition; None: uniform.
        speeds: per stage; the load of a stage is the costs of its layers over its speed; None: all are equal.
        owners: per chunk, the stage that holds it; None: a chain. With two chunks per stage see
            :func:`diffusion_of_pairs`.

    >>> diffusion([4, 9, 7, 5], 3)
    [0, 1, 2, 4]

    Raises:
        PartitionError: invalid costs or speeds, more stages than layers, or a start that does not fit and from which no
            partition that fits is found.
    """
    if owners is None or len(owners) == num_stages:
        return diffusion_trace(costs, num_stages, start, memory=memory, speeds=speeds).partition
    checked = check_costs(costs)
    check_num_chunks(len(checked), len(owners))
    if memory is not None:
        memory.check_shape(len(checked), num_stages)
    boundaries = check_partition(start or uniform(len(checked), len(owners)), len(checked), len(owners))
    same = check_speeds((1.0,) * num_stages if speeds is None else speeds, num_stages)
    return diffusion_of_pairs(checked, Placement.of(boundaries, owners), same, memory)


def diffusion_trace(
    costs: Sequence[float],
    num_stages: int,
    start: Sequence[int] | None = None,
    *,
    memory: MemoryModel | None = None,
    speeds: Sequence[float] | None = None,
) -> DiffusionTrace:
    """Run :func:`diffusion` and record every round."""
    checked, present = _checked(costs, num_stages, start, memory)
    nodes = _nodes(checked, present, memory, speeds)
    partitions = [present]
    potentials = [potential(loads(checked, present, speeds))]
    while not nodes[0].done:
        _deliver(nodes)
        partition = _boundaries(nodes)
        moved = partition != partitions[-1]
        potentials.append(potential(loads(checked, partition, speeds)) if moved else potentials[-1])
        partitions.append(partition)
    _check_fit(nodes[0], present, memory)
    return DiffusionTrace(tuple(partitions), tuple(potentials))


def _checked(
    costs: Sequence[float], num_stages: int, start: Sequence[int] | None, memory: MemoryModel | None
) -> tuple[list[float], tuple[int, ...]]:
    checked = check_costs(costs)
    check_num_stages(len(checked), num_stages)
    if memory is not None:
        memory.check_shape(len(checked), num_stages)
    present = uniform(len(checked), num_stages) if start is None else start
    return checked, check_partition(present, len(checked), num_stages)


def _nodes(
    costs: Sequence[float], partition: Sequence[int], memory: MemoryModel | None, speeds: Sequence[float] | None
) -> list[DiffusionNode]:
    num_stages = len(partition) - 1
    checked = check_speeds((1.0,) * num_stages if speeds is None else speeds, num_stages)
    nodes = []
    for stage, (start, stop, speed) in enumerate(zip(partition, partition[1:], checked)):
        stage_memory = None if memory is None else memory.of_stage(stage, start, stop)
        nodes.append(DiffusionNode(stage, num_stages, start, costs[start:stop], memory=stage_memory, speed=speed))
    return nodes


def _deliver(nodes: list[DiffusionNode]) -> None:
    """Deliver the messages of one round."""
    sent = [node.messages() for node in nodes]
    no_messages = (None, None)
    for node, before, after in zip(nodes, [no_messages, *sent], [*sent[1:], no_messages]):
        node.receive(before[1], after[0])


def _boundaries(nodes: list[DiffusionNode]) -> tuple[int, ...]:
    return (*(node.extent[0] for node in nodes), nodes[-1].extent[1])


def _check_fit(node: DiffusionNode, start: tuple[int, ...], memory: MemoryModel | None) -> None:
    if not node.fits:
        assert memory is not None
        try:
            check_fits(Placement.chain(start), memory)
        except PartitionError as error:
            raise PartitionError(f"neighbours passing layers on found no partition that fits: {error}") from error

"""Diffusion as a decentralised algorithm: pairs of neighbouring stages agree on their boundaries.

:class:`ds_dynmo.partitioners.DiffusionNode` is the algorithm of one stage. The pure ``diffusion`` runs it in memory for
all stages; here stages exchange point-to-point messages. So both find the same partition. A stage uses the costs of its
layers only. Afterwards one reduction of a number per stage gives every rank the boundaries, which DeepSpeed's module
needs on all ranks.

The engine as a whole still uses collectives. Before every decision it reduces the profile, a few kilobytes, over the
world, because it estimates noise and stage speeds over all layers and evaluates every proposal by the simulated
iteration of all stages. ``engine.profile`` and the reports contain all layers too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.errors import PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import DiffusionNode, MemoryModel
from ds_dynmo.placement import Placement


def decide_among_neighbours(
    costs: Sequence[float],
    placement: Placement,
    memory: MemoryModel | None,
    stage: int,
    comm: Communicator,
    *,
    speed: float = 1.0,
    groups: LayerGroups | None = None,
) -> Placement:
    """Find the placement on which the stages agree, pair by pair. Collective over the pipeline.

    Args:
        costs: of this stage's layers only, on a stage of speed 1; the same on every data-parallel replica.
        placement: the present one, a chain; used for this stage's layers only.
        memory: used for this stage's layers and limit only.
        speed: of this stage.
        groups: layers that are kept together; None: none are.

    Raises:
        PartitionError: on every rank, if the stages find no partition that meets the memory limit.
    """
    groups = groups or LayerGroups.single(placement.num_layers)
    run = Placement.chain(groups.fold_partition(placement.boundaries)).run_of(stage)  # numbers of groups
    stage_memory = memory.folded(groups).of_stage(stage, run.start, run.stop) if memory is not None else None
    folded = groups.fold(costs, placement.run_of(stage).start)
    node = DiffusionNode(stage, placement.num_stages, run.start, folded, memory=stage_memory, speed=speed)
    while not node.done:
        exchange_round(node, comm)
    if not node.fits:
        raise PartitionError("decentralized diffusion found no partition that meets the memory limit")
    stops = torch.zeros(placement.num_stages, dtype=torch.float64, device="cpu")
    _, stops[stage] = node.extent
    return placement.at(groups.unfold_partition([0, *map(int, comm.max_over_world(stops).tolist())]))


def exchange_round(node: DiffusionNode, comm: Communicator) -> None:
    """Exchange one round of messages between this stage and its neighbours."""
    left, right = node.stage - 1, node.stage + 1
    to_left, to_right = node.messages()
    expects_left, expects_right = node.expects
    outgoing = {stage: message for stage, message in ((left, to_left), (right, to_right)) if message is not None}
    sources = [stage for stage, expected in ((left, expects_left), (right, expects_right)) if expected]
    received = comm.p2p.exchange_lists(outgoing, sources)
    node.receive(received.get(left), received.get(right))

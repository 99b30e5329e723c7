"""Copies of the stages of the launch's data-parallel replicas on extra ones: layers with their optimizer state.

All replicas of a stage are equal. A rank receives its copy from the rank that reads the same replica's data.
:meth:`OptimizerState.scatter_shards` splits sharded optimizer state.
"""

from __future__ import annotations

import pickle

from ds_dynmo.engine.move.arriving import ArrivingLayer
from ds_dynmo.engine.move.migration_context import MigrationContext
from ds_dynmo.engine.state.layer_record import LayerRecord
from ds_dynmo.placement import Placement


def copy_stage(context: MigrationContext, placement: Placement, num_replicas: int) -> None:
    """Copy a stage to all replicas from number ``num_replicas`` on. Collective.

    Args:
        context: this rank's stage, which is empty on the new replicas.
        placement: of the layers of one pipeline.
    """
    replica = context.comm.here.replica
    has_layers = replica < num_replicas
    plan = context.state.plan_scatter_shards(placement, num_replicas)
    modules = context.layers.modules() if has_layers else {}
    packed = context.pack(modules)
    source = context.comm.rank_of(context.stage_id, replica % num_replicas)
    packed_headers = {index: layer.header for index, layer in packed.items()}
    if has_layers:
        copies = _ranks_of_copies(context, num_replicas)
        context.comm.p2p.exchange_bytes(dict.fromkeys(copies, pickle.dumps(packed_headers)), [])
    headers = packed_headers if has_layers else pickle.loads(context.comm.p2p.exchange_bytes({}, [source])[source])
    arrived: dict[int, LayerRecord] = {}
    for index, header in headers.items():
        if has_layers:
            context.comm.p2p.exchange(
                [(rank, flat) for rank in _ranks_of_copies(context, num_replicas) for flat in packed[index].tensors], []
            )
            continue
        arrival = ArrivingLayer(header)
        context.build(index, arrival)
        arrival.allocate(context.device, lambda position: None)
        context.load(index, arrival)
        context.comm.p2p.exchange([], [(source, flat) for flat in arrival.recv_buffers])
        arrived[index] = arrival.materialize()
    if not has_layers:
        modules = {index: layer.module for index, layer in arrived.items()}
        context.layers.rebuild(placement, context.stage_id, modules)
    context.rebuilt()
    context.state.scatter_shards(plan, context.layers.parameters(), arrived)
    context.layers.tie(context.comm.grid, context.comm.tied_group)
    context.comm.all_done()


def _ranks_of_copies(context: MigrationContext, num_replicas: int) -> list[int]:
    """List the ranks to which this one sends its layers."""
    replicas = range(context.comm.here.replica + num_replicas, context.comm.here.replicas, num_replicas)
    return [context.comm.rank_of(context.stage_id, replica) for replica in replicas]

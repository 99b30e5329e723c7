"""Fill the stages of further data-parallel replicas from those that the job had: layers with all that belongs to them.

Replicas of a stage are the same, so that a rank copies what the rank has that reads the same replica's data. Sharded
optimizer state goes its own way, :meth:`OptimizerState.share_out`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial

from ds_dynmo.engine.layer_state import ArrivingLayer, LayerContent
from ds_dynmo.engine.migration import Site, packed_layer


def copy_stage(site: Site, partition: Sequence[int], width: int) -> None:
    """Every replica from number ``width`` on gets the layers of one before. Collective.

    Args:
        site: this rank's stage; empty where it is of a replica to be filled.
        partition: of the stages.
    """
    replica = site.grid.get_data_parallel_id()
    has_them = replica < width
    plan = site.state.plan_share_out(partition, width)
    own = site.layers.modules() if has_them else {}
    packed = {index: packed_layer(site, index, module) for index, module in own.items()}
    source = site.grid.stage_to_global(site.stage, data=replica % width)
    mine = {index: layer.header for index, layer in packed.items()}
    if has_them:
        site.comm.exchange_bytes(dict.fromkeys(_copies(site, width), pickle.dumps(mine)), [])
    headers = mine if has_them else pickle.loads(site.comm.exchange_bytes({}, [source])[source])
    arrived: dict[int, LayerContent] = {}
    for index, header in headers.items():
        if has_them:
            site.comm.exchange([(rank, flat) for rank in _copies(site, width) for flat in packed[index].tensors], [])
            continue
        room = ArrivingLayer(header)
        room.bind(site.names, site.device)
        room.furnish(site.device, lambda position: None)
        site.comm.exchange([], [(source, flat) for flat in room.landing])
        arrived[index] = room.open(partial(site.layers.build, index, site.device))
    if not has_them:
        modules = {index: content.module for index, content in arrived.items()}
        site.layers.rebuild(partition, site.stage, modules)
    site.rebuilt()
    site.state.share_out(plan, site.layers.parameters(), arrived)
    site.layers.tie(site.grid, site.comm.tied_group)
    site.comm.all_done()


def _copies(site: Site, width: int) -> list[int]:
    """The ranks that copy this one."""
    replicas = range(site.grid.get_data_parallel_id() + width, site.grid.data_parallel_size, width)
    return [site.grid.stage_to_global(site.stage, data=replica) for replica in replicas]

"""Rebuild what DeepSpeed keeps about the ranks of a job, and builds only once, for other ranks.

Read in DeepSpeed 0.19.8, runtime/pipe/{module,topology,engine,p2p}.py, runtime/engine.py and utils/groups.py.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.utils import groups


def refit(engine: Any, topology: ProcessTopology, *, world_group: Any, rank: int) -> None:
    """Point an engine, its module, its grid and DeepSpeed's globals at a world of fewer stages. Collective.

    The grid is made anew in place: the engine, its optimizer, activation checkpointing and users hold it.

    Args:
        world_group: of all processes; ``rank``: this process's there.
    """
    _refit_module(engine.module, topology, world_group, rank)
    grid = engine.grid
    vars(grid).clear()
    type(grid).__init__(grid, topology=topology, process_group=world_group)
    engine.module.stage_id = grid.get_stage_id()
    _refit_globals(grid)
    _refit_engine(engine, grid)
    if engine.is_pipe_parallel:  # else there are no messages; it has the grid of the engine that was built last
        p2p.init_process_groups(grid)


def _refit_module(module: Any, topology: ProcessTopology, world_group: Any, rank: int) -> None:
    module.world_group = world_group
    module.global_rank, module.world_size = rank, topology.world_size()
    module._topo, module.num_stages = topology, topology.get_dim("pipe")


def _refit_globals(grid: Any) -> None:
    groups.mpu = grid  # which destroying a world resets
    if ds_checkpointing.mpu is not None:  # as its configure() does
        ds_checkpointing.mpu = grid
        ds_checkpointing.mp_rank = grid.get_model_parallel_rank()
        ds_checkpointing.mp_size = grid.get_model_parallel_world_size()
        ds_checkpointing.mp_group = grid.get_model_parallel_group()


def _refit_engine(engine: Any, grid: Any) -> None:
    engine.world_size, engine.global_rank = engine.module.world_size, engine.module.global_rank
    engine.data_parallel_group = groups._get_data_parallel_group()
    engine.seq_data_parallel_group = groups._get_sequence_data_parallel_group()
    engine.mp_world_size = groups._get_model_parallel_world_size()
    engine.checkpoint_mp_rank = grid.get_model_parallel_rank() if engine.mp_world_size > 1 else 0
    engine.num_stages, engine.stage_id = grid.pipe_parallel_size, grid.get_stage_id()
    engine.prev_stage, engine.next_stage = engine.stage_id - 1, engine.stage_id + 1
    engine.is_pipe_parallel = grid.pipe_parallel_size > 1

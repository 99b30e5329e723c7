"""Pure functions over plain sequences that decide which layers each stage should hold.

A *balancer* takes costs per layer, a number of stages, the current partition and a memory model, and returns
boundaries. ``"partition"`` (:func:`balanced`), ``"diffusion"`` (:func:`diffusion`) and ``"makespan"``
(:func:`makespan`) are registered here; :func:`register` adds more, which ``"balancer"`` in the JSON file can then name.

Each concept has one module:

=====================================  ===============================================================================
concept                                module
=====================================  ===============================================================================
least bottleneck, exact                ``balanced``; ``limited`` with memory limits or different speeds; ``ties``
                                       ``pairs`` for two chunks per stage
least bottleneck, between neighbours   ``diffusion``, and for each stage ``diffusion_node``, which uses ``overload``,
                                       ``diffusion_step``, ``diffusion_messages`` and ``stretch``
shortest iteration                     ``makespan``
fewer stages                           ``repack``
load of a stage, and its measures      ``metrics``
seconds of layers and of an iteration  ``pipeline``; ``passes`` under split schedules, with sums over chunks by
                                       ``layer_passes``; the simulator is in
                                       :mod:`ds_dynmo.schedules`
memory                                 ``memory`` in training, ``move_memory`` during a migration
estimates from earlier profiles        ``history``; ``speeds`` of stages; ``move_costs``; ``portable`` arithmetic
refusals and names                     ``checks``, ``registry``
=====================================  ===============================================================================
"""

from ds_dynmo.partitioners.balanced import balanced, balanced_groups, uniform
from ds_dynmo.partitioners.diffusion import DiffusionTrace, diffusion, diffusion_trace
from ds_dynmo.partitioners.diffusion_node import DiffusionNode
from ds_dynmo.partitioners.diffusion_step import diffusion_step, lemma2_bound
from ds_dynmo.partitioners.history import CostHistory
from ds_dynmo.partitioners.layer_passes import LayerPasses
from ds_dynmo.partitioners.makespan import makespan
from ds_dynmo.partitioners.memory import MemoryModel, StageMemory, check_fits
from ds_dynmo.partitioners.metrics import (
    bottleneck,
    bubble_ratio,
    imbalance,
    imbalance_of_loads,
    loads,
    loads_of,
    potential,
)
from ds_dynmo.partitioners.move_costs import MoveCosts
from ds_dynmo.partitioners.move_memory import Overflow, between, migration_peaks, overflow
from ds_dynmo.partitioners.passes import PassModel
from ds_dynmo.partitioners.pipeline import PipelineModel
from ds_dynmo.partitioners.registry import Balancer, accepts, check_signature, get, names, propose, register
from ds_dynmo.partitioners.repack import Packing, fewest_stages, first_fit, hosts, pack_onto
from ds_dynmo.partitioners.speeds import SpeedEvidence, relative_speeds
from ds_dynmo.schedules import iteration_seconds, simulate

__all__ = [
    "Balancer",
    "CostHistory",
    "DiffusionNode",
    "DiffusionTrace",
    "LayerPasses",
    "MemoryModel",
    "MoveCosts",
    "Overflow",
    "Packing",
    "PassModel",
    "PipelineModel",
    "SpeedEvidence",
    "StageMemory",
    "accepts",
    "balanced",
    "balanced_groups",
    "between",
    "bottleneck",
    "bubble_ratio",
    "check_fits",
    "check_signature",
    "diffusion",
    "diffusion_step",
    "diffusion_trace",
    "fewest_stages",
    "first_fit",
    "get",
    "hosts",
    "imbalance",
    "imbalance_of_loads",
    "iteration_seconds",
    "lemma2_bound",
    "loads",
    "loads_of",
    "makespan",
    "migration_peaks",
    "names",
    "overflow",
    "pack_onto",
    "potential",
    "propose",
    "register",
    "relative_speeds",
    "simulate",
    "uniform",
]

"""Carry out a migration plan: layers leave, travel point to point, and arrive with all that belongs to them.

Before the ranks have agreed on the plan nothing is changed, and any failure leaves training as it was. After
that a failure is fatal, and says so.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec
from torch import nn

from ds_dynmo.engine.comm import Communicator
from ds_dynmo.engine.layer_state import ArrivingLayer, LayerContent, PackedLayer, pack, parameter_attributes
from ds_dynmo.engine.parameter_groups import options_of
from ds_dynmo.engine.stage import StageLayers
from ds_dynmo.errors import MigrationError
from ds_dynmo.plan import MigrationPlan


@dataclass(frozen=True)
class Site:
    """Where a migration happens: one rank's stage.

    Attributes:
        stage: this rank's stage.
        layers: its layers.
        optimizer: the torch optimizer that updates them; None without one.
        grid: DeepSpeed's grid.
        device: where arriving layers go.
    """

    stage: int
    layers: StageLayers
    optimizer: torch.optim.Optimizer | None
    grid: Any
    device: torch.device
    comm: Communicator


def migrate(plan: MigrationPlan, site: Site) -> int:
    """Carry out ``plan``. Collective.

    Returns:
        Bytes moved in this rank's pipeline.

    Raises:
        MigrationError: on every rank. The message says whether layers had begun to move.
    """
    packed: dict[int, PackedLayer] = {}
    failure: Exception | None = None
    try:
        packed = _pack_departing(plan, site)
    except Exception as error:  # whatever a user's layer raises: the others have to hear of it
        failure = error
    try:
        moved_bytes = site.comm.agree(plan, failure is None, sum(layer.num_bytes for layer in packed.values()))
    except MigrationError as error:
        raise error from failure
    if not plan.moves:
        return 0
    try:
        arrived = _exchange(plan, site, packed)
        _install(plan, site, arrived)
    except Exception as error:
        raise MigrationError(
            f"rank {site.grid.get_global_rank()} failed while layers moved from {list(plan.old)} to {list(plan.new)}: "
            f"{error}. Layers had begun to move: resume the job from its last checkpoint"
        ) from error
    return moved_bytes


def _travels(index: int, plan: MigrationPlan, layers: StageLayers) -> bool:
    """Has the layer a module, and does it own it where it goes (a tied layer may find its parameters there)?"""
    return isinstance(layers.spec(index), nn.Module | LayerSpec) and layers.owner(index, plan.new)


def _pack_departing(plan: MigrationPlan, site: Site) -> dict[int, PackedLayer]:
    packed = {}
    for move in plan.moves:
        if move.source == site.stage and _travels(move.layer, plan, site.layers):
            module = site.layers.local_module(move.layer)
            assert module is not None
            packed[move.layer] = pack(layer_content(module, site.optimizer))
    return packed


def layer_content(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> LayerContent:
    """All that belongs to a layer, as it is now."""
    parameters = list(module.parameters())
    groups = optimizer.param_groups if optimizer is not None else []
    group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    numbers = [group_of.get(id(parameter)) for parameter in parameters]
    state = optimizer.state if optimizer is not None else {}
    return LayerContent(
        module=module,
        parameters=parameters,
        groups=numbers,
        optimizer_state=[state.get(parameter) for parameter in parameters],
        gradients=[parameter.grad for parameter in parameters],
        attributes=[parameter_attributes(parameter) for parameter in parameters],
        group_options={number: options_of(groups[number]) for number in numbers if number is not None},
    )


def _exchange(plan: MigrationPlan, site: Site, packed: dict[int, PackedLayer]) -> dict[int, LayerContent]:
    """Send what departs, receive what arrives."""
    departing: dict[int, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    for move in plan.moves:
        if not _travels(move.layer, plan, site.layers):
            continue
        if move.source == site.stage:
            departing.setdefault(move.destination, []).append(move.layer)
        if move.destination == site.stage:
            arriving.setdefault(move.source, []).append(move.layer)
    headers = site.comm.exchange_headers(
        {stage: pickle.dumps([packed[index].header for index in indices]) for stage, indices in departing.items()},
        list(arriving),
    )
    rooms = {
        stage: [ArrivingLayer(header, site.device) for header in pickle.loads(headers[stage])] for stage in arriving
    }
    site.comm.exchange_tensors(
        {stage: [flat for index in indices for flat in packed[index].tensors] for stage, indices in departing.items()},
        {stage: [flat for room in rooms[stage] for flat in room.landing] for stage in arriving},
    )
    return {
        index: room.open(partial(site.layers.build, index, site.device))
        for stage, indices in arriving.items()
        for index, room in zip(indices, rooms[stage])
    }


def _install(plan: MigrationPlan, site: Site, arrived: dict[int, LayerContent]) -> None:
    """Rebuild the stage and the optimizer's groups around the layers that stay and those that arrived."""
    layers, (start, stop) = site.layers, (plan.new[site.stage], plan.new[site.stage + 1])
    before = _parameters(layers.modules().values())
    modules: dict[int, nn.Module] = {}
    departed = [index for index in range(layers.start, layers.stop) if not start <= index < stop]
    for index in range(start, stop):
        if index in arrived:
            modules[index] = arrived[index].module
        elif layers.start <= index < layers.stop and layers.owner(index, plan.new):
            module = layers.local_module(index)
            if module is not None:
                modules[index] = module
    layers.rebuild(plan.new, site.stage, modules)
    after = layers.parameters()
    if site.optimizer is not None:
        _regroup(site.optimizer, [p for p in before if id(p) not in set(map(id, after))], after, arrived)
    for index in departed:
        _forget(layers.spec(index), after)
    layers.tie(site.grid, site.comm.tied_group)


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """All parameters, each once."""
    return list({id(parameter): parameter for module in modules for parameter in module.parameters()}.values())


def _regroup(
    optimizer: torch.optim.Optimizer,
    departed: list[nn.Parameter],
    present: list[nn.Parameter],
    arrived: dict[int, LayerContent],
) -> None:
    """Take departed parameters out of the optimizer, put arrived ones into their groups, all in the module's order."""
    gone = set(map(id, departed))
    for parameter in departed:
        optimizer.state.pop(parameter, None)
    newcomers: dict[int, list[nn.Parameter]] = {}
    for content in arrived.values():
        for parameter, number, state in zip(content.parameters, content.groups, content.optimizer_state):
            if number is not None:
                newcomers.setdefault(number, []).append(parameter)
            if state is not None:
                optimizer.state[parameter] = state
    place = {id(parameter): position for position, parameter in enumerate(present)}
    for position, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            for content in arrived.values():
                group.update(content.group_options.get(position, {}))
        staying = [parameter for parameter in group["params"] if id(parameter) not in gone]
        group["params"] = sorted([*staying, *newcomers.get(position, [])], key=lambda p: place.get(id(p), -1))
        group.pop("param_names", None)  # optional labels of torch's, by position: no longer true


def _forget(spec: Any, present: list[nn.Parameter]) -> None:
    """Free the memory of a departed layer that the user gave as a module, which the layer list still holds."""
    if isinstance(spec, nn.Module) and not {id(p) for p in spec.parameters()} & set(map(id, present)):
        spec.to_empty(device="meta")

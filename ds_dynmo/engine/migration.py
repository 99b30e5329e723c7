"""Carry out a migration plan: layers leave, travel point to point, and arrive with all that belongs to them.

Before the ranks have agreed on the plan nothing is changed, and any failure leaves training as it was. After
that a failure is fatal, and says so. Layers stream: in one round a stage sends one layer at most and receives one,
and what was sent is freed before the next. What a stage holds at the peak is worked out before, in
:mod:`ds_dynmo.partitioners.move_memory`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec
from deepspeed.utils import logger
from torch import nn

from ds_dynmo.engine.comm import Communicator
from ds_dynmo.engine.layer_state import ArrivingLayer, LayerContent, PackedLayer, pack
from ds_dynmo.engine.optimizer_state import OptimizerState
from ds_dynmo.engine.references import References
from ds_dynmo.engine.stage import StageLayers
from ds_dynmo.errors import MigrationError
from ds_dynmo.partitioners import rounds
from ds_dynmo.plan import LayerMove, MigrationPlan


@dataclass(frozen=True)
class Site:
    """Where a migration happens: one rank's stage.

    Attributes:
        stage: this rank's stage.
        layers: its layers.
        names: of what layers refer to and do not own.
        state: what the optimizer holds for them.
        grid: DeepSpeed's grid.
        device: where arriving layers go.
        check: raises what would make a move wrong; called before anything is changed.
        rebuilt: called when the stage's modules are in place, before the optimizer settles.
    """

    stage: int
    layers: StageLayers
    names: References
    state: OptimizerState
    grid: Any
    device: torch.device
    comm: Communicator
    check: Callable[[], None]
    rebuilt: Callable[[], None]


def migrate(plan: MigrationPlan, site: Site, check: Callable[[MigrationPlan], None] | None = None) -> int:
    """Carry out ``plan``. Collective.

    Args:
        check: collective; raises on every rank where the plan, on which all have agreed, is to be refused.

    Returns:
        Bytes moved in this rank's pipeline.

    Raises:
        MigrationError: on every rank that can still say so. The message says whether layers had begun to move.
    """
    site.comm.agree(plan)
    if not plan.moves:
        return 0
    if check is not None:
        check(plan)
    packed: dict[int, PackedLayer] = {}
    failure: Exception | None = None
    outgoing_bytes = 0
    try:
        outgoing_bytes = site.state.prepare(plan)
        site.check()
        packed = _pack_departing(plan, site)
        outgoing_bytes += sum(layer.num_bytes for layer in packed.values())
    except MigrationError:
        raise  # a collective that failed: the others hear of it by the same way
    except Exception as error:  # whatever a user's layer raises: the others have to hear of it
        logger.error(f"rank {site.grid.get_global_rank()} cannot get its layers ready to move: {error!r}")
        failure = error
    rooms, unbound = _prepare_rooms(plan, site, packed, failure)
    try:
        moved_bytes = site.comm.all_ready(failure or unbound, outgoing_bytes)
    except MigrationError as error:
        raise error from failure or unbound
    step = "sending layers"
    try:
        site.state.start()
        arrived = _exchange(plan, site, packed, rooms)
        step = "rebuilding the stage"
        _rebuild(plan, site, arrived)
        site.rebuilt()
        step = "settling the optimizer"
        site.state.settle(site.layers.parameters(), arrived)
        step = "tying layers"
        site.layers.tie(site.grid, site.comm.tied_group)
        step = "waiting for the other ranks"
        site.comm.all_done()
    except Exception as error:
        raise MigrationError(
            f"rank {site.grid.get_global_rank()} failed {step} while layers moved from {list(plan.old)} to "
            f"{list(plan.new)}: {error}. Layers had begun to move: resume the job from its last checkpoint"
        ) from error
    return moved_bytes


def rehearse(plan: MigrationPlan, site: Site, *, copies: bool = False) -> None:
    """Find out whether the ranks could send their layers, where a plan comes when there is no way back. Collective.

    Args:
        site: with this rank's stage in ``plan``.
        copies: the layers that stay are copied to other ranks as well.

    Raises:
        MigrationError: harmless, on every rank. Nothing has changed.
    """
    failure: Exception | None = None
    try:
        site.check()
        _pack_departing(plan, site)
        if copies:
            for index, module in site.layers.modules().items():
                packed_layer(site, index, module)
    except Exception as error:  # whatever a user's layer raises: the others have to hear of it
        failure = error
    site.comm.all_ready(failure, 0)


def packed_layer(site: Site, index: int, module: nn.Module) -> PackedLayer:
    """A layer of this stage, ready to be sent."""
    return pack(site.state.content(module), partial(site.layers.build, index, site.device), site.names)


def _travels(index: int, plan: MigrationPlan, layers: StageLayers) -> bool:
    """Has the layer a module, and does it own it where it goes (a tied layer may find its parameters there)?"""
    return isinstance(layers.spec(index), nn.Module | LayerSpec) and layers.owner(index, plan.new)


def _travelling(plan: MigrationPlan, layers: StageLayers) -> list[LayerMove]:
    return [move for move in plan.moves if _travels(move.layer, plan, layers)]


def _pack_departing(plan: MigrationPlan, site: Site) -> dict[int, PackedLayer]:
    packed = {}
    for move in plan.moves:
        if move.source == site.stage and _travels(move.layer, plan, site.layers):
            module = site.layers.local_module(move.layer)
            assert module is not None
            packed[move.layer] = packed_layer(site, move.layer, module)
    staying = set(map(id, _staying_modules(plan, site).values()))
    leaving = {move.layer: site.layers.local_module(move.layer) for move in plan.moves if move.source == site.stage}
    site.names.check_left_behind({i: m for i, m in leaving.items() if m is not None and id(m) not in staying})
    return packed


def _prepare_rooms(
    plan: MigrationPlan, site: Site, packed: dict[int, PackedLayer], failure: Exception | None
) -> tuple[dict[int, ArrivingLayer], Exception | None]:
    """Exchange what the layers consist of, and find here what those that arrive refer to; what keeps it from that."""
    try:
        rooms = _rooms(_travelling(plan, site.layers), site, packed if failure is None else None)
    except Exception as error:
        raise MigrationError(
            f"rank {site.grid.get_global_rank()} failed to tell the others what its layers consist of: {error}. No "
            "layer has moved, yet the ranks are out of step: resume the job from its last checkpoint"
        ) from error
    try:
        for room in rooms.values():
            room.bind(site.names, site.device)
    except Exception as error:  # whatever a user's object raises: the others have to hear of it
        return rooms, error
    return rooms, None


def _exchange(
    plan: MigrationPlan, site: Site, packed: dict[int, PackedLayer], rooms: dict[int, ArrivingLayer]
) -> dict[int, LayerContent]:
    """Send what departs, receive what arrives, and let go of what was sent."""
    staying_modules = _staying_modules(plan, site)
    staying = set(map(id, staying_modules.values()))
    meanwhile = site.state.work_meanwhile(staying_modules)
    arrived: dict[int, LayerContent] = {}
    for round_ in rounds(_travelling(plan, site.layers)):
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for move in round_:
            if move.source == site.stage:
                rank = site.grid.stage_to_global(move.destination)
                sends += [(rank, flat) for flat in packed[move.layer].tensors]
            if move.destination == site.stage:
                room = rooms[move.layer]
                room.furnish(site.device, partial(site.state.landing_place, move.layer))
                rank = site.grid.stage_to_global(move.source)
                receives += [(rank, flat) for flat in room.landing]
        exchange = site.comm.exchange if meanwhile is None else partial(site.comm.exchange, meanwhile=meanwhile)
        exchange(sends, receives)
        meanwhile = None
        sends.clear()
        for move in round_:
            if move.source == site.stage:
                packed.pop(move.layer)
                _let_go(site, move.layer, staying)
            if move.destination == site.stage:
                build = partial(site.layers.build, move.layer, site.device)
                arrived[move.layer] = rooms.pop(move.layer).open(build)
    if meanwhile is not None:
        meanwhile()
    return arrived


def _rooms(
    travelling: Sequence[LayerMove], site: Site, packed: dict[int, PackedLayer] | None
) -> dict[int, ArrivingLayer]:
    """Exchange the headers of all layers: what each consists of, without its tensors.

    ``packed`` is None where this rank could not pack its own; it gets no room for those of another such rank.
    """
    departing: dict[int, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    for move in travelling:
        if move.source == site.stage:
            departing.setdefault(move.destination, []).append(move.layer)
        if move.destination == site.stage:
            arriving.setdefault(move.source, []).append(move.layer)
    headers = site.comm.exchange_headers(
        {
            stage: pickle.dumps([packed[index].header for index in indices] if packed is not None else [])
            for stage, indices in departing.items()
        },
        list(arriving),
    )
    return {
        index: ArrivingLayer(header)
        for stage, indices in arriving.items()
        for index, header in zip(indices, pickle.loads(headers[stage]))
    }


def _staying_modules(plan: MigrationPlan, site: Site) -> dict[int, nn.Module]:
    """By the layer that owns it from now on."""
    layers, (start, stop) = site.layers, (plan.new[site.stage], plan.new[site.stage + 1])
    here = range(max(start, layers.start), min(stop, layers.stop))
    modules = {index: layers.local_module(index) for index in here if layers.owner(index, plan.new)}
    return {index: module for index, module in modules.items() if module is not None}


def _let_go(site: Site, index: int, staying: set[int]) -> None:
    """Free the memory of a layer that was sent away, unless a tied layer that stays shares its module."""
    module = site.layers.local_module(index)
    if module is None or id(module) in staying:
        return
    site.state.drop(module.parameters())
    for parameter in module.parameters():  # whoever still holds the parameter does not hold its memory
        parameter.data = parameter.data.new_empty(0)
    spec = site.layers.spec(index)
    site.layers.detach(index)
    if isinstance(spec, nn.Module):
        site.names.empty(spec)  # the layer list still holds a layer that the user gave as a module


def _rebuild(plan: MigrationPlan, site: Site, arrived: dict[int, LayerContent]) -> None:
    """The stage around the layers that stay and those that arrived; tied layers that nobody uses any more go."""
    layers, (start, stop) = site.layers, (plan.new[site.stage], plan.new[site.stage + 1])
    modules: dict[int, nn.Module] = {}
    for index in range(start, stop):
        if index in arrived:
            modules[index] = arrived[index].module
        elif layers.start <= index < layers.stop and layers.owner(index, plan.new):
            module = layers.local_module(index)
            if module is not None:
                modules[index] = module
    kept = {id(module) for module in modules.values()}
    for module in [module for module in layers.modules().values() if id(module) not in kept]:
        site.state.drop(module.parameters())
    layers.rebuild(plan.new, site.stage, modules)

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

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.engine.migration.packing import ArrivingLayer, LayerContent, PackedLayer, pack
from ds_dynmo.engine.migration.references import References
from ds_dynmo.engine.optimizer.state import OptimizerState
from ds_dynmo.errors import MigrationError
from ds_dynmo.partitioners import rounds
from ds_dynmo.plan import LayerMove, MigrationPlan


@dataclass(frozen=True)
class MigrationContext:
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


def migrate(
    plan: MigrationPlan, context: MigrationContext, check: Callable[[MigrationPlan], None] | None = None
) -> int:
    """Carry out ``plan``. Collective.

    Args:
        check: collective; raises on every rank where the plan, on which all have agreed, is to be refused.

    Returns:
        Bytes moved in this rank's pipeline.

    Raises:
        MigrationError: on every rank that can still say so. The message says whether layers had begun to move.
    """
    context.comm.agree(plan)
    if not plan.moves:
        return 0
    if check is not None:
        check(plan)
    packed: dict[int, PackedLayer] = {}
    failure: Exception | None = None
    outgoing_bytes = 0
    try:
        outgoing_bytes = context.state.prepare(plan)
        context.check()
        packed = _pack_departing(plan, context)
        outgoing_bytes += sum(layer.num_bytes for layer in packed.values())
    except MigrationError:
        raise  # a collective that failed: the others hear of it by the same way
    except Exception as error:  # whatever a user's layer raises: the others have to hear of it
        logger.error(f"rank {context.grid.get_global_rank()} cannot get its layers ready to move: {error!r}")
        failure = error
    arrivals, unbound = _prepare_arrivals(plan, context, packed, failure)
    try:
        moved_bytes = context.comm.all_ready(failure or unbound, outgoing_bytes)
    except MigrationError as error:
        raise error from failure or unbound
    step = "sending layers"
    try:
        context.state.start()
        arrived = _exchange(plan, context, packed, arrivals)
        step = "rebuilding the stage"
        _rebuild(plan, context, arrived)
        context.rebuilt()
        step = "settling the optimizer"
        context.state.settle(context.layers.parameters(), arrived)
        step = "tying layers"
        context.layers.tie(context.grid, context.comm.tied_group)
        step = "waiting for the other ranks"
        context.comm.all_done()
    except Exception as error:
        raise MigrationError(
            f"rank {context.grid.get_global_rank()} failed {step} while layers moved from {list(plan.old)} to "
            f"{list(plan.new)}: {error}. Layers had begun to move: resume the job from its last checkpoint"
        ) from error
    return moved_bytes


def rehearse(plan: MigrationPlan, context: MigrationContext, *, copies: bool = False) -> None:
    """Find out whether the ranks could send their layers, where a plan comes when there is no way back. Collective.

    Args:
        context: with this rank's stage in ``plan``.
        copies: the layers that stay are copied to other ranks as well.

    Raises:
        MigrationError: harmless, on every rank. Nothing has changed.
    """
    failure: Exception | None = None
    try:
        context.check()
        _pack_departing(plan, context)
        if copies:
            for index, module in context.layers.modules().items():
                packed_layer(context, index, module)
    except Exception as error:  # whatever a user's layer raises: the others have to hear of it
        failure = error
    context.comm.all_ready(failure, 0)


def packed_layer(context: MigrationContext, index: int, module: nn.Module) -> PackedLayer:
    """A layer of this stage, ready to be sent."""
    return pack(context.state.content(module), partial(context.layers.build, index, context.device), context.names)


def _is_transferred(index: int, plan: MigrationPlan, layers: StageLayers) -> bool:
    """Has the layer a module, and does it own it where it goes (a tied layer may find its parameters there)?"""
    return isinstance(layers.spec(index), nn.Module | LayerSpec) and layers.owner(index, plan.new)


def _transferred(plan: MigrationPlan, layers: StageLayers) -> list[LayerMove]:
    return [move for move in plan.moves if _is_transferred(move.layer, plan, layers)]


def _pack_departing(plan: MigrationPlan, context: MigrationContext) -> dict[int, PackedLayer]:
    packed = {}
    for move in plan.moves:
        if move.source == context.stage and _is_transferred(move.layer, plan, context.layers):
            module = context.layers.local_module(move.layer)
            assert module is not None
            packed[move.layer] = packed_layer(context, move.layer, module)
    staying = set(map(id, _staying_modules(plan, context).values()))
    leaving = {
        move.layer: context.layers.local_module(move.layer) for move in plan.moves if move.source == context.stage
    }
    context.names.check_left_behind({i: m for i, m in leaving.items() if m is not None and id(m) not in staying})
    return packed


def _prepare_arrivals(
    plan: MigrationPlan, context: MigrationContext, packed: dict[int, PackedLayer], failure: Exception | None
) -> tuple[dict[int, ArrivingLayer], Exception | None]:
    """Exchange what the layers consist of, and find here what those that arrive refer to; what keeps it from that."""
    try:
        arrivals = _arrivals(_transferred(plan, context.layers), context, packed if failure is None else None)
    except Exception as error:
        raise MigrationError(
            f"rank {context.grid.get_global_rank()} failed to tell the others what its layers consist of: {error}. No "
            "layer has moved, yet the ranks are out of step: resume the job from its last checkpoint"
        ) from error
    try:
        for arrival in arrivals.values():
            arrival.bind(context.names, context.device)
    except Exception as error:  # whatever a user's object raises: the others have to hear of it
        return arrivals, error
    return arrivals, None


def _exchange(
    plan: MigrationPlan, context: MigrationContext, packed: dict[int, PackedLayer], arrivals: dict[int, ArrivingLayer]
) -> dict[int, LayerContent]:
    """Send what departs, receive what arrives, and let go of what was sent."""
    staying_modules = _staying_modules(plan, context)
    staying = set(map(id, staying_modules.values()))
    meanwhile = context.state.work_meanwhile(staying_modules)
    arrived: dict[int, LayerContent] = {}
    for round_ in rounds(_transferred(plan, context.layers)):
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for move in round_:
            if move.source == context.stage:
                rank = context.grid.stage_to_global(move.destination)
                sends += [(rank, flat) for flat in packed[move.layer].tensors]
            if move.destination == context.stage:
                arrival = arrivals[move.layer]
                arrival.allocate(context.device, partial(context.state.recv_buffer_of, move.layer))
                rank = context.grid.stage_to_global(move.source)
                receives += [(rank, flat) for flat in arrival.recv_buffers]
        exchange = context.comm.exchange if meanwhile is None else partial(context.comm.exchange, meanwhile=meanwhile)
        exchange(sends, receives)
        meanwhile = None
        sends.clear()
        for move in round_:
            if move.source == context.stage:
                packed.pop(move.layer)
                _let_go(context, move.layer, staying)
            if move.destination == context.stage:
                build = partial(context.layers.build, move.layer, context.device)
                arrived[move.layer] = arrivals.pop(move.layer).materialize(build)
    if meanwhile is not None:
        meanwhile()
    return arrived


def _arrivals(
    travelling: Sequence[LayerMove], context: MigrationContext, packed: dict[int, PackedLayer] | None
) -> dict[int, ArrivingLayer]:
    """Exchange the headers of all layers: what each consists of, without its tensors.

    ``packed`` is None where this rank could not pack its own; it gets no arrival for those of another such rank.
    """
    departing: dict[int, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    for move in travelling:
        if move.source == context.stage:
            departing.setdefault(move.destination, []).append(move.layer)
        if move.destination == context.stage:
            arriving.setdefault(move.source, []).append(move.layer)
    headers = context.comm.exchange_headers(
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


def _staying_modules(plan: MigrationPlan, context: MigrationContext) -> dict[int, nn.Module]:
    """By the layer that owns it from now on."""
    layers, (start, stop) = context.layers, (plan.new[context.stage], plan.new[context.stage + 1])
    here = range(max(start, layers.start), min(stop, layers.stop))
    modules = {index: layers.local_module(index) for index in here if layers.owner(index, plan.new)}
    return {index: module for index, module in modules.items() if module is not None}


def _let_go(context: MigrationContext, index: int, staying: set[int]) -> None:
    """Free the memory of a layer that was sent away, unless a tied layer that stays shares its module."""
    module = context.layers.local_module(index)
    if module is None or id(module) in staying:
        return
    context.state.drop(module.parameters())
    for parameter in module.parameters():  # whoever still holds the parameter does not hold its memory
        parameter.data = parameter.data.new_empty(0)
    spec = context.layers.spec(index)
    context.layers.detach(index)
    if isinstance(spec, nn.Module):
        context.names.empty(spec)  # the layer list still holds a layer that the user gave as a module


def _rebuild(plan: MigrationPlan, context: MigrationContext, arrived: dict[int, LayerContent]) -> None:
    """The stage around the layers that stay and those that arrived; tied layers that nobody uses any more go."""
    layers, (start, stop) = context.layers, (plan.new[context.stage], plan.new[context.stage + 1])
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
        context.state.drop(module.parameters())
    layers.rebuild(plan.new, context.stage, modules)

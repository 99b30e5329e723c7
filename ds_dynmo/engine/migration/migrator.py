"""Carry out a migration plan in four phases: layers are packed, travel, and arrive with all that belongs to them.

1. :meth:`Migrator.prepare`: the ranks agree on the plan, tell each other what their layers consist of, and allocate
   what they will receive. All that can fail without harm fails here, on every rank alike; nothing has changed.
2. :meth:`Migrator.start`: what is constant between two steps of the optimizer begins to travel: weights, and the
   optimizer's state of them. From here on an exception is fatal, and says so.
3. :meth:`Migrator.poll`: has it arrived? Batches may train meanwhile.
4. :meth:`Migrator.commit`, at an optimizer's step: what can have changed since follows (buffers, attributes, step
   counts, gradients), layers change places, and what was sent is freed.

A rebalance that waits is the four in a row. What a stage holds at the peak is worked out before, in
:mod:`ds_dynmo.partitioners.move_memory`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from deepspeed.utils import logger
from torch import nn

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.comm.pending import PendingExchange
from ds_dynmo.engine.comm.point_to_point import PeerTensor
from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.engine.migration.arriving import ArrivingLayer
from ds_dynmo.engine.migration.content import LayerContent
from ds_dynmo.engine.migration.packing import PackedLayer, pack
from ds_dynmo.engine.migration.references import References
from ds_dynmo.engine.optimizer.state import OptimizerState
from ds_dynmo.errors import MigrationError
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


@dataclass
class _Migration:
    """A plan that is prepared.

    Attributes:
        packed: this rank's layers that leave.
        arrivals: layers that arrive here.
        num_bytes: that move in this rank's pipeline.
        pending: what travels.
    """

    plan: MigrationPlan
    overlapped: bool
    packed: dict[int, PackedLayer]
    arrivals: dict[int, ArrivingLayer]
    num_bytes: int
    pending: list[PendingExchange] = field(default_factory=list)

    def left(self, layer: PackedLayer | ArrivingLayer) -> Sequence[torch.Tensor]:
        """Select what did not travel ahead: all of a layer that was packed again, else what is not constant."""
        return (*layer.constants, *layer.others) if self.overlapped else layer.others


class Migrator:
    """Move layers between stages, one plan at a time. Every method but :meth:`poll` is collective."""

    def __init__(self, context: MigrationContext) -> None:
        self._context = context
        self._migration: _Migration | None = None

    def migrate(self, plan: MigrationPlan, check: Callable[[MigrationPlan], None] | None = None) -> int:
        """Carry out ``plan`` between two batches: all phases in a row.

        Args:
            check: see :meth:`prepare`.

        Returns:
            Bytes moved in this rank's pipeline.

        Raises:
            MigrationError: on every rank that can still say so. The message says whether layers had begun to move.
        """
        if not self.prepare(plan, check):
            return 0
        self.start()
        return self.commit()

    def rehearse(self, plan: MigrationPlan, *, copies: bool = False) -> None:
        """Find out whether the ranks could send their layers, before they take a step that cannot be undone.

        Args:
            copies: the layers that stay are copied to other ranks as well.

        Raises:
            MigrationError: harmless, on every rank. Nothing has changed.
        """
        context = self._context
        failure: Exception | None = None
        try:
            context.check()
            self._pack_leaving(plan)
            if copies:
                for index, module in context.layers.modules().items():
                    self.pack(index, module)
        except Exception as error:  # whatever a user's layer raises: the others have to hear of it
            failure = error
        context.comm.all_ready(failure, 0)

    # -- the phases -----------------------------------------------------------------------------------

    def prepare(
        self,
        plan: MigrationPlan,
        check: Callable[[MigrationPlan], None] | None = None,
        *,
        overlapped: bool = False,
    ) -> bool:
        """Agree on ``plan`` and make ready what it takes. Nothing has moved, and :meth:`abandon` is possible.

        Args:
            check: collective; raises on every rank where the plan, on which all have agreed, is to be refused.
            overlapped: batches train between :meth:`start` and :meth:`commit`. All of the optimizer's state then
                travels ahead, and is there twice; else its flat buffers follow at the commit, kind after kind.

        Returns:
            Whether there is a layer to move.

        Raises:
            MigrationError: on every rank that can still say so.
        """
        assert self._migration is None, "one plan at a time"
        context = self._context
        context.comm.agree(plan)
        if not plan.moves:
            return False
        if check is not None:
            check(plan)
        packed: dict[int, PackedLayer] = {}
        failure: Exception | None = None
        outgoing_bytes = 0
        try:
            outgoing_bytes = context.state.prepare(plan, overlapped=overlapped)
            context.check()
            packed = self._pack_leaving(plan)
            outgoing_bytes += sum(layer.num_bytes for layer in packed.values())
        except MigrationError:
            context.state.abandon()
            raise  # a collective that failed: the others hear of it by the same way
        except Exception as error:  # whatever a user's layer raises: the others have to hear of it
            logger.error(f"rank {context.grid.get_global_rank()} cannot get its layers ready to move: {error!r}")
            failure = error
        try:
            arrivals = self._exchange_headers(plan, packed if failure is None else None)
        except Exception as error:
            raise MigrationError(
                f"rank {context.grid.get_global_rank()} failed to tell the others what its layers consist of: {error}. "
                "No layer has moved, yet the ranks are out of step: resume the job from its last checkpoint"
            ) from error
        try:
            if failure is None:
                self._make_ready(arrivals)
        except Exception as error:  # whatever a user's object raises: the others have to hear of it
            failure = error
        try:
            num_bytes = context.comm.all_ready(failure, outgoing_bytes)
        except MigrationError as error:
            context.state.abandon()
            raise error from failure
        self._migration = _Migration(plan, overlapped, packed, arrivals, num_bytes)
        return True

    def abandon(self) -> None:
        """Leave everything as it is, after :meth:`prepare`. Every rank has to do so."""
        migration = self._in_progress()
        assert not migration.pending, "layers have begun to move"
        self._context.state.abandon()
        self._migration = None

    def start(self) -> None:
        """Begin to send what only the optimizer's step changes, and return at once.

        Raises:
            MigrationError: fatal.
        """
        migration = self._in_progress()
        with self._no_way_back("sending layers"):
            sends, receives = self._transfers(
                {index: layer.constants for index, layer in migration.packed.items()},
                {index: layer.constants for index, layer in migration.arrivals.items()},
            )
            more_sends, more_receives = self._context.state.transfers()
            self._post(sends + more_sends, receives + more_receives)

    def poll(self) -> bool:
        """Tell whether :meth:`commit` would find all that was started done. Asks this rank only, and does not wait."""
        return all(pending.is_done() for pending in self._in_progress().pending)

    def commit(self) -> int:
        """Send what can have changed, put the layers in their places, and free what was sent.

        Call it between two batches. Before the optimizer's step of a batch, gradients that parameters hold travel too;
        those that DeepSpeed's wrappers sum in flat buffers do not.

        Returns:
            Bytes moved in this rank's pipeline.

        Raises:
            MigrationError: fatal.
        """
        migration, context = self._in_progress(), self._context
        with self._no_way_back("sending layers"):
            if migration.overlapped:
                self._pack_again(migration)
            self._post(
                *self._transfers(
                    {index: migration.left(layer) for index, layer in migration.packed.items()},
                    {index: migration.left(layer) for index, layer in migration.arrivals.items()},
                )
            )
            context.state.copy_staying(self._staying(migration.plan))
            for pending in migration.pending:
                pending.wait()
        with self._no_way_back("rebuilding the stage"):
            arrived = {
                index: arrival.materialize(partial(context.layers.build, index, context.device))
                for index, arrival in migration.arrivals.items()
            }
            self._free_leaving(migration)
            self._rebuild(migration.plan, arrived)
            context.rebuilt()
        with self._no_way_back("settling the optimizer"):
            context.state.settle(context.layers.parameters(), arrived)
        with self._no_way_back("tying layers"):
            context.layers.tie(context.grid, context.comm.tied_group)
        with self._no_way_back("waiting for the other ranks"):
            context.comm.all_done()
        self._migration = None
        return migration.num_bytes

    # -- packing --------------------------------------------------------------------------------------

    def pack(self, index: int, module: nn.Module, sent_ahead: PackedLayer | None = None) -> PackedLayer:
        """Make a layer of this stage ready to be sent."""
        context = self._context
        build = partial(context.layers.build, index, context.device)
        return pack(context.state.content(module), build, context.names, sent_ahead)

    def _pack_leaving(self, plan: MigrationPlan) -> dict[int, PackedLayer]:
        context = self._context
        leaving = {
            move.layer: module
            for move in plan.moves
            if move.source == context.stage and (module := context.layers.local_module(move.layer)) is not None
        }
        packed = {index: self.pack(index, module) for index, module in leaving.items() if self._is_sent(index, plan)}
        staying = set(map(id, self._staying(plan).values()))
        context.names.check_left_behind({index: m for index, m in leaving.items() if id(m) not in staying})
        return packed

    def _make_ready(self, arrivals: Mapping[int, ArrivingLayer], sent_ahead: Mapping[int, ArrivingLayer] = {}) -> None:
        """Find what arriving layers refer to, and allocate their receive buffers."""
        context = self._context
        for index, arrival in arrivals.items():
            arrival.bind(context.names, context.device)
            buffer_of = partial(context.state.recv_buffer_of, index)
            arrival.allocate(context.device, buffer_of, sent_ahead.get(index))

    def _pack_again(self, migration: _Migration) -> None:
        """Tell the others what the layers consist of now, after batches were trained."""
        context, packed, arrivals = self._context, migration.packed, migration.arrivals
        context.state.refresh()
        migration.packed = {}
        for index, sent_ahead in packed.items():
            module = context.layers.local_module(index)
            assert module is not None
            migration.packed[index] = self.pack(index, module, sent_ahead)
        migration.arrivals = self._exchange_headers(migration.plan, migration.packed)
        self._make_ready(migration.arrivals, arrivals)

    # -- messages -------------------------------------------------------------------------------------

    def _exchange_headers(
        self, plan: MigrationPlan, packed: Mapping[int, PackedLayer] | None
    ) -> dict[int, ArrivingLayer]:
        """Exchange headers: what the layers that leave consist of, for what those that arrive do.

        Args:
            packed: None where this rank could not pack its layers. It gets none from another such rank.
        """
        leaving: dict[int, list[int]] = {}
        arriving: dict[int, list[int]] = {}
        for move in self._sent(plan):
            if move.source == self._context.stage:
                leaving.setdefault(move.destination, []).append(move.layer)
            if move.destination == self._context.stage:
                arriving.setdefault(move.source, []).append(move.layer)
        headers = self._context.comm.p2p.exchange_headers(
            {
                stage: pickle.dumps([packed[index].header for index in indices] if packed is not None else [])
                for stage, indices in leaving.items()
            },
            list(arriving),
        )
        return {
            index: ArrivingLayer(header)
            for stage, indices in arriving.items()
            for index, header in zip(indices, pickle.loads(headers[stage]))
        }

    def _transfers(
        self, leaving: Mapping[int, Sequence[torch.Tensor]], arriving: Mapping[int, Sequence[torch.Tensor]]
    ) -> tuple[list[PeerTensor], list[PeerTensor]]:
        """List what is sent and received of each layer, with the other rank, in the order that both ranks know."""
        sends: list[PeerTensor] = []
        receives: list[PeerTensor] = []
        rank_of = self._context.grid.stage_to_global
        for move in self._sent(self._in_progress().plan):
            sends += [(rank_of(move.destination), flat) for flat in leaving.get(move.layer, ())]
            receives += [(rank_of(move.source), flat) for flat in arriving.get(move.layer, ())]
        return sends, receives

    def _post(self, sends: list[PeerTensor], receives: list[PeerTensor]) -> None:
        self._in_progress().pending.append(self._context.comm.p2p.post(sends, receives))

    # -- the stage ------------------------------------------------------------------------------------

    def _is_sent(self, index: int, plan: MigrationPlan) -> bool:
        """Tell whether a layer has a module and owns it where it goes. A tied one may find its parameters there."""
        layers = self._context.layers
        return isinstance(layers.spec(index), nn.Module | LayerSpec) and layers.owner(index, plan.new)

    def _sent(self, plan: MigrationPlan) -> list[LayerMove]:
        return [move for move in plan.moves if self._is_sent(move.layer, plan)]

    def _staying(self, plan: MigrationPlan) -> dict[int, nn.Module]:
        """Find the modules that stay, by the layer that owns each from now on."""
        layers, here = self._context.layers, plan.new.layers_of(self._context.stage)
        stay = [index for index in layers.indices if index in here and layers.owner(index, plan.new)]
        modules = {index: layers.local_module(index) for index in stay}
        return {index: module for index, module in modules.items() if module is not None}

    def _free_leaving(self, migration: _Migration) -> None:
        """Free the memory of layers that were sent, except where a tied layer that stays shares the module."""
        context = self._context
        staying = set(map(id, self._staying(migration.plan).values()))
        for index in migration.packed:
            module = context.layers.local_module(index)
            if module is None or id(module) in staying:
                continue
            context.state.drop(module.parameters())
            for parameter in module.parameters():  # whoever still holds the parameter does not hold its memory
                parameter.data = parameter.data.new_empty(0)
            spec = context.layers.spec(index)
            context.layers.detach(index)
            if isinstance(spec, nn.Module):
                context.names.empty(spec)  # the layer list still holds a layer that the user gave as a module
        migration.packed.clear()

    def _rebuild(self, plan: MigrationPlan, arrived: Mapping[int, LayerContent]) -> None:
        """Rebuild the stage around the layers that stay and those that arrived, and drop tied layers without a use."""
        context = self._context
        modules = self._staying(plan) | {index: content.module for index, content in arrived.items()}
        kept = {id(module) for module in modules.values()}
        for module in [module for module in context.layers.modules().values() if id(module) not in kept]:
            context.state.drop(module.parameters())
        context.layers.rebuild(plan.new, context.stage, modules)

    # -- errors ---------------------------------------------------------------------------------------

    def _in_progress(self) -> _Migration:
        assert self._migration is not None, "prepare comes first"
        return self._migration

    @contextmanager
    def _no_way_back(self, step: str) -> Iterator[None]:
        """Make an exception fatal, and say so: bytes have begun to move."""
        try:
            yield
        except Exception as error:
            plan = self._in_progress().plan
            raise MigrationError(
                f"rank {self._context.grid.get_global_rank()} failed {step} while layers moved from {plan.old} "
                f"to {plan.new}: {error}. Layers had begun to move: resume the job from its last checkpoint"
            ) from error

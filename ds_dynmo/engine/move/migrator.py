"""Migration: carry out a plan in four phases.

1. :meth:`Migrator.prepare`: the ranks, which have agreed on the plan, exchange descriptions of their layers, and build
   the arriving layers without values. Every harmless failure happens here, on all ranks alike, before anything changes.
2. :meth:`Migrator.start`: weights and optimizer state, which are constant between two steps of the optimizer, start to
   travel. In a blocking rebalance an exception is fatal from here on, and its message says so.
3. :meth:`Migrator.poll`, if a batch trains meanwhile: the next part follows.
4. :meth:`Migrator.commit`, before the optimizer's step of that batch: what may have changed since then follows
   (buffers, attributes, step counts, gradients). The stages are rebuilt, and layers that left are freed. Before that,
   an exception is still harmless if a batch trained meanwhile: the old stages have all state, and go on.

A blocking rebalance runs the others in a row. :mod:`ds_dynmo.partitioners.move_memory` predicts the peak of memory.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch

from ds_dynmo.engine.comm.host_links import PeerTensor
from ds_dynmo.engine.comm.rounds import Rounds
from ds_dynmo.engine.move.arriving import ArrivingLayer
from ds_dynmo.engine.move.functions import Changes, check_same
from ds_dynmo.engine.move.migration_context import MigrationContext
from ds_dynmo.engine.move.packing import PackedLayer
from ds_dynmo.errors import MigrationError, PartitionError
from ds_dynmo.plan import MigrationPlan

_ARRIVING = "finishing a move that began before the batch"
_GETTING_READY = "getting layers ready to move"
_MAKING_ROOM = "making room for what arrives along one route"


class MoveCheck(Protocol):
    """A check that refuses a plan on which all ranks have agreed. Collective: it raises on every rank or on none."""

    def __call__(self, plan: MigrationPlan, *, overlapped: bool) -> None:
        """Raise if ``plan`` must not be carried out. ``overlapped``: see :meth:`Migrator.prepare`."""
        ...


class MoveResult(NamedTuple):
    """How a move went.

    Attributes:
        bytes_moved: in this rank's pipeline.
        waited_seconds: the longest that training waited for it on a rank.
        share_in_time: the least share of a rank's messages that had arrived when its batch could do no more without
            them.
    """

    bytes_moved: int
    waited_seconds: float
    share_in_time: float


TensorsOfLayers = Mapping[int, Sequence[torch.Tensor]]
LastTensors = tuple[TensorsOfLayers, TensorsOfLayers]  # that travel at the commit: sent, received


class _Changes(NamedTuple):
    """A rank's message to the others after a batch during which layers travelled.

    Attributes:
        state: what every rank has to know of the optimizer's state; None: nothing.
        layers: whether a layer that leaves has changed in more than its values.
        functions: of the layer list that move, what they have come to hold.
    """

    state: Any
    layers: bool
    functions: Changes


@dataclass
class _Migration:
    """A prepared plan.

    Attributes:
        packed: layers that leave this rank.
        arrivals: layers that arrive on this rank.
        sent_bytes: that leave this rank.
        under_way: messages that were started.
        waited_seconds: that training waited before the batch.
        drain_seconds: that this rank waited for others whose batch went on.
        copying: copies what stays on this rank to its new memory, a bounded part at a time.
    """

    plan: MigrationPlan
    context: MigrationContext
    overlapped: bool
    packed: dict[int, PackedLayer]
    arrivals: dict[int, ArrivingLayer]
    sent_bytes: int
    waited_seconds: float = 0.0
    drain_seconds: float = 0.0
    under_way: Rounds | None = None
    copying: Iterator[None] = field(default_factory=lambda: iter(()))


class Migrator:
    """Moves layers between stages, one plan at a time. Every method but :meth:`poll` is collective.

    Args:
        make_context: returns this rank's present stage.
    """

    def __init__(self, make_context: Callable[[], MigrationContext]) -> None:
        self.make_context = make_context
        self._migration: _Migration | None = None

    def migrate(self, plan: MigrationPlan, check: MoveCheck | None = None) -> int:
        """Carry out ``plan`` between two batches: all phases in a row.

        Args:
            check: see :meth:`prepare`.

        Returns:
            Bytes moved in this rank's pipeline.

        Raises:
            MigrationError: on every rank that can still raise it. The message says whether layers had begun to move.
        """
        if not self.prepare(plan, check):
            return 0
        self.start()
        return self.commit().bytes_moved

    @property
    def is_moving(self) -> bool:
        """Whether a plan is prepared but not committed."""
        return self._migration is not None

    # -- the phases -----------------------------------------------------------------------------------

    def prepare(
        self,
        plan: MigrationPlan,
        check: MoveCheck | None = None,
        *,
        overlapped: bool = False,
    ) -> bool:
        """Prepare ``plan``. Nothing has moved afterwards, and :meth:`abandon` is possible.

        Args:
            plan: the same on every rank.
            check: refuses plans, such as one for which a rank lacks memory.
            overlapped: whether a batch trains between :meth:`start` and :meth:`commit`. Then all optimizer state
                travels ahead, and exists twice meanwhile; else flat buffers follow at the commit, kind after kind.

        Returns:
            Whether there is anything to do: a layer to move, or one that goes from one chunk of its stage to the other.

        Raises:
            MigrationError: on every rank that can still raise it.
        """
        assert self._migration is None, "one plan at a time"
        if plan.new == plan.old:
            return False
        context, began = self.make_context(), time.perf_counter()
        if check is not None:
            check(plan, overlapped=overlapped)
        try:
            self._migration = self._prepared(plan, context, overlapped)
        except (PartitionError, MigrationError):
            context.state.abandon()
            raise
        self._migration.waited_seconds = time.perf_counter() - began
        return True

    def _prepared(self, plan: MigrationPlan, context: MigrationContext, overlapped: bool) -> _Migration:
        """Pack leaving layers, make room for arriving ones, and agree that every rank has done so. Collective."""

        def pack() -> tuple[tuple[Any, Changes] | None, dict[int, PackedLayer]]:
            context.check()
            state, functions = context.state.describe(), context.changed_functions(plan)
            return None if state is None and not functions else (state, functions), context.pack_leaving(plan)

        descriptions, packed = context.comm.agree_and_gather(_GETTING_READY, pack, alike=str)
        try:
            arrivals = _exchange_headers(plan, context, packed)
        except Exception as error:
            raise MigrationError(
                f"rank {context.comm.here.rank} failed to tell the others what its layers consist of: {error}. "
                "No layer has moved, yet the ranks are out of step: resume the job from its last checkpoint"
            ) from error

        def receive() -> tuple[int, str]:
            context.prepare_ties(plan)  # collective, so it comes before what may fail on one rank
            described = {rank: of_rank or (None, {}) for rank, of_rank in descriptions().items()}
            check_same([functions for _, functions in described.values()])
            states = {rank: state for rank, (state, _) in described.items()}
            sent = context.state.prepare(plan, states, overlapped=overlapped)
            context.receive(arrivals)
            return sent

        state_bytes, _ = context.comm.everywhere(
            _MAKING_ROOM, receive, same=itemgetter(1), compared_in=context.comm.here.in_pipeline
        )
        sent_bytes = state_bytes + sum(layer.num_bytes for layer in packed.values())
        return _Migration(plan, context, overlapped, packed, arrivals, sent_bytes)

    def abandon(self) -> None:
        """Drop the prepared plan; nothing has changed. Every rank has to call this.

        Raises:
            MigrationError: fatal; what was started did not arrive, and would be taken for another message.
        """
        migration = self._in_progress()
        if migration.under_way is not None:
            with self._errors_are_fatal("receiving layers"):
                migration.under_way.wait()
        self._migration = None
        migration.context.state.abandon()

    def start(self) -> None:
        """Start to send what only the optimizer's step changes, and return at once.

        Raises:
            MigrationError: fatal.
        """
        migration, began = self._in_progress(), time.perf_counter()
        with self._errors_are_fatal("sending layers"):
            sends, receives = self._transfers(
                {index: layer.changed_by_step for index, layer in migration.packed.items()},
                {index: layer.changed_by_step for index, layer in migration.arrivals.items()},
            )
            more_sends, more_receives = migration.context.state.transfers()
            p2p = migration.context.comm.p2p
            begin = p2p.begin if migration.overlapped else p2p.begin_at_once
            migration.under_way = begin(sends + more_sends, receives + more_receives)
            migration.under_way.advance()
            if migration.overlapped:
                staying = migration.context.staying(migration.plan)
                migration.copying = migration.context.state.copying(staying)
        migration.waited_seconds += time.perf_counter() - began

    def poll(self) -> bool:
        """Send the next part of what travels, and copy the next part of what stays, without waiting.

        Only while a batch trains.

        Returns:
            Whether all has arrived, or :meth:`commit` will raise.
        """
        migration = self._in_progress()
        assert migration.under_way is not None and migration.overlapped, "start comes first"
        try:
            next(migration.copying, None)
        except Exception as error:  # of this rank alone: all ranks learn of it in commit
            migration.copying = _failing(error)
        return migration.under_way.advance()

    def commit(self) -> MoveResult:
        """Send what may have changed, rebuild the stages, and free the layers that left.

        Call it between two batches, or, if a batch trains during the move, between the reduction of its gradients and
        the optimizer's step. The gradients move with the layers.

        Raises:
            MigrationError: fatal. If a batch trained during the move: harmless, on every rank, if nothing had changed.
        """
        migration, began = self._in_progress(), time.perf_counter()
        context = migration.context
        if migration.overlapped:
            try:
                last = self._arrive(migration)
            except MigrationError as error:
                if error.harmless:
                    self.abandon()
                raise
        else:
            last = (
                {index: layer.changed_any_time for index, layer in migration.packed.items()},
                {index: layer.changed_any_time for index, layer in migration.arrivals.items()},
            )
        with self._errors_are_fatal("sending layers"):
            assert migration.under_way is not None, "start comes first"
            if migration.overlapped:  # its rounds come first on every rank
                migration.under_way.wait()
            rest = context.comm.p2p.post(*self._transfers(*last))
            del last  # the memory of layers that leave
            context.state.copy_staying(context.staying(migration.plan))
            migration.under_way.wait()
            rest.wait()
        with self._errors_are_fatal("rebuilding the stage"):
            arrived = {index: arrival.materialize() for index, arrival in migration.arrivals.items()}
            context.free(migration.packed, migration.plan)
            migration.packed.clear()
            context.rebuild(migration.plan, arrived)
        with self._errors_are_fatal("handing the parameters over to the optimizer"):
            context.state.install_parameters(context.layers.parameters(), arrived)
        with self._errors_are_fatal("tying layers"):
            context.layers.tie(context.comm.grid, context.comm.groups.tied)
        with self._errors_are_fatal("waiting for the other ranks"):
            waited_seconds = migration.waited_seconds + time.perf_counter() - began - migration.drain_seconds
            mine = waited_seconds, -migration.under_way.share_in_time
            (waited_seconds, late), bytes_moved = context.comm.all_moved(mine, migration.sent_bytes)
        self._migration = None
        return MoveResult(int(bytes_moved), waited_seconds, -late)

    # -- messages -------------------------------------------------------------------------------------

    def _arrive(self, migration: _Migration) -> LastTensors:
        """Finish the copies, and list what is left to travel.

        Raises:
            MigrationError: harmless, on every rank, if a rank cannot describe its layers or lacks memory; else fatal.
        """
        context, arrivals = migration.context, migration.arrivals
        context.comm.enter("rebalance")
        working_until = 0.0

        def copy_and_list() -> tuple[_Changes | None, LastTensors]:
            """Make ready and list what is left."""
            nonlocal working_until
            for _ in migration.copying:
                pass
            context.state.take_gradients()
            left = context.values_left(migration.packed)
            gradient_dtype = context.state.gradient_dtype
            buffers = {index: layer.expect_gradients(gradient_dtype) for index, layer in arrivals.items()}
            changes = _Changes(context.state.changes(), left is None, context.changed_functions(migration.plan))
            working_until = time.perf_counter()
            return (changes if any(changes) else None), (left or {}, buffers)

        of_ranks, last = context.comm.agree_and_gather(_ARRIVING, copy_and_list)
        # This collective is the first since the batch began: this rank waited for those whose batch went on.
        migration.drain_seconds = time.perf_counter() - working_until
        with self._errors_are_fatal("reading what the batch has changed"):
            changes = [rank for rank in of_ranks().values() if rank is not None]
        try:
            check_same([rank.functions for rank in changes])
        except TypeError as error:  # on all ranks alike
            raise MigrationError(f"{_ARRIVING}: {error}. No layer has moved", harmless=True) from error
        with self._errors_are_fatal("reading what the batch has changed"):
            context.state.apply_changes([rank.state for rank in changes])
        if not any(rank.layers for rank in changes):
            return last
        del last
        return self._describe_again(migration)

    def _describe_again(self, migration: _Migration) -> LastTensors:
        """Exchange descriptions of the layers again, which a batch has changed.

        Raises:
            MigrationError: as for :meth:`_arrive`.
        """
        context, arrivals = migration.context, migration.arrivals
        migration.packed = context.comm.everywhere(_ARRIVING, lambda: context.pack_again(migration.packed))
        with self._errors_are_fatal("describing layers"):
            migration.arrivals = _exchange_headers(migration.plan, context, migration.packed)
        context.comm.everywhere(_ARRIVING, lambda: context.receive(migration.arrivals, arrivals))
        return (
            {index: layer.tensors for index, layer in migration.packed.items()},
            {index: layer.recv_buffers for index, layer in migration.arrivals.items()},
        )

    def _transfers(
        self, leaving: Mapping[int, Sequence[torch.Tensor]], arriving: Mapping[int, Sequence[torch.Tensor]]
    ) -> tuple[list[PeerTensor], list[PeerTensor]]:
        """List the sends and receives of each layer, in the order that both ranks use."""
        sends: list[PeerTensor] = []
        receives: list[PeerTensor] = []
        migration = self._in_progress()
        rank_of = migration.context.comm.rank_of
        for move in migration.context.sent(migration.plan):
            sends += [(rank_of(move.destination), flat) for flat in leaving.get(move.layer, ())]
            receives += [(rank_of(move.source), flat) for flat in arriving.get(move.layer, ())]
        return sends, receives

    # -- errors ---------------------------------------------------------------------------------------

    def _in_progress(self) -> _Migration:
        assert self._migration is not None, "prepare comes first"
        return self._migration

    @contextmanager
    def _errors_are_fatal(self, step: str) -> Iterator[None]:
        """Turn an exception into a fatal error: bytes have begun to move."""
        try:
            yield
        except Exception as error:
            migration, self._migration = self._in_progress(), None
            plan, rank = migration.plan, migration.context.comm.here.rank
            raise MigrationError(
                f"rank {rank} failed {step} while layers moved from {plan.old} to {plan.new}: "
                f"{error}. Layers had begun to move: resume the job from its last checkpoint"
            ) from error


def _failing(error: Exception) -> Iterator[None]:
    """Raise ``error`` when the first element is asked for."""
    raise error
    yield


def _exchange_headers(
    plan: MigrationPlan, context: MigrationContext, packed: Mapping[int, PackedLayer]
) -> dict[int, ArrivingLayer]:
    """Exchange the headers of leaving layers for those of arriving ones."""
    leaving: dict[int, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    for move in context.sent(plan):
        if move.source == context.stage_id:
            leaving.setdefault(move.destination, []).append(move.layer)
        if move.destination == context.stage_id:
            arriving.setdefault(move.source, []).append(move.layer)
    headers = context.comm.p2p.exchange_headers(
        {stage: pickle.dumps([packed[index].header for index in indices]) for stage, indices in leaving.items()},
        list(arriving),
    )
    return {
        index: ArrivingLayer(header)
        for stage, indices in arriving.items()
        for index, header in zip(indices, pickle.loads(headers[stage]))
    }

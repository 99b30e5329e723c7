"""Every collective and point-to-point operation of our own: no other module in ``engine/`` calls one.

Small numbers travel on a gloo group of their own, on the CPU, with a time-out of their own: no
synchronisation with an accelerator, and a rank that does not take part is an error that names it. Layers
travel on the default group, between the ranks of the same data-parallel index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.engine.comm import hosts
from ds_dynmo.engine.comm.bounded import BoundedStore, within
from ds_dynmo.engine.serialization.objects import from_bytes, to_bytes
from ds_dynmo.errors import MigrationError
from ds_dynmo.plan import MigrationPlan

SMALL_BYTES = 1 << 16  # a tensor of no more travels in one message with others
_CLOCK_ROUNDS = 10

Placed = tuple[int, torch.Tensor]  # a tensor and the rank it goes to or comes from


@dataclass(frozen=True)
class _Sent:
    """A value on its way to other ranks, or why it cannot be sent."""

    data: bytes
    problem: str = ""

    @classmethod
    def of(cls, value: Any) -> _Sent:
        try:
            return cls(to_bytes(value))
        except Exception as error:  # whatever a user's object raises: the others have to hear of it
            return cls(b"", repr(error))


def nothing() -> None:
    """There is nothing else to do."""


def check_hosts(timeout_seconds: float) -> None:
    """Refuse a job whose ranks would be on several hosts and could not meet. Collective where the ranks have met.

    Raises:
        ConfigError: see :mod:`ds_dynmo.engine.comm.hosts`. No group has been made.
    """
    if not dist.is_initialized():
        hosts.check_launch()
    elif dist.get_world_size() > 1:
        store = BoundedStore(_default_store(), timeout_seconds)
        hosts.check_hosts(store, dist.get_rank(), dist.get_world_size(), timeout_seconds)


class Communicator:
    """One rank's view of the others. Construction and every method but the point-to-point ones are collective.

    Args:
        grid: DeepSpeed's ``PipelineParallelGrid``.
        device: the engine's device.
        timeout_seconds: how long a collective waits for the other ranks.
    """

    def __init__(self, grid: Any, device: torch.device, timeout_seconds: float) -> None:
        self._grid = grid
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._tied_groups: dict[tuple[int, ...], Any] = {}
        self.connect("initialize")

    # -- who takes part -------------------------------------------------------------------------------

    def connect(self, what: str) -> None:
        """Make the groups of the present world, for the first time or anew; ``what`` it is done for. Collective."""
        timeout = timedelta(seconds=self._timeout_seconds)
        self._control = within(2 * self._timeout_seconds, lambda: dist.new_group(backend="gloo", timeout=timeout))
        self._tied_groups.clear()
        self._store = BoundedStore(_default_store(), self._timeout_seconds)
        self._entered = 0
        self._what = what
        self._announce()

    def _announce(self) -> None:
        with suppress(RuntimeError):  # only says who is missing; the collective itself fails if this rank is cut off
            self._store.set(_entered_key(dist.get_rank()), str(self._entered))

    def _missing(self) -> list[int]:
        keys = map(_entered_key, range(dist.get_world_size()))
        return [
            rank
            for rank, key in enumerate(keys)
            if not self._store.check([key]) or int(self._store.get(key)) < self._entered
        ]

    def enter(self, what: str) -> None:
        """Say that this rank takes part in the collective ``what`` that now begins."""
        self._entered += 1
        self._what = what
        self._announce()

    def _control_failed(self, error: RuntimeError) -> MigrationError:
        who = "a rank failed, or the link to it"
        if "timed out" in str(error).lower():
            try:
                missing = self._missing()
            except RuntimeError as silence:  # which is no reason to keep quiet of the first error
                who = f"after {self._timeout_seconds:g} s a rank is missing, and it is not known which: {silence}"
            else:
                if missing:
                    who = f"ranks {missing} did not call it within {self._timeout_seconds:g} s"
        return MigrationError(
            f"{self._what} is collective, but {who}. No layer has moved, yet the ranks are out of step: resume the job "
            f"from its last checkpoint ({error})"
        )

    # -- small numbers --------------------------------------------------------------------------------

    def max_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over all ranks of a CPU tensor, in place."""
        try:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._control)
        except RuntimeError as error:
            raise self._control_failed(error) from error
        return numbers

    def sum_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over all ranks; the result is on the device of ``numbers``."""
        moved = numbers.to(self._device, copy=True)
        dist.all_reduce(moved)
        return moved.to(numbers.device)

    def sum_over_model(self, numbers: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over all ranks of this replica: stages and tensor-parallel slices."""
        moved = numbers.to(self._device, copy=True)
        dist.all_reduce(moved, group=self._grid.get_model_parallel_group())
        return moved.to(numbers.device)

    def sum_over_stages(self, numbers: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the stages of this replica's pipeline; the result is on the device of ``numbers``."""
        moved = numbers.to(self._device, copy=True)
        dist.all_reduce(moved, group=self._grid.get_pipe_parallel_group())
        return moved.to(numbers.device)

    def sum_over_replicas(self, numbers: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the data-parallel replicas of this stage, on the device of ``numbers``."""
        moved = numbers.to(self._device, copy=True)
        dist.all_reduce(moved, group=self._grid.get_data_parallel_group())
        return moved.to(numbers.device)

    def gather_objects(self, value: Any) -> list[Any]:
        """One small picklable value of every rank, in rank order.

        Raises:
            MigrationError: on every rank, where that of one cannot be sent.
        """
        gathered: list[Any] = [None] * dist.get_world_size()
        sent = _Sent.of(value)
        try:
            dist.all_gather_object(gathered, sent, group=self._control)
        except RuntimeError as error:
            raise self._control_failed(error) from error
        return self._received(gathered)

    def broadcast_object(self, value: Any) -> Any:
        """The picklable value of rank 0, whatever the others pass.

        Raises:
            MigrationError: on every rank, where it cannot be sent.
        """
        box = [_Sent.of(value) if dist.get_rank() == 0 else None]
        try:
            dist.broadcast_object_list(box, src=0, group=self._control)
        except RuntimeError as error:
            raise self._control_failed(error) from error
        return self._received(box)[0]

    def _received(self, every: Sequence[Any]) -> list[Any]:
        problems = {rank: sent.problem for rank, sent in enumerate(every) if sent.problem}
        if problems:
            raise MigrationError(f"{self._what}: ranks cannot send what they have to: {problems}", harmless=True)
        return [from_bytes(sent.data, self._device) for sent in every]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """A byte string of every rank, all of one length, in rank order; nothing is unpickled."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        try:
            dist.all_gather(every, mine, group=self._control)
        except RuntimeError as error:
            raise self._control_failed(error) from error
        return [row.numpy().tobytes() for row in every]

    def gather_over_slices(self, value: Any) -> list[Any]:
        """One small picklable value of every tensor-parallel slice of this stage and replica, by slice index."""
        slices = self._grid.get_slice_parallel_world_size()
        if slices == 1:
            return [value]
        gathered: list[Any] = [None] * slices
        dist.all_gather_object(gathered, _Sent.of(value), group=self._grid.get_slice_parallel_group())
        return self._received(gathered)

    def clock_offset(self, now: Callable[[], float]) -> tuple[float, float]:
        """Seconds that this rank's clock is ahead of rank 0's, and the most that they can be wrong by.

        A rank asks rank 0 for its time, a few times; the quickest answer counts: half of the time that it took is how
        far off it can be (Cristian, "Probabilistic clock synchronization", 1989).
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        question, answer = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        trips: list[tuple[float, float]] = [] if rank else [(0.0, 0.0)]
        try:
            for asking in range(1, world):
                for _ in range(_CLOCK_ROUNDS if rank in (0, asking) else 0):
                    if rank == 0:
                        dist.recv(question, asking, group=self._control)
                        answer[0] = now()
                        dist.send(answer, asking, group=self._control)
                    else:
                        asked = now()
                        dist.send(question, 0, group=self._control)
                        dist.recv(answer, 0, group=self._control)
                        half = (now() - asked) / 2
                        trips.append((half, asked + half - answer.item()))
        except RuntimeError as error:
            raise self._control_failed(error) from error
        error_seconds, offset_seconds = min(trips)
        return offset_seconds, error_seconds

    def gather_on_first(self, value: Any) -> list[Any]:
        """One small picklable value of every rank, in rank order, on rank 0; nothing elsewhere."""
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        try:
            dist.gather_object(_Sent.of(value), gathered, group_dst=0, group=self._control)
        except RuntimeError as error:
            raise self._control_failed(error) from error
        return self._received(gathered or [])

    def make_or_fail(self, what: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gives on this rank, once every rank is done with its own.

        Raises:
            MigrationError: on every rank, where it fails on one.
        """
        made: list[Any] = []
        self.gather_or_fail(what, lambda: made.append(make()))
        return made[0]

    def gather_or_fail(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """What ``make`` gives on every rank.

        Raises:
            MigrationError: on every rank, where it fails on one.
        """
        failure: Exception | None = None
        try:
            value = (True, make())
        except Exception as error:  # whatever a user's layer raises: the others have to hear of it
            failure, value = error, (False, repr(error))
        every = self.gather_objects(value)
        failed = {rank: text for rank, (made, text) in enumerate(every) if not made}
        if failed:
            raise MigrationError(f"{what} failed on ranks {failed}. No layer has moved", harmless=True) from failure
        return [value for _, value in every]

    def agree(self, plan: MigrationPlan | None) -> None:
        """All ranks are about to carry out the same plan; None: this rank has none.

        Raises:
            MigrationError: on every rank, if plans differ or a rank has none. Nothing has moved.
        """
        digest = plan.digest if plan is not None else 0
        digests = self._gather([digest, int(plan is not None)])
        without = [rank for rank, (_, has) in enumerate(digests) if not has]
        if without:
            raise MigrationError(f"ranks {without} could not decide where layers go. No layer has moved", harmless=True)
        assert plan is not None
        self._same(digest, [theirs for theirs, _ in digests], plan.old, plan.new)

    def agree_on(self, new: Sequence[int] | None, old: Sequence[int]) -> None:
        """All ranks are about to go to the same partition, of whatever number of stages; None: this rank has none.

        Raises:
            MigrationError: on every rank, if partitions differ or a rank has none. Nothing has moved.
        """
        every = self.gather_objects(None if new is None else tuple(new))
        without = [rank for rank, theirs in enumerate(every) if theirs is None]
        if without:
            raise MigrationError(f"ranks {without} could not decide where layers go. No layer has moved", harmless=True)
        assert new is not None
        self._same(tuple(new), every, old, new)

    def _same(self, mine: Any, every: Sequence[Any], old: Sequence[int], new: Sequence[int]) -> None:
        other = [rank for rank, theirs in enumerate(every) if theirs != mine]
        if other:
            raise MigrationError(
                f"rank {dist.get_rank()} is to go from {list(old)} to {list(new)}, ranks {other} elsewhere: "
                "every rank has to ask for the same partition. No layer has moved",
                harmless=True,
            )

    def all_ready(self, failure: Exception | None, outgoing_bytes: int) -> int:
        """Agree that every rank is ready to send.

        Args:
            failure: what keeps this rank from it; None: it is ready.
            outgoing_bytes: that will leave this rank.

        Returns:
            Bytes that move in this rank's pipeline.

        Raises:
            MigrationError: on every rank, if one is not ready, with the first one's failure. Nothing has moved.
        """
        every = self._gather([int(failure is None), outgoing_bytes])
        unready = [rank for rank, (is_ready, _) in enumerate(every) if not is_ready]
        if unready:
            first = self.gather_objects(None if failure is None else str(failure))[unready[0]]
            raise MigrationError(
                f"ranks {unready} could not get their layers ready: {first}. No layer has moved", harmless=True
            )
        return sum(every[rank][1] for rank in self._grid.pp_group)

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        try:
            dist.all_gather(every, mine, group=self._control)
        except RuntimeError as error:
            raise self._control_failed(error) from error
        return [row.tolist() for row in every]

    def exchange_lists(self, outgoing: dict[int, list[float]], sources: Sequence[int]) -> dict[int, list[float]]:
        """Send a list of floats to each stage of ``outgoing``; receive one from each stage of ``sources``."""
        headers = {stage: torch.tensor(numbers, dtype=torch.float64) for stage, numbers in outgoing.items()}
        received = self.exchange_headers({stage: t.numpy().tobytes() for stage, t in headers.items()}, sources)
        return {
            stage: torch.frombuffer(bytearray(data), dtype=torch.float64).tolist() for stage, data in received.items()
        }

    def _swap(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        works: list[Any] = [
            dist.irecv(tensor, rank, group=self._control) for rank, tensor in incoming.items() if tensor.numel()
        ]
        works += [dist.isend(tensor, rank, group=self._control) for rank, tensor in outgoing.items() if tensor.numel()]
        for work in works:
            work.wait(timedelta(seconds=self._timeout_seconds))

    # -- layers ---------------------------------------------------------------------------------------

    def exchange_headers(self, outgoing: dict[int, bytes], sources: Sequence[int]) -> dict[int, bytes]:
        """Send one byte string to each stage of ``outgoing``; receive one from each stage of ``sources``."""
        rank_of = self._grid.stage_to_global
        stages = {rank_of(stage): stage for stage in sources}
        received = self.exchange_bytes({rank_of(stage): header for stage, header in outgoing.items()}, list(stages))
        return {stages[rank]: header for rank, header in received.items()}

    def exchange_bytes(self, outgoing: dict[int, bytes], sources: Sequence[int]) -> dict[int, bytes]:
        """Send one byte string to each rank of ``outgoing``; receive one from each rank of ``sources``."""
        sizes_out = {rank: torch.tensor([len(data)]) for rank, data in outgoing.items()}
        sizes_in = {rank: torch.zeros(1, dtype=torch.int64) for rank in sources}
        self._swap(sizes_out, sizes_in)
        out = {rank: torch.frombuffer(bytearray(data), dtype=torch.uint8) for rank, data in outgoing.items() if data}
        arriving = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes_in.items()}
        self._swap(out, arriving)
        return {rank: data.numpy().tobytes() for rank, data in arriving.items()}

    def exchange(
        self, sends: Sequence[Placed], receives: Sequence[Placed], meanwhile: Callable[[], None] = nothing
    ) -> None:
        """Send contiguous tensors to ranks and receive into others, in place; all posted before any is awaited.

        Between two ranks, both sides have to name the same sizes in the same order. Small tensors of a pair travel
        together in one message; large ones are sent from and received into their own memory. ``meanwhile`` is called
        while they are under way.
        """
        filled: list[tuple[torch.Tensor, torch.Tensor]] = []
        operations: list[Any] = []
        for peer, message in _messages(receives):
            room = message[0] if len(message) == 1 else _staging(message)
            landing = self._transportable(room, copy=False)
            if landing is not room:
                filled.append((room, landing))
            filled += zip(message, torch.split(room, [t.numel() for t in message])) if len(message) > 1 else []
            operations.append(dist.P2POp(dist.irecv, landing, peer))
        for peer, message in _messages(sends):
            whole = message[0] if len(message) == 1 else torch.cat(message)
            operations.append(dist.P2POp(dist.isend, self._transportable(whole, copy=True), peer))
        works = dist.batch_isend_irecv(operations) if operations else ()
        meanwhile()
        for work in works:
            work.wait(timedelta(seconds=self._timeout_seconds))
        for room, landing in filled:
            room.copy_(landing)

    def all_done(self) -> None:
        """Wait until every rank came through; a rank that failed is missed after the time-out."""
        try:
            dist.barrier(group=self._control)
        except RuntimeError as error:
            raise MigrationError(f"another rank did not come through ({error})") from error

    def _transportable(self, tensor: torch.Tensor, copy: bool) -> torch.Tensor:
        """``tensor``, or a copy of it where the default group's backend can reach it (NCCL: the accelerator)."""
        if tensor.device.type == self._device.type:
            return tensor
        return tensor.to(self._device) if copy else torch.empty_like(tensor, device=self._device)

    def tied_group(self, ranks: Sequence[int]) -> Any:
        """The process group of ``ranks``, made once. Every rank of the world has to ask in the same order."""
        key = tuple(ranks)
        if key not in self._tied_groups:
            self._tied_groups[key] = within(2 * self._timeout_seconds, lambda: dist.new_group(ranks=list(key)))
        return self._tied_groups[key]


def _entered_key(rank: int) -> str:
    """Where a rank writes which collective of its own it has come to."""
    return f"ds_dynmo/entered/{rank}"


def _default_store() -> Any:
    """The default group's store, to say which rank is missing. Private in torch; read in 2.13.0."""
    return dist.distributed_c10d._get_default_store()


def _messages(placed: Sequence[Placed]) -> list[tuple[int, list[torch.Tensor]]]:
    """What goes to or comes from each peer, as bytes: one message of all small tensors, one for each large one."""
    small: dict[tuple[int, str], list[torch.Tensor]] = {}
    large: list[tuple[int, list[torch.Tensor]]] = []
    for peer, tensor in placed:
        flat = tensor.detach().view(torch.uint8)
        if flat.numel() > SMALL_BYTES:
            large.append((peer, [flat]))
        elif flat.numel():
            small.setdefault((peer, flat.device.type), []).append(flat)
    return [(peer, flats) for (peer, _), flats in small.items()] + large


def _staging(message: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty(sum(t.numel() for t in message), dtype=torch.uint8, device=message[0].device)

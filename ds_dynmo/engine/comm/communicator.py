"""The control plane: small values that ranks exchange, and agreement between ranks before layers move.

It uses a separate gloo group on the CPU with a separate time-out. So it never waits for an accelerator, and if a rank
does not take part, the error names it. Ranks come to it from training and from code of the user, which may keep one of
them: for that rank they wait as long as a batch does (:meth:`Communicator.enter`). Layers travel from rank to rank on
another group (:mod:`ds_dynmo.engine.comm.point_to_point`).
"""

from __future__ import annotations

import hashlib
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_dynmo.engine.comm import hosts
from ds_dynmo.engine.comm.bounded import BoundedStore, call_within_seconds, default_timeout
from ds_dynmo.engine.comm.clock import clock_offset
from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.comm.neighbour_links import NeighbourLinks
from ds_dynmo.engine.comm.objects import from_bytes, to_bytes
from ds_dynmo.engine.comm.point_to_point import PointToPoint
from ds_dynmo.engine.comm.posted import PostedBroadcast, PostedMaximum
from ds_dynmo.engine.comm.same_facts import ranks_by
from ds_dynmo.engine.comm.store_agreement import StoreAgreement
from ds_dynmo.errors import MigrationError, PartitionError, raise_unless_harmless
from ds_dynmo.torch_private import default_store, prefix_store

Result = TypeVar("Result")
Value = TypeVar("Value")

_EXPECTED = (PartitionError, MigrationError)  # training can continue after them


@dataclass(frozen=True)
class _EncodedValue:
    """A pickled value for other ranks, or the reason why it cannot be sent."""

    data: bytes
    problem: str = ""

    @classmethod
    def of(cls, value: Any) -> _EncodedValue:
        try:
            return cls(to_bytes(value))
        except Exception as error:  # any error of a user's object; other ranks have to know
            return cls(b"", repr(error))


@dataclass(frozen=True)
class _Failure:
    """An exception in the form that is sent to other ranks."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        expected = (kind.__name__ for kind in _EXPECTED if isinstance(error, kind))
        return cls(next(expected, type(error).__name__), str(error))

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    @property
    def is_expected(self) -> bool:
        return any(kind.__name__ == self.kind for kind in _EXPECTED)

    def error(self, message: str) -> Exception:
        """Build the error that this rank raises for it."""
        if self.kind == PartitionError.__name__:
            return PartitionError(message)
        return MigrationError(message, harmless=True)


def check_hosts(timeout_seconds: float) -> None:
    """Refuse a job whose hosts cannot reach each other. Collective once the ranks are connected.

    Raises:
        ConfigError: see :mod:`ds_dynmo.engine.comm.hosts`. No group has been created.
    """
    if not dist.is_initialized():
        hosts.check_launch()
    elif dist.get_world_size() > 1:
        store = BoundedStore(default_store(), timeout_seconds)
        hosts.check_hosts(store, dist.get_rank(), dist.get_world_size(), timeout_seconds)


class Communicator:
    """One rank's view of the others. Construction is collective, and so are the methods that say so.

    Args:
        grid: DeepSpeed's ``PipelineParallelGrid``.
        device: the engine's device.
        timeout_seconds: that a collective waits for ranks that have begun the same operation.

    Attributes:
        here: this rank's coordinates in the present world.
        grid: DeepSpeed's grid of the present world.
        device: the engine's device.
        p2p: messages between two ranks.
        worlds_left: number of worlds that this rank has left: a re-packing ends one.
    """

    def __init__(self, grid: Any, device: torch.device, timeout_seconds: float) -> None:
        self.grid = grid
        self.device = device
        self._timeout_seconds = timeout_seconds
        self._timeout = timedelta(seconds=timeout_seconds)
        self._tied_groups: dict[tuple[int, ...], Any] = {}
        self._posted: PostedBroadcast | None = None
        self.worlds_left = 0
        self.sum_over_world(torch.zeros(1, device="cpu"))
        self.connect("initialize")

    # -- who takes part -------------------------------------------------------------------------------

    def connect(self, what: str) -> None:
        """Create the process groups of the present world for the operation ``what``. Collective over the world."""
        self.here = RankCoordinates.of(self.grid)
        self._control = call_within_seconds(
            2 * self._timeout_seconds, lambda: dist.new_group(backend="gloo", timeout=self._timeout)
        )
        self.p2p = PointToPoint(self.rank_of, self._control, self.device, self._timeout_seconds)
        self._tied_groups.clear()
        self._rank_alone: Any = None
        self._neighbour_links: NeighbourLinks | None = None
        self._store = BoundedStore(default_store(), self._timeout_seconds)
        self._entered, self._next_timeout = 0, self._timeout
        self._what = what
        self._announce()

    def leave(self) -> None:
        """Wait until every rank is done, before the present world ends. Collective."""
        self.wait_for_posted_broadcast()
        self.all_done()
        self.worlds_left += 1

    def _announce(self) -> None:
        with suppress(RuntimeError):  # only used to name missing ranks; a collective fails by itself
            self._store.set(_entered_key(dist.get_rank()), str(self._entered))

    def _missing(self) -> list[int]:
        keys = map(_entered_key, range(dist.get_world_size()))
        return [
            rank
            for rank, key in enumerate(keys)
            if not self._store.check([key]) or int(self._store.get(key)) < self._entered
        ]

    def enter(self, what: str) -> None:
        """Announce that this rank takes part in the collective ``what``, which starts now.

        The first reduction of it waits for the other ranks as long as a batch does.
        """
        self.wait_for_posted_broadcast()
        self._entered += 1
        self._what, self._next_timeout = what, self._timeout_of_batch()
        self._announce()

    def _timeout_of_batch(self) -> timedelta:
        """Return how long ranks wait for one that trains, or that code of the user keeps."""
        return max(self._timeout, default_timeout())

    def rank_of(self, stage: int, replica: int | None = None) -> int:
        """Return the rank that holds ``stage`` for this tensor-parallel slice; ``replica`` None: this rank's."""
        if replica is None:
            return int(self.grid.stage_to_global(stage))
        return int(self.grid.stage_to_global(stage, data=replica))

    # -- broadcasts that are waited for later ---------------------------------------------------------

    def post(self, tensor: torch.Tensor, src: int, group: Any) -> PostedBroadcast:
        """Post a broadcast in a group, after a wait for the previous one: at most one is under way.

        Collective over ``group``.
        """
        self.wait_for_posted_broadcast()
        self._posted = PostedBroadcast(tensor, src, group)
        return self._posted

    def wait_for_posted_broadcast(self) -> None:
        """Wait for the broadcast that was posted last. Ranks that are still in an earlier batch are not missing."""
        posted, self._posted = self._posted, None
        if posted is not None:
            posted.wait()

    def _control_failed(self, error: RuntimeError, timeout: timedelta | None = None) -> MigrationError:
        who, waited = "a rank failed, or the link to it", f"{(timeout or self._timeout).total_seconds():g} s"
        if "timed out" in str(error).lower():
            try:
                missing = self._missing()
            except RuntimeError as silence:  # report the first error anyway
                who = f"after {waited} a rank is missing, and it is not known which: {silence}"
            else:
                if missing:
                    who = f"ranks {missing} did not call it within {waited}"
        return MigrationError(
            f"{self._what} is collective, but {who}. No layer has moved, yet the ranks are out of step: resume the job "
            f"from its last checkpoint ({error})"
        )

    # -- beside the main thread -----------------------------------------------------------------------

    def post_max(self, numbers: torch.Tensor) -> PostedMaximum:
        """Post an elementwise maximum over all ranks of a CPU tensor, in place. Collective over the world.

        It waits as long as a batch does for ranks that have not posted it.
        """
        return PostedMaximum(numbers, self._control, self._timeout_of_batch())

    def read_max(self, posted: PostedMaximum) -> torch.Tensor:
        """Wait for the numbers of :meth:`post_max`."""
        try:
            posted.wait()
        except RuntimeError as error:
            raise self._control_failed(error, posted.timeout) from error
        return posted.tensor

    def store_agreement(self) -> StoreAgreement:
        """Return a way by which threads of all ranks agree without collectives. Collective over the world."""
        name = self.broadcast_object(uuid.uuid4().hex)
        store = BoundedStore(default_store(), self._timeout_seconds)
        prefixed = store.view(prefix_store(f"ds_dynmo/agreement/{name}", store.raw))
        timeout_seconds = self._timeout_of_batch().total_seconds()  # a rank may write longer than others
        return StoreAgreement(prefixed, dist.get_rank(), dist.get_world_size(), timeout_seconds)

    # -- small numbers --------------------------------------------------------------------------------

    def max_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        """Take the elementwise maximum over all ranks of a CPU tensor, in place. Collective over the world."""
        timeout, self._next_timeout = self._next_timeout, self._timeout
        return self.read_max(PostedMaximum(numbers, self._control, timeout))

    def sum_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum elementwise over all ranks, on the device of ``numbers``. Collective over the world."""
        moved = numbers.to(self.device, copy=True)
        dist.all_reduce(moved)
        return moved.to(numbers.device)

    def sum_over_model(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum elementwise over this replica: its stages and tensor-parallel slices. Collective over the replica."""
        moved = numbers.to(self.device, copy=True)
        dist.all_reduce(moved, group=self.grid.get_model_parallel_group())
        return moved.to(numbers.device)

    def sum_over_stages(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum elementwise over this pipeline's stages, on the device of ``numbers``. Collective over the pipeline."""
        moved = numbers.to(self.device, copy=True)
        dist.all_reduce(moved, group=self.grid.get_pipe_parallel_group())
        return moved.to(numbers.device)

    def sum_over_replicas(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum elementwise over the replicas of this stage, on the device of ``numbers``. Collective over them."""
        moved = numbers.to(self.device, copy=True)
        dist.all_reduce(moved, group=self.grid.get_data_parallel_group())
        return moved.to(numbers.device)

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather one small picklable value of every rank, in rank order. Collective over the world.

        Raises:
            MigrationError: on every rank, if the value of one rank cannot be sent.
        """
        values, _ = self.gather_from_all(self._what, lambda: (value, None))
        return values()

    def broadcast_object(self, value: Any) -> Any:
        """Send the picklable value of rank 0 to all; the values of others are ignored. Collective over the world.

        Raises:
            MigrationError: on every rank, if it cannot be sent.
        """
        box = [_EncodedValue.of(value) if dist.get_rank() == 0 else None]
        try:
            dist.broadcast_object_list(box, src=0, group=self._control)
        except RuntimeError as error:
            raise self._control_failed(error) from error
        return self._received(box)[0]

    def _received(self, values: Sequence[Any]) -> list[Any]:
        problems = {rank: sent.problem for rank, sent in enumerate(values) if sent.problem}
        if problems:
            raise MigrationError(f"{self._what}: ranks cannot send what they have to: {problems}", harmless=True)
        return [from_bytes(sent.data, self.device) for sent in values]

    def gather_over_slices(self, value: Any) -> list[Any]:
        """Gather one small picklable value of every tensor-parallel slice of this stage and replica, by slice index.

        Collective over these slices only.
        """
        if self.grid.get_slice_parallel_world_size() == 1:
            return [value]
        ranks = dist.get_process_group_ranks(self.grid.get_slice_parallel_group())
        encoded = _EncodedValue.of(value)
        others = [rank for rank in ranks if rank != dist.get_rank()]
        received = self.p2p.exchange_bytes(dict.fromkeys(others, to_bytes(encoded)), others)
        values = [from_bytes(received[rank], self.device) if rank in received else encoded for rank in ranks]
        return self._received(values)

    def clock_offset(self, now: Callable[[], float]) -> tuple[float, float]:
        """Measure by how many seconds this rank's clock is ahead of rank 0's, and the error bound.

        Collective over the world.
        """
        self.wait_for_posted_broadcast()
        self.max_over_world(torch.zeros(1, device="cpu"))  # waits for ranks whose batch goes on
        try:
            return clock_offset(self._control, now)
        except RuntimeError as error:
            raise self._control_failed(error) from error

    def gather_on_first(self, value: Any) -> list[Any]:
        """Gather one small picklable value of every rank on rank 0, in rank order; other ranks get an empty list.

        Collective over the world.
        """
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        try:
            dist.gather_object(_EncodedValue.of(value), gathered, group_dst=0, group=self._control)
        except RuntimeError as error:
            raise self._control_failed(error) from error
        return self._received(gathered or [])

    def everywhere(
        self,
        what: str,
        function: Callable[[], Result],
        *,
        same: Callable[[Result], object] | None = None,
        compared_in: tuple[int, int] = (0, 1),
        error: type[Exception] | None = None,
    ) -> Result:
        """Call ``function`` on every rank, and return its result once it has succeeded on all.

        Collective over the world. If all succeed, this is one small reduction. Ranks send details only after a failure.
        ``function`` may be collective, and even call this method, if no rank can fail alone before it gets there: the
        others would wait for that rank until the time-out.

        Args:
            what: name of the operation in messages, such as "deciding where layers go".
            same: returns the part of a result that has to be the same on all ranks, by its text; None: nothing has to.
            compared_in: number of this rank's group, and number of groups, if ranks are divided into groups in which
                ``same`` is compared.
            error: raised on every rank instead of the errors below.

        Raises:
            PartitionError: on every rank, if the first failure by rank is one.
            MigrationError: harmless, on every rank: the first failure by rank is of another type, or results differ.
                Not harmless: a collective within ``function`` failed, as it does on the other ranks.
        """
        return self._everywhere(what, function, same=same, compared_in=compared_in, error=error)[0]

    def on_first(self, what: str, function: Callable[[], Result]) -> Result:
        """Call ``function`` on rank 0 alone, and return its picklable result on every rank. Collective over the world.

        Args:
            what: as for :meth:`everywhere`.

        Raises:
            PartitionError, MigrationError: on every rank: ``function`` raised it; the latter is harmless.
            MigrationError: harmless, on every rank: another error, which rank 0 logs, or its result cannot be sent.
        """
        result: Any = None
        failure: Exception | None = None
        if self.here.rank == 0:
            try:
                result = function()
            except Exception as error:  # any error of a user's object; other ranks have to know
                raise_unless_harmless(error)
                failure = error
        self.max_over_world(torch.zeros(1, device="cpu"))  # rank 0 may take as long as a batch
        sent = (result, None) if failure is None else (None, _Failure.of(failure))
        of_first, problem = self.broadcast_object(sent)
        if problem is None:
            found: Result = result if self.here.rank == 0 else of_first
            return found
        if failure is not None and not problem.is_expected:
            logger.error(f"{what} failed:\n{''.join(traceback.format_exception(failure))}")
        raise problem.error(problem.text if problem.is_expected else f"{what} failed: {problem}. No layer has moved")

    def gather_from_all(
        self,
        what: str,
        function: Callable[[], tuple[Value, Result]],
        *,
        same: Callable[[Result], object] | None = None,
    ) -> tuple[Callable[[], list[Value]], Result]:
        """Call ``function`` on every rank; once it has succeeded on all, gather the first part of its results.

        Collective over the world: a small reduction, and a gathering if a rank has another value than None. Arguments
        and errors are those of :meth:`everywhere`. A value that cannot be pickled is a failure too.

        Args:
            function: returns a picklable value for all ranks, and a result for this rank.

        Returns:
            A function that loads the values of all ranks, in rank order, and this rank's result. Loading may fail on
            this rank alone.
        """

        def encoded() -> tuple[bytes, Result]:
            value, result = function()
            return b"" if value is None else to_bytes(value), result

        (data, result), most = self._everywhere(
            what, encoded, same=None if same is None else lambda both: same(both[1]), size=lambda both: len(both[0])
        )
        received = torch.zeros(dist.get_world_size(), most, dtype=torch.uint8, device="cpu")
        if most:
            sent = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8)
            try:
                dist.all_gather(list(received), sent, group=self._control)
            except RuntimeError as error:
                raise self._control_failed(error) from error

        def values() -> list[Any]:  # a pickle ends before the zeros behind it
            return [from_bytes(row.numpy().tobytes(), self.device) if row.any() else None for row in received]

        return values, result

    def _everywhere(
        self,
        what: str,
        function: Callable[[], Result],
        *,
        same: Callable[[Result], object] | None = None,
        compared_in: tuple[int, int] = (0, 1),
        error: type[Exception] | None = None,
        size: Callable[[Result], int] = lambda result: 0,
    ) -> tuple[Result, int]:
        """Return this rank's result, and the greatest ``size`` of all ranks' results: see :meth:`everywhere`."""
        failure: Exception | None = None
        this_size = 0
        text = ""
        try:
            result = function()
            text = str(same(result)) if same is not None else ""
            this_size = size(result)
        except Exception as raised:  # any error of a user's object; other ranks have to know
            if error is None:
                raise_unless_harmless(raised)
            failure = raised
        group, groups = compared_in
        digest = _number_of(text)
        most_and_least = torch.full((2, groups), torch.iinfo(torch.int64).min, device="cpu")
        most_and_least[:, group] = torch.tensor([digest, -digest], device="cpu")
        numbers = torch.tensor([int(failure is not None), this_size], device="cpu")
        failed, greatest, *digests = self.max_over_world(torch.cat([numbers, most_and_least.flatten()])).tolist()
        if failed:
            raise self._first_failure(what, failure, error) from failure
        if any(most != -least for most, least in zip(digests[:groups], digests[groups:])):
            differing = self._differing_texts(group, text)
            if error is not None:
                raise error(f"{what}: ranks differ: {differing}")
            raise MigrationError(f"{what}: ranks differ: {differing}. No layer has moved", harmless=True)
        return result, greatest

    def _differing_texts(self, group: int, text: str) -> str:
        """Describe which ranks have which text, in groups where texts differ. Collective over the world."""
        entries = self.gather_objects((group, text))
        texts_of: dict[int, set[str]] = {}
        for number, theirs in entries:
            texts_of.setdefault(number, set()).add(theirs)
        ranks_of = ranks_by([theirs if len(texts_of[number]) > 1 else "" for number, theirs in entries])
        return ", ".join(f"{theirs} on ranks {ranks}" for theirs, ranks in ranks_of.items() if theirs)

    def _first_failure(self, what: str, failure: Exception | None, error: type[Exception] | None) -> Exception:
        """Return the error for all ranks to raise: the first failure by rank. Collective over the world.

        That rank logs an unexpected failure, unless the caller passes ``error``.
        """
        failures: list[_Failure | None] = self.gather_objects(None if failure is None else _Failure.of(failure))
        failed = [rank for rank, theirs in enumerate(failures) if theirs is not None]
        first = failures[failed[0]]
        assert first is not None
        if error is not None:
            return error(f"rank {failed[0]}: {first.text if first.kind == error.__name__ else first}")
        if failure is not None and first.is_expected and all(theirs == first for theirs in failures):
            return failure
        if dist.get_rank() == failed[0]:
            trace = "".join(traceback.format_exception(failure))
            logger.error(f"rank {failed[0]}: {what} failed:\n{trace}")
        return first.error(f"{what} failed on ranks {failed}, first with {first}. No layer has moved")

    def all_done(self) -> None:
        """Wait until every rank is done; after the time-out, report that a rank failed. Collective over the world."""
        self._wait_for_all(torch.zeros(1, device="cpu"))

    def all_moved(self, worst: Sequence[float], number: float) -> tuple[list[float], float]:
        """Wait like :meth:`all_done`, and combine numbers of the ranks. Collective over the world.

        Returns:
            The maxima of ``worst`` over all ranks, and the sum of ``number`` over the stages of this rank's pipeline.
        """
        pipeline, pipelines = self.here.pipeline
        of_stages = torch.zeros(pipelines, self.here.num_stages, dtype=torch.float64, device="cpu")
        of_stages[pipeline, self.here.stage] = number
        numbers = torch.cat([torch.tensor(worst, dtype=torch.float64, device="cpu"), of_stages.flatten()])
        self._wait_for_all(numbers)
        of_stages = numbers[len(worst) :].view_as(of_stages)
        return numbers[: len(worst)].tolist(), of_stages[pipeline].sum().item()

    def _wait_for_all(self, numbers: torch.Tensor) -> None:
        try:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._control)
        except RuntimeError as error:
            raise MigrationError(f"another rank did not finish its part of the move ({error})") from error

    def adopt_tied_groups(self, groups: Mapping[tuple[int, ...], Any]) -> None:
        """Use process groups that DeepSpeed has made in this world, by their ranks; None: this rank is outside."""
        self._tied_groups.update(groups)

    def prepare_tied_groups(self, present: Iterable[tuple[int, ...]], needed: Sequence[tuple[int, ...]]) -> None:
        """Create the process groups of ``needed`` ranks, and destroy those that are neither needed nor present.

        Collective over the world, between two batches.
        """
        unneeded = sorted(self._tied_groups.keys() - set(present) - set(needed))
        if unneeded:
            get_accelerator().synchronize()  # nothing may be under way in them
        for ranks in unneeded:
            group = self._tied_groups.pop(ranks)
            if dist.get_rank() in ranks:
                dist.destroy_process_group(group)
        for ranks in needed:
            self.tied_group(ranks)

    def tied_group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of ``ranks``, created once. Collective over the world, ranks outside included."""
        if ranks not in self._tied_groups:
            self._tied_groups[ranks] = call_within_seconds(
                2 * self._timeout_seconds, lambda: dist.new_group(ranks=list(ranks))
            )
        return self._tied_groups[ranks]

    def rank_alone(self) -> Any:
        """Return the process group of this rank alone, created once per world. Not collective."""
        if self._rank_alone is None:
            self._rank_alone = dist.new_group(ranks=[dist.get_rank()], use_local_synchronization=True)
        return self._rank_alone

    def neighbour_links(self, *, loop: bool) -> NeighbourLinks:
        """Return the links between neighbouring stages, also around a ``loop``. Collective: groups are made once."""
        if self._neighbour_links is None:
            here = self.here
            self._neighbour_links = NeighbourLinks(
                here.stage, here.num_stages, self.rank_of, self.device, self._timeout_seconds
            )
        self._neighbour_links.connect(loop=loop)
        return self._neighbour_links


def _number_of(text: str) -> int:
    """Hash a text to a number for comparison between ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _entered_key(rank: int) -> str:
    """Return the store's key of a rank's count of collectives."""
    return f"ds_dynmo/entered/{rank}"

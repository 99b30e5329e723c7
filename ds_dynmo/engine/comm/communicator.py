"""The control plane: small values that ranks exchange, and agreement between ranks before layers move.

Values travel along trees of ranks on the CPU, with a separate time-out. So it never waits for an accelerator, and if a
rank does not take part, the error names it. Ranks come to it from training and from code of the user, which may keep
one of them: for that rank they wait as long as a batch does (:meth:`Communicator.enter`). Layers travel from rank to
rank on a process group (:mod:`ds_dynmo.engine.comm.point_to_point`).
"""

from __future__ import annotations

import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.utils import logger

from ds_dynmo.engine.comm import hosts
from ds_dynmo.engine.comm.agreement import EncodedValue, Failure, differing_texts, share_of_difference
from ds_dynmo.engine.comm.beats import Activity
from ds_dynmo.engine.comm.bounded import BoundedStore, default_timeout
from ds_dynmo.engine.comm.clock import clock_offset
from ds_dynmo.engine.comm.coordinates import GroupPlace, RankCoordinates
from ds_dynmo.engine.comm.host_links import HostLinks
from ds_dynmo.engine.comm.objects import from_bytes, to_bytes
from ds_dynmo.engine.comm.point_to_point import PointToPoint
from ds_dynmo.engine.comm.posted import Posted, PostedBroadcast, PostedReduction
from ds_dynmo.engine.comm.replicas import sum_over_replicas
from ds_dynmo.engine.comm.store_agreement import StoreAgreement
from ds_dynmo.engine.comm.tree import POSTED_IN_PIPELINE, Tree, maximum
from ds_dynmo.engine.comm.watch import RESUME, Lookout, TracebackOfOthers, Watch
from ds_dynmo.engine.comm.world_groups import WorldGroups
from ds_dynmo.errors import MigrationError, RankLostError, raise_unless_harmless
from ds_dynmo.interface import choose_interface
from ds_dynmo.torch_private import default_store, prefix_store

Result = TypeVar("Result")
Value = TypeVar("Value")


def check_hosts(timeout_seconds: float) -> None:
    """Refuse a job whose hosts cannot reach each other. Collective once the ranks are connected.

    Groups of gloo that begin later use the interface that is chosen here, if none was.

    Raises:
        ConfigError: see :mod:`ds_dynmo.engine.comm.hosts`. No group has been created.
    """
    if not dist.is_initialized() or "gloo" not in dist.get_backend_config():
        choose_interface()
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
        groups: process groups of the present world.
        how_to_continue: says how to go on with the job after a rank was lost.
        worlds_left: number of worlds that this rank has left: a re-packing ends one.
    """

    def __init__(self, grid: Any, device: torch.device, timeout_seconds: float) -> None:
        self.grid = grid
        self.device = device
        self._timeout_seconds = timeout_seconds
        self._timeout = timedelta(seconds=timeout_seconds)
        self._posted: PostedBroadcast | None = None
        self._activity = Activity()
        self.how_to_continue: Callable[[], str] = lambda: RESUME
        self.worlds_left = 0
        self._sent_to_first: Posted | None = None
        self._sent_to_first_stage: Posted | None = None
        TracebackOfOthers.install()
        self.sum_over_world(torch.zeros(1, device="cpu"))
        store = BoundedStore(default_store(), timeout_seconds)
        world_size = dist.get_world_size()
        launch = (store.add("ds_dynmo/watches", 1) - 1) // world_size  # a launcher may start a job again on this store
        self.watch(prefix_store(f"ds_dynmo/watch/{launch}", store.raw), dist.get_rank(), world_size)
        self.connect("initialize")

    # -- who takes part -------------------------------------------------------------------------------

    def watch(self, store: Any, rank: int, world_size: int) -> None:
        """Watch over the ranks of a world until :meth:`leave`, also while it forms.

        Args:
            store: of torch, whose keys belong to this world's watch.
        """
        weakly = weakref.proxy(self)  # else the watch's thread would keep a deleted engine
        lookout = Lookout(
            BoundedStore(store.clone(), self._timeout_seconds / 2),
            rank,
            world_size,
            timeout_seconds=self._timeout_seconds,
            activity=self._activity,
            remedy=lambda: weakly.how_to_continue(),
        )
        self._watch = Watch(lookout)

    def connect(self, what: str) -> None:
        """Form what the present world needs for the operation ``what``. Collective over the world.

        All ranks have to have formed what the world before needed.
        """
        self.here = here = RankCoordinates.of(self.grid)
        self._what, self._next_timeout = what, self._timeout
        store = BoundedStore(default_store(), self._timeout_seconds)
        name = f"ds_dynmo/control/{(store.add('ds_dynmo/control', 1) - 1) // here.world_size}"

        def part(of_name: str) -> BoundedStore:
            return BoundedStore(prefix_store(f"{name}/{of_name}", default_store()), self._timeout_seconds)

        self._links = HostLinks(part("links"), self._timeout)
        self._world = Tree(self._links, range(here.world_size), here.rank)
        self._pipeline_ranks = [self.rank_of(stage) for stage in range(here.num_stages)]
        self._pipeline = Tree(self._links, self._pipeline_ranks, here.rank, posted=POSTED_IN_PIPELINE)
        self.p2p = PointToPoint(self.rank_of, self._links, self.device, self._timeout_seconds)
        self.groups = WorldGroups(here, self.rank_of, self.device, self._timeout_seconds)

    def lose(self, verdict: str = "") -> RankLostError:
        """Say that ranks are lost, and return the error: see :meth:`ds_dynmo.engine.comm.watch.Watch.say`."""
        return RankLostError(self._watch.say(verdict))

    def leave(self) -> None:
        """Wait until every rank is done, before the present world ends. Collective."""
        self.wait_for_posted_broadcast()
        if self._sent_to_first_stage is not None:
            self._sent_to_first_stage.wait()
        self.all_done()
        self._watch.end()
        self.worlds_left += 1

    @contextmanager
    def operation(self, what: str) -> Iterator[None]:
        """Let other ranks know what this one does, and itself notice if one of them is lost meanwhile.

        Args:
            what: such as "batch 12"; inside of another operation, a phase of it.

        Raises:
            RankLostError: a rank has died, was stopped, or cannot be reached.
        """
        if not self._activity.is_idle:
            with self._activity.doing(what):
                yield
            return
        self._watch.check()
        with self._activity.doing(what):
            try:
                yield
            except Exception as error:
                self._watch.explain(error, ends_operation=True)  # the watch of the world that there is now
                raise

    def enter(self, what: str) -> None:
        """Announce that this rank takes part in the collective ``what``, which starts now.

        The first reduction of it waits for the other ranks as long as a batch does.
        """
        self.wait_for_posted_broadcast()
        self._what, self._next_timeout = what, self._timeout_of_batch()

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
        self._posted = PostedBroadcast(tensor, src, group, self._watch)
        return self._posted

    def wait_for_posted_broadcast(self) -> None:
        """Wait for the broadcast that was posted last. Ranks that are still in an earlier batch are not missing."""
        posted, self._posted = self._posted, None
        if posted is not None:
            posted.wait()

    @contextmanager
    def _over_world(self) -> Iterator[timedelta]:
        """Come to a collective over the world, and turn its error into one that says who is missing."""
        timeout, self._next_timeout = self._next_timeout, self._timeout
        number = self._watch.come()
        try:
            yield timeout
        except RuntimeError as error:
            raise self._failed(error, number, timeout) from error

    def _failed(self, error: RuntimeError, number: int, timeout: timedelta) -> MigrationError:
        who, waited = "a rank failed, or the link to it", f"{timeout.total_seconds():g} s"
        timed_out = "timed out" in str(error).lower()
        try:
            missing = self._watch.missing(number, timed_out=timed_out)
        except RuntimeError as silence:  # report the first error anyway
            if timed_out:
                who = f"after {waited} a rank is missing, and it is not known which: {silence}"
        else:
            if missing:
                who = f"ranks {missing} did not call it within {waited}"
        return MigrationError(
            f"{self._what} is collective, but {who}. No layer has moved, yet the ranks are out of step: resume the job "
            f"from its last checkpoint ({error})"
        )

    # -- beside the main thread -----------------------------------------------------------------------

    def post_max(self, numbers: torch.Tensor) -> PostedReduction:
        """Post an elementwise maximum over all ranks of a CPU tensor, in place. Collective over the world.

        It waits as long as a batch does for ranks that have not posted it.
        """
        timeout = self._timeout_of_batch()
        wait = self._world.post_reduce(numbers, maximum, timeout)
        return PostedReduction(numbers, wait, self._watch, self._watch.come(), timeout)

    def read_max(self, posted: PostedReduction) -> torch.Tensor:
        """Wait for the numbers of :meth:`post_max`."""
        try:
            posted.wait()
        except RuntimeError as error:
            raise self._failed(error, posted.number, posted.timeout) from error
        return posted.tensor

    def post_max_to_first(self, numbers: torch.Tensor) -> PostedReduction:
        """Post an elementwise maximum like :meth:`post_max`, of which the first rank alone learns the result.

        Other ranks wait for nobody.
        """
        if self._sent_to_first is not None:
            self._sent_to_first.wait()  # it has left long since
        timeout = self._timeout_of_batch()
        wait = self._world.post_reduce_to_first(numbers, maximum, timeout)
        self._sent_to_first = posted = PostedReduction(numbers, wait, self._watch, self._watch.come(), timeout)
        return posted

    def read_max_on_first(self, posted: PostedReduction) -> torch.Tensor | None:
        """Wait for the numbers of :meth:`post_max_to_first` on the first rank; return None on others at once."""
        return self.read_max(posted) if self.here.rank == 0 else None

    def post_to_first_stage(self, numbers: torch.Tensor) -> Posted:
        """Post an elementwise maximum over the stages of a CPU tensor, in place, which the first stage alone learns.

        Collective over this pipeline. The others wait for nobody, but until what they posted before has left.
        """
        if self._sent_to_first_stage is not None:
            self._sent_to_first_stage.wait()
        wait = self._pipeline.post_reduce_to_first(numbers, maximum, self._timeout_of_batch())
        self._sent_to_first_stage = posted = Posted(numbers, wait, self._watch)
        return posted

    def store_agreement(self) -> StoreAgreement:
        """Return a way by which threads of all ranks agree without collectives. Collective over the world."""
        name = self.broadcast_object(uuid.uuid4().hex)
        store = BoundedStore(default_store(), self._timeout_seconds)
        prefixed = store.view(prefix_store(f"ds_dynmo/agreement/{name}", store.raw))
        timeout_seconds = self._timeout_of_batch().total_seconds()  # a rank may write longer than others
        return StoreAgreement(prefixed, dist.get_rank(), dist.get_world_size(), timeout_seconds, self._watch)

    # -- small numbers --------------------------------------------------------------------------------

    def max_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        """Take the elementwise maximum over all ranks of a CPU tensor, in place. Collective over the world."""
        with self._over_world() as timeout:
            return self._world.reduce(numbers, maximum, timeout)

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
        return sum_over_replicas(self.grid, self.device, numbers)

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather one small picklable value of every rank, in rank order. Collective over the world.

        Raises:
            MigrationError: on every rank, if the value of one rank cannot be sent.
        """
        with self._over_world() as timeout:
            gathered = self._gathered(self._world, to_bytes(EncodedValue.of(value)), timeout)
        return self._received(gathered)

    def broadcast_object(self, value: Any) -> Any:
        """Send the picklable value of rank 0 to all; the values of others are ignored. Collective over the world.

        Raises:
            MigrationError: on every rank, if it cannot be sent.
        """
        sent = [to_bytes(EncodedValue.of(value))] if self.here.rank == 0 else []
        with self._over_world() as timeout:
            received = self._world.broadcast(sent, 1, timeout)
        return self._received(received)[0]

    @staticmethod
    def _gathered(tree: Tree, data: bytes, timeout: timedelta) -> list[bytes]:
        """Gather a byte string of each rank of a tree on all of them."""
        return tree.broadcast(tree.gather(data, timeout), tree.size, timeout)

    def _received(self, encoded: Sequence[bytes], ranks: Sequence[int] | None = None) -> list[Any]:
        """Load values; ``ranks`` sent them, None: all ranks in order."""
        values: list[EncodedValue] = [from_bytes(data, self.device) for data in encoded]
        problems = {rank: sent.problem for rank, sent in zip(ranks or range(len(values)), values) if sent.problem}
        if problems:
            first = next(iter(problems.values()))
            raise MigrationError(
                f"{self._what}: ranks {[*problems]} cannot send what they have to, first {first}",
                harmless=True,
            )
        return [from_bytes(sent.data, self.device) for sent in values]

    def gather_over_slices(self, value: Any) -> list[Any]:
        """Gather one small picklable value of every tensor-parallel slice of this stage and replica, by slice index.

        Collective over these slices only.
        """
        if self.grid.get_slice_parallel_world_size() == 1:
            return [value]
        ranks = dist.get_process_group_ranks(self.grid.get_slice_parallel_group())
        encoded = to_bytes(EncodedValue.of(value))
        others = [rank for rank in ranks if rank != dist.get_rank()]
        received = self.p2p.exchange_bytes(dict.fromkeys(others, encoded), others)
        return self._received([received.get(rank, encoded) for rank in ranks], ranks)

    def gather_on_first_stage(self, value: Any) -> list[Any]:
        """Gather one small picklable value of every stage on the first, by stage; other stages get an empty list.

        Collective over this pipeline. The first stage waits for the others as long as a batch does.
        """
        gathered = self._pipeline.gather(to_bytes(EncodedValue.of(value)), self._timeout_of_batch())
        return self._received(gathered, self._pipeline_ranks)

    def clock_offset(self, now: Callable[[], float]) -> tuple[float, float]:
        """Measure by how many seconds this rank's clock is ahead of rank 0's, and the error bound.

        Collective over the world.
        """
        self.wait_for_posted_broadcast()
        self.max_over_world(torch.zeros(1, device="cpu"))  # waits for ranks whose batch goes on
        with self._over_world() as timeout:
            return clock_offset(self._links, self._world, now, timeout)

    def gather_on_first(self, value: Any) -> list[Any]:
        """Gather one small picklable value of every rank on rank 0, in rank order; other ranks get an empty list.

        Collective over the world.
        """
        with self._over_world() as timeout:
            gathered = self._world.gather(to_bytes(EncodedValue.of(value)), timeout)
        return self._received(gathered)

    def everywhere(
        self,
        what: str,
        function: Callable[[], Result],
        *,
        same: Callable[[Result], object] | None = None,
        compared_in: GroupPlace | None = None,
        error: type[Exception] | None = None,
    ) -> Result:
        """Call ``function`` on every rank, and return its result once it has succeeded on all.

        Collective over the world. If all succeed, this is one small reduction. Ranks send details only after a failure.
        ``function`` may be collective, and even call this method, if no rank can fail alone before it gets there: the
        others would wait for that rank until the time-out.

        Args:
            what: name of the operation in messages, such as "deciding where layers go".
            same: returns the part of a result that has to be the same on all ranks, by its text; None: nothing has to.
            compared_in: this rank's place in its group, if ranks are divided into groups in which ``same`` is compared;
                None: it is compared over the world.
            error: type by which ``function`` refuses. It is raised on every rank, also where results differ; any other
                exception is no refusal, and ends in a RuntimeError.

        Raises:
            RuntimeError: on every rank, if the first failure by rank is not of the type ``error``.
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
        self._next_timeout = self._timeout_of_batch()  # rank 0 may take as long
        of_first, problem = self.broadcast_object((result, None) if failure is None else (None, Failure.of(failure)))
        if problem is None:
            found: Result = result if self.here.rank == 0 else of_first
            return found
        if failure is not None and not problem.is_expected:
            logger.error(f"{what} failed:\n{''.join(traceback.format_exception(failure))}")
        raise problem.error(problem.text if problem.is_expected else f"{what} failed: {problem}. No layer has moved")

    def gather_over_pipeline(self, value: Any) -> list[Any]:
        """Gather one small picklable value of every stage, where replicas have the same. Collective over the world.

        Returns:
            The values of this pipeline, by stage; but the values of all ranks, in rank order, if those of a stage's
            ranks differ.

        Raises:
            MigrationError: on every rank, if the value of one rank cannot be sent.
        """
        values, _ = self.agree_and_gather(self._what, lambda: (value, None))
        return list(values().values())

    def agree_and_gather(
        self,
        what: str,
        function: Callable[[], tuple[Value, Result]],
        *,
        alike: Callable[[Value], object] | None = None,
    ) -> tuple[Callable[[], dict[int, Value]], Result]:
        """Call ``function`` on every rank; once it has succeeded on all, gather the first part of its results.

        Collective over the world: a small reduction, and a gathering if a rank has another value than None. Errors are
        those of :meth:`everywhere`. A value that cannot be pickled is a failure too.

        Args:
            function: returns a picklable value for other ranks, and a result for this rank.
            alike: returns what says, by its text, whether a stage's ranks have the same value; None: the pickled value.

        Returns:
            A function that loads the values by rank, and this rank's result. Values are those of this pipeline; but
            those of all ranks, if those of a stage's ranks differ. Loading may fail on this rank alone.
        """

        def encoded() -> tuple[str, bytes, Result]:
            value, result = function()
            data = b"" if value is None else to_bytes(value)
            return data.hex() if alike is None else str(alike(value)), data, result

        (_, data, result), num_values, stages_differ = self._everywhere(
            what,
            encoded,
            counts=lambda each: bool(each[1]),
            alike=lambda each: each[0],
        )
        gathered = dict.fromkeys(self._pipeline_ranks, b"")
        if num_values:
            tree = self._world if stages_differ else self._pipeline
            with self._over_world() as timeout:
                values = self._gathered(tree, data, timeout)
            gathered = dict(zip(range(self.here.world_size) if stages_differ else self._pipeline_ranks, values))

        def load() -> dict[int, Any]:
            return {rank: from_bytes(theirs, self.device) if theirs else None for rank, theirs in gathered.items()}

        return load, result

    def _everywhere(
        self,
        what: str,
        function: Callable[[], Result],
        *,
        same: Callable[[Result], object] | None = None,
        compared_in: GroupPlace | None = None,
        error: type[Exception] | None = None,
        counts: Callable[[Result], bool] = lambda result: False,
        alike: Callable[[Result], str] = lambda result: "",
    ) -> tuple[Result, int, bool]:
        """Return this rank's result: see :meth:`everywhere`.

        Returns:
            Also the number of ranks whose results count, and whether those of a stage differ by the text ``alike``.
        """
        failure: Exception | None = None
        is_counted, text, text_of_stage = False, "", ""
        place = compared_in or self.here.in_world
        try:
            result = function()
            text = str(same(result)) if same is not None else ""
            is_counted, text_of_stage = counts(result), alike(result)
        except Exception as raised:  # any error of a user's object; other ranks have to know
            if error is None:
                raise_unless_harmless(raised)
            failure = raised
        shares = share_of_difference(place, text), share_of_difference(self.here.in_stage, text_of_stage)
        numbers = torch.tensor([int(failure is not None), int(is_counted), *shares], device="cpu")
        with self._over_world() as timeout:
            failed, counted, differ, stages_differ = self._world.reduce(numbers, torch.Tensor.add_, timeout).tolist()
        if failed:
            raise self._first_failure(what, failure, error) from failure
        if differ:
            differing = differing_texts(self.gather_objects((place.group, text)))
            if error is not None:
                raise error(f"{what}: ranks differ: {differing}")
            raise MigrationError(f"{what}: ranks differ: {differing}. No layer has moved", harmless=True)
        return result, counted, bool(stages_differ)

    def _first_failure(self, what: str, failure: Exception | None, error: type[Exception] | None) -> Exception:
        """Return the error for all ranks to raise: the first failure by rank. Collective over the world.

        That rank logs an unexpected failure.
        """
        described = None if failure is None else Failure.of(failure, error)
        failures: list[Failure | None] = self.gather_objects(described)
        failed = [rank for rank, theirs in enumerate(failures) if theirs is not None]
        first = failures[failed[0]]
        assert first is not None
        if error is not None and first.kind == error.__name__:
            return error(f"rank {failed[0]}: {first.text}")
        if failure is not None and first.is_expected and all(theirs == first for theirs in failures):
            return failure
        if dist.get_rank() == failed[0]:
            trace = "".join(traceback.format_exception(failure))
            logger.error(f"rank {failed[0]}: {what} failed:\n{trace}")
        if error is not None and not first.is_expected:
            return RuntimeError(
                f"{what} failed on ranks {failed}, first with {first}. No setting is wrong: it is a fault of ds_dynmo, "
                f"or of an object of the program; rank {failed[0]} has logged where"
            )
        return first.error(f"{what} failed on ranks {failed}, first with {first}. No layer has moved")

    def all_done(self) -> None:
        """Wait until every rank is done; after the time-out, report that a rank failed. Collective over the world."""
        self._wait_for_all(torch.zeros(1, device="cpu"))

    def all_moved(self, worst: Sequence[float], number: float) -> tuple[list[float], float]:
        """Wait like :meth:`all_done`, and combine numbers of the ranks. Collective over the world.

        Returns:
            The maxima of ``worst`` over all ranks, and the sum of ``number`` over the stages of this rank's pipeline.
        """
        numbers = torch.tensor([*worst, 0.0], dtype=torch.float64, device="cpu")
        self._wait_for_all(numbers[:-1])
        numbers[-1] = number
        with self._over_world() as timeout:
            self._pipeline.reduce(numbers[-1:], torch.Tensor.add_, timeout)
        *worst, number = numbers.tolist()
        return worst, number

    def _wait_for_all(self, numbers: torch.Tensor) -> None:
        try:
            self._world.reduce(numbers, maximum, self._timeout)
        except RuntimeError as error:
            raise MigrationError(f"another rank did not finish its part of the move ({error})") from error

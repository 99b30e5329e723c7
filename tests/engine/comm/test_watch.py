"""A rank that dies, stops or fails: the others say which, and do not wait for it."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ds_dynmo.engine import engine as engines
from ds_dynmo.engine.comm import beats, watch
from ds_dynmo.engine.comm.beats import Activity, Beat, Beats
from ds_dynmo.engine.comm.bounded import BoundedStore, NoAnswer
from ds_dynmo.errors import RankLostError
from ds_dynmo.torch_private import is_of_backend
from tests.faults.fault import Fault
from tests.support.configs import Case
from tests.support.harness import RankError, run, run_each, run_to_the_end
from tests.support.training import batches, build

TIMEOUT_SECONDS = 2.0
CASE = Case(stages=3, dynmo={"interval": 0, "timeout_seconds": TIMEOUT_SECONDS})
TWO = replace(CASE, stages=2)
POSTS = replace(TWO, dynmo={**(CASE.dynmo or {}), "schedule": "zero_bubble"})  # losses
ENDS = r"(?s)^rank 0 (died|failed:.*"  # how a world fails in which it does not wait for the other; then what it says


def test_a_rank_says_what_it_does_and_what_it_did_last() -> None:
    activity = Activity()
    with activity.doing("batch 3"):
        with activity.doing("decide"), activity.doing("migrate"):
            assert str(activity) == "in batch 3: migrate" and not activity.is_idle
        assert str(activity) == "in batch 3"
    assert str(activity) == "after batch 3" and activity.is_idle


def test_a_wait_outside_of_operations_lasts_without_being_one() -> None:
    """It may go on in a thread while the next operation begins and ends."""
    activity = Activity()
    with activity.doing("batch 3"):
        activity.failure = "ValueError"
    with activity.lasting():
        assert str(activity) == "after batch 3, waiting for other ranks" and activity.is_idle
        assert (activity.operation, activity.attempt, activity.failure) == ("batch 3", 1, "ValueError")
        assert activity.waits_for(SimpleNamespace(**vars(activity)))  # type: ignore[arg-type]
        with activity.doing("batch 4"):
            assert str(activity) == "in batch 4"
        assert activity.seconds > 0
    assert activity.seconds == 0 and not activity.waits_for(SimpleNamespace(**vars(activity)))  # type: ignore[arg-type]


def test_a_phase_may_end_after_the_next_has_begun() -> None:
    activity = Activity()
    with activity.doing("batch 3"):
        travel, step = activity.doing("layers travel"), activity.doing("optimizer step")
        travel.__enter__()
        step.__enter__()
        travel.__exit__(None, None, None)
        assert str(activity) == "in batch 3: optimizer step"
        step.__exit__(None, None, None)
    assert activity.is_idle


class WaitedClock:
    """A clock that goes on where a thread waits."""

    now = 0.0

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


def fail() -> None:
    raise ValueError("a bad label\nand more")


def lose(case: Case, folder: str) -> tuple[str, list[str], str]:
    """Train, save twice, and let rank 1 fail in a batch. Return the error, what was logged, and the next error.

    No rank has noticed yet that the second save, in the background, is over.
    """
    watch.grace_seconds = lambda timeout_seconds: 60.0  # the error is wanted
    engine, lines = build(case), list[str]()
    watch.logger.error = lines.append  # type: ignore[method-assign]
    data = batches(engine)
    engine.train_batch(data)
    engine.save_checkpoint(folder, "first")
    engine.checkpointer._saves_in_background = lambda: True
    engine.save_checkpoint(folder, "second")
    engine.checkpointer._under_way._thread.join()
    if engine.global_rank == 1:
        engine.before_step(fail)
    errors = []
    for _ in range(1 if engine.global_rank == 1 else 2):
        try:
            engine.train_batch(data)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors[0], lines, errors[-1]


@pytest.mark.ranks
def test_a_failed_rank_is_named_with_its_error_and_what_to_do(tmp_path: Path) -> None:
    """Its own error is its own."""
    ends = run(3, lose, CASE, str(tmp_path), complete=False, seconds=60)
    assert ends[1][0] == "ValueError: a bad label\nand more"
    logged = []
    for message, lines, again in (ends[0], ends[2]):
        assert message.startswith("RankLostError: rank 1 (host ")
        assert "in batch 2, ValueError: a bad label) has ended. The last whole checkpoint is " in message
        assert f"engine.load_checkpoint({str(tmp_path)!r}, 'second')" in message
        assert again == message
        logged += lines
    assert len(logged) == 1 and logged[0] in ends[0][0]


def held_up(case: Case, how: str) -> list[float]:
    """Train three batches; in the second rank 1 is held up.

    Args:
        how: "stopped": for longer than a beat takes; "busy": it keeps the interpreter's lock past the time-out.
    """
    engine = build(case)
    data = batches(engine)

    def hold() -> None:
        if engine.global_steps != 1 or engine.global_rank != 1:
            return
        if how == "stopped":
            wakes = f"import os, signal, time; time.sleep({4 * watch.LONGEST_PERIOD_SECONDS}); "
            subprocess.Popen([sys.executable, "-c", f"{wakes}os.kill({os.getpid()}, signal.SIGCONT)"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "busy":
            ctypes.PyDLL(None).usleep(int(1.6e6 * TIMEOUT_SECONDS))

    engine.before_step(hold)
    return [engine.train_batch(data).item() for _ in range(3)]


@pytest.mark.ranks
def test_a_rank_that_is_stopped_for_less_than_the_timeout_or_busy_costs_time_only() -> None:
    patient = replace(TWO, dynmo={"interval": 0, "timeout_seconds": 20.0})
    stopped, busy, still = run_each(2, held_up, (patient, "stopped"), (TWO, "busy"), (TWO, ""))
    assert stopped == busy == still


def stopped_for_good(case: Case) -> None:
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    if engine.global_rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    engine.train_batch(data)


@pytest.mark.ranks
def test_ranks_end_that_wait_for_a_stopped_one_in_the_backend() -> None:
    """Long before the time-out of the default group, of minutes."""
    with pytest.raises(RankError, match=rf"{ENDS}rank 1 \(host .* or was stopped, or the link)"):
        run(2, stopped_for_good, TWO, complete=False, seconds=60)


def fails_and_stays(case: Case, folder: str) -> None:
    """Let rank 1 fail in a batch, and its process go on; write what is logged."""
    watch.logger.error = Path(folder, "logged").write_text  # type: ignore[method-assign, assignment]
    engine = build(case)
    if engine.global_rank == 1:
        engine.before_step(fail)
    with suppress(ValueError):
        engine.train_batch(batches(engine))
    lookout = engine.stage.comm._watch._lookout
    while not lookout.verdict:
        lookout.ended.wait(TIMEOUT_SECONDS)


@pytest.mark.ranks
def test_ranks_end_that_wait_for_a_failed_one_whose_process_goes_on(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=rf"{ENDS}and its process has not ended)"):
        run(2, fails_and_stays, TWO, str(tmp_path), complete=False, seconds=60)
    logged = (tmp_path / "logged").read_text()
    assert "after batch 1, ValueError: a bad label) has failed, and its process has not ended. " in logged


def stopped_in_initialize(case: Case) -> None:
    if dist.get_rank() == 1:
        engines.build_components = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment]
    build(case)


@pytest.mark.ranks
def test_ranks_end_that_initialize_while_another_is_stopped() -> None:
    with pytest.raises(RankError, match=rf"{ENDS}rank 1 \(host .*, in initialize\) .* or was stopped, or the)"):
        run(2, stopped_in_initialize, TWO, complete=False, seconds=60)


def killed_while_it_saves(case: Case, folder: str) -> None:
    """Save at the end, in the background; rank 1 is killed before it has done its part."""
    engine = build(replace(case, dynmo={**(case.dynmo or {}), "checkpoint": "background"}))
    engine.train_batch(batches(engine))
    if engine.global_rank == 1:
        Fault(1, 0, "save: write the rest", "SIGKILL").inject(engine)
    engine.save_checkpoint(folder)
    watch.logger.error = Path(folder, f"logged by {engine.global_rank}").write_text  # type: ignore[method-assign, assignment]
    for thread in threading.enumerate():
        if thread.name == "ds_dynmo save":
            thread.join()  # as Python does when the process ends


@pytest.mark.ranks
def test_a_save_at_the_end_does_not_wait_for_a_killed_rank(tmp_path: Path) -> None:
    """Nor does it end the process: its thread raises."""
    first, killed = run_to_the_end(2, killed_while_it_saves, TWO, str(tmp_path), seconds=60)
    assert (first.exit_code, killed.exit_code) == (0, -signal.SIGKILL)
    assert any("rank 1 (host " in path.read_text() for path in tmp_path.glob("logged by *"))


def reads_the_loss_of_a_lost_rank(case: Case, signal_number: int) -> None:
    """Stop or kill the last rank before it sends the loss: the others are done with the batch, and read it."""
    engine = build(case)
    if engine.is_last_stage():
        engine.stage.comm.post = lambda *_: os.kill(os.getpid(), signal_number)
    loss = engine.train_batch(batches(engine))
    if signal_number == signal.SIGKILL:
        watch.grace_seconds = lambda timeout_seconds: 60.0  # the error is wanted
    assert engine.stage.comm._activity.is_idle
    loss.item()


@pytest.mark.ranks
def test_ranks_end_that_read_the_loss_of_a_stopped_one() -> None:
    with pytest.raises(RankError, match=rf"{ENDS}rank 1 \(host .* or was stopped, or the link)"):
        run(2, reads_the_loss_of_a_lost_rank, POSTS, signal.SIGSTOP, complete=False, seconds=60)


@pytest.mark.ranks
def test_who_reads_the_loss_of_a_killed_rank_learns_which_it_was() -> None:
    reader, _ = run_to_the_end(2, reads_the_loss_of_a_lost_rank, POSTS, signal.SIGKILL, seconds=60)
    assert "RankLostError: rank 1 (host " in reader.error and "has ended. " in reader.error


def test_the_first_rank_stays_until_all_that_run_have_said_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process holds the store, without which another may say it, too. Who is idle says it as well."""
    logged: list[str] = []
    monkeypatch.setattr(watch.logger, "error", logged.append)
    ranks = Ranks(monkeypatch, 4)
    first, idle, second, _ = ranks.lookouts
    slept = list[float]()

    def sleep(seconds: float) -> None:
        ranks.clock.now += seconds
        slept.append(seconds)
        if len(slept) == 3:
            idle._look(ranks.clock.now, decides=False)
        if len(slept) == 5:
            second._look(ranks.clock.now, decides=False)

    monkeypatch.setattr(watch.time, "sleep", sleep, raising=False)
    first._decide({3})
    message = first.say()
    assert len(slept) == 5 and logged == [message]
    assert idle._has_said and second.say() == message and logged == [message]


class SilentStore:
    """A store that ceases to answer: the first call waits for it, as long as calls may."""

    def __init__(self, told: WaitedClock, error: type[Exception] = NoAnswer) -> None:
        self._told, self._error, self._waits = told, error, True

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: object) -> None:
            if self._waits:
                self._told.now += TIMEOUT_SECONDS / 2
                self._waits = False
            raise self._error("no answer")

        return call


def ends_at(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> tuple[float, bool]:
    """Return after how long a rank ends whose store does not answer, and whether another said why."""
    told = WaitedClock()
    for module in (watch, beats):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: told.now))
    activity, ends = Activity(), list[float]()
    lookout = watch.Lookout(
        SilentStore(told, error),  # type: ignore[arg-type]
        1,
        3,
        timeout_seconds=TIMEOUT_SECONDS,
        activity=activity,
        remedy=lambda: "start again",
    )
    monkeypatch.setattr(lookout.ended, "wait", told.wait)
    monkeypatch.setattr(lookout, "_end_process", lambda: ends.append(told.now))
    with activity.doing("batch 1"):
        lookout.run()
    return ends[0], lookout._has_said


def test_a_store_out_of_reach_is_noticed_within_half_as_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a call waits for the store is not taken for a stop of this process."""
    monkeypatch.setattr("os.getppid", lambda: "of this test")
    seconds, is_said = ends_at(monkeypatch, NoAnswer)
    assert seconds <= 1.5 * TIMEOUT_SECONDS and not is_said


def test_without_the_store_a_line_is_said_once_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says it first ends the others of its host, long before the time-out."""
    monkeypatch.setattr("os.getppid", lambda: "of that test")
    logged: list[str] = []
    monkeypatch.setattr(watch.logger, "error", logged.append)
    first, second = (watch.Voice(SilentStore(WaitedClock())) for _ in range(2))  # type: ignore[arg-type]
    assert not second.is_heard()
    assert first.say("rank 0 has ended") and not second.say("rank 0 has ended", has_store=False)
    assert logged == ["rank 0 has ended"] and second.is_heard()
    seconds, is_said = ends_at(monkeypatch, dist.DistNetworkError)
    assert seconds < TIMEOUT_SECONDS and is_said


def test_a_rank_waits_for_a_failed_one_in_the_same_operation_alone() -> None:
    """Not once it tries again, while the other may still be doing something about the failure."""
    here, there = Activity(), Activity()
    for activity in (here, there):
        with activity.doing("load"):
            activity.failure = "ValueError"
    with here.doing("load"):
        beat = SimpleNamespace(**vars(there))
        assert not here.waits_for(beat)  # type: ignore[arg-type]
        with there.doing("load"):
            there.failure = "ValueError"
            beat = SimpleNamespace(**vars(there))
        assert here.waits_for(beat)  # type: ignore[arg-type]
    assert not here.waits_for(beat)  # type: ignore[arg-type]


class Ranks:
    """Ranks of one process, each with its own view, at one store and one clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int, remedy: Callable[[], str] = str) -> None:
        self.clock, raw = WaitedClock(), dist.HashStore()
        for module in (watch, beats):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.clock.now))
        monkeypatch.setattr(Beat, "is_at_work", False)  # as on another host
        monkeypatch.setattr(Beat, "has_ended", False)
        monkeypatch.setattr("os.getppid", lambda: f"of {id(raw)} in {os.getpid()}")  # tests beside this one speak, too
        self.lookouts = [
            watch.Lookout(
                BoundedStore(raw, 10.0),
                rank,
                world_size,
                timeout_seconds=TIMEOUT_SECONDS,
                activity=Activity(),
                remedy=remedy,
            )
            for rank in range(world_size)
        ]

    def goes_on(self, watching: int, writing: Sequence[int], seconds: float) -> str:
        """Let time pass in which some ranks write and one, which has waited for too long, looks. Return the verdict."""
        for _ in range(round(seconds / 0.25)):
            self.clock.now += 0.25
            for rank in writing:
                self.lookouts[rank]._beats.write()
            self.lookouts[watching]._look(self.clock.now, decides=True)
        return self.lookouts[watching].verdict


def test_a_rank_that_waits_too_long_watches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that watches the stopped one may not be waiting."""
    ranks = Ranks(monkeypatch, 4)
    for lookout in ranks.lookouts:
        lookout.introduce()
    assert not ranks.goes_on(1, [0, 2, 3], 2 * TIMEOUT_SECONDS)
    assert ranks.goes_on(1, [0, 3], 2 * TIMEOUT_SECONDS).startswith("rank 2 (host ")


def test_a_rank_of_many_that_waits_too_long_reads_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or no store could serve them all; who waits for a stopped one learns of it a few looks later."""
    ranks, most = Ranks(monkeypatch, 100), list[int]()
    for lookout in ranks.lookouts:
        lookout.introduce()
    read = Beats.read

    def counted(self: Beats, among: Iterable[int]) -> dict[int, Beat]:
        there = list(among)
        most.append(len(there))
        return read(self, there)

    monkeypatch.setattr(Beats, "read", counted)
    stopped = 90
    looks = 4 + 100 // watch._AT_A_LOOK
    others = [rank for rank in range(100) if rank != stopped]
    assert ranks.goes_on(1, others, TIMEOUT_SECONDS + 2 * looks * 0.25).startswith(f"rank {stopped} (host ")
    assert max(most) <= watch._AT_A_LOOK + 2


def test_a_rank_that_never_came_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks(monkeypatch, 3).goes_on(0, [1], 2 * TIMEOUT_SECONDS) == f"rank 2 has {watch.OUT_OF_REACH}"


def test_an_error_that_ends_an_operation_on_all_ranks_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One leaves it before another; but one that stays alone in it has lost the other."""
    ranks = Ranks(monkeypatch, 2)
    here, there = (lookout.activity for lookout in ranks.lookouts)
    with here.doing("load"):
        with there.doing("load"):
            there.failure = "ValueError: no"
        assert not ranks.goes_on(0, [1], ranks.lookouts[0]._sure_seconds)
    with here.doing("batch 1"), there.doing("batch 1"):
        assert not ranks.goes_on(0, [1], TIMEOUT_SECONDS)
        there.failure = "ValueError: no"
        assert "ValueError: no) has failed, and its process" in ranks.goes_on(0, [1], TIMEOUT_SECONDS)


def test_a_save_that_waits_for_one_that_writes_for_long_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error that has ended an operation on all ranks; but one that was stopped is lost."""
    ranks = Ranks(monkeypatch, 2)
    here, there = (lookout.activity for lookout in ranks.lookouts)
    with here.lasting(aside=True):
        for activity in (here, there):
            with activity.doing("rebalance"):
                activity.failure = "PartitionError: no"
        assert not ranks.goes_on(0, [1], 3 * TIMEOUT_SECONDS)
        assert here.seconds_of_any_wait > TIMEOUT_SECONDS > here.seconds
        with here.doing("batch 1"):
            with there.doing("batch 1"):
                there.failure = "PartitionError: no"
            assert not ranks.goes_on(0, [1], TIMEOUT_SECONDS)  # of the batch, however long the save has waited
        assert ranks.goes_on(0, [], 2 * TIMEOUT_SECONDS).startswith("rank 1 (host ")


def test_a_folder_that_cannot_be_read_does_not_keep_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(watch.logger, "error", logged.append)
    monkeypatch.setattr("os.getppid", lambda: "of these ranks")

    def unreadable() -> str:
        raise OSError("stale file handle")

    (lookout,) = Ranks(monkeypatch, 1, unreadable).lookouts
    lookout.verdict = "rank 1 has ended"
    assert lookout.say() == f"rank 1 has ended. {watch.RESUME}" and logged == [lookout.say()]


def ends_early(case: Case) -> list[str]:
    """Let the script of rank 1 end, while the others go on without it."""
    engine = build(case)
    engine.train_batch(batches(engine))
    if engine.global_rank == 1:
        return []
    engine.stage.comm._watch._lookout.ended.wait(3 * TIMEOUT_SECONDS)  # beats go on
    return [engine.stage.comm._watch._lookout.verdict]


@pytest.mark.ranks
def test_a_rank_whose_script_has_ended_is_not_missed() -> None:
    assert run(2, ends_early, TWO, complete=False) == [[""], []]


def deleted(case: Case) -> tuple[bool, list[str]]:
    """Delete an engine. Return whether it is gone, and the threads that stay."""
    engine = build(case)
    engine.train_batch(batches(engine))
    kept = weakref.ref(engine)
    del engine
    gc.collect()
    threads = [thread for thread in threading.enumerate() if "ds_dynmo" in thread.name]
    for thread in threads:
        thread.join(30)  # it has been told to end
    return kept() is None, [thread.name for thread in threads if thread.is_alive()]


@pytest.mark.ranks
def test_a_deleted_engine_is_gone_and_so_is_its_watch() -> None:
    assert run(2, deleted, TWO) == [(True, [])] * 2


def test_an_error_is_the_backends_by_its_class_or_text() -> None:
    assert is_of_backend(RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not is_of_backend(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_an_error_may_come_from_itself() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__cause__ = second, first
    assert watch.causes(first) == [first, second] and watch.causes(None) == []


def test_a_lost_rank_leaves_no_traceback() -> None:
    printed: list[str] = []
    hook = watch.TracebackOfOthers(lambda kind, error, trace: printed.append(str(error)))
    for error in (RankLostError("rank 1 has ended"), ValueError("a bad label")):
        hook(type(error), error, None)
    assert printed == ["a bad label"]

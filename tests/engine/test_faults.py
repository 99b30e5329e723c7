"""A failure at any step of a rebalance, on any rank: harmless before bytes move, fatal on all ranks after that."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_dynmo import MigrationError, RankLostError
from ds_dynmo.engine.comm import point_to_point
from ds_dynmo.engine.comm.rounds import Rounds, RoundsInThread
from ds_dynmo.engine.decide.cycle import Asked, Reason, Request
from ds_dynmo.torch_private import default_store
from tests.faults.fault import Fault, Injected
from tests.support.configs import Case
from tests.support.deaths import die_at
from tests.support.harness import RankError, run
from tests.support.training import Warnings, batches, build, partitions, state, whole

pytestmark = pytest.mark.ranks

MOVES = ([0, 4, 6, 8], [0, 1, 6, 8], [0, 2, 4, 8])  # indexed by the rank that receives
START = (0, 3, 5, 8)
STEPS, MOST_CALLS = 6, 280_000  # of a run that is killed; fewer functions than are called in it
QUICK_SEED = 5  # of a run that is killed after its first save
SECTION: dict[str, Any] = {"interval": 0, "timeout_seconds": 10, "profile": {"batches": 1, "warmup_batches": 0}}
CASES = {
    "fp32": Case(stages=3, start=START, dynmo=SECTION),
    "bf16 zero1": Case(stages=3, start=START, dynmo=SECTION, precision="bf16 zero1", groups="two"),
}
HARMLESS = {
    "gather": "profile: measure a layer",
    "decide": "decide",
    "describe": "move: describe",
    "prepare": "move: make room",
    "pack": "move: pack",
}
OF_DECISIONS = ("gather", "decide")


def train_on(engine: Any, data: Any, rank: int, point: str) -> list[float]:
    """Train over a decision, if the point is one of it; move layers to ``rank`` and back, and train with them there."""
    losses = [engine.train_batch(data).item() for _ in range(2 if point in OF_DECISIONS else 0)]
    assert engine.partition == list(START), point  # also where a move has failed
    engine.rebalance(MOVES[rank])
    losses.append(engine.train_batch(data).item())
    engine.rebalance(START)
    return losses


def harmless(case: Case, first: int) -> dict[str, Any]:
    """Train on after rebalances that fail before bytes move, at each point, on the next rank each time.

    Args:
        first: the rank on which the first one fails.
    """
    engine = build(case)
    data, said = batches(engine), {}
    losses = [engine.train_batch(data).item()]
    for number, (point, place) in enumerate(HARMLESS.items()):
        rank = (first + number) % 3
        Fault(0 if point == "decide" else rank, 0, place, "exception").inject(engine)  # rank 0 decides
        if point in OF_DECISIONS:
            engine.rebalancer.go(Asked(Request(Reason.MODEL_CHANGED, "a test")))
        else:
            with pytest.raises(MigrationError) as caught:
                engine.rebalance(MOVES[(rank + 1) % 3])  # the rank sends
            assert caught.value.harmless
            said[point] = str(caught.value)
        losses += train_on(engine, data, rank, point)
        said.setdefault(point, repr(engine.rebalancer.failure))
    return {"said": said, "losses": losses, "state": state(engine), "replica": 0}


def unharmed(case: Case, first: int) -> dict[str, Any]:
    engine = build(case)
    data = batches(engine)
    losses = [engine.train_batch(data).item()]
    for number, point in enumerate(HARMLESS):
        losses += train_on(engine, data, (first + number) % 3, point)
    return {"losses": losses, "state": state(engine), "replica": 0}


@pytest.mark.parametrize(
    ("precision", "first"),
    [
        pytest.param(precision, first, marks=() if (precision, first) == ("bf16 zero1", 0) else pytest.mark.nightly)
        for precision in CASES
        for first in range(3)
    ],
)
def test_before_bytes_move_a_failure_is_harmless(precision: str, first: int) -> None:
    results = run(3, harmless, CASES[precision], first)
    for result in results:
        for point, said in result["said"].items():
            assert "No layer has moved" in said, (point, said)
            assert "the cable is gone" in said or point == "gather", (point, said)
    expected = run(3, unharmed, CASES[precision], first)
    assert [result["losses"] for result in results] == [result["losses"] for result in expected]
    assert whole(results) == whole(expected)


class UnreadableOnRank0:
    """Can be pickled on every rank, and not be loaded on rank 0."""

    def __reduce__(self) -> Any:
        return _loaded, ()


def _loaded() -> UnreadableOnRank0:
    if dist.get_rank() == 0:
        raise MemoryError("no room")
    return UnreadableOnRank0()


def ranks_that_differ() -> tuple[str, str, list[str]]:
    """Let rank 1 plan another route, and describe its optimizer by something that rank 0 cannot load; then train on.

    Return the errors of both, and the warnings where the second happens to a move during a batch.
    """
    engine = build(CASES["bf16 zero1"])
    data, warnings, state = batches(engine), Warnings(), engine.stage.state
    engine.train_batch(data)
    prepare, take = state.prepare, state.take_inventory

    def refused() -> str:
        with pytest.raises(MigrationError) as caught:
            engine.rebalance(MOVES[0])
        assert caught.value.harmless and engine.partition == list(START)
        return str(caught.value)

    if engine.global_rank == 1:
        state.prepare = lambda *args, **kwargs: (prepare(*args, **kwargs)[0], "another")
    route = refused()
    vars(state).pop("prepare", None)
    if engine.global_rank == 1:
        state.take_inventory = lambda: replace(take(), scalars={0: {"step": UnreadableOnRank0()}})
    description = refused()
    engine.rebalance(MOVES[0], background=True)
    engine.train_batch(data)
    assert engine.partition == list(START)
    vars(state).pop("take_inventory", None)
    engine.rebalance(MOVES[0])
    engine.train_batch(data)
    assert engine.partition == MOVES[0]
    return route, description, warnings.messages


def test_ranks_that_planned_another_route_or_cannot_load_a_description_are_named_before_bytes_move() -> None:
    unread = "failed on ranks [0], first with MemoryError: no room"
    for rank, (route, description, warnings) in enumerate(run(3, ranks_that_differ)):
        assert "route: ranks differ: " in route and "another on ranks [1]. No layer has moved" in route
        assert unread in description
        assert rank or unread in "\n".join(warnings)


FATAL = {
    "headers": "move: exchange headers",
    "send": "move: send the rest",
    "unpack": "move: unpack",
    "rebuild": "move: rebuild",
    "rewrap": "move: hand over to the optimizer",
    "tie": "move: tie",
}
QUICK = {"fp32": [("unpack", 2)], "bf16 zero1": [("send", 1), ("tie", 0)]}


def fatal(case: Case, point: str, rank: int, background: bool) -> str:
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    Fault(rank, 0, FATAL[point], "exception").inject(engine)
    try:
        engine.rebalance(MOVES[rank], background=background)
        engine.train_batch(data)
    except (MigrationError, RankLostError) as error:
        assert isinstance(error, RankLostError) or not error.harmless
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("point", "rank", "precision"),
    [
        pytest.param(point, rank, precision, marks=() if (point, rank) in QUICK[precision] else pytest.mark.nightly)
        for point in FATAL
        for rank in range(3)
        for precision in CASES
    ],
)
def test_once_bytes_move_a_failure_stops_every_rank_with_its_place(point: str, rank: int, precision: str) -> None:
    background = precision == "bf16 zero1"
    messages = run(3, fatal, CASES[precision], point, rank, background, complete=False)
    assert "the cable is gone" in messages[rank]
    assert f"rank {rank} failed " in messages[rank] and "resume the job from its last checkpoint" in messages[rank]
    for number, message in enumerate(messages):
        assert f"rank {number} failed " in message or ("the cable is gone" in message and "start it again" in message)


class WaitsForStore:
    """A round that does not begin before rank 1 has given up, and then fails."""

    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        default_store().wait(["given up"])
        raise Injected("the cable is gone")


def late_round(kind: type[Rounds]) -> tuple[str, list[str]]:
    """Let rank 1 wait for a round that rank 0 does not begin. Return the error, and the threads that are left.

    Args:
        kind: exchanges the rounds of a move while a batch trains.
    """
    point_to_point.Rounds = point_to_point.RoundsInThread = kind  # type: ignore[misc]
    engine = build(Case(stages=2, start=(0, 4, 8)))
    data = batches(engine)
    engine.train_batch(data)
    p2p, begin = engine.stage.comm.p2p, engine.stage.comm.p2p.begin

    def begin_late(*messages: Any) -> Rounds:
        rounds: Any = begin(*messages)
        impatient = partial(rounds._post, timeout=timedelta(seconds=1))
        rounds._post = (lambda _: WaitsForStore()) if engine.global_rank == 0 else impatient
        return rounds  # type: ignore[no-any-return]

    p2p.begin = begin_late
    engine.rebalance([0, 2, 8], background=True)
    with pytest.raises(MigrationError) as caught:
        engine.train_batch(data)
    assert not caught.value.harmless and not engine.migrator.is_moving
    if engine.global_rank == 1:
        default_store().set("given up", "yes")
    return str(caught.value), [thread.name for thread in threading.enumerate() if thread.name == "ds_dynmo transfers"]


@pytest.mark.parametrize("kind", [pytest.param(Rounds, marks=pytest.mark.nightly), RoundsInThread])
def test_a_round_that_times_out_stops_its_rank_with_the_reason(kind: type[Rounds]) -> None:
    (injected, _), (timed_out, _) = found = run(2, late_round, kind, complete=False, backend="gloo")
    assert "rank 0 failed sending layers" in injected and "the cable is gone" in injected
    assert "rank 1 failed sending layers while layers moved from [0, 4, 8] to [0, 2, 8]" in timed_out
    assert "Timed out" in timed_out and "resume the job from its last checkpoint" in timed_out
    assert [threads for _, threads in found] == [[], []]


def _continue(engine: Any, case: Case, folder: str, background: bool) -> dict[str, Any]:
    data = islice(batches(engine), engine.global_steps * engine.micro_batches, None)
    losses = {}
    for step, move in list(enumerate(partitions(case, 1, STEPS)))[engine.global_steps :]:
        losses[step] = engine.train_batch(data).item()
        engine.rebalance(move, background=background)
        if step % 2:
            engine.save_checkpoint(folder)
    sys.setprofile(None)
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


def train_and_save(case: Case, folder: str, background: bool, victim: int = -1, calls: int = 0) -> dict[str, Any]:
    """Rebalance after every batch, save after every second. Rank ``victim`` kills itself at its ``calls``-th call."""
    engine = build(case)
    if engine.global_rank == victim:
        die_at(calls)
    return _continue(engine, case, folder, background)


def resume(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case)
    engine.load_checkpoint(folder)
    return _continue(engine, case, folder, background=False)


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=() if s == QUICK_SEED else pytest.mark.nightly) for s in range(100)]
)
def test_a_killed_job_resumes_bitwise(tmp_path: Path, seed: int) -> None:
    """SIGKILL comes at any moment of a run that rebalances after every batch: before, in, and between saves.

    In every other run layers move while batches train.
    """
    chooser, background = random.Random(seed), seed % 2 == 1
    case = Case(stages=2, precision=chooser.choice(["fp32", "bf16 zero1"]), groups="two", dropout=True, start=(0, 3, 8))
    whole_run = run(2, train_and_save, case, str(tmp_path / "whole"), background)
    victim, calls, folder = chooser.randint(0, 1), chooser.randint(1, MOST_CALLS), str(tmp_path / "killed")
    with pytest.raises(RankError, match=r"died|Connection"):
        run(2, train_and_save, case, folder, background, victim, calls)
    stages = chooser.choice([1, 2])
    case = replace(case, stages=stages, start=None if stages == 1 else case.start)
    resumed = run(stages, resume, case, folder)
    expected = whole_run[0]["losses"]
    assert resumed[0]["losses"] == {step: expected[step] for step in resumed[0]["losses"]}
    assert seed != QUICK_SEED or 0 not in resumed[0]["losses"], "nothing was saved before: choose another seed"
    assert whole(resumed) == whole(whole_run)

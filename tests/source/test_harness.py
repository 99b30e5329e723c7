"""What a test is told whose ranks fail, die or stand still: the error that came first, and where all of them stand."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import harness
from tests.support.harness import GROUP_TIMEOUT, RankError, World, run, run_each
from tests.support.ranks import Place

pytestmark = pytest.mark.ranks

ENDS = {"fails": "rank 1 failed:\nTraceback .*ValueError: the first\n", "dies": "rank 1 died"}


def lose_rank_1(how: str) -> None:
    """Let rank 1 fail or die, and the others fail for want of it."""
    if dist.get_rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the first")
    dist.recv(torch.zeros(1), 1)


@pytest.mark.parametrize("how", ENDS)
def test_the_rank_that_was_lost_first_is_told_first_and_others_in_a_line(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "TOGETHER_SECONDS", 100.0)  # all fail, however busy the machine is
    with pytest.raises(RankError) as raised:
        run(3, lose_rank_1, how, backend="gloo", complete=False)
    told = str(raised.value)
    assert re.fullmatch(rf"{ENDS[how]}(\n?rank [02] failed after it: \w*Error: [^\n]*){{2}}", told, re.DOTALL), told
    assert told.count("Traceback") == (how == "fails")


def fail_alone() -> None:
    if dist.get_rank() == 1:
        raise ValueError("alone")
    threading.Event().wait()


def test_a_rank_that_fails_ends_those_that_wait() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 failed:.*ValueError: alone\n$"):
        run(2, fail_alone, backend="gloo")


def stand_still(folder: str) -> None:
    Path(folder, f"rank {dist.get_rank()} is there").touch()
    if dist.get_rank() == 0:
        threading.Event().wait()


@pytest.mark.parametrize("stays", [True, False])
def test_a_hang_ends_with_the_stacks_of_all_ranks(stays: bool, tmp_path: Path) -> None:
    """Rank 1 is done, and stays, or its process has ended."""
    places = [Place(rank, 2, str(tmp_path), None, GROUP_TIMEOUT, "gloo") for rank in range(2)]
    world = World(places, pickle.dumps((stand_still, (str(tmp_path),))), stays=stays)
    try:
        while len([*tmp_path.glob("* is there")]) < 2 or not world.pipes[1].poll():
            time.sleep(0.01)
        if not stays:
            world.processes[1].join()
        with pytest.raises(RankError) as raised:
            world.collect(0.0)
    finally:
        world.end()
    said, *stacks = re.split(r"^rank [01]:$", str(raised.value), flags=re.MULTILINE)
    assert said == "ranks [0] were not done in 0.0 s. Where all of them stand:\n"
    assert ["stand_still" in stack for stack in stacks] == [True, False]
    assert ["rank_main" in stack for stack in stacks] == [True, stays]
    assert not any(process.is_alive() for process in world.processes)


def test_ranks_are_given_the_seconds_that_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they have not begun by then."""
    monkeypatch.setenv("DS_DYNMO_RANK_SECONDS", "0.001")
    with pytest.raises(RankError, match=r"^ranks \[0\] were not done in 0\.001 s"):
        run(1, threading.Event, backend="gloo")


def compute(seconds: float) -> float:
    while time.process_time() < seconds:
        pass
    return time.process_time()


def test_what_ranks_compute_is_added_up() -> None:
    before = harness.CPU_SECONDS[0]
    _, later = run_each(2, compute, (0.1,), (0.3,), backend="gloo")
    assert 0.6 <= sum(later) <= harness.CPU_SECONDS[0] - before <= 2 * sum(later)

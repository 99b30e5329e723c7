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

from tests.support.harness import GROUP_TIMEOUT, RankError, World, run
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
def test_the_rank_that_was_lost_first_is_told_first_and_others_in_a_line(how: str) -> None:
    """Those of which it is known that they failed, too."""
    with pytest.raises(RankError) as raised:
        run(3, lose_rank_1, how, backend="gloo", complete=False)
    told = str(raised.value)
    assert re.fullmatch(rf"{ENDS[how]}(\n?rank [02] failed after it: \w*Error: [^\n]*)*", told, re.DOTALL), told
    assert told.count("Traceback") == (how == "fails")


def stand_still(folder: str) -> None:
    Path(folder, f"rank {dist.get_rank()} is there").touch()
    if dist.get_rank() == 0:
        threading.Event().wait()


def test_a_hang_ends_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    """Rank 1 is done, and stays."""
    places = [Place(rank, 2, str(tmp_path), None, GROUP_TIMEOUT, "gloo") for rank in range(2)]
    world = World(places, pickle.dumps((stand_still, (str(tmp_path),))), stays=True)
    try:
        while len([*tmp_path.glob("* is there")]) < 2 or not world.pipes[1].poll():
            time.sleep(0.01)
        with pytest.raises(RankError) as raised:
            world.collect(0.0)
    finally:
        world.end()
    said, *stacks = re.split(r"^rank [01]:$", str(raised.value), flags=re.MULTILINE)
    assert said == "ranks [0] were not done in 0.0 s. Where all of them stand:\n"
    assert ["stand_still" in stack for stack in stacks] == [True, False]
    assert ["rank_main" in stack for stack in stacks] == [True, True]

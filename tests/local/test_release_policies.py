"""Release policies: one conformance test for all, and what is particular to each."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds_dynmo.config import RepackConfig, parse_block
from ds_dynmo.engine.elastic.release import Place, ReleasePolicy, ReleaseRefused, policy_for
from ds_dynmo.engine.elastic.release.messenger import Messenger
from ds_dynmo.errors import ConfigError

GONE = [Place(1, "host-a", "cuda:1"), Place(2, "host-b", "cuda:0")]
STAYING = [Place(0, "host-a", "cuda:0")]
RECORDER = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"


def policies(folder: Path) -> dict[str, ReleasePolicy]:
    blocks = {
        "exit": {},
        "park": {"release": "park"},
        "command": {"release": "command", "command": [sys.executable, "-c", RECORDER, str(folder / "told")]},
    }
    return {name: policy_for(parse_block(RepackConfig, block, "repack")) for name, block in blocks.items()}


@pytest.mark.parametrize("name", ["exit", "park", "command"])
def test_every_policy(name: str, tmp_path: Path) -> None:
    """It may be called again with the same ranks, and with more of them, and says whether its ranks can come back."""
    policy = policies(tmp_path)[name]
    policy.release(GONE[:1], [*STAYING, GONE[1]])
    policy.release(GONE, STAYING)
    policy.release(GONE, STAYING)
    assert policy.parks == (name == "park")


def test_a_command_is_told_who_is_free(tmp_path: Path) -> None:
    policies(tmp_path)["command"].release(GONE, STAYING)
    told = json.loads((tmp_path / "told").read_text())
    assert told["released"] == [
        {"rank": 1, "host": "host-a", "device": "cuda:1"},
        {"rank": 2, "host": "host-b", "device": "cuda:0"},
    ]
    assert told["staying"] == [{"rank": 0, "host": "host-a", "device": "cuda:0"}]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (["-c", "import sys; sys.exit('quota exceeded')"], "exit code 1: quota exceeded"),
        (["-c", "while True: pass"], "timed out after 0.5 seconds"),
    ],
)
def test_a_command_that_fails_is_a_refusal(program: list[str], says: str) -> None:
    block = {"release": "command", "command": [sys.executable, *program], "release_timeout_seconds": 0.5}
    with pytest.raises(ReleaseRefused, match=says):
        policy_for(parse_block(RepackConfig, block, "repack")).release(GONE, STAYING)


def test_a_command_that_does_not_exist_is_a_refusal() -> None:
    block = {"release": "command", "command": ["/no/such/program"]}
    with pytest.raises(ReleaseRefused, match="/no/such/program"):
        policy_for(parse_block(RepackConfig, block, "repack")).release(GONE, STAYING)


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"release": "command"}, 'release "command" needs command'),
        ({"command": ["x"]}, "no other release takes one"),
        ({"release": "command", "command": []}, "a list of one string or more"),
        ({"release": "command", "command": "rm -r x"}, "a list of one string or more"),
        ({"release": "kubernete"}, "repack.release"),
        ({"max_slowdown": 1.0}, "repack.max_slowdown"),
        ({"min_stages": 0}, "repack.min_stages"),
    ],
)
def test_wrong_blocks(block: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_block(RepackConfig, block, "repack")


class Stubborn:
    """Refuses so many times."""

    parks = False

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.calls: list[list[int]] = []

    def release(self, gone: Sequence[Place], staying: Sequence[Place]) -> None:
        self.calls.append([place.rank for place in gone])
        if len(self.calls) <= self.refusals:
            raise ReleaseRefused("not now")


def deliver(policy: Stubborn, attempts: int) -> tuple[list[str], list[float]]:
    said: list[str] = []
    pauses: list[float] = []

    def pause(replaced: threading.Event, seconds: float) -> bool:
        pauses.append(seconds)
        return replaced.is_set()

    messenger = Messenger(policy, said.append, attempts=attempts, pause=pause)
    messenger.release(GONE, STAYING)
    messenger.finish()
    return said, pauses


def test_a_refusal_is_reported_once_and_tried_again() -> None:
    policy = Stubborn(3)
    said, pauses = deliver(policy, 5)
    assert policy.calls == [[1, 2]] * 4
    assert pauses == [1.0, 2.0, 4.0]
    assert len(said) == 2
    assert "ranks [1, 2] are idle but could not be given back: not now" in said[0]
    assert "given back at attempt 4" in said[1]


def test_it_gives_up_in_the_end() -> None:
    policy = Stubborn(99)
    said, pauses = deliver(policy, 3)
    assert len(policy.calls) == 3 and pauses == [1.0, 2.0]
    assert "not given back in 3 attempts" in said[-1]


def test_a_later_release_takes_the_place_of_one_that_is_refused() -> None:
    policy = Stubborn(99)
    paused = threading.Event()

    def pause(replaced: threading.Event, seconds: float) -> bool:
        paused.set()
        return replaced.wait(30.0)

    said: list[str] = []
    messenger = Messenger(policy, said.append, attempts=2, pause=pause)
    messenger.release(GONE[:1], STAYING)
    paused.wait(30.0)
    policy.refusals = 0
    messenger.release(GONE, STAYING)
    messenger.finish()
    assert policy.calls == [[1], [1, 2]]
    assert len(said) == 1

"""The recipe of docs/hosts.md: torchrun starts a run again on the hosts that there are, and the run resumes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.harness import run
from tests.support.namespaces import Network
from tests.support.pages import code_blocks
from tests.support.script import flags, run_script
from tests.support.watched_command import OF_LAUNCHERS, WatchedCommand

pytestmark = [pytest.mark.nightly, pytest.mark.ranks]

STORE_PORT = 29400
SAVE_INTERVAL = 5
COMPARED = 3  # batches at the beginning of each part of the run


class Part(NamedTuple):
    """What a run trained between two starts: from step ``first`` on, on so many stages, with these losses."""

    stages: int
    first: int
    losses: list[float]


def parts(report: Path) -> list[Part]:
    """Return the parts of a run so far in which a batch was trained."""
    found: list[Part] = []
    for line in report.read_text().splitlines() if report.exists() else ():
        record = json.loads(line)
        if record["kind"] == "start":
            found.append(Part(record["stages"], record["first_step"], []))
        elif record["kind"] == "step":
            found[-1].losses.append(record["train_loss"])
    return [part for part in found if part.losses]


def recipe(checkout: Path, more: list[str]) -> str:
    """Return the page's script for one host, with more flags. A lost host is missed sooner than the page says."""
    (block,) = code_blocks("hosts.md", "Hosts that come and go", "bash")
    sooner = "--rdzv-id run --rdzv-conf last_call_timeout=5,keep_alive_interval=1"
    return f"cd {checkout}; {block.rstrip().replace('--rdzv-id run', sooner)} {shlex.join(more)}"


class Hosts(ExitStack):
    """Starts the recipe on hosts of a network."""

    def __init__(self, network: Network, folder: Path) -> None:
        super().__init__()
        self._network, self._folder = network, folder

    def start(self, name: str, host: int, script: str) -> WatchedCommand:
        (folder := self._folder / name).mkdir()
        return self.enter_context(WatchedCommand(folder, self._network.on(host, ["bash", "-c", script])))


def has_store(command: WatchedCommand) -> bool:
    """Look whether something listens at the store's port on the host of this agent."""
    return any(
        f":{STORE_PORT:04X} " in Path(f"/proc/{process.pid}/net/tcp6").read_text()
        for process in command.processes("torchrun")
    )


@pytest.mark.parametrize("places", [(0, 1, 2), (0, 0, 0)], ids=["three hosts", "one host"])
def test_a_run_goes_on_with_fewer_hosts_and_with_more(
    places: tuple[int, int, int], three_hosts: Network, checkout: Path, tmp_path: Path
) -> None:
    """Of three hosts one is lost, which does not hold the store, and comes back."""
    report, saved = tmp_path / "report.jsonl", checkout / "run"
    given = flags(tmp_path, "dense", 100_000)
    saving = ["--save-interval", str(SAVE_INTERVAL), "--report", str(report)]
    script = recipe(checkout, [*given[2:], *saving])
    with Hosts(three_hosts, tmp_path) as hosts:

        def trained(stages: int, earlier: int) -> Callable[[], bool]:
            """Look whether a part after so many ``earlier`` ones has these stages, and batches enough to save."""
            return lambda: any(
                part.stages == stages and len(part.losses) > SAVE_INTERVAL for part in parts(report)[earlier:]
            )

        first = hosts.start("first", places[0], script)
        first.until(lambda: has_store(first))
        second, lost = (hosts.start(name, place, script) for name, place in zip(("second", "third"), places[1:]))
        first.until(trained(3, earlier=0))
        earlier = len(parts(report))
        for process in lost.processes():
            process.kill()
        first.until(trained(2, earlier))
        earlier = len(parts(report))
        back = hosts.start("back", places[2], script)
        first.until(trained(3, earlier))
        for command in (first, second, back):
            for process in command.processes("torchrun"):
                process.terminate()
        for command in (first, second, lost, back):
            assert not command.left(*OF_LAUNCHERS), command.output()
    found = parts(report)
    for before, after in zip(found, found[1:]):
        lost_steps = before.first + len(before.losses) - after.first
        assert 0 <= lost_steps <= (0 if after.stages > before.stages else SAVE_INTERVAL)
    assert (saved / "latest").read_text() == f"global_step{found[-1].first + len(found[-1].losses)}"
    for part in found:
        compared = part.losses[:COMPARED]
        resume = ["--resume", str(saved), "--tag", f"global_step{part.first}"] if part.first else []
        by_hand = run(part.stages, run_script, [*given, *resume, "--stop-at", str(part.first + len(compared))])
        assert by_hand[0]["losses"] == compared


@pytest.mark.parametrize("wrong", ["from the beginning", "when a host comes"])
def test_a_configuration_error_ends_the_agents_of_all_hosts(
    wrong: str, three_hosts: Network, checkout: Path, tmp_path: Path
) -> None:
    """The store is not on rank 0's host. One process more than layers comes, or a value that is out of range."""
    report = tmp_path / "report.jsonl"
    given = [*flags(tmp_path, "dense", 100_000)[2:], "--report", str(report)]
    script = recipe(checkout, given).replace("node0", "node2")
    with Hosts(three_hosts, tmp_path) as hosts:
        if wrong == "from the beginning":
            launched = [hosts.start(f"{host}", host, f"{script} --set dynmo.interval=-1") for host in range(3)]
            message = "ds-dynmo-train: error: dynmo.interval = -1: should be"
        else:
            launched = [hosts.start(f"{host}", host, script) for host in (2, 1)]
            launched[0].until(lambda: parts(report))
            more = script.replace("--nproc-per-node 1", "--nproc-per-node 9")
            launched.append(hosts.start("0", 0, more))
            message = "ds-dynmo-train: error: --stages 11: the model has"
        for command in launched:
            assert not command.left(*OF_LAUNCHERS), command.output()
            assert command.launcher.returncode == 1, command.output()
    outputs = [command.output() for command in launched]
    assert sum(output.count(message) for output in outputs) >= 1, outputs
    assert all(output.count("ds-dynmo-train: error") <= 1 for output in outputs), outputs

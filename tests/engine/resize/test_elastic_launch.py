"""The recipe of docs/elastic.md: torchrun starts a run again on the hosts that there are, and the run resumes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.harness import run
from tests.support.ports import free_port
from tests.support.script import flags, run_script
from tests.support.watched_command import OF_LAUNCHERS, WatchedCommand

pytestmark = pytest.mark.ranks

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


def agent(*, hosts_store: bool, port: int) -> list[str]:
    """Return the command of a host's agent, as the recipe has it, up to the program that it starts."""
    waits = "last_call_timeout=5,keep_alive_interval=1"
    return [
        *("env", "GLOO_SOCKET_IFNAME=lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc-per-node", "1"),
        *("--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-id", "run", "--local-addr", "127.0.0.1"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"is_host={int(hosts_store)},{waits}"),
    ]


@pytest.mark.nightly
def test_a_run_goes_on_with_fewer_hosts_and_with_more(tmp_path: Path) -> None:
    """Of three hosts one is lost, which does not hold the store, and comes back."""
    port, report, saved = free_port(), tmp_path / "report.jsonl", tmp_path / "saved"
    given = flags(tmp_path, "dense", 100_000)
    saving = ["--save", str(saved), "--save-interval", str(SAVE_INTERVAL), "--report", str(report)]
    program = ["scripts/train.py", *given, *saving, "--resume", str(saved)]
    with ExitStack() as stack:

        def start(name: str) -> WatchedCommand:
            (tmp_path / name).mkdir()
            command = [*agent(hosts_store=name == "first", port=port), *program]
            return stack.enter_context(WatchedCommand(tmp_path / name, command))

        def trained(stages: int, earlier: int) -> Callable[[], bool]:
            """Look whether a part after so many ``earlier`` ones has these stages, and batches enough to save."""
            return lambda: any(
                part.stages == stages and len(part.losses) > SAVE_INTERVAL for part in parts(report)[earlier:]
            )

        first, second, lost = start("first"), start("second"), start("third")
        first.until(trained(3, earlier=0))
        earlier = len(parts(report))
        for process in lost.processes():
            process.kill()
        first.until(trained(2, earlier))
        earlier = len(parts(report))
        back = start("back")
        first.until(trained(3, earlier))
        for command in (first, second, back):
            command.launcher.terminate()
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

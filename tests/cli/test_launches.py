"""Training under torchrun, under torchrun that srun starts, and deepspeed: it ends as a whole, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.configs import Case
from tests.support.harness import run
from tests.support.ports import free_port
from tests.support.slurm_cluster import Cluster, skip_without_slurm
from tests.support.training import train
from tests.support.watched_command import OF_LAUNCHERS, ROOT, WatchedCommand

TRAIN = ["-m", "ds_dynmo.cli.train", "--data", __file__]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SCRIPT = ROOT / "tests" / "support" / "repack_script.py"
SIZES = {"layers": 4, "hidden_size": 16, "heads": 2, "sequence_length": 16, "tied_embedding": False}

pytestmark = [pytest.mark.nightly, pytest.mark.ranks]


@pytest.fixture(params=["torchrun", "srun"])
def launcher(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A command that starts two ranks of the Python program that follows."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if request.param == "torchrun":
        yield TORCHRUN
        return
    skip_without_slurm()
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster", ["node1"])
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    yield ["srun", "--ntasks=1", *TORCHRUN]
    cluster.close()


def configuration(folder: Path, **blocks: Any) -> list[str]:
    """Write a configuration, and return the flag that names it."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dynmo": {"interval": 0},
        "model": SIZES,
        **blocks,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return ["--deepspeed_config", str(folder / "config.json")]


def is_second_rank(process: psutil.Process) -> bool:
    return process.environ().get("RANK") == "1"


@pytest.mark.parametrize("killed", ["rank", "launcher"])
def test_a_killed_launch_leaves_nothing(killed: str, launcher: list[str], tmp_path: Path) -> None:
    """It is killed in the middle of training."""
    report = tmp_path / "report.jsonl"
    flags = [*configuration(tmp_path), "--steps", "100000", "--report", str(report)]
    with WatchedCommand(tmp_path, [*launcher, *TRAIN, *flags]) as command:
        command.until(lambda: report.exists() and '"kind": "step"' in report.read_text())
        if killed == "launcher":
            command.launcher.kill()
        else:
            (victim,) = filter(is_second_rank, command.processes(TRAIN[1]))
            victim.kill()
        assert not command.left(*OF_LAUNCHERS), command.output()
        assert command.launcher.returncode != 0


def test_a_refused_launch_leaves_nothing(launcher: list[str], tmp_path: Path) -> None:
    flags = [*configuration(tmp_path, model={**SIZES, "layers": "four"}), "--steps", "2"]
    with WatchedCommand(tmp_path, [*launcher, *TRAIN, *flags]) as command:
        assert not command.left(*OF_LAUNCHERS), command.output()
        assert command.launcher.returncode > 0 and 'model.layers = "four"' in command.output(), command.output()


def test_a_released_rank_ends_and_the_launcher_succeeds(launcher: list[str], tmp_path: Path) -> None:
    repack = {"enabled": True, "max_slowdown": 0.99}
    frozen = {**SIZES, "case": {"kind": "freezing", "schedule": [[0.3, 3]]}}
    flags = [*configuration(tmp_path, model=frozen, dynmo={"interval": 0, "repack": repack}), "--steps", "10"]
    with WatchedCommand(tmp_path, [*launcher, *TRAIN, *flags]) as command:
        assert not command.left(*OF_LAUNCHERS), command.output()
        assert command.launcher.returncode == 0, command.output()
        assert "2 -> 1 stage, " in command.output() and "step 10/10" in command.output(), command.output()


def test_released_ranks_end_and_the_launcher_succeeds(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "3", "--master_port", str(free_port())]
    done = subprocess.run(
        [*launcher, str(SCRIPT), str(tmp_path), "exit"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"exit-{rank}.json").read_text()) for rank in range(3)]
    straight = run(3, train, Case(stages=3), [], 6, 1)[0]["losses"]
    assert found[0] == {"losses": straight, "steps": 6, "released": False}
    assert found[1] == found[2] == {"losses": straight[:2], "steps": 2, "released": True}

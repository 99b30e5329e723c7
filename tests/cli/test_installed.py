"""The commands of an installed package, where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import code_blocks
from tests.support.ports import free_port
from tests.support.slurm_cluster import Cluster, skip_without_slurm

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ["ds-dynmo-train", "--deepspeed_config", "gpt.json", "--data", __file__, "--steps", "2"]
LAUNCHERS = {
    "none": [],
    "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", "--no_python", "--master_port"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--no-python", "--master_port"],
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of the package, and install it in a folder."""
    folder = tmp_path_factory.mktemp("installed")
    source, target = folder / "source", folder / "target"
    shutil.copytree(ROOT / "ds_dynmo", source / "ds_dynmo", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, *offline, "--target", str(target), str(source)], check=True, timeout=300)
    shutil.rmtree(source)
    (folder / "gpt.json").write_text(code_blocks("scripts.md", "Without a checkout", "json")[0])
    return target


def output_of(installed: Path, *command: str, **variables: str) -> str:
    """Run a command away from the checkout, with the installed package alone, and return what it prints."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    ours = {"PYTHONPATH": str(installed), "PATH": f"{installed}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment = {**kept, **variables, **ours}
    done = subprocess.run(
        command, cwd=installed.parent, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_commands_need_no_checkout(installed: Path) -> None:
    where = output_of(installed, sys.executable, "-c", "import ds_dynmo; print(ds_dynmo.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    assert "ds-dynmo-simulate report.jsonl --stages 2 4 8" in output_of(installed, "ds-dynmo-simulate", "--help")


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_training(installed: Path, launcher: str) -> None:
    words = LAUNCHERS[launcher]
    port = [str(free_port())] if words else []
    printed = output_of(installed, *words, *port, *TRAIN)
    assert printed.count("step 2/2: loss") == 1  # one job, of one rank or of two
    assert ("One process" in printed) == (launcher == "none")


@pytest.mark.nightly
def test_srun_starts_torchrun_which_starts_training(installed: Path, tmp_path: Path) -> None:
    skip_without_slurm()
    cluster = Cluster(tmp_path, ["node1"])
    try:
        words = ["srun", "--ntasks=1", *LAUNCHERS["torchrun"], str(cluster.free_port)]
        printed = output_of(installed, *words, *TRAIN, **cluster.environment)
    finally:
        cluster.close()
    assert printed.count("step 2/2: loss") == 1

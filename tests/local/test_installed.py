"""The commands of an installed package, where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
    return target


def output_of(installed: Path, *command: str) -> str:
    """Run a command away from the checkout, with the installed package alone, and return what it prints."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment = {**kept, "PYTHONPATH": str(installed), "PATH": f"{installed}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=installed.parent, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_commands_need_no_checkout(installed: Path) -> None:
    where = output_of(installed, sys.executable, "-c", "import ds_dynmo; print(ds_dynmo.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    assert "ds-dynmo-simulate --case pruning" in output_of(installed, "ds-dynmo-simulate", "--help")

"""scripts/train.py: what it refuses before a process group exists, and one short run by the deepspeed command."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.errors import ConfigError, PartitionError
from scripts.train import prepare

ROOT = Path(__file__).parents[2]


def write(folder: Path, **changes: Any) -> Path:
    settings = json.loads((ROOT / "ds_configs" / "freezing.json").read_text())
    settings["model"] = {"layers": 4, "hidden_size": 16, "heads": 2, "sequence_length": 16, "tied_embedding": False}
    settings["gradient_accumulation_steps"] = 2
    settings.update(changes)
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return path


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"dynmo": {"intervall": 5}}, [], "dynmo.intervall.*interval"),
        ({"dynmo": {"interval": -1}}, [], "dynmo.interval"),
        ({"dynmo": {"balancer": "partitoin"}}, [], "partition"),
        ({"dynmo": {"initial_partition": [0, 3, 3]}}, [], "initial_partition"),
        ({"dynamo": {}, "dynmo": {}}, [], "dynamo"),
        ({"model": {"layers": 4, "head": 2}}, [], "model.head.*heads"),
        ({"model": {"layers": 0}}, [], "model.layers"),
        ({}, ["--steps", "0"], "steps"),
        ({}, ["--stages", "3"], "stages"),
        ({}, ["--data", "/does/not/exist"], "/does/not/exist"),
        ({}, ["--resume", "/does/not/exist"], "/does/not/exist"),
        ({}, ["--unknown"], "--unknown"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], flags: list[str], message: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises((ConfigError, PartitionError), match=message):
        prepare(["--deepspeed_config", str(path), *flags])


@pytest.mark.parametrize(
    ("moe", "named"),
    [
        ({"routing": "bias"}, r'model\.moe\.routing = "bias": needs a "dynmo" block'),
        ({"expert_parallel": True}, r'model\.moe\.expert_parallel: needs a "dynmo" block'),
    ],
)
def test_what_concerns_all_replicas_needs_the_block(tmp_path: Path, moe: dict[str, Any], named: str) -> None:
    path = write(tmp_path, model={"layers": 4, "moe": moe})
    prepare(["--deepspeed_config", str(path)])
    settings = json.loads(path.read_text())
    del settings["dynmo"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=named):
        prepare(["--deepspeed_config", str(path)])


def test_an_empty_data_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"empty\.txt"):
        prepare(["--deepspeed_config", str(write(tmp_path)), "--data", str(tmp_path / "empty.txt")])


def launch(config: Path, *flags: str, seconds: float = 400.0) -> str:
    """What a run of the script in two stages prints, once it has ended well."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]
    command += ["scripts/train.py", "--deepspeed_config", str(config), *flags]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_with_a_thread_beside_it_ends_and_its_useless_cache_is_named(tmp_path: Path) -> None:
    """Egeria's last verdict, due after the last step, is still under way then."""
    settings = json.loads((ROOT / "ds_configs" / "freezing_egeria.json").read_text())
    settings["gradient_accumulation_steps"] = 2
    settings["model"]["freezing"]["egeria"]["start"] = 0.0
    settings["model"]["freezing"]["cache_bytes"] = 10**6
    settings["model"]["sampling"] = "epochs"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    printed = launch(tmp_path / "config.json", "--steps", "3", seconds=150.0)
    assert "step 3/3" in printed and "in 3 steps no text comes again" in printed


def test_a_run_says_what_was_found_again(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(random.Random(0).randbytes(512))  # 30 sequences for training: 4 steps
    freezing = {"schedule": [[0.0, 2]], "cache_bytes": 10**6}
    model = json.loads(write(tmp_path).read_text())["model"] | {"sampling": "epochs", "freezing": freezing}
    report = tmp_path / "report.jsonl"
    flags = ["--data", str(tmp_path / "text"), "--report", str(report), "--steps"]
    config = write(tmp_path, model=model, gradient_accumulation_steps=8, dynmo={"interval": 0})
    assert "cache lookups 64, cache hits 34, cache held bytes" in launch(config, *flags, "8")
    assert json.loads(report.read_text().splitlines()[-1])["cases"]["freezing"]["cache_hits"] == 34


def test_a_short_run(tmp_path: Path) -> None:
    model = json.loads(write(tmp_path).read_text())["model"] | {"freezing": {"schedule": [[0.5, 2]]}}
    config = write(tmp_path, model=model, dynmo={"interval": 3, "min_improvement": 0.0, "profile": {"batches": 1}})
    report = tmp_path / "report.jsonl"
    printed = launch(config, "--steps", "8", "--report", str(report))
    records = [json.loads(line) for line in report.read_text().splitlines()]
    assert records[0]["kind"] == "start" and records[-1]["kind"] == "end"
    assert records[0]["config"]["dynmo"]["interval"] == 3
    reasons = [record["reason"] for record in records if record["kind"] == "rebalance"]
    assert "interval" in reasons and any("freezing" in reason for reason in reasons)
    assert any(record["kind"] == "measured" for record in records)
    assert records[-1]["steps"] == 8 and records[-1]["validation_loss"] > 0
    assert "tokens/s" in printed and "bubble ratio" in printed

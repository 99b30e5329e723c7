"""Runs on token ids: the same numbers whatever the stages and replicas, and after a resumption."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_dynmo.cli.train import build_engine
from ds_dynmo.cli.training.options import prepare
from ds_dynmo.errors import ConfigError
from tests.support.case_runs import SIZES
from tests.support.harness import run
from tests.support.script import run_script
from tests.support.training import whole

pytestmark = pytest.mark.ranks

STEPS = 4


def flags(folder: Path, replicas: int = 1, documents: str = "joined", data_seed: int = 0, **model: Any) -> list[str]:
    """Write documents of 2 to 20 tokens and a configuration with 4 micro-batches in a batch, and return flags."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(data_seed)
    rows = [{"input_ids": generator.integers(0, 250, generator.integers(2, 21)).tolist()} for _ in range(200)]
    for row in rows if documents != "joined" else ():  # half of each document is a prompt
        row["labels"] = [-100] * (len(row["input_ids"]) // 2) + row["input_ids"][len(row["input_ids"]) // 2 :]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // replicas,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "dynmo": {"interval": 2, "min_improvement": 0.0, "profile": {"batches": 1}},
        "model": {**SIZES, **model},
        "data": {"documents": documents, "cache": str(folder / "cache")},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    given = ["--deepspeed_config", str(folder / "config.json"), "--data", str(folder / "text.jsonl")]
    return [*given, "--steps", str(STEPS)]


def refused(folder: Path, changes: dict[str, Any]) -> str:
    """Start a run, with other token ids and settings on rank 1, and return its error."""
    rank = int(os.environ["RANK"])
    run = prepare(flags(folder / str(rank), **(changes if rank else {})))
    try:
        build_engine(run)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_other_data_or_settings_are_refused(tmp_path: Path) -> None:
    errors = run(2, refused, tmp_path, {"data_seed": 1, "seed": 3})
    assert errors[0] == errors[1]
    data = r"the data: \d+ tokens \(\w+\) on ranks \[0\], \d+ tokens \(\w+\) on ranks \[1\]"
    seed = r"model\.seed: 0 on ranks \[0\], 3 on ranks \[1\]"
    assert re.fullmatch(f"ranks were not given the same: {data}; {seed}", errors[0]), errors[0]


@pytest.mark.parametrize(
    ("documents", "sampling"),
    [
        ("packed", "random"),
        pytest.param("joined", "random", marks=pytest.mark.nightly),
        pytest.param("padded", "epochs", marks=pytest.mark.nightly),
    ],
)
def test_stages_and_replicas_change_no_batch(documents: str, sampling: str, tmp_path: Path) -> None:
    given = {"documents": documents, "sampling": sampling}
    alone = run(1, run_script, flags(tmp_path, **given))
    staged = run(2, run_script, flags(tmp_path, **given))
    assert staged[0]["losses"] == alone[0]["losses"] and whole(staged) == whole(alone)
    assert staged[0]["validation"] == alone[0]["validation"]
    replicated = run(2, run_script, [*flags(tmp_path, replicas=2, **given), "--stages", "1"])
    assert replicated[0]["losses"] == pytest.approx(alone[0]["losses"], rel=1e-5)
    expected = [loss for _, loss in alone[0]["validation"]]
    assert [loss for _, loss in replicated[0]["validation"]] == pytest.approx(expected, rel=1e-5)


def test_a_run_resumed_on_other_stages_goes_on_in_the_data(tmp_path: Path) -> None:
    arguments = flags(tmp_path, documents="padded")
    in_one_go = run(2, run_script, arguments)
    saving = [*arguments, "--save", str(tmp_path / "saved")]
    first = run(2, run_script, [*saving, "--stop-at", "3"])
    rest = run(1, run_script, [*arguments, "--resume", str(tmp_path / "saved")])
    assert first[0]["losses"] + rest[0]["losses"] == in_one_go[0]["losses"]
    assert whole(rest) == whole(in_one_go)

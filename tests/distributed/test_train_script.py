"""scripts/train.py stopped, or killed, and resumed: to the bit what it is in one go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.train_options import RESUME_FILE
from tests.distributed.case_workloads import CASES, SIZES
from tests.distributed.harness import run
from tests.distributed.test_bitwise import whole
from tests.distributed.train_script_workloads import run_script

STEPS = 8


@pytest.mark.parametrize(("name", "killed_in"), [("freezing and pruning", None), ("egeria", 7)])
def test_a_resumed_run_is_the_run_in_one_go(name: str, killed_in: int | None, tmp_path: Path) -> None:
    """Its schedule too, though it is not told the steps again; from the last checkpoint that is whole."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "dynmo": {"interval": 2, "min_improvement": 0.0, "profile": {"batches": 1}},
        "model": {**SIZES, **CASES[name]},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    common = ["--deepspeed_config", str(tmp_path / "config.json"), "--data", __file__]
    folder = tmp_path / "saved"
    steps, saving = ["--steps", str(STEPS)], ["--save", str(folder), "--save-interval", "3"]
    in_one_go = run(2, run_script, [*common, *steps])
    if killed_in is None:
        begun = run(2, run_script, [*common, *steps, *saving, "--stop-at", "4"])
        assert begun[0]["losses"] == in_one_go[0]["losses"][:4]
        (folder / "latest").write_text("global_step3")  # what counts is the checkpoint that the run's own file names
        done = 4
    else:
        run(2, run_script, [*common, *steps, *saving], killed_in)
        done = 6
    assert {path.name for path in folder.glob("global_step*")} == {"global_step3", f"global_step{done}"}
    assert json.loads((folder / RESUME_FILE).read_text())["step"] == done
    resumed = run(2, run_script, [*common, "--resume", str(folder)])
    assert resumed[0]["losses"] == in_one_go[0]["losses"][done:]
    assert resumed[0]["validation"] == [(step, loss) for step, loss in in_one_go[0]["validation"] if step > done]
    assert whole(resumed) == whole(in_one_go)

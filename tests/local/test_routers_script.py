"""scripts/routers.py: what it refuses, the loads that it counts, and their picture."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import routers
from ds_dynmo.cli import plot
from ds_dynmo.cli.plotting.routers import COLORS, loads_over_mean
from ds_dynmo.models.moe.expert_parallel import loads_of_replicas

SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "scheduler": {"params": {"warmup_num_steps": 2}},
    "model": {"layers": 3, "hidden_size": 16, "heads": 2, "sequence_length": 16},
}
SETTINGS["model"] |= {"tied_embedding": False, "moe": {"experts": 4}}


def written(folder: Path, **model: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**SETTINGS, "model": {**SETTINGS["model"], **model}}))
    return str(path)


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ({"moe": {"experts": 6}}, [], "model.moe.experts 6: should be a multiple of 4"),
        ({}, ["--steps", "0"], "--steps 0: should be at least 1"),
        ({"moe": None}, [], "model.moe: null: should be an object"),
        ({"tied_embedding": True}, [], "model.tied_embedding: true: should be false"),
        ({}, ["--show", "nowhere.json"], "nowhere.json: cannot be read"),
        ({}, ["--show", "ds_configs/gpt.json"], "gpt.json: is not of scripts/routers.py --json: it lacks routing"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: dict[str, Any], flags: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=message):
        routers.main(["--deepspeed_config", written(tmp_path, **model), *flags])


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_wait_for_the_busiest_in_every_micro_batch(replicas: int) -> None:
    counts = np.random.default_rng(0).integers(0, 9, (8, 3, 4))
    expected = [
        sum(max(loads_of_replicas(counts[at : at + replicas, layer].tolist())) for at in range(0, 8, replicas))
        for layer in range(3)
    ]
    assert routers.busiest(counts, replicas) == expected


@pytest.mark.parametrize("routing", ["none", "bias"])
def test_choices_of_a_run_are_written_shown_and_drawn(
    routing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "loads.json"
    config = written(tmp_path)
    assert routers.main(["--deepspeed_config", config, "--routing", routing, "--steps", "12", "--json", str(path)]) == 0
    figures = capsys.readouterr().out.partition(f"{config}: ")[2]  # of the run are those of its file
    found = json.loads(path.read_text())
    assert found["losses"][-1] < found["losses"][0]
    choices = np.array(found["choices"])
    assert choices.shape == (12, 3, 4) and (choices.sum(axis=2) == 4 * 16 * 2).all()  # micro-batches, tokens, top-2
    loads = loads_over_mean(found)
    assert list(loads) == ["expert", "of 2 replicas", "of 4 replicas"]
    assert all(values.shape == (12, 3) and (values >= 1).all() for values in loads.values())
    assert routers.main(["--show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"routing {routing}, 12 steps" in shown and shown == f"{path}: {figures}"
    files = [path, tmp_path / "longer.json"]
    for times, file in zip((2, 4), files):  # a point of the picture is the mean of 20 steps
        busiest = {count: loads * times for count, loads in found["busiest"].items()}
        file.write_text(json.dumps({**found, "choices": found["choices"] * times, "busiest": busiest}))
    plot.main(["--routers", *map(str, files), "--format", "svg", "--out", str(tmp_path / "pictures")])
    drawn = (tmp_path / "pictures" / "routers.svg").read_text()
    of_steps = Counter(re.findall(r">(\d+)</text>", drawn))
    assert len(of_steps) > 1 and set(of_steps.values()) == {2}  # both panels have the same scale
    assert all(len(re.findall(rf"stroke: {color}", drawn)) == 3 for color in COLORS.values())  # two layers, the legend

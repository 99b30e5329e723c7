"""What the measuring scripts refuse before ranks meet: one line, with the flag and its bound."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import migration
import real_model
import saving
import vocabulary
from benchmark import checked_load_models, parse
from ds_dynmo.errors import ConfigError
from schedules import check
from schedules import parse as parse_schedules
from tests.support.recordings import write_recording

TINY = ["--hidden-size", "8", "--vocab-size", "96", "--rounds", "1"]


@pytest.mark.parametrize(
    ("script", "ranks", "flags", "message"),
    [
        (migration, 2, ["--pairs", "0"], "--pairs 0: should be at least 1"),
        (migration, 2, ["--stage-parameters", "0"], r"--stage-parameters 0\.0: should be at least 0\.01 \(millions\)"),
        (migration, 2, ["--stage-parameters", "nan"], "--stage-parameters nan: should be at least"),
        (migration, 2, ["--layer-parameters", "0"], r"--layer-parameters 0\.0: should be at least 0\.01 \(millions\)"),
        (migration, 2, ["--activations", "-1"], r"--activations -1\.0: should be at least 0 \(millions\)"),
        (migration, None, [], "start with DeepSpeed's launcher: deepspeed --num_gpus 2 scripts/migration.py"),
        (saving, 2, ["--rounds", "0"], "--rounds 0: should be at least 1"),
        (saving, 2, ["--layer-parameters", "0"], r"--layer-parameters 0\.0: should be at least 0\.0001 \(millions\)"),
        (saving, 3, [], "two ranks are needed: deepspeed --num_gpus 2 scripts/saving.py"),
        (saving, None, [], "start with DeepSpeed's launcher: deepspeed --num_gpus 2 scripts/saving.py"),
        (real_model, None, ["model", "--data", "text"], "start with DeepSpeed's launcher"),
        (vocabulary, None, [*TINY, "--slices", "97"], "--slices 97: should be at most --vocab-size 96"),
        (vocabulary, None, [*TINY, "--tokens", "0"], "--tokens 0: should be at least 1"),
    ],
)
def test_bad_input_ends_a_script_with_one_line(
    script: ModuleType, ranks: int | None, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit, match=rf"^{script.__name__}\.py: error: {message}"):
        script.main(flags)


def test_sizes_that_make_no_pipeline_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recording = str(write_recording(tmp_path / "a.jsonl", [[1] * 6] * 9))
    too_few_for_v = ["--layers", "15", "--schedule", "1f1b", "--schedule", "v"]
    refused = [
        (["--layers", "7"], "--layers 7: should be at least the number of stages, 8"),
        (["--layers", "0"], "--layers 0: should be at least 1"),
        (["--rounds", "0"], "--rounds 0: should be at least 1"),
        (["--micro-batches", "0"], "--micro-batches 0: should be at least 1"),
        (["--recorded", recording], "a.jsonl: layers 6: should be at least the number of stages, 8"),
        (too_few_for_v, "--layers 15: should be at least 16, .* --schedule v"),
        (["--recorded", recording, "--layers", "9"], "--layers 9: .*a.jsonl is a recording of 6 layers"),
    ]
    monkeypatch.setenv("WORLD_SIZE", "8")
    for flags, message in refused:
        with pytest.raises(ConfigError, match=message):
            checked_load_models(parse(flags))
    of_schedules = [
        (["--layers", "7"], "--layers 7: should be at least the number of stages, 8"),
        (["--batches", "0"], "--batches 0: should be at least 1"),
        (["--pass-ms", "0"], "--pass-ms 0: should be above 0"),
        (["--back-to-back", "0"], "--back-to-back 0: should be at least 1"),
        (["--memory", "0.5"], "--memory 0.5: should be at least 1"),
        (["--arm", "auto"], "--arm auto: needs --compute real"),
    ]
    for flags, message in of_schedules:
        with pytest.raises(ConfigError, match=message):
            check(parse_schedules(flags))
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="start with DeepSpeed's launcher"):
        checked_load_models(parse([]))

"""scripts/compiled.py, migration.py and packing.py: what they refuse before the ranks meet."""

from __future__ import annotations

from types import ModuleType

import pytest

import compiled
import migration
import packing

TEXT = ["--data", __file__, "--model"]


@pytest.mark.parametrize(
    ("script", "flags", "ranks", "message"),
    [
        (compiled, ["gpt", "--pairs", "0"], 2, "--pairs 0: should be at least 1"),
        (compiled, ["gpt"], 3, "two ranks are needed: deepspeed --num_gpus 2 scripts/compiled.py"),
        (compiled, ["gpt"], None, "start with DeepSpeed's launcher: deepspeed --num_gpus 2 scripts/compiled.py"),
        (compiled, ["gpt", "--hidden-size", "66"], 2, r"model\.heads = 4: should divide hidden_size, 66"),
        (migration, ["--pairs", "0"], 2, "--pairs 0: should be at least 1"),
        (migration, ["--stage-parameters", "0"], 2, r"--stage-parameters 0\.0: should be at least 0\.01 \(millions\)"),
        (migration, ["--stage-parameters", "nan"], 2, "--stage-parameters nan: should be at least"),
        (migration, ["--layer-parameters", "0"], 2, r"--layer-parameters 0\.0: should be at least 0\.01 \(millions\)"),
        (migration, [], None, "start with DeepSpeed's launcher: deepspeed --num_gpus 2 scripts/migration.py"),
        (packing, [*TEXT, "nowhere"], 2, r"model\.huggingface: nowhere: there is no such folder"),
        (packing, [*TEXT, "nowhere", "--batches", "0"], 2, "--batches 0: should be at least 1"),
        (packing, [*TEXT, "nowhere"], None, "start with DeepSpeed's launcher: deepspeed --num_gpus 2 scripts/packing"),
    ],
)
def test_bad_input_ends_it_with_one_line(
    script: ModuleType, flags: list[str], ranks: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit, match=rf"^{script.__name__}\.py: error: {message}"):
        script.main(flags)

"""scripts/migration.py: what it refuses before the ranks meet."""

from __future__ import annotations

import pytest

import migration


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (["--pairs", "0"], 2, "--pairs 0: should be at least 1"),
        (["--stage-parameters", "0"], 2, r"--stage-parameters 0\.0: should be at least 0\.01 \(millions\)"),
        (["--stage-parameters", "nan"], 2, "--stage-parameters nan: should be at least"),
        (["--layer-parameters", "0"], 2, r"--layer-parameters 0\.0: should be at least 0\.01 \(millions\)"),
        (["--activations", "-1"], 2, r"--activations -1\.0: should be at least 0 \(millions\)"),
        ([], None, "start with DeepSpeed's launcher: deepspeed --num_gpus 2 scripts/migration.py"),
    ],
)
def test_bad_input_ends_it_with_one_line(
    flags: list[str], ranks: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit, match=rf"^migration\.py: error: {message}"):
        migration.main(flags)

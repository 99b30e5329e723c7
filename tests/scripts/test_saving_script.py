"""scripts/saving.py: what it refuses before the ranks meet."""

from __future__ import annotations

import pytest

import saving


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (["--rounds", "0"], 2, "--rounds 0: should be at least 1"),
        (["--layer-parameters", "0"], 2, r"--layer-parameters 0\.0: should be at least 0\.0001 \(millions\)"),
        ([], 3, "two ranks are needed: deepspeed --num_gpus 2 scripts/saving.py"),
        ([], None, "start with DeepSpeed's launcher: deepspeed --num_gpus 2 scripts/saving.py"),
    ],
)
def test_bad_input_ends_it_with_one_line(
    flags: list[str], ranks: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit, match=rf"^saving\.py: error: {message}"):
        saving.main(flags)

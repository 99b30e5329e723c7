"""scripts/split_passes.py: what it refuses, and the figures that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import split_passes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pairs", "1"], "--pairs 1: should be at least 2"),
        (["--batch", "0"], "--batch 0: should be at least 1"),
        (["--hidden-size", "6"], "hidden_size"),
    ],
)
def test_sizes_that_make_no_block_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        split_passes.main(flags)


@pytest.mark.parametrize("experts", [0, 4])
def test_both_parts_are_timed_beside_the_pass_in_one(experts: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    sizes = ["--hidden-size", "16", "--sequence-length", "8", "--pairs", "2", "--experts", str(experts)]
    split_passes.main([*sizes, "--json", str(path)])
    (row,) = json.loads(path.read_text())
    assert row["hidden_size"] == 16 and row["same_gradients"] and 0 < row["share_of_weights"] < 1
    dense = 4 * (3 + 3) * 8 * 16 * 4 // 4  # fp32: inputs and output gradients of two linear layers, 8 tokens
    assert row["held_bytes"] > dense // 4 and row["both_parts_over_backward"] > 0


def test_gradients_that_differ_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_passes.Passes, "_second_part", lambda self: self.gradients.second_part())
    with pytest.raises(SystemExit, match="gradients differ"):
        split_passes.main(["--hidden-size", "16", "--sequence-length", "8", "--pairs", "2"])

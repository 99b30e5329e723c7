"""scripts/vocabulary.py on tiny sizes: what it counts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vocabulary

TINY = ["--hidden-size", "8", "--vocab-size", "96", "--rounds", "1"]


@pytest.mark.parametrize("tied", [[], ["--untied"]])
def test_a_table_compares_slices_with_whole_matrices(
    tied: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    vocabulary.main([*TINY, *tied, "--tokens", "5", "40", "--slices", "1", "4", "--json", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| tokens | slices | head, ms | of whole | held, MiB |") and set(lines[1]) == set("| -")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[:2] for row in cells] == [[tokens, arm] for tokens in ("5", "40") for arm in ("whole", "1", "4")]
    assert [row[3] for row in cells if row[1] == "whole"] == ["1.00", "1.00"]
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        words, tokens = 96 * 4, row["tokens"]
        assert words * tokens <= row["head bytes"] <= 2 * words * tokens + 300 * tokens
        assert row["head seconds"] > 0 and row["embedding seconds"] > 0

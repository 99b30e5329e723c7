"""scripts/layers.py: sizes that it refuses."""

from __future__ import annotations

import pytest

import layers


def test_sizes_that_make_no_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SIZES", dict(layers.SIZES))
    with pytest.raises(SystemExit, match=r"^layers\.py: error: model\.heads = 4: should divide hidden_size, 66"):
        layers.main(["freezing", "--hidden-size", "66"])
